"""How a policy learns: one iteration, the loop, blocks of runs, checkpoints, and what a run gives back."""

"""Many runs: the grid, its parts on the disk, where they are computed, what they say."""

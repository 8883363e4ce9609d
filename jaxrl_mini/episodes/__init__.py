"""Episodes sampled from a policy, what they are rewarded with, and the private verifier."""

"""Exact and sampled agent-RL training loops in JAX."""

"""Policies: what maps an observation to probabilities of the six actions."""

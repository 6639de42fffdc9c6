"""Transports of `rollout.samplers`: how orders reach samplers in other processes, and reports come back."""

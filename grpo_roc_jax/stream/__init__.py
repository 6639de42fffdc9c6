"""Rollouts that run on from step to step, in this process or in samplers of their own."""

"""Rollouts: slots that decode while tools run, and the turns and observations on top of them."""

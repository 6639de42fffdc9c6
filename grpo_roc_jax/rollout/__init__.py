"""Rollouts: from requests to trajectories, with the turns and observations between."""

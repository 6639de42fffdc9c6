"""From finished trajectories to verdicts: answer extraction, comparison with the reference, custom rewards."""

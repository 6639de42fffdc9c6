"""From finished trajectories to verdicts: answer extraction, equivalence, custom rewards."""

"""What every process of a command does beside its work: lines on what takes long, points, an end that comes."""

"""What every process of a command does beside its work: lines on what takes long, points, files for results, an end
that comes."""

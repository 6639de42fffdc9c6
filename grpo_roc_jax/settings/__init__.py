"""What a configuration is made of: sections, kinds, constraints, and the layers they are read from."""

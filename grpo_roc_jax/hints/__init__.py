"""What to write instead: names that other projects give a setting, and the nearest known name."""

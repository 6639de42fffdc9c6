"""The GRPO family: small functions that compose into methods."""

"""Reinforcement learning for language models that think with a Python tool, in JAX.

The package is a line of values; a reader starts at `train.py` and meets the stages in the order they run.
Importing it touches no accelerator.
"""

__version__ = "0.1.0"

"""The Tinker API: training scripts of others against a model of one's own, over HTTP."""

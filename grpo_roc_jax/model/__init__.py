"""The policy model: pure functions over a pytree of parameters."""

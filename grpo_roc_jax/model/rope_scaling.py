"""Rescaling of the rotary frequencies, for texts longer than those a model was first trained on."""

import math
from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge

from grpo_roc_jax.settings.options import AtLeast1, Axis, Positive, kind
from grpo_roc_jax.shapes import Array, Float

Factor = Annotated[float, Ge(1)]


class RopeScaling(Axis, axis="model.rope_scaling"):
    """How the rotary frequencies are rescaled for long texts."""

    def rescaled(self, frequencies: Float[Array, " R"]) -> Float[Array, " R"]:
        """The frequencies that the model uses."""
        return frequencies


@kind("none")
class NoRopeScaling(RopeScaling):
    """The frequencies stay as they are."""


@kind("linear")
class LinearRopeScaling(RopeScaling):
    """All frequencies are divided by one factor."""

    factor: Factor
    """How much longer texts may get."""

    def rescaled(self, frequencies: Float[Array, " R"]) -> Float[Array, " R"]:
        return frequencies / self.factor


@kind("llama3")
class Llama3RopeScaling(RopeScaling):
    """Slow frequencies are divided by a factor and fast ones are kept, as published with Llama 3.1."""

    factor: Factor
    """How much longer texts may get."""
    low_freq: Positive = 1.0
    """Frequencies with fewer turns than this over `original_length` are divided by the factor."""
    high_freq: Positive = 4.0
    """Frequencies with more turns than this are kept. Those in between are interpolated."""
    original_length: AtLeast1 = 8192
    """Longest text before the extension, in tokens."""

    def __post_init__(self) -> None:
        if not self.low_freq < self.high_freq:
            raise ValueError(
                f"model.rope_scaling.low_freq = {self.low_freq}; must be below model.rope_scaling.high_freq = "
                f"{self.high_freq}"
            )

    def rescaled(self, frequencies: Float[Array, " R"]) -> Float[Array, " R"]:
        slow = frequencies / self.factor
        turns = self.original_length * frequencies / (2 * math.pi)
        fast_share = jnp.clip((turns - self.low_freq) / (self.high_freq - self.low_freq), min=0.0, max=1.0)
        return fast_share * frequencies + (1.0 - fast_share) * slow

"""Rescaling of the rotary frequencies, for texts longer than those a model was first trained on."""

import math
from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge, Len

from grpo_roc_jax.settings.options import AtLeast1, Axis, NotNegative, Positive, PositiveShare, kind
from grpo_roc_jax.shapes import Array, Float

Factor = Annotated[float, Ge(1)]


class RopeScaling(Axis, axis="model.rope_scaling"):
    """How the rotary frequencies are rescaled for long texts."""

    def rescaled(self, frequencies: Float[Array, " R"], theta: float) -> Float[Array, " R"]:
        """The frequencies that the model uses, from theta^(-i/R)."""
        return frequencies

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys."""
        return 1.0


@kind("none")
class NoRopeScaling(RopeScaling):
    """The frequencies stay as they are."""


@kind("linear")
class LinearRopeScaling(RopeScaling):
    """All frequencies are divided by one factor."""

    factor: Factor
    """How much longer texts may get."""

    def rescaled(self, frequencies: Float[Array, " R"], theta: float) -> Float[Array, " R"]:
        return frequencies / self.factor


@kind("proportional")
class ProportionalRopeScaling(RopeScaling):
    """The first frequencies are kept and the others are 0, so that a part of a head's columns is not rotated; columns
    are paired over the whole head (Gemma 4)."""

    share: PositiveShare = 1.0
    """Share of the frequencies that is kept."""
    factor: Factor = 1.0
    """They are divided by this number."""

    def rescaled(self, frequencies: Float[Array, " R"], theta: float) -> Float[Array, " R"]:
        R = len(frequencies)
        return jnp.where(jnp.arange(R) < int(self.share * 2 * R // 2), frequencies / self.factor, 0.0)


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
        if not self.low_freq <= self.high_freq:
            raise ValueError(
                f"model.rope_scaling.low_freq = {self.low_freq}; must be at most model.rope_scaling.high_freq = "
                f"{self.high_freq}"
            )

    def rescaled(self, frequencies: Float[Array, " R"], theta: float) -> Float[Array, " R"]:
        slow = frequencies / self.factor
        turns = self.original_length * frequencies / (2 * math.pi)
        between = self.high_freq - self.low_freq or 1e-6  # Llama 4 has a step
        fast_share = jnp.clip((turns - self.low_freq) / between, min=0.0, max=1.0)
        return fast_share * frequencies + (1.0 - fast_share) * slow


@kind("yarn")
class YarnRopeScaling(RopeScaling):
    """Slow frequencies are divided by a factor and fast ones are kept, with a ramp over columns between them; queries
    and keys grow with the factor (YaRN, arXiv:2309.00071)."""

    factor: Factor
    """How much longer texts may get."""
    original_length: AtLeast1
    """Longest text before the extension, in tokens."""
    beta_fast: Positive = 32.0
    """Turns over `original_length` from which on a frequency is kept."""
    beta_slow: Positive = 1.0
    """Turns over `original_length` up to which a frequency is divided by the factor."""
    truncate: bool = True
    """The ends of the ramp are rounded outwards to whole columns."""
    attention_factor: NotNegative = 0.0
    """Factor of rotated queries and keys; 0: 0.1 ln(factor) + 1."""

    def rescaled(self, frequencies: Float[Array, " R"], theta: float) -> Float[Array, " R"]:
        R = len(frequencies)
        turns = (self.beta_fast, self.beta_slow)
        low, high = (R * math.log(self.original_length / (n * 2 * math.pi)) / math.log(theta) for n in turns)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, 2 * R - 1)
        ramp = jnp.clip((jnp.arange(R) - low) / (high - low or 0.001), min=0.0, max=1.0)
        return ramp * frequencies / self.factor + (1.0 - ramp) * frequencies

    @property
    def magnitude(self) -> float:
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


@kind("longrope")
class LongRopeScaling(RopeScaling):
    """Each frequency is divided by a factor of its own, from one of two lists (LongRoPE, arXiv:2402.13753)."""

    short: Annotated[tuple[Positive, ...], Len(1)]
    """Factors of models that compute rows of at most `original_length` tokens."""
    long: Annotated[tuple[Positive, ...], Len(1)]
    """Factors for longer rows."""
    original_length: AtLeast1
    """Longest text before the extension, in tokens."""
    attention_factor: Positive = 1.0
    """Factor of rotated queries and keys."""
    extended: bool = False
    """Use `long`, for rows of any length. A run sets it if its rows may be longer than `original_length`."""

    def rescaled(self, frequencies: Float[Array, " R"], theta: float) -> Float[Array, " R"]:
        return frequencies / jnp.asarray(self.long if self.extended else self.short, jnp.float32)

    @property
    def magnitude(self) -> float:
        return self.attention_factor

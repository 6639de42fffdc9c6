"""What single rows ask of their draws: other truncation, biased tokens, penalties, a mask of tokens that may follow.

`RowSteering` is the host's side, one for each row that asks for something. `steering_arrays` writes those of all slots
as arrays, and `steer` applies them on the device to the logits that a token is drawn from. The recorded
log-probabilities stay those of the policy itself: the full softmax at the row's temperature of the logits before.

A batch mixes steered rows with others. What depends on the tokens before (a mask, penalties) is known one token ahead,
so a chunk in which such a row decodes has one step; truncation and biases leave chunks as they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import flax.struct
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.rollout.config import SamplingConfig
from grpo_roc_jax.shapes import Array, Float

EDITED = (32, 512, 8192)
"""Sizes of the lists of edited tokens, the smallest that holds the longest list of a row is used; beyond the last one,
the next power of two."""
WORD = 32
"""Tokens in an integer of a mask."""


class TokenMask(Protocol):
    """The tokens that may follow those of a row."""

    def allowed(self) -> np.ndarray:
        """uint32[W]: bit i of integer w stands for token 32 w + i. At least one bit is set."""

    def take(self, ids: Sequence[int]) -> None:
        """The row has drawn these tokens."""


@dataclass(frozen=True)
class DrawSettings:
    """How the tokens of one row are drawn; None for what the engine's settings say."""

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of tokens."""
    presence: float = 0.0
    """Subtracted from the logits of tokens that the row has drawn before."""
    frequency: float = 0.0
    """The same for each time."""
    repetition: float = 1.0
    """Positive logits of tokens of the prompt and of drawn ones are divided by it, negative ones multiplied."""

    @property
    def counts(self) -> bool:
        """Whether it depends on the tokens before."""
        return (self.presence, self.frequency, self.repetition) != (0, 0, 1)


class RowSteering:
    """What a row asks for, and what it has drawn."""

    def __init__(self, settings: DrawSettings, mask: TokenMask | None = None, prompt: Iterable[int] = ()):
        """`prompt`: its tokens, which `settings.repetition` counts."""
        self.settings, self.mask = settings, mask
        self._drawn: Counter[int] = Counter()
        self._prompt = set(map(int, prompt)) if settings.repetition != 1 else set()

    @property
    def one_step(self) -> bool:
        """Whether what may follow depends on each token."""
        return self.mask is not None or self.settings.counts

    def take(self, ids: Sequence[int]) -> None:
        """The row has drawn these tokens."""
        if self.settings.counts:
            self._drawn.update(ids)
        if self.mask is not None:
            self.mask.take(ids)

    def edits(self) -> dict[int, tuple[float, float, float]]:
        """By token: what is added to its logit, by what that is then divided or multiplied, what is then subtracted.

        The order is that of vLLM, whose fields these are.
        """
        settings, drawn = self.settings, self._drawn
        repeated = self._prompt | drawn.keys() if settings.repetition != 1 else ()
        return {
            token: (
                settings.bias.get(token, 0.0),
                settings.repetition if token in repeated else 1.0,
                settings.presence + settings.frequency * drawn[token] if token in drawn else 0.0,
            )
            for token in settings.bias.keys() | drawn.keys() | set(repeated)
        }


@flax.struct.dataclass
class Steering:
    """What the rows of a chunk ask for; B is the leading axis of all leaves but `steps`."""

    allowed: Array
    """uint32[B,W]: see `TokenMask.allowed`."""
    tokens: Array
    """int32[B,N]: tokens whose logits are edited; numbers beyond the vocabulary for none."""
    edits: Array
    """float32[B,3,N]: see `RowSteering.edits`."""
    limits: Array
    """float32[B,3]: top-k (0 for all), top-p, min-p."""
    steps: Array
    """int32[]: most steps of the chunk."""

    @property
    def per_row(self) -> tuple[Array, ...]:
        return self.allowed, self.tokens, self.edits, self.limits


def steering_arrays(
    rows: Mapping[int, RowSteering], slots: int, vocabulary: int, sampling: SamplingConfig, steps: int
) -> tuple[np.ndarray, ...]:
    """The fields of `Steering`, on the host.

    Args:
        rows: By slot.
        slots: B.
        vocabulary: Width of the logits.
        sampling: What slots without steering have.
        steps: Most steps of the chunk; it has one if a row depends on each token.
    """
    words = -(-vocabulary // WORD)
    allowed = np.full((slots, words), 0xFFFFFFFF, np.uint32)
    limits = np.tile(np.array([sampling.top_k, sampling.top_p, sampling.min_p], np.float32), (slots, 1))
    edits = {slot: found for slot, row in rows.items() if (found := row.edits())}
    most = max(map(len, edits.values()), default=0)
    N = next((n for n in EDITED if n >= most), 1 << (most - 1).bit_length())
    tokens, changes = np.full((slots, N), vocabulary, np.int32), np.zeros((slots, 3, N), np.float32)
    changes[:, 1] = 1.0
    for slot, row in rows.items():
        asked = (row.settings.top_k, row.settings.top_p, row.settings.min_p)
        limits[slot] = [old if new is None else new for new, old in zip(asked, limits[slot], strict=True)]
        if row.mask is not None:
            allowed[slot] = 0
            bits = row.mask.allowed()[:words]
            allowed[slot, : len(bits)] = bits
    for slot, found in edits.items():
        tokens[slot, : len(found)] = list(found)
        changes[slot, :, : len(found)] = np.array(list(found.values()), np.float32).T
    one_step = any(row.one_step for row in rows.values())
    return allowed, tokens, changes, limits, np.asarray(1 if one_step else steps, np.int32)


def steer(logits: Float[Array, "B V"], steering: Steering) -> Float[Array, "B V"]:
    """The logits to draw from: edited, and -inf for tokens that may not follow."""
    V = logits.shape[1]
    add, factor, subtract = (steering.edits[:, i] for i in range(3))
    old = jnp.take_along_axis(logits, jnp.minimum(steering.tokens, V - 1), axis=1) + add
    new = jnp.where(old > 0, old / factor, old * factor) - subtract
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, steering.tokens].set(new, mode="drop")
    shifts = jnp.arange(WORD, dtype=jnp.uint32).reshape(1, 1, WORD)
    bits = (steering.allowed[:, :, None] >> shifts) & 1
    return jnp.where(bits.reshape(logits.shape[0], -1)[:, :V] > 0, logits, -jnp.inf)

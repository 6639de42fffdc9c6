"""What single rows ask of their draws: other truncation, biased tokens, penalties, tokens that may not follow, a mask
of those that may; and what they ask to be reported, the most likely tokens at each draw.

`RowSteering` is the host's side, one for each row that asks for something. `steering_arrays` writes those of all slots
as arrays, and `steer` applies them on the device to the logits that a token is drawn from. The recorded
log-probabilities stay those of the policy itself: the full softmax at the row's temperature of the logits before.

A batch mixes steered rows with others. What depends on the tokens before (a mask, penalties, banned texts of several
tokens) is known one token ahead, so a chunk in which such a row decodes has one step, and one in which a row may not
end yet has no more steps than tokens it lacks; the rest leaves chunks as they are.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import flax.struct
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.shapes import Array, Float

EDITED = (32, 512, 8192)
"""Sizes of the lists of edited tokens, the smallest that holds the longest list of a row is used; beyond the last one,
the next power of two."""
WORD = 32
"""Tokens in an integer of a mask."""
TOP = 20
"""Most likely tokens that are reported where a row asks for some; one number, so that there is one program for it."""


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
    min_tokens: int = 0
    """Tokens that are drawn before one of `ends` may be."""
    ends: frozenset[int] = frozenset()
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not drawn."""
    top: int = 0
    """How many of the most likely tokens are reported at each position; at most `TOP`."""

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
        self._count = 0
        self._last: list[int] = []
        """The tokens that a banned sequence may have begun with."""
        self._reach = max(map(len, settings.banned), default=1) - 1
        self.top: list[tuple[np.ndarray, np.ndarray]] = []
        """(ids, log-probabilities) of the most likely tokens at each drawn one, with `settings.top`."""

    @property
    def most_steps(self) -> int | None:
        """How many tokens may be drawn before this is asked again; None for any number."""
        if self.mask is not None or self.settings.counts or self._reach:
            return 1
        return max(0, self.settings.min_tokens - self._count) or None

    def take(self, ids: Sequence[int], top: Sequence[tuple[np.ndarray, np.ndarray]] = ()) -> None:
        """The row has drawn these tokens, and these were the most likely ones at each."""
        self._count += len(ids)
        if self._reach:
            self._last = [*self._last, *ids][-self._reach :]
        if self.settings.top:
            self.top += [(tokens[: self.settings.top], values[: self.settings.top]) for tokens, values in top]
        if self.settings.counts:
            self._drawn.update(ids)
        if self.mask is not None:
            self.mask.take(ids)

    def forbidden(self) -> set[int]:
        """Tokens that may not follow."""
        tokens = set(self.settings.ends) if self._count < self.settings.min_tokens else set()
        for *before, last in self.settings.banned:
            if not before or self._last[-len(before) :] == before:
                tokens.add(last)
        return tokens

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
    places: Array
    """int32[B,K]: 0 to K - 1; the K most likely tokens are reported."""
    steps: Array
    """int32[]: most steps of the chunk."""

    @property
    def per_row(self) -> tuple[Array, ...]:
        return self.allowed, self.tokens, self.edits, self.limits, self.places


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

    A row that may draw nothing at all otherwise may draw what `RowSteering.forbidden` names.
    """
    words = -(-vocabulary // WORD)
    allowed = np.full((slots, words), 0xFFFFFFFF, np.uint32)
    limits = np.tile(np.array([sampling.top_k, sampling.top_p, sampling.min_p], np.float32), (slots, 1))
    edits = {slot: edited for slot, row in rows.items() if (edited := row.edits())}
    most = max(map(len, edits.values()), default=0)
    N = next((n for n in EDITED if n >= most), 1 << (most - 1).bit_length())
    tokens, changes = np.full((slots, N), vocabulary, np.int32), np.zeros((slots, 3, N), np.float32)
    changes[:, 1] = 1.0
    for slot, row in rows.items():
        truncation = (row.settings.top_k, row.settings.top_p, row.settings.min_p)
        limits[slot] = [old if new is None else new for new, old in zip(truncation, limits[slot], strict=True)]
        if row.mask is not None:
            allowed[slot] = 0
            bits = row.mask.allowed()[:words]
            allowed[slot, : len(bits)] = bits
        if forbidden := row.forbidden():
            bits = allowed[slot].copy()
            for token in forbidden:
                bits[token // WORD] &= ~np.uint32(1 << token % WORD)
            allowed[slot] = bits if bits.any() else allowed[slot]
    for slot, edited in edits.items():
        tokens[slot, : len(edited)] = list(edited)
        changes[slot, :, : len(edited)] = np.array(list(edited.values()), np.float32).T
    K = TOP if any(row.settings.top for row in rows.values()) else 0
    places = np.tile(np.arange(min(K, vocabulary), dtype=np.int32), (slots, 1))
    most_steps = min(steps, *(row.most_steps or steps for row in rows.values()))
    return allowed, tokens, changes, limits, places, np.asarray(most_steps, np.int32)


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

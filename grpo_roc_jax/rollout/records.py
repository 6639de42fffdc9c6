"""What goes into the engine and comes out of it: requests, turns, answers of the environment, rollouts, statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np

from grpo_roc_jax.types import Metrics, StopReason

TurnReason = Literal["stop", "length", "turn_length"]
"""A stop id or stop text; the trajectory's budget; the limit of one turn."""


@dataclass(frozen=True, eq=False)
class TurnEnd:
    """One turn as sampled: tokens[start : start + len(tokens)] of the row."""

    request: int
    start: int
    tokens: np.ndarray
    """int32: ids drawn this turn, the stop id included."""
    logprobs: np.ndarray
    """float32, nats."""
    reason: TurnReason


@dataclass(frozen=True)
class Finish:
    """The trajectory is over."""

    stop: StopReason


@dataclass(frozen=True)
class Wait:
    """Calls were submitted; the answer comes from `Environment.poll`."""


@dataclass(frozen=True, eq=False)
class Observe:
    """Token ids to append to the row before it decodes on."""

    ids: np.ndarray


class Environment(Protocol):
    """Decides what happens after a turn; called on the thread that runs the engine."""

    def turn_ended(self, index: int, turn: TurnEnd) -> Finish | Wait:
        """Called as soon as a row stops. A turn of reason `length` ends the row with stop `length` whatever is
        returned; no call may be submitted for it."""

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        """Answers that are there, waiting at most `timeout_s` for the first; each row answers once a turn."""

    def cancelled(self, index: int) -> None:
        """The engine ended the row itself (deadline, overflow, early exit): stop its calls, drop their answers."""

    def find_stop(self, index: int, new_tokens: np.ndarray, before: np.ndarray) -> int | None:
        """How many of the ids drawn since the last look to keep, 1 at least, when a stop text ends among them.

        `before` holds the ids of the same turn that were there already: a text of several ids can straddle two looks.
        """


class SingleTurn:
    """The environment without tools: the first turn is the whole answer (evaluation, chat, the difficulty filter)."""

    find_stop = None

    def turn_ended(self, index: int, turn: TurnEnd) -> Finish | Wait:
        return Finish("eos" if turn.reason == "stop" else "length")

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        return []

    def cancelled(self, index: int) -> None:
        return None


@dataclass(frozen=True, eq=False)
class Rollout:
    """One row as it ended; index t of every array speaks of tokens[t]."""

    tokens: np.ndarray
    """int32[T]: prompt, sampled tokens and observations."""
    policy_mask: np.ndarray
    """bool[T]: drawn from the policy."""
    logprobs: np.ndarray
    """float32[T]: full softmax at the sampling temperature, nats; 0 off the mask."""
    versions: np.ndarray
    """int32[T]: version of the parameters that drew the token; -1 off the mask."""
    mass: np.ndarray | None
    """float32[T]: probability that survived top-k, top-p or min-p, 1 off the mask; None when nothing is cut."""
    prompt_length: int
    turns: tuple[tuple[int, int], ...]
    """(start, end) of each turn's sampled tokens."""
    stop: StopReason
    seconds: float
    """From admission to the end; 0 for a row that was never admitted."""
    waiting: bool = False
    """Cut while its last turn waited for an observation; `resume` asks the environment again."""


@dataclass(frozen=True, eq=False)
class Request:
    """One rollout wanted."""

    key: tuple[int, int, int]
    """(step, problem, sample): randomness derives from these, the engine's seed and the position, nothing else."""
    prompt: np.ndarray
    """int32[P], P >= 1."""
    group: int
    """Requests of equal group have the same prompt, which is written once and copied to the others."""
    budget: int
    """Tokens allowed after the prompt, observations included."""
    temperature: float | None = None
    """Instead of `sampling.temperature`."""
    expected: int = 0
    """Expected length after the prompt, for `admission = longest` and for the balance between devices."""
    resume: Rollout | None = None
    """An earlier rollout of this request, cut short, to go on from; its tokens keep their versions."""


@dataclass
class RolloutStats:
    """Counts of one `Engine.run`."""

    requests: int = 0
    sampled_tokens: int = 0
    observation_tokens: int = 0
    prefilled_tokens: int = 0
    """Written by `append`, padding excluded: each prompt once, each observation once."""
    padded_tokens: int = 0
    """The same with padding."""
    appends: int = 0
    forks: int = 0
    """Rows whose prompt was copied from a sibling."""
    reused: int = 0
    """Rows that took a slot where their prompt still was."""
    prompts: int = 0
    """Prompts written; more than the groups only when a group had to spread over devices."""
    chunks: int = 0
    steps: int = 0
    """Decode steps; the mean over devices."""
    slot_steps: int = 0
    """Rows computed in them, idle ones included."""
    dropped_tokens: int = 0
    """Drawn beyond a stop text or for a row given up meanwhile."""
    compilations: int = 0
    resizes: int = 0
    capacity: int = 0
    """Largest cache used, columns."""
    reserved_peak: int = 0
    """Largest sum of reservations, tokens."""
    seconds: float = 0.0
    decode_s: float = 0.0
    """Dispatching chunks and waiting for their reports."""
    append_s: float = 0.0
    """Dispatching appends and forks; the work itself overlaps and is waited for in `decode_s`."""
    environment_s: float = 0.0
    """In the environment's own code: parsing turns, submitting calls."""
    tool_wait_s: float = 0.0
    """Blocked on tools with nothing to decode."""
    stops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(StopReason), 0))
    shard_tokens: tuple[int, ...] = ()
    """Sampled tokens by data shard."""

    @property
    def slot_use(self) -> float:
        """Share of the computed rows that gave a token."""
        return self.sampled_tokens / self.slot_steps if self.slot_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of wall clock."""
        return self.sampled_tokens / self.seconds if self.seconds else 0.0

    def metrics(self) -> Metrics:
        """The figures a training step logs; the `stop_` shares sum to 1."""
        total = max(1, sum(self.stops.values()))
        shares: Mapping[str, float] = {f"rollout/stop_{name}": count / total for name, count in self.stops.items()}
        return {
            "rollout/sampled_tokens": float(self.sampled_tokens),
            "rollout/observation_tokens": float(self.observation_tokens),
            "rollout/prefilled_tokens": float(self.prefilled_tokens),
            "rollout/tokens_per_s": self.tokens_per_s,
            "rollout/slot_use": self.slot_use,
            "rollout/compilations": float(self.compilations),
            "rollout/capacity": float(self.capacity),
            "time/rollout_s": self.seconds,
            "time/decode_s": self.decode_s,
            "time/environment_s": self.environment_s,
            "time/tool_wait_s": self.tool_wait_s,
            **shares,
        }

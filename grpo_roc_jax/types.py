"""The host values that pass between stages; no behavior beyond properties.

Values that enter `jit` are defined next to the functions that make them (`pack.TrainBatch`, `update.TrainState`,
`model.pool.BlockPool`). One alignment holds everywhere: index t of a per-token array refers to `tokens[t]`, so
`logprobs[t]` is log p(tokens[t] | tokens[:t]).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from grpo_roc_jax import checks
from grpo_roc_jax.sandbox.result import ToolResult

StopReason = Literal["answer", "eos", "length", "turns", "deadline", "failed", "infrastructure", "cancelled"]
"""Why a trajectory ended: a complete answer, or an environment that ended it; end of turn without a call; token budget;
turn limit; a wall-clock deadline that the policy's own tool use ran into; an environment or an agent that failed
because of what the policy said, which scores 0; an infrastructure failure; cancelled because its group needed no
more."""

TRUNCATED_STOPS: frozenset[str] = frozenset({"length", "turns", "deadline"})
"""Stops that count as truncation: kept in the group with reward 0 (GRPO-RoC, arXiv:2508.20722, sec. 4.3.1)."""

VerdictStatus = Literal[
    "correct", "wrong", "no_answer", "unparseable", "truncated", "timeout", "crash", "infrastructure"
]
"""What the verifier decided. `infrastructure` leaves the group: it is never a reward of 0."""


@dataclass(frozen=True)
class Problem:
    """One task: what is asked and the reference answer."""

    uid: str
    """Unique and stable; randomness of a trajectory derives from it."""
    prompt: str
    answer: str
    source: str
    """Name of the data set or world; metrics are reported by source."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row (hints, solutions, levels), for methods that use them. A row of a table can have null
    in any of them, which `column` and `listed` read as no value."""

    def __post_init__(self) -> None:
        for name in ("uid", "prompt", "answer", "source"):
            checks.expect(getattr(self, name), str, f"Problem.{name}", "text, such as '12'")
        checks.expect(self.extra, Mapping, "Problem.extra", "a mapping, such as {'level': 3}, or left out")

    def column(self, name: str, default: Any = None) -> Any:
        """The value of a further column; the default if the row has none."""
        value = self.extra.get(name)
        return default if value is None else value

    def listed(self, name: str) -> list[Any]:
        """The values of a further column that holds a list; a single text is a list of one."""
        value = self.column(name, ())
        return [value] if isinstance(value, str) else list(value)

    def copied(self) -> "Problem":
        """The problem with copies of its further columns; a value that cannot be copied is shared."""
        return replace(self, extra={name: _copied(value) for name, value in self.extra.items()})


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


@dataclass(frozen=True)
class ToolCall:
    """A call as parsed from policy text."""

    name: str
    arguments: Mapping[str, Any]
    raw: str
    """The text between the call's tags, as sampled."""
    fault: Literal["malformed_call"] | None = None
    """Set if the text is not a valid call; such a call is answered without being run."""
    message: str = ""
    """What is wrong with it, as text for the policy; empty if nothing is."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn: tokens[start:end] were sampled; the observation follows it."""

    start: int
    end: int
    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    """Of the first calls, in their order; fewer, or none, if the trajectory ended before all calls had run."""
    reply: str = ""
    """What an environment answered in addition to the results of calls, such as a message of a user."""
    reward: float = 0.0
    """Reward of an environment for this turn."""


@dataclass(frozen=True)
class ConditionTraits:
    """What a method declares about rollouts under its own condition, for stages that do not know the method."""

    attempt: bool = True
    """Whether these rollouts try to solve the problem. Others, such as written hints, are left out of statistics."""
    helped: bool = False
    """Whether a success under it leaves open if the problem can be solved without help."""
    moves: bool = False
    """Whether such a response can train under the plain prompt of its problem."""
    optional: bool = False
    """Whether a first wave leaves it out if the extended prompt is too long."""


CONDITIONS: dict[str, ConditionTraits] = {"": ConditionTraits()}
"""Traits that methods declared for their conditions, by kind; see `condition_kind`."""


def condition_kind(name: str, **about: bool) -> str:
    """Declares a condition and returns its name. `about` are its traits, fields of `ConditionTraits`, which all stages
    read.

    Raises:
        ValueError: Another method has declared other traits for a condition of this name.
    """
    traits = ConditionTraits(**about)
    if CONDITIONS.setdefault(name, traits) != traits:
        raise ValueError(f"condition {name!r} is {CONDITIONS[name]} already, not {traits}; choose another name")
    return name


def traits_of(name: str) -> ConditionTraits:
    """The traits of a condition; the defaults for one that no method declared, as in records of another version."""
    return CONDITIONS.get(name, CONDITIONS[""])


@dataclass(frozen=True)
class Condition:
    """How a prompt was extended: a label of the method that did it; false for the plain prompt. Its text, such as
    `hint:2`, is stored in traces and checkpoints."""

    kind: str = ""
    level: int = 0
    """Level of a hint, from 1; 0 for conditions without levels."""

    def __bool__(self) -> bool:
        return bool(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}:{self.level}" if self.level else self.kind

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Inverse of `str`."""
        kind, _, level = text.partition(":")
        return cls(kind, int(level)) if level.isdigit() else cls(text)


PLAIN = Condition()
"""The condition of a prompt without additions."""


ARRAYS: dict[str, type] = {
    "tokens": np.int32,
    "policy_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "routes": np.int16,
}
"""The arrays of a trajectory, with their dtypes."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The record of one rollout. Only the token ids are authoritative; text is decoded from them and never re-encoded.

    Its arrays are read-only, also for user functions: what is trained on is what was sampled. `dataclasses.replace`
    makes a trajectory with other arrays. Lists, and arrays of other types, become arrays of the types named here.
    """

    tokens: np.ndarray
    """int32[T]: prompt, then sampled tokens and observations in the order they were in the context."""
    policy_mask: np.ndarray
    """bool[T]: True exactly on tokens drawn from the policy."""
    logprobs: np.ndarray
    """float32[T], nats: full-softmax log-probability at the sampling temperature; 0 off the mask."""
    versions: np.ndarray
    """int32[T]: training step of the parameters that drew the token; -1 off the mask."""
    prompt_length: int
    turns: tuple[Turn, ...]
    stop: StopReason
    sample: int
    """Index among the rollouts of its problem in this step; randomness derives from it."""
    seconds: float = 0.0
    """Wall-clock time from admission to the end."""
    condition: Condition = PLAIN
    """What the prompt was extended with."""
    temperature: float | None = None
    """Sampling temperature, by which the update divides the logits; None, as in older records, means that
    of the step."""
    routes: np.ndarray | None = None
    """int16[T,L,X]: experts that the sampler chose for each token in each layer, -1 where it recorded none. None in
    traces, and without `model.experts.replay`."""
    reward: float | None = None
    """Total reward of an environment, for turns and at the end; None without an environment, or if it
    could not decide."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that an environment or an agent gave, by name; `reward.functions` may pay each of them."""
    parts: tuple[int, ...] = ()
    """Lengths of the contexts that `tokens` contains one after another, such as the conversations of an agent and of
    those that it calls; empty for a single context."""
    fault: str = ""
    """What failed outside the policy, on one line, such as an exception of a user's environment. Its traceback follows
    in the first trajectory that ended by it."""
    opening: str = ""
    """What an environment appended to the problem's text in the prompt."""

    def __post_init__(self) -> None:
        checks.check_choice("Trajectory.stop", self.stop, StopReason)
        checks.expect(self.condition, Condition, "Trajectory.condition", "a Condition, such as Condition('hint', 2)")
        checks.set_arrays(self, ARRAYS, ("routes",), frozen=True)
        checks.check_count("Trajectory.prompt_length", self.prompt_length, 0, self.length)
        checks.check_parts("Trajectory.parts", self.parts, self.length)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrays that come from another process are writable until they are restored here."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def truncated(self) -> bool:
        return self.stop in TRUNCATED_STOPS

    @property
    def results(self) -> tuple[ToolResult, ...]:
        return tuple(result for turn in self.turns for result in turn.results)


@dataclass(frozen=True)
class RolloutRequest:
    """`count` rollouts of one problem under one prompt, which is prefilled once and shared by them.

    The planner emits requests, `rollout.sampler.render` adds the token ids of the prompt, the engine rolls them out.
    """

    problem: Problem
    place: int
    """Index of the problem in this step; part of the random key."""
    count: int = 1
    first_sample: int = 0
    """Samples `first_sample` to `first_sample + count - 1` of the problem; part of the random key."""
    condition: Condition = PLAIN
    suffix: str = ""
    """Text appended to the user message (a hint, a reward token)."""
    temperature: float | None = None
    """Replaces `sampling.temperature`."""
    prefix: tuple[int, ...] = ()
    """Ids that the first turn begins with; they are off the policy mask and count against the budget."""
    prefix_text: str = ""
    """Text that follows `prefix`; `render` turns it into ids of the prefix."""
    resume: Trajectory | None = None
    """A rollout cut short in an earlier step, to be continued; prompt and prefix are taken from it."""
    step: int | None = None
    """Step that the resumed rollout began in: its random keys and tool seeds continue from there. None: this step."""
    budget: int | None = None
    """Tokens allowed after the prompt, observations included; None takes `rollout.max_response_tokens`."""
    prompt: np.ndarray | None = field(default=None, compare=False)
    """int32[P], P >= 1; None until rendered."""

    @property
    def samples(self) -> range:
        return range(self.first_sample, self.first_sample + self.count)

    @property
    def begun(self) -> int:
        """Number of response tokens that exist before anything is sampled."""
        return len(self.prefix) if self.resume is None else self.resume.length - self.resume.prompt_length


@dataclass(frozen=True)
class Verdict:
    """The outcome of scoring one trajectory."""

    reward: float
    status: VerdictStatus
    answer: str | None
    tool_calls: int
    """Number of calls that count: infrastructure failures are excluded."""
    tool_errors: int
    answers: int
    """Number of complete `<answer>` blocks among the policy's own tokens."""
    well_formed: bool
    """Whether opening, closing and paired answer tags agree in number."""
    turns: int
    channels: Mapping[str, float | None] = field(default_factory=dict)
    """Reward channels by name, for multi-reward methods; None where a function does not apply. Empty with a single
    function."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn from functions that give rewards by turn, as part of `reward`; empty without
    such a function."""

    def __post_init__(self) -> None:
        checks.check_choice("Verdict.status", self.status, VerdictStatus)
        checks.check_number("Verdict.reward", self.reward)
        object.__setattr__(self, "turn_rewards", tuple(self.turn_rewards))
        for turn, reward in enumerate(self.turn_rewards):
            checks.check_number(f"Verdict.turn_rewards[{turn}]", reward)


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of one problem: oversampled before `resample`, of the training size after."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        checks.check_group(self)

    @property
    def size(self) -> int:
        return len(self.trajectories)

    @property
    def pairs(self) -> list[tuple[Trajectory, Verdict]]:
        return list(zip(self.trajectories, self.verdicts, strict=True))

    @property
    def rewards(self) -> np.ndarray:
        """float64[N]."""
        return np.array([verdict.reward for verdict in self.verdicts], dtype=np.float64)

    @property
    def correct(self) -> np.ndarray:
        """bool[N]: whether the goal was reached. This is not the sign of the reward, which may include format or clean
        calls."""
        return np.array([verdict.status == "correct" for verdict in self.verdicts], dtype=bool)


@dataclass(frozen=True, eq=False)
class TrainRow:
    """One trajectory as the update sees it: arrays of its length, with index t referring to `tokens[t]`. Lists, and
    arrays of other types, become arrays of the types named here."""

    tokens: np.ndarray
    """int32[T]: prompt, sampled tokens, observations."""
    policy_mask: np.ndarray
    """bool[T]: the tokens that are trained on."""
    logprobs_old: np.ndarray
    """float32[T]: log-probabilities that the importance ratio is taken against; read on the mask only."""
    advantages: np.ndarray
    """float32[T]: read on the mask only."""
    weights: np.ndarray
    """float32[T], >= 0: token weight times the normalizer of the whole optimizer batch; read on the mask only."""
    ratio_segments: np.ndarray
    """int32[T], 0..T-1: tokens of this trajectory with the same number share an importance ratio."""
    logprobs_ref: np.ndarray
    """float32[T]: under the reference policy; zeros where no KL term is used."""
    temperature: float | None = None
    """See `Trajectory.temperature`."""
    marked: np.ndarray | None = None
    """bool[T]: tokens that the surrogate treats differently; None for surrogates that treat all tokens alike."""
    entropy_coefficient: float | None = None
    """Weight of the policy's entropy, which the loss rewards; None in a method without such a bonus."""
    routes: np.ndarray | None = None
    """See `Trajectory.routes`."""
    parts: tuple[int, ...] = ()
    """See `Trajectory.parts`. Positions restart with each part, and no part attends to another."""
    scored: tuple[np.ndarray, np.ndarray] | None = None
    """float32[T] twice: log-probabilities and entropies, in nats, under the parameters about to be updated. For the
    log; None without a scoring pass."""

    def __post_init__(self) -> None:
        checks.set_arrays(self, TRAIN_ROW_FIELDS | {"marked": np.bool_, "routes": np.int16}, ("marked", "routes"))
        if not self.length:
            raise ValueError("a training row has no tokens; leave empty trajectories out of the group")
        checks.check_parts("TrainRow.parts", self.parts, self.length)
        checks.check_range("TrainRow.ratio_segments", self.ratio_segments, 0, self.length - 1)
        # What is not finite, as of a policy that diverged, passes: the update is skipped.
        checks.check_no_negative("TrainRow.weights", self.weights, self.policy_mask)
        begins = np.cumsum((0, *self.parts[:-1]))
        if (self.policy_mask[begins] & (self.weights[begins] != 0)).any():
            raise ValueError("TrainRow.policy_mask holds a first token, which has no log-probability; mask the prompt")

    @property
    def length(self) -> int:
        return len(self.tokens)


TRAIN_ROW_FIELDS: dict[str, type] = {
    "tokens": np.int32,
    "policy_mask": np.bool_,
    "logprobs_old": np.float32,
    "advantages": np.float32,
    "weights": np.float32,
    "ratio_segments": np.int32,
    "logprobs_ref": np.float32,
}
"""The per-token fields that a `TrainRow` and a `TrainBatch` share, with their dtypes."""


Metrics = dict[str, float]
"""Named stage/what, such as `loss/clip_fraction`, `rollout/tool_error_rate`, `time/rollout_s`."""

"""What an engine run exchanges with its caller: its options, turns and the answers to them, statistics, and the display
of its progress.

The display is a bar on terminals; elsewhere, so that log files hold no control codes or partial lines, there are whole
lines (`process.progress`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Literal, Protocol, get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpo_roc_jax.checks import check_choice
from grpo_roc_jax.engine.steering import RowSteering
from grpo_roc_jax.process.progress import Phase, phase
from grpo_roc_jax.types import Metrics, StopReason, Trajectory

REFRESH_S = 0.2
"""Time between redraws; an update in between only reads the clock."""


class RolloutLines:
    """Lines for `RunOptions.progress`, where no bar is drawn: a phase from the first update until the last row is done.

    Args:
        name: The name of the phase.
    """

    def __init__(self, name: str = "rollouts"):
        self._name, self._phase, self._open = name, Phase(name), ExitStack()
        self._first = 0

    def update(self, *, live: int, waiting: int, done: int, total: int, tokens: int) -> None:
        """The engine's counts after a round."""
        if total != self._phase.steps or done < self._phase.done:
            self._open.close()  # an exception ended the previous run
            begun = phase(self._name, steps=total, routine=True, unit="rollout", together=True)
            self._phase, self._first = self._open.enter_context(begun), tokens
        rate = (tokens - self._first) / max(self._phase.clock() - self._phase.started, REFRESH_S)
        on_tools = f", {waiting} on tools" if waiting else ""
        self._phase.at(done, f"{live} live{on_tools}, {rate:,.0f} tokens/s")
        if done >= total:
            self.close()

    def close(self) -> None:
        """Ends the phase, if rollouts were given up."""
        self._open.close()
        self._phase = Phase(self._name)


class RolloutProgress:
    """A line among other bars, for `RunOptions.progress`; shown from the first update until the last row is done."""

    def __init__(self, bars: Progress):
        self._bars = bars  # its columns show the description, the bar and the field `status`
        self._task: TaskID | None = None
        self._total = self._done = self._first = 0
        self._started = self._drawn = 0.0

    def update(self, *, live: int, waiting: int, done: int, total: int, tokens: int) -> None:
        """The engine's counts after a round."""
        now = time.perf_counter()
        if self._task is not None and (total != self._total or done < self._done):
            self._end()  # an exception ended the previous run
        if self._task is None:
            # The rate counts from here, without compilations and prompts.
            self._started, self._first, self._drawn = now, tokens, 0.0
            self._task = self._bars.add_task("rollouts", total=total, status="")
            self._bars.start()
        self._total, self._done = total, done
        if done >= total:
            self._end()
        elif now - self._drawn >= REFRESH_S:
            self._drawn = now
            rate = (tokens - self._first) / max(now - self._started, REFRESH_S)
            status = f"{live} live · {waiting} on tools · {rate:,.0f} tok/s"
            self._bars.update(self._task, completed=done, status=status)
            self._bars.refresh()

    def _end(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.refresh()
            self._task = None


@contextmanager
def rollout_display(mode: str, console: Console | None = None) -> Iterator[RolloutProgress | RolloutLines]:
    """A display on standard error for commands without a training bar; lines of the narrator where no bar is drawn.

    Args:
        mode: `log.console`: `auto` and `live` draw on a terminal, `plain` and `off` never draw.
        console: Used instead of standard error.
    """
    console = console or Console(stderr=True, force_jupyter=False)
    if mode not in ("auto", "live") or not console.is_terminal:
        yield RolloutLines()
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    )
    try:
        yield RolloutProgress(bars)
    finally:
        bars.stop()


Purpose = Literal["train", "evaluate", "chat"]
"""What rollouts are sampled for. Evaluation draws from random streams of its own; only training rollouts are cut by
`rollout.step_limit` and `rollout.early_exit`."""

CancelPolicy = Callable[[int, Trajectory], Iterable[int]]
"""(row, its trajectory), called as each row ends -> rows that are no longer needed and are cancelled."""

EVALUATION_KEYS = 1 << 30
"""Added to the step in the random keys of evaluation, so that they differ from those of every training step."""


@dataclass(frozen=True, eq=False)
class RunOptions:
    """What one engine run is for, and what follows its rows."""

    step: int = 0
    """Training step; the seed of the dialogue for `chat`."""
    purpose: Purpose = "train"
    """`train`, `evaluate` or `chat`; determines the random streams, and which rollouts may be cut."""
    progress: RolloutProgress | RolloutLines | None = None
    """Display; None draws nothing."""
    cancel_policy: CancelPolicy | None = None
    """Consulted under `rollout.early_exit`."""
    before_chunk: Callable[[], None] | None = None
    """Called before every chunk; what it raises ends the rollouts."""
    keep_cache: bool = False
    """The tokens of a row that ends stay in the cache while there is room, so that prompts that begin with them are
    not written again. Prompts are found in any case."""

    def __post_init__(self) -> None:
        check_choice("RunOptions.purpose", self.purpose, Purpose)

    @property
    def key_step(self) -> int:
        """The step as random keys and the seeds of tools hold it."""
        return self.step + (EVALUATION_KEYS if self.purpose == "evaluate" else 0)


TurnReason = Literal["stop", "length", "turn_length"]
"""Why a turn ended: a stop id or stop text; the token budget of its trajectory; the token limit of one turn."""


@dataclass(frozen=True, eq=False)
class TurnEnd:
    """One turn as sampled: tokens[start : start + len(tokens)] of the row."""

    row: int
    start: int
    tokens: np.ndarray
    """int32: ids of this turn, the stop id included."""
    logprobs: np.ndarray
    """float32, nats."""
    reason: TurnReason


@dataclass(frozen=True)
class FailureCount:
    """Rollouts that ended by failures of one kind."""

    text: str
    """The first of them, on one line."""
    count: int = 1
    by_policy: bool = False
    same: bool = True
    """All of them have that text."""

    def __add__(self, other: "FailureCount") -> "FailureCount":
        same = self.same and other.same and self.text == other.text
        return replace(self, count=self.count + other.count, same=same)


@dataclass(frozen=True)
class Finish:
    """The trajectory is over."""

    stop: StopReason


@dataclass(frozen=True)
class Wait:
    """Calls were submitted; the answer comes from `RowEnvironment.poll`."""


@dataclass(frozen=True, eq=False)
class Observe:
    """Token ids to append to the row before decoding continues."""

    ids: np.ndarray


class RowEnvironment(Protocol):
    """Decides what happens after a turn; called on the thread that runs the engine.

    A row is one rollout. Rows are numbered in the order of the requests, all samples of a request before the next one.
    `abandoned`, `find_stop`, `goes_on`, `completed`, `seated`, `drawn` and `steering` are optional.
    """

    def turn_ended(self, row: int, turn: TurnEnd) -> Finish | Wait:
        """Called as soon as a turn ends. A turn of reason `length` ends the row with stop `length` whatever is
        returned; no call may be submitted for it. Called once more with the last turn of a resumed row that has no
        observation of it yet."""

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        """(row, answer) of the rows whose answers have arrived since the last call, one answer for each turn; waits at
        most `timeout_s` for the first."""

    def cancelled(self, row: int) -> bool | None:
        """The engine ended the row itself (deadline, overflow, early exit): stop its calls, drop their answers. False
        if a call may never have run, so that the policy missed no deadline."""

    def abandoned(self, row: int) -> None:
        """The rollouts were interrupted, and nobody takes this one: as `cancelled`, which is called where this is
        missing."""

    def find_stop(self, row: int, new_tokens: np.ndarray, before: np.ndarray) -> int | None:
        """How many of the ids drawn since the last call to keep, at least 1, when a stop text ends among them.

        `before` holds the earlier ids of the same turn: a text of several ids can be split between two calls.
        """

    def goes_on(self, row: int, tokens: np.ndarray) -> bool:
        """Whether a turn of these ids goes on although the last one of them is an id at which the device stops."""

    def completed(self, row: int, trajectory: Trajectory) -> Trajectory:
        """The trajectory of a row that ended, with the text, calls and results of its turns added."""

    def seated(self, row: int, cached: int) -> None:
        """The row has its slot; so many of its tokens were found in the cache."""

    def drawn(self, row: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """What a chunk added to the row, after `find_stop`."""

    def steering(self, row: int) -> RowSteering | None:
        """What the row asks of its draws, other than the engine's settings."""


class SingleTurn:
    """The environment without tools: the first turn is the whole answer."""

    find_stop = None

    def turn_ended(self, row: int, turn: TurnEnd) -> Finish | Wait:
        return Finish("eos" if turn.reason == "stop" else "length")

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        return []

    def cancelled(self, row: int) -> None:
        return None


@dataclass
class RolloutStats:
    """Counts of one `Engine.run`."""

    rollouts: int = 0
    sampled_tokens: int = 0
    observation_tokens: int = 0
    prefilled_tokens: int = 0
    """Written to the cache by `append`, padding excluded: each prompt once, each observation once."""
    padded_tokens: int = 0
    """Tokens written to the cache by `append`, padding included."""
    appends: int = 0
    forks: int = 0
    """Rows that share the prompt of a live sibling."""
    reused: int = 0
    """Rows that took over the prompt of a sibling that had ended."""
    cached_tokens: int = 0
    """Tokens of prompts that were found in the cache and therefore not written; those of siblings included."""
    prompts: int = 0
    """Prompts written; more than there are different prompts only when rows of one were spread over devices."""
    chunks: int = 0
    steps: int = 0
    """Decode steps; the mean over devices."""
    slot_steps: int = 0
    """Rows computed in them, idle ones included."""
    dropped_tokens: int = 0
    """Drawn after a stop text, or for a row that had already been ended."""
    compilations: int = 0
    cache_tokens: int = 0
    """Largest room of the blocks in use, in tokens."""
    room_sum: int = 0
    """Room of the blocks in use, in tokens, summed over chunks."""
    held_sum: int = 0
    """Tokens of the rows that have blocks, summed over chunks."""
    evictions: int = 0
    """Rows that gave up their blocks for older ones."""
    recomputed_tokens: int = 0
    """Written once more to the cache after that."""
    seconds: float = 0.0
    decode_s: float = 0.0
    """Spent dispatching chunks and waiting for their reports."""
    append_s: float = 0.0
    """Spent dispatching appends and forks; the device work overlaps, and waiting for it counts as `decode_s`."""
    environment_s: float = 0.0
    """Spent in the environment's own code: parsing turns, submitting calls."""
    tool_wait_s: float = 0.0
    """Spent waiting for tools with nothing to decode."""
    environment_faults: int = 0
    """Failures of environments of the user's, but for those that the policy caused."""
    failures: dict[str, "FailureCount"] = field(default_factory=dict)
    """Rollouts that ended by a failure of an environment or an agent, by its kind."""
    environment_retries: int = 0
    branches: int = 0
    """Further conversations of agents, besides the first one of each rollout."""
    dropped_branches: int = 0
    """Further conversations that were left out because they did not fit with the others."""
    stops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(StopReason), 0))
    shard_tokens: tuple[int, ...] = ()
    """Sampled tokens by data shard."""

    def count_failure(self, kind: str, text: str, *, by_policy: bool) -> None:
        """A rollout has ended by a failure outside the engine."""
        known = self.failures.get(kind)
        failure = FailureCount(text, by_policy=by_policy)
        self.failures[kind] = failure if known is None else known + failure

    def followed_by(self, later: "RolloutStats") -> "RolloutStats":
        """The statistics of two runs of an engine, one after the other: counts and times add up."""
        both = {item.name: (getattr(self, item.name), getattr(later, item.name)) for item in fields(self)}
        sums = {name: a + b for name, (a, b) in both.items() if isinstance(a, int | float)}
        stops = {name: count + later.stops.get(name, 0) for name, count in self.stops.items()}
        shards = tuple(a + b for a, b in zip_longest(self.shard_tokens, later.shard_tokens, fillvalue=0))
        kinds = {"cache_tokens": max(both["cache_tokens"]), "stops": stops, "shard_tokens": shards}
        merged = RolloutStats(**(sums | kinds | {"failures": dict(self.failures)}))
        for kind, failure in later.failures.items():
            known = merged.failures.get(kind)
            merged.failures[kind] = failure if known is None else known + failure
        return merged

    @property
    def slot_use(self) -> float:
        """Share of the computed rows that yielded a token."""
        return self.sampled_tokens / self.slot_steps if self.slot_steps else 0.0

    @property
    def cache_room(self) -> float:
        """Room in the blocks in use for each token of their rows; less than 1 where rows share blocks."""
        return self.room_sum / self.held_sum if self.held_sum else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of wall clock."""
        return self.sampled_tokens / self.seconds if self.seconds else 0.0

    def metrics(self) -> Metrics:
        """The figures a training step logs; the `stop_` shares sum to 1."""
        total = max(1, sum(self.stops.values()))
        shares: Mapping[str, float] = {f"rollout/stop_{name}": count / total for name, count in self.stops.items()}
        faults = {"faults": self.environment_faults, "retries": self.environment_retries}
        faults |= {"branches": self.branches, "dropped_branches": self.dropped_branches}
        environment = {f"environment/{name}": float(count) for name, count in faults.items() if count}
        return environment | {
            "rollout/sampled_tokens": float(self.sampled_tokens),
            "rollout/observation_tokens": float(self.observation_tokens),
            "rollout/prefilled_tokens": float(self.prefilled_tokens),
            "rollout/tokens_per_s": self.tokens_per_s,
            "rollout/slot_use": self.slot_use,
            "rollout/compilations": float(self.compilations),
            "rollout/cache_tokens": float(self.cache_tokens),
            "rollout/cache_room": self.cache_room,
            "rollout/evictions": float(self.evictions),
            "rollout/recomputed_tokens": float(self.recomputed_tokens),
            "time/rollout_s": self.seconds,
            "time/decode_s": self.decode_s,
            "time/environment_s": self.environment_s,
            "time/tool_wait_s": self.tool_wait_s,
            **shares,
        }

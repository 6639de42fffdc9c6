"""(Problem, trajectories) -> Group with verdicts.

Faults of ours never become a reward: trajectories that ended by infrastructure, were cancelled, or could not be scored
leave the group and are counted. What the policy caused, truncation included, stays in it.
"""

import asyncio
import importlib
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_roc_jax.reward.answer import FoundAnswer, find_answer
from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.reward.verify import Verifier
from grpo_roc_jax.types import Group, Problem, Trajectory, Verdict, VerdictStatus

RewardFunction = Callable[[Problem, Sequence[Trajectory]], Any]
"""(problem, trajectories) -> one number or None (not scored) a trajectory, as a sequence or an awaitable of one."""

UNSCORED_STOPS = frozenset({"infrastructure", "cancelled"})
"""Stops that say nothing about the policy; such trajectories leave the group."""


class RewardError(Exception):
    """A reward function broke its contract; the message names it."""


@dataclass(frozen=True)
class Scored:
    """The groups of a step, and what became of every trajectory."""

    groups: tuple[Group, ...]
    counts: Mapping[str, int]
    """Trajectories by verdict status; those removed appear as `infrastructure`, `cancelled` or `not_scored`."""
    faults: tuple[str, ...] = ()
    """What went wrong in custom reward functions, in words."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """Callable: `scorer(problem, trajectories) -> Group`. `score_all` judges many groups in one burst."""

    config: RewardConfig
    verifier: Verifier
    functions: Mapping[str, RewardFunction] = field(default_factory=dict)
    """The custom ones by name, resolved when the scorer was made."""

    def __call__(self, problem: Problem, trajectories: Sequence[Trajectory]) -> Group:
        return self.score_all([problem], [trajectories]).groups[0]

    def score_all(self, problems: Sequence[Problem], rollouts: Sequence[Sequence[Trajectory]]) -> Scored:
        """One group a problem, in order, without the trajectories that cannot be judged.

        Raises:
            RewardError: A custom function returned something else than one number or None a trajectory.
        """
        counts: Counter[str] = Counter()
        judged = []
        for trajectories in rollouts:
            judged.append([t for t in trajectories if t.stop not in UNSCORED_STOPS])
            counts.update(t.stop for t in trajectories if t.stop in UNSCORED_STOPS)
        verdicts, faults = self._verdicts(problems, judged)
        groups = []
        for problem, trajectories, row in zip(problems, judged, verdicts, strict=True):
            kept = [(t, v) for t, v in zip(trajectories, row, strict=True) if v is not None]
            counts["not_scored"] += len(row) - len(kept)
            counts.update(verdict.status for _, verdict in kept)
            groups.append(Group(problem, tuple(t for t, _ in kept), tuple(v for _, v in kept)))
        return Scored(tuple(groups), {k: n for k, n in counts.items() if n}, tuple(faults))

    def close(self) -> None:
        """Ends the verification workers."""
        self.verifier.close()

    def _verdicts(
        self, problems: Sequence[Problem], rollouts: Sequence[Sequence[Trajectory]]
    ) -> tuple[list[list[Verdict | None]], list[str]]:
        found = [[self._find(t) for t in trajectories] for trajectories in rollouts]
        status = self._statuses(problems, rollouts, found)
        verdicts, faults = [], []
        for g, (problem, trajectories) in enumerate(zip(problems, rollouts, strict=True)):
            channels: dict[str, list[float | None]] = {}
            for name in self.config.functions:
                if name in self.functions:
                    channels[name], fault = self._call(name, problem, trajectories)
                    faults += [f"problem {problem.uid!r}: {fault}"] if fault else []
                else:
                    channels[name] = _builtin(name, trajectories, found[g], status[g])
            verdicts.append(
                [
                    self._verdict(t, found[g][i], status[g][i], {name: row[i] for name, row in channels.items()})
                    for i, t in enumerate(trajectories)
                ]
            )
        return verdicts, faults

    def _find(self, trajectory: Trajectory) -> FoundAnswer:
        texts = [turn.text for turn in trajectory.turns]
        return find_answer(texts, tag=self.config.answer_tag, lenient=self.config.extraction == "lenient")

    def _statuses(
        self,
        problems: Sequence[Problem],
        rollouts: Sequence[Sequence[Trajectory]],
        found: Sequence[Sequence[FoundAnswer]],
    ) -> list[list[VerdictStatus]]:
        """Verifies all answers of the step in one burst, so that the workers never wait for a group to end."""
        status: list[list[VerdictStatus]] = []
        pairs: list[tuple[str, str]] = []
        places: list[tuple[int, int]] = []
        for g, (problem, trajectories) in enumerate(zip(problems, rollouts, strict=True)):
            row: list[VerdictStatus] = []
            for i, trajectory in enumerate(trajectories):
                if trajectory.truncated and not self.config.score_truncated:
                    row.append("truncated")
                elif found[g][i].answer is None:
                    row.append("no_answer")
                else:
                    row.append("wrong")
                    if "answer" not in self.config.functions:
                        continue
                    pairs.append((found[g][i].answer, problem.answer))
                    places.append((g, i))
            status.append(row)
        for (g, i), verdict in zip(places, self.verifier.compare(pairs), strict=True):
            status[g][i] = verdict
        return status

    def _call(
        self, name: str, problem: Problem, trajectories: Sequence[Trajectory]
    ) -> tuple[list[float | None], str | None]:
        """A custom function's rewards; an exception or a missed deadline leaves the group unscored, with a reason."""
        if not trajectories:
            return [], None
        try:
            values = _with_deadline(lambda: self.functions[name](problem, trajectories), self.config.function_timeout_s)
        except TimeoutError:
            return [None] * len(trajectories), f"reward {name} took longer than {self.config.function_timeout_s} s"
        except Exception as error:
            return [None] * len(trajectories), f"reward {name} raised {type(error).__name__}: {error}"
        return check_rewards(name, values, len(trajectories))

    def _verdict(
        self, trajectory: Trajectory, found: FoundAnswer, status: VerdictStatus, channels: dict[str, float | None]
    ) -> Verdict | None:
        if any(value is None for value in channels.values()):
            return None
        reward = sum(w * channels[name] for name, w in zip(self.config.functions, self.config.weights, strict=True))
        if status == "truncated":
            reward = self.config.truncated_reward
        elif "answer" not in channels:
            status = "correct" if reward > 0 else "wrong"
        calls = [result for result in trajectory.results if not result.infra]
        return Verdict(
            reward=float(reward),
            status=status,
            answer=found.answer,
            tool_calls=len(calls),
            tool_errors=sum(result.counts_as_error for result in calls),
            answers=found.answers,
            well_formed=found.well_formed,
            turns=len(trajectory.turns),
            channels=channels if len(channels) > 1 else {},
        )


def make_scorer(config: RewardConfig, functions: Mapping[str, RewardFunction] | None = None) -> Scorer:
    """The scorer of a run; no process starts before an answer needs one.

    Args:
        config: Which functions, and how answers are read and compared.
        functions: Custom functions by the name they have in `config.functions`; the others are imported.

    Raises:
        RewardError: A dotted path leads nowhere, or to something that cannot be called with two arguments.
    """
    given = dict(functions or {})
    custom = {name: given.get(name) or load_function(name) for name in config.functions if ":" in name}
    verifier = Verifier(
        config.verify_workers, config.verify_timeout_s, config.verify_memory_mb, max_chars=config.max_answer_chars
    )
    return Scorer(config, verifier, custom)


def load_function(path: str) -> RewardFunction:
    """The function behind `package.module:function`.

    Raises:
        RewardError: With the reason, and what to write instead.
    """
    module_name, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"reward {path}: {error}; write package.module:function, importable from here") from error
    if not callable(function):
        raise RewardError(f"reward {path} is a {type(function).__name__}; a function is wanted")
    try:
        inspect.signature(function).bind(None, ())
    except TypeError as error:
        raise RewardError(f"reward {path} must accept (problem, trajectories): {error}") from error
    return function


def check_rewards(name: str, values: Any, count: int) -> tuple[list[float | None], str | None]:
    """The rewards of one call as floats; NaN and infinities become None (not scored), with the reason.

    Raises:
        RewardError: No sequence, the wrong length, or a member that is no number.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise RewardError(
            f"reward {name} returned {type(values).__name__}; a sequence of {count} numbers is wanted, one a trajectory"
        )
    if len(values) != count:
        raise RewardError(f"reward {name} returned {len(values)} values for {count} trajectories; return one for each")
    checked: list[float | None] = []
    fault = None
    for index, value in enumerate(values):
        try:
            number = None if value is None else float(None if isinstance(value, str | bytes) else value)
        except (TypeError, ValueError):
            raise RewardError(
                f"reward {name}: value {index} is {value!r} ({type(value).__name__}); a number or None is wanted"
            ) from None
        if number is not None and not math.isfinite(number):
            fault, number = f"reward {name}: value {index} is {number}; it counts as not scored", None
        checked.append(number)
    return checked, fault


def _with_deadline(call: Callable[[], Any], seconds: float) -> Any:
    """The call's value, awaited when it is awaitable. A late call is abandoned in its thread, which dies with us."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            value = call()
            outcome["value"] = asyncio.run(_resolve(value)) if inspect.isawaitable(value) else value
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="reward", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


async def _resolve(awaitable: Any) -> Any:
    return await awaitable


def _builtin(
    name: str, trajectories: Sequence[Trajectory], found: Sequence[FoundAnswer], status: Sequence[VerdictStatus]
) -> list[float | None]:
    """Rewards in {0, 1}: a correct answer, exactly one well-formed answer, no failed call."""
    if name == "answer":
        return [float(s == "correct") for s in status]
    if name == "format":
        return [float(f.well_formed and f.answers == 1) for f in found]
    return [float(not any(result.counts_as_error for result in t.results)) for t in trajectories]

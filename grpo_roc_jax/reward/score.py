"""(Problem, trajectories) -> Group with verdicts.

Infrastructure failures never become a reward: trajectories that ended by one, were cancelled, or could not be scored
are removed from the group and counted. Outcomes that the policy caused, truncation included, stay in it.
"""

import asyncio
import copy
import inspect
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from grpo_roc_jax.hints.other_names import close_to
from grpo_roc_jax.process.points import reach, spoiled
from grpo_roc_jax.reward.answer import FoundAnswer, find_answer
from grpo_roc_jax.reward.config import (
    AnswerReward,
    EnvironmentReward,
    FunctionReward,
    Reward,
    RewardConfig,
    RewardFunction,
)
from grpo_roc_jax.reward.graded import GradedReward
from grpo_roc_jax.reward.verify import Verifier
from grpo_roc_jax.settings.callables import described_error, resolve
from grpo_roc_jax.types import ARRAYS, Group, Problem, Trajectory, Turn, Verdict, VerdictStatus

log = logging.getLogger(__name__)

Pay = float | tuple[float, ...] | None
"""The reward of a trajectory: one number, numbers for its turns, or None if the function does not apply. NaN means that
the function has failed or could not decide, so that the trajectory cannot be scored."""
UNSCORED = math.nan
MADE_UP = "made-up trajectories; what it does not score leaves its group"

UNSCORED_STOPS = frozenset({"infrastructure", "cancelled"})
"""Stop reasons that the policy did not cause; such trajectories are removed from the group."""


class RewardError(Exception):
    """A reward function cannot be loaded or returned something invalid; the message names it."""


@dataclass(frozen=True)
class Scored:
    """The groups of a step, and the outcome of every trajectory."""

    groups: tuple[Group, ...]
    counts: Mapping[str, int]
    """Number of trajectories by verdict status; removed ones as `infrastructure`, `cancelled` or `not_scored`."""
    faults: tuple[str, ...] = ()
    """Messages about failures of custom reward functions."""
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Number of trajectories without a score because of a function, by its name: it failed, or no function applied."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """`scorer(problem, trajectories) -> Group`; `score_all` scores many groups at once."""

    config: RewardConfig
    verifier: Verifier
    functions: Mapping[str, RewardFunction] = field(default_factory=dict)
    """The user's functions and those with settings, by name; set when the scorer is made."""
    failed: Counter[str] = field(default_factory=Counter)
    """Number of calls that failed so far, by name of the function; only the first failure of each is logged."""

    def __call__(self, problem: Problem, trajectories: Sequence[Trajectory]) -> Group:
        return self.score_all([problem], [trajectories]).groups[0]

    def score_all(self, problems: Sequence[Problem], rollouts: Sequence[Sequence[Trajectory]]) -> Scored:
        """One group per problem, in order, without the trajectories that cannot be scored.

        Raises:
            RewardError: A custom function returned something else than `RewardFunction` says.
            TypeError, ValueError: There is not one list of trajectories for each problem.
        """
        problems, rollouts = _listed(problems, rollouts)
        reach("reward")
        counts: Counter[str] = Counter()
        judged = []
        for trajectories in rollouts:
            judged.append([t for t in trajectories if t.stop not in UNSCORED_STOPS])
            counts.update(t.stop for t in trajectories if t.stop in UNSCORED_STOPS)
        verdicts, faults = self._verdicts(problems, judged)
        groups, unscored = [], Counter[str]()
        for problem, trajectories, row in zip(problems, judged, verdicts, strict=True):
            scored = [(t, v) for t, v in zip(trajectories, row, strict=True) if isinstance(v, Verdict)]
            unscored.update(name for outcome in row if not isinstance(outcome, Verdict) for name in outcome)
            counts["not_scored"] += len(row) - len(scored)
            counts.update(verdict.status for _, verdict in scored)
            groups.append(Group(problem, tuple(t for t, _ in scored), tuple(v for _, v in scored)))
        return Scored(tuple(groups), {k: n for k, n in counts.items() if n}, tuple(faults), unscored)

    def try_functions(self, problem: Problem, trajectories: Sequence[Trajectory]) -> list[str]:
        """Calls each function once, before a run depends on it. Returns a line for each that raises or is late, which
        may not happen again on other trajectories.

        Raises:
            RewardError: A function returns something else than `RewardFunction` says.
        """
        lines = []
        for name in self.functions:
            part = next(part for part in self.config.functions if part.name == name)
            try:
                shown = _copied(problem, trajectories)
                values = _with_deadline(partial(self.functions[name], *shown), part.timeout_s)
            except _TooLate:
                lines.append(f"reward {name} took longer than {part.timeout_s} s on {MADE_UP}")
            except Exception as error:
                lines.append(f"reward {name} raised {described_error(error, self.functions[name])} on {MADE_UP}")
            else:
                check_rewards(name, values, [len(t.turns) for t in trajectories])
        return lines

    def close(self) -> None:
        """Ends the verification workers."""
        self.verifier.close()

    def _verdicts(
        self, problems: Sequence[Problem], rollouts: Sequence[Sequence[Trajectory]]
    ) -> tuple[list[list[Verdict | Sequence[str]]], list[str]]:
        """(the verdict of each trajectory, or the names of the functions that leave it without one; failures)."""
        find = partial(find_answer, tag=self.config.answer_tag, lenient=self.config.extraction == "lenient")
        answers = [[find([turn.text for turn in t.turns]) for t in trajectories] for trajectories in rollouts]
        status = self._statuses(problems, rollouts, answers)
        verdicts, faults = [], []
        for g, (problem, trajectories) in enumerate(zip(problems, rollouts, strict=True)):
            channels: dict[str, list[Pay]] = {}
            for part in self.config.functions:
                if part.name in self.functions:
                    channels[part.name], fault = self._call(part, problem, trajectories)
                    faults += self._noted(part.name, f"problem {problem.uid!r}: {fault}") if fault else []
                else:
                    channels[part.name] = _builtin(part, trajectories, answers[g], status[g])
            pays = [{name: row[i] for name, row in channels.items()} for i in range(len(trajectories))]
            # A rollout that failed because of what the policy said earns nothing, whatever a function returns for its
            # beginning.
            pays = [
                dict.fromkeys(pay, 0.0) if t.stop == "failed" else pay
                for t, pay in zip(trajectories, pays, strict=True)
            ]
            row = [self._outcome(t, answers[g][i], status[g][i], pays[i]) for i, t in enumerate(trajectories)]
            verdicts.append(self._with_failures(row))
        return verdicts, faults

    def _statuses(
        self,
        problems: Sequence[Problem],
        rollouts: Sequence[Sequence[Trajectory]],
        found_answers: Sequence[Sequence[FoundAnswer]],
    ) -> list[list[VerdictStatus]]:
        """The status of each trajectory. All answers of the step are verified at once, to keep the workers busy."""
        status = []
        for trajectories, answers in zip(rollouts, found_answers, strict=True):
            status.append([self._status(t, answer) for t, answer in zip(trajectories, answers, strict=True)])
        if self.config.answer is None:
            return status
        places = [(g, i) for g, row in enumerate(status) for i, before in enumerate(row) if before == "wrong"]
        pairs = [(found_answers[g][i].answer, problems[g].answer) for g, i in places]
        for (g, i), verdict in zip(places, self.verifier.compare(pairs), strict=True):
            status[g][i] = verdict
        return status

    def _status(self, trajectory: Trajectory, answer: FoundAnswer) -> VerdictStatus:
        """The status before answers are compared; `wrong` stands for an answer to compare."""
        if trajectory.stop == "failed":
            return "no_answer"
        if trajectory.truncated and self.config.truncated.kind != "score":
            return "truncated"
        return "no_answer" if answer.answer is None else "wrong"

    def _call(
        self, part: FunctionReward | GradedReward, problem: Problem, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Pay], str | None]:
        """(rewards of a custom function, failure). An exception or a missed deadline leaves the group unscored."""
        if not trajectories:
            return [], None

        shown = _copied(problem, trajectories)

        def call() -> Any:
            reach("reward.function")
            return self.functions[part.name](*shown)

        try:
            values = _with_deadline(call, part.timeout_s)
        except _TooLate:
            return [UNSCORED] * len(trajectories), f"reward {part.name} took longer than {part.timeout_s} s"
        except Exception as error:
            raised = described_error(error, self.functions[part.name])
            return [UNSCORED] * len(trajectories), f"reward {part.name} raised {raised}"
        return check_rewards(part.name, spoiled("reward.values", values), [len(t.turns) for t in trajectories])

    def _noted(self, name: str, fault: str) -> list[str]:
        if not self.failed[name]:
            log.warning("%s; its trajectories are not scored, and later failures are counted only", fault)
        self.failed[name] += 1
        return [fault]

    def _outcome(
        self, trajectory: Trajectory, answer: FoundAnswer, status: VerdictStatus, pays: dict[str, Pay]
    ) -> Verdict | list[str]:
        """The verdict of a trajectory, or the names of the functions that leave it without one: also those whose finite
        values have no finite sum."""
        if not applies(pays):
            return unscored_by(pays)
        weights = self.config.weights
        paid = {name: sum(pay) if isinstance(pay, tuple) else pay for name, pay in pays.items() if pay is not None}
        if not math.isfinite(sum(weights[name] * value for name, value in paid.items())):
            return list(paid)
        return self._verdict(trajectory, answer, status, pays)

    def _verdict(
        self, trajectory: Trajectory, answer: FoundAnswer, status: VerdictStatus, pays: dict[str, Pay]
    ) -> Verdict:
        """The verdict of a trajectory to which at least one function applies; its reward is the sum of theirs."""
        weights = self.config.weights
        channels = {name: sum(pay) if isinstance(pay, tuple) else pay for name, pay in pays.items()}
        reward = sum(weights[name] * value for name, value in channels.items() if value is not None)
        by_turn = [[weights[name] * x for x in pay] for name, pay in pays.items() if isinstance(pay, tuple)]
        if status != "truncated" and self.config.answer is None and trajectory.stop != "failed":
            goals = [part for part in self.config.functions if isinstance(part, EnvironmentReward)]
            goal = next(((part, pay) for part in goals if (pay := channels[part.name]) is not None), None)
            reached = goal[1] >= goal[0].success if goal else reward > 0
            status = "correct" if reached else "wrong"
        calls = [result for result in trajectory.results if not result.infra]
        return Verdict(
            reward=float(reward),
            status=status,
            answer=answer.answer,
            tool_calls=len(calls),
            tool_errors=sum(result.counts_as_error for result in calls),
            answers=answer.answers,
            well_formed=answer.well_formed,
            turns=len(trajectory.turns),
            channels=channels if len(channels) > 1 else {},
            turn_rewards=tuple(map(sum, zip(*by_turn, strict=True))),
        )

    def _with_failures(self, row: Sequence[Verdict | Sequence[str]]) -> list[Verdict | Sequence[str]]:
        """The outcomes of a group, with the rewards of its truncated trajectories set. Only this function determines
        what a truncated failure earns, in total and in each channel; rewards that functions gave it are removed,
        turn rewards included."""
        verdicts = [outcome for outcome in row if isinstance(outcome, Verdict)]
        finished = [verdict for verdict in verdicts if verdict.status != "truncated"]
        if len(finished) == len(verdicts):
            return list(row)
        weights, given = self.config.weights, self.config.truncated.reward
        if self.config.truncated.kind == "fail":
            # If functions give negative rewards, a failure is as bad as the worst trajectory of its group that was not
            # truncated.
            reward = min([0.0, *(verdict.reward for verdict in finished)])
            channels = {name: _least(name, weight, finished) for name, weight in weights.items()}
        else:
            reward, channels = given, dict.fromkeys(weights, given)

        def failed(verdict: Verdict) -> Verdict:
            values = {name: None if value is None else channels[name] for name, value in verdict.channels.items()}
            return replace(verdict, reward=float(reward), channels=values, turn_rewards=())

        cut = [isinstance(outcome, Verdict) and outcome.status == "truncated" for outcome in row]
        return [failed(outcome) if yes else outcome for outcome, yes in zip(row, cut, strict=True)]


def _listed(
    problems: Iterable[Problem], rollouts: Iterable[Iterable[Trajectory]]
) -> tuple[list[Problem], list[list[Trajectory]]]:
    single = isinstance(problems, Problem) or isinstance(rollouts, Trajectory)
    problems, rollouts = ([], []) if single else (list(problems), list(rollouts))
    if single or any(isinstance(each, Trajectory) for each in rollouts):
        raise TypeError(
            "score_all takes a list of problems and a list of trajectories for each: score_all([problem], "
            "[trajectories]); for one problem call scorer(problem, trajectories)"
        )
    if len(problems) != len(rollouts):
        raise ValueError(
            f"score_all got {len(problems)} problems and {len(rollouts)} lists of trajectories; pass one list for each "
            "problem, empty if it has none"
        )
    return problems, [list(trajectories) for trajectories in rollouts]


def _copied(problem: Problem, trajectories: Sequence[Trajectory]) -> tuple[Problem, Sequence[Trajectory]]:
    """Copies for a user's function. Read-only arrays can be written through other libraries and through their base, and
    arguments of calls and columns of a row can always; what is trained, recorded and shown to other functions is not
    what a function was given."""
    try:
        return copy.deepcopy((problem, trajectories))
    except Exception:  # a column of the user's own that cannot be copied
        return problem.copied(), [
            replace(t, turns=tuple(map(_copied_turn, t.turns)), **_copied_arrays(t)) for t in trajectories
        ]


def _copied_turn(turn: Turn) -> Turn:
    return replace(turn, calls=tuple(replace(call, arguments=copy.deepcopy(call.arguments)) for call in turn.calls))


def _copied_arrays(trajectory: Trajectory) -> dict[str, np.ndarray | None]:
    arrays = {name: getattr(trajectory, name) for name in ARRAYS}
    return {name: None if array is None else array.copy() for name, array in arrays.items()}


def applies(pays: Mapping[str, Pay]) -> bool:
    """Whether a trajectory can be scored: no function has failed on it, and at least one applies to it."""
    return not any(map(_failed, pays.values())) and any(pay is not None for pay in pays.values())


def unscored_by(pays: Mapping[str, Pay]) -> list[str]:
    """The functions that have failed on a trajectory, or all of them if none applies to it."""
    return [name for name, pay in pays.items() if _failed(pay)] or list(pays)


def _failed(pay: Pay) -> bool:
    return isinstance(pay, float) and math.isnan(pay)


def _least(name: str, weight: float, verdicts: Sequence[Verdict]) -> float:
    """The least weighted value of a channel among these verdicts, and at most 0."""
    values = [value for v in verdicts if (value := v.channels.get(name)) is not None]
    return float(min([0.0, *values], key=lambda value: weight * value if weight else value))


def make_scorer(config: RewardConfig) -> Scorer:
    """The scorer of a run; processes start only when an answer needs one.

    Args:
        config: The reward functions, and how answers are extracted and compared.

    Raises:
        RewardError: A path cannot be imported, or is not a function of two arguments.
        TypeError: `config` is another section, or none.
    """
    if not isinstance(config, RewardConfig):
        raise TypeError(f"make_scorer got {type(config).__name__}; must be a RewardConfig, such as config.reward")
    answer = config.answer or AnswerReward()  # no process starts before an answer needs one
    verifier = Verifier(answer.workers, answer.timeout_s, answer.memory_mb, strict=answer.strict)
    functions = {part.name: load_function(part.name) for part in config.custom}
    functions |= {part.name: part.function(config) for part in config.functions if isinstance(part, GradedReward)}
    return Scorer(config, verifier, functions)


OTHER_SIGNATURES = frozenset({"prompts", "completions", "completion", "solution_str", "ground_truth", "data_source"})
"""Arguments of reward functions in TRL, tunix, verifiers and verl."""


def load_function(path: str) -> RewardFunction:
    """The reward function of that name or path.

    Raises:
        RewardError: It cannot be imported, or is not a function of two arguments.
    """
    try:
        function = resolve("reward.functions", path)
    except ValueError as error:
        if ":" in path:
            raise RewardError(str(error)) from error
        builtin = [name for name in Reward.kinds if name != "function"]
        near = close_to(path, builtin)
        meant = f"did you mean {near!r}? " if near else ""
        raise RewardError(f"{error}; {meant}the built-in ones are {', '.join(builtin)}") from error
    if inspect.isclass(function):
        raise RewardError(
            f"reward {path} is a class; must be a function (problem, trajectories), or an instance with __call__"
        )
    parameters = inspect.signature(function).parameters
    theirs = sorted(OTHER_SIGNATURES & parameters.keys())
    other = f"; {', '.join(theirs)} is the signature of another project: see docs/coming_from.md" if theirs else ""
    try:
        inspect.signature(function).bind(None, ())
    except TypeError as error:
        raise RewardError(f"reward {path} must accept (problem, trajectories): {error}{other}") from error
    if next(iter(parameters), "") in theirs:  # two arguments and **kwargs, which mean something else there
        raise RewardError(f"reward {path} must accept (problem, trajectories){other}")
    return function


def check_rewards(name: str, values: Any, turns: Sequence[int]) -> tuple[list[Pay], str | None]:
    """(rewards of one call, failure). NaN and infinities count as not scored, and so does a trajectory with a number
    for only some of its turns.

    Args:
        name: Name of the function.
        values: What the function returned.
        turns: Number of turns of each trajectory.

    Raises:
        RewardError: `values` is not a sequence, has the wrong length, or holds something other than `Pay`.
    """
    count = len(turns)
    unordered = isinstance(values, str | bytes | bytearray | memoryview | Mapping | Set)
    if unordered or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise RewardError(
            f"reward {name} returned {type(values).__name__}; must be a sequence of {count} numbers, one per trajectory"
        )
    try:
        size, rows = len(values), list(islice(values, count + 1))
    except Exception as error:  # of an array without dimensions, or of a class of the user's own
        raise RewardError(
            f"reward {name} returned {type(values).__name__}, which cannot be read ({error}); must be a sequence of "
            f"{count} numbers, one per trajectory"
        ) from None
    if size != count or len(rows) != count:
        size = len(rows) if size == count else size
        raise RewardError(f"reward {name} returned {size} values for {count} trajectories; return one for each")
    checked: list[Pay] = []
    fault = None
    for index, (value, length) in enumerate(zip(rows, turns, strict=True)):
        by_turn = isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
        items = list(value) if by_turn else [value]
        if by_turn and len(items) != length:
            raise RewardError(
                f"reward {name}: value {index} is {len(items)} numbers for {length} turns; return one number for the "
                "trajectory, or one for each turn"
            )
        numbers = [_number(name, index, item) for item in items]
        wrong = [number for number in numbers if number is not None and not math.isfinite(number)]
        if wrong:
            fault = f"reward {name}: value {index} is {wrong[0]}; it counts as not scored"
        if wrong or (None in numbers and any(number is not None for number in numbers)):
            checked.append(UNSCORED)
        elif None in numbers:
            checked.append(None)
        else:
            checked.append(tuple(numbers) if by_turn else numbers[0])
    return checked, fault


def _number(name: str, index: int, value: Any) -> float | None:
    try:
        if isinstance(value, str | bytes | complex | np.complexfloating):  # float() drops an imaginary part
            raise TypeError
        return None if value is None else float(value)
    except Exception:
        try:
            shown = repr(value)[:80]
        except Exception:  # an integer of thousands of digits, or a class of the user's own
            shown = "unreadable"
        raise RewardError(
            f"reward {name}: value {index} is {shown} ({type(value).__name__}); must be a number, one number per turn, "
            "or None"
        ) from None


class _TooLate(Exception):
    """A reward function exceeded its time. A `TimeoutError` that it raises is an error like any other."""


def _with_deadline(call: Callable[[], Any], seconds: float) -> Any:
    """The value of the call, awaited if it is awaitable. A late call is abandoned in its daemon thread.

    Raises:
        _TooLate: The call took longer.
    """
    outcome: Future = Future()

    def run() -> None:
        try:
            value = call()
            outcome.set_result(asyncio.run(_resolve(value)) if inspect.isawaitable(value) else value)
        except BaseException as error:  # an exit would otherwise look like a call that never ends
            outcome.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=run, name="reward", daemon=True).start()
    if not wait([outcome], seconds).done:
        raise _TooLate
    return outcome.result()


async def _resolve(awaitable: Any) -> Any:
    return await awaitable


def environment_pay(trajectory: Trajectory, part: str = "") -> Pay:
    """The rewards of an environment: by turn if it gave rewards for turns, with the final reward added to the last
    turn. If it could not judge a trajectory, the trajectory has no score.

    Args:
        trajectory: The finished trajectory.
        part: Name of one of `Trajectory.rewards`, which pays instead; None if the environment gave others only.
    """
    if part:
        judged = trajectory.reward is not None or trajectory.rewards
        return trajectory.rewards.get(part) if judged else UNSCORED
    by_turn = [turn.reward for turn in trajectory.turns]
    if trajectory.reward is None or not any(by_turn):
        return UNSCORED if trajectory.reward is None else trajectory.reward
    by_turn[-1] += trajectory.reward - sum(by_turn)
    return tuple(by_turn)


def _builtin(
    part: Reward, trajectories: Sequence[Trajectory], answers: Sequence[FoundAnswer], status: Sequence[VerdictStatus]
) -> list[Pay]:
    """Rewards in {0, 1} for a correct answer, exactly one well-formed answer, or no failed call; or those of an
    environment."""
    if isinstance(part, EnvironmentReward):
        return [environment_pay(t, part.part) for t in trajectories]
    if part.kind == "answer":
        return [float(s == "correct") for s in status]
    if part.kind == "format":
        return [float(f.well_formed and f.answers == 1) for f in answers]
    return [float(not any(result.counts_as_error for result in t.results)) for t in trajectories]

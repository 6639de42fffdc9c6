"""Which rollouts a step asks for: problems, how many rollouts each, under which prompts, in how many waves.

A plain method has one wave of equal requests. Everything else is a choice on five axes, with kinds here and in files of
`contrib/methods/`: `problems`, `budget`, `condition`, `second` and `temperature`. `run.sample` executes the requests:

    requests = first_wave(wave, plan);  groups = gathered(problems, requests, results)
    while requests := next_wave(wave, plan):  groups = plan.second.merge(groups, requests, results)

Rollouts of the waves that a budget adds are appended to their groups without `merge`.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from grpo_roc_jax.method.edit import joined
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import Count, InnerShare, NotNegative, kind, settings
from grpo_roc_jax.types import PLAIN, Condition, Group, Problem, RolloutRequest, Trajectory, condition_kind, traits_of

BUDGET = condition_kind("budget", optional=True)
"""Condition of a prompt that states something rewards depend on, such as a token budget."""
PromptEnd = tuple[Condition, str]
"""A condition, and the text that prompts end with under it."""
DEMONSTRATION = condition_kind("demonstration", attempt=False)
"""Condition of a demonstration in a group of rollouts, which no policy sampled."""


@dataclass(frozen=True, eq=False)
class Wave:
    """What a plan may read to request a wave."""

    problems: Sequence[Problem]
    """Problems of the batch; the index of a problem is part of its random keys."""
    count: int
    """Rollouts per problem under a uniform budget."""
    state: AlgoState
    rng: np.random.Generator
    number: int = 0
    """0 for the first wave."""
    groups: Sequence[Group] = ()
    """The groups merged so far, one per problem; empty before the first wave."""
    notes: Mapping[int, str] = field(default_factory=dict)
    """Hints that the policy wrote in the wave before, by index of the problem."""
    thought: Callable[[Trajectory], int] | None = None
    """Returns the number of tokens of a trajectory's first thought; None means its whole first turn."""


class ProblemSampler(Part, axis="plan.problems"):
    """Selects which problems of a pool of candidates train."""

    pool: ClassVar[int] = 1

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        """Ascending indices of the `count` problems to train on."""
        return list(range(min(count, len(pool))))


class Budget(Part, axis="plan.budget"):
    """How many rollouts each problem gets."""

    waves: ClassVar[int] = 0
    """Number of waves that the budget adds to the first one."""

    def first(self, wave: Wave) -> np.ndarray:
        """int[P]: rollouts of each problem in the first wave; `wave.count` each by default."""
        return np.full(len(wave.problems), wave.count)

    def later(self, wave: Wave) -> list[RolloutRequest]:
        """Requests of the waves that the budget adds; their rollouts are appended to their groups."""
        return []

    def largest(self, count: int, problems: int) -> int:
        """Largest number of rollouts that one problem can get."""
        return count


class Conditioning(Part, axis="plan.condition"):
    """What the prompts of a first wave are extended with."""

    warms_up: ClassVar[bool] = True
    """Whether `plan.warmup_steps` come first."""
    resumable: ClassVar[bool] = True
    """Whether a row that the deadline of a step cuts can continue in the next step."""
    helps: ClassVar[bool] = True
    """Whether a success under help leaves open if the problem can be solved without; False if the help belongs to the
    state of the problem."""

    @property
    def required(self) -> tuple[str, ...]:
        """Ends of prompts that stay where the prompt gets too long: a problem without room for them does not train."""
        return ()

    def requests(self, index: int, count: int, wave: Wave) -> list[RolloutRequest]:
        """Requests for `count` rollouts of the problem with index `index`."""
        return [RolloutRequest(wave.problems[index], index, count)]

    def evaluation(self) -> "PromptEnd | None":
        """Text at the end of prompts in evaluation; None if the condition does not determine it."""
        return None

    def demonstrated(self, problem: Problem, succeeded: Callable[[], bool | None]) -> str:
        """What the prompt of a demonstration ends with in the supervised stage.

        Args:
            problem: Problem of the demonstration.
            succeeded: Whether the demonstration reaches its goal; None where nothing tells.
        """
        return ""

    def compared(self) -> "tuple[PromptEnd, ...]":
        """Ends of prompts under which success on held-out problems is measured before the first step."""
        return ()

    def check_compared(self, success: Sequence[float]) -> list[str]:
        """Lines on the success under `compared`, in its order.

        Raises:
            ValueError: A policy of such success cannot be trained under this condition.
        """
        return []

    def next_table(self, uids: Sequence[str], state: AlgoState) -> AlgoState:
        """The state after these problems were visited."""
        return state


class SecondWave(Part, axis="plan.second"):
    """What follows the first wave, and how its results enter the groups."""

    trains_plain: ClassVar[bool] = False
    """Whether hinted responses are trained under the plain prompt."""
    extra_rows: ClassVar[int] = 0
    """Largest number of rows per problem that the wave can add to a step."""
    demonstrates: ClassVar[bool] = False
    """Whether a demonstration of each problem joins its group."""
    unsampled: ClassVar[bool] = False
    """Whether it adds trained tokens that were not sampled from a policy."""

    def first_count(self, count: int) -> int:
        """Rollouts per problem in the first wave."""
        return count

    def next(self, wave: Wave) -> list[RolloutRequest]:
        """Requests of wave 1, 2, ...; empty when the step is complete."""
        return []

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        """A group after the scored rollouts of one request of this wave are merged in."""
        return group

    def merge(
        self, groups: Sequence[Group], requests: Sequence[RolloutRequest], results: Sequence[Group]
    ) -> list[Group]:
        """The groups after a wave; `results[k]` are the scored rollouts of `requests[k]`. By default rollouts of the
        plain prompt are appended to their group."""
        out = list(groups)
        for request, result in zip(requests, results, strict=True):
            plain = not request.condition
            group = out[request.place]
            out[request.place] = joined(group, result) if plain else self.merged(group, request, result)
        return out

    def notes(self, requests: Sequence[RolloutRequest], results: Sequence[Group]) -> dict[int, str]:
        """Texts of a wave that the next one reads as `Wave.notes`, by index of the problem."""
        return {}

    def supervised(self, requests: Sequence[RolloutRequest], results: Sequence[Group]) -> list[Group]:
        """Rollouts of a wave that train as supervised rows under the plain prompt, for `compose.supervised_rows`."""
        return []

    def supervised_weight(self, step: int) -> float:
        """Weight of the likelihood of supervised rows in the loss of a step."""
        return 0.0


class Temperature(Part, axis="plan.temperature"):
    """The sampling temperature over training."""

    @property
    def all(self) -> tuple[float, ...]:
        """Every temperature that the run can use; empty for `sampling.temperature`."""
        return ()

    def now(self, state: AlgoState) -> float | None:
        """The temperature of this step; None for `sampling.temperature`."""
        return None


@kind("uniform")
class StreamOrder(ProblemSampler):
    """The next problems of the stream, which is shuffled."""


@kind("uniform")
class EqualBudget(Budget):
    """Every problem gets the same number."""


@kind("none")
class PlainPrompts(Conditioning):
    """Nothing is added."""


@kind("none")
class OneWave(SecondWave):
    """The first wave is the only one."""


@kind("constant")
class ConstantTemperature(Temperature):
    """`sampling.temperature` throughout."""


@settings
class PlanConfig:
    """Which rollouts a step asks for."""

    problems: ProblemSampler = field(default_factory=StreamOrder)
    """Which problems train."""
    budget: Budget = field(default_factory=EqualBudget)
    """How many rollouts each problem gets."""
    condition: Conditioning = field(default_factory=PlainPrompts)
    """What the prompts of a first wave are extended with."""
    second: SecondWave = field(default_factory=OneWave)
    """What follows the first wave."""
    temperature: Temperature = field(default_factory=ConstantTemperature)
    """The sampling temperature over training."""
    warmup_steps: Count = 0
    """Steps of plain waves before budgets, hints and second waves begin."""


def choose_problems(
    pool: Sequence[Problem], count: int, plan: PlanConfig, state: AlgoState, rng: np.random.Generator
) -> list[int]:
    """Which `count` of a pool of candidates to train on, ascending."""
    if len(pool) <= count:
        return list(range(len(pool)))
    return plan.problems.choose(pool, count, state, rng)


def first_wave(wave: Wave, plan: PlanConfig) -> list[RolloutRequest]:
    """Requests for every problem: counts by the budget, prompts by the condition."""
    plain = wave.state.step < plan.warmup_steps
    wave = wave if plain else replace(wave, count=plan.second.first_count(wave.count))
    counts = (EqualBudget() if plain else plan.budget).first(wave)
    condition = PlainPrompts() if plain and plan.condition.warms_up else plan.condition
    requests = [r for index, n in enumerate(counts) for r in condition.requests(index, int(n), wave)]
    return _heated(requests, plan, wave.state)


def next_wave(wave: Wave, plan: PlanConfig) -> list[RolloutRequest]:
    """Requests of wave 1, 2, ...; empty when the step is complete."""
    if wave.state.step < plan.warmup_steps:
        return []
    number = wave.number - plan.budget.waves
    requests = plan.budget.later(wave) if number < 1 else plan.second.next(replace(wave, number=number))
    return _heated(requests, plan, wave.state)


def _heated(requests: Sequence[RolloutRequest], plan: PlanConfig, state: AlgoState) -> list[RolloutRequest]:
    return [replace(request, temperature=plan.temperature.now(state)) for request in requests]


def with_suffix(requests: Sequence[RolloutRequest], text: str) -> list[RolloutRequest]:
    """The requests with a text, such as a token budget, at the end of their prompts."""
    if not text:
        return list(requests)
    return [replace(r, suffix=r.suffix + text, condition=r.condition or Condition(BUDGET)) for r in requests]


def gathered(problems: Sequence[Problem], requests: Sequence[RolloutRequest], results: Sequence[Group]) -> list[Group]:
    """One group per problem from a first wave in which a problem may have several requests (reward tokens)."""
    parts: list[list[Group]] = [[] for _ in problems]
    for request, result in zip(requests, results, strict=True):
        parts[request.place].append(result)
    return [joined(Group(problem, (), ()), *some) for problem, some in zip(problems, parts, strict=True)]


def unaided(features: Features, plan: PlanConfig) -> np.ndarray:
    """bool[G]: successes that show how hard the problem is.

    A success under a hint counts as a failure, since every plain rollout had failed before it was requested.
    """
    if not plan.condition.helps:
        return features.correct
    return features.correct & ~np.array([traits_of(kind).helped for kind in features.conditions], bool)


def failed_places(wave: Wave) -> list[int]:
    """Indices of the problems that every rollout failed."""
    return [index for index, group in enumerate(wave.groups) if group.size and not group.correct.any()]


def own_text(group: Group, index: int) -> str:
    """The policy's own text of a trajectory, turn by turn."""
    return "\n".join(turn.text for turn in group.trajectories[index].turns)


def standings(group: Group) -> list[tuple[bool, float]]:
    """Sort keys for how good each trajectory is: any success before any failure, whatever their rewards; then by
    reward."""
    return list(zip(group.correct.tolist(), group.rewards.tolist(), strict=True))


def best_text(group: Group) -> str:
    """The policy's own text of the best trajectory by `standings`; the first one of equals."""
    every = standings(group)
    return own_text(group, every.index(max(every)))


def problem_rates(wave: Wave) -> dict[str, np.ndarray]:
    """Columns of the success table for the problems of a wave."""
    return wave.state.table.get([problem.uid for problem in wave.problems])


def hand_out(problems: int, extra: int, low: int, high: int, gain: Callable[[int, int], float]) -> np.ndarray:
    """int64[P]: `low` for each problem, plus `extra` more in all, each given to the problem with the largest
    gain(problem, count); at most `high` each. Ties go to the problem with fewer rollouts, then to the first one."""
    counts = np.full(problems, low, np.int64)
    heap = [(-gain(i, low), low, i) for i in range(problems) if low < high]
    heapq.heapify(heap)
    for _ in range(max(extra, 0)):
        if not heap:
            break
        *_, i = heapq.heappop(heap)
        counts[i] += 1
        if counts[i] < high:
            heapq.heappush(heap, (-gain(i, int(counts[i])), int(counts[i]), i))
    return counts


# ---- RC-GRPO: rollouts conditioned on reward tokens (arXiv:2602.03025) ----------------------------------------------


HIGH, LOW = Condition(condition_kind("high_reward")), Condition(condition_kind("low_reward"))
"""Conditions of rollouts under the high and the low reward token; evaluation uses the high one."""


@kind("reward_tokens")
class RewardTokens(Conditioning):
    """Conditions each rollout on a reward token (RC-GRPO, arXiv:2602.03025); the policy must be fine-tuned on both."""

    draw: Literal["iid", "fixed"] = "iid"
    """Tokens drawn one by one, as in the paper, or in fixed numbers."""
    high_share: InnerShare = 0.5
    """Probability or share of the high token; the paper takes the share of successes in its fine-tuning data."""
    form: Literal["token", "text"] = "token"
    """How a reward token is written: as the special token of the vocabulary (characters if it has none), or in words,
    which every vocabulary encodes alike."""
    evaluate: Literal["high", "low", "none"] = "high"
    """Reward token of the prompts in evaluation."""
    separation: NotNegative = 0.05
    """Least gap between held-out success under the high and under the low token before the first step; without one the
    conditioning does nothing (arXiv:2602.03025, prop. 4.3), so the run is refused. 0 skips the check."""

    warms_up = False  # a policy was fine-tuned on the tokens

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(reward_goal(condition, self.form) for condition in (HIGH, LOW))

    def check(self, config: Any) -> None:
        second, taught, sampled = (
            config.plan.second,
            config.sft.reward_tokens,
            config.resample.sampled(config.group.size),
        )
        if second.kind != "none":
            raise ValueError(
                f"plan.condition reward_tokens with plan.second {second.kind}: a rollout has one condition; use one of "
                "them"
            )
        if self.draw == "fixed" and sampled < 2:
            raise ValueError(
                f"plan.condition reward_tokens with draw fixed needs a rollout of each kind but {sampled} is sampled; "
                "raise group.size"
            )
        if self.separation and not config.data.eval_problems:
            raise ValueError(
                f"plan.condition.separation = {self.separation} with data.eval_problems = 0: the gap between the "
                "reward tokens is measured on held-out problems; name some, or set plan.condition.separation 0"
            )
        if taught not in ("none", self.form):
            raise ValueError(
                f"sft.reward_tokens = {taught} but plan.condition.form = {self.form}: the policy would be trained "
                "under tokens that it was not taught; set both alike"
            )

    def requests(self, index: int, count: int, wave: Wave) -> list[RolloutRequest]:
        drawn = reward_conditions(count, self.high_share, self.draw, wave.rng)
        return [
            RolloutRequest(wave.problems[index], index, drawn.count(c), 0, c, reward_goal(c, self.form))
            for c in sorted(set(drawn), key=str)
        ]

    def evaluation(self) -> PromptEnd:
        condition = {"high": HIGH, "low": LOW, "none": PLAIN}[self.evaluate]
        return condition, reward_goal(condition, self.form)

    def demonstrated(self, problem: Problem, succeeded: Callable[[], bool | None]) -> str:
        """The reward token of the outcome (arXiv:2602.03025, app. B)."""
        outcome = succeeded()
        if outcome is None:
            raise ValueError(
                f"trace {problem.uid!r} has neither an outcome nor a reference answer, so it gets no reward token; "
                "give its file a column reward, or set sft.reward_tokens none"
            )
        return reward_goal(HIGH if outcome else LOW, self.form)

    def compared(self) -> tuple[PromptEnd, ...]:
        return tuple((c, reward_goal(c, self.form)) for c in (HIGH, LOW)) if self.separation else ()

    def check_compared(self, success: Sequence[float]) -> list[str]:
        check_separation(*success, self.separation)
        return [
            f"held-out success {success[0]:.3f} under the high reward token, {success[1]:.3f} under the low one",
        ]


def reward_conditions(count: int, high_share: float, mode: str, rng: np.random.Generator) -> tuple[Condition, ...]:
    """The reward token of each rollout of a group.

    `iid` draws each independently, as in the paper; `fixed` takes round(count high_share) high ones, at least one of
    each kind, shuffled.
    """
    if mode == "iid":
        high = rng.random(count) < high_share
    else:
        number = min(max(round(count * high_share), 1), count - 1)
        high = rng.permutation(count) < number
    return tuple(HIGH if h else LOW for h in high)


def reward_goal(condition: Condition, form: str = "token") -> str:
    """The line that ends a first user message under a reward token; empty for the plain prompt."""
    if condition not in (HIGH, LOW):
        return ""
    return f"\n[Reward Goal: {f'<|{condition}|>' if form == 'token' else str(condition).replace('_', ' ')}]"


def check_separation(success_high: float, success_low: float, least: float = 0.05) -> None:
    """Refuses to begin the second stage of RC-GRPO with a policy that ignores the reward token.

    The variance that conditioning adds to a group is bounded by the gap between the two success rates
    (arXiv:2602.03025, prop. 4.3); without one the method is plain GRPO at a higher price.

    Raises:
        ValueError: With both rates, and what to do.
    """
    if success_high - success_low < least:
        raise ValueError(
            f"success is {success_high:.3f} under the high reward token and {success_low:.3f} under the low one; the "
            f"gap must be at least {least}: run the reward-conditioned fine-tuning on mixed-quality traces first"
        )

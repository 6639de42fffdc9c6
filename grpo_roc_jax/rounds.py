"""One round of a step: problems are drawn, rolled out in the waves that the plan asks for, and merged into groups.

A plain method has one wave of equal requests; then a round is one call of the sampler and nothing else.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.edit import HINT
from grpo_roc_jax.method.plugin import load_part
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.waves import (
    BUDGET,
    RolloutRequest,
    choose_problems,
    explanations,
    first_wave,
    gathered,
    merge,
    next_wave,
    told_budget,
    with_budget,
    written_hints,
)
from grpo_roc_jax.rollout.engine import SamplerParams
from grpo_roc_jax.sample import Carried, Sampled, opening_ids, sample_requests
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.types import Group, Problem, Trajectory

THOUGHT_CLOSE = "</reason>"


@dataclass(frozen=True, eq=False)
class Round:
    """What the waves of a round gave."""

    groups: list[Group]
    """One a problem, merged."""
    waves: list[Sampled] = field(default_factory=list)
    outside: list[Group] = field(default_factory=list)
    """Scored trajectories that no group holds any more: replaced failures, drafts, written hints, explanations."""
    carried: list[Carried] = field(default_factory=list)
    """Groups with rows that the step's deadline cut; the groups hold none of them."""
    explanations: list[Group] = field(default_factory=list)
    """The successful ones among those that saw the answer."""
    skipped: int = 0
    """Requests left out because their extended prompt would not fit."""
    plan_s: float = 0.0
    """Seconds of planning: everything here but sampling and scoring."""

    @property
    def sampled(self) -> int:
        """Trajectories rolled out."""
        return sum(wave.stats.requests for wave in self.waves)


def draw_problems(
    config: Config, stream: Iterator[list[Problem]], state: AlgoState, rng: np.random.Generator
) -> list[Problem]:
    """The problems of a round: the next of the stream, or a choice among `plan.pool` times as many."""
    batches = 1 if config.plan.sampler == "uniform" else config.plan.pool
    pool = [problem for _ in range(batches) for problem in next(stream)]
    if batches == 1:
        return pool
    return [pool[i] for i in choose_problems(pool, config.group.problems, config.plan, state, rng)]


def run_round(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    state: AlgoState,
    rng: np.random.Generator,
    *,
    step: int,
    first_index: int = 0,
    carried: Sequence[Carried] = (),
) -> Round:
    """Rolls the problems out, wave after wave until the plan asks for no more.

    Args:
        stages: Engine, executor, chat, scorer, configuration.
        sampler: From `engine.publish`.
        problems: Of this round.
        state: What the method remembers.
        rng: Of the planner.
        step: Training step.
        first_index: Number of problems already sampled in this step.
        carried: Of the step before; those that are whole then stand behind the groups of this round.
    """
    begun = time.perf_counter()
    config = stages.config
    plan, count = config.plan, config.resample.sampled(config.group.size)
    waves: list[Sampled] = []
    explained: list[Group] = []
    taken = np.zeros(len(problems), np.int64)
    skipped, asleep = 0, 0.0

    def sample(requests: Sequence[RolloutRequest]) -> Sampled:
        nonlocal asleep
        started = time.perf_counter()
        waves.append(
            sample_requests(
                stages,
                sampler,
                problems,
                requests,
                step=step,
                first_index=first_index,
                taken=taken.tolist(),
                carried=() if waves else carried,
            )
        )
        for request in requests:
            taken[request.problem] += request.count
        asleep += time.perf_counter() - started
        return waves[-1]

    requests = with_budget(first_wave(problems, count, plan, state, rng), told_budget(plan, config.shaping, state.step))
    requests = plain_where_too_long(stages, problems, requests)
    groups = gathered(problems, requests, sample(requests).groups)
    notes: dict[int, str] = {}
    thought = partial(thought_length, tokenizer=stages.tokenizer) if plan.serial_from == "thought" else None
    while wanted := next_wave(problems, groups, len(waves), plan, state, rng, notes, count=count, thought=thought):
        requests = [request for request in wanted if fits(stages, problems, request)]
        skipped += len(wanted) - len(requests)
        if not requests:
            break
        results = sample(requests).groups
        groups = merge(groups, requests, results, plan)
        notes = written_hints(requests, results)
        explained += explanations(requests, results)
    groups = [*groups, *(group for wave in waves for group in wave.late)]
    edit = load_part("plan.edit", plan.edit)
    if edit is not None:
        groups = [edit(group) for group in groups]
    outside = left_out(waves, groups) if len(waves) > 1 or plan.edit else []
    cut = [group for wave in waves for group in wave.carried]
    return Round(groups, waves, outside, cut, explained, skipped, time.perf_counter() - begun - asleep)


def fits(stages: Stages, problems: Sequence[Problem], request: RolloutRequest) -> bool:
    """Whether an extended prompt, and a token behind a prefix, have room; prompts are never cut."""
    config, chat = stages.config.rollout, stages.chat
    prompt = chat.prompt_ids(problems[request.problem], request.suffix) if request.suffix else ()
    prefix = len(request.prefix) + len(opening_ids(chat, request.prefix_text))
    return len(prompt) <= config.max_prompt_tokens and prefix < config.max_response_tokens


def plain_where_too_long(
    stages: Stages, problems: Sequence[Problem], requests: Sequence[RolloutRequest]
) -> list[RolloutRequest]:
    """A first wave in which hints and budgets that do not fit are left away."""
    return [
        replace(request, condition="", suffix="")
        if request.condition.startswith((HINT, BUDGET)) and not fits(stages, problems, request)
        else request
        for request in requests
    ]


def left_out(waves: Sequence[Sampled], groups: Sequence[Group]) -> list[Group]:
    """The scored trajectories of these waves that the groups do not hold, as groups."""
    held = {id(trajectory) for group in groups for trajectory in group.trajectories}
    out = []
    for result in (group for wave in waves for group in wave.groups):
        pairs = [p for p in zip(result.trajectories, result.verdicts, strict=True) if id(p[0]) not in held]
        if pairs:
            out.append(Group(result.problem, tuple(t for t, _ in pairs), tuple(v for _, v in pairs)))
    return out


def thought_length(trajectory: Trajectory, tokenizer: Tokenizer) -> int:
    """Tokens of the first turn before its thought closes; all of them where it never does."""
    if not trajectory.turns:
        return 0
    ids = trajectory.tokens[trajectory.turns[0].start : trajectory.turns[0].end]
    place = tokenizer.decode(ids).find(THOUGHT_CLOSE)
    if place < 0:
        return len(ids)
    low, high = 0, len(ids)
    while low < high:  # the most tokens whose text ends before the tag begins
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(tokenizer.decode(ids[:middle])) <= place else (low, middle - 1)
    return low

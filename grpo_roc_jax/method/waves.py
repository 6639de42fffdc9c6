"""Rollouts in waves: requests for the next wave, and how its results enter the groups.

    requests = first_wave(...);  groups = gathered(problems, requests, results)
    while requests := next_wave(problems, groups, wave, notes, ...):  groups = merge(groups, requests, results, ...)

with the loop rolling out and scoring in between. A request extends the prompt; the trajectory remembers how as its
`condition`. Everything here is data in, data out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_roc_jax.method.config import ShapingConfig
from grpo_roc_jax.method.edit import EXAMPLES, EXPLANATION, HINT, joined, replace_failures
from grpo_roc_jax.method.plan import (
    half_width_counts,
    hard_and_easy,
    knapsack_counts,
    linear_decay,
    reward_conditions,
    reward_goal,
    sampling_temperature,
    success_posterior,
    uncertainty_weights,
)
from grpo_roc_jax.method.plan_config import PlanConfig
from grpo_roc_jax.method.shaping import token_budget
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.types import Group, Problem, Trajectory

DRAFT = "draft"
BUDGET = "budget"
"""Rollouts that were told a token budget (Train Long, Think Short)."""
CUT = "cut"
"""Rollouts that continue a cut thought (S-GRPO)."""
WRITER = "hint_writer"
"""Rollouts that write a hint for their problem (SAGE); they compete for no reward."""


@dataclass(frozen=True)
class RolloutRequest:
    """`count` rollouts of problem number `problem` of the batch, with `suffix` appended to its user message."""

    problem: int
    count: int
    condition: str = ""
    suffix: str = ""
    temperature: float | None = None
    prefix: tuple[int, ...] = ()
    """Response ids that the rollout continues: off the policy mask, and part of its budget."""
    prefix_text: str = ""
    """Text between the prefix and what is sampled."""

    @property
    def extended(self) -> bool:
        """Whether it is more than the plain prompt."""
        return bool(self.suffix or self.prefix or self.prefix_text)


def choose_problems(
    pool: Sequence[Problem], count: int, config: PlanConfig, state: AlgoState, rng: np.random.Generator
) -> list[int]:
    """Which `count` of a pool of candidates to train on, ascending.

    uniform takes the first ones (the stream is shuffled); uncertainty draws without replacement by
    `uncertainty_weights` of the tracker; pairs takes rarely and nearly always solved problems by turns, then the rest.
    """
    if config.sampler == "uniform" or len(pool) <= count:
        return list(range(min(count, len(pool))))
    rows = state.table.get([p.uid for p in pool])
    if config.sampler == "uncertainty":
        weights = uncertainty_weights(rows["alpha"] / (rows["alpha"] + rows["beta"]))
        keys = rng.gumbel(size=len(pool)) + np.log(weights)
        return sorted(int(i) for i in np.argsort(-keys, kind="stable")[:count])
    rates = np.where(rows["visits"] > 0, rows["successes"] / np.maximum(rows["visits"], 1), np.nan)
    hard, easy = hard_and_easy(rates, config.pair_group)
    turns = [int(i) for pair in zip(hard, easy, strict=False) for i in pair]
    rest = [i for i in range(len(pool)) if i not in set(turns)]
    return sorted((turns + rest)[:count])


def first_wave(
    problems: Sequence[Problem], count: int, config: PlanConfig, state: AlgoState, rng: np.random.Generator
) -> list[RolloutRequest]:
    """Requests for every problem: counts by the budget rule, prompts under reward tokens where set.

    Args:
        problems: The batch.
        count: Rollouts a problem under the uniform rule; the knapsack spends count * len(problems) in all, half_width
            the same over two waves, and `second` serial asks for one, which its cuts share.
        config: `budget`, `reward_tokens`, `hints`, `second`, `temperatures`.
        state: Success rates and hint levels.
        rng: Advanced by reward tokens.
    """
    plain = state.step < config.warmup_steps
    counts = _counts(problems, 1 if config.second == "serial" and not plain else count, config, state)
    heat = sampling_temperature(config.temperatures, state.temperature_stage)
    requests = []
    levels = state.table.get([p.uid for p in problems])["level"].astype(int)
    for index, (problem, number) in enumerate(zip(problems, counts, strict=True)):
        if config.reward_tokens != "none":
            drawn = reward_conditions(int(number), config.high_share, config.reward_tokens, rng)
            requests += [
                RolloutRequest(index, drawn.count(c), c, reward_goal(c, config.reward_form), heat)
                for c in sorted(set(drawn))
            ]
        elif config.hints == "level" and not plain and levels[index] > 0 and hint_text(problem, levels[index], config):
            level = int(levels[index])
            requests.append(
                RolloutRequest(index, int(number), f"{HINT}{level}", hint_text(problem, level, config), heat)
            )
        else:
            requests.append(RolloutRequest(index, int(number), temperature=heat))
    return requests


def told_budget(plan: PlanConfig, shaping: ShapingConfig, step: int) -> str:
    """What prompts of this step end with under `plan.tell_budget`; empty where nothing is told."""
    if not plan.tell_budget:
        return ""
    budget = token_budget(step, shaping.budget_start, shaping.budget_decay, shaping.budget_every)
    return "\n" + plan.tell_budget.replace("{budget}", str(int(budget)))


def with_budget(requests: Sequence[RolloutRequest], text: str) -> list[RolloutRequest]:
    """The requests with this text at the end of their prompts."""
    if not text:
        return list(requests)
    return [replace(r, suffix=r.suffix + text, condition=r.condition or BUDGET) for r in requests]


def gathered(problems: Sequence[Problem], requests: Sequence[RolloutRequest], results: Sequence[Group]) -> list[Group]:
    """One group a problem from a first wave in which a problem may have several requests (reward tokens)."""
    parts: list[list[Group]] = [[] for _ in problems]
    for request, result in zip(requests, results, strict=True):
        parts[request.problem].append(result)
    return [joined(Group(problem, (), ()), *some) for problem, some in zip(problems, parts, strict=True)]


def next_wave(
    problems: Sequence[Problem],
    groups: Sequence[Group],
    wave: int,
    config: PlanConfig,
    state: AlgoState,
    rng: np.random.Generator,
    notes: Mapping[int, str] | None = None,
    *,
    count: int = 0,
    thought: Callable[[Trajectory], int] | None = None,
) -> list[RolloutRequest]:
    """Requests of the next wave; empty when the step is complete.

    Args:
        problems: The batch.
        groups: What was merged so far.
        wave: 1 for the wave after the first, then 2, ...
        config: `second`, `hints`, `budget` and their settings.
        state: Its step and temperature stage are read.
        rng: Advanced by `serial`.
        notes: Hints written in the wave before, by problem (`written_hints`).
        count: As in `first_wave`; read by `half_width`.
        thought: Number of tokens of a trajectory's first thought, for `serial`; None takes its whole first turn.
    """
    if state.step < config.warmup_steps:
        return []
    if config.budget == "half_width":
        requests = _allocated(groups, count, config) if wave == 1 else []
        wave -= 1
    else:
        requests = []
    if wave == 1 and config.second == "draft":
        requests = [_draft_request(i, g, config) for i, g in enumerate(groups) if g.size]
    elif wave == 1 and config.second == "serial":
        requests = [r for i, g in enumerate(groups) if g.size for r in _cut_requests(i, g, config, rng, thought)]
    elif wave and config.second == "none" and config.hints not in ("none", "level"):
        requests = _rescues(problems, groups, wave, config, state, notes or {})
    heat = sampling_temperature(config.temperatures, state.temperature_stage)
    return [replace(request, temperature=heat) for request in requests]


def _rescues(
    problems: Sequence[Problem],
    groups: Sequence[Group],
    wave: int,
    config: PlanConfig,
    state: AlgoState,
    notes: Mapping[int, str],
) -> list[RolloutRequest]:
    """What problems failed by every rollout get."""
    if config.hints == "explain" and not explanation_weight(config, state.step):
        return []
    requests = []
    for index, (problem, group) in enumerate(zip(problems, groups, strict=True)):
        if not group.size or group.correct.any():
            continue
        request = _rescue(index, problem, group, groups, wave, config, notes)
        if request is not None:
            requests.append(request)
    return requests


def merge(
    groups: Sequence[Group], requests: Sequence[RolloutRequest], results: Sequence[Group], config: PlanConfig
) -> list[Group]:
    """The groups after a wave: `results[k]` are the scored rollouts of `requests[k]`.

    scaffold and guide replace failures by hinted successes. retry, write and examples replace the group if any of the
    new rollouts succeeds, draft always. Cuts come before the full thought, in order; more of the plain prompt behind
    what is there. Explanations and written hints stay out; `explanations` and `written_hints` collect them.
    """
    merged = list(groups)
    cuts: dict[int, list[Group]] = {}
    for request, result in zip(requests, results, strict=True):
        place = request.problem
        if request.condition == CUT:
            cuts.setdefault(place, []).append(result)
        elif not request.condition:
            merged[place] = joined(merged[place], result)
        elif request.condition == DRAFT:
            merged[place] = result if result.size else merged[place]
        elif request.condition.startswith((HINT, EXAMPLES)):
            if config.hints in ("scaffold", "guide"):
                merged[place] = replace_failures(merged[place], result, config.replace)
            elif result.correct.any():
                merged[place] = result
    for place, parts in cuts.items():
        merged[place] = joined(*parts, merged[place])
    return merged


def written_hints(requests: Sequence[RolloutRequest], results: Sequence[Group]) -> dict[int, str]:
    """Problem number -> the hint that the policy wrote for it in this wave."""
    return {
        request.problem: "\n".join(turn.text for turn in result.trajectories[0].turns)
        for request, result in zip(requests, results, strict=True)
        if request.condition == WRITER and result.size
    }


def explanations(requests: Sequence[RolloutRequest], results: Sequence[Group]) -> list[Group]:
    """The successful rollouts of the wave that saw the answer, for `methods.supervised_rows`."""
    found = []
    for request, result in zip(requests, results, strict=True):
        wins = np.flatnonzero(result.correct)
        if request.condition == EXPLANATION and len(wins):
            found.append(
                Group(
                    result.problem,
                    tuple(result.trajectories[i] for i in wins),
                    tuple(result.verdicts[i] for i in wins),
                )
            )
    return found


def explanation_weight(config: PlanConfig, step: int) -> float:
    """Weight of the explanations' likelihood in the loss of this step (ExPO, arXiv:2507.02834)."""
    return linear_decay(step, config.explain_weight, config.explain_steps)


# The pieces.


def hint_text(problem: Problem, level: int, config: PlanConfig) -> str:
    """The hints 1..level of the problem, joined; they live in the column `hint_column` as a list of strings."""
    hints = problem.extra.get(config.hint_column, ())
    hints = [hints] if isinstance(hints, str) else list(hints)
    text = "\n".join(str(h) for h in hints[:level])
    return f"\n{config.hint_intro}{text}" if text else ""


def hint_levels(problem: Problem, config: PlanConfig) -> int:
    """Number of hints that the problem offers."""
    hints = problem.extra.get(config.hint_column, ())
    return 1 if isinstance(hints, str) else len(hints)


def best_draft(rewards: np.ndarray) -> int:
    """Index of the first best draft (iGRPO, arXiv:2602.09000)."""
    return int(np.argmax(rewards))


def expected_best(rate: float, drafts: int) -> float:
    """1 - (1 - V)^N: the expected 0/1 reward of the best of N drafts."""
    return 1 - (1 - rate) ** drafts


def similar_examples(prompt: str, solved: Mapping[str, str], count: int) -> list[tuple[str, str]]:
    """The `count` (prompt, solution) whose prompts share most words with `prompt` (Jaccard), best first; ties by text.

    The seeding of XRPO, arXiv:2510.06672; the similarity is ours.
    """
    words = set(prompt.split())

    def likeness(other: str) -> float:
        theirs = set(other.split())
        return len(words & theirs) / max(len(words | theirs), 1)

    ranked = sorted((p for p in solved if p != prompt), key=lambda p: (-likeness(p), p))
    return [(p, solved[p]) for p in ranked[:count]]


def cut_points(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Ascending positions in 1..length-1 at which a thought is stopped (S-GRPO, arXiv:2505.07686)."""
    places = np.arange(1, max(length, 1))
    return np.sort(rng.choice(places, size=min(count, len(places)), replace=False)) if len(places) else places


def _counts(problems: Sequence[Problem], count: int, config: PlanConfig, state: AlgoState) -> np.ndarray:
    if config.budget == "uniform" or state.step < config.warmup_steps:
        return np.full(len(problems), count)
    if config.budget == "half_width":
        return np.full(len(problems), config.pilot)
    rows = state.table.get([p.uid for p in problems])
    rates = success_posterior(rows["successes"], rows["visits"])
    low = min(config.least_rollouts, count)
    return knapsack_counts(rates, count * len(problems), low, max(config.most_rollouts, count))


def _allocated(groups: Sequence[Group], count: int, config: PlanConfig) -> list[RolloutRequest]:
    """What the pilot leaves of count * len(groups) rollouts, where the interval shrinks most."""
    spreads = np.array([g.rewards.std(ddof=1) if g.size > 1 else 0.0 for g in groups])
    counts = half_width_counts(
        spreads,
        config.pilot,
        count * len(groups),
        max(config.most_rollouts, count),
        config.interval_alpha,
        config.interval_bonus,
    )
    return [RolloutRequest(i, int(n) - config.pilot) for i, n in enumerate(counts) if n > config.pilot]


def _draft_request(index: int, group: Group, config: PlanConfig) -> RolloutRequest:
    text = _own_text(group, best_draft(group.rewards))
    return RolloutRequest(index, group.size, DRAFT, f"\n{config.draft_intro}{text}")


def _cut_requests(
    index: int,
    group: Group,
    config: PlanConfig,
    rng: np.random.Generator,
    thought: Callable[[Trajectory], int] | None,
) -> list[RolloutRequest]:
    """The first trajectory's first thought, stopped at random places; each continues once."""
    full = group.trajectories[0]
    ids = full.tokens[full.turns[0].start : full.turns[0].end] if full.turns else full.tokens[:0]
    length = len(ids) if thought is None else thought(full)
    return [
        RolloutRequest(index, 1, CUT, prefix=tuple(ids[:place].tolist()), prefix_text=config.serial_stop)
        for place in cut_points(length, config.serial_cuts, rng)
    ]


def _own_text(group: Group, index: int) -> str:
    return "\n".join(turn.text for turn in group.trajectories[index].turns)


def _rescue(
    index: int,
    problem: Problem,
    group: Group,
    groups: Sequence[Group],
    wave: int,
    config: PlanConfig,
    notes: Mapping[int, str],
) -> RolloutRequest | None:
    """What an all-failed problem gets in this wave; None when nothing is left to try."""
    if config.hints == "write":
        return _written(index, problem, group, wave, config, notes)
    if config.hints == "explain":
        suffix = f"\n{config.answer_intro}{problem.answer}"
        return RolloutRequest(index, config.replace, EXPLANATION, suffix) if wave == 1 else None
    if config.hints == "examples":
        solved = {g.problem.prompt: _own_text(g, best_draft(g.rewards)) for g in groups if g.correct.any()}
        chosen = similar_examples(problem.prompt, solved, config.examples)
        text = "\n\n".join(f"{p}\n{s}" for p, s in chosen)
        return RolloutRequest(index, group.size, EXAMPLES, f"\n{text}") if chosen and wave == 1 else None
    if wave > min(hint_levels(problem, config), config.hint_levels):
        return None
    return RolloutRequest(index, group.size, f"{HINT}{wave}", hint_text(problem, wave, config))


def _written(
    index: int, problem: Problem, group: Group, wave: int, config: PlanConfig, notes: Mapping[int, str]
) -> RolloutRequest | None:
    """SAGE: odd waves ask the policy for a hint of the next level, even ones roll out under it."""
    level = (wave + 1) // 2
    if level > config.hint_levels:
        return None
    if wave % 2:
        solution = problem.extra.get(config.solution_column, problem.answer)
        intro = config.writer_intro.replace("{level}", str(level)).replace("{levels}", str(config.hint_levels))
        return RolloutRequest(index, 1, WRITER, f"\n{intro}{solution}")
    if index not in notes:
        return None
    return RolloutRequest(index, group.size, f"{HINT}{level}", f"\n{config.hint_intro}{notes[index]}")

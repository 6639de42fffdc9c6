"""Settings of the planner: which rollouts a step asks for."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlanConfig:
    """Which rollouts a step asks for beyond one plain wave."""

    sampler: Literal["uniform", "uncertainty", "pairs"] = "uniform"
    """Which problems of the pool train: in stream order, by uncertainty of their tracker (SPO, arXiv:2509.13232), or
    rarely and nearly always solved ones in pairs (arXiv:2602.03452)."""
    pool: int = 1
    """Candidates drawn from the stream for each problem trained on; read by every sampler but `uniform`."""
    pair_group: int = 8
    """Group size by which `pairs` calls a problem nearly always solved: one or two failures in a group."""
    budget: Literal["uniform", "knapsack", "half_width"] = "uniform"
    """Rollouts a problem: the same for all; by expected gain at equal total (Knapsack RL, arXiv:2509.25849); or a pilot
    and then where the interval of the mean reward shrinks most, at equal total (XRPO, arXiv:2510.06672)."""
    pilot: int = 4
    """Rollouts a problem in the pilot of `half_width`."""
    interval_alpha: float = 0.05
    """1 - alpha is the level of that interval."""
    interval_bonus: float = 0.0
    """Factor on an extra gain sqrt(log total / n) for little sampled problems under `half_width`; 0 is off."""
    least_rollouts: int = 2
    """Fewest rollouts of a problem under `knapsack`."""
    most_rollouts: int = 128
    """Most rollouts of a problem under `knapsack` and `half_width`."""
    warmup_steps: int = 0
    """Steps of plain waves before budgets, hints and second waves begin."""
    reward_tokens: Literal["none", "iid", "fixed"] = "none"
    """Conditions each rollout on a reward token (RC-GRPO, arXiv:2602.03025), drawn one by one or in fixed numbers.
    Wants a policy that was fine-tuned on both."""
    high_share: float = 0.5
    """Probability or share of the high token; the paper takes the share of successes in its fine-tuning data."""
    reward_form: Literal["token", "text"] = "token"
    """How a reward token is written: as the special token of the vocabulary (characters where it has none), or in
    words, which every vocabulary reads alike."""
    separation: float = 0.05
    """Least gap between held-out success under the high and under the low token before the first step; without one the
    conditioning does nothing (arXiv:2602.03025, prop. 4.3), so the run is refused. 0 skips the check."""
    hints: Literal["none", "level", "scaffold", "guide", "retry", "write", "examples", "explain"] = "none"
    """What problems failed by every rollout get. `level`: a hint level each problem carries from visit to visit (SAGE
    light). `scaffold`: rising hints until one succeeds, which replaces failures (Scaf-GRPO). `guide`: the same, trained
    under the plain prompt (Guide-GRPO). `retry`: the whole group again under the hint. `write`: the same, with hints
    that the policy writes from the solution (SAGE). `examples`: again behind solved problems of the batch (XRPO).
    `explain`: the answer is shown, the explanation trained on (ExPO)."""
    hint_column: str = "hints"
    """Column of the data with a problem's hints, weakest first, cumulative."""
    hint_levels: int = 3
    """Highest hint level used."""
    hint_intro: str = "Hint: "
    """Text before the hints."""
    replace: int = 1
    """Failures of a group that hinted successes replace, or explanations asked for."""
    writer_intro: str = "Write a hint of strength {level} of {levels}, without the result, from this solution: "
    """Text before the solution under `write`."""
    solution_column: str = "solution"
    """Column of the data with the solution that hints are written from; the answer where it is missing."""
    second: Literal["none", "draft", "serial"] = "none"
    """`draft`: a second wave sees the best rollout of the first and trains alone (iGRPO, arXiv:2602.09000). `serial`:
    it goes on from cuts of the problem's one first rollout (S-GRPO, arXiv:2505.07686; with shaping.steps serial)."""
    serial_cuts: int = 8
    """Cuts of a thought under `serial`."""
    serial_from: Literal["thought", "turn"] = "thought"
    """What is cut: the first turn's thought, or the whole first turn, for policies whose thoughts are short."""
    serial_stop: str = "\nTime is up; the answer follows.</reason><answer>"
    """Text that ends a cut thought; the rollout goes on behind it."""
    draft_intro: str = "An earlier attempt:\n"
    """Text before the draft."""
    answer_intro: str = "Explain how to arrive at the answer "
    """Text before the answer under `explain`."""
    examples: int = 2
    """Solved problems shown under `examples`."""
    explain_weight: float = 0.1
    """Weight of an explanation's mean log-likelihood at step 0, falling to 0 over `explain_steps`."""
    explain_steps: int = 100
    """Steps over which explanations fade."""
    tell_budget: str = ""
    """Text at the end of every prompt of a first wave and of evaluation, with {budget} for the token budget that
    `shaping.steps budget` has reached (arXiv:2508.08940). Empty tells nothing."""
    temperatures: tuple[float, ...] = ()
    """Rising sampling temperatures; the next one begins when diversity falls below its target, and none returns
    (arXiv:2603.07777). Empty uses sampling.temperature."""
    diversity_target: float = 0.5
    """Share of distinct 4-grams in a group's responses below which the temperature rises."""
    edit: str = ""
    """`package.module:function` of a scored group -> group, applied when all waves are in and before selection, such as
    the repair of failed calls in `examples/plugins`."""

    def __post_init__(self) -> None:
        if not 0 < self.high_share < 1 and self.reward_tokens != "none":
            raise ValueError(f"plan.high_share = {self.high_share}; a share strictly between 0 and 1 is wanted")
        if not 1 <= self.least_rollouts <= self.most_rollouts:
            bounds = f"plan.least_rollouts = {self.least_rollouts}, most_rollouts = {self.most_rollouts}"
            raise ValueError(f"{bounds}; 1 <= least <= most is wanted")
        if self.reward_tokens != "none" and (self.hints != "none" or self.second != "none"):
            raise ValueError(
                "plan.reward_tokens with plan.hints or plan.second: a rollout has one condition; use one of them"
            )
        if self.second != "none" and self.hints not in ("none", "level"):
            raise ValueError(
                f"plan.hints = {self.hints} with plan.second = {self.second}: both ask for the second wave; use one"
            )
        if self.second == "serial" and self.budget != "uniform":
            raise ValueError(
                f"plan.budget = {self.budget} with plan.second serial, whose rollouts are cuts of one; set plan.budget "
                "uniform"
            )
        if self.sampler != "uniform" and self.pool < 2:
            given = f"plan.sampler = {self.sampler} with plan.pool = {self.pool}"
            raise ValueError(f"{given} has nothing to choose from; raise plan.pool, or take plan.sampler uniform")
        if any(t <= 0 for t in self.temperatures) or list(self.temperatures) != sorted(set(self.temperatures)):
            raise ValueError(f"plan.temperatures = {self.temperatures}; positive, rising numbers are wanted")
        if self.pilot < 2 or not 0 < self.interval_alpha < 1:
            given = f"plan.pilot = {self.pilot}, plan.interval_alpha = {self.interval_alpha}"
            raise ValueError(f"{given}; at least 2 rollouts, as one has no spread, and a number in (0, 1) are wanted")
        for name in ("warmup_steps", "explain_weight", "interval_bonus", "separation"):
            if getattr(self, name) < 0:
                raise ValueError(f"plan.{name} = {getattr(self, name)}; at least 0 is wanted")
        for name in ("hint_levels", "replace", "examples", "explain_steps", "serial_cuts"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name} = {getattr(self, name)}; at least 1 is wanted")

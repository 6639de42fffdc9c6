"""Settings of the method: which trajectories train, what each is worth, how the loss reads them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ResampleConfig:
    """From the sampled group to the trained one."""

    method: Literal["roc", "none", "uniform", "max_variance"] = "roc"
    """`roc`: resample on correct (arXiv:2508.20722), the cleanest successes and a fair share of the failures. `none`:
    sample exactly the group that trains. `uniform`: random subset, the control arm of `roc`. `max_variance`: the subset
    with the largest reward variance (arXiv:2504.13818)."""
    oversample: float = 2.0
    """Trajectories sampled for each one trained; 32 for 16 in the paper. Read by every method but `none`."""
    drop: Literal["equal", "all_correct", "none"] = "equal"
    """Groups that leave before selection: those with equal rewards (they carry no signal), only those solved by every
    trajectory, or none."""
    positive_select: Literal["sort", "inverse", "uniform"] = "sort"
    """Which successes `roc` keeps: the lowest penalties (the released code), a draw weighted by 1 / (penalty +
    inverse_epsilon) (the paper's text), or a uniform draw."""
    negative_select: Literal["uniform", "first"] = "uniform"
    """Which failures `roc` keeps: a uniform draw, or the first in rollout order. Never ranked: ranking failures did not
    help (the authors, in issue 49 of their repository)."""
    min_positive: int = 2
    """Successes kept at least, where they exist; without it one success of many is lost and the group goes flat."""
    min_negative: int = 2
    """Failures kept at least, where they exist."""
    inverse_epsilon: float = 0.05
    """Added to the penalty in the `inverse` draw; smaller is sharper (0.01 to 0.1 is the useful range)."""
    no_tool_penalty: float = 0.5
    """Error part of the penalty of a success without any tool call; the paper's value, which favours tool use."""
    error_penalty: bool = True
    """Counts failed tool calls in the penalty."""
    format_penalty: bool = True
    """Counts missing, repeated and unbalanced answer tags in the penalty."""
    penalty_source: Literal["structured", "text_compat"] = "structured"
    """`structured` reads the status of each call. `text_compat` repeats the released scorer, which looks for the word
    "error" in observations and does not count the first turn; for parity studies."""
    conditions: Literal["ignore", "low_last", "stratify"] = "ignore"
    """Successes sampled under different reward tokens: rank all together, rank those under the low token behind the
    others, or share the places by condition."""
    short_groups: Literal["keep", "drop"] = "keep"
    """A group left with fewer trajectories than wanted (faults of ours): train on what is there, or drop it."""

    def __post_init__(self) -> None:
        if self.oversample < 1:
            raise ValueError(
                f"resample.oversample = {self.oversample}; at least 1 is wanted: fewer cannot fill a group"
            )
        if self.min_positive < 0 or self.min_negative < 0:
            raise ValueError(
                f"resample.min_positive = {self.min_positive}, resample.min_negative = {self.min_negative}; "
                "counts of at least 0 are wanted"
            )
        if self.conditions != "ignore" and self.method != "roc":
            raise ValueError(
                f"resample.conditions = {self.conditions} with resample.method = {self.method}: only roc ranks "
                "successes; set resample.conditions ignore"
            )
        if self.inverse_epsilon <= 0:
            raise ValueError(f"resample.inverse_epsilon = {self.inverse_epsilon}; a positive number is wanted")
        if self.no_tool_penalty < 0:
            raise ValueError(f"resample.no_tool_penalty = {self.no_tool_penalty}; at least 0 is wanted")

    def sampled(self, size: int) -> int:
        """Trajectories to sample for a trained group of `size`."""
        return size if self.method == "none" else max(size, round(size * self.oversample))


ShapingStep = Literal[
    "overlong",
    "tool_errors",
    "unlikeliness",
    "dynamic_length",
    "serial",
    "soft",
    "outcome",
    "budget",
    "surrogate",
    "posterior",
    "quality",
    "staged",
    "win_rate",
]

OVERWRITING = ("serial", "outcome", "budget", "surrogate", "posterior", "staged", "win_rate")
"""Steps that make the reward from the trajectory and do not read what the steps before them made."""


@dataclass(frozen=True)
class ShapingConfig:
    """Rewards -> rewards, on the kept groups before the advantage; selection reads the raw ones."""

    steps: tuple[ShapingStep, ...] = ()
    """Maps applied in order; empty leaves rewards alone, as GRPO-RoC does. `shaping.py` has formula and source."""
    overlong_limit: int = 20480
    """Response tokens (observations included) from which `overlong` takes the full penalty of 1 (arXiv:2503.14476)."""
    overlong_buffer: int = 4096
    """Tokens before the limit over which the penalty grows."""
    tool_error_coef: float = 0.5
    """`tool_errors` subtracts this times the failed share of the calls: the reward penalty that RoC argues against."""
    unlikeliness_beta: float = 0.25
    """Share of the reward that the most likely success loses under `unlikeliness` (arXiv:2506.02355)."""
    dynamic_fraction: float = 0.2
    """Share of the batch's problems, the best solved ones, that `dynamic_length` shortens (arXiv:2505.18086)."""
    dynamic_alpha: float = 0.6
    """Largest cut of a success's reward under `dynamic_length`."""
    soft_tau: float = 0.8
    """Reward above which `soft` grows logarithmically (arXiv:2509.18056)."""
    soft_above: float = 0.01
    """Factor of that logarithm."""
    soft_below: float = 1.0
    """Curvature of the exponential below `soft_tau`."""
    outcome_negative: float = 1.0
    """`outcome` maps success to +1 and failure to minus this (arXiv:2602.03452). Cancels under a group z-score."""
    budget_start: int = 256
    """Token budget of `budget` at step 0 (arXiv:2508.08940)."""
    budget_decay: float = 0.85
    """Factor on the budget every `budget_every` steps."""
    budget_every: int = 50
    """Steps between reductions of the budget."""
    budget_weights: tuple[float, float, float] = (0.6, 0.3, 0.1)
    """Weights of correctness, of closeness to the budget, and of exactly one well-formed answer."""
    surrogate_length: int = 3072
    """Tokens at which the length term of `surrogate` reaches -1 (arXiv:2505.19439)."""
    quality_weight: float = 0.3
    """Share of a success's reward that `quality` takes from the channel `quality_channel` (arXiv:2601.06021)."""
    quality_channel: str = "quality"
    """Channel that `quality` and `posterior` read; a custom reward function provides it."""
    format_channel: str = "format"
    """Channel that `posterior`, `surrogate` and `staged` read for the format."""
    staged_weights: tuple[float, ...] = (0.1, 0.2, 0.7)
    """Pay of `staged` for each passed stage: clean calls, well-formed answer, correct answer (arXiv:2512.07478)."""
    judge: str = ""
    """`package.module:function` of the features of a group -> [G,G] with 1 where a trajectory wins against another,
    0.5 for a tie, for `win_rate` (Pref-GRPO, arXiv:2508.20751). Empty: correctness decides, then fewer failed calls."""
    custom: str = ""
    """`package.module:function` of (rewards, features, state) -> rewards for one group, applied last."""

    def __post_init__(self) -> None:
        late = [step for step in self.steps[1:] if step in OVERWRITING]
        if late:
            raise ValueError(
                f"shaping.steps = {self.steps}: {late[-1]} makes the reward anew and nothing is left of the steps "
                f"before it; put {late[-1]} first, or leave the others out"
            )
        if self.overlong_buffer <= 0 or self.overlong_limit < self.overlong_buffer:
            raise ValueError(
                f"shaping.overlong_limit = {self.overlong_limit} with overlong_buffer = {self.overlong_buffer}; "
                "a positive buffer no longer than the limit is wanted"
            )
        if not 0 < self.dynamic_fraction <= 1:
            raise ValueError(f"shaping.dynamic_fraction = {self.dynamic_fraction}; a share in (0, 1] is wanted")
        if not 0 < self.budget_decay <= 1 or self.budget_every < 1 or self.budget_start < 1:
            raise ValueError(
                f"shaping.budget_start = {self.budget_start}, budget_decay = {self.budget_decay}, budget_every = "
                f"{self.budget_every}; a budget of at least 1, a decay in (0, 1] and at least 1 step are wanted"
            )


@dataclass(frozen=True)
class AdvantageConfig:
    """Rewards of the kept groups -> advantages = post . scale . baseline."""

    baseline: Literal["mean", "leave_one_out", "median", "length_weighted", "virtual_max", "tracker", "none"] = "mean"
    """What is subtracted: the group mean (GRPO), the mean of the others (RLOO, arXiv:2402.14740), the median
    (arXiv:2601.22582), the length-weighted mean (OPO), the mean with one virtual best reward (NGRPO, arXiv:2509.18851),
    the problem's own tracker (SPO, arXiv:2509.13232), nothing."""
    scale: Literal["std", "batch_std", "mad", "beta", "virtual_std", "pass_at_k", "none"] = "std"
    """What it is divided by: the group's standard deviation, the batch's, the median absolute deviation, the density of
    a Beta fitted to the batch (BNPO, arXiv:2506.02864), the deviation with the virtual reward, nothing. `pass_at_k`
    replaces the advantage by the one of pass@k (arXiv:2508.10751)."""
    ddof: int = 1
    """1 divides by n - 1 in a standard deviation (what TRL, verl and Tunix do), 0 by n."""
    eps: float = 1e-6
    """Added to a standard deviation."""
    virtual_reward: float = 1.0
    """The best possible reward, for `virtual_max` and `virtual_std`."""
    pass_k: int = 2
    """k of `pass_at_k`."""
    channels: Literal["sum", "each", "each_batch"] = "sum"
    """`sum`: one reward. `each`: every reward channel through baseline and scale, then summed (MO-GRPO,
    arXiv:2509.22047). `each_batch`: and then standardised over the batch (GDPO, arXiv:2601.05242)."""
    channel_weights: tuple[float, ...] = ()
    """Weights of the channels under `each` and `each_batch`; empty means 1 each."""
    strata: Literal["none", "tool_calls", "turns"] = "none"
    """Standardises within trajectories of equal count and blends (Stratified GRPO, arXiv:2510.06214)."""
    strata_cap: int = 4
    """Counts from here on share a stratum."""
    strata_blend: float = 0.5
    """Weight of the within-stratum advantage; 0 is plain."""
    whiten: Literal["none", "row", "token"] = "none"
    """Standardises over the batch, trajectories or tokens counting equally (REINFORCE++, arXiv:2501.03262: token)."""
    rescale_nonzero: bool = False
    """Multiplies a group by its size over its number of non-zero advantages (arXiv:2601.22582)."""
    drop_pivot: bool = False
    """Leaves the trajectory at the median untrained; with `median` and one more sampled than wanted."""
    positive_weight: float = 1.0
    """Factor on positive advantages, after scaling."""
    negative_weight: float = 1.0
    """Factor on negative advantages, after scaling (arXiv:2602.03452: before scaling it cancels)."""
    focal: float = 0.0
    """Exponent of the group weight (1 - accuracy)^focal; 0 is off."""
    novelty: float = 0.0
    """Extra pay for unlikely successes (XRPO, arXiv:2510.06672); 0 is off."""
    novelty_cap: float = 1.0
    """Largest extra pay as a multiple of the advantage."""
    tree_td: bool = False
    """Adds the change of value along shared prefixes, token by token (TEMPO, arXiv:2509.18314)."""
    truncation_mask: float = 0.0
    """Probability with which a correct, truncated, non-repeating trajectory gets advantage 0 (arXiv:2603.07777)."""
    anchor: float = 0.0
    """Advantage of trajectories under the condition `demonstration`, as a multiple of the group's best; they leave the
    group's statistics (arXiv:2509.18056, there 1.2). 0 treats them like the others."""
    constraints: tuple[str, ...] = ()
    """Channels held above `constraint_targets` by dual variables (arXiv:2604.08476)."""
    constraint_targets: tuple[float, ...] = ()
    """Wanted batch mean of each constraint."""
    dual_lr: float = 0.1
    """Step size of the dual variables."""
    dual_max: float = 5.0
    """Largest dual variable."""
    score: Literal["none", "disco", "drpo", "rebel", "reg"] = "none"
    """Replaces the advantage by the detached coefficient of a score-based objective: DisCO (arXiv:2505.12366), DRPO
    (arXiv:2510.04474), REBEL (arXiv:2404.16767), Reg-GRPO (arXiv:2506.07464). Needs a scoring pass."""
    score_tau: float = 10.0
    """Temperature over the failures' scores (DisCO, DRPO)."""
    score_eta: float = 1.0
    """Factor on reward differences (REBEL)."""
    score_lambda: float = 0.1
    """Temperature over the successes' lengths (DRPO)."""
    score_kl_delta: float = 1e-4
    """Divergence from which the constraint acts (DisCO, DRPO)."""
    score_kl_beta: float = 1e3
    """Strength of that constraint."""
    max_length: int = 8192
    """Longest response, in policy tokens: the unit of length of DRPO."""
    tracker_decay: float = 0.875
    """Memory of the per-problem success tracker that `tracker` and plug-ins read: the share of past counts kept at each
    visit (SPO, arXiv:2509.13232, at its fastest forgetting)."""
    custom: str = ""
    """`package.module:function` of (rewards, features, state) -> advantages for one group, instead of baseline and
    scale."""

    def __post_init__(self) -> None:
        if self.ddof not in (0, 1):
            raise ValueError(f"advantage.ddof = {self.ddof}; 0 or 1 is wanted")
        if len(self.constraints) != len(self.constraint_targets):
            raise ValueError(
                f"advantage.constraints names {len(self.constraints)} channels but constraint_targets has "
                f"{len(self.constraint_targets)} numbers; give one target a channel"
            )
        if self.drop_pivot and self.baseline != "median":
            raise ValueError(
                f"advantage.drop_pivot with advantage.baseline = {self.baseline}; the pivot is the trajectory at the "
                "median: set advantage.baseline median"
            )
        for name in ("strata_blend", "truncation_mask"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"advantage.{name} = {getattr(self, name)}; a share in [0, 1] is wanted")
        for name in ("eps", "positive_weight", "negative_weight", "novelty", "novelty_cap", "anchor", "focal"):
            if getattr(self, name) < 0:
                raise ValueError(f"advantage.{name} = {getattr(self, name)}; at least 0 is wanted")
        self._refuse_unread()
        if not 0 < self.tracker_decay <= 1:
            raise ValueError(f"advantage.tracker_decay = {self.tracker_decay}; a share in (0, 1] is wanted")
        if self.score_tau <= 0 or self.score_lambda <= 0 or self.pass_k < 1:
            raise ValueError("advantage.score_tau and score_lambda must be positive, pass_k at least 1")

    def _refuse_unread(self) -> None:
        """Refuses what a setting that takes another's place would pass over."""
        plain = AdvantageConfig.__dataclass_fields__
        whole = ("channels", "strata", "whiten", "rescale_nonzero", "positive_weight", "negative_weight", "focal")
        whole += ("novelty", "tree_td", "truncation_mask", "anchor", "constraints", "custom")
        for setting, off, passed_over in (
            ("score", "none", whole),
            ("channels", "sum", ("anchor", "custom")),
            ("custom", "", ("anchor",)),
        ):
            asked = [name for name in passed_over if getattr(self, name) != plain[name].default]
            if getattr(self, setting) != off and asked:
                raise ValueError(
                    f"advantage.{setting} = {getattr(self, setting)!r} takes the place of advantage.{asked[0]} = "
                    f"{getattr(self, asked[0])!r}, which would not be read; leave one of them out"
                )


@dataclass(frozen=True)
class LossConfig:
    """The loss of a token, and how tokens add up."""

    kind: Literal["clip", "cispo", "sapo", "vespo", "geometric", "ratio", "logp", "nll"] = "clip"
    """`clip`: -min(r A, clip(r) A). `cispo`: clipped, detached ratio times log-probability (arXiv:2506.13585). `sapo`:
    a smooth gate (arXiv:2511.20347). `vespo`: log-probability times W^k exp(lambda (1 - W)), detached, W the product of
    ratios (arXiv:2602.10693; wants level sequence). `geometric`: geometric mean of clipped ratios (GMPO,
    arXiv:2507.20673; likewise). `ratio`: -r A. `logp` and `nll`: -A log p, REINFORCE and supervised."""
    level: Literal["token", "turn", "sequence"] = "token"
    """Which tokens share an importance ratio: none, those of a turn, all of a trajectory (GSPO, arXiv:2507.18071)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + clip_high; larger than clip_low lets unlikely tokens grow (arXiv:2503.14476)."""
    clip_dual: float = 0.0
    """Caps the loss of a token with negative advantage at this multiple of -A (3 in verl); 0 is off."""
    clip_delta: float = 0.0
    """Caps the unclipped ratio (4 in INTELLECT-2); 0 is off."""
    cispo_low: float = 0.0
    """Lower bound of the detached ratio; 0 leaves it free."""
    cispo_high: float = 5.0
    """Upper bound of the detached ratio."""
    sapo_positive: float = 1.0
    """Steepness of the gate for positive advantages."""
    sapo_negative: float = 1.05
    """Steepness of the gate for negative advantages; a steeper one damps them sooner."""
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    """(k, lambda) of `vespo` where the advantage is positive; the released values."""
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    """(k, lambda) of `vespo` where it is negative."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy; 0 needs no reference. RC-GRPO uses 0.1."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence: u, u^2/2 or e^-u - 1 + u with u = log p - log p_ref. As a loss, k1 has zero
    gradient in expectation and k2 the right one."""
    normalizer: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """Tokens of the optimiser batch count equally (DAPO, GRPO-RoC); trajectories do (GRPO); a sum per trajectory
    (LUSPO); a sum over a constant (Dr.GRPO, arXiv:2503.20783)."""
    constant_length: int = 3000
    """Tokens a trajectory is divided by under `constant`."""
    length_weight: Literal["none", "learned"] = "none"
    """`learned`: weights trajectories by their length within the group, with one learned exponent (lambda-GRPO,
    arXiv:2510.06870)."""
    length_strength: float = 1 / 9
    """How far a length one deviation from the mean moves the weight, for `learned`."""
    length_lr: float = 0.1
    """Step size of the learned exponent."""
    old_logprobs: Literal["recorded", "scored"] = "recorded"
    """What the ratio is taken against: log-probabilities recorded while sampling, or those of a scoring pass."""
    mismatch: Literal["none", "truncate", "mask"] = "none"
    """Correction of sampler against trainer: weight each token by the ratio of scored to recorded probability, cut at
    `mismatch_cap` (TIS), or 0 beyond it (MIS). Needs old_logprobs scored."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """Whether that ratio is a token's or the geometric mean over a trajectory."""
    mismatch_cap: float = 2.0
    """Largest correction; 1 / mismatch_cap is the smallest under `mask`."""
    mask_truncated: bool = False
    """Leaves truncated trajectories out of the loss; raised truncation in arXiv:2508.20722, sec. 4.3.1."""
    mask_void_turns: bool = False
    """Leaves trajectories with a turn of neither call nor answer out of the loss (SimpleTIR, arXiv:2509.02479)."""
    mask_drift: float = 0.0
    """Leaves failures out whose recorded log-probability lies more than this above the scored one, nats a token on
    average: what the policy has moved away from already (DeepSeek-V3.2, arXiv:2512.02556). 0 is off."""
    custom: str = ""
    """`package.module:function` of (rows, groups, policy) -> rows, after everything else: the last word on advantages
    and weights of tokens, with the policy at hand for passes of its own (`step.Policy`)."""
    top_entropy: float = 1.0
    """Share of the batch's tokens that train, those where the policy is least certain (arXiv:2506.01939, there 0.2)."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "clip_dual", "clip_delta", "kl_coef", "cispo_low", "length_lr"):
            if getattr(self, name) < 0:
                raise ValueError(f"loss.{name} = {getattr(self, name)}; at least 0 is wanted")
        if not 0 < self.top_entropy <= 1 or self.mask_drift < 0:
            raise ValueError(
                f"loss.top_entropy = {self.top_entropy}, loss.mask_drift = {self.mask_drift}; a share in (0, 1] and at "
                "least 0 are wanted"
            )
        if self.clip_low >= 1:
            raise ValueError(f"loss.clip_low = {self.clip_low}; below 1 is wanted, since ratios are positive")
        if self.kind != "clip" and (self.clip_dual or self.clip_delta):
            raise ValueError(
                f"loss.clip_dual = {self.clip_dual}, loss.clip_delta = {self.clip_delta} with loss.kind = {self.kind}; "
                "only loss.kind clip has these caps: leave them 0"
            )
        if 0 < self.clip_dual <= 1:
            raise ValueError(f"loss.clip_dual = {self.clip_dual}; above 1, or 0 for off, is wanted")
        if self.kind in ("geometric", "vespo") and self.level == "token":
            raise ValueError(f"loss.kind {self.kind} goes by segments; set loss.level sequence or turn")
        if self.mismatch != "none" and self.old_logprobs != "scored":
            raise ValueError(
                f"loss.mismatch = {self.mismatch} compares recorded with scored log-probabilities; "
                "set loss.old_logprobs scored"
            )
        if self.constant_length < 1 or self.mismatch_cap < 1:
            raise ValueError(
                f"loss.constant_length = {self.constant_length}, loss.mismatch_cap = {self.mismatch_cap}; "
                "at least 1 is wanted"
            )


def needs_scores(advantage: AdvantageConfig, loss: LossConfig) -> bool:
    """Whether the update must be preceded by a scoring pass over its trajectories."""
    masks = loss.mask_drift > 0 or loss.top_entropy < 1
    return loss.old_logprobs == "scored" or advantage.score != "none" or masks


def needs_reference(loss: LossConfig) -> bool:
    """Whether log-probabilities under a reference policy are wanted."""
    return loss.kl_coef > 0

"""The configuration of a run: one frozen section per stage, assembled here, with the checks between sections."""

from dataclasses import dataclass, field
from typing import Literal

from grpo_roc_jax.checkpoint import CheckpointConfig
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.loss import UpdateConfig
from grpo_roc_jax.method.config import AdvantageConfig, LossConfig, ResampleConfig, ShapingConfig
from grpo_roc_jax.method.plan_config import PlanConfig
from grpo_roc_jax.metrics import LogConfig
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import LoraConfig
from grpo_roc_jax.pack import BatchConfig
from grpo_roc_jax.parallel import check_row_length
from grpo_roc_jax.processes import DistributedConfig
from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.rollout.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.sharding import ShardingConfig
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.unread import unread
from grpo_roc_jax.update import OptimConfig

DEFAULT_CONFIG = "toy.yaml"


@dataclass(frozen=True)
class GroupConfig:
    """How many problems and trajectories a step trains on."""

    problems: int = 8
    """Problems per training step."""
    size: int = 16
    """G: trajectories of a problem that are trained on. With an oversampling `resample.method`, `resample.oversample`
    times as many are sampled."""
    refills: int = 0
    """Further batches of problems sampled in the same step while dropped groups leave fewer than `problems` to train
    on (DAPO's dynamic sampling, arXiv:2503.14476, allows 10). 0 trains on what is left, as GRPO-RoC does."""

    def __post_init__(self) -> None:
        if self.problems < 1 or self.size < 1:
            raise ValueError(
                f"group.problems = {self.problems}, group.size = {self.size}; at least 1 of each is wanted"
            )
        if self.refills < 0:
            raise ValueError(f"group.refills = {self.refills}; 0 or more is wanted")


@dataclass(frozen=True)
class SftConfig:
    """The non-reasoning supervised stage before RL: format and tool use, no long reasoning."""

    steps: int = 0
    """Optimiser steps on demonstrator traces; 0 skips the stage."""
    traces: int = 32
    """Traces per step."""
    lr: float = 3e-3
    """Peak learning rate, per step of AdamW."""
    warmup_steps: int = 20
    """Linear warm-up; cosine decay to a tenth follows."""
    reward_tokens: bool = False
    """Ends every prompt with the reward token of its trace's outcome, so that one policy learns good and bad ways and
    which is which: the first stage of RC-GRPO (arXiv:2602.03025). Wants successes and failures in equal parts."""
    log_every: int = 20
    """Steps between rows of metrics."""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.traces < 1 or self.log_every < 1 or self.lr <= 0 or self.warmup_steps < 0:
            raise ValueError(
                f"sft.steps = {self.steps}, sft.traces = {self.traces}, sft.log_every = {self.log_every}, sft.lr = "
                f"{self.lr}, sft.warmup_steps = {self.warmup_steps}; steps and warm-up of 0 or more, at least 1 trace, "
                "log_every of at least 1 and a positive lr are wanted"
            )


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation before, during and after training."""

    every: int = 0
    """Steps between evaluations; 0 evaluates before and after only."""
    samples: int = 1
    """Rollouts per problem (the k of avg@k)."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    reward_token: Literal["auto", "high", "low", "none"] = "auto"
    """Reward token of the prompts; `auto` takes the high one where training knows reward tokens."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.samples < 1 or self.temperature < 0:
            raise ValueError(
                f"eval.every = {self.every}, eval.samples = {self.samples}, eval.temperature = {self.temperature}; 0 "
                "or more steps, at least 1 sample and a temperature of 0 or more are wanted"
            )


@dataclass(frozen=True)
class LimitsConfig:
    """When a run that goes nowhere ends by itself, with an exit status that says why."""

    empty_steps: int = 50
    """Steps in a row without a single group to train on (status 3: no learning signal)."""
    skipped_updates: int = 5
    """Steps in a row whose update was not finite and therefore skipped (status 4: diverged)."""
    infrastructure_share: float = 0.25
    """Share of a step's trajectories lost to faults of ours that counts as a failing step."""
    infrastructure_steps: int = 3
    """Failing steps in a row (status 5: infrastructure)."""

    def __post_init__(self) -> None:
        for name in ("empty_steps", "skipped_updates", "infrastructure_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} = {getattr(self, name)}; at least 1 step is wanted")
        if not 0 < self.infrastructure_share <= 1:
            raise ValueError(f"limits.infrastructure_share = {self.infrastructure_share}; a share in (0, 1] is wanted")


@dataclass(frozen=True)
class Config:
    """GRPO-RoC training: rollouts with a Python tool, resampling on correct, a clipped policy gradient."""

    name: str = "run"
    """Names the run directory under `runs/` and the run in loggers."""
    run_dir: str = ""
    """Where everything is written; empty: `runs/NAME`, or `runs/NAME-2` and so on where that exists."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on from the newest valid checkpoint of the run directory and starts fresh where there is none, so
    that the first launch and every relaunch are the same command."""
    seed: int = 0
    """Everything random derives from it: parameters, data order, sampling, selection, tools."""
    steps: int = 30
    """Training steps (rollout, selection, update)."""
    group: GroupConfig = field(default_factory=GroupConfig)
    text: TextConfig = field(default_factory=TextConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    resample: ResampleConfig = field(default_factory=ResampleConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_plan(self)
        if self.steps < 0:
            raise ValueError(f"steps = {self.steps}; 0 (supervised stage and evaluation only) or more is wanted")
        if self.rollout.max_row_tokens > self.batch.row_length:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {self.rollout.max_row_tokens} but "
                f"batch.row_length = {self.batch.row_length}; raise batch.row_length to at least the former"
            )
        check_row_length(self.batch.row_length, self.sharding.sequence)
        if self.batch.updates > self.group.problems:
            raise ValueError(
                f"batch.updates = {self.batch.updates} optimiser steps for group.problems = {self.group.problems} "
                "groups; a step trains on whole groups, so at most one a problem is possible"
            )
        if self.group.size < 2 and self.advantage.baseline in ("mean", "leave_one_out", "median"):
            raise ValueError(
                f"group.size = {self.group.size} with advantage.baseline = {self.advantage.baseline}: a group of one "
                "has no signal against itself; raise group.size, or take advantage.baseline tracker or none"
            )
        unread = bool(self.shaping.steps or self.shaping.custom or self.reward.truncated_reward)
        if self.advantage.channels != "sum" and unread:
            raise ValueError(
                f"advantage.channels = {self.advantage.channels} reads reward channels as they come; shaping.steps, "
                "shaping.custom and reward.truncated_reward change the summed reward only: leave them out, or set "
                "advantage.channels sum"
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: greedy rollouts of a problem are all equal and carry no signal; set it "
                "above 0 (eval.temperature may be 0)"
            )


def check_plan(config: Config) -> None:
    """Refuses plans that the other sections contradict.

    Raises:
        ValueError: With the two settings and what to change.
    """
    plan, sampled = config.plan, config.resample.sampled(config.group.size)
    if plan.second == "serial" and sampled != plan.serial_cuts + 1:
        raise ValueError(
            f"plan.second serial gives plan.serial_cuts + 1 = {plan.serial_cuts + 1} trajectories a problem but "
            f"{sampled} are sampled; set group.size {plan.serial_cuts + 1} with resample.method none"
        )
    if plan.budget == "half_width" and not plan.pilot < sampled:
        raise ValueError(
            f"plan.pilot = {plan.pilot} of {sampled} rollouts a problem leaves nothing to allocate; lower plan.pilot, "
            "or take plan.budget uniform"
        )
    if plan.reward_tokens == "fixed" and sampled < 2:
        raise ValueError(
            f"plan.reward_tokens fixed wants a rollout of each kind but {sampled} is sampled; raise group.size"
        )
    if plan.reward_tokens != "none" and plan.separation and not config.data.eval_problems:
        raise ValueError(
            f"plan.separation = {plan.separation} with data.eval_problems = 0: the gap between the reward tokens is "
            "measured on held-out problems; name some, or set plan.separation 0"
        )
    waves = {"plan.hints": plan.hints, "plan.second": plan.second}
    other = [f"{name} {value}" for name, value in waves.items() if value != "none"]
    other += [f"plan.budget {plan.budget}"] if plan.budget != "uniform" else []
    other += ["rollout.early_exit"] if config.rollout.early_exit else []
    if config.rollout.carry_over and other:
        raise ValueError(
            f"rollout.carry_over with {other[0]}: a group of several waves, or one that is cut on purpose, has no rows "
            "to go on with in the next step; take one of the two"
        )
    if plan.reward_tokens == "none" and config.resample.conditions != "ignore":
        raise ValueError(
            f"resample.conditions = {config.resample.conditions} without reward tokens has nothing to tell apart; set "
            "plan.reward_tokens, or resample.conditions ignore"
        )


def derived(config: Config) -> list[str]:
    """What the settings come to, in words, for the first lines of a run and for `--dry-run`."""
    group, batch = config.group, config.batch
    sampled = config.resample.sampled(group.size)
    kept = group.problems * group.size
    rows = max(1, kept * config.rollout.max_row_tokens // batch.row_length)
    micro = -(-rows // batch.rows)
    return [
        f"{group.problems} problems x {sampled} sampled -> {group.size} kept = {kept} trajectories a step, "
        f"{batch.updates} update{'s' if batch.updates > 1 else ''} of at most {-(-micro // batch.updates)} "
        f"micro-batches ({batch.rows} rows x {batch.row_length} tokens)",
        f"{config.steps} steps = {config.steps * group.problems * sampled} rollouts of at most "
        f"{config.rollout.max_row_tokens} tokens ({config.rollout.max_prompt_tokens} prompt + "
        f"{config.rollout.max_response_tokens} response), {config.rollout.slots} at a time",
        *unread(config),
    ]

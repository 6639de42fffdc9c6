"""The configuration of a run: one frozen section per stage, assembled here, with the checks between sections."""

import importlib
import os
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import field, replace
from numbers import Real
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

import grpo_roc_jax.method.distillation
import grpo_roc_jax.reward.graded
import grpo_roc_jax.worlds.worlds  # noqa: F401 (its sources)
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.generated import generator_of
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig, StreamedRows
from grpo_roc_jax.environments.config import EnvironmentKind, ToolsAlone
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import BatchConfig, rows_per_micro_batch
from grpo_roc_jax.learner.update import OptimConfig
from grpo_roc_jax.method.advantage import Advantage, GroupRelative
from grpo_roc_jax.method.compose import method_parts, needs_reference, reference_sync, teacher_of
from grpo_roc_jax.method.config import MethodConfig
from grpo_roc_jax.method.planning import Conditioning, PlainPrompts, PlanConfig, RewardTokens
from grpo_roc_jax.method.roc import ResampleOnCorrect, Selector
from grpo_roc_jax.method.shaping import Shaping, check_steps
from grpo_roc_jax.method.surrogate import Clip, Surrogate, TokenRatioSurrogate
from grpo_roc_jax.method.switching import Stage, StageProgress
from grpo_roc_jax.method.weights import WeightsConfig
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import AllWeights, Lora
from grpo_roc_jax.model.parallel import check_row_length
from grpo_roc_jax.model.sharding import ShardingConfig
from grpo_roc_jax.pod.processes import Distributed, FoundProcesses
from grpo_roc_jax.record.checkpoint import CheckpointConfig
from grpo_roc_jax.record.metrics import LogConfig
from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.settings.cli import CONTRIB_METHODS, ConfigError, build, load_config
from grpo_roc_jax.settings.layers import KeyPath, Layer, opened
from grpo_roc_jax.settings.options import (
    AtLeast1,
    Count,
    NotNegative,
    Positive,
    PositiveShare,
    Seed,
    Share,
    adapter,
    as_mapping,
    settings,
)
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.tools.config import ToolsConfig

if CONTRIB_METHODS.is_dir():  # imports the methods that the core does not name; their kinds register at import
    importlib.import_module("grpo_roc_jax.contrib.methods")

DEFAULT_CONFIG = "toy.yaml"

EventName = Literal[
    "reward_spread", "tool_calls", "entropy_low", "entropy_high", "truncated", "grad_norm", "logprob_gap",
    "sample_size", "answers", "stalled",
]  # fmt: skip


@settings
class GroupConfig:
    """How many problems and trajectories a step trains on."""

    problems: AtLeast1 = 8
    """Problems per training step."""
    size: AtLeast1 = 16
    """G: trajectories of a problem that are trained on. With an oversampling kind of `resample`, its `oversample` times
    as many are sampled."""
    dynamic_sampling_rounds: Count = 0
    """Further batches of problems sampled in the same step while dropped groups leave fewer than `problems` to train
    on (DAPO's dynamic sampling, arXiv:2503.14476, allows 10). 0 trains on what is left, as GRPO-RoC does."""


@settings
class SftConfig:
    """The non-reasoning supervised stage before RL: format and tool use, no long reasoning."""

    steps: Count = 0
    """Optimizer steps on demonstrator traces; 0 skips the stage."""
    traces: AtLeast1 = 32
    """Traces per step."""
    lr: Positive = 3e-3
    """Peak learning rate, per step of AdamW."""
    warmup_steps: Count = 20
    """Linear warm-up; cosine decay to a tenth follows."""
    reward_tokens: Literal["none", "token", "text"] = "none"
    """Ends every prompt with the reward token of its trace's outcome (`token`, or in words: `text`), so that one policy
    learns good and bad ways and which is which: the first stage of RC-GRPO (arXiv:2602.03025). It needs successes and
    failures in equal parts."""

    @property
    def condition(self) -> Conditioning:
        """What the prompts of demonstrations are extended with."""
        return PlainPrompts() if self.reward_tokens == "none" else RewardTokens(form=self.reward_tokens)


@settings
class EvalConfig:
    """Held-out evaluation before, during and after training."""

    every: Count = 0
    """Steps between evaluations; 0 evaluates before and after only."""
    samples: AtLeast1 = 1
    """Rollouts per problem (the k of avg@k)."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0 is greedy."""


@settings
class LimitsConfig:
    """When a run without progress ends by itself, with an exit status for the reason."""

    empty_steps: AtLeast1 = 50
    """Steps in a row without a single group to train on (status 3: no learning signal)."""
    skipped_updates: AtLeast1 = 5
    """Steps in a row whose update was not finite and therefore skipped (status 4: diverged)."""
    infrastructure_share: PositiveShare = 0.25
    """A step is a failing one if it loses a larger share of its trajectories to infrastructure failures, or to reward
    functions that do not score; with 1, if it loses all."""
    infrastructure_steps: AtLeast1 = 3
    """Failing steps in a row (status 5: infrastructure)."""

    @property
    def longest(self) -> int:
        """Most steps in a row that a limit counts."""
        return max(self.empty_steps, self.skipped_updates, self.infrastructure_steps)


@settings
class WatchConfig:
    """Events recorded in `events.jsonl` during a run: alarms of its metrics, and parts without progress. Alarms are off
    if this section is left out."""

    stop: tuple[EventName, ...] = ()
    """Events that end the run, with its state saved: status 4 for an alarm, 5 for `stalled`."""
    steps: AtLeast1 = 3
    """Steps in a row beyond a level that raise an alarm; a jump needs one."""
    history: AtLeast1 = 20
    """Steps whose median a jump is measured against."""
    reward_spread: NotNegative = 0.01
    """Least standard deviation of the rewards in a group."""
    tool_calls: Positive = 3.0
    """Most calls of a trajectory, in medians of the steps before."""
    entropy_low: NotNegative = 0.01
    """Least entropy of a token, in nats."""
    entropy_high: Positive = 5.0
    """Most entropy of a token, in nats."""
    truncated: Share = 0.5
    """Largest share of trajectories that a limit cut."""
    grad_norm: Positive = 10.0
    """Largest gradient norm, in medians of the steps before."""
    logprob_gap: Positive = 0.01
    """Largest mean difference between sampler and trainer, in nats."""
    sample_size: Share = 0.3
    """Least effective sample size of the importance ratios, as a share of the tokens."""
    answers: Positive = 2.0
    """Most answers of a trajectory."""
    stall_factor: Positive = 10.0
    """How many times the longest duration so far a part of a step may take before its stacks are written down."""
    stall_floor_s: Positive = 1800.0
    """Seconds that any part may take in any case."""
    notice_url: str = ""
    """Address that is polled every 5 s for a notice of preemption, which saves the state and ends the run; empty polls
    nothing. Google's is http://169.254.169.254/computeMetadata/v1/instance/preempted."""

    def __post_init__(self) -> None:
        if self.notice_url and not self.notice_url.startswith(("http://", "https://")):
            raise ValueError("watch.notice_url must begin with http:// or https://; write the whole address")


@settings
class Config:
    """GRPO-RoC training: rollouts with a Python tool, resampling on correct, a clipped policy gradient."""

    files_setting: ClassVar[str] = "method.files"
    """Where a configuration names files of the user that define further kinds."""

    @staticmethod
    def completed(values: dict[str, Any], written: Container[tuple[str, ...]]) -> dict[str, Any]:
        """The settings with the defaults that follow from others: the steps of all stages, a stream of rollouts where
        samplers have processes of their own, and importance weights where training uses tokens of other policies than
        the trained one.

        Args:
            values: All settings, by section.
            written: Key paths of the settings that a file or the command line gives.
        """
        steps = [stage.get("steps") for stage in values.get("stages") or () if isinstance(stage, dict)]
        if steps and ("steps",) not in written:
            with suppress(ValidationError):  # reported where the stages are read
                values["steps"] = sum(adapter(tuple[int, ...]).validate_python(steps))
        rollout, surrogate = values["rollout"], values["surrogate"]
        limit, at = rollout["step_limit"], ("rollout", "step_limit")
        if isinstance(rollout.get("samplers"), dict) and at not in written and (*at, "kind") not in written:
            given = limit if isinstance(limit, dict) else {}
            limit = rollout["step_limit"] = as_mapping(StreamedRows()) | {k: v for k, v in given.items() if k != "kind"}
        streams = isinstance(limit, dict) and limit["kind"] == "stream" and limit["lag"] not in (0, "0")
        if not streams and values["rollout"].get("low_precision") is None:
            return values
        if ("weights", "factors") not in written:
            values["weights"]["factors"] = [{"kind": "truncated_is"}]
        if isinstance(surrogate, dict) and "old_logprobs" in surrogate and ("surrogate", "old_logprobs") not in written:
            surrogate["old_logprobs"] = "scored"
        return values

    name: str = "run"
    """Names the run directory under `runs/` and the run in loggers."""
    run_dir: str = ""
    """Directory of everything that is written; empty: `runs/NAME`, or `runs/NAME-2` and so on if that exists.
    `gs://BUCKET/RUN` keeps a copy of `runs/BUCKET/RUN` there."""
    resume: Literal["never", "auto"] = "never"
    """`auto` continues from the newest valid checkpoint of the run directory and starts fresh where there is none, so
    that the first launch and every relaunch are the same command."""
    seed: Seed = 0
    """Everything random derives from it: parameters, data order, sampling, selection, tools."""
    steps: Count = 30
    """Training steps (rollout, selection, update); 0 runs the supervised stage and the evaluation only."""
    group: GroupConfig = field(default_factory=GroupConfig)
    text: TextConfig = field(default_factory=TextConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: Lora = field(default_factory=AllWeights)
    """Whether low-rank additions are trained instead of the weights."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    distributed: Distributed = field(default_factory=FoundProcesses)
    """How the processes of a run on several hosts find each other."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    environment: EnvironmentKind = field(default_factory=ToolsAlone)
    """What answers the policy's turns."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    resample: Selector = field(default_factory=ResampleOnCorrect)
    """Selection: from the sampled group to the one that is trained on."""
    shaping: tuple[Shaping, ...] = ()
    """Steps from rewards to rewards on the kept groups, in order; GRPO-RoC has none."""
    advantage: Advantage = field(default_factory=GroupRelative)
    """Rewards of the kept groups -> advantages."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    surrogate: Surrogate = field(default_factory=Clip)
    """The loss of a token, given its log-ratio and advantage."""
    method: MethodConfig = field(default_factory=MethodConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    watch: WatchConfig | None = None
    """Alarms, and how long a part of a step may take."""
    stages: tuple[Stage, ...] | None = None
    """Stages of training, one after the other, each with settings of its own over these; `steps` counts those of all
    stages, and ends the run when it is reached."""

    def staged(self, places: Mapping[KeyPath, str] | None = None) -> "tuple[Config, ...]":
        """The configuration of each stage; without stages, this configuration alone.

        Args:
            places: Where each setting was written, for messages.

        Raises:
            ConfigError: Settings of a stage are not valid.
        """
        if not self.stages:
            return (self,)
        return tuple(stage_config(self, index, places or {}) for index in range(len(self.stages)))

    def stage_after(self, saved: Mapping[str, Any] | None, step: int) -> int:
        """Index of the stage of the next step after `step` steps. `saved` comes from `StageProgress.to_json`."""
        return StageProgress.from_json(saved).following(self.stages or (), step)

    @property
    def longest_trajectory(self) -> int:
        """Most tokens of a trajectory; conversations of an agent have at most the tokens of a packed row."""
        return self.batch.row_length if self.environment.agents else self.rollout.max_row_tokens

    def __post_init__(self) -> None:
        check_plan(self)
        check_method(self)
        check_sampler(self)
        check_remote_samplers(self)
        check_environment(self)
        if self.rollout.max_row_tokens > self.batch.row_length:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {self.rollout.max_row_tokens} but "
                f"batch.row_length = {self.batch.row_length}; raise batch.row_length to at least the former"
            )
        check_row_length(self.batch.row_length, self.sharding.sequence)
        if self.batch.updates.parts > self.group.problems:
            raise ValueError(
                f"batch.updates.parts = {self.batch.updates.parts} for group.problems = {self.group.problems} groups; "
                "a step trains on whole groups, so at most one part per problem is possible; for more optimizer steps "
                "raise batch.updates.epochs"
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: greedy rollouts of a problem are all equal and carry no signal; set it "
                "above 0 (eval.temperature may be 0)"
            )


def check_environment(config: Config) -> None:
    """Refuses settings that are not supported for rollouts with an environment.

    Raises:
        ValueError: The message names the two settings and what to change.
    """
    if isinstance(config.environment, ToolsAlone):
        return
    limit = config.rollout.step_limit
    if limit.partial or limit.streams:
        raise ValueError(
            f"rollout.step_limit {limit.kind} with an environment, whose state is lost when a rollout is cut; use drop"
        )
    if config.rollout.early_exit:
        raise ValueError("rollout.early_exit with an environment, which pays after the last rollout; leave it off")
    if config.environment.agents:
        if config.rollout.max_turn_tokens:
            raise ValueError(
                "rollout.max_turn_tokens with environment agent, whose calls name max_tokens; leave it at 0"
            )
        if limit.seconds:
            raise ValueError("rollout.step_limit with environment agent; set environment.timeout_s instead")
        if parts := [part.prefix for part in method_parts(config) if part.other_prompts]:
            raise ValueError(
                f"{parts[0]} with environment agent: it puts responses under prompts made from the problem, and the "
                "prompts of an agent are its own; leave one of them out"
            )


def check_sampler(config: Config) -> None:
    """Refuses training on tokens of other policies without importance weights, and storage in fewer bits that the
    sampler does not support.

    Raises:
        ValueError: The message names the settings to change.
    """
    corrected = {part.kind for part in config.weights.factors} & {"truncated_is", "masked_is"}
    lag, low = config.rollout.step_limit.lag, config.rollout.low_precision
    for cause, used, remedy in (
        (f"rollout.step_limit.lag = {lag} trains on tokens of earlier policies", lag, "set rollout.step_limit.lag 0"),
        ("rollout.low_precision trains on tokens of another policy", low, "leave the section out"),
    ):
        if used and not (corrected and config.surrogate.scored_ratio):
            raise ValueError(
                f"{cause}; add truncated_is or masked_is to weights.factors and set surrogate.old_logprobs scored "
                f"(outside stages both are the defaults here), or {remedy}"
            )
    if config.lora.rank and config.rollout.weight_dtype != "full":
        raise ValueError(
            f"rollout.low_precision.weights = {config.rollout.weight_dtype} with lora {config.lora.kind}: sampler and "
            "update share the frozen weights; set rollout.low_precision.weights full"
        )


def check_remote_samplers(config: Config) -> None:
    """Refuses settings that are not supported where samplers have processes of their own.

    Raises:
        ValueError: The message names the settings to change.
    """
    samplers = config.rollout.remote
    if samplers is None:
        return
    limit = config.rollout.step_limit
    if not limit.streams:
        raise ValueError(
            f"rollout.samplers {samplers.kind} with rollout.step_limit {limit.kind}: samplers that come and go return "
            "groups as they end; set rollout.step_limit stream (lag 0 trains on rollouts of the current policy alone)"
        )
    if config.tools.executor.kind == "ray":
        raise ValueError(
            f"tools.executor ray with rollout.samplers {samplers.kind}: each sampler runs the programs of its rows on "
            "its own host; set tools.executor local"
        )


OF_ALL_STAGES = frozenset(
    """name run_dir resume seed steps text model lora sharding distributed sft checkpoint log watch stages""".split()  # noqa: SIM905 (one line reads better)
)
"""Settings that a stage cannot change: what a run is, what it starts from, and what is written."""


def stage_config(config: Config, index: int, places: Mapping[KeyPath, str]) -> Config:
    """The configuration of one stage: its settings over those of the run.

    Raises:
        ConfigError: Settings are not valid, or the state of the run cannot continue under them.
    """
    stage, here = config.stages[index], ("stages", str(index), "set")
    where_written = {at[len(here) :]: where for at, where in places.items() if at[: len(here)] == here}
    label = f"stage {stage.name}"
    for name in stage.set.keys() & OF_ALL_STAGES:
        raise ConfigError(
            f"{label}: {name} ({where_written.get((name,), label)}): must be the same in all stages; set it outside"
        )
    try:
        staged = build(Config, [Layer(label, stage.set, where_written)], replace(config, stages=None))
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error
    if "files" in opened(stage.set.get("method", {})):
        raise ConfigError(f"{label}: method.files are read once, when the run starts; set them outside")
    every, problems = staged.eval.every, staged.data.eval_problems
    if "plateau" in {condition.kind for condition in stage.until} and not (0 < every < stage.steps and problems):
        raise ConfigError(
            f"{label}: until plateau with eval.every = {every} and data.eval_problems = {problems} would never end it; "
            f"set eval.every to a number below its {stage.steps} steps, and evaluate on some problems"
        )
    endless = [] if staged.data.world_problems else [s for s in staged.data.sources if generator_of(s)]
    if stage.choose and endless:
        raise ConfigError(f"{label}: choose with {endless[0]}, which has no end; set data.world_problems")
    if state_of(staged) != state_of(config):
        raise ConfigError(
            f"{label}: optim.moment_dtype, clipping of gradients or not, and a reference policy or none must be the "
            "same in all stages"
        )
    return replace(staged, steps=stage.steps)


def state_of(config: Config) -> tuple[str, bool, bool]:
    """What determines which arrays the training state has, besides the model."""
    return config.optim.moment_dtype, config.optim.max_grad_norm > 0, needs_reference(config)


def read_config(*words: str | os.PathLike[str] | float) -> Config:
    """The configuration for `words` (texts, paths, numbers): YAML files, then `--section.field=value` settings.

        read_config("toy.yaml", "--steps=5", "--advantage=pass_at_k")

    Raises:
        ConfigError: A file or setting is not valid; the message says what to change.
        TypeError: A word is of another type, such as a list.
    """
    return load_config(Config, list(map(as_word, words)), prog="read_config", default_file=DEFAULT_CONFIG)


def as_word(word: Any) -> str:
    """A word of a command line."""
    if isinstance(word, str | os.PathLike):
        return os.fspath(word)
    if isinstance(word, Real):
        return str(word).lower()
    got = f"{word!r:.80} ({type(word).__name__})"
    raise TypeError(f"read_config got {got}; must be words, as in read_config('toy.yaml', '--steps=5'), or *words")


def check_method(config: Config) -> None:
    """Refuses parts of a method that contradict each other.

    Raises:
        ValueError: The message names the settings and what to change.
    """
    check_steps(config.shaping)
    baseline = config.advantage.baseline.kind if isinstance(config.advantage, GroupRelative) else ""
    if config.group.size < 2 and baseline in ("mean", "leave_one_out", "median"):
        raise ValueError(
            f"group.size = {config.group.size} with advantage.baseline = {baseline}: a group of one has no signal "
            "against itself; raise group.size, or choose advantage.baseline tracker or none"
        )
    factors = [part.kind for part in config.weights.factors]
    if {"truncated_is", "masked_is"} & set(factors) and not config.surrogate.scored_ratio:
        raise ValueError(
            f"weights.factors {', '.join(factors)} compares recorded with scored log-probabilities; set "
            "surrogate.old_logprobs scored"
        )
    if config.surrogate.own_ratio and config.batch.updates.total > 1:
        raise ValueError(
            f"surrogate.old_logprobs = current with batch.updates {config.batch.updates.kind}: after the first "
            "optimizer step the policy is no longer the one that sampled; set surrogate.old_logprobs scored or "
            "recorded, or batch.updates one"
        )
    teacher_of(config)  # raises if there are two
    every, mix = reference_sync(config)
    if every and mix < 1 and config.lora.rank:
        raise ValueError(
            f"sync_mix = {mix} with lora {config.lora.kind}: a mix of two adapters' factors is no mix of their "
            "policies; set sync_mix 1"
        )
    recorded = isinstance(config.surrogate, TokenRatioSurrogate) and not config.surrogate.scored_ratio
    if recorded and config.plan.second.unsampled:
        raise ValueError(
            f"plan.second {config.plan.second.kind} trains tokens that were not sampled, which have no "
            "log-probabilities for a ratio; set surrogate.old_logprobs scored, or surrogate logp"
        )


def check_plan(config: Config) -> None:
    """Refuses plans that contradict themselves or other sections.

    Raises:
        ValueError: The message names the two settings and what to change.
    """
    second, budget, tokens = config.plan.second, config.plan.budget, config.plan.condition
    for part in method_parts(config):
        part.check(config)
    other = [f"plan.second {second.kind}"] if second.kind != "none" else []
    other += [f"plan.condition {tokens.kind}"] if not tokens.resumable else []
    other += [f"plan.budget {budget.kind}"] if budget.kind != "uniform" else []
    other += ["rollout.early_exit"] if config.rollout.early_exit else []
    limit = config.rollout.step_limit
    if (limit.partial or limit.streams) and other:
        raise ValueError(
            f"rollout.step_limit {limit.kind} with {other[0]}: a group of several waves, or one that is cut on purpose,"
            " has no rows to continue in the next step; use one of the two"
        )


def derived(config: Config) -> list[str]:
    """Numbers that follow from the settings, as text, for the first lines of a run and for `--dry-run`."""
    group, batch = config.group, config.batch
    sampled = config.resample.sampled(group.size)
    trajectories = group.problems * group.size
    rows = max(1, trajectories * config.rollout.max_row_tokens // batch.row_length)
    micro = -(-rows // rows_per_micro_batch(batch, 1))
    updates = batch.updates.total
    lines = [
        f"{group.problems} problems x {sampled} sampled -> {group.size} kept = {trajectories} trajectories a step, "
        f"{updates} update{'s' if updates > 1 else ''} of about {-(-micro // batch.updates.parts)} "
        f"micro-batches ({batch.rows or 'a measured number of'} rows x {batch.row_length} tokens)",
        f"{config.steps} steps = {config.steps * group.problems * sampled} rollouts of at most "
        f"{config.rollout.max_row_tokens} tokens ({config.rollout.max_prompt_tokens} prompt + "
        f"{config.rollout.max_response_tokens} response), {config.rollout.slots} at a time",
    ]
    limit, samplers = config.rollout.step_limit, config.rollout.remote
    if samplers is not None:
        sent = "the adapter" if config.lora.rank else "all weights in the compute dtype"
        where = f"in the cluster {samplers.address}" if samplers.address else "on this machine"
        lines.append(
            f"samplers: {samplers.count} {samplers.kind} actors {where}, {config.rollout.slots} rows at a time each; "
            f"each step sends them {sent}; evaluations run here"
        )
    if limit.lag:
        lines.append(
            f"rollouts run on: at most {(limit.lag + 1) * group.problems * sampled} at a time, their tokens at most "
            f"{limit.lag} version{'s' if limit.lag > 1 else ''} older than the policy"
        )
    if ratio_is_one(config) and config.surrogate != Config().surrogate:  # defaults need no remark
        lines.append(
            f"surrogate {config.surrogate.kind}: with one update per rollout batch every importance ratio is 1 up to "
            "rounding, so nothing is clipped and the gradient is the plain policy gradient; raise batch.updates for "
            "more"
        )
    return lines


def ratio_is_one(config: Config) -> bool:
    """Whether no importance ratio can differ from 1 by more than rounding, because the update trains the policy that
    sampled.

    This does not hold for groups that waited in the buffer, rows continued from an earlier step, responses moved to
    another prompt, and edited groups.
    """
    if config.batch.updates.total > 1 or not isinstance(config.surrogate, TokenRatioSurrogate):
        return False
    limit = config.rollout.step_limit
    moved = config.plan.second.trains_plain or limit.partial or limit.lag or config.method.edit_groups
    same = config.surrogate.scored_ratio or config.surrogate.own_ratio
    return same or not (moved or config.group.dynamic_sampling_rounds)

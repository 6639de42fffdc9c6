"""Settings of sampling and of the rollout engine."""

import math
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Len, Lt

from grpo_roc_jax.settings.options import (
    AtLeast1,
    Axis,
    Count,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
    kind,
    settings,
)


@settings
class SamplingConfig:
    """How a token is drawn. Recorded log-probabilities are those of the full softmax at `temperature`, whatever is
    cut off, so that the loss can recompute them; the mass that survived the cut is recorded beside them."""

    temperature: Annotated[float, Ge(0), Lt(math.inf)] = 1.0
    """Logits are divided by it; 0 takes the most likely token (log-probabilities are then those at temperature 1)."""
    top_k: Count = 0
    """Keep the k most likely tokens, ties of the k-th included; 0 keeps all. Cutting biases the policy gradient, so
    training leaves it off."""
    top_p: PositiveShare = 1.0
    """Keep the fewest most likely tokens that reach this mass (after `top_k`), ties included; 1 keeps all."""
    min_p: Share = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""

    @property
    def truncated(self) -> bool:
        """True when some tokens can never be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class StepLimit(Axis, axis="rollout.step_limit"):
    """When a training step ends its rollouts, and what happens to those that are not finished; evaluation has no
    limit."""

    seconds: ClassVar[float] = 0.0
    """0 for no limit. A kind whose setting has no default says so by `field()`, which hides this value."""
    partial: ClassVar[bool] = False
    """Whether cut rows go on in the next step."""
    streams: ClassVar[bool] = False
    """Whether rows run on from step to step."""
    lag: ClassVar[int] = 0
    """Versions of the weights between a row's first token and the update that trains on it, at most."""


@kind("none")
class NoStepLimit(StepLimit):
    """A step waits for all its rollouts."""


@settings
class TimedStep(StepLimit):
    """A step's rollouts end after some time."""

    seconds: Positive = field()
    """Longest time for all rollouts of a training step, in seconds."""


@kind("drop")
class DroppedRows(TimedStep):
    """Rows that wait for a tool end with stop `deadline`, the others with `infrastructure`."""


@kind("partial")
class PartialRows(TimedStep):
    """Cut rows go on in the next step. Each token keeps the version of the parameters that drew it, and a group is
    scored when all its rows are complete. A row that has used a session is lost with it. The data become off-policy,
    and which rows are cut depends on the clock."""

    partial = True


@kind("stream")
class StreamedRows(StepLimit):
    """A step ends when it has enough whole groups. The other rollouts go on under the next weights, also while the
    update runs. Each token keeps the version that drew it; which version that is depends on the clock."""

    streams = True

    lag: Count = 1
    """Steps whose rollouts begin ahead, and the largest difference of versions between a row's first token and the
    update that trains on it. With 0 every step trains on rollouts of its own. Otherwise importance weights are needed;
    `weights.factors truncated_is` with `surrogate.old_logprobs scored` are the default then."""
    late: Literal["wait", "drop"] = "wait"
    """What happens to a group that would become older than `lag`: the step waits for it, or the rows that are not
    finished are dropped and counted. Dropping favors short rows."""
    min_effective: Share = 0.5
    """An effective sample size of the importance weights below this share of the tokens is reported."""


@settings
class Samplers(Axis, axis="rollout.samplers"):
    """Samplers in processes of their own, which may come and go while the run trains (`rollout.step_limit stream`)."""

    count: ClassVar[int] = 0
    """Number of samplers; 0 samples in the trainer's own process."""
    package: ClassVar[str] = ""
    """Package that the trainer imports, and the extra that installs it."""


@kind("none")
class NoSamplers(Samplers):
    """The trainer's processes sample; for a command line that takes back what a file chose."""


@kind("ray")
class RaySamplers(Samplers):
    """Ray actors, each with the devices of a host; needs the extra `ray`."""

    package = "ray"

    count: AtLeast1 = 2
    """Number of samplers. Those for which the cluster has no room yet start as nodes join, and one that is lost is
    replaced."""
    address: str = ""
    """Address of the cluster to join: `auto` for the one of this machine, or `host:port`. Empty starts Ray on this
    machine alone, for this run."""
    cpus: NotNegative = 1.0
    """Cores that Ray reserves for a sampler."""
    gpus: Count = 0
    """GPUs of a sampler."""
    tpus: Count = 0
    """TPU chips of a sampler: all of a host, since a process takes them together."""
    tensor: AtLeast1 = 1
    """Devices of a sampler that share the heads of one row; its slots are divided over the others."""
    timeout_s: Positive = 120.0
    """Seconds without an answer after which a sampler that has started counts as lost."""


@settings
class LowPrecision:
    """Fewer bits in the sampler. Its policy then differs from the trained one, so importance weights are needed;
    `weights.factors truncated_is` with `surrogate.old_logprobs scored` are the default then."""

    cache: Literal["full", "int8", "float8"] = "full"
    """Dtype of keys and values, with a scale for each token and head; `float8` is e4m3. `full` is the compute dtype,
    without scales."""
    weights: Literal["full", "int8"] = "full"
    """The matrices of the layers, with a scale for each output channel. Embedding and unembedding keep the compute
    dtype."""


@settings
class RolloutConfig:
    """The engine: how many rows it holds, how long they may get, and when it gives one up."""

    slots: AtLeast1 = 64
    """Rows held on the devices of this process, those that wait for tools included; must divide over the data axis of
    the mesh. More slots cost memory and, on a CPU, time per step; fewer leave the devices idle while tools run."""
    chunk: AtLeast1 = 8
    """Tokens decoded per row before the host looks at them. A row that stops wastes half a chunk on average. Between 4
    and 16 the total time changes by less than a tenth."""
    narrow: tuple[Annotated[int, Ge(2)], ...] = (4,)
    """Divisors of the slots. Besides the program that decodes all slots of a device, there is one for each such part
    (4: a quarter, if that is 4 rows or more). The smallest one that holds the live rows runs, so the end of a step and
    waits for tools cost less. Empty: none."""
    max_prompt_tokens: AtLeast1 = 256
    """Longest prompt. Prompts are never cut: a longer one is refused."""
    max_response_tokens: AtLeast1 = 256
    """Budget after the prompt, sampled tokens and observations together (GRPO-RoC counts both, arXiv:2508.20722)."""
    max_turn_tokens: Count = 0
    """Tokens sampled in one turn at most; 0 leaves the budget as the only limit."""
    max_turns: AtLeast1 = 10
    """Assistant turns of a trajectory; the calls of the last one are not run (GRPO-RoC trains with 10)."""
    kv_tokens: Count = 0
    """Tokens that the cache of this process holds; 0 means slots x (max_prompt_tokens + max_response_tokens). With
    fewer, rows are admitted while the lengths expected of them fit. If they turn out longer, the youngest row gives up
    its room, and its tokens are written again later."""
    kv_start: Count = 0
    """Tokens that the cache holds at first. It grows whenever rows need more, to twice its size or so and at most to
    `kv_tokens`, and its programs are compiled once more for each size. 0 allocates all of it at once. For dialogues,
    whose first answers take a small part of the longest one."""
    block: AtLeast1 = 64
    """Tokens of a block of the cache. A row takes blocks as it grows, and rows of one prompt share its whole blocks. A
    row wastes half a block on average; small blocks cost more time."""
    admission: Literal["arrival", "longest"] = "arrival"
    """`longest` admits groups by falling expected length, which shortens the tail of a step. A run expects what is left
    of the budget, so rollouts that go on from a prefix (`plan.second` serial) come after new ones. Those that a step's
    deadline cut (`step_limit` partial) come first, so that each of them ends."""
    append_lengths: Annotated[tuple[AtLeast1, ...], Len(1)] = (16, 32, 64, 128)
    """Padded lengths of the programs that write prompts and observations; longer texts take several pieces. Where rows
    are packed these are the tokens of all rows of a call, and 256 is one more of them if that many can be needed."""
    append_rows: Count = 0
    """Rows per append. 0 packs the tokens of any number of rows on a CPU, where padding is paid in full (models with
    recurrent layers: 1 row), and chooses 8 elsewhere, where a short append costs one read of the weights however many
    rows it has. Long appends also come with 1, 2 and 4 rows."""
    attention: Literal["auto", "xla", "paged"] = "auto"
    """How queries read the cache: `xla` gathers the blocks of all rows up to the longest live one (on a CPU a step of
    many rows multiplies blocks in their place), `paged` (the ragged paged attention kernel that ships with JAX; TPUs
    only, heads of 128 or a multiple) reads those of each row. `auto` times decoding and appends of both at the first
    rollout on a TPU and takes the faster one; elsewhere it is `xla`."""
    pipeline: Literal["auto", "on", "off"] = "auto"
    """Enqueue a chunk before the previous one is read, which hides the host; `auto` does so except on a CPU, where
    host and device share the cores."""
    turn_timeout_s: NotNegative = 0.0
    """Longest wait for the observation of one turn, seconds; the row then ends with stop `deadline`. 0: no limit
    (calls have their own deadline in the executor)."""
    trajectory_timeout_s: NotNegative = 0.0
    """Longest time from admission to the end of a row, seconds; stop `deadline`. 0: no limit."""
    step_limit: StepLimit = field(default_factory=NoStepLimit)
    """When a training step ends its rollouts, and what happens to those that are not finished."""
    samplers: Samplers | None = None
    """Samplers in processes of their own, which take weights and problems from the trainer and return scored groups;
    none while this section is left out. The default of `rollout.step_limit` is then `stream`."""
    low_precision: LowPrecision | None = None
    """Fewer bits in the sampler; none while this section is left out."""
    early_exit: bool = False
    """Cancels the rest of a group once no outcome of it can change how many trajectories of each kind selection keeps
    (`resample` roc and uniform). Each trajectory is then also scored as it ends. Off by default: the slowest rows are
    cut, and which ones these are depends on the clock."""
    weight_check_tolerance: NotNegative = 1e-3
    """Largest difference between the log-probabilities of a probe under published and under training parameters, in
    nats. Both sides compute in float32 from the weights as published, so only the order of sums differs (about
    1e-6)."""

    def __post_init__(self) -> None:
        lengths = self.append_lengths
        if lengths != tuple(sorted(set(lengths))):
            raise ValueError(f"rollout.append_lengths = {lengths}; must be rising lengths")
        if self.narrow != tuple(sorted(set(self.narrow))):
            raise ValueError(f"rollout.narrow = {self.narrow}; must be rising divisors of the slots")
        if self.attention == "paged" and self.cache_dtype != "full":
            raise ValueError(
                f"rollout.low_precision.cache = {self.cache_dtype} with rollout.attention = paged: the kernel reads no "
                "scales of single tokens; set rollout.attention xla"
            )
        if 0 < self.kv_tokens < self.max_row_tokens:
            raise ValueError(
                f"rollout.kv_tokens = {self.kv_tokens} cannot hold one row of max_prompt_tokens + max_response_tokens "
                f"= {self.max_row_tokens}; raise kv_tokens to at least that, or lower the two limits"
            )
        if self.kv_start > (most := self.kv_tokens or self.slots * self.max_row_tokens):
            raise ValueError(
                f"rollout.kv_start = {self.kv_start}; must be at most the {most} tokens of the whole cache; lower it, "
                "or set it to 0 to allocate the cache at once"
            )

    @property
    def cache_dtype(self) -> str:
        """The dtype of keys and values; `full` is the compute dtype."""
        return "full" if self.low_precision is None else self.low_precision.cache

    @property
    def weight_dtype(self) -> str:
        """The dtype of the layers' matrices; `full` is the compute dtype."""
        return "full" if self.low_precision is None else self.low_precision.weights

    @property
    def remote(self) -> Samplers | None:
        """The samplers in other processes; None where the trainer samples itself."""
        return self.samplers if self.samplers is not None and self.samplers.count else None

    @property
    def max_row_tokens(self) -> int:
        """Longest row: prompt, sampled tokens and observations."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def table_width(self) -> int:
        """Blocks of the longest row and one padded append after it."""
        return -(-(self.max_row_tokens + self.append_lengths[0]) // self.block)

    @property
    def prompt_append(self) -> int:
        """Padded length of an append of the longest prompt, or of its longest piece."""
        lengths = self.append_lengths
        return next((length for length in lengths if length >= self.max_prompt_tokens - 1), lengths[-1])

    def check_shards(self, shards: int) -> None:
        """Checks that slots and cache divide over the data shards of a mesh.

        Raises:
            ValueError: they do not; the message says what to set.
        """
        if self.slots % shards:
            raise ValueError(
                f"rollout.slots = {self.slots} does not divide over the {shards} data shards of the mesh; take "
                f"{-(-self.slots // shards) * shards}"
            )
        if self.kv_tokens and self.kv_tokens // shards < self.max_row_tokens:
            raise ValueError(
                f"rollout.kv_tokens = {self.kv_tokens} over {shards} data shards leaves {self.kv_tokens // shards} "
                f"tokens each, too few for one row of {self.max_row_tokens}; raise it to at least "
                f"{self.max_row_tokens * shards}"
            )

    def first_blocks(self, shards: int) -> int:
        """Blocks of the cache on each of the data shards at first."""
        return -(-(self.kv_start // shards) // self.block) if self.kv_start else self.shard_blocks(shards)

    def shard_blocks(self, shards: int) -> int:
        """Blocks of the cache on each of the data shards."""
        if self.kv_tokens:
            return -(-(self.kv_tokens // shards) // self.block)
        return self.slots // shards * -(-self.max_row_tokens // self.block)

"""Settings of sampling and of the rollout engine."""

from typing import Literal

from grpo_roc_jax.settings.options import settings


@settings
class SamplingConfig:
    """How a token is drawn. Recorded log-probabilities are those of the full softmax at `temperature`, whatever is
    cut off, so that the loss can recompute them; the mass that survived the cut is recorded beside them."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (log-probabilities are then those at temperature 1)."""
    top_k: int = 0
    """Keep the k most likely tokens, ties of the k-th included; 0 keeps all. Cutting biases the policy gradient, so
    training leaves it off."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens that reach this mass (after `top_k`), ties included; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"sampling.temperature = {self.temperature}; 0 (greedy) or a positive number is wanted")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k = {self.top_k}; 0 (off) or a positive count is wanted")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"sampling.top_p = {self.top_p}; a mass in (0, 1] is wanted, 1 for off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"sampling.min_p = {self.min_p}; a share in [0, 1] is wanted, 0 for off")

    @property
    def truncated(self) -> bool:
        """True when some tokens can never be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@settings
class RolloutConfig:
    """The engine: how many rows it holds, how long they may get, and when it gives one up."""

    slots: int = 64
    """Rows held on the devices of this process, waiting ones included; divides over the data axis of the mesh. More
    slots cost memory and, on a CPU, time per step; fewer leave the devices idle while tools run."""
    chunk: int = 8
    """Tokens decoded per row between two looks of the host. A row that stops wastes half a chunk on average; between
    4 and 16 the total changes by less than a tenth."""
    narrow: tuple[int, ...] = (4,)
    """Besides the program that decodes all slots of a device, one for each such part of them (4: a quarter, if that is
    4 rows or more): the smallest one that holds the live rows runs, so the end of a step and waits on tools cost less.
    It holds a copy of its rows' cache while it runs, a quarter more memory. Empty: none."""
    max_prompt_tokens: int = 256
    """Longest prompt. Prompts are never cut: a longer one is refused."""
    max_response_tokens: int = 256
    """Budget after the prompt, sampled tokens and observations together (GRPO-RoC counts both, arXiv:2508.20722)."""
    max_turn_tokens: int = 0
    """Tokens sampled in one turn at most; 0 leaves the budget as the only limit."""
    max_turns: int = 10
    """Assistant turns of a trajectory; the calls of the last one are not run (GRPO-RoC trains with 10)."""
    kv_tokens: int = 0
    """Tokens of prompt + budget that admitted rows may reserve together; 0 means slots x (max_prompt_tokens +
    max_response_tokens). A row is admitted only when its whole reservation fits, so a long one is never evicted."""
    admission: Literal["arrival", "longest"] = "arrival"
    """`longest` admits groups by falling `Request.expected`, which shortens the tail of a step. A run expects what is
    left of the budget, so rollouts that go on from a cut (`plan.second` serial, `carry_over`) come after whole ones."""
    min_capacity: int = 128
    """Columns of the smallest cache, doubled up to the longest row. The cache in use is the smallest one that holds the
    longest live row, so attention costs what was written and not what might be."""
    append_lengths: tuple[int, ...] = (16, 32, 64, 128)
    """Padded lengths of the programs that write prompts and observations; longer texts take several pieces."""
    append_rows: int = 0
    """Rows per append; 0 chooses 1 on a CPU, where padding rows is paid in full, and 8 elsewhere, where a short append
    costs one read of the weights however many rows it has."""
    attention: Literal["auto", "xla", "paged"] = "auto"
    """How queries read the cache: `xla` reads all columns of the cache in use, `paged` (the ragged paged attention
    kernel that ships with JAX; TPUs only, heads of 128 or a multiple) those that a row has written. `auto` times both
    at the first rollout on a TPU and takes the faster one; elsewhere it is `xla`."""
    pipeline: Literal["auto", "on", "off"] = "auto"
    """Enqueue a chunk before the previous one is read, which hides the host; `auto` does so except on a CPU, where
    host and device share the cores."""
    turn_timeout_s: float = 0.0
    """Longest wait for the observation of one turn, seconds; the row then ends with stop `deadline`. 0: no limit
    (calls have their own deadline in the executor)."""
    trajectory_timeout_s: float = 0.0
    """Longest time from admission to the end of a row, seconds; stop `deadline`. 0: no limit."""
    step_timeout_s: float = 0.0
    """Longest time for all rollouts of a training step, seconds; evaluation has no limit. Rows that wait on a tool then
    end with `deadline`, the others with `infrastructure` (with `carry_over`: all with `cancelled`). 0: no limit."""
    early_exit: bool = False
    """Cancel the rest of a group once no outcome of it can change how many trajectories of each kind selection keeps
    (methods `roc` and `uniform`; each trajectory is then scored as it ends too). Off: what is cut are the slowest rows,
    and which ones depends on the clock."""
    carry_over: bool = False
    """Rows cut by `step_timeout_s` go on in the next step, each token keeping the version of the parameters that drew
    it; their groups are judged when they are whole. Rows that have used a session are lost with it. Off: it makes data
    off-policy, and which rows depends on the clock."""
    canary_tolerance: float = 1e-3
    """Largest difference, nats, between the probe's log-probabilities under published and training parameters. Both
    sides compute in float32 from the weights as published, so only the order of sums differs (about 1e-6)."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk", "max_prompt_tokens", "max_response_tokens", "max_turns", "min_capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} = {getattr(self, name)}; at least 1 is wanted")
        for name in ("max_turn_tokens", "kv_tokens", "append_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"rollout.{name} = {getattr(self, name)}; 0 (automatic) or more is wanted")
        for name in ("turn_timeout_s", "trajectory_timeout_s", "step_timeout_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"rollout.{name} = {getattr(self, name)}; 0 (no limit) or seconds are wanted")
        lengths = self.append_lengths
        if not lengths or lengths != tuple(sorted(set(lengths))) or lengths[0] < 1:
            raise ValueError(f"rollout.append_lengths = {lengths}; positive, rising lengths are wanted")
        if any(part < 2 for part in self.narrow) or self.narrow != tuple(sorted(set(self.narrow))):
            raise ValueError(f"rollout.narrow = {self.narrow}; rising divisors of the slots from 2 on are wanted")
        if 0 < self.kv_tokens < self.max_row_tokens:
            raise ValueError(
                f"rollout.kv_tokens = {self.kv_tokens} cannot hold one row of max_prompt_tokens + max_response_tokens "
                f"= {self.max_row_tokens}; raise kv_tokens to at least that, or lower the two limits"
            )
        if self.carry_over and not self.step_timeout_s:
            raise ValueError("rollout.carry_over without rollout.step_timeout_s never cuts a row; set the timeout")

    @property
    def max_row_tokens(self) -> int:
        """Longest row: prompt, sampled tokens and observations."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def reservable_tokens(self) -> int:
        """Sum of the reservations that may be held at once."""
        return self.kv_tokens or self.slots * self.max_row_tokens

    @property
    def capacities(self) -> tuple[int, ...]:
        """Cache lengths: `min_capacity` doubling, and on top the longest row with one padded append behind it.

        A doubling that would save less than a quarter of the top one is left out: it is not worth its programs.
        """
        top = -(-(self.max_row_tokens + self.append_lengths[0]) // 16) * 16
        ladder = []
        rung = self.min_capacity
        while rung <= 0.75 * top:
            ladder.append(rung)
            rung *= 2
        return (*ladder, top)

"""The rollout engine: slots that keep the devices decoding while tools run.

`make_engine` fixes the shapes; `publish` takes the parameters once a step; `run` rolls requests out, `submit` and
`advance` do so without an end. The engine handles token ids and slots. Text and tools are the environment's
(`rollout.sampler`).
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.decode import ID_MASK
from grpo_roc_jax.engine.programs import ProgramCost, SamplerPrograms, SharedPrograms
from grpo_roc_jax.engine.protocol import RolloutStats, RowEnvironment, RunOptions
from grpo_roc_jax.engine.publish import Publisher, SamplerParams, sampler_config
from grpo_roc_jax.engine.scheduler import Scheduler, check_keys
from grpo_roc_jax.engine.table import starting_point
from grpo_roc_jax.model.choose import describe_choice
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import process_mesh
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.types import RolloutRequest, Trajectory


def make_engine(
    model_config: ModelConfig,
    rollout_config: RolloutConfig,
    sampling_config: SamplingConfig,
    stop_ids: Sequence[int],
    mesh: Mesh | None = None,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    shares_layers: bool | None = None,
    platform: str | None = None,
) -> "Engine":
    """An engine for one set of shapes; programs are compiled by `warmup` or at first use, and counted.

    Args:
        model_config: The model, with `vocab_size` resolved.
        rollout_config: Slots, limits and the cache.
        sampling_config: Temperature and truncation.
        stop_ids: Token ids that end a turn.
        mesh: Slots are split over its data and fsdp axes, heads over tensor; only devices of this process are used,
            or of those that it samples with, since tools finish at different times in different processes. None: one
            device.
        seed: The seed of the run.
        vocab_size: Ids the tokenizer knows; padding rows at the end of the embedding are never drawn. None: all.
        shares_layers: Let all layers of a kind share a program; None does so on a CPU if they are large.
        platform: Kind of device that programs are chosen for; by default that of the devices.

    Raises:
        ValueError: A vocabulary that is empty or larger than the model's, a stop id outside of it, slots that do not
            divide over the mesh, or int8 with experts.
    """
    vocabulary = model_config.vocab_size if vocab_size is None else vocab_size
    if not 1 <= vocabulary <= model_config.vocab_size:
        raise ValueError(
            f"vocab_size = {vocabulary}; must be from 1 to {model_config.vocab_size}, that of the model: set that to "
            "at least the number of ids of the tokenizer"
        )
    outside = [stop for stop in stop_ids if not 0 <= stop < vocabulary]
    if outside:
        raise ValueError(
            f"stop ids {outside} lie outside the vocabulary of {vocabulary} tokens and could never be drawn; take "
            "them from the tokenizer that the model was made for"
        )
    local = process_mesh(mesh, jax.process_index()) if mesh is not None and mesh.is_multi_process else mesh
    kind = SharedPrograms if local is not None and local.is_multi_process else SamplerPrograms
    model_config = sampler_config(trained := model_config, local)
    programs = kind(
        model_config, rollout_config, sampling_config, tuple(stop_ids), vocab_size, local, shares_layers, platform
    )
    rollout_config.check_shards(programs.shards)
    publisher = Publisher(
        trained,
        mesh,
        rollout_config.weight_check_tolerance,
        rollout_config.weight_dtype,
        by_layer=programs.shares_layers,
        outputs_first=programs.outputs_first,
    )
    return Engine(programs, publisher, seed)


class Engine:
    """Compiled programs and settings, and the rollouts in flight. Make it once per run with `make_engine`.

    `run` is a batch: it returns when its rollouts have ended. `submit`, `advance` and `publish` are a stream: rollouts
    come at any time and leave as they finish, and the weights change between two chunks.
    """

    def __init__(
        self,
        programs: SamplerPrograms,
        publisher: Publisher,
        seed: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            programs: Compiled programs, which several engines may share.
            publisher: Makes the parameters to sample with.
            seed: The seed of the run.
            clock: Seconds that pass, for deadlines and statistics.
        """
        self.programs, self.seed = programs, seed
        self.publisher, self.clock = publisher, clock
        self.scheduler: Scheduler | None = None
        """The rollouts in flight and their pool; None until the first of them and after `release`."""
        self._finished: list[tuple[int, Trajectory]] = []
        """Rows of the stream that finished during a batch."""
        self._compiled = 0
        """Programs compiled before the current statistics."""

    @property
    def config(self) -> RolloutConfig:
        return self.programs.rollout

    def sibling(self) -> "Engine":
        """An engine with the same programs, and with rollouts, cache and weights of its own."""
        return Engine(self.programs, self.publisher, self.seed, clock=self.clock)

    def publish(self, params: Params, version: int) -> SamplerParams:
        """The parameters as the engine samples with them; once a step. Rollouts in flight go on with them from their
        next chunk. See `publish.Publisher.publish`.

        The weights of rollouts in flight are dropped first: two copies would take memory, and the chunk in flight is
        all that has to be waited for. If publishing fails, the rollouts go on with them where the caller holds them.
        """
        running = self.scheduler
        if running is None:
            return self.publisher.publish(params, version)
        before = weakref.ref(running.device.sampler)
        running.drain()
        try:
            sampler = self.publisher.publish(params, version)
        except Exception:
            running.device.sampler = before()
            raise
        running.adopt(sampler)
        return sampler

    def exchange(self, sampler: SamplerParams) -> None:
        """Weights that are the same for all rows in flight and for all that is cached: another adapter took the place
        of one that no row uses (`decode.split_adapters`)."""
        if self.scheduler is not None:
            self.scheduler.adopt(sampler, forget=False)

    def warmup(self, sampler: SamplerParams) -> list[ProgramCost]:
        """Compiles every program a run can need; a table of names, seconds and scratch bytes."""
        with phase("compiling the programs of the sampler", once=True):
            return self.programs.warmup(sampler.params)

    def describe_attention(self) -> str:
        """The path of attention to the cache, with the times that were measured if there was a choice."""
        return "attention to the cache: " + describe_choice(
            self.programs.attention, "microseconds a layer and token of all slots", 1e6, 1
        )

    def published_like(self, params: Params) -> Params:
        """Shapes and shardings of what `publish` returns for parameters of these shapes."""
        return self.publisher.published_like(params)

    def lower(self, params: Params) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """(name, program) of the weight sync and of the largest programs of sampling, from shapes alone.

        Args:
            params: The parameters of the policy as leaves of shape, dtype and sharding.
        """
        yield from self.publisher.lower(params)
        for call in self.programs.largest(self.published_like(params)):
            yield "/".join(map(str, call.key)), self.programs.lower(call)

    def submit(
        self,
        sampler: SamplerParams,
        requests: Sequence[RolloutRequest],
        environment: RowEnvironment,
        options: RunOptions | None = None,
    ) -> range:
        """Queues rollouts after those in flight; `advance` returns them as they finish. The pool is allocated with
        the first ones and kept until `release`.

        Args:
            sampler: What `publish` returned.
            requests: Rendered requests, which have the token ids of their prompts.
            environment: The environment of these rollouts, which it numbers from 0.
            options: Step, purpose, display and cancel policy; those of a training step 0 by default.

        Returns:
            Tickets, request by request and sample by sample.

        Raises:
            ValueError: No request, an empty or too long prompt, a budget beyond the limits, two rollouts of one key.
        """
        options = options or RunOptions()
        mixed = "adapters" in sampler.params
        check_requests(requests, self.config, self.programs.model.vocab_size, options.key_step, mixed=mixed)
        if self.scheduler is None:
            self._compiled = self.programs.compilations
            self.scheduler = Scheduler(self.programs, self.seed, sampler, self.clock)
        elif self.scheduler.device.sampler is not sampler:
            self.scheduler.adopt(sampler)
        return self.scheduler.submit(requests, environment, options)

    def advance(self, timeout_s: float = math.inf) -> list[tuple[int, Trajectory]]:
        """(ticket, trajectory) of the rollouts that have finished; works until there are some, the time is over or
        nothing is left."""
        finished, self._finished = self._finished, []
        return finished if finished or self.scheduler is None else self.scheduler.advance(timeout_s)

    def cancel(self, ticket: int) -> None:
        """Ends a rollout; `advance` returns it with stop `cancelled`."""
        if self.scheduler is not None:
            self.scheduler.cancel(ticket)

    def cut(self, ticket: int) -> Trajectory:
        """An unfinished rollout as it is now, with stop `cancelled`: a request with it as `resume` goes on from there.
        The rollout itself goes on. One that has ended and that `advance` has yet to return, as it ended."""
        ended = dict(self._finished + self.scheduler.finished)
        return ended[ticket] if ticket in ended else self.scheduler.cut(ticket)

    def take_stats(self) -> RolloutStats:
        """What was counted since the last call, or since the pool was allocated."""
        if self.scheduler is None:
            return RolloutStats()
        stats = self.scheduler.count_into(RolloutStats())
        stats.compilations = self.programs.compilations - self._compiled
        self._compiled = self.programs.compilations
        return stats

    @property
    def stats(self) -> RolloutStats:
        """What has been counted since the first rollouts in flight came."""
        return RolloutStats() if self.scheduler is None else self.scheduler.stats

    def release(self) -> RolloutStats:
        """Frees the pool, with the rollouts in flight; what was counted since the first of them."""
        stats, scheduler, self.scheduler, self._finished = self.stats, self.scheduler, None, []
        if scheduler is not None:
            scheduler.abandon()
        return stats

    def run(
        self,
        sampler: SamplerParams,
        requests: Sequence[RolloutRequest],
        environment: RowEnvironment,
        options: RunOptions | None = None,
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Rolls every request out: its trajectories, request by request and sample by sample, and statistics. For the
        arguments see `submit`. With rollouts in flight these share their pool and go on meanwhile; without, the pool is
        freed at the end.

        Rows cut by the engine hold the tokens that they have. Turns are spans of tokens without text unless the
        environment completes them; an unfinished turn is not among them. An exception gives its rollouts up.
        """
        options = options or RunOptions()
        check_requests(requests, self.config, self.programs.model.vocab_size, options.key_step)
        compiled, stats = self.programs.compilations, RolloutStats()
        scheduler = self.scheduler or Scheduler(self.programs, self.seed, sampler, self.clock)
        before = scheduler.count_into(stats)
        if scheduler.device.sampler is not sampler:
            scheduler.adopt(sampler)
        tickets = scheduler.submit(requests, environment, options)
        starts = [starting_point(scheduler.rows[ticket].request).length for ticket in tickets]
        trajectories: dict[int, Trajectory] = {}
        try:
            while len(trajectories) < len(tickets):
                for ticket, trajectory in scheduler.advance():
                    if ticket in tickets:
                        trajectories[ticket] = trajectory
                    else:
                        self._finished.append((ticket, trajectory))
        except BaseException:
            scheduler.abandon(tickets)
            scheduler.count_into(before.followed_by(scheduler.count_into(RolloutStats())))
            raise
        rows = [trajectories[ticket] for ticket in tickets]
        if self.scheduler is not None:
            stats, of_others = divided(stats, starts, rows)
            scheduler.count_into(before.followed_by(of_others))
        stats.compilations = self.programs.compilations - compiled
        return rows, stats


def divided(
    stats: RolloutStats, starts: Sequence[int], rows: Sequence[Trajectory]
) -> tuple[RolloutStats, RolloutStats]:
    """(statistics of a batch, those of the rollouts that shared its pool). Rollouts, their stops and their tokens are
    counted for each of the two. What concerns all rows of the pool, such as chunks, prefilled tokens and seconds, is
    divided in proportion to the sampled tokens.

    Args:
        stats: Statistics of all of them while the batch ran.
        starts: Length of each rollout of the batch before anything was sampled.
        rows: The rollouts of the batch.
    """
    drawn = [row.policy_mask[start:] for start, row in zip(starts, rows, strict=True)]
    sampled, stops = sum(int(mask.sum()) for mask in drawn), Counter(row.stop for row in rows)
    share = sampled / stats.sampled_tokens if stats.sampled_tokens else 1.0
    counts = {item.name: getattr(stats, item.name) for item in fields(stats)}
    counts = {name: count for name, count in counts.items() if isinstance(count, int | float)}
    batch = {
        name: count * share if isinstance(count, float) else round(count * share) for name, count in counts.items()
    }
    batch |= {"rollouts": len(rows), "sampled_tokens": sampled, "observation_tokens": sum(map(len, drawn)) - sampled}
    others = {name: count - batch[name] for name, count in counts.items()}
    batch["cache_tokens"] = others["cache_tokens"] = stats.cache_tokens
    batch["stops"] = {name: stops[name] for name in stats.stops}
    others["stops"] = {name: count - stops[name] for name, count in stats.stops.items()}
    by_shard = np.diff(np.rint(np.cumsum((0, *stats.shard_tokens)) * share)).astype(int).tolist()
    batch["shard_tokens"] = tuple(by_shard)
    others["shard_tokens"] = tuple(a - b for a, b in zip(stats.shard_tokens, by_shard, strict=True))
    return RolloutStats(**batch), RolloutStats(**others)


def check_requests(
    requests: Sequence[RolloutRequest], config: RolloutConfig, vocab_size: int, step: int = 0, *, mixed: bool = False
) -> None:
    """Refuses what could not be rolled out, before anything is computed. With `mixed`, ids carry numbers of adapters.

    Raises:
        ValueError: Naming the request, the numbers and the setting to change.
    """
    if not any(request.count > 0 for request in requests):
        raise ValueError("no rollout requested: the group is empty; ask for at least one sample of one problem")
    check_keys(requests, step)
    for index, request in enumerate(requests):
        name = f"request {index} (place {request.place}, {request.count} from sample {request.first_sample})"
        if request.prompt is None:
            raise ValueError(f"{name} has no prompt ids; pass requests through rollout.sampler.render first")
        n, budget = len(request.prompt), config.max_response_tokens if request.budget is None else request.budget
        if not 1 <= n <= config.max_prompt_tokens:
            raise ValueError(
                f"{name}: prompt of {n} tokens, must be 1 to {config.max_prompt_tokens}; drop the problem or raise "
                "rollout.max_prompt_tokens"
            )
        if not 1 <= budget <= config.max_response_tokens:
            raise ValueError(
                f"{name}: budget of {budget} tokens, must be 1 to {config.max_response_tokens}; change it or "
                "rollout.max_response_tokens"
            )
        if request.begun >= budget:
            raise ValueError(
                f"{name} begins with {request.begun} response tokens, which fill its budget of {budget}; finish it as "
                "`length` or raise its budget"
            )
        if request.temperature is not None and not 0 <= request.temperature < math.inf:
            raise ValueError(f"{name}: temperature {request.temperature}, must be at least 0 and finite")
        ids = np.concatenate([request.prompt, np.asarray(request.prefix, request.prompt.dtype)])
        ids = ids & ID_MASK if mixed else ids
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name}: prompt ids from {low} to {high}, but the model has {vocab_size} tokens; use the tokenizer "
                "that the model was made for"
            )

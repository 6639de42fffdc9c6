"""The rollout engine: slots that keep the devices decoding while tools run.

`make_engine` fixes the shapes; `publish` takes the parameters once a step; `run` rolls requests out. The engine knows
token ids and slots, neither text nor tools: those are the environment's (`rollout.collect`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.model.choose import told
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.rollout.programs import ProgramCost, Programs
from grpo_roc_jax.rollout.records import (
    Environment,
    Finish,
    Observe,
    Request,
    Rollout,
    RolloutStats,
    SingleTurn,
    TurnEnd,
    Wait,
)
from grpo_roc_jax.rollout.run import Run, Surplus
from grpo_roc_jax.rollout.weights import Publisher, SamplerParams, StaleWeightsError
from grpo_roc_jax.sharding import process_mesh

__all__ = [
    "Engine",
    "Environment",
    "Finish",
    "Observe",
    "Request",
    "Rollout",
    "RolloutStats",
    "SamplerParams",
    "SingleTurn",
    "StaleWeightsError",
    "Surplus",
    "TurnEnd",
    "Wait",
    "make_engine",
]


def make_engine(
    model_config: ModelConfig,
    rollout_config: RolloutConfig,
    sampling_config: SamplingConfig,
    stop_ids: Sequence[int],
    mesh: Mesh | None = None,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
) -> "Engine":
    """An engine for one set of shapes; programs are compiled by `warmup` or at first use, and counted.

    Args:
        model_config: With `vocab_size` resolved.
        rollout_config: Slots, limits, deadlines.
        sampling_config: Temperature and cuts.
        stop_ids: Token ids that end a turn.
        mesh: Slots are split over its data and fsdp axes, heads over tensor; only devices of this process are used,
            since tools finish at different times in different processes. None: one device.
        seed: Of the run.
        vocab_size: Ids the tokenizer knows; padding rows of the embedding behind it are never drawn. None: all.

    Raises:
        ValueError: a stop id outside the vocabulary, or slots that do not divide over the mesh.
    """
    vocabulary = vocab_size or model_config.vocab_size
    outside = [stop for stop in stop_ids if not 0 <= stop < vocabulary]
    if outside:
        raise ValueError(
            f"stop ids {outside} lie outside the vocabulary of {vocabulary} tokens and could never be drawn; take "
            "them from the tokenizer the model was made for"
        )
    local = process_mesh(mesh, jax.process_index()) if mesh is not None and mesh.is_multi_process else mesh
    programs = Programs(model_config, rollout_config, sampling_config, tuple(stop_ids), vocab_size, local)
    if rollout_config.slots % programs.shards:
        raise ValueError(
            f"rollout.slots = {rollout_config.slots} does not divide over the {programs.shards} data shards of the "
            f"mesh; take {-(-rollout_config.slots // programs.shards) * programs.shards}"
        )
    shard_tokens = rollout_config.reservable_tokens // programs.shards
    if shard_tokens < rollout_config.max_row_tokens:
        raise ValueError(
            f"rollout.kv_tokens = {rollout_config.kv_tokens} over {programs.shards} data shards leaves "
            f"{shard_tokens} tokens each, too few for one row of {rollout_config.max_row_tokens}; raise it to at "
            f"least {rollout_config.max_row_tokens * programs.shards}"
        )
    publisher = Publisher(model_config, mesh, rollout_config.canary_tolerance)
    return Engine(rollout_config, sampling_config, tuple(stop_ids), seed, programs, publisher)


class Engine:
    """Compiled programs and settings; no weights, no rows. Make it once per run with `make_engine`."""

    def __init__(
        self,
        config: RolloutConfig,
        sampling: SamplingConfig,
        stop_ids: tuple[int, ...],
        seed: int,
        programs: Programs,
        publisher: Publisher,
    ):
        self.config, self.sampling, self.stop_ids, self.seed = config, sampling, stop_ids, seed
        self.programs = programs
        self._publisher = publisher

    def publish(self, params: Params, version: int) -> SamplerParams:
        """The parameters as the engine samples with them; once a step. See `weights.Publisher.publish`."""
        return self._publisher.publish(params, version)

    def warmup(self, sampler: SamplerParams) -> list[ProgramCost]:
        """Compiles every program a run can need; a table of names, seconds and scratch bytes."""
        return self.programs.warmup(sampler.params)

    def describe_attention(self) -> str:
        """The path of attention to the cache, with what was measured where it was open."""
        return "attention to the cache: " + told(
            self.programs.attention, "microseconds a layer and token of all slots", 1e6, 1
        )

    def published_like(self, params: Params) -> Params:
        """Shapes and places of what `publish` makes of these shapes."""
        return self._publisher.published_like(params)

    def lower(self, params: Params) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """(name, program) of the hand-over and of the largest programs of sampling, from shapes alone.

        Args:
            params: Of the policy, leaves of shape, dtype and sharding.
        """
        yield from self._publisher.lower(params)
        for call in self.programs.largest(self.published_like(params)):
            yield "/".join(map(str, call.key)), self.programs.lower(call)

    def run(
        self,
        sampler: SamplerParams,
        requests: Sequence[Request],
        environment: Environment,
        *,
        progress: Any = None,
        surplus: Surplus | None = None,
        cut: bool = True,
    ) -> tuple[list[Rollout], RolloutStats]:
        """Rolls every request out; rollouts in the order asked, their stops counted in the statistics.

        Args:
            sampler: From `publish`.
            requests: What to roll out.
            environment: Parses turns, runs tools; `SingleTurn()` for plain generation.
            progress: `progress.RolloutProgress` or None.
            surplus: Consulted as rows end when `rollout.early_exit` is on; see `Surplus`.
            cut: Held to `rollout.step_timeout_s`, as training steps are. Without, every row runs to its own end.

        Raises:
            ValueError: no request, an empty or too long prompt, a budget beyond the limits, unequal prompts in a group.
        """
        check_requests(requests, self.config, self.programs.model.vocab_size)
        compiled = self.programs.compilations
        run = Run(
            self.config if cut else replace(self.config, step_timeout_s=0.0, carry_over=False),
            self.sampling,
            self.programs,
            self.stop_ids,
            self.seed,
            sampler,
            requests,
            environment,
            progress,
            surplus,
        )
        rollouts, stats = run.run()
        stats.compilations = self.programs.compilations - compiled
        return rollouts, stats


def check_requests(requests: Sequence[Request], config: RolloutConfig, vocab_size: int) -> None:
    """Refuses what could not be rolled out, before anything is computed.

    Raises:
        ValueError: naming the request, the numbers and the setting to change.
    """
    if not requests:
        raise ValueError("no rollout requested: the group is empty; ask for at least one sample of one problem")
    first: dict[int, Request] = {}
    for index, request in enumerate(requests):
        n = len(request.prompt)
        if not 1 <= n <= config.max_prompt_tokens:
            raise ValueError(
                f"request {index} (key {request.key}): prompt of {n} tokens, 1 to {config.max_prompt_tokens} are "
                "wanted; drop the problem or raise rollout.max_prompt_tokens"
            )
        if not 1 <= request.budget <= config.max_response_tokens:
            raise ValueError(
                f"request {index} (key {request.key}): budget of {request.budget} tokens, 1 to "
                f"{config.max_response_tokens} are wanted; change it or rollout.max_response_tokens"
            )
        if request.resume is not None and len(request.resume.tokens) >= n + request.budget:
            raise ValueError(
                f"request {index} (key {request.key}) resumes {len(request.resume.tokens)} tokens, but prompt + "
                f"budget is {n + request.budget}; finish it as `length` or raise its budget"
            )
        sibling = first.setdefault(request.group, request)
        if sibling is request:
            low, high = int(np.min(request.prompt)), int(np.max(request.prompt))
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"request {index} (key {request.key}): prompt ids from {low} to {high}, but the model has "
                    f"{vocab_size} tokens; use the tokenizer the model was made for"
                )
        elif sibling.prompt is not request.prompt and not np.array_equal(sibling.prompt, request.prompt):
            raise ValueError(
                f"request {index} (key {request.key}): its prompt differs from that of group {request.group}; give "
                "requests with different prompts different groups"
            )

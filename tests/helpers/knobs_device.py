"""Effects of settings on the device side: programs as jaxprs, gradients and optimizer steps on tiny arrays, and the
engine with scripted programs instead of a model."""

import dataclasses
import functools
import json
import re
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.decode import PATCH_FIELDS, ChunkReport
from grpo_roc_jax.engine.engine import Engine, make_engine
from grpo_roc_jax.engine.programs import SamplerPrograms
from grpo_roc_jax.engine.publish import Published, StaleWeightsError, unstack
from grpo_roc_jax.learner.loss import policy_logprobs
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.learner.update import make_optimizer, make_schedule
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import resolve_config
from grpo_roc_jax.model.lora import attach, init_adapter
from grpo_roc_jax.model.published import write_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run.components import fit_length, resolve_model
from grpo_roc_jax.run.policy import frozen_weights
from tests.helpers.knobs import digest, files, only, seen
from tests.helpers.rollout_fakes import FakeTools, one_rollout

ROWS, TOKENS, VOCABULARY = 2, 12, 48

# ---- the model -----------------------------------------------------------------------------------------------------


def program(function: Any, *shapes: Any) -> str:
    """The jaxpr of a function, with the arrays it holds, less what nothing reads and the addresses of objects."""
    closed = jax.make_jaxpr(function)(*shapes)
    text = re.sub(r"0x[0-9a-f]+", "", str(living(closed.jaxpr)))
    assert "Config(" not in text, "a configuration printed in a program would make every setting matter"
    return digest(text, [np.asarray(const) for const in closed.consts])


def living(jaxpr: Any) -> Any:
    """The jaxpr without equations whose results reach no output, so that their inputs do not seem to matter."""
    needed, equations = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(map(id, equation.outvars)):
            equations.append(equation)
            needed.update(map(id, equation.invars))
    return jaxpr.replace(eqns=equations[::-1])


def shape_of(config: Config) -> ModelConfig:
    published()
    return resolve_model(resolve_config(config.model), SimpleNamespace(vocab_size=VOCABULARY))


@functools.cache
def published() -> None:
    """Two directories of published models; one has a key that is not known here."""
    model = ModelConfig(d_model=32, layers=3, heads=2, kv_heads=1, head_dim=16, d_ff=24, vocab_size=64, qkv_bias=True)
    for name, more in (("plain", {}), ("odd", {"odd_key": 1})):
        (files() / f"model_{name}").mkdir()
        (files() / f"model_{name}" / "config.json").write_text(json.dumps(write_config(model) | more))


def traced(config: Config) -> Any:
    """Parameters, adapter and frozen weights by name and shape, and the program of the training forward; or why the
    model is refused."""
    try:
        model = fit_length(shape_of(config), config.rollout.max_row_tokens)
    except ValueError as error:
        return f"refused: {error}"
    key, lora, adapter = jax.random.key(0), config.lora, None
    base = frozen_weights(config, model, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))
    if base is None:
        base = jax.eval_shape(partial(init_params, config=model), key)
    else:
        adapter = jax.eval_shape(partial(init_adapter, lora=lora, model=model), key)
    like = partial(jax.ShapeDtypeStruct, (ROWS, TOKENS))
    required = [field.name for field in dataclasses.fields(TrainBatch) if field.default is dataclasses.MISSING]
    fields = dict.fromkeys(required, like(jnp.float32))
    fields |= dict.fromkeys(("tokens", "segment_ids", "positions", "ratio_segments"), like(jnp.int32))
    batch = TrainBatch(**fields | {"policy_mask": like(jnp.bool), "count": jax.ShapeDtypeStruct((), jnp.int32)})

    def run(base: Any, adapter: Any, batch: TrainBatch) -> Any:
        return policy_logprobs(attach(base, adapter, lora) if lora.rank else base, batch, model, config.update)[0]

    return str(jax.eval_shape(lambda *trees: trees, base, adapter)), program(run, base, adapter, batch)


def shape(**fields: Any) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in fields.items()}


# ---- the update ----------------------------------------------------------------------------------------------------


def optimized(config: Config) -> Any:
    """The program of an optimizer step, and learning rates."""
    optimizer, schedule = make_optimizer(config.optim), make_schedule(config.optim)
    params = {"wq": jax.ShapeDtypeStruct((2, 3), jnp.float32), "norm": jax.ShapeDtypeStruct((3,), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    rates = [float(schedule(i)) for i in range(30)]
    return str(state), program(optimizer.update, params, state, params), rates


# ---- sampling and the engine ---------------------------------------------------------------------------------------


class ScriptedPrograms(SamplerPrograms):
    """The engine's programs without a model: there is no pool, tokens come from a generator, calls are recorded."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.calls: list[tuple] = []
        self.rng = np.random.default_rng(3)
        self.rows = np.zeros((len(PATCH_FIELDS), self.rollout.slots), np.int32)

    def place(self, value: np.ndarray, *spec: Any) -> np.ndarray:
        return value

    def new_pool(self) -> Any:
        return self.sized("allocate", self.size)

    def new_slots(self) -> None:
        return None

    def sized(self, *call: Any) -> Any:
        self.calls.append(call)

    def append(self, params: Any, pool: Any, tokens: np.ndarray, table: np.ndarray, where: np.ndarray) -> Any:
        return self.sized("append", tokens.shape, digest(tokens, table, where))

    def append_packed(self, params: Any, pool: Any, tokens: np.ndarray, table: np.ndarray, tiles: np.ndarray) -> Any:
        return self.sized("append", tokens.shape, digest(tokens, table, tiles))

    def _run(self, call: Any) -> Any:
        return self.sized(*call.key)

    def copy(self, pool: Any, blocks: Any, rows: Any) -> Any:
        return self.sized("copy", digest(blocks))

    def decode(
        self, params: Any, pool: Any, slots: Any, patch: np.ndarray, table: np.ndarray, width: int
    ) -> tuple[Any, None, ChunkReport]:
        self.sized("decode", width, digest(patch, table))
        fields = {name: i for i, name in enumerate(PATCH_FIELDS)}
        self.rows = np.where(patch[fields["touched"]] > 0, patch, self.rows)
        chunk, slots_held = self.rollout.chunk, self.rollout.slots
        tokens = np.zeros((chunk, slots_held), np.int32)
        count = np.zeros(slots_held, np.int32)
        position, active, limit = (self.rows[fields[name]] for name in ("position", "active", "limit"))
        for k in range(chunk):
            tokens[k] = self.rng.integers(8, VOCABULARY, slots_held)
            tokens[k][self.rng.random(slots_held) < 0.08] = 4
            live = active > 0
            count += live
            position += live
            active[live & ((position + 1 >= limit) | (tokens[k] == 4))] = 0
        zeros = np.zeros((chunk, slots_held), np.float32)
        return pool, None, ChunkReport(tokens, zeros, zeros[:0], count, np.array([chunk], np.int32))


class SlowTools(FakeTools):
    """Observations that take a few milliseconds."""

    def poll(self, timeout_s: float) -> list:
        time.sleep(0.002)
        return super().poll(timeout_s)


def rolled(config: Config) -> Any:
    """The programs and shapes that the engine calls, the rollouts and their statistics; or the error."""
    model, rollout = ModelConfig(vocab_size=VOCABULARY), config.rollout
    programs = ScriptedPrograms(model, rollout, config.sampling, (3, 4), VOCABULARY, None)
    engine = Engine(programs, None, 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, VOCABULARY, size=n).astype(np.int32) for n in (30, 9, 21, 38)]
    requests = [one_rollout(g, prompts[g], 90 - 30 * (g == 0), s, step=0) for g in range(4) for s in range(3)]
    tools = SlowTools(requests, vocab=VOCABULARY, latency_polls=3)
    try:
        rollouts, stats = engine.run(SimpleNamespace(params=None, version=1), requests, tools)
    except ValueError as error:
        return f"refused: {error}"
    rows = [(r.tokens, r.policy_mask, r.stop) for r in rollouts]
    counts = (stats.chunks, stats.steps, stats.forks, stats.reused, stats.evictions, stats.cache_tokens)
    return digest(rows), counts, digest(programs.calls)


def allocated(config: Config) -> str:
    """The cache of an engine on a TPU, whose layout depends on the path of attention, and its weights, by type."""
    model = ModelConfig(vocab_size=VOCABULARY, head_dim=128)
    made = SamplerPrograms(model, config.rollout, config.sampling, (3,), VOCABULARY, None, platform="tpu")
    params = jax.eval_shape(partial(init_params, config=model), jax.random.key(0))
    published = jax.eval_shape(partial(unstack, config=model, form=Published(config.rollout.weight_dtype)), params)
    return str((made.pool_like(), published))


def published_weights(config: Config) -> Any:
    """Whether the weight check of an engine accepts weights that were altered by a hundred-thousandth."""
    shape = {"d_model": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "d_ff": 16}
    model = ModelConfig(**shape, vocab_size=VOCABULARY, compute_dtype="float32")
    publisher = make_engine(model, config.rollout, config.sampling, (3,), None, seed=0).publisher
    params = init_params(jax.random.key(0), model)
    params |= {"embed": 6.0 * params["embed"]}
    honest = publisher.convert
    publisher.convert = lambda params: jax.tree.map(lambda leaf: leaf * (1 + 1e-5), honest(params))
    try:
        return publisher.publish(params, 1).version
    except StaleWeightsError:
        return "refused"


# ---- cases ---------------------------------------------------------------------------------------------------------

PLAIN = shape(d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=192)
"""The defaults, so that no field contradicts a published model."""
SLIDING = {"kind": "sliding", "sizes": (4, 0)}
FULL = SLIDING | {"local_theta": 50.0, "full_head_dim": 8, "full_kv_heads": 2}
DELTA = {"kind": "gated_delta", "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8, "every": 2}
MIXTURE = {"kind": "mixture", "count": 4, "per_token": 2}
CHOSEN = MIXTURE | {"count": 8, "scores": "sigmoid", "groups": 4, "top_groups": 2, "shared": 8}
SCALED = {"factor": 8.0, "original_length": 64}
LONG = shape(rope_scaling={"kind": "longrope", "short": (1.5,) * 4, "long": (3.0,) * 4, "original_length": 1024})
LONG_ROWS = LONG | {"model.rope_scaling.extended": True}
GROWTH = {"kind": "some", "query_growth": 0.1, "query_length": 4, "rotary_layers": (True, False)}
LATENT = {"kind": "some", "latent": 16, "latent_key": 8, "latent_value": 8}
LATENT = shape(kv_heads=1, head_dim=24, extras=LATENT)
LINEAR, CAPPED = {"kind": "linear", "factor": 2.0}, {"kind": "some", "logit_cap": 3.0}
MODEL = (
    seen(traced, "model", windows=SLIDING, rope_scaling=LINEAR, extras=CAPPED, experts=MIXTURE),
    only(traced, "model", PLAIN, path="{files}/model_plain"),
    only(traced, "model", PLAIN | {"model.path": "{files}/model_odd"}, ignore_keys=("odd_key",)),
    seen(traced, "model.windows", shape(layers=4, windows=DELTA), form="mamba2", attention=(0,)),
    only(traced, "model.windows", shape(windows=SLIDING), sizes=(4,), local_theta=50.0, chunked=True),
    only(traced, "model.windows", shape(windows=FULL), full_head_dim=12, full_kv_heads=1, full_keys_as_values=True),
    only(traced, "model.windows", shape(layers=4, windows=FULL | {"shared_layers": 2}), shared_layers=1, shared_ff=16),
    seen(traced, "model.rope_scaling", shape(rope_scaling={"kind": "llama3", **SCALED})),
    seen(traced, "model.rope_scaling.share", shape(rope_scaling={"kind": "proportional", "share": 0.5})),
    seen(
        traced,
        " ".join(f"model.rope_scaling.{name}" for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")),
        shape(rope_scaling={"kind": "yarn", **SCALED}),
    ),
    only(traced, "model.rope_scaling", LONG, short=(2.0,) * 4, extended=True),
    only(traced, "model.rope_scaling", LONG_ROWS, long=(2.0,) * 4),
    seen(traced, "model.experts", shape(layers=4, experts=CHOSEN | {"dense_layers": 1, "dense_ff": 16})),
    seen(traced, "model.experts.count model.experts.per_token model.experts.norm_weights", shape(experts=MIXTURE)),
    seen(traced, "model.experts.own_norms", shape(experts=MIXTURE | {"shared": 8})),
    seen(traced, "model.experts.every", shape(layers=4, experts=MIXTURE | {"every": 2, "dense_ff": 16})),
    seen(traced, "model.extras", shape(extras="some"), rotary_layers=(False,)),
    seen(
        traced, "model.extras.query_growth model.extras.query_length model.extras.query_unrotated", shape(extras=GROWTH)
    ),
    only(traced, "model.extras", LATENT, latent=20, latent_query=8, latent_key=4, latent_value=4),
)
ENGINE = {
    "rollout.slots": 6,
    "rollout.chunk": 4,
    "rollout.max_prompt_tokens": 40,
    "rollout.max_response_tokens": 90,
    "rollout.max_turn_tokens": 15,
    "rollout.append_lengths": (16,),
    "rollout.pipeline": "off",
}
DROPPED = ENGINE | {"rollout.step_limit": {"kind": "drop", "seconds": 1e-9}}
ROLLOUT = (
    seen(rolled, "sampling.temperature", ENGINE),
    seen(
        rolled, "rollout", ENGINE, kv_tokens=200, append_lengths=(8, 32), turn_timeout_s=1e-3, trajectory_timeout_s=1e-9
    ),
    only(rolled, "rollout", ENGINE | {"rollout.slots": 16}, narrow=()),
    seen(allocated, "rollout.attention"),
    seen(allocated, "rollout.low_precision", {"rollout.low_precision.weights": "int8"}),
    seen(allocated, "rollout.low_precision.weights", {"rollout.low_precision.cache": "int8"}),
    only(rolled, "rollout", DROPPED, step_limit={"kind": "partial", "seconds": 1e-9}),
    only(rolled, "rollout.step_limit", DROPPED, seconds=9.0),
    only(published_weights, "rollout", weight_check_tolerance=1e-7),
)
FAST = {"optim.lr": 0.01, "optim.warmup_steps": 2}
COSINE = {"optim.schedule": {"kind": "cosine", "total_steps": 20}}
UPDATE = (
    seen(traced, "lora update"),
    only(traced, "lora", {"lora": "low_rank"}, targets=("q_proj",)),
    seen(traced, "lora.rank lora.alpha lora.base_bits", {"lora": "low_rank"}),
    seen(optimized, "optim", FAST, schedule={"kind": "linear", "total_steps": 20}),
    seen(optimized, "optim.schedule", FAST | COSINE),
)
SEEN = (*MODEL, *ROLLOUT, *UPDATE)

"""Effects of settings on the device side: programs as jaxprs on tiny shapes, and the check of published weights."""

import json
import re
from dataclasses import MISSING, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine import engine, publish
from grpo_roc_jax.engine.decode import PATCH_FIELDS, ChunkReport
from grpo_roc_jax.engine.programs import SamplerPrograms
from grpo_roc_jax.learner import loss, pack
from grpo_roc_jax.model import convert, published, sharding, transformer
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import attach, init_adapter
from grpo_roc_jax.run import components, policy
from tests.helpers.knobs import digest, files, only, seen
from tests.helpers.rollout_fakes import FakeTools, one_rollout

ROWS, TOKENS, VOCABULARY = 2, 12, 48


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
    """The model; there are two directories of published ones, one with a key that is not known here."""
    model = ModelConfig(d_model=32, layers=3, heads=2, kv_heads=1, head_dim=16, d_ff=24, vocab_size=64, qkv_bias=True)
    for name, more in ("plain", {}), ("odd", {"odd_key": 1}):
        (files() / f"model_{name}").mkdir(exist_ok=True)
        (files() / f"model_{name}" / "config.json").write_text(json.dumps(published.write_config(model) | more))
    return components.resolve_model(convert.resolve_config(config.model), SimpleNamespace(vocab_size=VOCABULARY))


def traced(config: Config) -> Any:
    """Parameters, adapter and frozen weights by name and shape, and the program of the training forward; or why the
    model is refused."""
    try:
        model = components.fit_length(shape_of(config), config.rollout.max_row_tokens)
    except ValueError as error:
        return f"refused: {error}"
    key, lora, adapter = jax.random.key(0), config.lora, None
    base = policy.frozen_weights(config, model, sharding.make_mesh(sharding.ShardingConfig(data=1), jax.devices()[:1]))
    if base is None:
        base = jax.eval_shape(partial(transformer.init_params, config=model), key)
    else:
        adapter = jax.eval_shape(partial(init_adapter, lora=lora, model=model), key)
    like = partial(jax.ShapeDtypeStruct, (ROWS, TOKENS))
    whole = ("tokens", "segment_ids", "positions", "ratio_segments")
    types = {"policy_mask": jnp.bool, **dict.fromkeys(whole, jnp.int32)}
    required = [field.name for field in fields(pack.TrainBatch) if field.default is MISSING]
    given = {name: like(types.get(name, jnp.float32)) for name in {*required, *types}}
    batch = pack.TrainBatch(**given | {"count": jax.ShapeDtypeStruct((), jnp.int32)})

    def run(base: Any, adapter: Any, batch: pack.TrainBatch) -> Any:
        return loss.policy_logprobs(attach(base, adapter, lora) if lora.rank else base, batch, model, config.update)[0]

    return str(jax.eval_shape(lambda *trees: trees, base, adapter)), program(run, base, adapter, batch)


def shape(**fields: Any) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in fields.items()}


class ScriptedPrograms(SamplerPrograms):
    """The engine's programs without a model: there is no pool, tokens come from a generator, calls are recorded."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.calls, self.rng = [], np.random.default_rng(3)
        self.rows = np.zeros((len(PATCH_FIELDS), self.rollout.slots), np.int32)

    def place(self, value: np.ndarray, *spec: Any) -> np.ndarray:
        return value

    def new_pool(self) -> None:
        self.calls.append(self.size)

    def new_slots(self) -> None: ...

    def copy(self, pool: Any, *arrays: Any) -> None:
        self.calls.append([digest(*map(np.asarray, arrays)), [np.shape(array) for array in arrays]])

    def append(self, params: Any, *given: Any) -> None:
        self.copy(*given)

    append_packed = append

    def _run(self, call: Any) -> None:
        self.calls.append(call.key)

    def decode(self, params: Any, pool: Any, slots: Any, patch: np.ndarray, table: np.ndarray, width: int) -> tuple:
        self.calls.append([width, digest(patch, table)])
        fields = {name: i for i, name in enumerate(PATCH_FIELDS)}
        self.rows = np.where(patch[fields["touched"]] > 0, patch, self.rows)
        position, active, limit = (self.rows[fields[name]] for name in ("position", "active", "limit"))
        tokens = self.rng.integers(8, VOCABULARY, (self.rollout.chunk, self.rollout.slots), np.int32)
        tokens[self.rng.random(tokens.shape) < 0.08] = 4
        count, zeros = np.zeros(self.rollout.slots, np.int32), np.zeros(tokens.shape, np.float32)
        for row in tokens:
            live = active > 0
            count += live
            position += live
            active[live & ((position + 1 >= limit) | (row == 4))] = 0
        return pool, None, ChunkReport(tokens, zeros, zeros[:0], count, np.array([len(tokens)], np.int32))


def rolled(config: Config) -> str:
    """The programs and shapes that the engine calls, the rollouts and their statistics; or the error."""
    model = ModelConfig(vocab_size=VOCABULARY)
    programs = ScriptedPrograms(model, config.rollout, config.sampling, (3, 4), VOCABULARY, None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, VOCABULARY, size=n).astype(np.int32) for n in (30, 9, 21, 38)]
    requests = [one_rollout(g, prompts[g], 90 - 30 * (g == 0), s, step=0) for g in range(4) for s in range(3)]
    tools, sampler = FakeTools(requests, vocab=VOCABULARY, latency_polls=3), SimpleNamespace(params=None, version=1)
    try:
        rollouts, stats = engine.Engine(programs, None, 0).run(sampler, requests, tools)
    except ValueError as error:
        return f"refused: {error}"
    counts = (stats.chunks, stats.steps, stats.forks, stats.reused, stats.evictions, stats.cache_tokens)
    return digest([(r.tokens, r.policy_mask, r.stop) for r in rollouts], counts, programs.calls)


def published_weights(config: Config) -> Any:
    """Whether the weight check of an engine accepts weights that were altered by a hundred-thousandth."""
    model = shape_of(replace(config, model=replace(config.model, layers=1, compute_dtype="float32")))
    publisher = engine.make_engine(model, config.rollout, config.sampling, (3,), None, seed=0).publisher
    params = transformer.init_params(jax.random.key(0), model)
    params |= {"embed": 6.0 * params["embed"]}
    honest = publisher.convert
    publisher.convert = lambda params: jax.tree.map(lambda leaf: leaf * (1 + 1e-5), honest(params))
    try:
        return publisher.publish(params, 1).version
    except publish.StaleWeightsError:
        return "refused"


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
YARN = " ".join(f"model.rope_scaling.{name}" for name in ("beta_fast", "beta_slow", "truncate", "attention_factor"))
QUERIES = " ".join(f"model.extras.query_{name}" for name in ("growth", "length", "unrotated"))
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
    seen(traced, YARN, shape(rope_scaling={"kind": "yarn", **SCALED})),
    only(traced, "model.rope_scaling", LONG, short=(2.0,) * 4, extended=True),
    only(traced, "model.rope_scaling", LONG_ROWS, long=(2.0,) * 4),
    seen(traced, "model.experts", shape(layers=4, experts=CHOSEN | {"dense_layers": 1, "dense_ff": 16})),
    seen(traced, "model.experts.count model.experts.per_token model.experts.norm_weights", shape(experts=MIXTURE)),
    seen(traced, "model.experts.own_norms", shape(experts=MIXTURE | {"shared": 8})),
    seen(traced, "model.experts.every", shape(layers=4, experts=MIXTURE | {"every": 2, "dense_ff": 16})),
    seen(traced, "model.extras", shape(extras="some"), rotary_layers=(False,)),
    seen(traced, QUERIES, shape(extras=GROWTH)),
    only(traced, "model.extras", LATENT, latent=20, latent_query=8, latent_key=4, latent_value=4),
)
ENGINE = {"slots": 6, "chunk": 4, "max_prompt_tokens": 40, "max_response_tokens": 90, "max_turn_tokens": 15}
ENGINE = {f"rollout.{name}": value for name, value in (ENGINE | {"append_lengths": (16,), "pipeline": "off"}).items()}
DROPPED = ENGINE | {"rollout.step_limit": {"kind": "drop", "seconds": 1e-9}}
SEEN = (
    *MODEL,
    only(published_weights, "rollout", weight_check_tolerance=1e-7),
    seen(rolled, "sampling.temperature", ENGINE),
    seen(rolled, "rollout", ENGINE, kv_tokens=200, append_lengths=(8, 32), turn_timeout_s=1e-9),
    only(rolled, "rollout", ENGINE, trajectory_timeout_s=1e-9),
    only(rolled, "rollout", ENGINE | {"rollout.slots": 16}, narrow=()),
    only(rolled, "rollout", DROPPED, step_limit={"kind": "partial", "seconds": 1e-9}),
    only(rolled, "rollout.step_limit", DROPPED, seconds=9.0),
    seen(traced, "lora update"),
    only(traced, "lora", {"lora": "low_rank"}, targets=("q_proj",)),
    seen(traced, "lora.rank lora.alpha lora.base_bits", {"lora": "low_rank"}),
)

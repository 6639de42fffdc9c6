"""Low-rank adapters: trained instead of the weights, merged into them, or exchanged with PEFT.

Each targeted matrix becomes W + (alpha / rank) A B with A [in, rank] and B [rank, out] (arXiv:2106.09685). Only the
adapter is trained: gradients, optimizer state and checkpoints hold nothing else. `attach` adds its pairs to the frozen
weights, and `transformer.block` adds their product. The base exists once, as a tuple of layers in the compute dtype,
and is shared by sampler and trainer.
"""

import json
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.model.config import FULL, ModelConfig
from grpo_roc_jax.model.convert import LEFT_OUT, is_within_whole, text_name
from grpo_roc_jax.model.families import Family, Layout, rules
from grpo_roc_jax.model.low_precision import plain, plain_layer
from grpo_roc_jax.model.safetensors_io import CheckpointError, Planned, listed, read_header, write_file
from grpo_roc_jax.model.transformer import Params, layer_shapes, layers_with
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.settings.options import AtLeast1, Axis, Positive, kind
from grpo_roc_jax.shapes import Array, Key

Target = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
]

TARGETS: dict[str, tuple[str, int]] = {
    "q_proj": ("wq", 1),
    "k_proj": ("wk", 1),
    "v_proj": ("wv", 1),
    "o_proj": ("wo", 2),
    "gate_proj": ("w_gate", 1),
    "up_proj": ("w_up", 1),
    "down_proj": ("w_down", 1),
    "in_proj_qkv": ("w_qkv", 1),
    "in_proj_z": ("w_z", 1),
    "in_proj_b": ("w_beta", 1),
    "in_proj_a": ("w_decay", 1),
    "out_proj": ("w_out", 2),
}
"""Published name -> (leaf, number of its leading dimensions that are inputs)."""

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "bias", "init_lora_weights"}
_WITHOUT_EFFECT = {"task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode"}
_WITHOUT_EFFECT |= {
    "lora_dropout",
    "layers_pattern",
    "exclude_modules",
    "eva_config",
    "velora_config",
    "runtime_config",
}
_WITHOUT_EFFECT |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}
"""Keys of PEFT that never change what a complete adapter computes, or do so only beside another key that is refused."""
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that set the adapter alone. Others, such as `pissa`, `olora` and `loftq`, also change
the weights below it, and the saved pairs fit only those."""


class Lora(Axis, axis="lora"):
    """Whether low-rank additions are trained instead of the weights."""

    rank: ClassVar[int] = 0
    base_bits: ClassVar[int] = 16


@kind("none")
class AllWeights(Lora):
    """The weights themselves are trained."""


@kind("low_rank")
class LowRank(Lora):
    """A low-rank addition to each target matrix is trained; the weights stay as published (arXiv:2106.09685)."""

    rank: AtLeast1 = 16
    """Rank of the additions. 8 to 64 are usual. Memory of gradients and optimizer state is proportional to it."""
    alpha: Positive = 32.0
    """The additions are multiplied by alpha / rank, so the learning rate need not change with the rank."""
    targets: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Matrices that get an addition, by their published names. All linear ones learn best for their memory
    (arXiv:2305.14314). A model with experts takes those of attention only. `in_proj_*` and `out_proj` are those of
    recurrent layers (Qwen3.5)."""

    base_bits: Literal[16, 8, 4] = 16
    """Bits of the matrices of the frozen layers, in update and sampler. 16: the compute dtype. 8: int8 with a scale for
    each output. 4: NF4 with a scale for each 64 inputs, 4.25 bits in all (QLoRA, arXiv:2305.14314). A published model
    whose matrices are in so many bits keeps its numbers (GGUF Q8_0, Q4_0 and Q4_1; NF4 of bitsandbytes); any other is
    rounded while it is loaded. Embedding and unembedding keep the compute dtype."""

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(f"lora.targets = {self.targets}; must name at least one matrix, each once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def pair_shapes(lora: LowRank, model: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Name -> (shape, logical axes) of the adapter's leaves for one layer.

    Raises:
        ValueError: a target does not exist in this model, or only as experts.
    """
    layer = layer_shapes(model)
    shapes = {}
    for target in lora.targets:
        leaf, _ = TARGETS[target]
        if leaf not in layer:
            kinds = "attention without a latent vector" if leaf in ("wk", "wv") else "recurrent layers"
            raise ValueError(
                f"lora.targets names {target!r}, a matrix of {kinds}, of which this model has none; list others"
            )
        if model.experts.count and leaf in ("w_gate", "w_up", "w_down"):
            raise ValueError(
                f"lora.targets names {target!r}, which are experts in this model; list the attention matrices only "
                "(q_proj, k_proj, v_proj, o_proj)"
            )
    for leaf, inputs in target_leaves(lora, layer):
        shape, axes = layer[leaf]
        shapes[f"{leaf}_lora_a"] = ((*shape[:inputs], lora.rank), (*axes[:inputs], None))
        shapes[f"{leaf}_lora_b"] = ((lora.rank, *shape[inputs:]), (None, *axes[inputs:]))
    return shapes


def target_leaves(lora: LowRank, layer: Container[str]) -> list[tuple[str, int]]:
    """(leaf, number of its leading dimensions that are inputs) of the targets, among the leaves of a layer or of all
    layers; those of layers whose heads or feed-forwards are others come after."""
    targets = [TARGETS[target] for target in lora.targets]
    others = [(f"{FULL}{leaf}", inputs) for leaf, inputs in targets]
    others += [(leaf.replace("w_", "d_"), inputs) for leaf, inputs in targets if leaf in ("w_gate", "w_up", "w_down")]
    leaves = [*targets, *others]
    return [(leaf, inputs) for leaf, inputs in leaves if leaf in layer]


def init_adapter(key: Key[Array, ""], lora: LowRank, model: ModelConfig) -> Params:
    """Float32 pairs, layers stacked: A uniform in +-1/sqrt(inputs), B zero, so that it has no effect at first."""

    def leaf(i: int, name: str, shape: tuple[int, ...]) -> Array:
        stacked = (len(layers_with(name, model)), *shape)
        if name.endswith("_b"):
            return jnp.zeros(stacked, jnp.float32)
        bound = float(np.prod(shape[:-1])) ** -0.5
        return jax.random.uniform(jax.random.fold_in(key, i), stacked, jnp.float32, -bound, bound)

    shapes = pair_shapes(lora, model)
    return {"layers": {name: leaf(i, name, shape) for i, (name, (shape, _)) in enumerate(sorted(shapes.items()))}}


def adapter_axes(lora: LowRank, model: ModelConfig) -> Params:
    """Logical axis names of every leaf of the adapter, like `transformer.param_axes` of the model."""
    return {"layers": {name: ("layers", *axes) for name, (_, axes) in pair_shapes(lora, model).items()}}


def attach(base: Params, adapter: Params, lora: LowRank) -> Params:
    """The base, stacked or a tuple of layers, with the pairs of the stacked adapter added to its layers.

    B is multiplied by alpha / rank. No matrix of the base is copied.
    """
    if not isinstance(base["layers"], tuple):
        return base | {"layers": base["layers"] | _scaled(adapter, lora)}
    names = tuple(frozenset(layer) for layer in base["layers"])
    pairs = _layer_pairs(adapter, lora, names)
    return base | {"layers": tuple(layer | pair for layer, pair in zip(base["layers"], pairs, strict=True))}


def _scaled(adapter: Params, lora: LowRank) -> Params:
    return {name: leaf * lora.scale if name.endswith("_b") else leaf for name, leaf in adapter["layers"].items()}


@partial(jax.jit, static_argnames=("lora", "names"))
def _layer_pairs(adapter: Params, lora: LowRank, names: tuple[frozenset[str], ...]) -> tuple[Params, ...]:
    """The pairs of each layer; `names` are the leaves that each layer has."""
    return split_pairs(_scaled(adapter, lora), names)


def split_pairs(stacked: Params, names: Sequence[Container[str]]) -> tuple[Params, ...]:
    """Splits pairs, stacked over the layers that have their matrix, into one dict per layer."""
    leaves = {name: iter(range(leaf.shape[0])) for name, leaf in stacked.items()}
    return tuple(
        {name: leaf[next(leaves[name])] for name, leaf in stacked.items() if name.partition("_lora_")[0] in layer}
        for layer in names
    )


def merge(base: Params, adapter: Params, lora: LowRank) -> Params:
    """The merged weights W + (alpha / rank) A B, computed in float32 and returned in the dtype of W; where W is
    quantized, in that of the embedding, like the other quantized matrices."""

    def merged(layer: Params, pairs: Params, batch: int) -> Params:
        result = plain_layer(layer, base["embed"].dtype)
        for leaf, _ in target_leaves(lora, layer):
            weight, a, b = layer[leaf], pairs[f"{leaf}_lora_a"], pairs[f"{leaf}_lora_b"]
            product = partial(jnp.tensordot, axes=1)
            product = jax.vmap(product) if batch else product
            added = lora.scale * product(a, b)
            result[leaf] = (plain(weight, jnp.float32) + added).astype(result[leaf].dtype)
        return result

    layers, pairs = base["layers"], adapter["layers"]
    if not isinstance(layers, tuple):
        return base | {"layers": merged(layers, pairs, 1)}
    pairs = split_pairs(pairs, layers)
    return base | {"layers": tuple(merged(layer, own_pairs, 0) for layer, own_pairs in zip(layers, pairs, strict=True))}


# ---- PEFT directories ----------------------------------------------------------------------------------------------


_PEFT_PREFIX = "base_model.model."
_TEXT_MODULE, _WITHIN_WHOLE = f"{_PEFT_PREFIX}model.", f"{_PEFT_PREFIX}model.language_model."
"""How the names of pairs begin for a text model, and for the text part of a vision-language model."""


class Pair(NamedTuple):
    """One tensor of an adapter directory."""

    name: str
    leaf: str
    position: int
    """Index of its layer among those that have the leaf."""
    shape: tuple[int, int]
    rows: np.ndarray | slice
    """For each published row, its index among the rows of the leaf."""


def _published_pairs(lora: LowRank, family: Family, model: ModelConfig) -> list[Pair]:
    """Every tensor of an adapter directory.

    Raises:
        CheckpointError: the family holds several of the targets as one matrix, or one under another name.
    """
    leaves = {leaf for leaf, _ in target_leaves(lora, layer_shapes(model))}
    table = rules(family, model)
    targeted = [rule for rule in table if rule.leaf in leaves]
    names = [(rule.name, layers_with(rule.leaf, model)) for rule in table if "{layer}" in rule.name]
    modules = {
        name: name[0].removesuffix(".weight").rpartition(".")[2]
        for name in names
        if name[0] in {r.name for r in targeted}
    }
    joined = {name[0] for name, module in modules.items() if names.count(name) > 1 or module not in lora.targets}
    if joined:
        raise CheckpointError(
            f"a {family.architecture} holds targets of the adapter as one matrix or under another name "
            f"({', '.join(sorted(joined))}), which has no such pair in a PEFT directory; export the merged weights, or "
            "train only o_proj and down_proj"
        )
    parts = []
    for layer in range(model.layers):
        for rule in (rule for rule in targeted if layer in layers_with(rule.leaf, model)):
            layout, position = Layout(rule, model), layers_with(rule.leaf, model).index(layer)
            name = _PEFT_PREFIX + rule.name.format(layer=layer).removesuffix(".weight")
            (outputs, inputs), rows = layout.published_shape, layout.row_order()
            pair_a, pair_b = f"{rule.leaf}_lora_a", f"{rule.leaf}_lora_b"
            parts.append(Pair(f"{name}.lora_A.weight", pair_a, position, (lora.rank, inputs), slice(None)))
            parts.append(Pair(f"{name}.lora_B.weight", pair_b, position, (outputs, lora.rank), rows))
    return parts


def save_adapter(
    adapter: Params, lora: LowRank, model: ModelConfig, family: Family, folder: Path, base_name: str
) -> list[str]:
    """Writes a PEFT adapter directory into an existing, empty folder; returns the names of its files.

    PEFT holds A as [rank, in] and B as [out, rank]; both are written in float32. If transformers loads the
    directory at `model.path` as a vision-language model, the names are those of its modules: of others PEFT loads none.

    Raises:
        CheckpointError: a value is not finite; the message names its tensor.
    """
    parts, within = _published_pairs(lora, family, model), is_within_whole(model)
    names = [part.name.replace(_TEXT_MODULE, _WITHIN_WHOLE, 1) if within else part.name for part in parts]
    planned = [Planned(name, np.dtype(np.float32), part.shape) for name, part in zip(names, parts, strict=True)]

    def values():
        for name, leaf, position, shape, rows in parts:
            value = np.asarray(jax.device_get(adapter["layers"][leaf][position]), np.float32)
            value = value.reshape(shape[::-1]).T[rows]
            if not np.isfinite(value).all():
                raise CheckpointError(f"{name} holds values that are not finite; nothing was written")
            yield value

    write_file(folder / ADAPTER_FILE, planned, values())
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    } | ({"exclude_modules": LEFT_OUT.pattern} if within else {})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return [ADAPTER_FILE, ADAPTER_CONFIG]


def read_lora(folder: Path) -> LowRank:
    """The settings of a PEFT adapter directory.

    Raises:
        CheckpointError: It is another kind of adapter, or has options that are not supported.
    """
    published = read_json_object(folder / ADAPTER_CONFIG)
    targets = published.get("target_modules")
    names = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if published.get("peft_type") != "LORA" or not names:
        got = f"peft_type {published.get('peft_type')!r}, target_modules {targets!r}"
        raise CheckpointError(f"{folder}: {got}; must be LORA and a list of names")
    options = [f"{key} = {value!r}" for key, value in published.items() if value and key not in _READ | _WITHOUT_EFFECT]
    options += [f"bias = {published['bias']!r}"] if published.get("bias", "none") != "none" else []
    start = published.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
        options.append(
            f"init_lora_weights = {start!r}, which changes the weights below the adapter (PEFT converts it on "
            "saving: path_initial_model_for_weight_conversion)"
        )
    if refused := [*sorted(set(targets) - set(TARGETS)), *options]:
        raise CheckpointError(f"{folder}: not supported: {', '.join(refused)}")
    try:
        return LowRank(rank=published["r"], alpha=float(published["lora_alpha"]), targets=tuple(sorted(targets)))
    except (KeyError, TypeError, OverflowError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: {ADAPTER_CONFIG} must have r and lora_alpha above 0, and target_modules: {error}"
        ) from error


def load_adapter(folder: Path, lora: LowRank, model: ModelConfig, family: Family) -> Params:
    """The float32 pairs of a PEFT adapter directory, layers stacked, as host arrays; for a vision-language model those
    of its text part.

    Raises:
        CheckpointError: Its tensors do not fit the model.
    """
    if not (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{folder} holds no {ADAPTER_FILE}; no other format is read")
    stored = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in read_header(folder / ADAPTER_FILE).items()}
    tensors = {f"{_PEFT_PREFIX}{text_name(n)}": tensor for n, tensor in stored.items() if not LEFT_OUT.fullmatch(n)}
    parts = _published_pairs(lora, family, model)
    wrong = [part.name for part in parts if part.name not in tensors or tensors[part.name].shape != part.shape]
    extra = sorted(set(tensors) - {part.name for part in parts})
    if wrong or extra:
        problems = [f"missing or of another shape: {listed(wrong)}"] if wrong else []
        problems += [f"unexpected: {listed(extra)}"] if extra else []
        raise CheckpointError(f"{folder} does not fit the model; {'; '.join(problems)}")
    shapes = pair_shapes(lora, model)
    layers = {
        name: np.empty((len(layers_with(name, model)), *shape), np.float32) for name, (shape, _) in shapes.items()
    }
    for name, leaf, position, shape, rows in parts:
        read, value = np.empty(shape, np.float32), np.empty(shape, np.float32)
        tensors[name].read((slice(None), slice(None)), read)
        value[rows] = read
        layers[leaf][position] = value.T.reshape(layers[leaf].shape[1:])
    return {"layers": layers}

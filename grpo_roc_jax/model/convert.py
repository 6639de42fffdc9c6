"""Published checkpoints to parameters and back, by the tensor names of their family.

Tensors are read one by one into the sharded arrays. Each process reads only the slices that its devices hold; on top of
those it needs memory for one tensor of one layer. Writing handles one tensor at a time as well.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from grpo_roc_jax.gguf_files.folder import PACKAGE, gguf_tensors, is_gguf, open_gguf
from grpo_roc_jax.gguf_files.tensors import GgufTensor
from grpo_roc_jax.model import mxfp4
from grpo_roc_jax.model.bitsandbytes_io import Nf4Tensor, join_parts
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.families import Family, Layout, TensorRule, find_family, rules, text_part
from grpo_roc_jax.model.low_precision import (
    MATRICES,
    QuantizedWeight,
    pack,
    quantize,
    split_quantized,
    summed_axes,
)
from grpo_roc_jax.model.published import note, read_config
from grpo_roc_jax.model.safetensors_io import (
    CheckpointError,
    Planned,
    Tensor,
    TensorSlice,
    listed,
    plan_shards,
    read_directory,
    write_shards,
)
from grpo_roc_jax.model.transformer import Params, layers_with, stays_exact, take_layer
from grpo_roc_jax.process.progress import Phase, phase
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.settings.options import as_text
from grpo_roc_jax.shapes import Array

AnyTensor = Tensor | TensorSlice | mxfp4.PackedTensor | GgufTensor | Nf4Tensor

LEFT_OUT = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*|mtp\..*"
)
"""Tensors that do not belong to the text model: those of vision, and of multi-token prediction."""
_TEXT_PREFIX = re.compile(r"(model\.)?language_model\.(model\.)?")

MOST_OF_A_REASON = 300
"""Characters of the hub's message that are shown."""
INDEXER = ".self_attn.indexer."
"""Part of the names of tensors that choose the keys of a query (DeepSeek-V3.2, GLM-5)."""
_KEY_TENSOR = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")
RECOMPUTED = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
"""Suffixes of tensors in old checkpoints that every reader recomputes."""


def find_model(path: str | os.PathLike[str]) -> Path:
    """The directory of a published model: `path` itself, that of a GGUF file (`gguf_files.folder`), or the local copy
    of a hub repository, named `ORG/NAME`, or `ORG/NAME/FILE.gguf` for one with GGUF files. A name in `runs/`, or in
    another folder that exists, is not taken for a hub id.

    Raises:
        ValueError: `path` is none of these, the GGUF file cannot be used, huggingface_hub is not installed, or the hub
            does not give it.
    """
    path = os.fspath(path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    local = path.startswith((".", "/", "~", "runs/")) or folder.parent.is_dir()
    if is_gguf(path):
        organisation, *names = path.split("/", 2)
        if local or path.startswith(PACKAGE) or len(names) < 2 or Path(organisation).is_dir():
            return open_gguf(path)
        return open_gguf(_fetched(path, lambda hub: hub.hf_hub_download(f"{organisation}/{names[0]}", names[1])))
    if local or path.count("/") != 1:
        raise ValueError(
            f"model.path = {path!r} is not a directory; must be one with config.json, or a hub id ORG/NAME, or a GGUF "
            "file (FILE.gguf, package:NAME)"
        )
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    return Path(_fetched(path, lambda hub: hub.snapshot_download(path, allow_patterns=patterns)))


def _fetched(path: str, fetch: Callable[[Any], str]) -> str:
    """The local path of what `fetch` takes from the hub.

    Raises:
        ValueError: It cannot be fetched; the message names the setting.
    """
    hub = _hub(path)
    try:
        with phase(f"fetching {path}"):
            return fetch(hub)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(
            f"model.path = {path!r} is not a directory here, and the hub does not give it: "
            f"{reason[:MOST_OF_A_REASON]}; check the name and the network, log in if the model asks for it, or "
            "download it and give its directory"
        ) from error


def is_here(path: str) -> bool:
    """Whether a model is on this machine: a directory or a GGUF file instead of a hub id."""
    local = Path(path).expanduser()
    return local.is_dir() or path.startswith(PACKAGE) or (is_gguf(path) and local.is_file())


def settings_path(path: str) -> str:
    """The path of this model for the settings of a run: its directory, or the name of the GGUF file, whose directory is
    created again where it is needed."""
    return path if is_gguf(path) else str(find_model(path))


def _hub(path: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"model.path = {path!r} is not a directory, and hub ids need the package huggingface_hub: install it "
            "(pip install huggingface_hub) or download the model and give its directory"
        ) from error
    return huggingface_hub


def read_published(folder: Path) -> dict[str, Any]:
    """The `config.json` of a directory; of a vision-language model, that of its text part.

    Raises:
        ValueError: the file is missing, or is no JSON object.
    """
    return dict(text_part(_raw_config(folder)))


def _raw_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a directory as it is, with what belongs to other parts than the text model."""
    file = folder / "config.json"
    if not file.is_file():
        others = ", ".join(str(gguf) for gguf in sorted(folder.glob("*.gguf")))
        raise ValueError(
            f"{folder} holds no config.json; model.path must be the directory of a published model, or a GGUF file"
            + (f", such as {others}" if others else "")
        )
    return read_json_object(file)


_TEXT_CLASSES = ("llama4", "qwen3_5", "qwen3_5_moe")
"""Model types of vision-language directories from which `AutoModelForCausalLM` makes the text model alone."""


def is_within_whole(config: ModelConfig) -> bool:
    """Whether transformers makes a model with more than the text part from the directory at `config.path`, so that the
    names of its modules contain `language_model`."""
    published = _raw_config(find_model(config.path)) if config.path else {}
    return isinstance(published.get("vision_config"), Mapping) and published.get("model_type") not in _TEXT_CLASSES


def resolve_config(config: ModelConfig) -> ModelConfig:
    """The configuration with the shape of the checkpoint at `config.path`; unchanged without a path.

    Raises:
        ValueError: a field was set to a value that differs from the checkpoint's.
        UnsupportedModelError: the checkpoint needs something that is not supported here.
    """
    if not config.path:
        return config
    given = read_config(read_published(find_model(config.path)), config.ignore_keys)
    own_fields = {"path", "ignore_keys", "compute_dtype"}
    given = with_replay(given, config)
    for name, default in vars(ModelConfig()).items():
        configured, published = getattr(config, name), getattr(given, name)
        if name not in own_fields and configured not in (default, published):
            raise ValueError(
                f"model.{name} = {as_text(configured)}, but {config.path} says {as_text(published)}; "
                f"leave model.{name} out, "
                "as the shape of a published model comes from its config.json"
            )
    return ModelConfig(**(vars(given) | {name: getattr(config, name) for name in own_fields}))


def with_replay(given: ModelConfig, config: ModelConfig) -> ModelConfig:
    """A published shape; its experts are replayed if the run's configuration says so."""
    if not (config.experts.replay and given.experts.count):
        return given
    return replace(given, experts=replace(given.experts, replay=True))


# ---- reading -------------------------------------------------------------------------------------------------------


def load_params(
    folder: Path,
    config: ModelConfig,
    shardings: Params | None = None,
    *,
    dtype: jnp.dtype = jnp.float32,
    stacked: bool = True,
    bits: int = 16,
) -> Params:
    """The parameters of a published checkpoint.

    Args:
        folder: Holds `config.json` and safetensors files.
        config: From `resolve_config`.
        shardings: In the structure of stacked parameters (`sharding.param_shardings`); None for the first device.
        dtype: Dtype of the arrays, but for those that stay float32 (`transformer.stays_exact`).
        stacked: Stack the layers on a leading axis (training); otherwise they are a tuple of dicts.
        bits: Of the matrices of the layers, if these are not stacked; see `LowRank.base_bits`.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; the message names all of them.
    """
    published = read_published(folder)
    tensors = read_text_tensors(folder)
    if published.get("num_nextn_predict_layers") or published.get("num_mtp_layers"):
        tensors = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < config.layers}
    tensors = {name: tensor for name, tensor in tensors.items() if INDEXER not in name}
    tensors = _without_shared(tensors, config, folder)
    table = rules(find_family(published), config)
    if any("{expert}" in rule.name for rule in table):
        tensors = dict(apart for name, tensor in tensors.items() for apart in _split_experts(name, tensor))
    check_tensors(tensors, table, config, folder)
    with phase(f"loading {folder.name}") as loading:
        return _load(tensors, table, config, partial(_sharding_of, shardings), dtype, stacked, loading, bits)


def _load(
    tensors: Mapping[str, AnyTensor],
    table: Sequence[TensorRule],
    config: ModelConfig,
    sharding_of: Callable[..., Sharding],
    dtype: jnp.dtype,
    stacked: bool,
    loading: Phase,
    bits: int = 16,
) -> Params:
    """`load_params` for checked tensors. `sharding_of` returns the sharding of a leaf."""
    params: Params = {"layers": {}}
    for number, rule in enumerate(table):
        loading.at(number, f"{number} of {len(table)} kinds of tensors")
        stored = jnp.dtype(jnp.float32) if stays_exact(rule.leaf) else jnp.dtype(dtype)
        read = partial(_read_leaf, tensors, rule, config, stored)
        if "{layer}" not in rule.name:
            shape = Layout(rule, config).shape
            params[rule.leaf] = jax.make_array_from_callback(
                shape, sharding_of(rule.leaf), partial(read, 0), dtype=stored
            )
        else:
            sharding, shape = sharding_of("layers", rule.leaf), _leaf_shape(rule, config)
            places = layers_with(rule.leaf, config)
            if bits < 16 and rule.leaf in MATRICES:
                params["layers"][rule.leaf] = _read_quantized(tensors, rule, config, _of_layer(sharding), places, bits)
                continue
            layers = _read_layers(read, shape, sharding, places, stored)
            stacked_shape = (len(places), *shape)
            params["layers"][rule.leaf] = _stack(layers, stacked_shape, stored, sharding) if stacked else tuple(layers)
    if not stacked:
        params["layers"] = tuple(take_layer(params["layers"], i, config) for i in range(config.layers))
    return params


def read_text_tensors(folder: Path) -> dict[str, AnyTensor]:
    """The tensors of a directory by name. For a vision-language model these are the tensors of the text part, under the
    names of a text model; a note lists the tensors left out."""
    tensors = gguf_tensors(folder)
    tensors = join_parts(mxfp4.joined(read_directory(folder))) if tensors is None else tensors
    text_tensors = {text_name(name): tensor for name, tensor in tensors.items() if not LEFT_OUT.fullmatch(name)}
    if len(text_tensors) < len(tensors):
        dropped = [name for name in tensors if LEFT_OUT.fullmatch(name)]
        note(f"{folder}: only the text part is used; {len(dropped)} other tensors are left out: {listed(dropped)}")
    return text_tensors


def index_tensors(folder: Path, config: ModelConfig) -> dict[str, AnyTensor]:
    """The tensors of the indexers, which no parameter holds: an export has them as they are."""
    if not config.extras.indexed_keys:
        return {}
    return {
        name: tensor
        for name, tensor in read_text_tensors(folder).items()
        if INDEXER in name and _layer_of(name) < config.layers
    }


def _without_shared(tensors: dict[str, AnyTensor], config: ModelConfig, folder: Path) -> dict[str, AnyTensor]:
    """The tensors without matrices and norms of keys and values in layers that read those of earlier layers.
    Directories may hold them, and nothing reads them."""
    first = config.layers - config.windows.shared_layers
    unread = [name for name in tensors if _KEY_TENSOR.search(name) and _layer_of(name) >= first]
    if unread:
        note(f"{folder}: {len(unread)} tensors of keys and values that are shared are left out: {listed(unread)}")
    return {name: tensor for name, tensor in tensors.items() if name not in set(unread)}


def _layer_of(name: str) -> int:
    """The layer of a tensor; -1 for those outside. Those of multi-token prediction follow the layers of the model."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors [E,...] with the experts of a layer, and the matrices that they join along the next dimension."""


def _split_experts(name: str, tensor: AnyTensor) -> Iterator[tuple[str, AnyTensor]]:
    """The matrices of single experts, of a tensor that holds those of a layer (Qwen3.5-MoE); others unchanged."""
    prefix, _, part = name.rpartition(".experts.")
    if not prefix or part not in _FUSED_EXPERTS or len(tensor.shape) != 3:
        yield name, tensor
        return
    matrices = _FUSED_EXPERTS[part]
    width = tensor.shape[1] // len(matrices)
    for expert in range(tensor.shape[0]):
        for i, matrix in enumerate(matrices):
            rows = (i * width, (i + 1) * width)
            yield f"{prefix}.experts.{expert}.{matrix}.weight", TensorSlice(tensor, expert, rows)


def text_name(name: str) -> str:
    """ "model.language_model.norm.weight" and "language_model.model.norm.weight" -> "model.norm.weight"."""
    prefix = _TEXT_PREFIX.match(name)
    if not prefix:
        return name
    rest = name[prefix.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def check_tensors(
    tensors: Mapping[str, AnyTensor], table: Sequence[TensorRule], config: ModelConfig, folder: Path
) -> None:
    """Checks that a checkpoint holds exactly the tensors of the model.

    Raises:
        CheckpointError: the message names the tensors that are missing, unexpected or of another shape.
    """
    expected = {name: _published_shape(joined, config) for name, joined, _, _ in _parts(table, config)}
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected and not name.endswith(RECOMPUTED)]
    if config.tie_embeddings and "lm_head.weight" in extra and "model.embed_tokens.weight" in tensors:
        if not _same_values(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise CheckpointError(
                f"{folder}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false in config.json to use the former"
            )
        extra.remove("lm_head.weight")
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(f"{folder} does not fit its config.json; {'; '.join(problems)}")


def _same_values(left: AnyTensor, right: AnyTensor) -> bool:
    if left.shape != right.shape:
        return False
    step = max(1, (1 << 24) // max(left.shape[1], 1))
    for first in range(0, left.shape[0], step):
        index = (slice(first, min(first + step, left.shape[0])), slice(None))
        parts = [np.empty((index[0].stop - first, left.shape[1]), tensor.dtype) for tensor in (left, right)]
        left.read(index, parts[0])
        right.read(index, parts[1])
        if not np.array_equal(*parts):
            return False
    return True


def _leaf_shape(rule: TensorRule, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the leaf in one layer."""
    experts = (config.experts.count,) if "{expert}" in rule.name else ()
    return (*experts, *Layout(rule, config).shape)


def _read_leaf(
    tensors: Mapping[str, AnyTensor], rule: TensorRule, config: ModelConfig, dtype: np.dtype, layer: int, index: tuple
) -> np.ndarray:
    """Slice `index` of one leaf of one layer, in the layout of the parameters."""
    sizes = _leaf_shape(rule, config)
    out = np.empty([len(range(*cut.indices(size))) for cut, size in zip(index, sizes, strict=True)], dtype)
    return _read_slice(lambda name: tensors[name], rule, Layout(rule, config), layer, index, out)


def _read_slice(
    tensor: Callable[[str], AnyTensor], rule: TensorRule, layout: Layout, layer: int, index: tuple, out: np.ndarray
) -> np.ndarray:
    """Fills `out` with slice `index` of a leaf of one layer, out of the tensors of these names."""
    if "{expert}" not in rule.name:
        name, published = rule.name.format(layer=layer), out.transpose(layout.permutation)
        if rule.runs:
            source = layout.published_index(index)
            start, cut = rule.turn[0] * layout.published_shape[rule.runs], source[rule.runs]
            source[rule.runs] = slice(start + cut.start, start + cut.stop)
            tensor(name).read(source, published)
            return out
        if rule.turn[1] > 1:
            _read_turns(tensor(name), rule.turn, layout.published_index(index), published)
            return out
        for source, target in layout.pieces(index):
            tensor(name).read(source, published[target])
        return out
    for i in range(len(out)):
        name = rule.name.format(layer=layer, expert=(index[0].start or 0) + i)
        tensor(name).read(layout.published_index(index[1:]), out[i].transpose(layout.permutation))
    return out


def _read_turns(tensor: AnyTensor, turn: tuple[int, int], index: Sequence[slice], out: np.ndarray) -> None:
    """Every n-th entry of the innermost dimension, from the i-th on; one index of the outermost dimension at a time."""
    (first, count), (rows, *middle, last) = turn, index
    both = slice(last.start * count, last.stop * count)
    for i, row in enumerate(range(rows.start, rows.stop)):
        piece = np.empty((1, *out.shape[1:-1], out.shape[-1] * count), out.dtype)
        tensor.read((slice(row, row + 1), *middle, both), piece)
        out[i] = piece[0, ..., first::count]


def _sharding_of(shardings: Params | None, *path: str) -> Sharding:
    if shardings is None:
        return SingleDeviceSharding(jax.devices()[0])
    for name in path:
        shardings = shardings[name]
    return shardings


def _read_layers(
    read: Callable, shape: tuple[int, ...], sharding: Sharding, layers: Sequence[int], dtype: jnp.dtype
) -> Iterator[Array]:
    """These layers of a leaf, one by one; `sharding` is that of the stacked leaf."""
    sharding = _of_layer(sharding)
    for layer in layers:
        yield jax.make_array_from_callback(shape, sharding, partial(read, layer), dtype=dtype)


def _of_layer(sharding: Sharding) -> Sharding:
    """The sharding of a layer, from that of the stacked leaf."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _read_quantized(
    tensors: Mapping[str, AnyTensor],
    rule: TensorRule,
    config: ModelConfig,
    sharding: Sharding,
    layers: Sequence[int],
    bits: int,
) -> tuple[QuantizedWeight, ...]:
    """These layers of a matrix in fewer bits. One layer at a time is on the devices in float32.

    Args:
        tensors: The tensors of the checkpoint.
        rule: Of the leaf.
        config: Configuration of the model.
        sharding: Of the matrix of a layer.
        layers: Those that have the leaf.
        bits: 8 or 4.
    """
    shape = _leaf_shape(rule, config)
    names = [name for layer in layers for name in _names(rule, config, layer)]
    formats = {tensors[name].blocks for name in names}
    stored = next(iter(formats)) if len(formats) == 1 else None
    layout = Layout(rule, config).blocked(stored[1]) if stored else None
    if stored and layout and (8 if stored[0] == "int8" else 4) == bits:
        like = _like_blocks(tensors[names[0]], shape, layout, summed_axes(rule.leaf, len(shape)), stored[0])
        read = partial(_read_blocks, tensors, rule, config, layout, like, sharding)
        return tuple(read(layer) for layer in layers)
    if kinds := sorted({kind[0] for kind in formats if kind}):
        note(f"matrices are stored in {', '.join(kinds)}; lora.base_bits = {bits} rounds their numbers again")
    round_off = _rounding(rule.leaf, shape, bits, sharding)
    read = partial(_read_leaf, tensors, rule, config, np.dtype(np.float32))
    parts = (jax.make_array_from_callback(shape, sharding, partial(read, i), dtype=np.float32) for i in layers)
    return tuple(round_off(part) for part in parts)


def _names(rule: TensorRule, config: ModelConfig, layer: int) -> list[str]:
    """The tensors that make up a leaf of a layer."""
    experts = range(config.experts.count if "{expert}" in rule.name else 1)
    return [rule.name.format(layer=layer, expert=expert) for expert in experts]


def _like_blocks(
    tensor: AnyTensor, shape: tuple[int, ...], layout: Layout, axes: tuple[int, ...], kind: str
) -> QuantizedWeight:
    """Shapes of a matrix whose blocks stay as they are stored."""
    parts = tensor.block_parts()
    sizes = (*shape[: len(shape) - len(layout.shape)], *layout.shape)
    scales = jax.ShapeDtypeStruct(sizes, parts["scales"].dtype)
    offsets = scales if "offsets" in parts else None
    if kind == "int8":
        return QuantizedWeight(jax.ShapeDtypeStruct(shape, jnp.int8), scales, offsets)
    axis = axes[-1]
    packed = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
    return QuantizedWeight(jax.ShapeDtypeStruct(packed, jnp.uint8), scales, offsets, kind, axis)


def _read_blocks(
    tensors: Mapping[str, AnyTensor],
    rule: TensorRule,
    config: ModelConfig,
    layout: Layout,
    like: QuantizedWeight,
    sharding: Sharding,
    layer: int,
) -> QuantizedWeight:
    """A matrix of a layer in the numbers that are stored."""
    places = split_quantized(sharding, like) if isinstance(sharding, NamedSharding) else None

    def read(part: str, index: tuple) -> np.ndarray:
        shape, dtype = getattr(like, part).shape, getattr(like, part).dtype
        bounds = [cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)]
        packed = part == "codes" and like.kind != "int8"
        if packed:
            bounds[like.axis] = tuple(2 * bound for bound in bounds[like.axis])
        out = np.empty([last - first for first, last in bounds], dtype)
        stored = Layout(rule, config) if part == "codes" else layout
        slices = tuple(slice(*bound) for bound in bounds)
        _read_slice(lambda name: tensors[name].block_parts()[part], rule, stored, layer, slices, out)
        return pack(out, like.axis) if packed else out

    def array(part: str) -> Array | None:
        leaf = getattr(like, part)
        if leaf is None:
            return None
        sharding_of_part = sharding if places is None else getattr(places, part)
        return jax.make_array_from_callback(leaf.shape, sharding_of_part, partial(read, part), dtype=leaf.dtype)

    return like.replace(**{part: array(part) for part in ("codes", "scales", "offsets")})


@lru_cache
def _rounding(leaf: str, shape: tuple[int, ...], bits: int, sharding: Sharding) -> Callable[[Array], QuantizedWeight]:
    function = partial(quantize, axes=summed_axes(leaf, len(shape)), bits=bits)
    like = jax.eval_shape(function, jax.ShapeDtypeStruct(shape, jnp.float32))
    places = split_quantized(sharding, like) if isinstance(sharding, NamedSharding) else sharding
    return jax.jit(function, out_shardings=places)


def _stack(layers: Iterator[Array], shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> Array:
    """All layers of a leaf, stacked; each is written in place as it is read."""
    stacked = jnp.zeros(shape, dtype, device=sharding)
    write = _layer_writer(sharding)
    for i, part in enumerate(layers):
        stacked = write(stacked, part, i)
    return stacked


@lru_cache
def _layer_writer(sharding: Sharding) -> Callable[[Array, Array, int], Array]:
    def write(stacked: Array, part: Array, layer: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(stacked, part, layer, 0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


# ---- writing -------------------------------------------------------------------------------------------------------

MAX_SHARD_BYTES = 5_000_000_000
"""Largest exported file; the usual limit on the hub."""


def save_params(
    params: Params,
    config: ModelConfig,
    family: Family,
    folder: Path,
    *,
    dtype: jnp.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    carried: Mapping[str, AnyTensor] | None = None,
) -> list[str]:
    """Writes the parameters as safetensors under the family's names; returns the names of the files.

    If the parameters are distributed over several processes, all must call this; the first one writes.

    Args:
        params: Stacked or as a tuple of layers; no low-rank pairs (`lora.merge` them first).
        folder: Existing and empty.
        dtype: Dtype of the tensors in the files.
        max_shard_bytes: Largest size of a file.
        carried: Tensors that are written as they are, after the others.

    Raises:
        CheckpointError: a value is not finite in the dtype of the file; the message names its tensor.
    """
    parts = list(_parts(rules(family, config), config))
    planned = [Planned(name, np.dtype(dtype), _published_shape(joined, config)) for name, joined, _, _ in parts]
    carried = carried or {}
    planned += [Planned(name, np.dtype(tensor.dtype), tensor.shape) for name, tensor in carried.items()]
    values = chain(_published_values(params, parts, config, np.dtype(dtype)), map(_complete, carried.values()))
    if jax.process_index():
        for _ in values:
            pass
        return []
    return write_shards(folder, plan_shards(planned, max_shard_bytes), values)


Part = tuple[str, tuple[TensorRule, ...], int, int]
"""(published name, the rules of the leaves joined in it, layer, expert)."""


def _parts(table: Sequence[TensorRule], config: ModelConfig) -> Iterator[Part]:
    """Every published tensor in order: the embedding, layer by layer, then those after the layers."""
    joined: dict[tuple[str, tuple[int, ...]], tuple[TensorRule, ...]] = {}
    for rule in table:
        key = rule.name, layers_with(rule.leaf, config) if "{layer}" in rule.name else ()
        joined[key] = (*joined.get(key, ()), rule)
    first, *top = [(name, rules_of) for (name, _), rules_of in joined.items() if "{layer}" not in name]
    yield *first, 0, 0
    for layer in range(config.layers):
        for (name, places), rules_of in joined.items():
            if layer in places:
                for expert in range(config.experts.count if "{expert}" in name else 1):
                    yield name.format(layer=layer, expert=expert), rules_of, layer, expert
    for name, rules_of in top:
        yield name, rules_of, 0, 0


def _complete(tensor: AnyTensor) -> np.ndarray:
    value = np.empty(tensor.shape, tensor.dtype)
    tensor.read((slice(None),) * len(tensor.shape), value)
    return value


def _published_shape(joined: Sequence[TensorRule], config: ModelConfig) -> tuple[int, ...]:
    shapes = [Layout(rule, config).published_shape for rule in joined]
    if joined[0].turn[1] > 1:
        axis = len(shapes[0]) + (joined[0].runs or -1)
        return *shapes[0][:axis], shapes[0][axis] * len(joined), *shapes[0][axis + 1 :]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _published_values(
    params: Params, parts: Sequence[Part], config: ModelConfig, dtype: np.dtype
) -> Iterator[np.ndarray]:
    fetched: dict[tuple[str, int], np.ndarray] = {}
    for name, joined, layer, expert in parts:
        if (joined[0].leaf, layer) not in fetched:
            fetched = {(rule.leaf, layer): _fetch(params, rule, layer, config) for rule in joined}
        pieces = []
        for rule in joined:
            leaf = fetched[rule.leaf, layer]
            stored = leaf[expert] if "{expert}" in rule.name else leaf
            with np.errstate(over="ignore"):  # overflow is reported below
                pieces.append(Layout(rule, config).to_published(stored).astype(dtype))
        value = pieces[0]
        if len(pieces) > 1:
            if joined[0].turn[1] > 1 and not joined[0].runs:
                value = np.stack(pieces, -1).reshape(*value.shape[:-1], -1)
            else:
                value = np.concatenate(pieces, joined[0].runs)
        if not np.isfinite(value.astype(np.float32)).all():
            raise CheckpointError(
                f"{name} holds values that are not finite in {dtype.name}; nothing was written. Export an earlier "
                "checkpoint, or float32 if the values overflow bfloat16 or float16"
            )
        yield value


def _fetch(params: Params, rule: TensorRule, layer: int, config: ModelConfig) -> np.ndarray:
    """One leaf of one layer, copied to the host."""
    if "{layer}" not in rule.name:
        leaf = params[rule.leaf]
    elif isinstance(params["layers"], tuple):
        leaf = params["layers"][layer][rule.leaf]
    else:
        leaf = params["layers"][rule.leaf][layers_with(rule.leaf, config).index(layer)]
    if not leaf.is_fully_addressable:
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.jit(lambda x: x, out_shardings=everywhere)(leaf).addressable_data(0)
    return np.asarray(jax.device_get(leaf))

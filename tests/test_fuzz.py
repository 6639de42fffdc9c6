"""Random texts and damaged files: readers of texts never raise, readers of files name the file and what is wrong."""

import copy
import json
import random
import shutil
import time

import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.problems import UnusableRow, answer_text, load_problems
from grpo_roc_jax.data.problems import last_boxed as boxed_solution
from grpo_roc_jax.model.safetensors_io import INDEX_FILE, CheckpointError, read_directory
from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import TraceRecord, TraceWriter, read_trace
from grpo_roc_jax.reward.answer import find_answer, last_boxed
from grpo_roc_jax.reward.notation import decide, for_algebra, normalize, read_number, split_unit
from grpo_roc_jax.text.calls import call_blocks, parse_call, without_thoughts
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.conventions import CONVENTIONS
from grpo_roc_jax.text.tokenizer import OWN_SPECIALS, ByteTokenizer, load_tokenizer
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.observation import observe, sanitize
from grpo_roc_jax.types import Problem, ToolResult
from tests.helpers.samples import make_trajectory, make_verdict

PARTS = [
    *OWN_SPECIALS,
    *("<think>", "</think>", "<reason>", "</answer", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```tool_code\n"),
    *('{"name": "python", "arguments": {"code": "print(1)"}}', '{"name"', '"arguments": ', "{", "}", "[", "]", '"'),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "f(a=1)", "print("),
    *(")", ";", ",", ":", "=", "\\"),
    *("\\boxed{", "\\frac{1}{2}", "\\dfrac", "\\sqrt", "\\text{", "\\pi", "^", "_", "%", "\\%", "$", "degrees", "("),
    *("0", "7", "-", "+", ".", "1e9", "1e999999999", "9" * 50, "1,234", "١٢", "½", "∞", "nan", "####", "x", "answer"),
    *("\x00", "\n", "\r", "\t", " ", "\u2028", "\ufeff", "\ud800", "é", "𝟙", "＜answer＞", "\x1b[31m", "/tmp/a/b.py"),
    *("1/3", "```", "null", "e", "is", "\\"),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
SECONDS = 0.5
"""Processor time for one text of at most `LONG` characters; one that is quadratic takes minutes."""
LONG = 100_000


def text_of(rng: random.Random, parts: int) -> str:
    """Random parts and characters, often one of them again and again."""
    text = "".join(
        rng.choice(PARTS) if rng.random() < 0.85 else chr(rng.choice((rng.randrange(128), rng.randrange(0x110000))))
        for _ in range(rng.randint(1, parts))
    )
    return text * rng.choice((1, 1, 1, 3))


def readers():
    """Name -> function of any text."""
    chats = [make_chat(TextConfig(), load_tokenizer(TextConfig())), make_chat(TextConfig(), ByteTokenizer())]

    def dialogue(text: str) -> None:
        for chat in chats:
            ids = chat.tokenizer.encode(text)
            chat.find_stop(ids)
            parsed = chat.parse_turn(ids)
            assert all((call.fault is None) == (call.message == "") for call in parsed.calls)
            chat.prompt_ids(Problem("p", text, "1", "t"), suffix=text[:20])
            chat.observation_ids([text], calls=parsed.calls[:1])

    def answers(text: str) -> None:
        for lenient in (False, True):
            find_answer([text, text[::-1]], lenient=lenient)
        last_boxed(text), boxed_solution(text), normalize(text), read_number(text), split_unit(text)
        for strict in (False, True):
            decide(text, "1/2", strict=strict), decide("7", text, strict=strict), for_algebra(text, "x", strict=strict)

    def reference(text: str) -> None:
        try:
            answer_text(text, "solution")
        except UnusableRow:
            assert not text.strip() or "####" in text or "boxed" in text

    def calls(text: str) -> None:
        blocks, rest = call_blocks(text)
        for block in (*blocks, rest, text):
            parse_call(block)
        without_thoughts(text)
        for convention in CONVENTIONS.values():
            for over in (False, True):
                convention.find_calls(text, over=over, tools=TOOLS)

    def tools(text: str) -> None:
        sanitize(text)
        observe(ToolResult("exception", stdout=text, error_message=text), text, ToolsConfig())

    return {"dialogue": dialogue, "answers": answers, "reference": reference, "calls": calls, "tools": tools}


@pytest.mark.parametrize("count", [150, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_text_raises_or_takes_long(count):
    rng, parsers = random.Random(0), readers()
    for number in range(count):
        text = text_of(rng, 40)
        if number % 1000 == 20:
            text = (text * LONG)[:LONG]
        for name, read in parsers.items():
            begun = time.thread_time()
            try:
                read(text)
            except Exception as error:
                raise AssertionError(f"{name} of {text[:2000]!r}") from error
            limit = SECONDS * (20 if len(text) == LONG else 1)
            assert time.thread_time() - begun < limit, f"{name} of {text[:2000]!r}, {len(text)} characters"


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Content that was cut, changed, filled with zeros, or repeated in part."""
    if not content:
        return b"x"
    at, length = rng.randrange(len(content)), rng.choice((1, 1, 4, 64))
    part = content[at : at + length]
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in part)
    middle = rng.choice((b"", flipped, flipped, bytes(length), rng.randbytes(length), part * 2))
    return content[:at] if rng.random() < 0.2 else content[:at] + middle + content[at + length :]


def changed(rng: random.Random, value):
    """A JSON value in which one value is another one."""
    value = copy.deepcopy(value)
    parent, key, at = None, None, value
    while isinstance(at, dict | list) and at and rng.random() < 0.85:
        parent, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = parent[key]
    odd = [None, True, 3, -1.5, 1e300, "", "x", "[" * 5000, [], [None], [[]], {}, {"x": [1]}, [1, "x"], 10**400]
    if parent is None:
        return rng.choice(odd)
    parent[key] = rng.choice(odd)
    return value


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ROWS = [
    {
        "question": f"{i} + {i}?",
        "answer": str(2 * i),
        "extra": {"level": i},
        "reward": 1.0,
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": f"{i} + {i}?"},
            {"role": "assistant", "content": "<think>a</think>", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": str(2 * i)},
            {"role": "assistant", "content": f"<answer>{2 * i}</answer>"},
        ],
    }
    for i in range(4)
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a sound file of each kind."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "a/b": 0.5 * i}) + "\n" for i in range(20)))
    draw = np.random.default_rng(0)
    rows = [make_trajectory(draw, sample, turns=2) for sample in range(3)]
    records = [
        TraceRecord(1, 0, Problem("p", "?", "7", "t"), row, make_verdict(draw, row), True, "kept") for row in rows
    ]
    assert TraceWriter(folder).write(1, records)
    (folder / "model").mkdir()
    shard = {"a": np.ones((4, 3), np.float32), "b": np.zeros(5, np.float16)}
    safetensors.numpy.save_file(shard, folder / "model" / "one.safetensors")
    places = {"weight_map": dict.fromkeys(shard, "one.safetensors")}
    (folder / "model" / INDEX_FILE).write_text(json.dumps(places))
    state = {"w": jnp.arange(6.0), "key": jnp.ones((), jnp.bfloat16)}
    with Checkpointer(folder / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(3, Bundle(state, {"rng": 5}, {"a": np.arange(4)}))
    return folder


def read_problems(path):
    load_problems(path), load_problems(path, bad_rows="fail")


def read_model(path):
    for tensor in read_directory(path.parent).values():
        tensor.read([slice(0, size) for size in tensor.shape], np.zeros(tensor.shape, tensor.dtype))


def read_log(path):
    list(read_trace(path.parent))


def read_checkpoint(path):
    (entry,) = files.entries(path.parents[-1 - [p.name for p in path.parents][::-1].index("checkpoints")])
    files.verify(entry)
    raise AssertionError("a checkpoint with a damaged file is whole")


READERS = {
    "rows.jsonl": [read_problems, load_traces],
    "rows.parquet": [read_problems, load_traces],
    "metrics.jsonl": [read_metrics],
    "trajectories/step_00000001.jsonl": [read_log],
    "model/one.safetensors": [read_model],
    f"model/{INDEX_FILE}": [read_model],
    "checkpoints": [read_checkpoint],
}


@pytest.mark.parametrize("count", [16, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_by_name(sound, tmp_path, name, count):
    rng = random.Random(name)
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    target = tmp_path / name
    victims = [target] if target.is_file() else sorted(path for path in target.rglob("*") if path.is_file())
    for number in range(count):
        path = rng.choice(victims)
        content = path.read_bytes()
        broken = damaged(rng, content)
        if path.suffix in (".json", ".jsonl") and number % 2 and name != "checkpoints":
            lines = content.decode().splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(changed(rng, json.loads(lines[at])))
            broken = "\n".join(lines).encode() + b"\n"
        if broken == content:
            continue
        path.write_bytes(broken)
        for read in READERS[name]:
            try:
                read(path)
            except (ValueError, files.InvalidCheckpoint) as error:
                assert any(part in str(error) for part in (path.name, path.parent.name)), f"{error} says no place"
            except Exception as error:
                raise AssertionError(f"{read.__name__} of {broken[:3000]!r}") from error
        path.write_bytes(content)


def test_text_that_is_not_utf8_and_shards_whose_name_no_file_can_have_are_refused_by_name(tmp_path):
    path = tmp_path / "rows.parquet"
    column = pyarrow.array([b"1 + \xec?"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": column, "answer": ["7"]}), path)
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        load_problems(path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "[" * 5000}}))
    with pytest.raises(CheckpointError, match=r"names the shard .*, which is missing"):
        read_directory(tmp_path)

"""Random texts and damaged files: readers of texts never raise, readers of files name the file and what is wrong."""

import json
import random
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.problems import UnusableRow, answer_text, load_problems
from grpo_roc_jax.data.problems import last_boxed as boxed_solution
from grpo_roc_jax.record import metrics, trace
from grpo_roc_jax.reward.answer import find_answer, last_boxed
from grpo_roc_jax.reward.notation import decide, for_algebra, normalize, read_number, split_unit
from grpo_roc_jax.text import calls, chat_format, conventions, tokenizer
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.tools import config, observation
from grpo_roc_jax.types import Problem, ToolResult
from tests.helpers.samples import make_trajectory, make_verdict

PARTS = [
    *tokenizer.OWN_SPECIALS,
    *("<think>", "</think>", "<reason>", "</answer", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```tool_code\n"),
    *('{"name": "python", "arguments": {"code": "print(1)"}}', '{"name"', '"arguments": ', "{", "}", "[", "]", '"'),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "f(a=1)", "print("),
    *("\\boxed{", "\\frac{1}{2}", "\\dfrac", "\\sqrt", "\\text{", "\\pi", "^", "_", "%", "\\%", "$", "degrees", "("),
    *("0", "7", "-", "+", ".", "1e9", "1e999999999", "9" * 50, "1,234", "١٢", "½", "∞", "nan", "####", "x", "answer"),
    *("\x00", "\n", "\r", "\t", " ", "\u2028", "\ufeff", "\ud800", "é", "𝟙", "＜answer＞", "\x1b[31m", "/tmp/a/b.py"),
    *("1/3", "```", "null", "e", "is", "\\", ")", ";", ",", ":", "="),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
SECONDS = 0.5
"""Processor time for one text of at most `LONG` characters; one that is quadratic takes minutes."""
LONG = 100_000


def text_of(rng: random.Random) -> str:
    """Random parts and characters, often one of them again and again."""

    def part() -> str:
        return rng.choice(PARTS) if rng.random() < 0.85 else chr(rng.randrange(rng.choice((128, 0x110000))))

    return "".join(part() for _ in range(rng.randint(1, 40))) * rng.choice((1, 1, 1, 3))


CHATS = [
    chat_format.make_chat(TextConfig(), tokenizer.load_tokenizer(TextConfig())),
    chat_format.make_chat(TextConfig(), tokenizer.ByteTokenizer()),
]


def read_dialogue(text: str) -> None:
    for chat in CHATS:
        ids = chat.tokenizer.encode(text)
        chat.find_stop(ids)
        parsed = chat.parse_turn(ids)
        assert all((call.fault is None) == (call.message == "") for call in parsed.calls)
        chat.prompt_ids(Problem("p", text, "1", "t"), suffix=text[:20])
        chat.observation_ids([text], calls=parsed.calls[:1])


def read_answers(text: str) -> None:
    last_boxed(text), boxed_solution(text), normalize(text), read_number(text), split_unit(text)
    for strict in (False, True):
        find_answer([text, text[::-1]], lenient=strict), for_algebra(text, "x", strict=strict)
        decide(text, "1/2", strict=strict), decide("7", text, strict=strict)
    try:
        answer_text(text, "solution")
    except UnusableRow:
        assert not text.strip() or "####" in text or "boxed" in text


def read_calls(text: str) -> None:
    blocks, rest = calls.call_blocks(text)
    for block in (*blocks, rest, text):
        calls.parse_call(block)
    calls.without_thoughts(text)
    for convention in conventions.CONVENTIONS.values():
        for over in (False, True):
            convention.find_calls(text, over=over, tools=TOOLS)


def read_results(text: str) -> None:
    observation.sanitize(text)
    observation.observe(ToolResult("exception", stdout=text, error_message=text), text, config.ToolsConfig())


@pytest.mark.parametrize("count", [150, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_text_raises_or_takes_long(count):
    rng = random.Random(0)
    for number in range(count):
        text = text_of(rng)
        if number % 1000 == 20:
            text = (text * LONG)[:LONG]
        for read in (read_dialogue, read_answers, read_calls, read_results):
            begun = time.thread_time()
            try:
                read(text)
            except Exception as error:
                raise AssertionError(f"{read.__name__} of {text[:2000]!r}") from error
            limit = SECONDS * (20 if len(text) == LONG else 1)
            assert time.thread_time() - begun < limit, f"{read.__name__} of {text[:2000]!r}, {len(text)} characters"


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Content that was cut, changed, filled with zeros, or repeated in part."""
    at, length = rng.randrange(len(content)), rng.choice((1, 1, 4, 64))
    part = content[at : at + length]
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in part)
    middle = rng.choice((b"", flipped, flipped, bytes(length), rng.randbytes(length), part * 2))
    return content[:at] if rng.random() < 0.2 else content[:at] + middle + content[at + length :]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "<think>a</think>", "tool_calls": [CALL]}]
TALK += [{"role": "tool", "tool_call_id": "c", "content": "7"}, {"role": "assistant", "content": "<answer>7</answer>"}]
ROW = {"question": "3 + 4?", "answer": "7", "extra": {"level": 1}, "reward": 1.0, "tools": TOOLS, "messages": TALK}


def write_sound_files(folder):
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 4), folder / "rows.parquet")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "a/b": 0.5 * i}) + "\n" for i in range(20)))
    draw, problem = np.random.default_rng(0), Problem("p", "?", "7", "t")
    rows = [make_trajectory(draw, sample, turns=2) for sample in range(3)]
    records = [trace.TraceRecord(1, 0, problem, row, make_verdict(draw, row), True, "kept") for row in rows]
    assert trace.TraceWriter(folder).write(1, records)


READERS = {
    "rows.jsonl": [load_problems, load_traces, lambda path: load_problems(path, bad_rows="fail")],
    "rows.parquet": [load_problems, load_traces],
    "metrics.jsonl": [metrics.read_metrics],
    "trajectories/step_00000001.jsonl": [lambda path: list(trace.read_trace(path.parent))],
}


@pytest.mark.parametrize("count", [16, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_by_name(tmp_path, name, count):
    rng = random.Random(name)
    write_sound_files(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    for _ in range(count):
        broken = damaged(rng, content)
        path.write_bytes(broken)
        for read in READERS[name]:
            try:
                read(path)
            except ValueError as error:
                assert any(part in str(error) for part in (path.name, path.parent.name)), f"{error} says no place"
            except Exception as error:
                raise AssertionError(f"{name}: {broken[:3000]!r}") from error

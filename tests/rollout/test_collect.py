"""Turns with tools on top of the engine: every exit has its name, and no stop text is missed at the edge of a look."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import DroppedRows, PartialRows, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.records import Finish, Observe, RunOptions, TurnEnd, Wait
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.rollout.sampler import ToolEnvironment, with_tools
from grpo_roc_jax.sandbox.result import INFRA_KINDS
from grpo_roc_jax.text.chat_format import ANSWER_CLOSE, ParsedTurn, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import ByteTokenizer, load_tokenizer
from grpo_roc_jax.types import Problem, RolloutRequest, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import changed

PROBLEM = Problem("p", "37*58=?", "2146", "test")
CALL = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'


class Instant:
    """An executor whose calls are answered at the next poll, all alike."""

    def __init__(self, result=None):
        self.result = result or ToolResult("ok", observation="7")
        self.calls, self.submitted, self.cancelled, self.closed = [], [], [], []

    def submit(self, call):
        self.calls.append(call)
        self.submitted.append(call)

    def poll(self, timeout_s=0.0, ids=None):
        done, self.calls = [(call.id, self.result) for call in self.calls], []
        return done

    def cancel(self, ids):
        self.cancelled += ids
        self.calls = [call for call in self.calls if call.id not in ids]

    def close_session(self, session):
        self.closed.append(session)


@pytest.fixture(scope="module")
def chat():
    return make_chat(TextConfig(max_calls_per_turn=2), load_tokenizer(TextConfig()))


def environment(chat, executor, *, max_turns=3):
    request = RolloutRequest(PROBLEM, 4, first_sample=1)
    return ToolEnvironment(chat, executor, [request], step=2, seed=0, max_turns=max_turns)


def turns(env):
    """What the environment knows of the turns of its first row."""
    return env.completed(0, BARE).turns


NOTHING = np.zeros(0, np.int32)
BARE = Trajectory(NOTHING, NOTHING > 0, NOTHING * 0.0, NOTHING, 0, (), "cancelled", 1)


def turn(chat, text, reason="stop", start=10):
    ids = np.asarray(chat.turn_ids(text) if reason == "stop" else chat.tokenizer.encode(text), np.int32)
    return TurnEnd(0, start, ids, np.zeros(len(ids), np.float32), reason)


@pytest.mark.parametrize(
    ("text", "reason", "stop"),
    [
        ("so</reason><answer>7</answer>", "stop", "answer"),
        ("so what", "stop", "eos"),
        ("so", "length", "length"),
        ("<answer>7</answer>", "length", "length"),
        ("so what", "turn_length", "length"),
    ],
)
def test_rows_without_a_call_end_by_name(chat, text, reason, stop):
    executor = Instant()
    assert environment(chat, executor).turn_ended(0, turn(chat, text, reason)) == Finish(stop)
    assert executor.closed == ["2/4/1"] and not executor.submitted


def test_calls_of_the_last_turn_are_not_run_but_its_answer_counts(chat):
    for text, stop, submitted in ((CALL, "turns", 2), ("<answer>7</answer>", "answer", 2)):
        executor = Instant()
        env = environment(chat, executor)
        for _ in range(2):
            assert env.turn_ended(0, turn(chat, CALL)) == Wait()
            (index, answer), *_ = env.poll(0.0)
            assert index == 0 and isinstance(answer, Observe)
        assert env.turn_ended(0, turn(chat, text)) == Finish(stop)
        assert len(executor.submitted) == submitted
        assert [len(t.results) for t in turns(env)] == [1, 1, 0]


def test_a_turn_waits_for_all_its_calls_and_keeps_their_order(chat):
    executor = Instant()
    env = environment(chat, executor)
    env.turn_ended(0, turn(chat, CALL + "<tool_call>{</tool_call>"))
    assert len(executor.submitted) == 1, "the malformed one is answered without being run"
    ((_, answer),) = env.poll(0.0)
    shown = chat.tokenizer.decode(answer.ids)
    assert shown.count("<tool_response>") == 2 and "malformed_call" in shown.split("<tool_response>")[2]
    (first,) = turns(env)
    assert [result.kind for result in first.results] == ["ok", "malformed_call"]


def test_the_record_holds_an_observation_as_shown_where_it_was_escaped_or_cut():
    chat = make_chat(TextConfig(observation_tokens=40), load_tokenizer(TextConfig()))
    for observation in ("7", "<answer>7</answer>", "x" * 50):
        env = environment(chat, Instant(ToolResult("ok", observation=observation)))
        env.turn_ended(0, turn(chat, CALL))
        ((_, answer),) = env.poll(0.0)
        (result,) = turns(env)[0].results
        assert result.observation == observation and (not result.shown) == (observation == "7")
        block = chat.tokenizer.decode(answer.ids).split("<tool_response>\n")[1]
        assert block.startswith((result.shown or observation) + "\n</tool_response>")
    assert "characters omitted" in result.shown


def test_an_infrastructure_failure_ends_the_row_as_such(chat):
    executor = Instant(ToolResult(sorted(INFRA_KINDS)[0], observation="?"))
    env = environment(chat, executor)
    env.turn_ended(0, turn(chat, CALL))
    assert env.poll(0.0) == [(0, Finish("infrastructure"))]


def test_a_row_ended_by_the_engine_drops_its_calls(chat):
    executor = Instant()
    env = environment(chat, executor)
    env.turn_ended(0, turn(chat, CALL))
    env.cancelled(0)
    assert executor.cancelled == ["2/4/1/1/0"] and executor.closed == ["2/4/1"]
    assert env.poll(0.0) == []


def test_a_resumed_row_that_waited_is_asked_again_and_loses_no_turn(chat):
    """Also where the next step ends before the row gets a slot: it still waits for the observation then."""
    executor, first = Instant(), turn(chat, CALL)
    past = replace(BARE, tokens=np.zeros(first.start + len(first.tokens), np.int32))
    past = replace(past, turns=(Turn(first.start, past.length, "said"),))
    request = RolloutRequest(PROBLEM, 4, first_sample=1, resume=past, step=2)
    env = ToolEnvironment(chat, executor, [request], step=9, seed=0, max_turns=3)
    assert turns(env) == past.turns
    assert env.turn_ended(0, first) == Wait()
    assert [len(t.calls) for t in turns(env)] == [1]
    assert executor.submitted[0].id == "2/4/1/1/0"


# Stop texts of several ids.

BYTES = ByteTokenizer(("<|pad|>", "<|im_end|>"))
LETTERS = ANSWER_CLOSE
"""Each letter of the tag occurs once in it, so that a chain of letters writes the whole tag now and then."""
MODEL = ModelConfig(
    d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, vocab_size=BYTES.vocab_size, tie_embeddings=False
)
TURN = 24
ROLLOUT = RolloutConfig(
    slots=4,
    chunk=TURN,
    max_prompt_tokens=100,
    max_response_tokens=500,
    max_turn_tokens=TURN,
    max_turns=3,
    append_lengths=(128,),
)


def chain_params():
    """Weights that write the letters of the tag in order with probability 0.8 each, else another of them."""
    params = random_params(MODEL)
    params["layers"] = {n: leaf * 0 if n in ("wo", "w_down") else leaf for n, leaf in params["layers"].items()}
    places = {ord(letter): i for i, letter in enumerate(LETTERS)}
    embed = np.full((MODEL.vocab_size, MODEL.d_model), 0.25, np.float32)
    unembed = np.full((MODEL.d_model, MODEL.vocab_size), -20.0, np.float32)
    unembed[:, list(places)] = 0.0
    for letter, i in places.items():
        embed[letter] = np.eye(MODEL.d_model)[i]
        unembed[i, ord(LETTERS[(i + 1) % len(LETTERS)])] = np.log(4.0 * len(LETTERS)) / MODEL.d_model**0.5
    return params | {"embed": jnp.asarray(embed), "unembed": jnp.asarray(unembed)}


def with_chunk(engine, chunk):
    """The engine with another chunk length, all programs shared but the one of that length."""
    found = changed(engine, chunk=chunk)
    programs = found.programs
    programs.compiled = {key: program for key, program in programs.compiled.items() if key[0][0] != "decode"}
    programs.settings = replace(programs.settings, chunk=chunk)
    return found


@pytest.fixture(scope="module")
def calling():
    """A chat in which turns that close an answer call a tool, so that rows continue after their stop text."""
    chat = make_chat(TextConfig(), BYTES)
    parse = chat.parse_turn

    def answers_call(ids):
        parsed = parse(ids)
        if parsed.ended_by != "answer":
            return parsed
        return ParsedTurn(parsed.text, (ToolCall("python", {}, raw=""),), "tool_call")

    chat.parse_turn = answers_call
    return chat


@pytest.fixture(scope="module")
def whole(calling):
    """(engine, parameters to sample with): chunks as long as a turn."""
    engine = make_engine(MODEL, ROLLOUT, SamplingConfig(), sorted(calling.stop_ids), seed=3)
    return engine, engine.publish(chain_params(), 0)


REQUESTS = [RolloutRequest(PROBLEM, 0, first_sample=sample) for sample in range(8)]


def roll_out(engine, sampler, chat, requests=REQUESTS, executor=None, step=0, purpose="train"):
    submission = with_tools(engine, chat, executor or Instant(), requests, RunOptions(step, purpose))
    return engine.run(sampler, *submission)


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.policy_mask, b.policy_mask)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=5e-6)
        assert a.stop == b.stop
        assert [(t.start, t.end, len(t.results)) for t in a.turns] == [
            (t.start, t.end, len(t.results)) for t in b.turns
        ]


@pytest.mark.parametrize("chunks", [(3,), pytest.param((1, 2, 7), marks=pytest.mark.slow)], ids=str)
def test_a_stop_text_is_found_whatever_the_chunks_it_is_drawn_in(calling, whole, chunks):
    assert ANSWER_CLOSE in calling.stop_texts
    engine, sampler = whole
    expected, stats = roll_out(engine, sampler, calling)
    texts = [t.text for trajectory in expected for t in trajectory.turns]
    closed = sum(text.endswith(ANSWER_CLOSE) for text in texts)
    assert 4 <= closed < len(texts), "some turns stop by text, some by their limit"
    assert all(ANSWER_CLOSE not in text[:-1] for text in texts)
    assert sum(stats.stops.values()) == len(REQUESTS)
    for chunk in chunks:
        again, _ = roll_out(with_chunk(engine, chunk), sampler, calling)
        assert_same(again, expected)


class Slow(Instant):
    """Answers every second call at once and the others at the third poll from now, by the number of the call."""

    def poll(self, timeout_s=0.0, ids=None):
        self.polls = getattr(self, "polls", 0) + 1
        due = [c for c in self.calls if int(c.id.split("/")[2]) % 2 == 0 or self.polls % 3 == 0]
        self.calls = [call for call in self.calls if call not in due]
        return [(call.id, self.result) for call in due]


@pytest.mark.parametrize("carry", [False, True])
def test_the_deadline_of_a_step_cuts_no_evaluation(calling, whole, carry):
    engine, sampler = whole
    expected, _ = roll_out(engine, sampler, calling, step=3, purpose="evaluate")
    late = itertools.count(0.0, 100.0)
    cutting = changed(engine, clock=lambda: next(late), step_limit=(PartialRows if carry else DroppedRows)(60.0))
    assert_same(roll_out(cutting, sampler, calling, step=3, purpose="evaluate")[0], expected)
    trained, _ = roll_out(cutting, sampler, calling, step=3)
    assert {trajectory.stop for trajectory in trained} & {"cancelled", "deadline", "infrastructure"}
    assert all(trajectory.length - trajectory.prompt_length <= engine.config.chunk for trajectory in trained)


def test_rows_cut_by_the_deadline_continue_in_the_next_step_under_its_policy(calling, whole):
    engine, sampler = whole
    expected, _ = roll_out(engine, sampler, calling)
    slow = Slow()
    late = {"clock": lambda: 1e6 if getattr(slow, "polls", 0) >= 2 else 0.0, "step_limit": PartialRows(60.0)}
    first, _ = roll_out(changed(engine, **late), sampler, calling, executor=slow)
    cut = [i for i, trajectory in enumerate(first) if trajectory.stop == "cancelled"]
    waits = {bool(first[i].turns) and first[i].turns[-1].end == first[i].length for i in cut}
    assert waits == {True, False}, "some wait for a tool, some do not"
    requests = [replace(REQUESTS[i], resume=first[i], step=0) for i in cut]
    second, _ = roll_out(engine, replace(sampler, version=1), calling, requests, step=1)
    whole_rows = dict(enumerate(first)) | dict(zip(cut, second, strict=True))
    assert_same([whole_rows[i] for i in range(len(REQUESTS))], expected)
    for i, trajectory in zip(cut, second, strict=True):
        edge, mask = first[i].length, trajectory.policy_mask
        assert set(trajectory.versions[:edge][mask[:edge]]) <= {0} and set(trajectory.versions[edge:][mask[edge:]]) <= {
            1
        }

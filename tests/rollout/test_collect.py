"""Turns with tools on top of the engine: every exit has its name."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.config import PartialRows
from grpo_roc_jax.engine.protocol import Finish, Observe, TurnEnd, Wait
from grpo_roc_jax.engine.table import awaits_observation
from grpo_roc_jax.rollout.sampler import ToolEnvironment, collect_while_free, with_tools
from grpo_roc_jax.sandbox.result import INFRA_KINDS
from grpo_roc_jax.text.chat_format import ParsedTurn, make_chat
from grpo_roc_jax.text.tokenizer import ByteTokenizer, load_tokenizer
from grpo_roc_jax.types import RolloutRequest, ToolCall, ToolResult
from tests.helpers.engine_checks import assert_same, assert_versions
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import changed

PROBLEM = g.Problem("p", "37*58=?", "2146", "test")
CALL = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
ANSWER = "<answer>7</answer>"


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
    return make_chat(g.TextConfig(max_calls_per_turn=2), load_tokenizer(g.TextConfig()))


def environment(chat, executor):
    return ToolEnvironment(chat, executor, [RolloutRequest(PROBLEM, 4, first_sample=1)], step=2, seed=0, max_turns=3)


def results(env):
    """The results of each turn of the first row that the environment knows."""
    empty = np.zeros(0, np.int32)
    bare = g.Trajectory(empty, empty > 0, empty * 0.0, empty, 0, (), "cancelled", 1)
    return [turn.results for turn in env.completed(0, bare).turns]


def turn(chat, text, reason="stop", start=10):
    ids = np.asarray(chat.turn_ids(text) if reason == "stop" else chat.tokenizer.encode(text), np.int32)
    return TurnEnd(0, start, ids, np.zeros(len(ids), np.float32), reason)


@pytest.mark.parametrize(("text", "reason", "stop"), [("so what", "stop", "eos"), (ANSWER, "length", "length")])
def test_rows_without_a_call_end_by_name(chat, text, reason, stop):
    executor = Instant()
    assert environment(chat, executor).turn_ended(0, turn(chat, text, reason)) == Finish(stop)
    assert executor.closed == ["2/4/1"] and not executor.submitted


def test_calls_of_the_last_turn_are_not_run_but_its_answer_counts(chat):
    for text, stop in ((CALL, "turns"), (ANSWER, "answer")):
        executor = Instant()
        env = environment(chat, executor)
        for _ in range(2):
            assert env.turn_ended(0, turn(chat, CALL + CALL)) == Wait()
            ((index, answer),) = env.poll(0.0)
            assert index == 0 and isinstance(answer, Observe)
        assert env.turn_ended(0, turn(chat, text)) == Finish(stop)
        assert [*map(len, results(env))] == [2, 2, 0]
        assert len({call.seed for call in executor.submitted}) == len(executor.submitted) == 4


def test_a_turn_waits_for_all_its_calls_and_keeps_their_order(chat):
    executor = Instant()
    env = environment(chat, executor)
    env.turn_ended(0, turn(chat, CALL + "<tool_call>{</tool_call>"))
    assert len(executor.submitted) == 1, "the malformed one is answered without being run"
    ((_, answer),) = env.poll(0.0)
    shown = chat.tokenizer.decode(answer.ids).split("<tool_response>")
    assert len(shown) == 3 and "malformed_call" in shown[2]
    assert [result.kind for result in results(env)[0]] == ["ok", "malformed_call"]
    executor.result = ToolResult(sorted(INFRA_KINDS)[0], observation="?")
    env.turn_ended(0, turn(chat, CALL))
    assert env.poll(0.0) == [(0, Finish("infrastructure"))]


@pytest.mark.parametrize(
    ("text", "arrived", "recorded"),
    [(CALL, [], 0), (CALL + CALL, [0], 1), (CALL + CALL, [1], 0), (CALL + "<tool_call>{</tool_call>", [], 0)],
)
def test_a_row_ended_by_the_engine_drops_its_calls(chat, text, arrived, recorded):
    """No result is recorded without those of the calls before it, since it would be taken for theirs."""
    executor = Instant()
    env = environment(chat, executor)
    env.turn_ended(0, turn(chat, text))
    executor.calls = [executor.calls[i] for i in arrived]
    assert env.poll(0.0) == []
    env.cancelled(0)
    running = [call.id for i, call in enumerate(executor.submitted) if i not in arrived]
    assert executor.cancelled == running and executor.closed == ["2/4/1"]
    assert env.poll(0.0) == [] and len(results(env)[0]) == recorded


# On an engine.

BYTES = ByteTokenizer(("<|pad|>", "<|im_end|>"))
MODEL = g.ModelConfig(d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, vocab_size=BYTES.vocab_size)
LENGTHS = {"max_prompt_tokens": 100, "max_response_tokens": 500, "append_lengths": (128,)}
ROLLOUT = g.RolloutConfig(slots=4, chunk=8, max_turns=3, **LENGTHS)


class Slow(Instant):
    """Answers every second call at once and the others at every third poll, by the number of the call."""

    polls = 0

    def poll(self, timeout_s=0.0, ids=None):
        self.polls += 1
        due = [c for c in self.calls if int(c.id.split("/")[2]) % 2 == 0 or self.polls % 3 == 0]
        self.calls = [call for call in self.calls if call not in due]
        return [(call.id, self.result) for call in due]


@pytest.fixture(scope="module")
def calling():
    """(engine, chat format, weights). Turns end at any of 32 ids, and two of three call a tool."""
    chat = make_chat(g.TextConfig(), BYTES)
    parse = chat.parse_turn

    def call_often(ids):
        parsed = parse(ids)
        return ParsedTurn(parsed.text, (ToolCall("python", {}, raw=""),), "tool_call") if len(ids) % 3 else parsed

    chat.parse_turn = call_often
    engine = g.make_engine(MODEL, ROLLOUT, g.SamplingConfig(), sorted({*chat.stop_ids, *range(32)}), seed=3)
    return engine, chat, engine.publish(jax.device_put(random_params(MODEL)), 0)


@pytest.mark.parametrize("while_free", [False, True])
def test_rollouts_that_are_interrupted_leave_no_call_and_no_session(calling, while_free):
    """Else the next ones of the same step would get their results, and the state of their programs."""
    engine, chat, sampler = calling
    executor = Instant()
    executor.poll = lambda timeout_s=0.0, ids=None: []

    def interrupt():
        if len(executor.calls) > 2:
            raise KeyboardInterrupt

    def submit(some):
        return engine.submit(sampler, *with_tools(engine, chat, executor, some, options))

    options, requests = g.RunOptions(before_chunk=interrupt), [RolloutRequest(PROBLEM, 0, 8)]
    with pytest.raises(KeyboardInterrupt):
        if while_free:
            collect_while_free(engine, submit, requests, lambda: None)
        engine.run(sampler, *with_tools(engine, chat, executor, requests, options))
    assert not executor.calls and {call.session for call in executor.submitted} <= set(executor.closed)


def test_rows_cut_by_the_deadline_continue_in_the_next_step_under_its_policy(calling):
    engine, chat, sampler = calling

    def roll_out(engine, sampler, requests, executor, step=0):
        submission = with_tools(engine, chat, executor, requests, g.RunOptions(step))
        return engine.run(sampler, *submission)[0]

    requests = [RolloutRequest(PROBLEM, 0, first_sample=sample) for sample in range(8)]
    expected, slow = roll_out(engine, sampler, requests, Instant()), Slow()
    late = {"clock": lambda: 1e6 if slow.polls >= 2 else 0.0, "step_limit": PartialRows(60.0)}
    first = roll_out(changed(engine, **late), sampler, requests, slow)
    cut = [i for i, trajectory in enumerate(first) if trajectory.stop == "cancelled"]
    assert {awaits_observation(first[i]) for i in cut} == {True, False}
    again = [replace(requests[i], resume=first[i], step=0) for i in cut]
    second = roll_out(engine, replace(sampler, version=1), again, Instant(), step=1)
    merged = dict(enumerate(first)) | dict(zip(cut, second, strict=True))
    assert_same([merged[i] for i in range(len(requests))], expected, atol=5e-6, versions=False)
    assert_versions(second, [first[i] for i in cut], 0, 1)

"""Turns with tools on top of the engine: every exit has its name. Parts that do not fit each other are refused before
anything starts."""

from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.config import PartialRows, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.protocol import Finish, Observe, RunOptions, TurnEnd, Wait
from grpo_roc_jax.engine.table import awaits_observation
from grpo_roc_jax.rollout.sampler import Sampler, ToolEnvironment, collect_while_free, with_tools
from grpo_roc_jax.sandbox.result import INFRA_KINDS
from grpo_roc_jax.text.chat_format import ParsedTurn, make_chat
from grpo_roc_jax.text.tokenizer import ByteTokenizer, load_tokenizer
from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.types import Problem, RolloutRequest, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.engine_checks import assert_same
from tests.helpers.fake_executor import FakeExecutor
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
    return make_chat(g.TextConfig(max_calls_per_turn=2), load_tokenizer(g.TextConfig()))


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
    for text, stop in ((CALL, "turns"), ("<answer>7</answer>", "answer")):
        executor = Instant()
        env = environment(chat, executor)
        for _ in range(2):
            assert env.turn_ended(0, turn(chat, CALL + CALL)) == Wait()
            ((index, answer),) = env.poll(0.0)
            assert index == 0 and isinstance(answer, Observe)
        assert env.turn_ended(0, turn(chat, text)) == Finish(stop)
        assert [len(t.results) for t in turns(env)] == [2, 2, 0]
        assert len({call.seed for call in executor.submitted}) == len(executor.submitted) == 4


def test_a_turn_waits_for_all_its_calls_and_keeps_their_order(chat):
    executor = Instant()
    env = environment(chat, executor)
    env.turn_ended(0, turn(chat, CALL + "<tool_call>{</tool_call>"))
    assert len(executor.submitted) == 1, "the malformed one is answered without being run"
    ((_, answer),) = env.poll(0.0)
    shown = chat.tokenizer.decode(answer.ids).split("<tool_response>")
    assert len(shown) == 3 and "malformed_call" in shown[2]
    assert [result.kind for result in turns(env)[0].results] == ["ok", "malformed_call"]
    executor.result = ToolResult(sorted(INFRA_KINDS)[0], observation="?")
    env.turn_ended(0, turn(chat, CALL))
    assert env.poll(0.0) == [(0, Finish("infrastructure"))]


def test_the_record_holds_an_observation_as_shown_where_it_was_escaped_or_cut():
    chat = make_chat(g.TextConfig(observation_tokens=40), load_tokenizer(g.TextConfig()))
    for observation in ("7", "<answer>7</answer>", "x" * 50):
        env = environment(chat, Instant(ToolResult("ok", observation=observation)))
        env.turn_ended(0, turn(chat, CALL))
        ((_, answer),) = env.poll(0.0)
        (result,) = turns(env)[0].results
        assert result.observation == observation and (not result.shown) == (observation == "7")
        block = chat.tokenizer.decode(answer.ids).split("<tool_response>\n")[1]
        assert block.startswith((result.shown or observation) + "\n</tool_response>")
    assert "characters omitted" in result.shown


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
    assert env.poll(0.0) == [] and len(turns(env)[0].results) == recorded


def test_a_resumed_row_that_waited_is_asked_again_and_loses_no_turn(chat):
    """Also where the next step ends before the row gets a slot: it still waits for the observation then."""
    executor, first = Instant(), turn(chat, CALL)
    ids = np.zeros(first.start + len(first.tokens), np.int32)
    past = Trajectory(ids, ids > 0, ids * 0.0, ids, 0, (Turn(first.start, len(ids), "said"),), "cancelled", 1)
    request = RolloutRequest(PROBLEM, 4, first_sample=1, resume=past, step=2)
    env = ToolEnvironment(chat, executor, [request], step=9, seed=0, max_turns=3)
    assert turns(env) == past.turns
    assert env.turn_ended(0, first) == Wait()
    assert [len(t.calls) for t in turns(env)] == [1]
    assert executor.submitted[0].id == "2/4/1/1/0"


def test_a_call_that_the_executor_refuses_takes_none_of_another_row_with_it(chat):
    executor = Instant()
    env = ToolEnvironment(chat, executor, [RolloutRequest(PROBLEM, 4)] * 2, step=2, seed=0, max_turns=3)
    assert env.turn_ended(0, turn(chat, CALL)) == Wait()
    executor.submit = mock.Mock(side_effect=ValueError("is in flight already"))
    with pytest.raises(ValueError, match="in flight"):
        env.turn_ended(1, turn(chat, CALL))
    env.cancelled(1)
    assert not executor.cancelled and [index for index, _ in env.poll(0.0)] == [0]


# On an engine.

BYTES = ByteTokenizer(("<|pad|>", "<|im_end|>"))
MODEL = g.ModelConfig(d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, vocab_size=BYTES.vocab_size)
ROLLOUT = RolloutConfig(
    slots=4, chunk=8, max_prompt_tokens=100, max_response_tokens=500, max_turns=3, append_lengths=(128,)
)


class Slow(Instant):
    """Answers every second call at once and the others at the third poll from now, by the number of the call."""

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
    engine = g.make_engine(MODEL, ROLLOUT, SamplingConfig(), sorted({*chat.stop_ids, *range(32)}), seed=3)
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

    options, requests = RunOptions(before_chunk=interrupt), [RolloutRequest(PROBLEM, 0, 8)]
    with pytest.raises(KeyboardInterrupt):
        if while_free:
            collect_while_free(engine, submit, requests, lambda: None)
        engine.run(sampler, *with_tools(engine, chat, executor, requests, options))
    assert not executor.calls and {call.session for call in executor.submitted} <= set(executor.closed)


def test_rows_cut_by_the_deadline_continue_in_the_next_step_under_its_policy(calling):
    engine, chat, sampler = calling

    def roll_out(engine, sampler, requests, executor, step=0):
        submission = with_tools(engine, chat, executor, requests, RunOptions(step))
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
    for i, row in zip(cut, second, strict=True):
        edge, mask = first[i].length, row.policy_mask
        np.testing.assert_array_equal(row.versions[mask], np.where(np.arange(row.length) < edge, 0, 1)[mask])


def test_callers_that_share_an_executor_get_their_own_results():
    with FakeExecutor() as shared:
        for name in ("a", "b", "c"):
            shared.submit(CodeCall(name, "python", {"code": "1"}, None))
        assert [name for name, _ in shared.poll(0.0, {"b"})] == ["b"]
        assert shared.poll(0.01, {"b"}) == []
        assert [name for name, _ in shared.poll(0.0, {"a", "x"})] == ["a"]
        assert [name for name, _ in shared.poll()] == ["c"]


TOKENIZER = load_tokenizer(g.TextConfig())
SMALL = g.ModelConfig(d_model=8, layers=1, heads=2, kv_heads=2, head_dim=4, d_ff=8, vocab_size=TOKENIZER.vocab_size)
FEW = RolloutConfig(slots=2, max_prompt_tokens=16, max_response_tokens=8, append_lengths=(16,))


def sampler_of(tools=None, params=None, **changes):
    params = g.init_params(jax.random.key(0), SMALL) if params is None else params
    limits = g.ToolsConfig(workers=1, preload=())
    return Sampler(replace(SMALL, **changes), params, TOKENIZER, tools, rollout=FEW, limits=limits)


def engine_of(vocab_size, stops=()):
    return g.make_engine(replace(SMALL, vocab_size=16), FEW, SamplingConfig(), stops, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: sampler_of(vocab_size=8), rf"vocab_size = {TOKENIZER.vocab_size}; must be from 1 to 8"),
        (lambda: sampler_of(vocab_size=0), "must be from 1 to 0"),
        (lambda: sampler_of(layers=2), r"layers/\w+ is \(1, .*\) in params and \(2, .*\) in the model"),
        (lambda: sampler_of(heads=1, kv_heads=1, head_dim=8), r"layers/w\w is \(1, 8, 2, 4\) in params"),
        (lambda: sampler_of(params=()), "params is of type tuple; must be the parameters of the model"),
        (lambda: sampler_of(tools=[print]), r"tools is of type list; must be a Registry: registry = Registry\(\)"),
        (lambda: engine_of(17), "vocab_size = 17; must be from 1 to 16"),
        (lambda: engine_of(0), "vocab_size = 0; must be from 1 to 16"),
        (lambda: engine_of(12, [12]), r"stop ids \[12\] lie outside the vocabulary of 12"),
    ],
)
def test_parts_that_do_not_fit_are_refused(refused, message):
    with pytest.raises((ValueError, TypeError), match=message):
        refused()


def test_an_embedding_with_more_rows_than_the_tokenizer_has_ids_fits():
    padded = replace(SMALL, vocab_size=TOKENIZER.vocab_size + 8)
    with sampler_of(vocab_size=padded.vocab_size, params=g.init_params(jax.random.key(0), padded)) as made:
        assert made.weights.version == 0

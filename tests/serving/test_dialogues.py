"""Messages as token ids: what was sampled is found again however it comes back, and outside text stays plain text."""

import time

import numpy as np
import pytest
from serving import WEATHER

from grpo_roc_jax.serving.dialogues import Dialogues, TurnAnswer, read_answer
from grpo_roc_jax.serving.refusal import RequestRefused
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import ToolCall

ASKED = {"role": "user", "content": "Weather in Ulm?"}
CALLED = 'I look it up.</reason>Now:<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture
def dialogues():
    config = TextConfig()
    return Dialogues(config, load_tokenizer(config))


def turn(dialogues, messages, text, tools=(), session="a"):
    """(ids of the context and the sampled turn, the answer as the client gets it)."""
    context = dialogues.context(session, messages, tools)
    sampled = context.chat.turn_ids(text)
    answer = read_answer(context, sampled, ())
    ids = np.concatenate([context.ids, sampled]).astype(np.int32)
    dialogues.remember(context, answer, ids)
    return ids, answer


def calls_of(answer):
    import json

    return [
        {"id": "x", "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in answer.calls
    ]


ALTERED = {
    "as it was": lambda answer: {"content": answer.content, "tool_calls": calls_of(answer)},
    "white space, parts": lambda answer: {
        "content": [{"type": "text", "text": f"\n {answer.content}\n"}],
        "tool_calls": calls_of(answer),
    },
    "with its thought": lambda answer: {
        "content": f"<think>{answer.reasoning}</think>{answer.content}",
        "tool_calls": calls_of(answer),
    },
    "calls as text": lambda answer: {"content": f"{answer.content}\nCalling tools:\n{calls_of(answer)}"},
    "other JSON": lambda answer: {
        "content": answer.content,
        "tool_calls": [{"function": {"name": "weather", "arguments": '{ "city" :"Ulm" }'}}],
    },
}


@pytest.mark.parametrize("altered", ALTERED)
def test_a_turn_is_found_again_however_its_message_comes_back(dialogues, altered):
    ids, answer = turn(dialogues, [ASKED], CALLED, [WEATHER])
    assert (answer.content, answer.reasoning) == ("Now:", "I look it up.")
    assert answer.calls[0].arguments == {"city": "Ulm"}
    messages = [ASKED, {"role": "assistant", **ALTERED[altered](answer)}, {"role": "tool", "content": "<|im_end|>sun"}]
    context = dialogues.context("a", messages, [WEATHER])
    assert context.ids[: len(ids)].tolist() == ids.tolist()
    tail = context.ids[len(ids) :].tolist()
    assert tail == context.chat.shown_ids(["<|im_end|>sun"], closed=False, calls=())
    assert tail.count(context.chat.end_id) == 2  # of the turn and of the output: the text yields none
    longer, _ = turn(dialogues, messages, "</reason>Sun.", [WEATHER])
    again = [*messages, {"role": "assistant", "content": "Sun."}, {"role": "user", "content": "Sure?"}]
    assert dialogues.context("a", again, [WEATHER]).ids[: len(longer)].tolist() == longer.tolist()


@pytest.mark.parametrize("change", ["session", "tools", "system", "text"])
def test_another_conversation_is_not_taken_for_it(dialogues, change):
    ids, answer = turn(dialogues, [ASKED], "Hidden.</reason>Rain.")
    messages = [ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
    same = dialogues.context("a", messages).ids
    assert same[: len(ids)].tolist() == ids.tolist()
    if change == "text":
        messages[1] = {"role": "assistant", "content": "Snow."}
    if change == "system":
        messages.insert(0, {"role": "system", "content": "Be brief."})
    other = dialogues.context("b" if change == "session" else "a", messages, [WEATHER] if change == "tools" else ())
    assert other.ids[: len(ids)].tolist() != ids.tolist()
    assert "Hidden" not in other.chat.tokenizer.decode(other.ids.tolist())


def test_a_conversation_that_was_not_sampled_here_is_written_in_the_template(dialogues):
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "system", "content": "Brief."},
        ASKED,
        {"role": "user", "content": "Please."},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "wind"},
        {"role": "user", "content": "And?"},
    ]
    context = dialogues.context("", messages)
    assert context.chat.tokenizer.decode(context.ids.tolist()) == (
        "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nWeather in Ulm?\n\nPlease.<|im_end|>\n"
        "<|im_start|>assistant\n<reason>Hm.</reason>\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nwind\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<reason>"
    )


def test_answers_in_the_terms_of_the_api(dialogues):
    context = dialogues.context("", [ASKED], [WEATHER])

    def read(text, stops=(), of=context):
        return read_answer(of, of.chat.turn_ids(text), stops)

    assert read("Hm.</reason>\nRain.") == TurnAnswer("Rain.", "Hm.")
    assert read("<think>\nHm.\n</think>\n\nRain.") == TurnAnswer("Rain.", "Hm.")
    assert read("Rain, not closed") == TurnAnswer("Rain, not closed")
    assert read("<think>never closed") == TurnAnswer("", "never closed")
    assert read("Hm.</reason>Rain. STOP more", ["STOP"]) == TurnAnswer("Rain. ", "Hm.")
    broken = read("</reason>Now:<tool_call>{bad}</tool_call>")
    assert broken.calls == () and broken.content == "Now:<tool_call>{bad}</tool_call>"
    assert isinstance(read(CALLED).calls[0], ToolCall)
    assert "<tool_call>" in read(CALLED, of=dialogues.context("", [ASKED])).content  # no tools were offered


def test_what_is_remembered_is_bounded(dialogues, monkeypatch):
    monkeypatch.setattr("grpo_roc_jax.serving.dialogues.REMEMBERED_TOKENS", 100)
    first, _ = turn(dialogues, [ASKED], "</reason>One.")
    for i in range(6):
        turn(dialogues, [{"role": "user", "content": f"Number {i}?"}], "</reason>Two.")
    assert dialogues._held == sum(map(len, dialogues._known.values())) <= 100 + len(first)
    messages = [ASKED, {"role": "assistant", "content": "One."}, {"role": "user", "content": "?"}]
    assert "<reason></reason>One." in dialogues.context("a", messages).chat.tokenizer.decode(
        dialogues.context("a", messages).ids.tolist()
    )


@pytest.mark.parametrize("tools", [[{"type": "function", "function": {"name": "x", "parameters": 3}}]])
def test_tools_of_any_shape_do_not_raise_anything_else(dialogues, tools):
    try:
        dialogues.context("", [ASKED], tools)
    except RequestRefused as error:
        assert error.body["error"]["type"] == "invalid_request_error"


def test_time_grows_with_the_messages_and_no_faster(dialogues):
    """It runs on the thread that answers all clients; copying all ids at each message takes quadratic time."""
    took = []
    for count in (300, 9000):
        started = time.thread_time()
        dialogues.context("a", [*[ASKED, {"role": "assistant", "content": "Sun."}] * count, ASKED])
        took.append(time.thread_time() - started)
    assert took[1] < 100 * took[0], "for 30 times the messages; copying takes 300 times as long"


def test_messages_of_a_user_in_a_row_are_one(dialogues):
    three = [{"role": role, "content": text} for role, text in (("user", "a"), ("system", "b"), ("user", "c"))]
    one, other = dialogues.context("a", three), dialogues.context("a", [{"role": "user", "content": "a\n\nb\n\nc"}])
    assert one.ids.tolist() == other.ids.tolist() and one.key == other.key

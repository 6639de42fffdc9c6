"""Conversations to traces: roles in order, tool calls as text, bad rows named."""

import json

import pytest

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from tests.helpers.demonstrations import toy_chat


@pytest.fixture
def load(tmp_path):
    """(traces, report) of a file with these rows, which are objects or lines."""

    def loaded(*rows, **settings):
        path = tmp_path / "sft.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return load_traces(path, **settings)

    return loaded


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def dialogue(*messages):
    """A row that begins with a question."""
    return {"messages": [message("user", "1?"), *messages]}


def reply(content="1", **more):
    """A row of a question and an answer."""
    return dialogue(message("assistant", content, **more))


CALL = {"type": "function", "function": {"name": "python", "arguments": '{"code": "print(1)"}'}}
USED = [
    message("assistant", "<think>let me see</think>", tool_calls=[CALL]),
    message("tool", "1"),
    message("assistant", "<reason>so</reason><answer>\\boxed{1}</answer>"),
]
TOOL_ROW = {"messages": [message("system", "be good"), message("user", "1?"), *USED]}


def answered(*ids, key="tool_call_id", call_key="id"):
    """A row whose message calls a and b, with results under these ids; None has no id."""
    calls = [{call_key: name, "function": {"name": "f", "arguments": {"x": name}}} for name in "ab"]
    results = [message("tool", f"of {call_id}", **({key: call_id} if call_id else {})) for call_id in ids]
    return dialogue(message("assistant", "", tool_calls=calls), *results, message("assistant", "done"))


def test_a_conversation_with_a_tool(load):
    (trace,), report = load(TOOL_ROW)
    assert trace.problem.prompt == "1?" and report.own_system == 1
    assert trace.turns == (
        'let me see</reason>\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
        "so</reason><answer>\\boxed{1}</answer>",
    )
    assert trace.observations == (("1",),)
    chat = toy_chat()
    tokens, mask = chat.trace_row(trace)
    assert chat.tokenizer.decode(tokens[mask]) == "".join(trace.turns)
    (call,) = chat.parse_turn(chat.turn_ids(trace.turns[0])).calls
    assert (call.name, call.arguments) == ("python", {"code": "print(1)"})


def test_texts_in_parts_and_developers(load):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "?"}]
    silent = USED[0] | {"content": None}
    (trace,), report = load({"messages": [message("developer", "be good"), message("user", parts), silent, *USED[1:]]})
    assert trace.problem.prompt == "1?" and report.own_system == 1
    assert trace.turns[0].startswith("</reason>\n<tool_call>")


SCHEMA = {"name": "python", "description": "runs", "parameters": {"type": "object", "properties": {}}}


def test_a_row_has_the_tools_it_lists(load):
    tool = {"type": "function", "function": SCHEMA}
    traces, report = load(TOOL_ROW, TOOL_ROW | {"tools": [tool]}, TOOL_ROW | {"tools": json.dumps([SCHEMA])})
    assert traces[0].tools == "" and json.loads(traces[1].tools) == json.loads(traces[2].tools) == [tool]
    assert report.own_tools == 2 and "2 rows have their own tools" in str(report)
    without = toy_chat()
    others = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    chat = make_chat(TextConfig(tools_section=True), without.tokenizer, others)
    shown = [chat.tokenizer.decode(chat.trace_row(trace)[0]) for trace in traces]
    assert ['"other"' in text for text in shown] == [True, False, False]
    assert json.dumps(tool) in shown[1] and shown[1] == shown[2]
    suffixed = chat.trace_row(traces[1], " at once")[0]
    assert "1? at once<|im_end|>" in chat.tokenizer.decode(suffixed)
    assert (without.trace_row(traces[1])[0] == without.trace_row(traces[0])[0]).all()


THOUGHT = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "1"}]


@pytest.mark.parametrize(
    ("row", "turn"),
    [
        (reply("hello"), "</reason>hello"),
        (reply(THOUGHT), "so</reason>1"),
        *((reply("1", **{key: "so"}), "so</reason>1") for key in ("reasoning_content", "reasoning", "thinking")),
        (reply("<think>so</think>1", thinking="so"), "so</reason>1"),
        (reply("<think>so</think>1"), "so</reason>1"),
        (reply("<thinking>so</thinking>1"), "so</reason>1"),
        (reply("<thought>so</thought>\n1"), "so</reason>\n1"),
        (reply("[THINK]so[/THINK]1"), "so</reason>1"),
        (reply("<|begin_of_thought|>so<|end_of_thought|>1"), "so</reason>1"),
        (reply("◁think▷so◁/think▷1"), "so</reason>1"),
    ],
)
def test_thoughts_under_the_marks_and_keys_of_other_families_are_trained(load, row, turn):
    (trace,), _ = load(row)
    assert trace.turns == (turn,)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "invalid JSON"),
        ({"prompt": "x"}, "column 'messages' is missing"),
        ({"messages": []}, "missing, empty"),
        ({"messages": "["}, "not JSON"),
        (TOOL_ROW | {"tools": "["}, "column 'tools' is text but not JSON"),
        (TOOL_ROW | {"tools": [{"type": "function"}]}, "something other than function schemas"),
        (TOOL_ROW | {"tools": [{"name": "shell"}]}, "a call of 'python', which is not one of its tools (shell)"),
        (
            reply(tool_calls=[{"name": ["f"], "arguments": "{}"}]) | {"tools": [{"name": "f"}]},
            "which is not one of its tools",
        ),
        (TOOL_ROW | {"images": ["a.png"]}, "column 'images' is filled; problems are text"),
        ({"messages": ["hello"]}, "something other than messages"),
        ({"messages": [message("user", " "), *USED]}, "the question is empty"),
        ({"messages": [message("user", [{"type": "image"}])]}, "something other than messages"),
        ({"messages": [message("user", "1?", images=["a.png"]), *USED]}, "is filled; problems are text"),
        ({"messages": [message("user", "1?", audio={"id": "x"}), *USED]}, "is filled; problems are text"),
        (dialogue(), "no assistant message"),
        ({"messages": [message("assistant", "hi")]}, "a 'assistant' message after a 'system'"),
        (dialogue(message("assistant", "b"), message("user", "c")), "a 'user' message after a 'assistant'"),
        (dialogue(message("assistant", "b"), message("assistant", "c")), "after a 'assistant'"),
        (dialogue(*USED[:2]), "ends with a tool message"),
        (reply(tool_calls=[{}]), "without a function name"),
        (reply(tool_calls=[{"name": "p", "arguments": "{"}]), "arguments are not JSON"),
        (reply("", tool_calls=[CALL], function_call={"name": "f", "arguments": "{}"}), "another 'function_call'"),
        (reply("<think>no</think>1", thinking="so"), "one thought in its text and another in a key of its own"),
        (reply(reasoning=["so"]), "a thought that is list"),
        (reply(reasoning="a", thinking="b"), "different thoughts in reasoning and thinking"),
        (reply(None), "without text, thought and calls"),
        (reply(" "), "without text, thought and calls"),
        (reply("<think></think>"), "without text, thought and calls"),
        (answered("a", "c"), "'c' is of no call"),
        (answered("a", "a"), "a second result"),
        (answered("b"), "no result for the calls 'a'"),
        (answered(None, None), "without tool_call_id"),
        (answered("a", None), "beside others"),
    ],
)
def test_bad_rows_are_named(load, tmp_path, row, reason):
    traces, report = load(TOOL_ROW, row)
    assert len(traces) == 1 and str(report.bad[0]).startswith(f"{tmp_path / 'sft.jsonl'}:2: ")
    assert reason in report.bad[0].reason
    with pytest.raises(ValueError, match="repair these rows"):
        load(TOOL_ROW, row, bad_rows="fail")


def test_a_file_without_traces_is_refused(load):
    with pytest.raises(ValueError, match="no row of the file can be used"):
        load("{")


@pytest.mark.parametrize("key", ["tool_call_id", "call_id", "tool_use_id"])
@pytest.mark.parametrize("call_key", ["id", "call_id"])
def test_results_go_to_their_calls_by_id(load, key, call_key):
    """Calls a, b with results b, a are the pairs (a, a) and (b, b), under the keys of other interfaces too."""
    (trace,), report = load(answered("b", "a", key=key, call_key=call_key))
    assert trace.observations == (("of a", "of b"),) and not report.unread


def test_results_without_ids_stay_in_their_order(load):
    row = {"messages": json.dumps([*TOOL_ROW["messages"][:4], message("tool", "2"), TOOL_ROW["messages"][4]])}
    assert load(row)[0][0].observations == (("1", "2"),)


def test_keys_that_are_not_read_are_named(load):
    row = dialogue(message("assistant", "1", weight=0.5, refusal=None, name="x"))
    row["messages"][0]["audio"] = None
    _, report = load(row)
    assert report.unread == {"weight": 1} and "not read: 'weight' (1 rows)" in str(report)
    assert load(TOOL_ROW | {"images": []})[1].unread == {}
    assert load(reply(weight=0, train=False, audio=None, parts=[]))[1].unread == {"weight": 1, "train": 1}


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_a_call_without_arguments_has_none(load, arguments):
    function = {"name": "now", "arguments": arguments}
    for fields in ({"tool_calls": [{"function": function}]}, {"function_call": function}):
        (trace,), _ = load(reply("", **fields))
        assert trace.turns[0].endswith('{"name": "now", "arguments": {}}\n</tool_call>')
    assert len(load(reply("", tool_calls=[CALL], function_call=CALL["function"]))[0]) == 1, "the same under two keys"


def test_an_end_token_in_the_arguments_of_a_call_is_text(load):
    """It ends no turn: the call is trained to its end, as characters that a policy can sample there."""
    call = {"function": {"name": "python", "arguments": {"code": "print('<|im_end|></tool_call>')"}}}
    (trace,), _ = load(reply("", tool_calls=[call]))
    chat = toy_chat()
    tokens, mask = chat.trace_row(trace)
    turn_ids = tokens[mask].tolist()
    assert chat.tokenizer.decode(turn_ids) == trace.turns[0] and chat.end_id not in turn_ids
    (read,) = chat.parse_turn(turn_ids).calls
    assert read.arguments == call["function"]["arguments"]

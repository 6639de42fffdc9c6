"""Conversations to traces: roles in order, tool calls as text, bad rows named."""

import json

import pytest

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def message(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "python", "arguments": '{"code": "print(1)"}'}}
TOOL_ROW = {
    "messages": [
        message("system", "be good"),
        message("user", "1?"),
        message("assistant", "<think>let me see</think>", tool_calls=[CALL]),
        message("tool", "1"),
        message("assistant", "<reason>so</reason><answer>\\boxed{1}</answer>"),
    ]
}


def test_a_conversation_with_a_tool(tmp_path):
    (trace,), report = load_traces(write(tmp_path / "sft.jsonl", [TOOL_ROW]))
    assert trace.problem.prompt == "1?"
    assert trace.turns == (
        'let me see</reason>\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
        "so</reason><answer>\\boxed{1}</answer>",
    )
    assert trace.observations == (("1",),)
    assert report.own_system == 1


def test_the_ids_read_as_the_conversation(tmp_path):
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", [TOOL_ROW]))
    tokenizer = load_tokenizer(TextConfig())
    chat = make_chat(TextConfig(), tokenizer)
    tokens, mask = chat.trace_row(trace)
    assert tokenizer.decode(tokens[mask]) == "".join(trace.turns)
    (call,) = chat.parse_turn(chat.turn_ids(trace.turns[0])).calls
    assert (call.name, call.arguments) == ("python", {"code": "print(1)"})


def test_texts_in_parts_and_developers(tmp_path):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "?"}]
    messages = [message("developer", "be good"), message("user", parts), *TOOL_ROW["messages"][2:]]
    messages[2] = messages[2] | {"content": None}
    (trace,), report = load_traces(write(tmp_path / "sft.jsonl", [{"messages": messages}]))
    assert trace.problem.prompt == "1?" and report.own_system == 1
    assert trace.turns[0].startswith("</reason>\n<tool_call>")


SCHEMA = {"name": "python", "description": "runs", "parameters": {"type": "object", "properties": {}}}


def test_a_row_has_the_tools_it_lists(tmp_path):
    own = {"type": "function", "function": SCHEMA}
    rows = [TOOL_ROW, TOOL_ROW | {"tools": [own]}, TOOL_ROW | {"tools": json.dumps([SCHEMA])}]
    traces, report = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert traces[0].tools == "" and json.loads(traces[1].tools) == json.loads(traces[2].tools) == [own]
    assert report.own_tools == 2 and "2 rows have their own tools" in str(report)
    others = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    config = TextConfig(tools_section=True)
    chat = make_chat(config, load_tokenizer(config), others)
    shown = [chat.tokenizer.decode(chat.trace_row(trace)[0]) for trace in traces]
    assert ['"other"' in text for text in shown] == [True, False, False]
    assert json.dumps(own) in shown[1] and shown[1] == shown[2]
    suffixed = chat.trace_row(traces[1], " at once")[0]
    assert "1? at once<|im_end|>" in chat.tokenizer.decode(suffixed)
    without = make_chat(TextConfig(), chat.tokenizer)
    assert (without.trace_row(traces[1])[0] == without.trace_row(traces[0])[0]).all()


def test_text_without_a_reason_gets_an_empty_one(tmp_path):
    rows = [{"messages": [message("user", "hi"), message("assistant", "hello")]}]
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert trace.turns == ("</reason>hello",)


def test_two_observations_of_one_turn(tmp_path):
    messages = TOOL_ROW["messages"]
    rows = [{"messages": json.dumps([*messages[:4], message("tool", "2"), messages[4]])}]
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert trace.observations == (("1", "2"),)


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
        ({"messages": ["hello"]}, "something other than messages"),
        ({"messages": [message("user", [{"type": "image"}])]}, "something other than messages"),
        ({"messages": [message("user", "hi")]}, "no assistant message"),
        ({"messages": [message("assistant", "hi")]}, "a 'assistant' message after a 'system'"),
        (
            {"messages": [message("user", "a"), message("assistant", "b"), message("user", "c")]},
            "a 'user' message after a 'assistant'",
        ),
        ({"messages": TOOL_ROW["messages"][:4]}, "ends with a tool message"),
        (
            {"messages": [message("user", "a"), message("assistant", "b"), message("assistant", "c")]},
            "after a 'assistant'",
        ),
        ({"messages": [message("user", "a"), message("assistant", "b", tool_calls=[{}])]}, "without a function name"),
        (
            {
                "messages": [
                    message("user", "a"),
                    message("assistant", "b", tool_calls=[{"name": "p", "arguments": "{"}]),
                ]
            },
            "arguments are not JSON",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, row, reason):
    path = write(tmp_path / "sft.jsonl", [TOOL_ROW, row])
    traces, report = load_traces(path)
    assert len(traces) == 1
    assert str(report.bad[0]).startswith(f"{path}:2: ")
    assert reason in report.bad[0].reason
    with pytest.raises(ValueError, match="repair these rows"):
        load_traces(path, bad_rows="fail")


def called(own_id, code):
    return {"id": own_id, "type": "function", "function": {"name": "python", "arguments": {"code": code}}}


def test_results_go_to_their_calls_by_id(tmp_path):
    """Calls a, b with results b, a are the pairs (a, a) and (b, b), and unknown, missing or repeated ids are bad."""
    answered = lambda *ids: [message("tool", f"of {one}", tool_call_id=one) for one in ids]  # noqa: E731
    rows = [
        {
            "messages": [
                message("user", "1?"),
                message("assistant", "", tool_calls=[called("a", "1"), called("b", "2")]),
                *results,
                message("assistant", "done"),
            ]
        }
        for results in (
            answered("b", "a"),
            answered("a", "c"),
            answered("a", "a"),
            answered("b"),
            [message("tool", "x"), message("tool", "y")],
            [*answered("a"), message("tool", "y")],
        )
    ]
    (trace,), report = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert trace.observations == (("of a", "of b"),)
    said = [
        "'c' is of no call",
        "a second result",
        "no result for the calls 'a'",
        "without tool_call_id",
        "beside others",
    ]
    assert [bad.row for bad in report.bad] == [2, 3, 4, 5, 6]
    for bad, words in zip(report.bad, said, strict=True):
        assert words in bad.reason


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_in_a_key_of_its_own_is_trained(tmp_path, key):
    rows = [
        {"messages": [message("user", "1?"), message("assistant", "It is 1.", **{key: "let me see"})]},
        {
            "messages": [
                message("user", "2?"),
                message("assistant", "<think>let me see</think>It is 1.", **{key: "let me see"}),
            ]
        },
        {"messages": [message("user", "3?"), message("assistant", "<think>no</think>It is 1.", **{key: "let me see"})]},
        {"messages": [message("user", "4?"), message("assistant", "It is 1.", **{key: ["let me see"]})]},
    ]
    traces, report = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert [trace.turns for trace in traces] == [("let me see</reason>It is 1.",)] * 2
    assert "one thought in its text and another in a key of its own" in report.bad[0].reason
    assert "a thought that is list" in report.bad[1].reason


def test_thoughts_as_parts_of_the_content(tmp_path):
    parts = [{"type": "thinking", "thinking": "let me see"}, {"type": "text", "text": "It is 1."}]
    rows = [{"messages": [message("user", "1?"), message("assistant", parts)]}]
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert trace.turns == ("let me see</reason>It is 1.",)


def test_keys_that_are_not_read_are_named(tmp_path):
    row = {
        "messages": [message("user", "1?", audio=None), message("assistant", "1", weight=0.5, refusal=None, name="x")]
    }
    (_,), report = load_traces(write(tmp_path / "sft.jsonl", [row]))
    assert report.unread == {"weight": 1} and "not read: 'weight' (1 rows)" in str(report)
    assert load_traces(write(tmp_path / "sft.jsonl", [TOOL_ROW]))[1].unread == {}
    off = {"messages": [message("user", "1?"), message("assistant", "1", weight=0, train=False, audio=None, parts=[])]}
    assert load_traces(write(tmp_path / "sft.jsonl", [off]))[1].unread == {"weight": 1, "train": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reasoning": "a", "thinking": "b"}, "different thoughts in reasoning and thinking"),
        ({"content": None}, "without text, thought and calls"),
        ({"content": " "}, "without text, thought and calls"),
        ({"content": "<think></think>"}, "without text, thought and calls"),
    ],
)
def test_a_message_that_teaches_nothing_or_two_things_is_bad(tmp_path, fields, reason):
    row = {"messages": [message("user", "1?"), message("assistant", "1") | fields]}
    _, report = load_traces(write(tmp_path / "sft.jsonl", [TOOL_ROW, row]))
    assert reason in report.bad[0].reason


@pytest.mark.parametrize(
    "text",
    [
        "<think>so</think>1",
        "<thinking>so</thinking>1",
        "<thought>so</thought>\n1",
        "[THINK]so[/THINK]1",
        "<|begin_of_thought|>so<|end_of_thought|>1",
        "◁think▷so◁/think▷1",
    ],
)
def test_thoughts_under_the_marks_of_other_families(tmp_path, text):
    row = {"messages": [message("user", "1?"), message("assistant", text)]}
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", [row]))
    assert "".join(trace.turns[0].split()) == "so</reason>1"


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_a_call_without_arguments_has_none(tmp_path, arguments):
    call = {"function": {"name": "now", "arguments": arguments}}
    rows = [{"messages": [message("user", "1?"), message("assistant", "", tool_calls=[call])]}]
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert trace.turns[0].endswith('{"name": "now", "arguments": {}}\n</tool_call>')
    old = [{"messages": [message("user", "1?"), message("assistant", "", function_call=call["function"])]}]
    assert load_traces(write(tmp_path / "old.jsonl", old))[0][0].turns == trace.turns


def test_rows_with_images_are_bad(tmp_path):
    traces, report = load_traces(
        write(tmp_path / "sft.jsonl", [TOOL_ROW | {"images": ["a.png"]}, TOOL_ROW | {"images": []}])
    )
    assert len(traces) == 1 and "column 'images' is filled; problems are text" in report.bad[0].reason


def test_an_end_token_in_the_arguments_of_a_call_is_text(tmp_path):
    """It ends no turn: the call is trained to its end, as characters that a policy can sample there."""
    call = {"function": {"name": "python", "arguments": {"code": "print('<|im_end|></tool_call>')"}}}
    rows = [{"messages": [message("user", "1?"), message("assistant", "", tool_calls=[call])]}]
    (trace,), _ = load_traces(write(tmp_path / "sft.jsonl", rows))
    chat = make_chat(TextConfig(), load_tokenizer(TextConfig()))
    tokens, mask = chat.trace_row(trace)
    said = tokens[mask].tolist()
    assert chat.tokenizer.decode(said) == trace.turns[0] and chat.end_id not in said
    (read,) = chat.parse_turn(said).calls
    assert read.arguments == call["function"]["arguments"]


def test_a_file_without_traces_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no row of the file can be used"):
        load_traces(write(tmp_path / "sft.jsonl", ["{"]))


@pytest.mark.parametrize("key", ["tool_call_id", "call_id", "tool_use_id"])
@pytest.mark.parametrize("own", ["id", "call_id"])
def test_ids_under_the_keys_of_other_interfaces(tmp_path, key, own):
    asked = [{own: name, "function": {"name": "f", "arguments": {"x": name}}} for name in "ab"]
    results = [message("tool", f"of {name}", **{key: name}) for name in "ba"]
    row = {
        "messages": [
            message("user", "1?"),
            message("assistant", "", tool_calls=asked),
            *results,
            TOOL_ROW["messages"][-1],
        ]
    }
    (trace,), report = load_traces(write(tmp_path / "sft.jsonl", [row]))
    assert trace.observations == (("of a", "of b"),) and not report.unread


def test_calls_under_two_keys_must_be_the_same(tmp_path):
    again, other = CALL["function"], {"name": "f", "arguments": "{}"}
    rows = [
        {"messages": [message("user", "1?"), message("assistant", "", tool_calls=[CALL], function_call=call)]}
        for call in (again, other)
    ]
    traces, report = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert len(traces) == 1 and "another 'function_call'" in report.bad[0].reason


@pytest.mark.parametrize("media", [{"images": ["a.png"]}, {"audio": {"id": "x"}}])
def test_messages_with_media_are_bad(tmp_path, media):
    rows = [TOOL_ROW, {"messages": [message("user", "1?", **media), *TOOL_ROW["messages"][2:]]}]
    traces, report = load_traces(write(tmp_path / "sft.jsonl", rows))
    assert len(traces) == 1 and "is filled; problems are text" in report.bad[0].reason

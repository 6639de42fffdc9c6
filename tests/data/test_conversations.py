"""Conversations to traces: roles in order, tool calls as text, bad rows named. Annotations of GSM8K as tool calls."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.gsm8k_traces import agrees, convert, main, to_expression
from grpo_roc_jax.text.chat_format import UnfitTrace, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.worlds.demonstrations import run_program
from tests.text.test_chat_format import TOY


@pytest.fixture
def load(tmp_path):
    """(traces, report) of a file with these rows, which are objects or lines."""

    def loaded(*rows, **settings):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "sft.jsonl").write_text("\n".join(lines))
        return load_traces(tmp_path / "sft.jsonl", **settings)

    return loaded


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def dialogue(*messages):
    """A row that begins with a question."""
    return {"messages": [message("user", "1?"), *messages]}


def reply(content="1", *called, **more):
    """A row of a question and an answer with these calls."""
    return dialogue(message("assistant", content, **({"tool_calls": list(called)} if called else {}), **more))


CALL = {"type": "function", "function": {"name": "python", "arguments": '{"code": "print(1)"}'}}
USED = [message("assistant", "<think>let me see</think>", tool_calls=[CALL]), message("tool", "1")]
USED += [message("assistant", "<reason>so</reason><answer>\\boxed{1}</answer>")]
TOOL_ROW = {"messages": [message("system", "be good"), message("user", "1?"), *USED]}


ROWS = [
    ("Q1?", "He sold 48/2 = <<48/2=24>>24 clips.\nThen 48+24 = <<48+24=72>>72 in all.\n#### 72"),
    ("Q2?", "So $<<1,000/3=333.33>>333.33 each.\nRounded: 333.\n#### 333"),
    *(("Q3?", "No sums here.\n#### 5"), ("Q4?", "It is <<a+b=5>>5.\n#### 5"), ("Q5?", "It is <<2+2=5>>5.\n#### 5")),
    *(("Q6?", "It is <<2/0=5>>5.\n#### 5"), ("Q7?", "It is <<2+2=4>>4.")),
]


def answered(*ids, key="tool_call_id", call_key="id"):
    """A row whose message calls a and b, with results under these ids."""
    calls = [{call_key: name, "function": {"name": "f", "arguments": {"x": name}}} for name in "ab"]
    results = [message("tool", f"of {call_id}", **{key: call_id}) for call_id in ids]
    return dialogue(message("assistant", "", tool_calls=calls), *results, message("assistant", "done"))


def test_a_conversation_with_a_tool(load):
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "?"}]
    silent = [USED[0] | {"content": None}, *USED[1:]]
    other = {"messages": [message("developer", "be good"), message("user", parts), *silent]}
    (trace, in_parts), report = load(TOOL_ROW, other)
    assert trace.problem.prompt == in_parts.problem.prompt == "1?" and report.own_system == 2
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
    assert trace.turns == (f"let me see</reason>\n{call}", "so</reason><answer>\\boxed{1}</answer>")
    assert in_parts.turns[0] == f"</reason>\n{call}" and trace.observations == (("1",),)


def test_a_row_has_the_tools_it_lists(load):
    schema = {"name": "python", "description": "runs", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": schema}
    traces, report = load(TOOL_ROW, TOOL_ROW | {"tools": [tool]}, TOOL_ROW | {"tools": json.dumps([tool["function"]])})
    assert traces[0].tools == "" and json.loads(traces[1].tools) == json.loads(traces[2].tools) == [tool]
    assert report.own_tools == 2 and "2 rows have their own tools" in str(report)
    others = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    chat = make_chat(TextConfig(tools_section=True), TOY.tokenizer, others)
    shown = [chat.tokenizer.decode(chat.trace_row(trace)[0]) for trace in traces]
    assert ['"other"' in text for text in shown] == [True, False, False]
    assert json.dumps(tool) in shown[1] and shown[1] == shown[2]
    gemma = make_chat(TextConfig(tools_section=True, calls="gemma"), chat.tokenizer, others)
    with pytest.raises(UnfitTrace, match="'look-up' cannot be called in the form gemma"):
        gemma.trace_row(replace(traces[1], tools=traces[1].tools.replace('"python"', '"look-up"')))


def test_thoughts_under_the_marks_and_keys_of_other_families_are_trained_and_keys_that_are_not_read_are_named(load):
    thought = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "1"}]
    for row in (
        *(reply(thought), reply("<think>so</think>1", thinking="so")),
        *(reply("1", **{key: "so"}) for key in ("reasoning_content", "reasoning", "thinking")),
        *(reply("<thought>so</thought>1"), reply("◁think▷so◁/think▷1")),
    ):
        assert load(row)[0][0].turns == ("so</reason>1",)
    assert load(reply("hello"))[0][0].turns == ("</reason>hello",)
    _, report = load(reply(weight=0.5, refusal=None, name="x"))
    assert report.unread == {"weight": 1} and "not read: 'weight' (1 rows)" in str(report)
    assert load(reply(weight=0, train=False, audio=None, parts=[]))[1].unread == {"weight": 1, "train": 1}


def test_bad_rows_are_named(load, tmp_path):
    for row, reason in [
        *(("{", "invalid JSON"), ({"prompt": "x"}, "column 'messages' is missing")),
        *(({"messages": []}, "missing, empty"), ({"messages": "["}, "not JSON")),
        (TOOL_ROW | {"tools": "["}, "column 'tools' is text but not JSON"),
        (TOOL_ROW | {"tools": [{"type": "function"}]}, "something other than function schemas"),
        (TOOL_ROW | {"tools": [{"name": "shell"}]}, "a call of 'python', which is not one of its tools (shell)"),
        *((TOOL_ROW | {"images": ["a.png"]}, "filled; problems are text"), (dialogue(), "no assistant message")),
        ({"messages": [message("user", " "), *USED]}, "the question is empty"),
        ({"messages": [message("user", [{"type": "image"}])]}, "something other than messages"),
        ({"messages": [message("assistant", "hi")]}, "a 'assistant' message after a 'system'"),
        (dialogue(message("assistant", "b"), message("user", "c")), "a 'user' message after a 'assistant'"),
        *((dialogue(*USED[:2]), "ends with a tool message"), (reply("1", {}), "without a function name")),
        (reply("1", {"name": "p", "arguments": "{"}), "arguments are not JSON"),
        (reply("", CALL, function_call={"name": "f", "arguments": "{}"}), "another 'function_call'"),
        (reply("<think>no</think>1", thinking="so"), "one thought in its text and another in a key of its own"),
        (reply(reasoning=["so"]), "a thought that is list"),
        (reply(reasoning="a", thinking="b"), "different thoughts"),
        *((reply(" "), "without text, thought and calls"), (answered("a", "c"), "'c' is of no call")),
    ]:
        traces, report = load(TOOL_ROW, row)
        assert len(traces) == 1 and str(report.bad[0]).startswith(f"{tmp_path / 'sft.jsonl'}:2: ")
        assert reason in report.bad[0].reason
        with pytest.raises(ValueError, match="repair these rows"):
            load(TOOL_ROW, row, bad_rows="fail")


def test_results_go_to_their_calls_by_id_and_a_call_without_arguments_has_none(load):
    """Calls a, b with results b, a are the pairs (a, a) and (b, b), under the keys of other interfaces too."""
    for key, call_key in (("tool_call_id", "id"), ("call_id", "call_id"), ("tool_use_id", "id")):
        (trace,), report = load(answered("b", "a", key=key, call_key=call_key))
        assert trace.observations == (("of a", "of b"),) and not report.unread
    in_order = {"messages": json.dumps([*TOOL_ROW["messages"][:4], message("tool", "2"), TOOL_ROW["messages"][4]])}
    assert load(in_order)[0][0].observations == (("1", "2"),), "results without ids"
    for arguments in (None, " ", "{}"):
        function = {"name": "now", "arguments": arguments}
        for fields in ({"tool_calls": [{"function": function}]}, {"function_call": function}):
            (trace,), _ = load(reply("", **fields))
            assert trace.turns[0].endswith('{"name": "now", "arguments": {}}\n</tool_call>')
    assert len(load(reply("", CALL, function_call=CALL["function"]))[0]) == 1, "the same under two keys"


def test_expressions_are_parsed_and_values_agree_to_the_annotated_decimals():
    for annotated, expression in [
        *(("48/2", "48/2"), ("$1,200*.5", "1200*.5"), ("50%*80", "(50/100)*80"), ("3 x 4", "3*4")),
        *(("007+10", "7+10"), ("-(2+3)", "-(2+3)"), ("2**9999999", None), ("x", None), ("apples+2", None)),
        *(("print(1)", None), ("(1,2)", None), ("'a'*9", None), ("", None)),
    ]:
        assert to_expression(annotated) == expression, annotated
    for printed, annotated, same in [
        *(("24.0", "24", True), ("24.4", "24", False), ("0.3333333333333333", "0.33", True)),
        *(("0.6666666666666666", "0.66", True), ("0.6666666666666666", "0.67", True), ("0.7", "0.67", False)),
        *(("1200", "$1,200", True), ("0.5", "50%", True), ("nothing", "1", False), ("1", "", False)),
    ]:
        assert agrees(printed, annotated) is same, printed


def test_problems_become_conversations_that_load_as_traces_and_the_others_are_counted(tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "traces.jsonl"
    executor = SimpleNamespace(run=lambda calls: [run_program(call.arguments["code"]) for call in calls])
    rows.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    conversion = convert(rows, executor)
    refused = ("no annotation", "not arithmetic", "another value", "failed call", "no answer")
    assert conversion.refused == dict.fromkeys(refused, 1)
    assert str(conversion).startswith("2 of 7 problems convert, and their calls give the annotated values")
    messages = [(m["role"], m["content"]) for m in conversion.rows[0]["messages"]]
    assert messages == [
        *(("user", "Q1?"), ("assistant", "<reason>He sold 48/2 =</reason>"), ("tool", "24.0")),
        *(("assistant", "<reason>24 clips.\nThen 48+24 =</reason>"), ("tool", "72")),
        ("assistant", "<reason>72 in all.\nThe answer is 72.</reason>\n<answer>\\boxed{72}</answer>"),
    ]
    assert main([str(rows), "--out", str(out), "--limit", "2"]) == 0, "with the real tool"
    assert [json.loads(line) for line in out.read_text().splitlines()] == conversion.rows
    (first, _), report = load_traces(out)
    assert first.problem.prompt == "Q1?" and not report.bad
    assert first.turns[0].startswith("He sold 48/2 =</reason>\n<tool_call>") and '"print(48/2)"' in first.turns[0]
    rows.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 has no columns question and answer"):
        convert(rows, executor)

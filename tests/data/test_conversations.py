"""Conversations to traces: roles in order, tool calls as text, bad rows named. Annotations of GSM8K as tool calls."""

import json
from pathlib import Path

import pytest

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.gsm8k_traces import agrees, convert, main, to_expression
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.types import ToolResult
from tests.helpers.demonstrations import only, toy_chat


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


def reply(content="1", *called, tools=None, **more):
    """A row of a question and an answer with these calls, and its tools."""
    row = dialogue(message("assistant", content, **({"tool_calls": list(called)} if called else {}), **more))
    return row | {"tools": tools} if tools else row


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
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "?"}]
    silent = USED[0] | {"content": None}
    other = {"messages": [message("developer", "be good"), message("user", parts), silent, *USED[1:]]}
    (trace, in_parts), report = load(TOOL_ROW, other)
    assert trace.problem.prompt == in_parts.problem.prompt == "1?" and report.own_system == 2
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
    assert trace.turns == (f"let me see</reason>\n{call}", "so</reason><answer>\\boxed{1}</answer>")
    assert in_parts.turns[0] == f"</reason>\n{call}" and trace.observations == (("1",),)
    chat = toy_chat()
    tokens, mask = chat.trace_row(trace)
    assert chat.tokenizer.decode(tokens[mask]) == "".join(trace.turns)
    (call,) = chat.parse_turn(chat.turn_ids(trace.turns[0])).calls
    assert (call.name, call.arguments) == ("python", {"code": "print(1)"})


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
        (reply("<thought>so</thought>\n1"), "so</reason>\n1"),
        *((reply(f"<{mark}>so</{mark}>1"), "so</reason>1") for mark in ("think", "thinking")),
        *((reply(f"{marks}1"), "so</reason>1") for marks in ("[THINK]so[/THINK]", "◁think▷so◁/think▷")),
        (reply("<|begin_of_thought|>so<|end_of_thought|>1"), "so</reason>1"),
    ],
)
def test_thoughts_under_the_marks_and_keys_of_other_families_are_trained(load, row, turn):
    (trace,), _ = load(row)
    assert trace.turns == (turn,)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        *(("{", "invalid JSON"), ({"prompt": "x"}, "column 'messages' is missing")),
        *(({"messages": []}, "missing, empty"), ({"messages": "["}, "not JSON")),
        (TOOL_ROW | {"tools": "["}, "column 'tools' is text but not JSON"),
        (TOOL_ROW | {"tools": [{"type": "function"}]}, "something other than function schemas"),
        (TOOL_ROW | {"tools": [{"name": "shell"}]}, "a call of 'python', which is not one of its tools (shell)"),
        (reply("1", {"name": ["f"], "arguments": "{}"}, tools=[{"name": "f"}]), "which is not one of its tools"),
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
        *((dialogue(*USED[:2]), "ends with a tool message"), (reply("1", {}), "without a function name")),
        (reply("1", {"name": "p", "arguments": "{"}), "arguments are not JSON"),
        (reply("", CALL, function_call={"name": "f", "arguments": "{}"}), "another 'function_call'"),
        (reply("<think>no</think>1", thinking="so"), "one thought in its text and another in a key of its own"),
        (reply(reasoning=["so"]), "a thought that is list"),
        (reply(reasoning="a", thinking="b"), "different thoughts in reasoning and thinking"),
        *((reply(text), "without text, thought and calls") for text in (None, " ", "<think></think>")),
        (answered("a", "c"), "'c' is of no call"),
    ],
)
def test_bad_rows_are_named(load, tmp_path, row, reason):
    traces, report = load(TOOL_ROW, row)
    assert len(traces) == 1 and str(report.bad[0]).startswith(f"{tmp_path / 'sft.jsonl'}:2: ")
    assert reason in report.bad[0].reason
    with pytest.raises(ValueError, match="repair these rows"):
        load(TOOL_ROW, row, bad_rows="fail")
    with pytest.raises(ValueError, match="no row of the file can be used"):
        load(row)


@pytest.mark.parametrize("key", ["tool_call_id", "call_id", "tool_use_id"])
@pytest.mark.parametrize("call_key", ["id", "call_id"])
def test_results_go_to_their_calls_by_id(load, key, call_key):
    """Calls a, b with results b, a are the pairs (a, a) and (b, b), under the keys of other interfaces too."""
    (trace,), report = load(answered("b", "a", key=key, call_key=call_key))
    assert trace.observations == (("of a", "of b"),) and not report.unread
    in_order = {"messages": json.dumps([*TOOL_ROW["messages"][:4], message("tool", "2"), TOOL_ROW["messages"][4]])}
    assert load(in_order)[0][0].observations == (("1", "2"),), "results without ids"


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
    assert len(load(reply("", CALL, function_call=CALL["function"]))[0]) == 1, "the same under two keys"


# ---- GSM8K ---------------------------------------------------------------------------------------------------------

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_train.jsonl"


class Arithmetic:
    """An executor that evaluates the print of a call, whose argument was checked to be arithmetic."""

    def __init__(self):
        self.codes = []

    def run(self, calls):
        codes = [call.arguments["code"] for call in calls]
        self.codes += codes
        return [self._result(code.removeprefix("print(").removesuffix(")")) for code in codes]

    def _result(self, expression):
        try:
            value = str(eval(expression, {"__builtins__": {}}))
        except (ZeroDivisionError, SyntaxError, TypeError):
            return ToolResult("exception", observation="Error")
        return ToolResult("ok", stdout=value + "\n", observation=value)


def test_expressions_are_parsed():
    for annotated, expression in [
        *(("48/2", "48/2"), ("$1,200*.5", "1200*.5"), ("50%*80", "(50/100)*80"), ("3 x 4", "3*4")),
        *(("007+10", "7+10"), ("-(2+3)", "-(2+3)"), ("2**9999999", None), ("x", None), ("apples+2", None)),
        *(("print(1)", None), ("1;2", None), ("(1,2)", None), ("'a'*9", None), ("", None)),
    ]:
        assert to_expression(annotated) == expression, annotated


def test_values_agree_to_the_annotated_decimals():
    for printed, annotated, same in [
        *(("24.0", "24", True), ("24.4", "24", False), ("0.3333333333333333", "0.33", True)),
        *(("0.6666666666666666", "0.66", True), ("0.6666666666666666", "0.67", True), ("0.7", "0.67", False)),
        *(("1200", "$1,200", True), ("0.5", "50%", True), ("nothing", "1", False), ("1", "", False)),
    ]:
        assert agrees(printed, annotated) is same, printed


ROWS = [
    ("Q1?", "He sold 48/2 = <<48/2=24>>24 clips.\nThen 48+24 = <<48+24=72>>72 in all.\n#### 72"),
    ("Q2?", "So $<<1,000/3=333.33>>333.33 each.\nRounded: 333.\n#### 333"),
    ("Q3?", "No sums here.\n#### 5"),
    ("Q4?", "It is <<a+b=5>>5.\n#### 5"),
    ("Q5?", "It is <<2+2=5>>5.\n#### 5"),
    ("Q6?", "It is <<2/0=5>>5.\n#### 5"),
    ("Q7?", "It is <<2+2=4>>4."),
]


def write_rows(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return path


def test_problems_become_conversations_that_load_as_traces_and_the_others_are_counted(tmp_path):
    executor = Arithmetic()
    conversion = convert(write_rows(tmp_path / "rows.jsonl"), executor)
    assert executor.codes == ["print(48/2)", "print(48+24)", "print(1000/3)", "print(2+2)", "print(2/0)"]
    assert conversion.refused == dict.fromkeys(
        ("no annotation", "not arithmetic", "another value", "failed call", "no answer"), 1
    )
    assert str(conversion).startswith("2 of 7 problems convert, and their calls give the annotated values")
    messages = [(m["role"], m["content"]) for m in conversion.rows[0]["messages"]]
    assert messages == [
        ("user", "Q1?"),
        ("assistant", "<reason>He sold 48/2 =</reason>"),
        ("tool", "24.0"),
        ("assistant", "<reason>24 clips.\nThen 48+24 =</reason>"),
        ("tool", "72"),
        ("assistant", "<reason>72 in all.\nThe answer is 72.</reason>\n<answer>\\boxed{72}</answer>"),
    ]
    assert convert(tmp_path / "rows.jsonl", executor, limit=1).problems == 1
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversion.rows))
    (first, _), report = load_traces(file)
    assert first.problem.prompt == "Q1?" and not report.bad
    assert first.turns[0].startswith("He sold 48/2 =</reason>\n<tool_call>") and '"print(48/2)"' in first.turns[0]
    assert first.observations == (("24.0",), ("72",)) and first.turns[-1].endswith("<answer>\\boxed{72}</answer>")


@pytest.mark.parametrize(
    ("kind", "roles", "answer", "reward"),
    [("repair", "uatatata", "72", 1.0), ("wrong", "uatata", "73", 0.0), ("guess", "ua", None, 0.0)],
)
def test_traces_of_lower_quality_are_run_too(kind, roles, answer, reward, tmp_path):
    (row,) = convert(write_rows(tmp_path / "rows.jsonl", ROWS[:1]), Arithmetic(), mix=only(kind)).rows
    texts = [message["content"] for message in row["messages"]]
    assert "".join(message["role"][0] for message in row["messages"]) == roles
    assert (row["kind"], row["reward"]) == (kind, reward) and row["answer"] in (answer or row["answer"], answer)
    assert texts[-1].endswith(f"\\boxed{{{row['answer']}}}</answer>")
    if kind == "repair":
        index = texts.index("Error")
        assert texts[index + 1] == "<reason>fix it</reason>" and texts[index + 2] in ("24.0", "72")


def test_the_command_runs_the_real_tool(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl")
    assert main([str(rows), "--out", str(tmp_path / "out.jsonl"), "--limit", "2"]) == 0
    assert "2 of 2 problems convert" in capsys.readouterr().out
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert main([str(rows), "--out", str(rows / "out.jsonl")]) == 2
    assert "gsm8k_traces: --out" in (told := capsys.readouterr()).err and not told.out
    rows.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 has no columns question and answer"):
        convert(rows, Arithmetic())


def test_almost_all_of_gsm8k_converts():
    """With the arithmetic evaluated here; the command of the module does the same with the real tool."""
    if not DATA.is_file():
        pytest.skip("GSM8K is not beside the checkout (../shared/data/gsm8k_train.jsonl)")
    conversion = convert(DATA, Arithmetic())
    print(conversion)
    assert conversion.problems == 7473 and len(conversion.rows) > 7300

"""Annotations of GSM8K as tool calls: parsed, run, checked, and counted by reason."""

import json
from pathlib import Path

import pytest

from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.gsm8k_traces import agrees, convert, main, to_expression
from grpo_roc_jax.types import ToolResult
from tests.helpers.demonstrations import only

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_train.jsonl"


class Arithmetic:
    """An executor that evaluates the print of a call, whose argument was checked to be arithmetic."""

    def __init__(self):
        self.codes = []

    def run(self, calls):
        self.codes += [call.arguments["code"] for call in calls]
        return [self._result(call.arguments["code"].removeprefix("print(").removesuffix(")")) for call in calls]

    def _result(self, expression):
        try:
            value = str(eval(expression, {"__builtins__": {}}))
        except ZeroDivisionError:
            return ToolResult("exception", error_type="ZeroDivisionError")
        return ToolResult("ok", stdout=value + "\n", observation=value)


@pytest.mark.parametrize(
    ("annotated", "expression"),
    [
        ("48/2", "48/2"),
        ("$1,200*.5", "1200*.5"),
        ("50%*80", "(50/100)*80"),
        ("3 x 4", "3*4"),
        ("007+10", "7+10"),
        ("-(2+3)", "-(2+3)"),
        ("2**9999999", None),
        ("x", None),
        ("apples+2", None),
        ("print(1)", None),
        ("1;2", None),
        ("(1,2)", None),
        ("'a'*9", None),
        ("", None),
    ],
)
def test_expressions_are_parsed(annotated, expression):
    assert to_expression(annotated) == expression


@pytest.mark.parametrize(
    ("printed", "annotated", "same"),
    [
        ("24.0", "24", True),
        ("24.4", "24", False),
        ("0.3333333333333333", "0.33", True),
        ("0.6666666666666666", "0.66", True),
        ("0.6666666666666666", "0.67", True),
        ("0.7", "0.67", False),
        ("1200", "$1,200", True),
        ("0.5", "50%", True),
        ("nothing", "1", False),
        ("1", "", False),
    ],
)
def test_values_agree_to_the_annotated_decimals(printed, annotated, same):
    assert agrees(printed, annotated) is same


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
    call = '{"name": "python_code_with_standard_io", "arguments": {"code": "print(48/2)"}}'
    assert first.turns[0] == f"He sold 48/2 =</reason>\n<tool_call>\n{call}\n</tool_call>"
    assert first.observations == (("24.0",), ("72",))
    assert first.turns[-1].endswith("<answer>\\boxed{72}</answer>")


@pytest.mark.parametrize(
    ("kind", "roles", "answer", "reward"),
    [("repair", "uatatata", "72", 1.0), ("wrong", "uatata", "73", 0.0), ("guess", "ua", None, 0.0)],
)
def test_traces_of_lower_quality_are_run_too(kind, roles, answer, reward, tmp_path):
    class Failing(Arithmetic):
        def run(self, calls):
            fails = [not c.arguments["code"].endswith(")") or "prnt" in c.arguments["code"] for c in calls]
            fails = [fail or "''" in c.arguments["code"] for fail, c in zip(fails, calls, strict=True)]
            results = [ToolResult("exception", observation="Error") if fail else None for fail in fails]
            return [result or super(Failing, self).run([call])[0] for result, call in zip(results, calls, strict=True)]

    (row,) = convert(write_rows(tmp_path / "rows.jsonl", ROWS[:1]), Failing(), mix=only(kind)).rows
    texts = [message["content"] for message in row["messages"]]
    assert "".join(message["role"][0] for message in row["messages"]) == roles
    assert (row["kind"], row["reward"]) == (kind, reward) and row["answer"] in (answer or row["answer"], answer)
    assert texts[-1].endswith(f"\\boxed{{{row['answer']}}}</answer>")
    if kind == "repair":
        index = texts.index("Error")
        assert texts[index + 1] == "<reason>fix it</reason>" and texts[index + 2] in ("24.0", "72")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1 has no columns question and answer"):
        convert(tmp_path / "rows.jsonl", Arithmetic())


def test_the_command_runs_the_real_tool(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl")
    assert main([str(rows), "--out", str(tmp_path / "out.jsonl"), "--limit", "2"]) == 0
    assert "2 of 2 problems convert" in capsys.readouterr().out
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert main([str(rows), "--out", str(rows / "out.jsonl")]) == 2
    assert "gsm8k_traces: --out" in (told := capsys.readouterr()).err and not told.out


def test_almost_all_of_gsm8k_converts():
    """With the arithmetic evaluated here; the command of the module does the same with the real tool."""
    if not DATA.is_file():
        pytest.skip("GSM8K is not beside the checkout (../shared/data/gsm8k_train.jsonl)")
    conversion = convert(DATA, Arithmetic())
    print(conversion)
    assert conversion.problems == 7473
    assert len(conversion.rows) > 7300

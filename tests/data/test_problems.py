"""Files to problems: common formats, real data sets, and every kind of bad row."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import grpo_roc_jax.data.problems as problems_module
from grpo_roc_jax.data.problems import answer_text, drop_long, load_problems
from grpo_roc_jax.record import codec
from grpo_roc_jax.types import Problem


def write_lines(path, lines):
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write(path, rows):
    return write_lines(path, [json.dumps(row).encode() for row in rows])


@pytest.fixture
def load(tmp_path):
    """(problems, report) of a file with these rows."""
    return lambda *rows, **settings: load_problems(write(tmp_path / "a.jsonl", rows), **settings)


def asked(questions, answer="1"):
    return [{"question": question, "answer": answer} for question in questions]


def write_table(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


ANSWERS = {b"null": "null", b'" "': "empty", b'{"x": 1}': "dict", b"true": "bool", b"NaN": "nan"}
ANSWERS |= {b'"proof"': "'proof', which stands for a missing answer"}
BAD_LINES = [
    (b'{"question": "q1", "answer": "1"', "invalid JSON"),
    (b'["q", "1"]', "must be a JSON object, not list"),
    *((b'{"answer": "1"}', "column 'question' is missing"), (b'{"question": "q"}', "column 'answer' is missing")),
    *((b'{"question": "q", "answer": %s}' % x, f"column 'answer' is {why}") for x, why in ANSWERS.items()),
    *((b'{"question": %s, "answer": "1"}' % x, "column 'question' is") for x in (b"null", b'"   "', b"5")),
    (b'{"question": [{"role": "assistant", "content": "a"}], "answer": "1"}', "messages of the roles ['assistant']"),
    (b'{"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}', "something other than"),
    *((b'{"question": "\xff", "answer": "1"}', "not UTF-8 at byte 15"), (b"[" * 100_000, "nested too deep")),
    (b'{"question": "good 0", "answer": "77"}', "asks what row 1 asks, with another answer"),
    *((b'{"question": "q", "%s": ["a"]}' % name, f"{name.decode()!r} is filled") for name in (b"images", b"audio")),
    *((b'{"question": "%s How", "answer": "1"}' % x, "stands for media") for x in (b"<image>", b"![](figure.png)")),
]
SOLUTIONS = [
    *(("thus \\boxed{\\frac{1}{2}} and \\boxed{3}", "3"), ("so $\\boxed 2$.", "2"), ("it is \\fbox{7}.", "7")),
    *(("so $\\boxed 12$ and that is all there is to say", "12"), ("we get \\boxed 12 apples, which cost $5", "12")),
    *(("so $x=\\boxed{1}$, no: \\(\\boxed \\frac12\\)", "\\frac12"), ("it is \\boxed\\frac{1}{2}.", "\\frac{1}{2}")),
    *(("it is \\boxed\\sqrt2, so", "\\sqrt2"), ("\\begin{align*}x&=\\boxed\\frac12\\end{align*}", "\\frac12")),
    *(("\\boxedminipage{x} \\boxed{4}", "4"), ("$$x=\\boxed 2 \\text{ cm}$$ and so on", "2 \\text{ cm}")),
    *(("\\boxed{x \\} y}", "x \\} y"), ("$\\boxed{\\left\\{x\\right.}$", "\\left\\{x\\right.")),
]
GRIDS, BOXES = json.dumps({"inputs": ["3 3\n"], "outputs": ["####\n#..#\nYES"]}), json.dumps(["\\boxed{3}" * 40])
VALUES = {
    **{"so 2+2\n#### 1,234": "1234", "#### -5": "-5", 27.0: "27", 0.5: "0.5", Decimal("2.00"): "2", " +7\n": "+7"},
    **{Decimal("0.10"): "0.1", 10**30: str(10**30), "#### 100,200": "100200", "####5 \n\n": "5"},
    **{text: text for text in ("1,2", "025", "so #### 5", "so\n#### 5\nor more", "###### heading", "--5")},
    **{"a\n####  ## b": "a\n####  ## b", "#### The answer: \\boxed{4}": "4"},
}
ASKED = [{"role": "user", "content": "1+1?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
RULE = {"style": "rule", "ground_truth": "2"}
VERL = {"data_source": "sums", "prompt": ASKED, "ability": "math", "reward_model": RULE, "extra_info": {"index": 7}}
SKYRL = {"data_source": "sums", "prompt": ASKED, "env_class": "x", "reward_spec": RULE | {"method": "rule"}}
SHAPES = {
    "TRL": ({"prompt": "1+1?", "solution": "\\boxed{2}"}, "prompt", "solution"),
    "TRL parts": ({"prompt": PARTS, "answer": "2"}, "prompt", "answer"),
    "verl": (VERL, "prompt", "reward_model.ground_truth"),
    "SkyRL": (SKYRL, "prompt", "reward_spec.ground_truth"),
    "GSM8K": ({"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}, "question", "answer"),
    "AIME": ({"id": 60, "problem": "1+1?", "answer": 2, "solution": "long", "url": "u"}, "problem", "answer"),
    "capital solution": ({"Problem": "1+1?", "Solution": "It is $\\boxed{2}$."}, "Problem", "Solution"),
    "classes": ({"problem": "1+1?", "target": "x", "label": 1, "solution": "\\boxed{2}"}, "problem", "solution"),
    "Alpaca": ({"instruction": "1+1?", "input": "", "output": "2"}, "instruction + input", "output"),
    "empty columns": ({"prompt": " ", "question": "1+1?", "final_answer": "", "answer": "2"}, "question", "answer"),
}
"""Name -> a row of this shape, and the columns of the question and of the answer."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_common_formats_load_without_settings(tmp_path, shape, suffix):
    """Also from tables that hold messages and objects as JSON text."""
    shaped, *columns = SHAPES[shape]
    as_text = {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in shaped.items()}
    for row in (shaped, as_text):
        if suffix == ".jsonl":
            path = write(tmp_path / "train.jsonl", [row])
        else:
            path = write_table(tmp_path / "train.parquet", **{key: [value] for key, value in row.items()})
        (problem,), report = load_problems(path)
        assert (problem.prompt, problem.answer, problem.source) == ("1+1?", "2", row.get("data_source", "train"))
        assert [report.prompt_column, report.answer_column] == columns
        assert "question from {!r}, answer from {!r}".format(*columns) in str(report)
        assert (report.rows, report.problems, report.bad, report.duplicates) == (1, 1, (), 0)
        extras = {"verl": {"ability", "reward_model", "extra_info"}, "AIME": {"id", "solution", "url"}}
        assert set(problem.extra) == extras.get(shape, set(problem.extra))


def test_only_used_values_leave_the_further_columns_and_an_instruction_and_its_input_are_one_question(load):
    """Also of a nested column; also where most inputs are empty, and the first ones are. Uids survive another order."""
    row = {"prompt": ASKED, "reward_model": {"ground_truth": "2", "style": "rule"}, "ask": {"text": {"q": "no"}}}
    assert load(row)[0][0].extra == {"reward_model": {"style": "rule"}, "ask": {"text": {"q": "no"}}}
    (problem,), _ = load(row | {"a": ["3"]}, prompt_column="ask.text.q", answer_column="a")
    assert problem.extra == {"prompt": ASKED, "reward_model": row["reward_model"]}
    assert (problem.prompt, problem.answer) == ("no", "3"), "columns can be named"
    rows = [{"instruction": f"Add {i}.", "input": "1+1" if i > 2 else "", "output": "2"} for i in range(5)]
    rows += [{"instruction": None, "input": "1+3", "output": "4"}, {"output": "5"}]
    problems, report = load(*rows)
    assert [p.prompt for p in problems] == ["Add 0.", "Add 1.", "Add 2.", "Add 3.\n\n1+1", "Add 4.\n\n1+1", "1+3"]
    assert [bad.reason for bad in report.bad] == ["column 'instruction' is missing"]
    assert not any(problem.extra for problem in problems)
    rows = [row | {"id": "same"} for row in asked(f"q{i}" for i in range(20))]
    uids, reordered = ([problem.uid for problem in load(*some)[0]] for some in (rows, rows[::-1]))
    assert len(set(uids)) == 20 and uids == reordered[::-1]


def test_columns_of_every_type_of_parquet_can_be_read_and_recorded(tmp_path):
    day = datetime.datetime(2024, 1, 2, 3, 4, 5)
    columns = {
        **{"created_at": [day], "day": [day.date()], "price": [Decimal("1.10")], "score": [0.5]},
        **{"took": [datetime.timedelta(seconds=90)], "nested": [{"at": [day], "raw": b"x"}], "question": ["1+1?"]},
    }
    halves = pyarrow.array(np.array([1.1], "float16"))
    for answer, text in ((pyarrow.array([Decimal("2.50")], pyarrow.decimal128(10, 2)), "2.5"), (halves, "1.1")):
        (problem,), _ = load_problems(write_table(tmp_path / "x.parquet", **columns, answer=answer))
        assert problem.answer == text
    texts = {"created_at": "2024-01-02T03:04:05", "day": "2024-01-02", "price": "1.10", "took": "0:01:30"}
    assert problem.extra == texts | {"nested": {"at": ["2024-01-02T03:04:05"], "raw": b"x"}, "score": 0.5}
    assert codec.unpack(Problem, json.loads(json.dumps(codec.pack(problem)))) == problem


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_row_is_named_by_file_and_row(tmp_path, line, reason):
    good = [b'{"question": "good %d", "answer": "1"}' % i for i in range(3)]
    path = write_lines(tmp_path / "a.jsonl", [good[0], line, *good[1:]])
    problems, report = load_problems(path)
    assert [problem.prompt for problem in problems] == ["good 0", "good 1", "good 2"]
    assert [(bad.file, bad.row) for bad in report.bad] == [(str(path), 2)] and reason in report.bad[0].reason
    assert f"{path}:2: " in str(report)
    with pytest.raises(ValueError, match=r":2: (.|\n)*set data.bad_rows to drop"):
        load_problems(path, bad_rows="fail")


def test_counts_add_up(tmp_path):
    good = [b'{"question": "good %d", "answer": "1"}' % i for i in range(40)]
    lines = [*good, good[3], b"", b"   ", good[4], *(line for line, _ in BAD_LINES)]
    problems, report = load_problems(write_lines(tmp_path / "a.jsonl", lines))
    assert (len(problems), report.duplicates, len(report.bad)) == (40, 2, len(BAD_LINES))
    assert report.rows == report.problems + report.duplicates + len(report.bad)
    assert report.bad[0].row == 45, "blank lines count as lines of the file"
    _, report = load_problems(write_lines(tmp_path / "b.jsonl", [good[0], *[b"{"] * 100]))
    assert len(report.bad) == 100 and "... and 80 more" in str(report), "all are counted and some shown"


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    rows = [{"problem": "1+1?", "answer": 2}, ["no object"], {"problem": "2+2?", "answer": 4}]
    file = tmp_path / "x.json"
    file.write_text("\ufeff\n" + json.dumps(rows, indent=2).replace("\n", "\r\n"), encoding="utf-8")
    problems, report = load_problems(file)
    assert [(p.prompt, p.answer) for p in problems] == [("1+1?", "2"), ("2+2?", "4")]
    assert [str(bad) for bad in report.bad] == [f"{file}:2: must be a JSON object, not list"]
    write(file, [rows[0], rows[2]])
    assert load_problems(file)[0] == problems


def test_an_endless_line_is_skipped_without_holding_it(tmp_path, monkeypatch):
    monkeypatch.setattr(problems_module, "MAX_ROW_BYTES", 1000)
    good = b'{"question": "q%d", "answer": "1"}'
    path = write_lines(tmp_path / "a.jsonl", [good % 1, b"x" * 5555, good % 2, b"y" * 999, good % 3, b"z" * 1000])
    problems, report = load_problems(path)
    assert [problem.prompt for problem in problems] == ["q1", "q2", "q3"]
    assert [bad.row for bad in report.bad] == [2, 4, 6] and "longer than" in report.bad[0].reason


def test_answers_as_text():
    for text in ("####\n#..#\n####", GRIDS, BOXES, "x = \\boxed{\\frac{1}{2}}"):
        assert answer_text(text, "reward_model.ground_truth") == text
    for name, pairs in (("answer", VALUES.items()), ("solution", SOLUTIONS)):
        assert [answer_text(value, name) for value, _ in pairs] == [text for _, text in pairs]
    with pytest.raises(problems_module.UnusableRow, match="boxed that cannot be read"):
        answer_text("thus \\boxed{1", "solution")


def test_what_would_mislead_training_is_named(load):
    """Columns that a question may need, questions that ask for a form of their own, references of many words."""
    forms = ['output the answer after "####".', "The last line of your response should be of the form Answer: $Answer."]
    forms += ["Put your final answer within \\boxed{}.", "Return it in <answer> tags.", "write it after 'Answer:'."]
    forms += ["What does #### mean?", "1+3?", "Is 1 < x > 0 an image of f(x)?"]
    _, report = load(*asked([f"{i}+1? {text}" for i, text in enumerate(forms)], "2"))
    assert report.own_form == tuple(range(1, 6)) and "5 rows ask for a form of the answer of their own" in str(report)
    texts = ("First we see that. " * 30, "We add one and one and get two.", "2", "\\frac{\\sqrt{3}}{2}", "on Tuesday")
    _, report = load(*({"question": f"{i}?", "solution": text} for i, text in enumerate(texts)))
    assert report.long_answers == (1, 2) and "2 rows have a reference of more than 200 characters" in str(report)
    first, second = asked(["one plus 1? A two B 2", "1+1?"], "2")
    _, report = load(first | {"Options": {"label": ["A", "B"], "text": ["3", "4"]}}, second)
    assert "columns that are not part of the prompt: 'Options' (1 rows)" in str(report)
    assert not load(first | {"choices": [], "context": "", "options": ["two", "2"]}, second)[1].beside_prompt


def test_files_without_problems_are_refused_with_the_reason(tmp_path):
    for path, message in (
        (tmp_path / "missing.jsonl", "no such file"),
        (write(tmp_path / "a.csv", []), r"cannot read '.csv' files; must be .jsonl, .json or .parquet"),
        (write(tmp_path / "empty.jsonl", []), "no usable row among the first 0"),
        (write_lines(tmp_path / "bad.jsonl", [b"{", b"}"]), r"bad.jsonl:1: invalid JSON"),
        (write(tmp_path / "none.jsonl", asked("q", None)), "set data.ans"),
        (write(tmp_path / "blank.jsonl", asked("q", " ")), "no row of"),
        (write(tmp_path / "a.jsonl", [{"foo": "1+1?", "b": "2"}]), r"columns \(b, foo\).*set data.prompt_col"),
    ):
        with pytest.raises(ValueError, match=message):
            load_problems(path)


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = write_table(tmp_path / "a.parquet", question=["q"], answer=["1"])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
        load_problems(path)


def test_long_prompts_are_listed_and_dropped_never_cut(load):
    problems, _ = load(*asked("x" * n for n in (10, 200, 30)))
    kept, dropped = drop_long(problems, lambda problem: 9 + len(problem.prompt), 39)
    assert [len(problem.prompt) for problem in kept] == [10, 30], "a prompt of exactly the limit is kept"
    assert "max_prompt_tokens = 39: 1 over-long prompts dropped, 2 problems left; raise it to" in dropped[0]
    assert dropped[1:] == [f"{problems[1].uid}: prompt of 209 tokens, at most 39 fit; dropped"]

"""Files to problems: common formats, real data sets, and every kind of bad row."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import grpo_roc_jax.data.problems as problems_module
from grpo_roc_jax.data.problems import answer_text, drop_long, last_boxed, load_problems
from grpo_roc_jax.record import codec
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import ByteTokenizer
from grpo_roc_jax.types import Problem


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def load(tmp_path):
    """(problems, report) of a file with these rows."""
    return lambda *rows, **settings: load_problems(write(tmp_path / "a.jsonl", rows), **settings)


def asked(questions, answer="1"):
    return [{"question": question, "answer": answer} for question in questions]


def write_table(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


ASKED = [{"role": "user", "content": "1+1?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
RULE = {"style": "rule", "ground_truth": "2"}
VERL = {"data_source": "sums", "prompt": ASKED, "ability": "math", "reward_model": RULE, "extra_info": {"index": 7}}
SKYRL = {"data_source": "sums", "prompt": ASKED, "env_class": "x", "reward_spec": RULE | {"method": "rule"}}
SHAPES = {
    "TRL": ({"prompt": "1+1?", "solution": "\\boxed{2}"}, "prompt", "solution"),
    "TRL messages": ({"prompt": ASKED, "answer": "2"}, "prompt", "answer"),
    "TRL parts": ({"prompt": PARTS, "answer": "2"}, "prompt", "answer"),
    "verl": (VERL, "prompt", "reward_model.ground_truth"),
    "SkyRL": (SKYRL, "prompt", "reward_spec.ground_truth"),
    "verifiers": ({"question": "1+1?", "answer": "2", "info": {}, "task": "t"}, "question", "answer"),
    "GSM8K": ({"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}, "question", "answer"),
    "MATH": ({"problem": "1+1?", "solution": "It is $\\boxed{2}$.", "level": "1"}, "problem", "solution"),
    "AIME": ({"id": 60, "problem": "1+1?", "answer": 2, "solution": "long", "url": "u"}, "problem", "answer"),
    "capitals": ({"ID": 60, "Problem": "1+1?", "Answer": 2}, "Problem", "Answer"),
    "capital solution": ({"Problem": "1+1?", "Solution": "It is $\\boxed{2}$."}, "Problem", "Solution"),
    "classes": ({"problem": "1+1?", "target": "x", "label": 1, "solution": "\\boxed{2}"}, "problem", "solution"),
    "Alpaca": ({"instruction": "1+1?", "input": "", "output": "2"}, "instruction + input", "output"),
    "empty columns": ({"prompt": " ", "question": "1+1?", "final_answer": "", "answer": "2"}, "question", "answer"),
}
"""Name -> a row of this shape, and the columns of the question and of the answer."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("nested", [True, False], ids=["", "as text"])
def test_common_formats_load_without_settings(tmp_path, shape, suffix, nested):
    """Also from tables that hold messages and objects as JSON text."""
    row, prompt_column, answer_column = SHAPES[shape]
    if not nested:
        row = {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in row.items()}
    path = tmp_path / f"train{suffix}"
    if suffix == ".jsonl":
        write(path, [row])
    else:
        write_table(path, **{key: [value] for key, value in row.items() if value != {}})
    (problem,), report = load_problems(path)
    assert (problem.prompt, problem.answer) == ("1+1?", "2")
    assert problem.source == row.get("data_source", "train")
    assert (report.prompt_column, report.answer_column) == (prompt_column, answer_column)
    assert f"question from {prompt_column!r}, answer from {answer_column!r}" in str(report)
    assert (report.rows, report.problems, report.bad, report.duplicates) == (1, 1, (), 0)
    extras = {"verl": {"ability", "reward_model", "extra_info"}, "AIME": {"id", "solution", "url"}}
    assert set(problem.extra) == extras.get(shape, set(problem.extra))


@pytest.mark.parametrize("read", [lambda value: value, json.dumps], ids=["", "as text"])
def test_of_a_nested_column_only_the_used_value_leaves_the_further_columns(load, read):
    row = {"prompt": ASKED, "reward_model": read({"ground_truth": "2", "style": "rule"}), "ask": {"text": {"q": "no"}}}
    assert load(row)[0][0].extra == {"reward_model": read({"style": "rule"}), "ask": {"text": {"q": "no"}}}
    (problem,), _ = load(row | {"a": ["3"]}, prompt_column="ask.text.q", answer_column="a")
    assert problem.extra == {"prompt": ASKED, "reward_model": row["reward_model"]}
    assert (problem.prompt, problem.answer) == ("no", "3"), "columns can be named"


def test_an_instruction_and_its_input_are_one_question(load):
    """Also where most inputs are empty, and the first ones are."""
    rows = [{"instruction": f"Add {i}.", "input": "1+1" if i > 2 else "", "output": "2"} for i in range(5)]
    rows += [{"instruction": None, "input": "1+3", "output": "4"}, {"output": "5"}]
    problems, report = load(*rows)
    assert [p.prompt for p in problems] == ["Add 0.", "Add 1.", "Add 2.", "Add 3.\n\n1+1", "Add 4.\n\n1+1", "1+3"]
    assert [bad.reason for bad in report.bad] == ["column 'instruction' is missing"]
    assert not any(problem.extra for problem in problems)
    with pytest.raises(ValueError, match=r"column 'input' is empty"):
        load(*rows, prompt_column="input", bad_rows="fail")


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"choices": ["3", "4"]}, "'choices' (1 rows)"),
        ({"Options": {"label": ["A", "B"], "text": ["3", "4"]}}, "'Options' (1 rows)"),
        ({"article": "There were 7.", "context": {"title": ["Seven"], "sentences": [["It is 7."]]}}, "'article' (1"),
        ({"passage": "There were 7."}, "'passage' (1 rows)"),
        ({"Body": "Ann had 7."}, "'Body' (1 rows)"),
        ({"choices": [], "context": "", "passage": None, "options": ["two", "2"]}, ""),
    ],
)
def test_columns_that_a_question_may_need_are_named(load, columns, named):
    first, second = asked(["one plus 1? A two B 2", "1+1?"], "2")
    _, report = load(first | columns, second)
    assert (f"columns that are not part of the prompt: {named}" in str(report)) == bool(named)
    assert bool(report.beside_prompt) == bool(named)


def test_columns_of_every_type_of_parquet_can_be_recorded(tmp_path):
    day = datetime.datetime(2024, 1, 2, 3, 4, 5)
    columns = {
        "question": ["1+1?"],
        "answer": pyarrow.array([Decimal("2.50")], pyarrow.decimal128(10, 2)),
        "created_at": [day],
        "day": [day.date()],
        "price": [Decimal("1.10")],
        "took": [datetime.timedelta(seconds=90)],
        "nested": [{"at": [day], "raw": b"x"}],
        "score": [0.5],
    }
    (problem,), _ = load_problems(write_table(tmp_path / "x.parquet", **columns))
    assert problem.answer == "2.5"
    texts = {"created_at": "2024-01-02T03:04:05", "day": "2024-01-02", "price": "1.10", "took": "0:01:30"}
    assert problem.extra == texts | {"nested": {"at": ["2024-01-02T03:04:05"], "raw": b"x"}, "score": 0.5}
    assert codec.unpack(Problem, json.loads(json.dumps(codec.pack(problem)))) == problem


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_any_width_are_references_with_their_own_digits(tmp_path, kind):
    values = [1.1, 0.1, 2.0, 1234.5, None]
    column = pyarrow.array(np.array([value or 0 for value in values], kind), mask=np.array([v is None for v in values]))
    path = write_table(tmp_path / "a.parquet", question=[f"q{i}" for i in range(5)], answer=column)
    problems, report = load_problems(path)
    expected = ["1.1", "0.1", "2", "1234"] if kind == "float16" else ["1.1", "0.1", "2", "1234.5"]
    assert [problem.answer for problem in problems] == expected and len(report.bad) == 1


MEDIA = ("images", "image", "videos", "audio")
PICTURES = ("<image> How", "How many in <image_2>?", "<|image_pad|> How", "![](figure.png) How", '<img src="a"> How')
BAD_LINES = [
    (b'{"question": "q1", "answer": "1"', "invalid JSON"),
    (b'["q", "1"]', "must be a JSON object, not list"),
    (b'{"answer": "1"}', "column 'question' is missing"),
    (b'{"question": "q"}', "column 'answer' is missing"),
    *(
        (b'{"question": "q", "answer": %s}' % value, f"column 'answer' is {reason}")
        for value, reason in (
            *((b"null", "null"), (b'" "', "empty"), (b'{"x": 1}', "dict"), (b"true", "bool"), (b"NaN", "nan")),
            *((b'"%s"' % x, f"{x.decode()!r}, which stands for a missing answer") for x in (b"proof", b"notfound")),
        )
    ),
    *(
        (b'{"question": %s, "answer": "1"}' % value, f"column 'question' is {reason}")
        for value, reason in ((b"null", "null"), (b'"   "', "empty"), (b"5", "int"))
    ),
    (b'{"question": [{"role": "assistant", "content": "a"}], "answer": "1"}', "messages of the roles ['assistant']"),
    (b'{"question": [{"role": ["x"], "content": "a"}], "answer": "1"}', "messages of the roles [['x']]"),
    (b'{"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}', "something other than"),
    (b'{"question": "\xff", "answer": "1"}', "not UTF-8 at byte 15"),
    (b"[" * 100_000, "nested too deep"),
    (b'{"question": "good 0", "answer": "77"}', "asks what row 1 asks, with another answer"),
    *((b'{"question": "q", "%s": ["a.png"]}' % name.encode(), f"column {name!r} is filled") for name in MEDIA),
    *((json.dumps({"question": text, "answer": "1"}).encode(), "stands for media") for text in PICTURES),
]


def write_lines(path, lines):
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


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
    """Also where the last line does not end."""
    rows = b'{"question": "q1", "answer": "1"}\r\n{"question": "q2", "answer": "2"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + rows)
    problems, report = load_problems(tmp_path / "a.jsonl")
    assert [(p.prompt, p.answer) for p in problems] == [("q1", "1"), ("q2", "2")] and report.bad == ()


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_be_one_array(tmp_path, indent):
    """As many data sets are published; one with an object a line keeps its row numbers."""
    rows = [{"problem": "1+1?", "answer": 2}, ["no object"], {"problem": "2+2?", "answer": 4}]
    file = tmp_path / "x.json"
    file.write_text("\ufeff\n" + json.dumps(rows, indent=indent), encoding="utf-8")
    problems, report = load_problems(file)
    assert [(p.prompt, p.answer) for p in problems] == [("1+1?", "2"), ("2+2?", "4")]
    assert [str(bad) for bad in report.bad] == [f"{file}:2: must be a JSON object, not list"]
    write(file, [rows[0], rows[2]])
    assert load_problems(file)[0] == problems
    file.write_text(json.dumps(rows)[:-1])
    with pytest.raises(ValueError, match="is not JSON"):
        load_problems(file)


def test_an_endless_line_is_skipped_without_holding_it(tmp_path, monkeypatch):
    monkeypatch.setattr(problems_module, "MAX_ROW_BYTES", 1000)
    good = b'{"question": "q%d", "answer": "1"}'
    path = write_lines(tmp_path / "a.jsonl", [good % 1, b"x" * 5555, good % 2, b"y" * 999, good % 3, b"z" * 1000])
    problems, report = load_problems(path)
    assert [problem.prompt for problem in problems] == ["q1", "q2", "q3"]
    assert [bad.row for bad in report.bad] == [2, 4, 6]
    assert "longer than" in report.bad[0].reason


def test_uids_are_unique_and_survive_reordering(load):
    rows = [row | {"id": "same"} for row in asked(f"q{i}" for i in range(20))]
    uids, reordered = ([problem.uid for problem in load(*some)[0]] for some in (rows, rows[::-1]))
    assert len(set(uids)) == 20 and uids == reordered[::-1]


def test_own_system_texts_are_counted(load):
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "answer": "1"}
    (problem,), report = load(row)
    assert (problem.prompt, report.own_system) == ("q", 1) and "text.system is used instead" in str(report)


SOLUTIONS = [
    *(("thus \\boxed{\\frac{1}{2}} and \\boxed{3}", "3"), ("so $\\boxed 2$.", "2"), ("it is \\fbox{7}.", "7")),
    *(("so $\\boxed 12$ and that is all there is to say", "12"), ("we get \\boxed 12 apples, which cost $5", "12")),
    *(("so $x=\\boxed{1}$, no: \\(\\boxed \\frac12\\)", "\\frac12"), ("it is \\boxed\\frac{1}{2}.", "\\frac{1}{2}")),
    *(("it is \\boxed\\frac12.", "\\frac12"), ("$$\\boxed\\dfrac12$$", "\\dfrac12")),
    *(("it is \\boxed\\sqrt2, so", "\\sqrt2"), ("\\begin{align*}x&=\\boxed\\frac12\\end{align*}", "\\frac12")),
    *(("\\boxedminipage{x} \\boxed{4}", "4"), ("$$x=\\boxed 2 \\text{ cm}$$ and so on", "2 \\text{ cm}")),
    *(("\\boxed{x \\} y}", "x \\} y"), ("$\\boxed{\\left\\{x\\right.}$", "\\left\\{x\\right.")),
]
GRIDS = json.dumps({"inputs": ["3 3\n"], "outputs": ["####\n#..#\n####\nYES"]})
BOXES = json.dumps(["\\boxed{3}" * 40])


SAME = [
    *("1,2", "12,34", "025", "0101", "100,200", "so #### 5", "so\n#### 5\nor more", "###### heading", "--5"),
    *("\\frac{1}{2}", "a\n####  ## b"),
]


VALUES = [
    *(("so 2+2\n#### 1,234", "1234"), ("#### -5", "-5"), (27.0, "27"), (0.5, "0.5"), (Decimal("2.00"), "2")),
    *((Decimal("0.10"), "0.1"), (10**30, str(10**30)), (" +7\n", "+7"), ("#### 100,200", "100200")),
    *(("####5 \n\n", "5"), (["7"], "7"), ("#### The answer: \\boxed{4}", "4")),
]
TRUTHS = ("####\n#..#\n####", GRIDS, BOXES, "x = \\boxed{\\frac{1}{2}}")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(("answer", *pair) for pair in (*VALUES, *zip(SAME, SAME, strict=True))),
        *(("solution", *pair) for pair in SOLUTIONS),
        *(("reward_model.ground_truth", text, text) for text in TRUTHS),
    ],
)
def test_answers_as_text(name, value, text):
    assert answer_text(value, name) == text


@pytest.mark.parametrize("text", ["thus \\boxed{1", "thus $\\boxed$", "\\boxed{{2}"])
def test_a_box_that_cannot_be_read_is_no_reference(text):
    with pytest.raises(problems_module.UnusableRow, match="boxed that cannot be read"):
        answer_text(text, "solution")


def test_rows_that_only_look_as_if_they_had_other_media_are_read(load):
    rows = asked(["q1", "q2", "Is 1 < x > 0 an image of f(x)?"])
    problems, report = load(rows[0] | {"images": []}, rows[1] | {"image": None}, rows[2])
    assert len(problems) == 3 and not report.bad
    (entry,), _ = load({"image": "a cat", "answer": "1"}, prompt_column="image")
    assert entry.prompt == "a cat"


FORMS = [
    'Let\'s think step by step and output the final answer after "####".',
    "Let's think step by step and output the final answer within \\boxed{}.",
    "The last line of your response should be of the form Answer: $Answer.",
    *("Put your final answer within \\boxed{}.", "Return it in <answer> tags.", "write the answer after 'Answer:'."),
    'End with "The final answer is: ".',
]
"""`text.instruction` would stand beside them; the first is verl's."""


def test_questions_that_ask_for_a_form_of_their_own_are_named(load):
    plain = ("What does #### mean?", "1+3?", "Give the answer: 1+2?")
    rows = asked([f"{i}+1? {text}" for i, text in enumerate([*FORMS, *plain])], "2")
    _, report = load(*rows)
    assert report.own_form == tuple(range(1, 8))
    assert "7 rows ask for a form of the answer of their own" in str(report) and "(rows 1, 2, 3" in str(report)
    assert "ask for a form" not in str(load(*rows[7:])[1])


def test_references_that_no_answer_will_equal_are_named(load):
    long = ("First we see that. " * 30, "We add one and one and get two.", "1+1 #### 2")
    solutions = (*long, "2", "\\frac{\\sqrt{3}}{2}", "Tuesday morning")
    problems, report = load(*({"question": f"{i}?", "solution": text} for i, text in enumerate(solutions)))
    assert len(problems) == 6 and report.long_answers == (1, 2, 3)
    assert "3 rows have a reference of more than 200 characters" in str(report) and "(rows 1, 2, 3)" in str(report)


def test_last_boxed_balances_braces():
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{a}{b}} end") == "\\frac{a}{b}"
    assert last_boxed("\\boxed{1") == "\\boxed{1"
    assert last_boxed("none") == "none"
    assert last_boxed("\\boxedminipage " * 50_000 + "\\boxed{3}" * 5_000) == "3", "without recursion"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "missing.jsonl", "no such file"),
        (lambda d: write(d / "a.csv", []), r"cannot read '.csv' files; must be .jsonl, .json or .parquet"),
        (lambda d: write(d / "empty.jsonl", []), "no usable row among the first 0"),
        (lambda d: write_lines(d / "bad.jsonl", [b"{", b"}"]), r"bad.jsonl:1: invalid JSON"),
        (lambda d: write(d / "null.jsonl", asked("q", None)), "set data.answer_column"),
        (lambda d: write(d / "blank.jsonl", asked("q", " ")), "no row of the file can be used"),
        (
            lambda d: write(d / "a.jsonl", [{"foo": "1+1?", "b": "2"}]),
            r"columns \(b, foo\).*set data.prompt_col",
        ),
    ],
)
def test_files_without_problems_are_refused_with_the_reason(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        load_problems(make(tmp_path))


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_table(path, question=[f"q{i}" for i in range(5000)], answer=["1"] * 5000)
    assert len(load_problems(path)[0]) == 5000
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
        load_problems(path)


def test_long_prompts_are_listed_and_dropped_never_cut(load):
    problems, _ = load(*asked("x" * n for n in (10, 200, 30)))
    chat = make_chat(TextConfig(tokenizer="bytes"), ByteTokenizer())

    def length(problem):
        return len(chat.prompt_ids(problem))

    limit = length(problems[2])
    kept, dropped = drop_long(problems, length, limit)
    assert [len(problem.prompt) for problem in kept] == [10, 30], "a prompt of exactly the limit is kept"
    assert f"max_prompt_tokens = {limit}: 1 over-long prompts dropped, 2 problems left; raise it to" in dropped[0]
    assert dropped[1:] == [f"{problems[1].uid}: prompt of {limit + 170} tokens, at most {limit} fit; dropped"]


@pytest.mark.parametrize("prompt", ["[1, 2]", '[{"x": 1}]', "[", '[{"role"', "{1, 2} or {3}?", "[[" * 5000])
def test_a_question_in_brackets_is_no_conversation(load, prompt):
    assert load({"prompt": prompt, "answer": "2"})[0][0].prompt == prompt

"""The builder of word problems: expressions, other numbers, the split, and files that the recipe reads."""

import json

import pytest

from examples import build_words
from examples.build_words import bare, infix, plain, read_problems
from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.tokenizer import load_tokenizer

TABLE = """Question,Numbers,Equation,Answer
"Bryan has number0 books on each of number1 shelves . How many books ?",56.0 9.0,* number0 number1,504.0
"Conner has number0 dollars and spends number1 in each of number2 months . How many are left ?",250.0 15.0 8.0,- number0 * number1 number2,130.0
"A rope of number0 m is cut into number1 . How long is one ?",2.5 2.0,/ number0 number1,1.25
"Nobody has number0 and owes number1 . How much ?",1.0 5.0,- number0 number1,-4.0
"The answer of this one is that of another : number0 and number1 ?",1.0 5.0,+ number0 number1,7.0
"""  # noqa: E501
SVAMP = [
    {"Body": "Ann had 4 pens. She lost 3", "Question": "How many are left?", "Equation": "( 4.0 - 3.0 )", "Answer": 1.0}
]


def test_prefix_becomes_infix_and_only_brackets_that_enclose_all_of_it_are_left_out():
    prefix = {"* 9 56": "9*56", "- 250 * 15 8": "250-(15*8)", "/ + 1.50 2 3.0": "(1.5+2)/3", "7.0": "7"}
    assert {words: bare(infix(iter(words.split()))) for words in prefix} == prefix
    whole = {"( 4.0 - 3.0 )": "4-3", "(3.0+4.0)*(2.0-1.0)": "(3+4)*(2-1)", "((1.0+2.0)*3.0)": "(1+2)*3"}
    whole |= {"(1,000.0+2.0": "(1000+2", "12345678901+1": "12345678901+1"}
    assert {words: bare(words) for words in whole} == whole


def test_numbers_are_written_in_digits():
    texts = {"56.0": "56", "1,000": "1000", "12345678901": "12345678901", 12345678901.5: "12345678901.5", -0.0: "0"}
    texts |= {"-0.0": "0", 0.1 + 0.2: "0.3", "0.16666666666666666": "0.1666666667", 1e-5: "0.00001"}
    assert {value: plain(value) for value in texts} == texts


HEAD, *LINES = TABLE.splitlines()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", [HEAD, LINES[0], LINES[0].replace("number0 number1,", "number0 number7,")], "row 2: number7 has no"),
        ("t.csv", [HEAD, "What is number0 ?,1.0,+ number0,1.0"], "row 1: the equation lacks an operand"),
        ("t.csv", [HEAD, "What is number0 ?,one,number0,1.0"], "row 1: could not convert string to float: 'one'"),
        ("t.csv", ["Question,Answer", "What ?,1"], "row 1: no column 'Numbers'"),
        ("t.json", ['[{"Body": "Ann"}]'], "row 1: no column 'Question'"),
        ("t.jsonl", ["", "{"], "row 2: invalid JSON"),
    ],
)
def test_a_row_of_another_form_is_named(name, content, message, tmp_path, capsys):
    (tmp_path / name).write_text("\n".join(content))
    words = ["--train", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert build_words.main([*words, "--vocab_size", "0"]) == 2
    assert f"no problems can be read: {tmp_path / name}, {message}" in capsys.readouterr().err


def test_rows_become_problems_with_one_annotation(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    (tmp_path / "SVAMP.json").write_text(json.dumps(SVAMP))
    rows = [problem.row for _, problem in read_problems(tmp_path / "t.csv")]
    assert rows[0] == {
        "question": "Bryan has 56 books on each of 9 shelves . How many books ?",
        "answer": "<<56*9=504>>\n#### 504",
    }
    assert [row["answer"].split("\n")[0] for row in rows[1:]] == ["<<250-(15*8)=130>>", "<<2.5/2=1.25>>"]
    ((text, problem),) = read_problems(tmp_path / "SVAMP.json")
    assert problem.question == "Ann had 4 pens. She lost 3, How many are left?"
    assert (problem.expression, problem.answer) == ("4-3", "1") and "4" not in text
    row = {"question": "2 pens and 3 pens?", "answer": "It is <<2+3=5>>5.\n#### 5"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row) + "\n")
    ((text, problem),) = read_problems(tmp_path / "gsm8k.jsonl")
    assert problem.row == row and text == " pens and  pens?"


def test_copies_have_other_numbers_of_as_many_digits_and_whole_answers(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    texts = [problem.row for _, problem in read_problems(tmp_path / "t.csv", copies=3)]
    books = [row for row in texts if row["question"].startswith("Bryan")]
    assert len({row["question"] for row in books}) == 4
    for row in books:
        first, second = row["answer"].split("=")[0].removeprefix("<<").split("*")
        assert (len(first), len(second)) == (2, 1) and row["answer"].endswith(f"#### {int(first) * int(second)}")
    assert list(read_problems(tmp_path / "t.csv", 3)) == list(read_problems(tmp_path / "t.csv", 3))


def test_no_file_is_written_over_another(tmp_path, capsys):
    row = {"question": "What is 1 + 1?", "answer": "<<1+1=2>>#### 2"}
    files = [tmp_path / name for name in ("a/train.jsonl", "a/dev.jsonl", "b/train.jsonl", "b/dev.jsonl")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("\ufeff" + json.dumps(row) + "\n", encoding="utf-8")
    before = [file.read_bytes() for file in files]
    first, *_ = names = [str(file) for file in files]
    for train, test, out, message in (
        ([first], [names[2]], "out", "would both be written to"),
        ([first], [names[1], names[3]], "out", "would both be written to"),
        ([first], [], "a", "is read and would be overwritten"),
        (["missing.csv"], [], "out", "no problems can be read"),
    ):
        words = ["--train", *train, *(["--test", *test] if test else []), "--out", str(tmp_path / out)]
        assert build_words.main([*words, "--vocab_size", "0"]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert [file.read_bytes() for file in files] == before


def test_the_files_are_what_the_recipe_reads(tmp_path, monkeypatch, capsys):
    """With the real executor; 40 variants of the text, so that some are held out. One is in the test file as well."""
    names = [f"{a}{b}" for a in ("Ann", "Bob", "Cid", "Dan") for b in "a e i o u y an in on en".split()]  # noqa: SIM905
    lines = [HEAD, *(LINES[0].replace("Bryan", name) for name in names)]
    (tmp_path / "t.csv").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")  # as spreadsheets write it
    plain_text = build_words.PLACE.sub("", LINES[0].split('"')[1])
    tested = next(name for name in names if not build_words.is_held_out(plain_text.replace("Bryan", name)))
    body = f"{tested} has 56 books on each of 9 shelves."
    same = {"Body": body, "Question": "How many books?", "Equation": "( 56.0 * 9.0 )", "Answer": 504.0}
    (tmp_path / "SVAMP.json").write_text(json.dumps([*SVAMP, same]))
    monkeypatch.chdir(tmp_path)
    assert build_words.main(["--train", "t.csv", "--test", "SVAMP.json", "--copies", "1", "--vocab_size", "420"]) == 0
    assert "1 problems of the training files are also in the test files" in capsys.readouterr().out
    assert f"{tested} has 56 books" not in (tmp_path / "words" / "train.jsonl").read_text()
    config = load_config(Config, ["words.yaml"], prog="test")
    chat = make_chat(config.text, load_tokenizer(config.text))
    problems = [p for batch in [next(make_problem_stream(config.data, problems=60, seed=0))] for p in batch]
    evals = eval_problems(config.data)
    assert evals and {problem.source for problem in evals} == {"heldout", "svamp"}
    assert not {p.prompt.split()[0] for p in problems} & {p.prompt.split()[0] for p in evals if p.source == "heldout"}
    assert build_words.is_held_out(plain_text.replace("Bryan", evals[0].prompt.split()[0]))
    traces = next(make_trace_stream(config.data, traces=60, seed=0))
    assert {len(trace.turns) for trace in traces} == {1, 2, 3}, "guesses, one call, a failing one before"
    assert max(len(chat.trace_row(trace)[0]) for trace in traces) <= config.batch.row_length

"""Word problems for `configs/words.yaml` and `configs/smollm2_words.yaml`: problems in GSM8K's form, executed traces,
and a tokenizer of their words.

    python -m examples.build_words --train mawps-asdiv-a_svamp/train.csv --test SVAMP.json --out words

It reads GSM8K (`.jsonl`), SVAMP (`.json`: `Body`, `Question`, `Equation`, `Answer`) and the tables of MAWPS and ASDiv-A
in SVAMP's repository (`.csv`, with `number0` in place of the numbers). SVAMP is under the MIT license, ASDiv under
CC BY-NC 4.0; no problem ships with the library. One text in ten of the training files is held out. Its hash decides,
numbers left out, so variants of one problem stay on one side. Questions of the test files do not train. `--copies`
repeats the problems of tables with other numbers of as many digits. `--most_steps 2` leaves out problems of GSM8K with
more annotated steps.

The folder then holds `train.jsonl`, `heldout.jsonl`, one file for each test file, `traces.jsonl` and, unless
`--vocab_size` is 0, `words.model`.
"""

import argparse
import csv
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_toy_tokenizer import train
from grpo_roc_jax.data import gsm8k_traces
from grpo_roc_jax.data.problems import read_rows

NUMBER = re.compile(r"\d+(?:,\d+)*(?:\.\d+)?")
PLACE = re.compile(r"number(\d+)")
HELD_OUT_SHARE = 10
VOCAB_SIZE = 1600
"""Includes 256 bytes."""
MIX = ("--clean=0.4", "--repair=0.4", "--wrong=0.1", "--guess=0.1")
"""Qualities of the traces: two calls in five of the right ones fail first, so that there is something to clean."""


@dataclass(frozen=True)
class WordProblem:
    """A question with the expression of its answer."""

    question: str
    expression: str
    answer: str

    @property
    def row(self) -> dict[str, str]:
        """In GSM8K's form, with one annotation."""
        annotation = f"<<{self.expression}={self.answer}>>\n" if self.expression else ""
        return {"question": self.question, "answer": f"{annotation}#### {self.answer}"}


def infix(words: Iterator[str]) -> str:
    """The expression of prefix notation, such as `- 9 * 2 3`, in brackets.

    Raises:
        ValueError: It ends before its last operand.
    """
    word = next(words, "")
    if not word:
        raise ValueError("the equation lacks an operand")
    return f"({infix(words)}{word}{infix(words)})" if word in "+-*/" else word


def plain(value: str | float) -> str:
    """A number in digits, without `.0`: a whole one exactly, another with ten digits, a large one with 15.

    Raises:
        ValueError: The text is no finite number.
    """
    text = value.replace(",", "") if isinstance(value, str) else str(value)
    rounded = float(text)
    if not math.isfinite(rounded):
        raise ValueError(f"{text} is no finite number")
    number = Decimal(text)
    if number == int(number):
        return str(int(number))
    return f"{Decimal(f'{rounded:.{10 if abs(rounded) < 1e6 else 15}g}'):f}"


def bare(expression: str) -> str:
    """The expression without spaces, `.0` and brackets that enclose all of it."""
    text = NUMBER.sub(lambda match: plain(match[0]), expression.replace(" ", ""))
    depths = list(accumulate((character == "(") - (character == ")") for character in text))
    closed_at = depths.index(0) if 0 in depths else -1
    return text[1:-1] if text.startswith("(") and closed_at == len(text) - 1 else text


def table_problem(row: Mapping[str, str], numbers: Sequence[str]) -> WordProblem | None:
    """The problem of a row of a table with these numbers; None if they give no answer of 0 or more."""

    def filled(text: str) -> str:
        if missing := [match[0] for match in PLACE.finditer(text) if int(match[1]) >= len(numbers)]:
            raise ValueError(f"{missing[0]} has no number among the {len(numbers)} of its row")
        return PLACE.sub(lambda match: plain(numbers[int(match[1])]), text)

    expression = bare(infix(iter(filled(row["Equation"]).split())))
    if gsm8k_traces.to_expression(expression) is None:
        return None
    try:
        value = eval(expression, {"__builtins__": {}})  # arithmetic, as `to_expression` has checked
    except ArithmeticError:  # a division by zero, or too large
        return None
    return WordProblem(filled(row["Question"]).strip(), expression, plain(value)) if value >= 0 else None


def redrawn(number: str, rng: np.random.Generator) -> str:
    """Another number with as many digits; fractions stay."""
    low = 10 ** (len(plain(number)) - 1)
    drawable = plain(number).isdigit() and low < 10**18
    return str(rng.integers(max(low, 2), 10 * low)) if drawable else number


def read_problems(path: Path, copies: int = 0, most_steps: int = 0) -> Iterator[tuple[str, WordProblem]]:
    """(text without numbers, problem) of a file; copies with other numbers only if their answer is whole.

    Args:
        path: The file; its suffix tells its form.
        copies: Further copies of a table's problem.
        most_steps: Most annotated steps of a problem in GSM8K's form; 0 for any number.

    Raises:
        ValueError: A row has another form; the message names it.
    """
    for number, row in _rows(path):
        try:
            if path.suffix == ".csv":
                pairs = _table_pairs(row, number, copies)
            elif path.suffix == ".json":
                pairs = [_svamp_pair(row)]
            elif most_steps and row["answer"].count("<<") > most_steps:
                pairs = []
            else:
                pairs = [(NUMBER.sub("", row["question"]), _AsItIs(row["question"], "", row["answer"]))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else row if isinstance(row, str) else error
            raise ValueError(f"{path}, row {number}: {reason}") from error
        yield from pairs


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a file."""
    if path.suffix == ".csv":
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from enumerate(csv.DictReader(file), 1)
    elif path.suffix == ".json":
        yield from enumerate(json.loads(path.read_text(encoding="utf-8-sig")), 1)
    else:
        yield from read_rows(path)


def _table_pairs(row: Mapping[str, str], number: int, copies: int) -> list[tuple[str, WordProblem]]:
    """(text without numbers, problem) of a row of a table and of its copies."""
    numbers, rng = row["Numbers"].split(), np.random.default_rng([0, number - 1])
    first = table_problem(row, numbers)
    if first is None or abs(float(first.answer) - float(row["Answer"])) > 0.01:
        return []  # the equation is not the answer's: ten rows of 3,138
    drawn = [table_problem(row, [redrawn(number, rng) for number in numbers]) for _ in range(copies)]
    problems = (first, *(variant for variant in drawn if variant and variant.answer.isdigit()))
    return [(PLACE.sub("", row["Question"]), problem) for problem in problems]


def _svamp_pair(row: Mapping[str, Any]) -> tuple[str, WordProblem]:
    """(text without numbers, problem) of a row of SVAMP."""
    body = row["Body"].strip()
    question = f"{body}{'' if body.endswith(('.', '?', '!', ',')) else ','} {row['Question'].strip()}"
    return NUMBER.sub("", question), WordProblem(question, bare(row["Equation"]), plain(row["Answer"]))


class _AsItIs(WordProblem):
    """A row that has GSM8K's form already."""

    @property
    def row(self) -> dict[str, str]:
        return {"question": self.question, "answer": self.answer}


def is_held_out(text: str) -> bool:
    words = " ".join(text.lower().split())
    return hashlib.blake2b(words.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def letters(question: str) -> str:
    """What equal questions have in common, however they are spaced."""
    return "".join(question.lower().split())


def write_rows(path: Path, problems: Sequence[WordProblem]) -> None:
    unique = {problem.question: problem for problem in problems}.values()
    path.write_text("".join(json.dumps(problem.row) + "\n" for problem in unique), encoding="utf-8")
    print(f"{path}: {len(unique)} problems")


def files_of(options: argparse.Namespace) -> dict[str, Path]:
    """Name of each file of problems -> the file, those of the test files by their paths.

    Raises:
        ValueError: Two of them are one file, or one is a file that is read.
    """
    files = {name: options.out / f"{name}.jsonl" for name in ("train", "heldout", "traces")}
    files |= {str(path): options.out / f"{path.stem.lower()}.jsonl" for path in options.test}
    read = {path.resolve() for path in (*options.train, *options.test)}
    seen: dict[Path, str] = {}
    for name, file in files.items():
        if file.resolve() in read:
            raise ValueError(f"{file} is read and would be overwritten; name another folder with --out")
        if file in seen:
            raise ValueError(f"{name} and {seen[file]} would both be written to {file}; copy one to another name")
        seen[file] = name
    return files


def build(options: argparse.Namespace) -> int:
    """Writes the folder; returns the exit status."""
    out, steps = options.out, options.most_steps
    try:
        files = files_of(options)
        originals = [pair for path in options.train for pair in read_problems(path, most_steps=steps)]
        pairs = [pair for path in options.train for pair in read_problems(path, options.copies, steps)]
        tests = {str(path): [pair[1] for pair in read_problems(path, most_steps=steps)] for path in options.test}
    except (ValueError, OSError, KeyError) as error:
        print(f"no problems can be read: {error}", file=sys.stderr)
        return 2
    asked = {letters(problem.question) for problems in tests.values() for problem in problems}
    trainable = [problem for text, problem in pairs if not is_held_out(text)]
    known = [problem for problem in trainable if letters(problem.question) not in asked]
    if not known:
        print("the training files hold no problem to train on", file=sys.stderr)
        return 2
    if tested := {problem.question for problem in trainable} - {problem.question for problem in known}:
        print(f"{len(tested)} problems of the training files are also in the test files; they do not train")
    out.mkdir(parents=True, exist_ok=True)
    write_rows(files["train"], known)
    write_rows(files["heldout"], [problem for text, problem in originals if is_held_out(text)])
    for name, problems in tests.items():
        write_rows(files[name], problems)
    status = gsm8k_traces.main([str(out / "train.jsonl"), "--out", str(out / "traces.jsonl"), *MIX])
    if not options.vocab_size:
        return status
    contents = {message["content"] for _, row in read_rows(out / "traces.jsonl") for message in row["messages"]}
    texts = sorted({problem.question for problem in known} | contents)
    try:
        (out / "words.model").write_bytes(train(texts, options.vocab_size, phrases=False))
    except RuntimeError as error:
        print(
            f"no tokenizer of --vocab_size {options.vocab_size} can be trained on {len(texts)} texts: {error}",
            file=sys.stderr,
        )
        return 2
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", type=Path, required=True, help="files to train on and to hold out from")
    parser.add_argument("--test", nargs="*", type=Path, default=[], help="files to evaluate on only")
    parser.add_argument("--out", type=Path, default=Path("words"), help="folder to write")
    parser.add_argument("--copies", type=int, default=2, help="further copies of a table's problem, numbers redrawn")
    parser.add_argument("--most_steps", type=int, default=0, help="annotated steps of a problem at most; 0 for any")
    parser.add_argument("--vocab_size", type=int, default=VOCAB_SIZE, help="of the tokenizer; 0 writes none")
    return build(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())

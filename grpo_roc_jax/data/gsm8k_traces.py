"""GSM8K's calculator annotations as tool-call demonstrations: open cold-start data that needs no model.

    python -m grpo_roc_jax.data.gsm8k_traces gsm8k_train.jsonl --out traces.jsonl

In `He sold 48/2 = <<48/2=24>>24 clips` the text up to the annotation becomes a turn that calls the Python tool with
`print(48/2)`. The executor's output becomes the observation, and the next turn continues with `24 clips`, so no number
appears before it is computed. A problem is kept if every annotation is plain arithmetic that the tool evaluates to the
annotated value; the others are counted by reason. The output has one `messages` row per problem, for
`data.trace_sources`. Annotations: arXiv:2110.14168, appendix C.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from grpo_roc_jax.data.demonstrations import TOOL_NAME
from grpo_roc_jax.data.problems import read_rows
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall, ToolExecutor
from grpo_roc_jax.tools.registry import default_registry
from grpo_roc_jax.types import ToolResult

ANNOTATION = re.compile(r"<<([^<>=]*(?:=[^<>=]*)*)=([^<>=]*)>>")
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.USub)
"""Syntax of plain arithmetic; without powers, so that every expression is cheap to evaluate."""

Reason = Literal["no annotation", "not arithmetic", "another value", "failed call", "no answer"]


@dataclass(frozen=True)
class Step:
    """An annotation: the text before it, the expression, and the annotated value."""

    text: str
    expression: str
    value: str

    @property
    def code(self) -> str:
        return f"print({self.expression})"


@dataclass(frozen=True)
class Solution:
    """A problem whose annotations could be parsed."""

    question: str
    steps: tuple[Step, ...]
    rest: str
    """Text after the last step."""
    answer: str


@dataclass(frozen=True)
class Conversion:
    """The converted rows, and the reasons for those left out."""

    rows: list[dict[str, Any]]
    problems: int
    calls: int
    """Number of calls that were run."""
    refused: Mapping[str, int]
    """Reason -> number of problems."""

    def __str__(self) -> str:
        lines = [f"{len(self.rows)} of {self.problems} problems convert, and their calls give the annotated values"]
        lines.append(f"  {self.calls} tool calls were run")
        lines += [f"  {count} left out: {reason}" for reason, count in sorted(self.refused.items())]
        return "\n".join(lines)


def to_expression(annotated: str) -> str | None:
    """The annotated expression in Python; None if it is not plain arithmetic.

    `$` and thousands separators are removed, `50%` is 50/100, `x` is a product, `.5` and `007` are numbers.
    """
    text = annotated.replace("$", "").replace("x", "*").replace("X", "*").replace("÷", "/").replace(" ", "")
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    text = re.sub(r"(\d+\.?\d*|\.\d+)%(?!\d)", r"(\1/100)", text)
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    nodes = list(ast.walk(tree))
    plain = all(isinstance(node, NODES) for node in nodes)
    numbers = all(type(node.value) in (int, float) for node in nodes if isinstance(node, ast.Constant))
    return text if plain and numbers else None


def agrees(printed: str, annotated: str) -> bool:
    """Whether the printed number is the annotated one to the annotated decimals, truncated or rounded."""
    text = annotated.replace("$", "").replace(",", "").replace(" ", "").removesuffix("%")
    try:
        got, expected = float(printed), float(text)
    except ValueError:
        return False
    got *= 100 if annotated.rstrip().endswith("%") else 1
    decimals = len(text.partition(".")[2])
    # Within one unit in the last annotated place, since values were truncated or rounded; integers must be exact.
    return abs(got - expected) < (10**-decimals if decimals else 1e-6 * max(1.0, abs(expected)))


def read_solution(question: str, answer: str) -> Solution | Reason:
    """The steps of an annotated solution, or why it has none."""
    body, mark, final = answer.rpartition("####")
    if not mark or not final.strip():
        return "no answer"
    *pieces, rest = ANNOTATION.split(body.strip())
    if not pieces:
        return "no annotation"
    steps = []
    for text, annotated, value in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        expression = to_expression(annotated)
        if expression is None:
            return "not arithmetic"
        steps.append(Step(text.strip(), expression, value))
    final = final.strip().replace(",", "").replace("$", "")
    return Solution(question.strip(), tuple(steps), rest.strip(), final)


def check_results(solution: Solution, results: Sequence[ToolResult]) -> Reason | None:
    """Why the results of the calls do not confirm the solution; None if they do."""
    for step, result in zip(solution.steps, results, strict=True):
        if not result.ok:
            return "failed call"
        if not agrees(result.stdout.strip(), step.value):
            return "another value"
    return None


def to_row(solution: Solution, results: Sequence[ToolResult]) -> dict[str, Any]:
    """The conversation: a turn with a call for each step, its output, and the boxed answer at the end."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": solution.question}]
    for step, result in zip(solution.steps, results, strict=True):
        call = {"name": TOOL_NAME, "arguments": {"code": step.code}}
        messages += [
            {
                "role": "assistant",
                "content": f"<reason>{step.text}</reason>",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "content": result.observation},
        ]
    closing = f"{solution.rest}\nThe answer is {solution.answer}.".strip()
    answer = f"<reason>{closing}</reason>\n<answer>\\boxed{{{solution.answer}}}</answer>"
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "answer": solution.answer}


def convert(path: Path, executor: ToolExecutor, *, limit: int = 0) -> Conversion:
    """Traces of an annotated file, with every call run by the executor.

    Args:
        path: JSONL with `question` and `answer`.
        executor: A started executor.
        limit: Number of problems to read; 0 for all.

    Raises:
        ValueError: A row lacks one of the two columns.
    """
    refused: Counter[str] = Counter()
    solutions: list[Solution] = []
    problems = 0
    for number, row in read_rows(path):
        if limit and problems == limit:
            break
        problems += 1
        if not isinstance(row, Mapping) or not isinstance(row.get("answer"), str) or "question" not in row:
            raise ValueError(f"{path}:{number} has no columns question and answer; must be a GSM8K file")
        solution = read_solution(row["question"], row["answer"])
        if isinstance(solution, str):
            refused[solution] += 1
        else:
            solutions.append(solution)
    calls = [
        CodeCall(f"{i}/{j}", TOOL_NAME, {"code": step.code}, session=None)
        for i, solution in enumerate(solutions)
        for j, step in enumerate(solution.steps)
    ]
    results = iter(executor.run(calls))
    rows = []
    for solution in solutions:
        own = [next(results) for _ in solution.steps]
        reason = check_results(solution, own)
        if reason:
            refused[reason] += 1
        else:
            rows.append(to_row(solution, own))
    return Conversion(rows, problems, len(calls), dict(refused))


@dataclass(frozen=True)
class TracesConfig:
    """Turns GSM8K's annotated solutions into tool-call conversations for supervised fine-tuning."""

    path: tyro.conf.Positional[str]
    """GSM8K in JSONL, with the `<<...>>` annotations (openai/grade-school-math)."""
    out: str
    """File to write, one `messages` row a problem; name it in `data.trace_sources`."""
    limit: int = 0
    """Problems to look at; 0 for all."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    asked = tyro.cli(TracesConfig, args=argv, prog="python -m grpo_roc_jax.data.gsm8k_traces")
    executor = make_executor(ToolsConfig(enabled=(TOOL_NAME,)), default_registry([TOOL_NAME]))
    try:
        executor.start()
        conversion = convert(Path(asked.path).expanduser(), executor, limit=asked.limit)
    except ValueError as error:
        print(f"gsm8k_traces: {error}", file=sys.stderr)
        return 2
    finally:
        executor.close()
    with open(asked.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in conversion.rows)
    print(f"{asked.out}: {conversion}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

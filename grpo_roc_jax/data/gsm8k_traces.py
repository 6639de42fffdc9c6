"""Converts GSM8K's calculator annotations to tool-call demonstrations: open cold-start data that needs no model.

    python -m grpo_roc_jax.data.gsm8k_traces gsm8k_train.jsonl --out traces.jsonl [--repair 0.3 --wrong 0.1]

In `He sold 48/2 = <<48/2=24>>24 clips` the text up to the annotation becomes a turn that calls the Python tool with
`print(48/2)`. The executor's output becomes the observation, and the next turn continues with `24 clips`, so no number
appears before it is computed. A problem is kept if every annotation is plain arithmetic that the tool evaluates to the
annotated value; the others are counted by reason. The output has one `messages` row per problem, for
`data.trace_sources`. Annotations: arXiv:2110.14168, appendix C.

Traces of lower quality can be mixed in by shares: a call that fails before the one that works; a last call that
computes something else, with an answer that trusts it; or a guess without a call. Their calls are run too.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.data.generated import TOOL_NAME, guessed_answer
from grpo_roc_jax.data.problems import read_rows
from grpo_roc_jax.process.outputs import output_file, write_output
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
    """Annotated value; empty if any output of the call is accepted."""
    fault: str = ""
    """Program that fails and replaces the one that works; empty for none."""

    @property
    def code(self) -> str:
        return self.fault or f"print({self.expression})"


@dataclass(frozen=True)
class Solution:
    """A problem whose annotations could be parsed."""

    question: str
    steps: tuple[Step, ...]
    rest: str
    """Text after the last step."""
    answer: str
    """Answer of the problem; empty for what the last call prints."""
    kind: str = "clean"


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
    """The steps of an annotated solution, or the reason why it cannot be converted."""
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


FAULTS = ("print({0}", "prnt({0})", "print({0} + '')")
"""Ways to make a call fail, as format strings over its expression."""


def spoiled(solution: Solution, kind: str, rng: np.random.Generator) -> Solution:
    """The solution, degraded to a kind of demonstration in `DemonstrationConfig`."""
    *before, last = solution.steps
    if kind == "guess":
        steps, rest, answer = (), "by heart", guessed_answer(solution.answer, rng)
    elif kind == "wrong":
        steps, rest, answer = (*before, Step(last.text, f"{last.expression} + 1", "")), "", ""
    elif kind == "repair":
        index = int(rng.integers(len(solution.steps)))
        step = solution.steps[index]
        fails = replace(step, fault=FAULTS[rng.integers(len(FAULTS))].format(step.expression))
        steps = (*solution.steps[:index], fails, replace(step, text="fix it"), *solution.steps[index + 1 :])
        rest, answer = solution.rest, solution.answer
    else:
        return solution
    return replace(solution, steps=steps, rest=rest, answer=answer, kind=kind)


def check_results(solution: Solution, results: Sequence[ToolResult]) -> Reason | None:
    """Why the results of the calls do not confirm the solution; None if they do."""
    for step, result in zip(solution.steps, results, strict=True):
        if result.ok is bool(step.fault):
            return "failed call"
        if step.value and not step.fault and not agrees(result.stdout.strip(), step.value):
            return "another value"
    return None


def to_row(solution: Solution, results: Sequence[ToolResult]) -> dict[str, Any]:
    """The conversation: a turn with a call for each step, its output, and the boxed answer at the end. `reward` is 1 if
    that is the answer of the problem."""
    final = solution.answer or results[-1].stdout.strip()
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
    closing = f"{solution.rest}\nThe answer is {final}.".strip()
    answer = f"<reason>{closing}</reason>\n<answer>\\boxed{{{final}}}</answer>"
    solved = solution.kind in ("clean", "repair")
    row = {"answer": final, "kind": solution.kind, "reward": float(solved)}
    return {"messages": [*messages, {"role": "assistant", "content": answer}], **row}


CLEAN = DemonstrationConfig(guess=0, repair=0, clean=1, wrong=0)


def convert(
    path: Path, executor: ToolExecutor, *, limit: int = 0, mix: DemonstrationConfig = CLEAN, seed: int = 0
) -> Conversion:
    """Traces of an annotated file. The executor runs every call.

    Args:
        path: JSONL with `question` and `answer`.
        executor: A started executor.
        limit: Number of problems to read; 0 for all.
        mix: Shares of the kinds of traces.
        seed: Seed of the random mistakes.

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
            rng = np.random.default_rng([seed, problems])
            kind = str(rng.choice(list(mix.shares), p=list(mix.shares.values())))
            solutions.append(spoiled(solution, kind, rng))
    calls = [
        CodeCall(f"{i}/{j}", TOOL_NAME, {"code": step.code}, session=None)
        for i, solution in enumerate(solutions)
        for j, step in enumerate(solution.steps)
    ]
    results = iter(executor.run(calls))
    rows = []
    for solution in solutions:
        step_results = [next(results) for _ in solution.steps]
        reason = check_results(solution, step_results)
        if reason:
            refused[reason] += 1
        else:
            rows.append(to_row(solution, step_results))
    return Conversion(rows, problems, len(calls), dict(refused))


@dataclass(frozen=True)
class TracesConfig:
    """Turns GSM8K's annotated solutions into tool-call conversations for supervised fine-tuning."""

    path: tyro.conf.Positional[str]
    """GSM8K in JSONL, with the `<<...>>` annotations (openai/grade-school-math)."""
    out: str
    """File to write, one `messages` row a problem; name it in `data.trace_sources`."""
    limit: int = 0
    """Number of problems to read; 0 for all."""
    clean: float = 1.0
    """Share of traces as annotated."""
    repair: float = 0.0
    """Share with a call that fails before the one that works."""
    wrong: float = 0.0
    """Share whose last call computes something else, and whose answer trusts it."""
    guess: float = 0.0
    """Share of answers without a call, mostly wrong."""
    seed: int = 0
    """Seed of the random mistakes."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = tyro.cli(TracesConfig, args=argv, prog="python -m grpo_roc_jax.data.gsm8k_traces")
    executor = make_executor(ToolsConfig(enabled=(TOOL_NAME,)), default_registry([TOOL_NAME]))
    try:
        path = Path(options.path).expanduser()
        out = output_file("--out", options.out, [path])
        mix = DemonstrationConfig(guess=options.guess, repair=options.repair, clean=options.clean, wrong=options.wrong)
        executor.start()
        conversion = convert(path, executor, limit=options.limit, mix=mix, seed=options.seed)
        write_output("--out", out, "".join(json.dumps(row) + "\n" for row in conversion.rows))
    except (ValueError, OSError) as error:
        print(f"gsm8k_traces: {error}", file=sys.stderr)
        return 2
    finally:
        executor.close()
    print(f"{options.out}: {conversion}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

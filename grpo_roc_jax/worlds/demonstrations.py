"""Demonstrations of the worlds: traces of mixed quality, so that a policy trained on them makes real mistakes.

A trace is a pure function of (problem, shares of the kinds, seed). Its observations come from running the
demonstrator's own programs in this process and formatting the outcome as the executor does. All of these programs are
made from the tables below, so they need no sandbox.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.data.generated import TOOL_NAME, guessed_answer
from grpo_roc_jax.sandbox.result import ToolKind
from grpo_roc_jax.text.calls import parse_call
from grpo_roc_jax.text.chat_format import Trace
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import malformed_result
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.types import Problem, ToolResult
from grpo_roc_jax.worlds.chains import CHAIN, FAVORED, ChainStep, chain_steps
from grpo_roc_jax.worlds.functions import FUNCTIONS, demonstrate_functions
from grpo_roc_jax.worlds.players import PLAYED, demonstrate_played

Kind = Literal["clean", "repair", "wrong", "guess"]


@dataclass(frozen=True)
class DemonstrationPrograms:
    """Programs of one family, as format strings over the numbers of a problem."""

    right: str
    """Program that prints the answer."""
    broken: str
    """Program that fails with an error that is typical of this family."""
    wrong: str
    """Program that runs and prints something else (occasionally the answer, by chance)."""


PROGRAMS: dict[str, DemonstrationPrograms] = {
    "products": DemonstrationPrograms("print({0}*{1})", "print(mul({0},{1}))", "print({0}+{1})"),
    "gcd": DemonstrationPrograms(
        "import math\nprint(math.gcd({0},{1}))", "print(math.gcd({0},{1}))", "import math\nprint(math.lcm({0},{1}))"
    ),
    "powmod": DemonstrationPrograms("print(pow({0},{1},{2}))", "print(powmod({0},{1},{2}))", "print({0}^{1}%{2})"),
    "digit_sum": DemonstrationPrograms(
        "print(sum(map(int,str({0}**{1}))))", "print(sum(str({0}**{1})))", "print(sum(map(int,str({0}*{1}))))"
    ),
    "count": DemonstrationPrograms(
        "print(sum(n%{1}==0 or n%{2}==0 for n in range(1,{0}+1)))",
        "print(count(n%{1}==0 or n%{2}==0 for n in range(1,{0}+1)))",
        "print(sum(n%{1}==0 and n%{2}==0 for n in range(1,{0}+1)))",
    ),
    "square_sum": DemonstrationPrograms(
        "print(sum(n*n for n in range({0},{1}+1)))",
        "print(sum(n*n for n in {0}..{1}))",
        "print(sum(n*n for n in range({0},{1})))",
    ),
    "factorial": DemonstrationPrograms(
        "import math\nprint(math.factorial({0})%{1})", "print(factorial({0})%{1})", "print({0}%{1})"
    ),
    "base": DemonstrationPrograms("print(int('{0}',{1}))", "print(int({0},{1}))", "print({0}*{1})"),
    "primes": DemonstrationPrograms(
        "print(sum(all(n%d for d in range(2,n)) for n in range({0},{1}+1)))",
        "print(primes({0},{1}))",
        "print(sum(n%2 for n in range({0},{1}+1)))",
    ),
    "divisors": DemonstrationPrograms(
        "print(sum(d for d in range(1,{0}+1) if {0}%d==0))",
        "print(sum(divisors({0})))",
        "print(sum(d for d in range(1,{0}) if {0}%d==0))",
    ),
    "relevance": DemonstrationPrograms(
        "print(','.join(str(len({{*'{0}'}}&{{*str(d)}})) for d in ({1},{2},{3},{4})))",
        "print(','.join(len({{*'{0}'}}&{{*str(d)}}) for d in ({1},{2},{3},{4})))",
        "print(','.join(str(len({{*'{0}'}}|{{*str(d)}})) for d in ({1},{2},{3},{4})))",
    ),
    "screening": DemonstrationPrograms(
        "s=25*len({{{0},{1}}}&{{{3},{4}}})+50*min({2},{5})//{2}\nprint('SELECTED' if s>74 else 'REJECTED',s)",
        "s=25*({{{0},{1}}}&{{{3},{4}}})+50*min({2},{5})//{2}\nprint('SELECTED' if s>74 else 'REJECTED',s)",
        "s=25*len({{{0},{1}}}|{{{3},{4}}})+50*min({2},{5})//{2}\nprint('SELECTED' if s>74 else 'REJECTED',s)",
    ),
}

FAULTS = ("broken", "unclosed", "misspelt", "json")
"""How a failing call fails: the family's `broken` program, a missing bracket, a misspelled name, or truncated JSON."""


def demonstrate(problem: Problem, config: DemonstrationConfig, seed: int) -> Trace:
    """A trace whose kind is drawn by the configured shares.

    Args:
        problem: From `world_problem`; its numbers are in `extra`.
        config: Shares of the kinds.
        seed: Seed of the mistakes.

    Raises:
        ValueError: The problem does not come from a world.
    """
    family = problem.extra.get("family")
    if family not in (*PROGRAMS, FUNCTIONS, CHAIN, *PLAYED):
        known = ", ".join((*PROGRAMS, FUNCTIONS, CHAIN, *PLAYED))
        raise ValueError(f"problem {problem.uid!r} does not come from a world; demonstrations exist for {known}")
    digest = hashlib.blake2b(f"{seed}/{problem.uid}".encode(), digest_size=8).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    kind = str(rng.choice(list(config.shares), p=list(config.shares.values())))
    if family == FUNCTIONS:
        return demonstrate_functions(problem, kind, rng)
    if family == CHAIN:
        return _demonstrate_chain(problem, kind, rng)
    if family in PLAYED:
        return demonstrate_played(problem, family, kind, rng)
    programs, numbers = PROGRAMS[family], problem.extra["numbers"]
    right = _call_text(programs.right.format(*numbers))
    if kind == "guess":
        return Trace(problem, ("by heart" + answer_text(guessed_answer(problem.answer, rng)),), kind=kind)
    if kind == "wrong":
        return _trace(problem, kind, [_call_text(programs.wrong.format(*numbers))])
    if kind == "repair":
        fault = FAULTS[rng.integers(len(FAULTS))]
        return _trace(problem, kind, [_faulty_call(programs, numbers, fault), right])
    return _trace(problem, kind, [right])


def _demonstrate_chain(problem: Problem, kind: str, rng: np.random.Generator) -> Trace:
    """One call a step. In `repair` one of them fails first, in `wrong` one computes something else; `guess` answers
    `FAVORED`, half of the time after a failing call."""
    steps, values = chain_steps(problem.extra), problem.extra["numbers"]
    flawed, calls = int(rng.integers(len(steps))), []
    fault = FAULTS[rng.integers(len(FAULTS))]
    if kind == "guess":
        calls = [_faulty_call(steps[0], values, fault)] * int(rng.integers(2))
        return _trace(problem, kind, calls, str(FAVORED), "by heart")
    for number, step in enumerate(steps):
        if kind == "repair" and number == flawed:
            calls.append(_faulty_call(step, values, fault))
        call = _call_text((step.wrong if kind == "wrong" and number == flawed else step.right).format(*values))
        calls.append(call)
        values = (run_call(call).stdout.strip(),)
    return _trace(problem, kind, calls)


def with_hints(problem: Problem) -> Problem:
    """A world's problem with hints, weakest first, and a solution in `extra`, for methods that help after failures.

    The hints are: that code helps, the program, the answer. A task of function calls has its own hints, a game none.
    """
    if problem.extra["family"] not in PROGRAMS:
        return problem
    program = PROGRAMS[problem.extra["family"]].right.format(*problem.extra["numbers"])
    hints = ["run code", program, f"the answer is {problem.answer}"]
    return replace(problem, extra={**problem.extra, "hints": hints, "solution": program})


def _trace(problem: Problem, kind: str, calls: list[str], answer: str = "", end: str = "done") -> Trace:
    """The calls in order, their actual observations, and the last output as the answer unless one is given."""
    results = [run_call(call) for call in calls]
    thoughts = ["run code", *("run code" if result.ok else "fix it" for result in results)][: len(calls)]
    turns = [f"{thought}</reason><tool_call>{call}</tool_call>" for thought, call in zip(thoughts, calls, strict=True)]
    final = end + answer_text(answer or results[-1].stdout.strip())
    return Trace(problem, (*turns, final), tuple((result.observation,) for result in results), kind)


def _call_text(code: str) -> str:
    return json.dumps({"name": TOOL_NAME, "arguments": {"code": code}})


def _faulty_call(programs: DemonstrationPrograms | ChainStep, numbers: Sequence[int | str], fault: str) -> str:
    code = programs.right.format(*numbers)
    if fault == "broken":
        return _call_text(programs.broken.format(*numbers))
    if fault == "unclosed":
        return _call_text(code[:-1])
    if fault == "misspelt":
        return _call_text(code.replace("print", "prnt"))
    return _call_text(code)[:-1]


def answer_text(answer: str) -> str:
    return f"</reason><answer>\\boxed{{{answer}}}</answer>"


def run_call(raw: str) -> ToolResult:
    """Outcome of a demonstrator's own call, as the executor would report it. Runs the program in this process."""
    call = parse_call(raw)
    if call.fault is not None:
        return malformed_result(call.message)
    return run_program(call.arguments["code"])


def run_program(code: str) -> ToolResult:
    """Outcome of one of the programs above; must not be called with anything else."""
    printed: list[str] = []
    try:
        program = compile(code, "<cell>", "exec")
    except SyntaxError as error:
        return _failed("syntax_error", "", error, error.msg, error.lineno, code)
    scope: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)) + "\n")}
    try:
        exec(program, scope)
    except Exception as error:
        frame = error.__traceback__.tb_next
        return _failed("exception", "".join(printed), error, str(error), frame.tb_lineno, code)
    return _seen(ToolResult(kind="ok", stdout="".join(printed)), code)


def _failed(kind: ToolKind, printed: str, error: Exception, message: str, line: int | None, code: str) -> ToolResult:
    result = ToolResult(
        kind=kind, stdout=printed, error_type=type(error).__name__, error_message=message, error_line=line
    )
    return _seen(result, code)


def _seen(result: ToolResult, code: str) -> ToolResult:
    """The result with the text that the policy sees, as the executor writes it."""
    return replace(result, observation=observe(result, code, ToolsConfig()))

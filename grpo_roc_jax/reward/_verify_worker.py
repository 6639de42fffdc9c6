"""Runs inside a verification process: reads one JSON line per comparison, writes one JSON line per verdict.

`sandbox._start` starts it, so it imports only the standard library, math-verify and the executor's `isolation`, which
locks it down before it reads the first text of a policy. Its clock is its own CPU time: a soft timer turns a slow
comparison into the verdict `timeout`. One to two seconds later the kernel ends the process, which also works while an
uninterruptible C routine runs.
"""

import json
import os
import resource
import signal
import sys


class OutOfTime(BaseException):
    """Not an Exception, so that broad handlers inside the libraries do not catch it."""


def _expired(signum, frame):
    raise OutOfTime


def start_clock(limit_s: float) -> None:
    """Let the comparison that begins use so many seconds of CPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + limit_s) + 2, hard))
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def judge(request: dict) -> str:
    """The verdict on a goal, `["same", answer, gold]` or `all`, `any`, `match` of such; or whether a text parses."""
    kind, *parts = request["goal"]
    library = _Library(request["strict"])
    if kind == "parsed":
        return "parsed" if library.parse(parts[0]) else "unparseable"
    if library.holds(request["goal"]):
        return "correct"
    return "unparseable" if library.unread else "wrong"


class _Library:
    """math-verify on the expressions of one request; each text is parsed once."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.parsed: dict[str, list] = {}
        self.unread = False
        """Some expression could not be parsed."""

    def holds(self, goal: list | bool) -> bool:
        if isinstance(goal, bool):
            return goal
        kind, *parts = goal
        if kind == "same":
            return self._same(*parts)
        if kind == "match":
            return self._assigned(*parts)
        return (all if kind == "all" else any)(self.holds(part) for part in parts[0])

    def _assigned(self, rows: list) -> bool:
        """Whether each row has a column that no other row has: greedily, since equal things equal the same things."""
        free = list(range(len(rows[0])))
        for row in rows:
            column = next((column for column in free if self.holds(row[column])), None)
            if column is None:
                return False
            free.remove(column)
        return True

    def _same(self, answer: str, gold: str) -> bool:
        goal, given = self.parse(gold), self.parse(answer)
        if not goal or not given:
            self.unread = True
            return False
        digits = 50 if self.strict else 15
        equal = _equal(goal, given, 6, digits) or _complex_equal(goal, given, 6, digits)
        if not equal and not self.strict:  # 2^0.5 is the root of 2, which floating-point numbers miss by a digit
            exact = [_exact(value[0]) for value in (goal, given)]
            equal = exact != [goal[0], given[0]] and _equal(exact[:1], exact[1:], 6, digits)
        # The library rounds to 6 decimals and takes differences below 1e-15 as 0. So that 1.6e-19 is not 2.5e-19, small
        # numbers are compared once more with as many decimals as they need.
        if equal and (zeros := max(_zeros(goal[0]), _zeros(given[0]))):
            equal = _equal(goal, given, 6 + zeros, digits + zeros)
        return equal

    def parse(self, text: str) -> list:
        if text not in self.parsed:
            self.parsed[text] = _parse(text)
        return self.parsed[text]


def _equal(gold: list, answer: list, decimals: int, digits: int) -> bool:
    from math_verify import verify

    # So that x < -5 equals (-oo, -5) whichever of the two is the reference.
    options = {"allow_set_relation_comp": True, "timeout_seconds": None}
    return verify(gold, answer, float_rounding=decimals, numeric_precision=digits, **options)


def _complex_equal(gold: list, answer: list, decimals: int, digits: int) -> bool:
    """Once more with i as the imaginary unit, which the library takes for a variable; not if i counts terms."""
    from sympy import I, Product, Sum, expand

    changed = []
    for value in (gold[0], answer[0]):
        if not hasattr(value, "free_symbols") or value.has(Sum, Product):
            return False
        names = {symbol: I for symbol in value.free_symbols if symbol.name == "i"}
        changed.append(expand(value.subs(names)) if names else value)
    if changed == [gold[0], answer[0]]:
        return False
    return _equal(changed[:1], changed[1:], decimals, digits)


def _exact(value):
    """An expression with its decimals as fractions."""
    from sympy import Float, Rational

    if not hasattr(value, "atoms") or not (floats := value.atoms(Float)):
        return value
    return value.xreplace({number: Rational(str(number)) for number in floats})


def _parse(text: str) -> list:
    """The library's expression; units and words stay, and no number is picked out of a text that is not a formula."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True))]
    values = parse("\\boxed{" + text + "}", targets, parsing_timeout=None, fallback_mode="no_fallback")
    return [_dependent(value) for value in values]


def _dependent(value):
    """An expression where dy/dx is one name, and a_i in a sum over i a function of i.

    The library takes y and a_i for constants, so that dy/dx is 0 and the sum is n a_i.
    """
    from sympy import Derivative, E, Function, I, Limit, Product, Sum, Symbol
    from sympy.core.relational import Relational

    if not hasattr(value, "atoms"):
        return value
    names = {
        part: Symbol(str(part), real=True)
        for part in value.atoms(Derivative)
        if not part.expr.free_symbols & set(part.variables) and (part.expr.free_symbols or part.expr.has(E, I))
    }
    value = value.xreplace(names) if names else value
    indices = {limits[0].name: limits[0] for part in value.atoms(Sum, Product) for limits in part.limits}
    indices |= {part.args[1].name: part.args[1] for part in value.atoms(Limit) if part.args[1].is_Symbol}
    counted = {}
    for name in value.atoms(Symbol):
        base, _, subscript = name.name.partition("_")
        if by := [indices[letter] for letter in subscript if letter in indices]:
            pattern = "".join("#" if letter in indices else letter for letter in subscript)
            counted[name] = Function(f"{base}_{pattern}")(*by)
    if not counted:
        return value
    value = value.xreplace(counted).as_dummy()  # an index has any name
    value = value.xreplace({name: Symbol(name.name, real=True) for name in value.free_symbols})
    if isinstance(value, Relational):  # two equations that it cannot solve are equal to the library
        value = value.xreplace({part: Symbol(str(part), real=True) for part in value.atoms(Sum, Product, Limit)})
    return value


def _zeros(value) -> int:
    """Zeros after the decimal point of the smallest number in an expression; 0 if none is below 0.001."""
    from sympy import log, preorder_traversal

    zeros = 0
    for part in preorder_traversal(value):
        size = abs(part.evalf(5)) if getattr(part, "is_number", False) else 0
        if getattr(size, "is_Float", False) and 0 < size < 1e-3:
            zeros = max(zeros, int(-log(size, 10).evalf(8)))
    return zeros


def lock_down(memory_mb: int, platform: str = sys.platform) -> tuple[str, ...]:
    """Restrict this process as the executor restricts programs; returns the layers in force."""
    if platform != "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
        return ()
    from grpo_tools_box import isolation

    return isolation.contain(memory_mb)


def main(arguments: list[str]) -> None:
    memory_mb = int(arguments[0])
    # What the libraries print must not reach the channel of verdicts.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import logging

    logging.disable(logging.CRITICAL)
    example = {"goal": ["same", "x^2+1", "1+x^2"], "strict": False}
    judge(example)  # imports what comparisons need
    layers = lock_down(memory_mb)
    if judge(example) != "correct":
        raise SystemExit("math-verify cannot compare under the executor's restrictions")
    signal.signal(signal.SIGPROF, _expired)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel.write(json.dumps(["ready", *layers]) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            try:
                start_clock(request["limit_s"])
                verdict = judge(request)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except OutOfTime:
            verdict = "timeout"
        except MemoryError:
            verdict = "crash"
        except Exception:
            verdict = "unparseable"
        channel.write(json.dumps(verdict) + "\n")

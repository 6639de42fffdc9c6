"""Which small edits of the core do the tests notice?

A mutant is the package with one edit: a comparison, an operator, a number, a condition or a returned value. Each one
runs the tests that name its module, in a copy of the tree. Every mutant is a JSON line of `--out`, with the test that
noticed it; a second call goes on where the first one was stopped.

    python tests/endurance/mutants.py --out benchmarks/results/mutants.jsonl --count 300
    python tests/endurance/mutants.py --out mutants.jsonl --count 20 --from "$(git rev-list --count HEAD)"  # CI
    python tests/endurance/mutants.py --out benchmarks/results/mutants.jsonl --count 0  # the table
    python tests/endurance/mutants.py --out new.jsonl --again benchmarks/results/mutants.jsonl  # after tests changed

mutmut and cosmic-ray start an interpreter for each mutant. Most of the time of this suite is spent on importing JAX
and compiling programs. Here a process that has imported JAX forks for each mutant, and programs come from one cache.
"""

import argparse
import ast
import compileall
import contextlib
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
AREAS = {"method": ["method/**/*.py"]} | {name: [f"learner/{name}.py"] for name in ("loss", "pack", "update")}
AREAS |= {room: [f"{room}/*.py"] for room in ("engine", "rollout", "model", "reward", "tools", "sandbox")}
AREAS |= {"checkpoint": ["record/checkpoint.py", "record/checkpoint_files.py", "record/codec.py"]}
ROOMS = {"sample": "run", "loss": "learner", "pack": "learner", "update": "learner", "checkpoint": "record"}
"""Area -> folder of its tests, where the names differ."""
SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
}
WRITTEN = (
    # The failures that are kept are the first ones.
    ("method/roc.py", 'if config.negative_select == "uniform" else', 'if config.negative_select == "first" else'),
    # They are drawn alike in every group.
    ("method/roc.py", "rng.permutation(len(negative))", "np.random.default_rng(0).permutation(len(negative))"),
    # The first rollout of each request is lost between engine and scorer.
    ("run/sample.py", "tuple(new), options.step, request.place", "tuple(new[1:]), options.step, request.place"),
    # The last request is lost there.
    ("run/sample.py", "rows[first:]", "[*rows[first:-1], ()]"),
)
"""(module, text, text instead) of edits that no rule above makes; they come first."""
FILES = 5
"""Test files of a mutant, at most."""
CPU_S, WALL_S = 150, 600
"""Limits of a mutant; one that reaches them is noticed, since the suite would hang."""


@dataclass(frozen=True)
class Mutant:
    area: str
    path: str
    line: int
    kind: str
    old: str
    new: str
    span: tuple[int, int]
    """Bytes of the module that `new` replaces."""
    name: str
    """Stays the same while the line does."""

    def text(self, source: bytes) -> bytes:
        new = self.new if self.kind == "written" else f"({self.new})"
        return source[: self.span[0]] + new.encode() + source[self.span[1] :]


def edits_of(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """(kind, node, edited node) of all edits; leaves out annotations, messages, logs, f-strings and decorators."""
    strict = isinstance(node, ast.keyword) and node.arg == "strict"  # of zip: changes nothing unless a length is wrong
    logs = isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "warnings."))
    if strict or logs or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    match node:
        case ast.Compare(left, ops, right):
            for i, op in enumerate(ops):
                yield "comparison", node, ast.Compare(left, [*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]], right)
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not is_text(left) and not is_text(right):
            yield "arithmetic", node, ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield "condition", node, ast.BoolOp(SWAPS[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "condition", node, operand
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, ast.Constant(value + 1 if isinstance(value, int) else value * 2 or 1.0)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, ast.Constant(None)
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                yield from edits_of(child) if isinstance(child, ast.AST) else ()


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def mutants_of(area: str, path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    seen, relative = Counter(), str(path.relative_to(ROOT))
    for kind, node, edited in edits_of(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        new = ast.unparse(ast.fix_missing_locations(edited))
        where = f"{relative} {lines[node.lineno - 1].decode().strip()} {node.col_offset} {new}"
        seen[where] += 1
        name = hashlib.blake2b(f"{where} {seen[where]}".encode(), digest_size=6).hexdigest()
        old = " ".join(source[begin:end].decode().split())
        yield Mutant(area, relative, node.lineno, kind, old, new, (begin, end), name)


def written_mutants() -> list[Mutant]:
    """The edits of `WRITTEN`.

    Raises:
        ValueError: A text that its module does not have exactly once: the module has changed, so the edit must too.
    """
    mutants = []
    for module, old, new in WRITTEN:
        path = ROOT / "grpo_roc_jax" / module
        before, *after = path.read_bytes().split(old.encode())
        if len(after) != 1:
            raise ValueError(f"{module} has {len(after)} times {old!r}, must be once; edit WRITTEN")
        area, span = "sample" if path.stem == "sample" else path.parent.name, (len(before), len(before + old.encode()))
        name = hashlib.blake2b(f"{module} {old} {new}".encode(), digest_size=6).hexdigest()
        place = str(path.relative_to(ROOT)), before.count(b"\n") + 1
        mutants.append(Mutant(area, *place, "written", old, new, span, name))
    return mutants


def all_mutants(seed: int) -> list[Mutant]:
    """Those of `WRITTEN`, then one of each area in turn, in the order of a seed."""
    decks = []
    for area, patterns in AREAS.items():
        paths = sorted(path for pattern in patterns for path in (ROOT / "grpo_roc_jax").glob(pattern))
        deck = [mutant for path in paths for mutant in mutants_of(area, path)]
        random.Random(f"{seed} {area}").shuffle(deck)
        decks.append(deck)
    return written_mutants() + [deck[i] for i in range(max(map(len, decks))) for deck in decks if i < len(deck)]


@cache
def tests_of(room: str, module: str) -> list[str]:
    """The test files, of the room if it has one, that say most of a module: its name, functions, classes and kinds."""
    path = ROOT / module
    stem, source = path.stem.removeprefix("_"), path.read_text(encoding="utf-8")
    names = {stem, *re.findall(r'^@kind\("(\w+)"', source, re.M), *re.findall(r"^(?:def|class) (\w{5,})", source, re.M)}
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    scores: dict[str, int] = {}
    for folder in (f"tests/{room}/test_*.py", "tests/**/test_*.py"):
        for test in () if any(scores.values()) else sorted(ROOT.glob(folder)):
            mentioned = set(pattern.findall(test.read_text(encoding="utf-8")))
            scores[str(test.relative_to(ROOT))] = 1000 * (test.stem == f"test_{stem}") + len(mentioned)
    return [test for test in sorted(scores, key=scores.get, reverse=True) if scores[test]][:FILES]


class Noted:
    """A plugin of pytest that keeps the first test that fails."""

    first = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid


def run_tests(copy: Path, words: list[str]) -> dict[str, Any]:
    """Runs pytest in a fork that has its own group: status (-1: out of time) and the first test that failed."""
    begun, (read_end, write_end) = time.monotonic(), os.pipe()
    child = os.fork()
    if not child:
        status, noted = 70, Noted()
        with contextlib.suppress(BaseException):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            quiet = os.open(copy.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 1), os.dup2(quiet, 2)
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            import pytest

            options = ["-n0", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
            status = int(pytest.main([*options, *words], plugins=[noted]))
        os.write(write_end, noted.first.encode())
        os._exit(status)
    os.close(write_end)
    status = None
    while status is None and time.monotonic() - begun < WALL_S:
        time.sleep(0.05)
        done, raw = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if done else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    with open(read_end, "rb") as file:
        first = file.read().decode() if status is not None and status >= 0 else ""
    late = status in (None, -signal.SIGXCPU, -signal.SIGKILL)
    return {"status": -1 if late else status, "by": first, "seconds": round(time.monotonic() - begun, 1)}


OUTCOMES = {0: "survived", -1: "out of time", 5: "no tests"}
"""Of a mutant, by the status of its tests; others are noticed."""


def judge(copy: Path, mutant: Mutant) -> dict[str, Any]:
    target = copy / mutant.path
    before, stamp = target.read_bytes(), target.stat()
    line = {"mutant": mutant.name, "area": mutant.area, "place": f"{mutant.path}:{mutant.line}", "kind": mutant.kind}
    line |= {"old": mutant.old[:200], "new": mutant.new[:200]}
    try:
        target.write_bytes(mutant.text(before))
        os.utime(target)  # another second than the text before and other mutants, so that no compiled file counts
        result = run_tests(copy, tests_of(ROOMS.get(mutant.area, mutant.area), mutant.path))
    finally:
        target.write_bytes(before)
        os.utime(target, (stamp.st_mtime, stamp.st_mtime))
    return line | {"outcome": OUTCOMES.get(result["status"], "noticed"), **result}


def table(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by area, without mutants that change nothing (`reason` begins with `equivalent`)."""
    same = {line["mutant"] for line in lines if line.get("reason", "").startswith("equivalent")}
    judged = {line["mutant"]: line for line in lines if "outcome" in line}
    counted = [line for mutant, line in judged.items() if mutant not in same]
    areas: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in counted:
        areas[line["area"]][line["outcome"]] += 1
    survived = sum(line["outcome"] in ("survived", "no tests") for line in counted)
    shares = {"equivalent": len(judged) - len(counted), "noticed": 1 - survived / max(1, len(counted))}
    return {"mutants": len(judged), **shares, "areas": {area: dict(counts) for area, counts in areas.items()}}


def read(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a list, none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def make_copy(folder: Path) -> Path:
    """A copy of the files that git knows, compiled; and JAX imported with the settings of the tests."""
    copy = folder / "tree"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.splitlines()):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    with contextlib.redirect_stdout(io.StringIO()):
        compileall.compile_dir(copy / "grpo_roc_jax", quiet=2)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(ROOT / "tests")]
    for name in ("conftest", "flax", "optax", "grain", "orbax.checkpoint", "hypothesis", "scipy", "xdist.plugin"):
        __import__(name)
    sys.path.pop(0)
    return copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--from", type=int, default=0, dest="part", help="begins at this multiple of count")
    parser.add_argument("--areas", nargs="*", default=[*AREAS, "sample"])
    parser.add_argument("--at_least", type=float, default=0.0, help="share noticed, below which the status is 1")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begins no mutant after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="run the mutants of this list that still exist, instead of drawing")
    share = {"nargs": 2, "type": int, "default": (0, 1), "metavar": ("I", "N")}
    parser.add_argument("--share", **share, help="every N-th from the I-th")
    options, begun = parser.parse_args(), time.monotonic()
    lines = read(options.out)
    done = {line["mutant"] for line in lines}
    mutants = [mutant for mutant in all_mutants(options.seed) if mutant.area in options.areas]
    earlier = {line["mutant"]: line["outcome"] for line in read(options.again) if "outcome" in line}
    first = options.part * options.count % len(mutants)
    drawn = (mutants + mutants)[first : first + options.count]
    chosen = [mutant for mutant in mutants if mutant.name in earlier] if options.again else drawn
    chosen = [mutant for mutant in chosen[options.share[0] :: options.share[1]] if mutant.name not in done]
    print(f"{len(mutants)} mutants, {len(chosen)} to run", flush=True)
    if chosen:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy = make_copy(Path(folder))
            for mutant in chosen:
                if time.monotonic() - begun > 60 * options.minutes:
                    break
                lines.append(judge(copy, mutant))
                with open(options.out, "a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print(json.dumps(lines[-1]), flush=True)
            by = sorted({line["by"] for line in lines if line.get("by")})
            if by and run_tests(copy, by)["status"]:
                print("tests that noticed mutants fail without them", flush=True)
                return 1
    for line in lines:
        if line.get("outcome") == "survived" and earlier.get(line["mutant"]) == "noticed":
            print(f"noticed before, not now: {json.dumps(line)}")
    print(json.dumps(report := table(lines)))
    return int(report["noticed"] < options.at_least)


if __name__ == "__main__":
    sys.exit(main())

"""How much a reader opens to answer a question: `python tests/reading_table.py [--frames]`.

| row | what is counted |
|---|---|
| files of a walk | modules that a walk of ARCHITECTURE.md names, and its stops |
| frames to a tool call | functions of the package on the stack when a run hands a call to its executor; their files |
| lines of the core | of what a newcomer reads: types, config, settings, method, rollout, learner, run, train |
| files of rooms | modules of a room |
| loss, KL | modules to open: the loss as stated on one page; estimates of the divergence |
| new advantage | files to write (its own), and modules of `method/` that such files of `contrib/methods` import |

The frames need a run of one step, about half a minute; the model is tiny, and every turn is read as a call.
"""

import ast
import re
import sys
import tempfile
import traceback
from pathlib import Path
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "grpo_roc_jax"
CORE = ("types.py", "config.py", "settings", "method", "engine/config.py", "engine/protocol.py", "rollout")
CORE += ("learner", "run", "train.py")
TINY = """
toy.yaml --steps=1 --sft.steps=0 --group.problems=1 --group.size=2 --resample.drop=none --resample.min_positive=0
--resample.min_negative=0 --model.d_model=16 --model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=8
--model.d_ff=16 --rollout.slots=4 --rollout.max_prompt_tokens=24 --rollout.max_response_tokens=16
--rollout.max_turn_tokens=4 --rollout.append_lengths=16 --batch.row_length=120 --batch.rows=2 --tools.workers=1
--data.eval_problems=0 --tools.preload=[] --sharding.data=-1 --log.console=off
""".split()  # noqa: SIM905 (a command line reads better as one)


def walks(text: str) -> dict[str, tuple[int, list[str]]]:
    """Title of each walk of ARCHITECTURE.md -> (its stops, the modules that it names, in order)."""
    section = text.split("## Four walks")[1].split("\n## ")[0]
    counts = {}
    for title, body in re.findall(r"\*\*(.+?)\.\*\* (.*?)(?=\n\n|\Z)", section, re.DOTALL):
        stops = [int(number) for number in re.findall(r"(?:^|\s)(\d{1,2})\s+(?=[A-Z`])", body)]
        modules = dict.fromkeys(path for name in names_in(body) if (path := module_of(name)))
        counts[title] = (max(stops), list(modules))
    return counts


def names_in(text: str) -> list[str]:
    """The names between backquotes that have a dot or a slash."""
    return [name for name in re.findall(r"`([\w./]+)`", text) if re.search(r"[./]", name)]


def module_of(name: str) -> str | None:
    """The file of the package that a name such as `run.sample.run_round` or `sandbox/_child.py` lies in."""
    parts = name.removesuffix(".py").replace("/", ".").split(".")
    for size in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:size]).with_suffix(".py")
        if path.is_file():
            return path.relative_to(PACKAGE).as_posix()
    return None


def lines_of(name: str) -> int:
    path = PACKAGE / name
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def imports_of(name: str, room: str = "") -> list[str]:
    """Modules of the package, of one room if it is given, that a module imports at its top level."""
    names = (node.module for node in parsed(PACKAGE / name).body if isinstance(node, ast.ImportFrom) and node.module)
    modules = {module_of(full.removeprefix("grpo_roc_jax.")) for full in names if full.startswith("grpo_roc_jax.")}
    return sorted(path for path in modules if path and path.startswith(room))


def loss_files() -> list[str]:
    """What answers where the loss is: the page that states it, and the modules with logic that it imports."""
    return ["method/reference.py", *sorted({*imports_of("method/reference.py")} - {"checks.py", "shapes.py"})]


def kl_files() -> list[str]:
    """Modules of the core that define an estimate of the divergence of two policies."""
    estimate = re.compile(r"k[123]|\w*_k3|kl_\w+|divergence")
    paths = sorted(path for room in ("method", "learner", "run") for path in (PACKAGE / room).glob("*.py"))
    functions = {p: [n.name for n in parsed(p).body if isinstance(n, ast.FunctionDef)] for p in paths}
    return [p.relative_to(PACKAGE).as_posix() for p, names in functions.items() if any(map(estimate.fullmatch, names))]


def advantage_files() -> list[int]:
    """For each file of `contrib/methods` whose kinds are advantages or adjustments of them: the modules of `method/`
    that it imports, which its author has to read."""
    counts = []
    for path in sorted((PACKAGE / "contrib" / "methods").glob("*.py")):
        classes = [node for node in parsed(path).body if isinstance(node, ast.ClassDef) and "kind(" in decorators(node)]
        bases = [{ast.unparse(base) for base in node.bases} for node in classes]
        if bases and all(names & {"Advantage", "Adjustment", "GroupRelative"} for names in bases):
            counts.append(len(imports_of(path.relative_to(PACKAGE).as_posix(), "method/")))
    return sorted(counts)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def decorators(node: ast.ClassDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


class Sent(BaseException):
    """A call is about to be sent; holds the frames of the package."""


def frames_to_a_call() -> list[str]:
    """`file:function` of every frame of the package, from the command line to the executor's `submit`."""
    from grpo_roc_jax.text.chat_format import ChatFormat, ParsedTurn
    from grpo_roc_jax.tools.executor import PythonExecutor
    from grpo_roc_jax.train import main
    from grpo_roc_jax.types import ToolCall

    def parsed(self: ChatFormat, ids) -> ParsedTurn:
        call = ToolCall("python_code_with_standard_io", {"code": "print(1)"}, "")
        return ParsedTurn("", (call,), "tool_call", True)

    def submit(self: PythonExecutor, call) -> None:
        stack = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
        raise Sent([f"{Path(f.filename).relative_to(PACKAGE).as_posix()}:{f.name}" for f in stack])

    patches = mock.patch.object(ChatFormat, "parse_turn", parsed), mock.patch.object(PythonExecutor, "submit", submit)
    with tempfile.TemporaryDirectory() as folder, patches[0], patches[1]:
        try:
            main([*TINY, f"--run_dir={folder}/run"])
        except Sent as sent:
            return [*sent.args[0], "tools/executor.py:submit"]
    raise RuntimeError("the run sent no call")


def main() -> None:
    for title, (stops, modules) in walks((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")).items():
        print(f"walk: {title}: {stops} stops in {len(modules)} files")
    print(f"files of the loss: {len(loss_files())} ({', '.join(loss_files())})")
    print(f"files of the KL: {len(kl_files())} ({', '.join(kl_files())})")
    imported = advantage_files()
    print(f"new advantage: 1 file to write, {imported[0]} to {imported[-1]} to read, {median(imported):g} as a rule")
    print(f"lines of the core: {sum(map(lines_of, CORE))}")
    for room in ("run", "stream", "rollout", "engine", "learner"):
        print(f"files of {room}/: {len([p for p in (PACKAGE / room).glob('*.py') if p.name != '__init__.py'])}")
    if "--frames" in sys.argv:
        frames = frames_to_a_call()
        print(f"frames to a tool call: {len(frames)} in {len({name.split(':')[0] for name in frames})} files")
        print("\n".join(f"  {name}" for name in frames))


if __name__ == "__main__":
    main()

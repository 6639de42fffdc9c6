"""How much a reader opens to answer a question: `python tests/reading_table.py [--frames]`.

| row | what is counted |
|---|---|
| files of a walk | modules that a walk of ARCHITECTURE.md names, and its stops |
| frames to a tool call | functions of the package on the stack when a run hands a call to its executor; their files |
| lines of the core | of what a newcomer reads: types, config, settings, method, rollout, learner, run, train |
| files of rooms | modules of a room |

The frames need a run of one step, about half a minute; the model is tiny, and every turn is read as a call.
"""

import re
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "grpo_roc_jax"
CORE = ("types.py", "config.py", "settings", "method", "rollout", "learner", "run", "train.py")
TINY = """
toy.yaml --steps=1 --sft.steps=0 --group.problems=1 --group.size=2 --resample.drop=none --resample.min_positive=0
--resample.min_negative=0 --model.d_model=16 --model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=8
--model.d_ff=16 --rollout.slots=4 --rollout.max_prompt_tokens=24 --rollout.max_response_tokens=16
--rollout.max_turn_tokens=4 --rollout.append_lengths=16 --batch.row_length=120 --batch.rows=2 --tools.workers=1
--data.eval_problems=0 --tools.preload=[] --sharding.data=-1 --log.console=off
""".split()  # noqa: SIM905 (a command line reads better as one)


def walks(text: str) -> dict[str, tuple[int, list[str]]]:
    """Title of each walk of ARCHITECTURE.md -> (its stops, the modules that it names, in order)."""
    section = text.split("## Three walks")[1].split("\n## ")[0]
    found = {}
    for title, body in re.findall(r"\*\*(.+?)\.\*\* (.*?)(?=\n\n|\Z)", section, re.DOTALL):
        stops = [int(number) for number in re.findall(r"(?:^|\s)(\d{1,2})\s+(?=[A-Z`])", body)]
        modules = dict.fromkeys(path for name in names_in(body) if (path := module_of(name)))
        found[title] = (max(stops), list(modules))
    return found


def names_in(text: str) -> list[str]:
    """The names between backquotes that have a dot or a slash."""
    return [name for name in re.findall(r"`([\w./]+)`", text) if re.search(r"[./]", name)]


def module_of(name: str) -> str | None:
    """The file of the package that a name such as `run.rounds.run_round` or `sandbox/_child.py` lies in."""
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


class Sent(BaseException):
    """A call is about to be sent; holds the frames of the package."""


def frames_to_a_call() -> list[str]:
    """`file:function` of every frame of the package, from the command line to the executor's `submit`."""
    from grpo_roc_jax.text.chat_format import ChatFormat, ParsedTurn
    from grpo_roc_jax.tools.python import PythonExecutor
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
            return [*sent.args[0], "tools/python.py:submit"]
    raise RuntimeError("the run sent no call")


def main() -> None:
    for title, (stops, modules) in walks((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")).items():
        print(f"walk: {title}: {stops} stops in {len(modules)} files")
    print(f"lines of the core: {sum(map(lines_of, CORE))}")
    for room in ("run", "rollout", "learner"):
        print(f"files of {room}/: {len([p for p in (PACKAGE / room).glob('*.py') if p.name != '__init__.py'])}")
    if "--frames" in sys.argv:
        frames = frames_to_a_call()
        print(f"frames to a tool call: {len(frames)} in {len({name.split(':')[0] for name in frames})} files")
        print("\n".join(f"  {name}" for name in frames))


if __name__ == "__main__":
    main()

"""The commands under one name: `grpo-roc COMMAND [ARGUMENTS]`, or `python -m grpo_roc_jax COMMAND [ARGUMENTS]`.

Each command is a module of `commands/` with `main(argv) -> int`. It receives the words after its name, and only its
module is imported.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from grpo_roc_jax.process.progress import narrated, phase, to_stderr

COMMANDS = {
    "new": "write a small project with data, a tool, a reward and a test",
    "doctor": "say what this machine can do, and what to install",
    "train": "train a policy: a recipe, then --section.field overrides",
    "sft": "run the supervised stage alone",
    "evaluate": "measure the accuracy of a run or model on held-out problems",
    "difficulty": "keep the problems that a policy solves sometimes",
    "chat": "talk to a run or a published model that has the Python tool",
    "export": "write a run as safetensors for transformers, vLLM and SGLang",
    "view": "show runs in a browser: curves, groups, trajectories, what was kept and why",
    "plot": "draw the curves of one or more runs",
    "plan": "estimate memory, collectives and time on a TPU pod or GPU host",
    "serve": "serve a run or a published model over HTTP, in the forms of OpenAI's API",
    "probe": "list the isolation levels that this machine offers",
    "run-tools": "execute programs of a JSONL file in the sandbox",
    "serve-tools": "serve the sandbox over HTTP for other trainers",
    "check-data": "show how a file of problems or conversations is read, and the limits to set",
    "cut-traces": "write the states of recorded trajectories as problems (Cobalt)",
    "replay": "run one update of a run again, alone, and name the rows that are not finite",
    "check-reward": "run a reward function on five rows before training",
}
"""Command -> one line of help."""

UNKNOWN_COMMAND = 2
WAITING = ("chat", "serve", "serve-tools", "view")
"""Commands that wait for questions or requests. Any other that is silent for long is busy, and says so."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; without a command, prints the help. If `argv` is None it uses the
    command line of the process, whose exit is then not delayed by threads that hang."""
    if argv is None:
        status = 1
        try:
            status = main(sys.argv[1:])
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            status = 130
        finally:
            from grpo_roc_jax.process.leaving import bound_exit

            bound_exit(status)
        return status
    words = list(argv)
    if words[:1] == ["help"] and words[1:]:  # `grpo-roc help train`
        words = [words[1], "--help", *words[2:]]
    if not words or words[0] in ("help", "--help", "-h"):
        print(help_text())
        return 0
    name, *arguments = words
    if name == "--version":
        from grpo_roc_jax import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        from grpo_roc_jax.hints.other_names import COMMAND_NAMES, close_to

        near = COMMAND_NAMES.get(name.replace("-", "_")) or close_to(name, COMMANDS)
        hint = f"did you mean {near!r}? " if near else ""
        print(f"unknown command {name!r}; {hint}`grpo-roc help` lists all commands", file=sys.stderr)
        return UNKNOWN_COMMAND
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that `mine:reward` is found in the working directory
    with narrated(to_stderr), ExitStack() as busy:
        with phase("importing JAX and the library", routine=True):
            module = importlib.import_module(f"grpo_roc_jax.{module_of(name)}")
        if name not in WAITING:
            busy.enter_context(phase(name, routine=True))
        return module.main(arguments)


def module_of(command: str) -> str:
    """The module of a command. `train` is at the root, since a reader starts there."""
    return command if command == "train" else f"commands.{command.replace('-', '_')}"


def help_text() -> str:
    """Usage, one line per command, and where to read on."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: grpo-roc COMMAND [ARGUMENTS]",
            "Reinforcement learning for language models that use a Python tool, in JAX.",
            "",
            *(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()),
            "",
            "`grpo-roc COMMAND --help` explains a command. `python -m grpo_roc_jax COMMAND` does the same.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

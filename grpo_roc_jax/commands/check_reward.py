"""`grpo-roc check-reward FUNCTION [DATA] [--trajectories RUN]`: tries a reward function before training.

It runs on five small made-up trajectories: a right answer, a wrong answer, no answer, a failing tool call, and a
truncated one. Each line shows the reward and the status that training would use. With DATA, a file of problems or a
generated source such as `world:gcd:1`, the trajectories answer its first problems, and the columns that a function
finds in `problem.extra` are named. With `--trajectories`, the function scores what a run recorded; DATA is tried after
it.
"""

import argparse
from collections.abc import Sequence

import grpo_roc_jax.config  # noqa: F401 (generated sources, and the kinds of all methods)
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.generated import generator_of
from grpo_roc_jax.data.pipeline import first_problems
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.record.trace import groups_of, read_trace, recorded_steps
from grpo_roc_jax.reward.config import FunctionReward, Reward
from grpo_roc_jax.reward.score import RewardError
from grpo_roc_jax.reward.trial import check_reward, score_again
from grpo_roc_jax.types import Problem

SHOWN = 3
"""Number of problems of a file that are tried."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every trajectory was scored; 2 if the function failed or left trajectories unscored."""
    arguments = parser().parse_args(argv)
    show_log()
    try:
        lines = list(tried(arguments))
    except (RewardError, ValueError, OSError) as error:
        print(error)
        return 2
    print("\n".join(lines))
    return 2 if any("not scored" in line or line.startswith("fault: ") for line in lines) else 0


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    kinds = ", ".join(sorted(Reward.kinds.keys() - {"function"}))
    made = argparse.ArgumentParser("grpo-roc check-reward", description=__doc__)
    made.add_argument("function", metavar="FUNCTION", help=f"file.py:function, module:function, or one of {kinds}")
    made.add_argument("data", metavar="DATA", nargs="?", help="a file of problems, or a source such as world:gcd:1")
    made.add_argument("--trajectories", metavar="RUN", help="score the trajectories of this run's last step again")
    made.add_argument("--step", type=int, help="of the run, instead of its last one")
    return made


def tried(arguments: argparse.Namespace) -> list[str]:
    """The lines of the command.

    Raises:
        RewardError: See `check_reward`.
        ValueError: Data that cannot be read, or a run without trajectories.
    """
    if not arguments.function.strip():
        raise ValueError("FUNCTION is empty; write file.py:function, or a built-in name such as answer")
    if arguments.function.strip() == FunctionReward.kind:
        raise ValueError("FUNCTION is only the kind of functions of your own; write file.py:function")
    if arguments.step is not None and not arguments.trajectories:
        raise ValueError("--step is a step of a run; name the run with --trajectories RUN")
    lines = []
    if arguments.trajectories:
        lines = score_again(arguments.function, recorded_groups(arguments.trajectories, arguments.step))
    elif not arguments.data:
        return check_reward(arguments.function)
    for problem in some_problems(arguments.data) if arguments.data else ():
        extra = ", ".join(problem.extra) or "empty"
        lines += [f"{problem.uid}: {problem.prompt[:60]!r}, answer {problem.answer[:30]!r}; problem.extra: {extra}"]
        lines += check_reward(arguments.function, problem)
    return lines


def some_problems(source: str) -> list[Problem]:
    """The first problems of a file or of a generated source."""
    generator = generator_of(source)
    if generator is None:
        return load_problems(source)[0][:SHOWN]
    generator.check(source)
    return first_problems(DataConfig(sources=(source,)), 0, SHOWN)[0][1]


def recorded_groups(run: str, step: int | None) -> list:
    """The groups of a step of a run, before selection.

    Raises:
        ValueError: There is no such run, or it has no trajectories, or none of this step that can be read.
    """
    steps = recorded_steps(run, step)
    number = steps[-1] if step is None else step
    groups = groups_of(read_trace(run, number))
    if not groups:
        raise ValueError(f"no trajectory of step {number} of {run} can be read; name another --step")
    return groups

"""Runs of the agents of `tests/serving`, by programs and by functions, on the small policy."""

import sys
from pathlib import Path

from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.serving.agent_runs import AgentRuns
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.serving import ROLLOUT, small_policy

SCRIPT = Path(__file__).parents[1] / "serving" / "agent_script.py"
FUNCTIONS = SCRIPT.with_name("agent_functions.py")


def runs_of(choice, longest=ROLLOUT.max_row_tokens, pays=("",)):
    """(runs of an agent, weights to sample from)."""
    chat, shared, params = small_policy()
    engine = shared.sibling()
    return AgentRuns(choice, chat, engine, longest, pays), engine.publish(params, 9)


def collected(what="", count=1, longest=ROLLOUT.max_row_tokens, pays=("",), problems=(), timeout_s=60.0, **choice):
    """(trajectories, statistics) of `what` the script does, or of a command or function."""
    if not {"command", "function"} & choice.keys():
        choice["command"] = f"{sys.executable} {SCRIPT} '{what}'"
    runs, weights = runs_of(AgentCommand(timeout_s=timeout_s, **choice), longest, pays)
    try:
        problems = problems or [Problem("p", "2+3=", "5" if "function" in choice else "5 or", "t")]
        requests = [RolloutRequest(problem, 4 + i, count, first_sample=1) for i, problem in enumerate(problems)]
        return runs.collect(weights, requests, RunOptions(step=3))
    finally:
        runs.close()

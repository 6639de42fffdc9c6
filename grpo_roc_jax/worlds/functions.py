"""A world of function calls: three boxes, four functions that change them, tasks of several steps in one prompt.

`world:functions:LEVEL` is addressed like the other worlds. The reward of a trajectory is R_state * R_action in {0, 1}
(arXiv:2602.03025, app. B): its calls leave the boxes as the gold calls do, and every gold call was made. The functions
run in a sandbox session that starts with the same boxes for every task.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_roc_jax.text.calls import CALL_CLOSE, CALL_OPEN, parse_call
from grpo_roc_jax.text.chat_format import Trace
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import malformed_result
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.tools.registry import Job, Registry, Tool, tool_of_function
from grpo_roc_jax.types import Problem, ToolResult, Trajectory

FUNCTIONS = "functions"
"""Name of the family."""

Call = tuple[str, dict[str, Any]]
"""(function, arguments)."""


class Shelf:
    """Three boxes. Self-contained, since its source runs in the sandbox."""

    def __init__(self) -> None:
        self.boxes = {"a": 5, "b": 5, "c": 5}

    def put(self, box: str, n: int) -> str:
        """Puts n things into a box."""
        return self._change(box, n)

    def take(self, box: str, n: int) -> str:
        """Takes n things out of a box."""
        return self._change(box, -n)

    def move(self, box: str, to: str, n: int) -> str:
        """Moves n things from a box to another one."""
        self._known(to)
        if box == to:
            raise ValueError("twice the same box")
        self._check(box, -n)
        self._check(to, n)
        return self._change(box, -n) + ", " + self._change(to, n)

    def look(self, box: str) -> str:
        """Tells what a box holds."""
        self._known(box)
        return f"{box}: {self.boxes[box]}"

    def _known(self, box: str) -> None:
        if box not in self.boxes:
            raise ValueError("no such box")

    def _check(self, box: str, n: int) -> None:
        self._known(box)
        if self.boxes[box] + n < 0:
            raise ValueError(f"{box} holds {self.boxes[box]}")

    def _change(self, box: str, n: int) -> str:
        self._check(box, n)
        self.boxes[box] += n
        return self.look(box)


SOURCE = inspect.getsource(Shelf)
NAMES = ("put", "take", "move", "look")
"""Methods of `Shelf` that the policy calls."""


# The tools.


def program(name: str, arguments: Mapping[str, Any]) -> str:
    """The code that runs a call; the first one of a session defines the boxes."""
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"if 'shelf' not in globals():\n    exec({SOURCE!r})\n    shelf = Shelf()\nprint(shelf.{name}({words}))"


def function_tools() -> list[Tool]:
    """The functions as tools that share one session per trajectory."""

    def tool(name: str) -> Tool:
        made = tool_of_function(getattr(Shelf(), name), "trainer")
        return replace(made, prepare=lambda given, session: Job(program(name, given), session=session))

    return [tool(name) for name in NAMES]


# The tasks.


def draw_task(rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    """(prompt, answer, extra) of a task of level + 1 steps; from level 2 on some steps move or take all of a box."""
    shelf = Shelf()
    steps, calls = [], []
    for number in range(1, level + 2):
        text, call = _draw_step(rng, shelf, everything=level > 1 and rng.random() < 0.5)
        steps.append(f"{number}: {text}.")
        calls.append(call)
        getattr(shelf, call[0])(**call[1])
    solution = "\n".join(call_text(call) for call in calls)
    extra = {
        "calls": [list(call) for call in calls],
        "hints": ["call the functions", solution],
        "solution": solution,
    }
    return " ".join(steps), "done", extra


def _draw_step(rng: np.random.Generator, shelf: Shelf, *, everything: bool) -> tuple[str, Call]:
    """One step as text and as its gold call, valid for the current contents of the boxes."""
    boxes = list(shelf.boxes)
    full = [box for box in boxes if shelf.boxes[box]]
    kind = str(rng.choice(["put", "take", "move"])) if full and not everything else "put"
    if everything and full:
        kind = str(rng.choice(["take", "move"]))
    if kind == "put":
        box, n = str(rng.choice(boxes)), int(rng.integers(1, 6))
        return f"put {n} in {box}", ("put", {"box": box, "n": n})
    box = str(rng.choice(full))
    content = shelf.boxes[box]
    n = content if everything else int(rng.integers(1, min(content, 5) + 1))
    amount = "all" if everything else str(n)
    if kind == "take":
        return f"take {amount} from {box}", ("take", {"box": box, "n": n})
    to = str(rng.choice([other for other in boxes if other != box]))
    return f"move {amount} from {box} to {to}", ("move", {"box": box, "to": to, "n": n})


def call_text(call: Call) -> str:
    """The JSON of a call as the policy must write it."""
    return json.dumps({"name": call[0], "arguments": call[1]})


# The verifier.


def state_and_recall(problem: Problem, trajectories: Sequence[Trajectory]) -> list[float]:
    """1 if the calls reach the gold state and include every gold call, else 0; a function for `reward.functions`."""
    return [float(succeeds(problem, executed(trajectory))) for trajectory in trajectories]


def executed(trajectory: Trajectory) -> list[Call]:
    """The calls of the functions that ran without an error, in order; the policy may have other tools too."""
    return [
        (call.name, dict(call.arguments))
        for turn in trajectory.turns
        for call, result in zip(turn.calls, turn.results, strict=False)  # the calls of the last turn may not have run
        if result.ok and call.name in NAMES
    ]


def succeeds(problem: Problem, calls: Sequence[Call]) -> bool:
    """Whether the boxes end as after the gold calls, and `calls` includes each gold call with all its arguments."""
    gold = [(name, arguments) for name, arguments in problem.extra["calls"]]
    if replayed(calls) != replayed(gold):
        return False
    return all(any(name == n and needed.items() <= given.items() for n, given in calls) for name, needed in gold)


def replayed(calls: Sequence[Call]) -> dict[str, int]:
    """Contents of the boxes after these calls, all of which must be valid."""
    shelf = Shelf()
    for name, arguments in calls:
        getattr(shelf, name)(**arguments)
    return shelf.boxes


# The demonstrator.


def demonstrate_functions(problem: Problem, kind: str, rng: np.random.Generator) -> Trace:
    """A trace that does the task cleanly, with a repaired fault, wrongly, or not at all. `extra["success"]` says
    whether the task was solved.

    Args:
        problem: A problem of this world.
        kind: One of the kinds of `DemonstrationConfig`; `guess` claims to be done without a call.
        rng: Draws the faults.
    """
    gold: list[Call] = [(name, dict(arguments)) for name, arguments in problem.extra["calls"]]
    index = int(rng.integers(len(gold)))
    texts = [call_text(call) for call in gold]
    if kind == "guess":
        texts = []
    elif kind == "wrong":
        texts[index : index + 1] = _slip(gold[index], rng)
    elif kind == "repair":
        texts.insert(index, _fault(gold[index], rng))
    shelf, done, observations = Shelf(), [], []
    for text in texts:
        result = _run(shelf, text)
        if result.ok:
            call = parse_call(text)
            done.append((call.name, dict(call.arguments)))
        observations.append((result.observation,))
    turns = [f"do it</reason>{CALL_OPEN}{text}{CALL_CLOSE}" for text in texts]
    final = f"done</reason><answer>\\boxed{{{problem.answer}}}</answer>"
    labelled = replace(problem, extra={**problem.extra, "success": succeeds(problem, done)})
    return Trace(labelled, (*turns, final), tuple(observations), kind)


def _slip(call: Call, rng: np.random.Generator) -> list[str]:
    """Replaces a step by nothing, or by the same call with one more thing."""
    if rng.random() < 0.5:
        return []
    return [call_text((call[0], call[1] | {"n": call[1]["n"] + 1}))]


def _fault(call: Call, rng: np.random.Generator) -> str:
    """A call that fails: too large a number, a misspelled function, an unknown box, or truncated JSON."""
    name, arguments = call
    faults = [
        call_text(("take", {"box": arguments["box"], "n": 99})),
        call_text((name + name[-1], arguments)),
        call_text((name, arguments | {"box": "d"})),
        call_text(call)[:-1],
    ]
    return faults[rng.integers(len(faults))]


def _run(shelf: Shelf, text: str) -> ToolResult:
    """Outcome of a demonstrator's own call, as the executor would report it."""
    call = parse_call(text)
    if call.fault is not None:
        return malformed_result(call.message)
    job = Registry(function_tools()).prepare(call.name, call.arguments, None)
    if isinstance(job, ToolResult):
        return replace(job, observation=observe(job, "", ToolsConfig()))
    try:
        result = ToolResult("ok", stdout=getattr(shelf, call.name)(**call.arguments) + "\n")
    except ValueError as error:
        line = job.code.count("\n") + 1
        result = ToolResult("exception", error_type="ValueError", error_message=str(error), error_line=line)
    return replace(result, observation=observe(result, job.code, ToolsConfig()))

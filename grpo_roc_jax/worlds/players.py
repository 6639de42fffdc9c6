"""Worlds that are played: problems of the environments that ship with the library, and demonstrations of them.

`world:guess:LEVEL`, `world:bank:LEVEL`, `world:correct:LEVEL` and `world:corridor:LEVEL` are addressed like the other
worlds. A demonstration is a game that a scripted player plays against the environment itself.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_roc_jax.environments.environment import method_tools
from grpo_roc_jax.environments.episode import checked_observation, checked_text
from grpo_roc_jax.text.calls import CALL_CLOSE, CALL_OPEN, call_blocks, parse_call
from grpo_roc_jax.text.chat_format import Trace
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.tools.registry import failed_result, returned_result
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Turn

ACCOUNTS = ("x", "y", "z")

Draw = Callable[[np.random.Generator, int], tuple[str, str, dict[str, Any]]]
"""(rng, level) -> prompt, answer, extra columns."""
Player = Callable[[Problem, Sequence[Turn], str, np.random.Generator], str]
"""(problem, turns so far, kind of demonstration, rng) -> the text of the next turn."""


@dataclass(frozen=True)
class PlayedWorld:
    """A game: its environment, its problems, and a scripted player for each kind of demonstration."""

    environment: str
    """Module and class; imported when it is played."""
    draw: Draw
    play: Player
    turns: int
    """Most turns of a demonstration."""


def _draw_guess(rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    most = 9 * level
    secret = int(rng.integers(1, most + 1))
    return f"game {rng.integers(1000)}: 1-{most}", str(secret), {"most": most}


def _play_guess(problem: Problem, turns: Sequence[Turn], kind: str, rng: np.random.Generator) -> str:
    low, high = 1, problem.extra["most"]
    if kind in ("guess", "wrong"):
        return str(rng.integers(low, high + 1))
    for turn in turns:
        guess = int(turn.text)
        low, high = (max(low, guess + 1), high) if turn.reply == "up" else (low, min(high, guess - 1))
    return str((low + high) // 2 if kind == "clean" else rng.integers(low, high + 1))


def _draw_bank(rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    """Two orders, each for all that an account holds, which only `look` or a refused payment reveals; at level 1
    balances have one digit."""
    balances = {name: int(rng.integers(1, 4 * level + 1)) for name in ACCOUNTS}
    remaining, orders = dict(balances), []
    for _ in range(2):
        a = str(rng.choice([name for name in ACCOUNTS if remaining[name]]))
        b = str(rng.choice([name for name in ACCOUNTS if name != a]))
        orders.append((a, b, remaining[a]))
        remaining[a], remaining[b] = 0, remaining[b] + remaining[a]
    prompt = ", ".join(f"{a} to {b}" for a, b, _ in orders)
    return prompt, "paid", {"balances": balances, "orders": [list(order) for order in orders]}


def _play_bank(problem: Problem, turns: Sequence[Turn], kind: str, rng: np.random.Generator) -> str:
    """A good player looks before each payment. `guess` pays arbitrary amounts, once for each order, and says that it is
    done; `repair` begins with too large an amount, and learns from the refusal."""
    orders = problem.extra["orders"]
    if kind == "guess" and len(turns) == len(orders):
        return "done"
    answers = [(call.name, result.ok) for t in turns for call, result in zip(t.calls, t.results, strict=True)]
    paid = len(turns) if kind == "guess" else answers.count(("pay", True))
    a, b, n = orders[min(paid, len(orders) - 1)]
    if kind == "guess":
        return _call("pay", a=a, b=b, n=int(rng.integers(1, 10)))
    if kind == "repair" and not answers:
        return _call("pay", a=a, b=b, n=99)
    if not answers or answers[-1] == ("pay", True):
        return _call("look", a=a)
    if kind == "wrong" and paid:
        b = next(name for name in ACCOUNTS if name not in (a, b))
    return _call("pay", a=a, b=b, n=n)


def _call(name: str, **arguments: Any) -> str:
    return CALL_OPEN + json.dumps({"name": name, "arguments": arguments}, separators=(",", ":")) + CALL_CLOSE


def _draw_correct(rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    digits = rng.integers(1, 10, size=1 + level)
    mistaken = digits.copy()
    digit_index = int(rng.integers(len(digits)))
    mistaken[digit_index] = (mistaken[digit_index] + rng.integers(1, 9) - 1) % 9 + 1
    return "write " + "".join(map(str, mistaken)), "".join(map(str, digits)), {"asked": "".join(map(str, mistaken))}


def _play_correct(problem: Problem, turns: Sequence[Turn], kind: str, rng: np.random.Generator) -> str:
    if not turns:
        return problem.extra["asked"]
    number, words = turns[-1].text, turns[-1].reply.split()
    digit_index, digit = int(words[2]) - 1, words[4]
    careless = kind in ("guess", "wrong") or (kind == "repair" and len(turns) == 1)
    if careless and rng.random() < 0.7:
        digit_index = int(rng.choice([other for other in range(len(number)) if other != digit_index]))
    return number[:digit_index] + digit + number[digit_index + 1 :]


def _draw_corridor(rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    return f"go {rng.integers(1000)}. ", "taken", {"seed": int(rng.integers(1 << 31))}


def _play_corridor(problem: Problem, turns: Sequence[Turn], kind: str, rng: np.random.Generator) -> str:
    seen = turns[-1].reply if turns else problem.prompt
    right = "take" if seen.endswith("here") else seen.split()[-1]
    chance = {"clean": 0.0, "repair": 0.3}.get(kind, 1.0)
    return str(rng.choice(["east", "west", "take"])) if rng.random() < chance else right


PLAYED = {
    "guess": PlayedWorld("worlds.games:GuessingGame", _draw_guess, _play_guess, 4),
    "bank": PlayedWorld("worlds.games:Bank", _draw_bank, _play_bank, 4),
    "correct": PlayedWorld("worlds.games:CorrectingUser", _draw_correct, _play_correct, 3),
    "corridor": PlayedWorld("contrib.environments.gymnasium_games:TextCorridor", _draw_corridor, _play_corridor, 6),
}
"""Played worlds by the name of their family."""


def demonstrate_played(problem: Problem, family: str, kind: str, rng: np.random.Generator) -> Trace:
    """A game as a trace; `extra["success"]` says whether it was won.

    Args:
        problem: A problem of this family.
        family: A name in `PLAYED`.
        kind: `clean` plays well, `repair` errs at times, `guess` and `wrong` play badly.
        rng: Draws the choices.
    """
    world = PLAYED[family]
    module, _, name = world.environment.partition(":")
    environment = getattr(importlib.import_module(f"grpo_roc_jax.{module}"), name)()
    opened = replace(problem, prompt=problem.prompt + checked_text(environment.reset(problem), "reset"))
    turns: list[Turn] = []
    paid, done = 0.0, False
    while not done and len(turns) < world.turns + problem.extra["level"] - 1:
        turn = _with_results(environment, world.play(opened, turns, kind, rng))
        reply = checked_observation(environment.step(turn))
        turns.append(replace(turn, reply=reply.text))
        paid, done = paid + reply.reward, reply.done or not (turn.calls or reply.text)
    environment.close()
    labelled = replace(opened, extra={**problem.extra, "success": paid > 1 - 1e-6})
    shown = tuple(tuple(result.observation for result in turn.results) for turn in turns[:-1])
    return Trace(labelled, tuple(t.text for t in turns), shown, kind, replies=tuple(t.reply for t in turns[:-1]))


def _with_results(environment: Any, text: str) -> Turn:
    """The turn of a player; its calls are run."""
    calls = tuple(parse_call(block) for block in call_blocks(text)[0])
    return Turn(0, 0, text, calls, tuple(_result(environment, call) for call in calls))


def _result(environment: Any, call: ToolCall) -> ToolResult:
    outcome = method_tools(type(environment)).prepare(call.name, call.arguments, None)
    if not isinstance(outcome, ToolResult):
        try:
            outcome = returned_result(getattr(environment, call.name)(**call.arguments))
        except ValueError as error:
            outcome = failed_result(error, None)
    return replace(outcome, observation=observe(outcome, "", ToolsConfig()))

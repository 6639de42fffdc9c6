"""Talk to a model that has the Python tool: `grpo-roc chat MODEL`.

MODEL is a run (its newest checkpoint, or one of them) or a published model (a directory or a hub id). Turns, calls and
outputs are shown as they come; `--prompt` asks once, and `--json` prints the dialogue for other programs. Rollouts use
the engine, the executor and the chat format of training, so they behave as they do there.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from grpo_roc_jax.commands.evaluate import check_temperature
from grpo_roc_jax.engine.protocol import Finish, RolloutLines, RunOptions, TurnEnd, Wait
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.record.live import printable
from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.rollout.sampler import Sampler, ToolEnvironment
from grpo_roc_jax.run.load import open_policy
from grpo_roc_jax.types import Problem, RolloutRequest, ToolResult, Trajectory, Turn

PROG = "grpo-roc chat"
INTERRUPTED = 130
"""The exit status of a shell for a program that Ctrl-C ended."""


@dataclass(frozen=True)
class ChatConfig:
    """Talks to a model with the Python tool. Further `--section.field value` replace settings of the run."""

    model: tyro.conf.Positional[str]
    """A run, one of its checkpoints, or a published model: a directory or a hub id."""
    prompt: str = ""
    """Asks this once and ends; empty for a dialogue in the terminal."""
    json: bool = False
    """Print one JSON object per answer instead of text."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of the sampled tokens; each question of a dialogue has its own random stream."""

    def __post_init__(self) -> None:
        check_temperature(self.temperature)


class WatchedEnvironment(ToolEnvironment):
    """The tools of a rollout; reports each turn and each result as it comes."""

    def __init__(self, *arguments: Any, watch: Callable[[Turn | ToolResult], None], **settings: Any):
        super().__init__(*arguments, **settings)
        self._watch = watch

    def turn_ended(self, index: int, turn: TurnEnd) -> Finish | Wait:
        decision = super().turn_ended(index, turn)
        self._watch(self._rows[index].turns[-1])
        return decision

    def _record_results(self, row: Any) -> tuple[ToolResult, ...]:
        results = super()._record_results(row)
        for result in results:
            self._watch(result)
        return results


@dataclass
class Dialogue:
    """A growing conversation with one model. What the model wrote is never encoded again. The oldest questions and
    their answers are left out if the prompt would be longer than `rollout.max_prompt_tokens`."""

    sampler: Sampler
    watch: Callable[[Turn | ToolResult], None] = lambda _: None
    temperature: float | None = 0.0
    seed: int = 0
    exchanges: list[tuple[str, list[int]]] = field(default_factory=list)
    """Each question with the ids of its answer (turns, calls, observations), as far as they are part of the next
    prompt."""
    questions: int = 0

    def ask(self, text: str) -> Trajectory:
        """The model's answer to `text` in the dialogue so far. If an exception interrupts the answer, its calls are
        killed, and the dialogue stays as it was.

        Raises:
            ValueError: The question alone is longer than a prompt may be.
        """
        engine, limit = self.sampler.engine, self.sampler.engine.config.max_prompt_tokens
        while len(prompt := self._prompt(text)) > limit:
            if not self.exchanges:
                raise ValueError(
                    f"the question has {len(prompt)} tokens, rollout.max_prompt_tokens = {limit}; raise it, and "
                    "batch.row_length with it"
                )
            self.exchanges.pop(0)
        problem = Problem(uid=f"chat-{self.questions}", prompt=text, answer="", source="chat")
        lines = RolloutLines("answer")
        options = RunOptions(self.seed, "chat", lines)
        request = RolloutRequest(
            problem, self.questions, temperature=self.temperature, prompt=np.asarray(prompt, np.int32)
        )
        environment = WatchedEnvironment(
            self.sampler.chat,
            self.sampler.executor,
            [request],
            step=options.key_step,
            seed=engine.seed,
            max_turns=engine.config.max_turns,
            watch=self.watch,
        )
        self.questions += 1  # also if the answer is interrupted, so that the next one has a tool session of its own
        try:
            (trajectory,), _ = engine.run(self.sampler.weights, [request], environment, options)
        except BaseException:
            environment.cancelled(0)
            raise
        finally:
            lines.close()
        self.exchanges.append((text, trajectory.tokens[len(prompt) :].tolist()))
        return trajectory

    def _prompt(self, text: str) -> list[int]:
        """Ids of the dialogue with a further question."""
        chat = self.sampler.chat
        first, *later = [*(question for question, _ in self.exchanges), text]
        ids = chat.prompt_ids(Problem(uid="chat", prompt=first, answer="", source="chat"))
        for (_, answer), question in zip(self.exchanges, later, strict=True):
            ids += [*answer, *chat.question_ids(question, closed=answer[-1:] == [chat.end_id])]
        return ids


def to_json(question: str, trajectory: Trajectory) -> dict[str, Any]:
    """One question and its answer for other programs."""
    return {
        "prompt": question,
        "answer": find_answer([turn.text for turn in trajectory.turns], lenient=True).answer,
        "stop": trajectory.stop,
        "tokens": trajectory.length - trajectory.prompt_length,
        "turns": [
            {
                "text": turn.text,
                "calls": [
                    {"name": call.name, "arguments": dict(call.arguments), "fault": call.fault} for call in turn.calls
                ],
                "results": [
                    {"kind": result.kind, "observation": result.observation, "wall_ms": result.wall_ms}
                    for result in turn.results
                ],
            }
            for turn in trajectory.turns
        ],
    }


def show(console: Console, event: Turn | ToolResult) -> None:
    """Shows a turn or a result in the terminal."""
    if isinstance(event, Turn):
        console.print(printable(event.text.strip()))
        return
    style = "green" if event.ok else "yellow"
    console.print(f"[{style}]{event.kind}[/] {event.wall_ms:.0f} ms", highlight=False)
    console.print(printable(event.observation, "dim"))


def converse(dialogue: Dialogue, console: Console, ask: Callable[[], str]) -> None:
    """Answers questions from the terminal until there are no more; `/new` begins a new dialogue, and an interrupt stops
    the answer alone."""
    console.print("Ask; /new begins a new dialogue, Ctrl-C stops an answer, an empty line or Ctrl-D ends.", style="dim")
    while True:
        try:
            text = ask().strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not text:
            return
        if text == "/new":
            dialogue.exchanges.clear()
            continue
        before = len(dialogue.exchanges)
        try:
            trajectory = dialogue.ask(text)
        except ValueError as error:
            console.print(printable(str(error), "red"))
            continue
        except KeyboardInterrupt:
            console.print("(stopped)", style="red")
            continue
        if trajectory.stop not in ("answer", "eos"):
            console.print(f"(stopped: {trajectory.stop})", style="red")
        if left := before + 1 - len(dialogue.exchanges):
            console.print(f"(answered without the {left} oldest questions; the prompt is full)", style="dim")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    show_log()
    try:
        options, overrides = tyro.cli(ChatConfig, args=argv, prog=PROG, return_unknown_args=True)
        with open_policy(options.model, overrides, prog=PROG) as (_, sampling):
            console = Console(stderr=options.json)
            watch = (lambda _: None) if options.json else (lambda event: show(console, event))
            dialogue = Dialogue(sampling.sampler, watch, options.temperature, options.seed)
            if not options.prompt:
                converse(dialogue, console, lambda: console.input("[bold]> [/]"))
                return 0
            trajectory = dialogue.ask(options.prompt)
            if options.json:
                print(json.dumps(to_json(options.prompt, trajectory), ensure_ascii=False))
    except (ValueError, OSError) as error:  # ConfigError is a ValueError
        print(f"chat: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("chat: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0

"""Talk to a model that has the Python tool: `python -m grpo_roc_jax.chat MODEL`.

MODEL is a run (its newest checkpoint, or one of them) or a published model (a directory or a hub id). Turns, calls and
outputs are shown as they come; `--prompt` asks once, and `--json` prints the dialogue for other programs. Rollouts go
through the engine, the executor and the chat format of training, so what is seen here is what is trained there.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape

from grpo_roc_jax.cli import ConfigError, load_config
from grpo_roc_jax.config import Config
from grpo_roc_jax.evaluate import load_policy
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.transformer import compute_dtype
from grpo_roc_jax.policy import split_checkpoint
from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.rollout.collect import Ask, ToolEnvironment
from grpo_roc_jax.rollout.records import Request, Rollout, TurnEnd
from grpo_roc_jax.rollout.weights import SamplerParams
from grpo_roc_jax.sharding import param_shardings
from grpo_roc_jax.stages import Stages, make_stages
from grpo_roc_jax.text.templates import TemplateError, load_template
from grpo_roc_jax.types import Problem, ToolResult, Turn

PROG = "python -m grpo_roc_jax.chat"
PUBLISHED = """
--text.tokenizer=model --text.tools_section=True --text.observation_tokens=512 --rollout.max_turns=10
--rollout.append_lengths 32 128 512 --data.eval_problems=0
""".split()  # noqa: SIM905 (a command line reads better as one)
"""Settings for a published model, before those of the command line."""
LONGEST = 8192
"""Tokens of a whole dialogue with a published model, where it was made for more."""


@dataclass(frozen=True)
class ChatConfig:
    """Talks to a model with the Python tool. Further `--section.field value` replace settings of the run."""

    model: tyro.conf.Positional[str]
    """A run, one of its checkpoints, or a published model: a directory or a hub id."""
    prompt: str = ""
    """Asks this once and ends; empty for a dialogue in the terminal."""
    json: bool = False
    """Prints one JSON object per answer instead of text."""
    temperature: float | None = None
    """Sampling temperature, 0 for greedy; by default that of the run, 1 for a published model."""
    seed: int = 0
    """Of the sampled tokens; the n-th question of a dialogue has its own randomness."""


def settings_for(model: str, overrides: Sequence[str]) -> Config:
    """The configuration of a run, or one that fits a published model, with the overrides of the command line."""
    if _is_run(model):
        run, _ = split_checkpoint(model)
        return load_config(Config, [str(run / "config.yaml"), *_one_row(), *overrides], prog=PROG)
    folder = find_model(model)
    made_for = resolve_config(ModelConfig(path=str(folder))).max_positions or LONGEST
    longest = min(made_for, LONGEST)
    words = [f"--model.path={folder}", *PUBLISHED, *_one_row(), f"--rollout.max_prompt_tokens={longest * 3 // 4}"]
    words += [f"--rollout.max_response_tokens={longest // 4}", f"--batch.row_length={longest}"]
    try:
        load_template(folder)
        words.append("--text.template=model")
    except TemplateError:
        words.append("--text.system=default")
    return load_config(Config, [*words, *overrides], prog=PROG)


def _one_row() -> list[str]:
    """A copy of the parameters and one row on every device, whatever the run was spread over."""
    return [f"--rollout.slots={jax.device_count()}", "--sharding.data=-1", "--sharding.fsdp=1", "--sharding.tensor=1"]


def _is_run(model: str) -> bool:
    try:
        split_checkpoint(model)
    except ConfigError:
        return False
    return True


@contextmanager
def open_model(model: str, overrides: Sequence[str] = ()) -> Iterator[tuple[Stages, SamplerParams]]:
    """The parts of a run on one device and the policy to sample with.

    Raises:
        ConfigError, ValueError: neither a run nor a published model, or settings that do not fit.
    """
    config = settings_for(model, overrides)
    with make_stages(config) as stages:
        if _is_run(model):
            run, step = split_checkpoint(model)
            _, params = load_policy(stages, run / "checkpoints", step)
        else:
            shardings, dtype = param_shardings(stages.model, stages.mesh), compute_dtype(stages.model)
            params = load_params(Path(config.model.path), stages.model, shardings, dtype=dtype, stacked=False)
        yield stages, stages.engine.publish(params, 0)


class WatchedEnvironment(ToolEnvironment):
    """The tools of a rollout, with a look at each turn and each result as it comes."""

    def __init__(self, *arguments: Any, watch: Callable[[Turn | ToolResult], None], **settings: Any):
        super().__init__(*arguments, **settings)
        self._watch = watch

    def turn_ended(self, index: int, turn: TurnEnd) -> Any:
        before = len(self.turns(index))
        decision = super().turn_ended(index, turn)
        self._watch(self.turns(index)[before])
        return decision

    def _record(self, row: Any) -> tuple[ToolResult, ...]:
        results = super()._record(row)
        for result in results:
            self._watch(result)
        return results


@dataclass
class Dialogue:
    """A growing conversation with one model; nothing said is rendered or encoded again."""

    stages: Stages
    sampler: SamplerParams
    watch: Callable[[Turn | ToolResult], None] = lambda _: None
    temperature: float | None = None
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    asked: int = 0

    def ask(self, text: str) -> tuple[Rollout, tuple[Turn, ...]]:
        """The model's answer to `text`, after everything said before.

        Raises:
            ValueError: the dialogue no longer fits the prompt length.
        """
        chat, config = self.stages.chat, self.stages.config
        problem = Problem(uid=f"chat-{self.asked}", prompt=text, answer="", source="chat")
        if self.tokens:
            closed = self.tokens[-1] == chat.end_id
            prompt = [*self.tokens, *chat.question_ids(text, closed=closed)]
        else:
            prompt = chat.prompt_ids(problem)
        if len(prompt) > config.rollout.max_prompt_tokens:
            raise ValueError(
                f"the dialogue has {len(prompt)} tokens, rollout.max_prompt_tokens = "
                f"{config.rollout.max_prompt_tokens}; begin a new one (/new) or raise it"
            )
        key = (self.seed, self.asked, 0)
        ask = Ask(problem, self.asked, 0)
        environment = WatchedEnvironment(
            chat,
            self.stages.executor,
            [ask],
            step=self.seed,
            seed=config.seed,
            max_turns=config.rollout.max_turns,
            watch=self.watch,
        )
        request = Request(
            key, np.asarray(prompt, np.int32), 0, config.rollout.max_response_tokens, temperature=self.temperature
        )
        rollouts, _ = self.stages.engine.run(self.sampler, [request], environment, cut=False)
        self.tokens = rollouts[0].tokens.tolist()
        self.asked += 1
        return rollouts[0], environment.turns(0)


def to_json(question: str, rollout: Rollout, turns: Sequence[Turn]) -> dict[str, Any]:
    """The dialogue of one question for other programs."""
    return {
        "prompt": question,
        "answer": find_answer([turn.text for turn in turns], lenient=True).answer,
        "stop": rollout.stop,
        "tokens": len(rollout.tokens) - rollout.prompt_length,
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
            for turn in turns
        ],
    }


def show(console: Console, event: Turn | ToolResult) -> None:
    """A turn or a result in the terminal."""
    if isinstance(event, Turn):
        console.print(escape(event.text.strip()), highlight=False)
        return
    style = "green" if event.ok else "yellow"
    console.print(f"[{style}]{event.kind}[/] {event.wall_ms:.0f} ms", highlight=False)
    console.print(escape(event.observation), style="dim", highlight=False)


def converse(dialogue: Dialogue, console: Console, ask: Callable[[], str]) -> None:
    """Questions from the terminal until it ends; `/new` forgets what was said."""
    console.print("Ask; /new begins a new dialogue, an empty line or Ctrl-D ends.", style="dim")
    while True:
        try:
            text = ask().strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not text:
            return
        if text == "/new":
            dialogue.tokens = []
            continue
        try:
            rollout, _ = dialogue.ask(text)
        except ValueError as error:
            console.print(escape(str(error)), style="red")
            continue
        if rollout.stop not in ("answer", "eos"):
            console.print(f"(stopped: {rollout.stop})", style="red")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        asked, overrides = tyro.cli(
            ChatConfig, args=argv, prog=PROG, description=ChatConfig.__doc__, return_unknown_args=True
        )
        with open_model(asked.model, overrides) as (stages, sampler):
            console = Console(stderr=asked.json)
            watch = (lambda _: None) if asked.json else (lambda event: show(console, event))
            dialogue = Dialogue(stages, sampler, watch, asked.temperature, asked.seed)
            if not asked.prompt:
                converse(dialogue, console, lambda: console.input("[bold]> [/]"))
                return 0
            rollout, turns = dialogue.ask(asked.prompt)
            if asked.json:
                print(json.dumps(to_json(asked.prompt, rollout, turns), ensure_ascii=False))
    except (ValueError, OSError) as error:  # ConfigError is a ValueError
        print(f"chat: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

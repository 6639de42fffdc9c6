"""Settings seen in a training step: everything is the run's own code but the model, which is a script.

The scripted engine answers each request with turns drawn from what reaches it (key, prompt, prefix, temperature), so
that whatever a setting changes on the way there, or after it, shows in the requests, the selection, the packed rows or
the state of the method.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream
from grpo_roc_jax.engine.protocol import Finish, Observe, RolloutStats, RunOptions, TurnEnd
from grpo_roc_jax.engine.scheduler import expand
from grpo_roc_jax.engine.table import starting_point
from grpo_roc_jax.learner import learner as learners
from grpo_roc_jax.learner.update import make_schedule
from grpo_roc_jax.method.compose import initial_state, next_state
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.run import components as components_module
from grpo_roc_jax.run import supervised
from grpo_roc_jax.run.evaluate import evaluate_policy
from grpo_roc_jax.run.learning import make_learner
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.stream.rollout_stream import ESS
from grpo_roc_jax.train import sample_step
from grpo_roc_jax.types import Group, ToolResult, Trajectory
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.knobs import digest, only, seen
from tests.helpers.stream_fakes import opened, play

SOLVED = (0.0, 0.4, 0.7, 1.0)
"""How often the script solves a problem of each class; a prompt that says more than the problem adds a half."""
WRONG = ("wrong", "wrong", "silent", "long")


class ScriptedEngine:
    """Stands where the engine does: turns come from a generator seeded by all that a request says."""

    def __init__(self, tokenizer: Any, chat: Any, config: Config):
        self.tokenizer, self.chat, self.config, self.seed = tokenizer, chat, config.rollout, config.seed
        self.asked: list[tuple] = []

    def publish(self, params: Any, version: int) -> Any:
        return SimpleNamespace(params=params, version=version)

    def warmup(self, sampler: Any) -> list:
        return []

    def describe_attention(self) -> str:
        return "attention to the cache: none"

    def run(self, sampler: Any, requests: Sequence, environment: Any, options: RunOptions):
        rows, _ = expand(requests, options.key_step, self.config.max_response_tokens, 1.0)
        stats, completed, unneeded = RolloutStats(rollouts=len(rows)), [], set()
        for i, row in enumerate(rows):
            rolled = self.roll(sampler.version, i, row, environment, i in unneeded)
            completed.append(environment.completed(i, rolled))
            unneeded.update(options.cancel_policy(i, completed[i]) if options.cancel_policy is not None else ())
            stats.stops[completed[i].stop] += 1
        return completed, stats

    def roll(self, version: int, index: int, request: Any, environment: Any, cut: bool) -> Trajectory:
        begun = starting_point(request).tokens
        key = (request.step, request.place, request.first_sample)
        summary = (key, digest(np.asarray(begun)), request.budget, request.temperature)
        self.asked.append(summary)
        seed = hashlib.blake2b(repr(summary).encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(seed, "little"))
        most = len(request.prompt) + request.budget
        tokens, mask, stop = list(map(int, begun)), [False] * len(begun), "cancelled" if cut else ""
        plans = iter(script(self.tokenizer.decode(request.prompt), rng))
        while not stop:
            text = next(plans, "on and on " * 60)
            drawn = self.chat.turn_ids(text) if not text.startswith("LATE") else late(self, text, most - len(tokens))
            drawn = drawn[: most - len(tokens)]
            start = len(tokens)
            tokens, mask = tokens + drawn, mask + [True] * len(drawn)
            reason = "length" if len(tokens) >= most else "stop"
            ids = np.array(drawn, np.int32)
            answer = environment.turn_ended(index, TurnEnd(index, start, ids, np.zeros(len(ids), np.float32), reason))
            while not isinstance(answer, Finish | Observe):
                answer = next((completed for _, completed in environment.poll(0.0)), answer)
            if isinstance(answer, Finish):
                stop = "length" if reason == "length" else answer.stop
            elif len(tokens) + len(answer.ids) >= most:
                environment.cancelled(index)
                stop = "length"
            else:
                tokens, mask = tokens + answer.ids.tolist(), mask + [False] * len(answer.ids)
        drawn = np.array(mask)
        logprobs = np.where(drawn, -rng.gamma(2.0, 0.4, len(drawn)), 0.0).astype(np.float32)
        versions = np.where(drawn, version, -1).astype(np.int32)
        return Trajectory(
            np.array(tokens, np.int32), drawn, logprobs, versions, len(request.prompt), (), stop,
            request.first_sample, condition=request.condition,
        )  # fmt: skip


def script(prompt: str, rng: np.random.Generator) -> list[str]:
    """Texts of the turns that answer a prompt."""
    match = re.search(r"class (\d): name the number (\d+) of the list(.*)", prompt, re.S)
    kind, number, rest = (int(match[1]), int(match[2]), match[3]) if match else (1, 7, "")
    right = rng.random() < SOLVED[kind] + 0.5 * (len(rest) > 60)
    style = rng.choice(["right", "right", "twice", "late"]) if right else rng.choice(WRONG)
    calls = int(rng.integers(0, 4))
    turns = [
        f"so let us see{' really' * int(rng.integers(0, 6))}</reason>"
        f'<tool_call>{{"name": "python_code_with_standard_io", "arguments": {{"code": "{name}({i})"}}}}</tool_call>'
        for i, name in enumerate(rng.choice(["bad", "print"], calls))
    ]
    answer = f"<answer>\\boxed{{{number + (style == 'wrong')}}}</answer>"
    last = {
        "right": f"it is</reason>{answer}",
        "wrong": f"it is</reason>{answer}",
        "twice": f"<answer> so it is</reason>{answer}",
        "late": f"LATE{answer}",
        "silent": "who knows</reason>",
        "long": "on and on " * 60,
    }[style]
    return [*turns, last]


def late(engine: ScriptedEngine, text: str, room: int) -> list[int]:
    """An answer that ends with the last token of the budget."""
    answer = engine.chat.turn_ids(text.removeprefix("LATE"))
    filler = engine.chat.turn_ids("still thinking " * 80)[:-1]
    return (filler * 9)[: max(room - len(answer), 0)] + answer


def answer_call(program: Any) -> ToolResult:
    if "bad" in program.code:
        return ToolResult("exception", error_type="NameError", error_message="bad", wall_ms=1.0)
    return ToolResult(
        "ok", stdout=f"{program.seed % 97} error free at 0x7f{program.seed % 9}00000\n", stdout_bytes=9, wall_ms=1.0
    )


@contextmanager
def scripted_parts(config: Config, **options: Any) -> Iterator[tuple[PolicyModel, GroupSampler]]:
    """`components.make_parts` on one device, with a scripted model and tools that run nothing."""
    mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
    patched = mock.patch.multiple(
        components_module,
        make_mesh=lambda _: mesh,
        make_executor=lambda tools, registry: FakeExecutor(answer_call, config=tools, registry=registry),
    )
    with patched, components_module.make_parts(config, **options) as (policy, sampling):
        chat = sampling.sampler.chat
        sampling.sampler.engine = ScriptedEngine(chat.tokenizer, chat, config)
        yield policy, sampling


def fake_score(params: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities, entropies) made of the tokens: as good as any for what reads them."""
    tokens, recorded = np.asarray(batch.tokens), np.asarray(batch.logprobs_old)
    shift = 0.1 * float(params["w"][0]) if isinstance(params, dict) else 0.1
    return (recorded - np.sin(tokens) * 0.8 - shift).astype(np.float32), np.abs(np.cos(tokens)).astype(np.float32)


def fake_update(state: Any, batch: Any) -> tuple[Any, dict[str, float]]:
    """An update that moves nothing and says what reached it."""
    worth = float(np.sum(np.asarray(batch.weights) * np.asarray(batch.advantages)))
    return state, {"loss/value": worth, "update/skipped": 0.0, "update/grad_norm": 1.0}


def scripted_programs() -> Any:
    """The scripted functions in place of those that compile."""
    return mock.patch.multiple(
        learners,
        make_update_step=lambda *_, **__: None,
        bind_base=lambda *_: fake_update,
        make_score=lambda *_, **__: fake_score,
    )


def taught(config: Config, policy: PolicyModel, chat: Any) -> list:
    """The supervised stage: its learning rates and batches, and the steps that wrote a row."""
    seen: list = []

    def scripted(model: Any, loss: Any, optim: Any, *_: Any, **__: Any) -> Any:
        seen.extend(float(make_schedule(optim)(i)) for i in range(config.sft.steps))
        return lambda state, batch: (state, seen.append(digest(leaves_of(batch))) or {"loss/nll": 1.0})

    writer = SimpleNamespace(say=lambda text: None, write_sft=lambda step, metrics: seen.append(step))
    started = mock.Mock(return_value=SimpleNamespace(params="taught"))
    with mock.patch.multiple(supervised, make_update_step=scripted, start_train_state=started):
        supervised.supervise(config, policy, chat, None, writer)
    return seen


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(tree))]


def step(config: Config) -> dict[str, str]:
    """The supervised stage, two steps and an evaluation: what was asked of the engine, what selection said, the packed
    rows, the state of the method, and the accuracy; or why the data are refused."""
    seen: dict[str, list] = {"taught": [], "selected": [], "rows": [], "state": [], "evaluated": []}
    with scripted_parts(config) as (policy, sampling), scripted_programs():
        chat = sampling.sampler.chat
        try:
            seen["taught"] = taught(config, policy, chat) if config.sft.steps else []
            stream = make_problem_stream(config.data, problems=config.group.problems, seed=config.seed)
            held_out = eval_problems(config.data)
        except ValueError as error:
            return {"refused": str(error)}
        params = {"w": np.ones(1, np.float32)}
        run = RunState(SimpleNamespace(params=params), {"w": np.zeros(1)}, stream, initial_state(config))
        learner = make_learner(config, policy, chat)
        for _ in range(2):
            samples = sample_step(config, policy, sampling, run)
            groups = run.buffer.take(config.group.problems)
            batches = learner.batches(groups, samples.explanations, run)
            run.method = next_state(samples.groups, groups, config, run.method)
            run.step += 1
            seen["selected"] += [(s.indices, s.reasons, s.penalties, s.kept) for s in samples.selections]
            for batch in batches:
                seen["rows"] += [*leaves_of(batch.packed), batch.placement.micro, batch.placement.row]
                seen["rows"].append(batch.temperature)
            seen["state"].append(run.method.to_tree())
        sampling.sampler.publish(None, 2)
        accuracy, metrics, _ = evaluate_policy(
            config, sampling, held_out, config.eval.samples, temperature=config.eval.temperature
        )
        seen["evaluated"] = [accuracy, {name: value for name, value in metrics.items() if not name.startswith("time/")}]
        return {"asked": digest(sampling.sampler.engine.asked)} | {name: digest(part) for name, part in seen.items()}


# ---- the user's own functions, by dotted path ----------------------------------------------------------------------


def doubled(rows: Any, groups: Any, policy: Any) -> list:
    return [replace(row, weights=2 * row.weights) for row in rows]


def shortened(group: Group) -> Group:
    """Without all but three trajectories, as where infrastructure failures took the others."""
    return Group(group.problem, group.trajectories[:3], group.verdicts[:3])


# ---- cases ---------------------------------------------------------------------------------------------------------

PART = "tests.helpers.knobs_step:"


def streamed(config: Config) -> Any:
    """Six steps whose rollouts run on: what is begun, dropped and taken in which order, and what is reported."""
    stream, run, engine = opened(config, 0)
    rounds, dropped = play(stream, run, engine, 6, np.random.default_rng(0))
    order = [group.problem.uid for _, samples in rounds for group in samples.groups]
    return len(engine.submitted), dropped, order, stream.after_update(run, [], {ESS: 0.4})[1]


WORLDS = {"data.sources": ("world:products:1", "world:gcd:1"), "data.eval_sources": ()}
TAUGHT = WORLDS | {"sft.steps": 4, "sft.traces": 4}
TRACES = TAUGHT | {"data.trace_sources": ("world:gcd:1", "{files}/traces.jsonl")}
SEEN = (
    seen(step, "group seed eval.samples eval.temperature rollout.max_turns rollout.early_exit"),
    seen(step, "tools.observation tools.hide_addresses"),
    only(step, "tools", enabled=("jupyter_code",)),
    seen(step, "batch", updates=2),
    seen(step, "batch.updates", {"batch.updates": {"kind": "several", "parts": 2}}, parts=4),
    seen(step, "method", edit_groups=f"{PART}shortened", edit_rows=f"{PART}doubled"),
    seen(step, "data", sources=("{files}/more.jsonl",), eval_sources=("{files}/more.jsonl",)),
    only(step, "data", prompt_column="solution", answer_column="explained"),
    only(step, "data", {"data.sources": ("{files}/bad.jsonl",)}, bad_rows="fail"),
    only(step, "data", TAUGHT, weights=(1.0, 3.0), world_problems=3, trace_sources=("{files}/traces.jsonl",)),
    only(step, "data", TRACES, trace_weights=(1.0, 9.0)),
    only(step, "data.demonstrations", TAUGHT, guess=5.0, repair=5.0, clean=5.0, wrong=5.0),
    seen(step, "sft", TAUGHT, warmup_steps=1, reward_tokens="token"),
    seen(streamed, "rollout.step_limit", {"rollout.step_limit": {"kind": "stream"}, "steps": 9}, lag=2),
)

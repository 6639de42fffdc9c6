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

import grpo_roc_jax as g
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream
from grpo_roc_jax.engine import scheduler, table
from grpo_roc_jax.engine.protocol import Finish, Observe, RolloutStats, TurnEnd
from grpo_roc_jax.learner import learner as learners
from grpo_roc_jax.learner.update import make_schedule
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.run import components as components_module
from grpo_roc_jax.run import run_state, sample, supervised
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.stream.rollout_stream import ESS
from grpo_roc_jax.train import sample_step
from grpo_roc_jax.types import ToolResult
from tests.helpers import fake_executor, stream_fakes
from tests.helpers.knobs import digest, only, seen


class ScriptedEngine:
    """Stands where the engine does: turns come from a generator seeded by all that a request says."""

    def __init__(self, chat: Any, config: g.Config):
        self.chat, self.config, self.seed, self.asked = chat, config.rollout, config.seed, []

    def publish(self, params: Any, version: int) -> Any:
        return SimpleNamespace(params=params, version=version)

    def run(self, sampler: Any, requests: Sequence, environment: Any, options: g.RunOptions):
        rows, _ = scheduler.expand(requests, options.key_step, self.config.max_response_tokens, 1.0)
        stats, completed, unneeded = RolloutStats(rollouts=len(rows)), [], set()
        for i, row in enumerate(rows):
            rolled = self.roll(sampler.version, i, row, environment, i in unneeded)
            completed.append(environment.completed(i, rolled))
            unneeded |= set(options.cancel_policy(i, completed[i]) if options.cancel_policy is not None else ())
        return completed, stats

    def roll(self, version: int, index: int, request: Any, environment: Any, cut: bool) -> g.Trajectory:
        begun = table.starting_point(request).tokens
        key = (request.step, request.place, request.first_sample)
        summary = (key, digest(np.asarray(begun)), request.budget, request.temperature)
        self.asked.append(summary)
        seed = hashlib.blake2b(repr(summary).encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(seed, "little"))
        most = len(request.prompt) + request.budget
        tokens, mask, stop = list(map(int, begun)), [False] * len(begun), "cancelled" if cut else ""
        plans = iter(script(self.chat.tokenizer.decode(request.prompt), rng))
        while not stop:
            start, drawn = len(tokens), self.chat.turn_ids(next(plans, "on and on " * 60))[: most - len(tokens)]
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
        drawn, prompt = np.array(mask), len(request.prompt)
        logprobs = np.where(drawn, -rng.gamma(2.0, 0.4, len(drawn)), 0.0).astype(np.float32)
        arrays = np.array(tokens, np.int32), drawn, logprobs, np.where(drawn, version, -1).astype(np.int32)
        return g.Trajectory(*arrays, prompt, (), stop, request.first_sample, condition=request.condition)


def script(prompt: str, rng: np.random.Generator) -> list[str]:
    """Texts of the turns that answer a prompt: calls, some of which fail, and an answer or none. How often it is right
    depends on the class of the problem; a prompt that says more than the problem adds a half."""
    match = re.search(r"class (\d): name the number (\d+) of the list(.*)", prompt, re.S)
    kind, number, rest = (int(match[1]), int(match[2]), match[3]) if match else (1, 7, "")
    right = rng.random() < (0.0, 0.4, 0.7, 1.0)[kind] + 0.5 * (len(rest) > 60)
    last = f"it is</reason><answer>\\boxed{{{number + 1 - right}}}</answer>"
    turns = [
        f"so let us see{' really' * int(rng.integers(0, 6))}</reason>"
        f'<tool_call>{{"name": "python_code_with_standard_io", "arguments": {{"code": "{name}({i})"}}}}</tool_call>'
        for i, name in enumerate(rng.choice(["bad", "print"], int(rng.integers(0, 4))))
    ]
    return [*turns, last if right else rng.choice([last, "who knows</reason>", "on and on " * 60])]


def answer_call(program: Any) -> ToolResult:
    if "bad" in program.code:
        return ToolResult("exception", error_type="NameError", error_message="bad", wall_ms=1.0)
    return ToolResult("ok", stdout=f"{program.seed % 97} error free at 0x7f{program.seed % 9}00000\n", wall_ms=1.0)


@contextmanager
def scripted_parts(config: g.Config) -> Iterator[tuple[PolicyModel, sample.GroupSampler]]:
    """`components.make_parts` on one device, with a scripted model, tools that run nothing and nothing compiled."""
    parts = mock.patch.multiple(
        components_module,
        make_mesh=lambda _: make_mesh(ShardingConfig(), jax.devices()[:1]),
        make_executor=lambda tools, registry: fake_executor.FakeExecutor(answer_call, config=tools, registry=registry),
    )
    programs = mock.patch.multiple(learners, make_update_step=mock.Mock(), bind_base=mock.Mock(), make_score=scoring)
    with parts, programs, components_module.make_parts(config) as (policy, sampling):
        sampling.sampler.engine = ScriptedEngine(sampling.sampler.chat, config)
        yield policy, sampling


def scoring(*_: Any, **__: Any) -> Any:
    """Log-probabilities and entropies made of the tokens: as good as any for what reads them."""
    return lambda params, batch: (batch.logprobs_old - np.sin(batch.tokens) - 0.1, np.abs(np.cos(batch.tokens)))


def taught(config: g.Config, policy: PolicyModel, chat: Any) -> list:
    """The supervised stage: its learning rates and batches, and the steps that wrote a row."""
    seen: list = []

    def scripted(model: Any, loss: Any, optim: Any, *_: Any, **__: Any) -> Any:
        seen.extend(float(make_schedule(optim)(i)) for i in range(config.sft.steps))
        return lambda state, batch: (state, seen.append(digest(leaves_of(batch))) or {"loss/nll": 1.0})

    writer = mock.Mock(write_sft=lambda step, metrics: seen.append(step))
    with mock.patch.multiple(supervised, make_update_step=scripted, start_train_state=mock.Mock()):
        supervised.supervise(config, policy, chat, None, writer)
    return seen


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(tree))]


def step(config: g.Config) -> str:
    """The supervised stage, two steps and an evaluation: what was asked of the engine, what selection said, the packed
    rows, the state of the method, and the accuracy; or why the data are refused."""
    with scripted_parts(config) as (policy, sampling):
        chat = sampling.sampler.chat
        try:
            seen = taught(config, policy, chat) if config.sft.steps else []
            stream = make_problem_stream(config.data, problems=config.group.problems, seed=config.seed)
            held_out = eval_problems(config.data)
        except ValueError as error:
            return f"refused: {error}"
        run = run_state.RunState(SimpleNamespace(params=None), None, stream, g.initial_state(config))
        learner = g.make_learner(config, policy, chat)
        for _ in range(2):
            samples = sample_step(config, policy, sampling, run)
            groups = run.buffer.take(config.group.problems)
            batches = learner.batches(groups, samples.explanations, run)
            run.method = g.next_state(samples.groups, groups, config, run.method)
            run.step += 1
            seen += [[s.indices, s.reasons, s.penalties, s.kept] for s in samples.selections]
            seen += [[leaves_of(b.packed), b.placement.micro, b.placement.row, b.temperature] for b in batches]
            seen.append(run.method.to_tree())
        sampling.sampler.publish(None, 2)
        options = {"temperature": config.eval.temperature}
        accuracy, metrics, _ = g.evaluate_policy(config, sampling, held_out, config.eval.samples, **options)
        metrics = {name: value for name, value in metrics.items() if not name.startswith("time/")}
        return digest(sampling.sampler.engine.asked, seen, accuracy, metrics)


def doubled(rows: Any, groups: Any, policy: Any) -> list:
    return [replace(row, weights=2 * row.weights) for row in rows]


def shortened(group: g.Group) -> g.Group:
    """Without all but three trajectories, as where infrastructure failures took the others."""
    return g.Group(group.problem, group.trajectories[:3], group.verdicts[:3])


def streamed(config: g.Config) -> Any:
    """Steps whose rollouts run on: what is begun, dropped and taken in which order, and what is reported."""
    stream, run, engine = stream_fakes.opened(config, 0)
    rounds, dropped = stream_fakes.play(stream, run, engine, 6, np.random.default_rng(0))
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
    seen(step, "method", edit_groups=f"{__name__}:shortened", edit_rows=f"{__name__}:doubled"),
    seen(step, "data", sources=("{files}/more.jsonl",), eval_sources=("{files}/more.jsonl",)),
    only(step, "data", prompt_column="solution", answer_column="explained"),
    only(step, "data", {"data.sources": ("{files}/bad.jsonl",)}, bad_rows="fail"),
    only(step, "data", TAUGHT, weights=(1.0, 3.0), world_problems=3, trace_sources=("{files}/traces.jsonl",)),
    only(step, "data", TRACES, trace_weights=(1.0, 9.0)),
    only(step, "data.demonstrations", TAUGHT, guess=5.0, repair=5.0, clean=5.0, wrong=5.0),
    seen(step, "sft", TAUGHT, warmup_steps=1, reward_tokens="token"),
    seen(streamed, "rollout.step_limit", {"rollout.step_limit": {"kind": "stream"}, "steps": 9}, lag=2),
)

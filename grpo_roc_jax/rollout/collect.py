"""Rollouts with tools: turns, calls and observations become trajectories.

The engine (`rollout.engine`) knows token ids and slots; this module is its environment. It parses a turn, hands the
calls to the executor the moment the turn is complete, and gives the observation back when all results of the turn
are there. Other rows go on decoding meanwhile.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_roc_jax.rollout.engine import Engine, Finish, Observe, Request, Rollout, RolloutStats, TurnEnd, Wait
from grpo_roc_jax.rollout.resume import cut_short, prefixed, turns_behind
from grpo_roc_jax.text.chat import ChatFormat
from grpo_roc_jax.tools.executor import CodeCall, ToolExecutor, malformed_result
from grpo_roc_jax.types import Problem, StopReason, ToolCall, ToolResult, Trajectory, Turn

EVALUATION_STEP = 1 << 30
"""Added to the step in the keys of evaluation rollouts, so that they never share randomness with training."""


@dataclass(frozen=True)
class Ask:
    """One rollout wanted: a problem, how its prompt is extended, and which sample of the problem it is."""

    problem: Problem
    index: int
    """Position of the problem in this step; part of the random key."""
    sample: int
    suffix: str = ""
    """Text appended to the user message (a hint, a reward token)."""
    condition: str = ""
    """Name of that extension in traces and method state."""
    temperature: float | None = None
    prefix: tuple[int, ...] = ()
    """Ids that the first turn begins with: off the policy mask, part of the budget, the same prompt before them."""
    resume: Trajectory | None = None
    """The same rollout cut short in an earlier step, to be gone on with: prompt and prefix are taken from it."""
    step: int | None = None
    """Step that it began in, for `resume`: its random keys and tool seeds go on from there."""


@dataclass
class _Row:
    """What the environment remembers of a running trajectory."""

    turns: list[Turn] = field(default_factory=list)
    waiting: dict[str, int] = field(default_factory=dict)
    """Call id -> place of its result in `results`."""
    results: list[ToolResult | None] = field(default_factory=list)
    closed: bool = False
    """The last turn ended with the end-of-turn token, so that its observation must not add one."""


class ToolEnvironment:
    """Answers the engine's turns with tool observations; one instance per collection."""

    def __init__(
        self, chat: ChatFormat, executor: ToolExecutor, asks: Sequence[Ask], *, step: int, seed: int, max_turns: int
    ):
        self._chat = chat
        self._executor = executor
        self._asks = asks
        self._step = step
        self._seed = seed
        self._max_turns = max_turns
        self._rows = [_Row(turns_behind(ask.resume)) for ask in asks]
        self._owner: dict[str, int] = {}
        self._answered: deque[tuple[int, Observe | Finish]] = deque()

    def turn_ended(self, index: int, turn: TurnEnd) -> Finish | Wait:
        """Parses the turn that row `index` just completed and submits its calls.

        It ends the row where the published environment does: at the token budget, at the turn limit before the calls
        of that turn are run, or without a call. A last turn without a call is named by how it ended: a turn cut by
        its own limit is `length`, so that it counts as truncated.
        """
        row = self._rows[index]
        parsed = self._chat.parse_turn(turn.tokens)
        row.turns.append(
            Turn(start=turn.start, end=turn.start + len(turn.tokens), text=parsed.text, calls=parsed.calls)
        )
        row.closed = parsed.closed
        if turn.reason == "length":
            return self._finish(index, "length")
        if not parsed.calls:
            ends: dict[str, StopReason] = {"answer": "answer", "eos": "eos"}
            return self._finish(index, ends.get(parsed.ended_by, "length"))
        if len(row.turns) >= self._max_turns:
            return self._finish(index, "turns")
        row.results = [None] * len(parsed.calls)
        for place, call in enumerate(parsed.calls):
            self._submit(index, place, call)
        self._settle(index)
        return Wait()

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        """Rows whose results are complete; waits at most `timeout_s` for the first."""
        finished = self._executor.poll(0.0 if self._answered else timeout_s)
        for call_id, result in finished:
            index = self._owner.pop(call_id, None)
            if index is None:
                continue
            row = self._rows[index]
            row.results[row.waiting.pop(call_id)] = result
            self._settle(index)
        ready = list(self._answered)
        self._answered.clear()
        return ready

    def cancelled(self, index: int) -> None:
        """The engine gave the row up (deadline, early exit): its calls are killed."""
        row = self._rows[index]
        self._executor.cancel(list(row.waiting))
        for call_id in row.waiting:
            self._owner.pop(call_id, None)
        row.waiting.clear()
        self._record(row)
        self._executor.close_session(self._session(index))

    def find_stop(self, index: int, new_tokens: np.ndarray, before: np.ndarray) -> int | None:
        """Where a stop text that is no single token ends; None when there is none."""
        return self._chat.find_stop(new_tokens, before) if self._chat.stop_texts else None

    def turns(self, index: int) -> tuple[Turn, ...]:
        return tuple(self._rows[index].turns)

    def _submit(self, index: int, place: int, call: ToolCall) -> None:
        row, ask = self._rows[index], self._asks[index]
        if call.fault is not None:
            row.results[place] = malformed_result(call.message)
            return
        call_id = f"{self._session(index)}/{len(row.turns)}/{place}"
        row.waiting[call_id] = place
        self._owner[call_id] = index
        self._executor.submit(
            CodeCall(
                id=call_id,
                tool=call.name,
                arguments=call.arguments,
                session=self._session(index),
                seed=stable_seed(self._seed, self._began(ask), ask.problem.uid, ask.sample, len(row.turns), place),
            )
        )

    def _settle(self, index: int) -> None:
        """When every result of the turn is there: the observation, or the end where we failed."""
        row = self._rows[index]
        if any(result is None for result in row.results):
            return
        results = self._record(row)
        if any(result.infra for result in results):
            self._answered.append((index, self._finish(index, "infrastructure")))
            return
        ids = self._chat.observation_ids([result.observation for result in results], closed=row.closed)
        self._answered.append((index, Observe(np.asarray(ids, np.int32))))

    def _record(self, row: _Row) -> tuple[ToolResult, ...]:
        results = tuple(result for result in row.results if result is not None)
        if results and not row.turns[-1].results:
            row.turns[-1] = replace(row.turns[-1], results=results)
        row.results = []
        return results

    def _finish(self, index: int, stop: StopReason) -> Finish:
        self._executor.close_session(self._session(index))
        return Finish(stop)

    def _session(self, index: int) -> str:
        ask = self._asks[index]
        return f"{self._began(ask)}/{ask.index}/{ask.sample}"

    def _began(self, ask: Ask) -> int:
        return self._step if ask.step is None else ask.step


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text: the same in every process and version."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def collect(
    engine: Engine,
    sampler_params: Any,
    chat: ChatFormat,
    executor: ToolExecutor,
    asks: Sequence[Ask],
    *,
    step: int,
    seed: int,
    max_turns: int,
    budget: int,
    progress: Any = None,
    surplus: Callable[[int, Trajectory], Iterable[int]] | None = None,
) -> tuple[list[Trajectory], RolloutStats]:
    """Rolls every ask out; trajectories in the order of `asks`.

    Args:
        engine: Made once per run; holds compiled programs and no weights.
        sampler_params: From `engine.publish`: the current policy.
        chat: Prompt, parsing and observations as token ids.
        executor: Runs the calls; shared by all rows.
        asks: What to roll out. Asks of one problem with equal suffix share one prefill.
        step: Training step, or `EVALUATION_STEP` + step, which has no `rollout.step_timeout_s`: an accuracy over the
            rows that were fast enough would be none.
        seed: Of the run.
        max_turns: Assistant turns allowed; the calls of the last one are not run.
        budget: Tokens allowed after the prompt, observations included.
        progress: Display handed to the engine.
        surplus: (ask, its trajectory) as each ends -> asks no longer needed, under `rollout.early_exit`.
    """
    prompts: dict[tuple, tuple[int, np.ndarray]] = {}
    requests = []
    for ask in asks:
        past = ask.resume
        written = None if past is None else past.tokens[: past.prompt_length]
        shared = (ask.index, ask.suffix) if past is None else (ask.step, ask.index, written.tobytes())
        if shared not in prompts:
            ids = chat.prompt_ids(ask.problem, ask.suffix) if past is None else written
            prompts[shared] = (len(prompts), np.asarray(ids, np.int32))
        group, prompt = prompts[shared]
        begun = prefixed(prompt, ask.prefix) if past is None else cut_short(past)
        requests.append(
            Request(
                key=(step if ask.step is None else ask.step, ask.index, ask.sample),
                prompt=prompt,
                group=group,
                budget=budget,
                temperature=ask.temperature,
                # The most that is left: rows that go on from a prefix or an earlier step have less to do.
                expected=budget - (0 if begun is None else len(begun.tokens) - len(prompt)),
                resume=begun,
            )
        )
    environment = ToolEnvironment(chat, executor, asks, step=step, seed=seed, max_turns=max_turns)

    def trajectory(i: int, rollout: Rollout) -> Trajectory:
        return _trajectory(asks[i], rollout, environment.turns(i))

    ended = None if surplus is None else lambda i, rollout: surplus(i, trajectory(i, rollout))
    trains = step < EVALUATION_STEP
    rollouts, stats = engine.run(sampler_params, requests, environment, progress=progress, surplus=ended, cut=trains)
    return [trajectory(i, rollout) for i, rollout in enumerate(rollouts)], stats


def _trajectory(ask: Ask, rollout: Rollout, turns: tuple[Turn, ...]) -> Trajectory:
    return Trajectory(
        tokens=rollout.tokens,
        policy_mask=rollout.policy_mask,
        logprobs=rollout.logprobs,
        versions=rollout.versions,
        prompt_length=rollout.prompt_length,
        turns=turns,
        stop=rollout.stop,
        sample=ask.sample,
        seconds=rollout.seconds + (ask.resume.seconds if ask.resume is not None else 0.0),
        condition=ask.condition,
    )


def by_problem(asks: Sequence[Ask], trajectories: Sequence[Trajectory]) -> Mapping[int, list[Trajectory]]:
    """Problem index -> its trajectories, in the order asked."""
    grouped: dict[int, list[Trajectory]] = {}
    for ask, trajectory in zip(asks, trajectories, strict=True):
        grouped.setdefault(ask.index, []).append(trajectory)
    return grouped

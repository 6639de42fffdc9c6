"""Rollouts with an environment of their own: its reset extends the prompt, it answers turns, it pays.

Calls of built-in tools go to the executor as in `rollout.collect`. Everything else is asked of `environments.episodes`,
and other rows keep decoding meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from grpo_roc_jax.environments.environment import Observation
from grpo_roc_jax.environments.episode import Answer
from grpo_roc_jax.environments.episodes import GRACE_S, Episodes
from grpo_roc_jax.environments.failure import Failure, plain_failure
from grpo_roc_jax.rollout.collect import ENDS, ToolEnvironment, _Row, render, stable_seed
from grpo_roc_jax.rollout.engine import Engine
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import Finish, Observe, RolloutStats, RunOptions, TurnEnd, Wait
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.tools.interface import ToolExecutor
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory

BOTH_S = 0.005
"""How long results of the executor are waited for while answers of environments are awaited too."""


@dataclass(frozen=True)
class EpisodeSource:
    """Where the answers to turns come from."""

    executor: ToolExecutor
    episodes: Episodes


def collect_episodes(
    engine: Engine,
    sampler: SamplerParams,
    chat: ChatFormat,
    source: EpisodeSource,
    requests: Sequence[RolloutRequest],
    options: RunOptions,
) -> tuple[list[Trajectory], RolloutStats]:
    """`collect` with an environment for each rollout; trajectories have its rewards."""
    config = engine.config
    environment = EpisodeEnvironment(
        chat, source, requests, step=options.key_step, seed=engine.seed, max_turns=config.max_turns
    )
    before = source.episodes.counts.copy()
    rendered = render(environment.open(requests, config.max_prompt_tokens), chat)
    trajectories, stats = engine.run(sampler, rendered, environment, options)
    paid = environment.paid(trajectories)
    for old, new in zip(trajectories, paid, strict=True):
        stats.stops[old.stop] -= 1
        stats.stops[new.stop] += 1
    for failure in environment.failures.values():
        stats.count_failure(failure.kind, failure.text, by_policy=failure.by_policy)
    counts = source.episodes.counts
    stats.environment_faults = counts["faults"] - before["faults"]
    stats.environment_retries = counts["retries"] - before["retries"]
    return paid, stats


class EpisodeEnvironment(ToolEnvironment):
    """Answers the engine's turns by the environment of each row."""

    def __init__(
        self,
        chat: ChatFormat,
        source: EpisodeSource,
        requests: Sequence[RolloutRequest],
        *,
        step: int,
        seed: int,
        max_turns: int,
    ):
        """As in `ToolEnvironment`; calls of the last turn are run, since an environment may pay for them."""
        super().__init__(chat, source.executor, requests, step=step, seed=seed, max_turns=max_turns)
        self._episodes = source.episodes
        self._broken: set[str] = set()
        """Sessions that could not be reset."""
        self._playing: dict[str, tuple[int, StopReason]] = {}
        """Session -> its row, and how its turn ends the rollout if the environment has nothing to say."""
        self._ended: dict[str, Answer | None] = {}
        """Session -> its reward; None until it has arrived."""
        self.failures: dict[str, Failure] = {}
        """Session -> the failure that its rollout ended by."""

    def open(self, requests: Sequence[RolloutRequest], max_prompt_tokens: int) -> list[RolloutRequest]:
        """Resets an environment for each rollout; the requests, split where the texts to append to prompts differ.

        Args:
            requests: As passed to the constructor.
            max_prompt_tokens: A prompt that becomes longer stays as it was, and its rollout is an infrastructure
                failure.
        """
        seeds = {row.session: stable_seed(self._seed, row.request.problem.uid) for row in self._rows}
        answers = self._episodes.open([(row.session, row.request.problem, seeds[row.session]) for row in self._rows])
        rows, opened = iter(self._rows), []
        for request in requests:
            texts = []
            for sample in request.samples:
                row = next(rows)
                answer = answers[row.session]
                longer = replace(request.problem, prompt=request.problem.prompt + (answer.value or ""))
                fits = not answer.value or len(self._chat.prompt_ids(longer, request.suffix)) <= max_prompt_tokens
                if answer.failure is None and not fits:
                    said = f"its text makes the prompt longer than rollout.max_prompt_tokens ({max_prompt_tokens})"
                    answer = replace(answer, failure=self._episodes.note(plain_failure("reset", said)))
                if answer.failure is not None:
                    self._broken.add(row.session)
                    self.failures[row.session] = answer.failure
                    longer = request.problem
                texts.append((longer.prompt, sample))
            for text, group in groupby(texts, key=lambda pair: pair[0]):
                samples = [sample for _, sample in group]
                problem = replace(request.problem, prompt=text)
                opened.append(replace(request, problem=problem, first_sample=samples[0], count=len(samples)))
        return opened

    def turn_ended(self, index: int, turn: TurnEnd) -> Finish | Wait:
        row = self._rows[index]
        parsed = self._parse(row, turn)
        if row.session in self._broken:
            return self._finish(row, "infrastructure")
        if turn.reason == "length" or parsed.ended_by == "none":
            return self._finish(row, "length")
        row.results = [None] * len(parsed.calls)
        self._playing[row.session] = (index, ENDS.get(parsed.ended_by, "length"))
        for place, call in enumerate(parsed.calls):
            if call.fault is not None or call.name in self._episodes.shared:
                self._submit(index, place, call)
        self._answer_if_complete(index)
        ended = self._answers and self._answers[-1][0] == index and isinstance(self._answers[-1][1], Finish)
        return self._answers.pop()[1] if ended else Wait()

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        ready: list[tuple[int, Observe | Finish]] = []
        calls = bool(self._row_of_call)
        if calls or self._answers:
            ready = super().poll(min(timeout_s, BOTH_S) if len(self._playing) > len(self._row_of_call) else timeout_s)
        for session, answer in self._episodes.poll(0.0 if ready or calls else timeout_s):
            if session in self._playing:
                index, stop = self._playing.pop(session)
                ready.append((index, self._reply(self._rows[index], answer, stop)))
            elif session in self._ended:
                self._ended[session] = answer
        return ready

    def cancelled(self, index: int) -> bool | None:
        ran = super().cancelled(index)
        row = self._rows[index]
        self._playing.pop(row.session, None)
        self._end(row)
        return ran

    def paid(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with what their environments paid; those whose environment failed end as such."""
        for row in self._rows:
            self._end(row)
        while any(self._episodes.awaits(key) for key, answer in self._ended.items() if answer is None):
            self._ended |= {key: answer for key, answer in self._episodes.poll(GRACE_S) if key in self._ended}
        found = []
        for row, trajectory in zip(self._rows, trajectories, strict=True):
            answer = self._ended.get(row.session)
            if answer is not None and answer.failure is not None:
                self.failures.setdefault(row.session, answer.failure)
            failure = self.failures.get(row.session)
            if failure is not None or answer is None:
                stop: StopReason = "failed" if failure is not None and failure.by_policy else "infrastructure"
                stop = trajectory.stop if trajectory.stop == "cancelled" else stop
                reward = 0.0 if stop == "failed" else None
                found.append(replace(trajectory, stop=stop, reward=reward, fault=failure.whole if failure else ""))
                continue
            turns = sum(turn.reward for turn in trajectory.turns)
            reward, rewards = answer.value
            found.append(replace(trajectory, reward=None if reward is None else reward + turns, rewards=rewards))
        return found

    def _answer_if_complete(self, index: int) -> None:
        """Asks the environment as soon as the results of the executor are there."""
        row = self._rows[index]
        if row.pending or row.session not in self._playing:
            return
        if lost := [result for result in row.results if result is not None and result.infra]:
            said = f"{lost[0].kind}: {lost[0].error_message}"
            self.failures[row.session] = self._episodes.note(plain_failure("a call", said))
            self._record_results(row)
            del self._playing[row.session]
            self._answers.append((index, self._finish(row, "infrastructure")))
            return
        if (answer := self._episodes.play(row.session, row.turns[-1], row.results)) is not None:
            self._answers.append((index, self._reply(row, answer, self._playing.pop(row.session)[1])))

    def _reply(self, row: _Row, answer: Answer, stop: StopReason) -> Observe | Finish:
        """How a row goes on after what its environment said."""
        results, said = ((), None) if answer.value is None else answer.value
        said = said or Observation()
        row.turns[-1] = replace(row.turns[-1], results=results, reply=said.text, reward=said.reward)
        row.results = []
        if answer.failure is not None:
            self.failures[row.session] = answer.failure
            return self._finish(row, "failed" if answer.failure.by_policy else "infrastructure")
        if answer.late:
            return self._finish(row, "deadline")
        if said.done:
            return self._finish(row, "answer")
        if not (said.text or results):
            return self._finish(row, stop)
        if len(row.turns) >= self._max_turns:
            return self._finish(row, "turns")
        if not said.text:
            return self._observation(row, results)
        if said.role == "raw":
            return Observe(np.asarray(self._chat.raw_ids(said.text), np.int32))
        ids = self._chat.question_ids(self._chat.shown(said.text), closed=row.closed)
        return Observe(np.asarray(ids, np.int32))

    def _finish(self, row: _Row, stop: StopReason) -> Finish:
        self._end(row)
        return super()._finish(row, stop)

    def _end(self, row: _Row) -> None:
        if row.session not in self._broken and row.session not in self._ended:
            self._ended[row.session] = self._episodes.end(row.session)

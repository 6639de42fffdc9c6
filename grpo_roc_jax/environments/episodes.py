"""The episodes of a run as rollouts see them: started together, answered through a queue, each with a deadline."""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from grpo_roc_jax.environments.config import Hosted
from grpo_roc_jax.environments.environment import classes_of, environment_tools
from grpo_roc_jax.environments.episode import Answer, EpisodeSettings
from grpo_roc_jax.environments.failure import Failure, plain_failure
from grpo_roc_jax.environments.hosts import EpisodeHost, make_host
from grpo_roc_jax.settings.callables import passed
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import Problem, ToolResult, Turn

log = logging.getLogger(__name__)
GRACE_S = 5.0
"""Added to the deadlines of a host before it counts as lost."""
QUICK_S = 2e-3
"""Where turns are usually answered sooner, an answer is waited for: its row would else lose a chunk of tokens."""
OPEN_PARTS, END_PARTS = 3, 2
"""Calls of an environment: it is made, reset, and closed if that failed; asked for its reward, and closed."""


class Episodes:
    """Episodes by key, a text that is unique in the run. Used by one thread.

    Args:
        choice: The environment, and where it is held.
        tools: Limits of the output of its tools.
        shared: Names of tools whose calls the executor runs.
        grace_s: Seconds that are added to the deadlines of a host before it counts as lost.
        clock: Seconds that pass.
        host: What holds the episodes; by default the host that `choice` names.

    Raises:
        ValueError: The class cannot be found, or its tools have no schema.
    """

    def __init__(
        self,
        choice: Hosted,
        tools: ToolsConfig,
        shared: Sequence[str] = (),
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        host: EpisodeHost | None = None,
    ):
        self._grace_s, self._clock = grace_s, clock
        passed_classes = {path: cls for path in choice.paths.values() if (cls := passed(path)) is not None}
        self._choice, settings = choice, EpisodeSettings(choice, passed_classes, tools)
        self.tools: Registry = environment_tools(classes_of(settings.find()))
        """Tools whose calls the environments run."""
        self.shared = frozenset(shared)
        """Names of tools whose calls the executor runs."""
        self._host = host or make_host(choice.host, settings)
        self._arrived: queue.SimpleQueue[tuple[str, int, Future[Answer]]] = queue.SimpleQueue()
        self._awaited: dict[str, tuple[int, float]] = {}
        """Key -> number of its last operation, and when that counts as lost."""
        self._number = 0
        self._begun_s = self._usual_s = 0.0
        """When the last turn was played, and a running mean of what this takes."""
        self.counts: Counter[str] = Counter()
        """`faults` of the infrastructure and `retries`."""
        self._seen: set[str] = set()
        """Kinds of failures that were logged."""

    def open(self, episodes: Sequence[tuple[str, Problem, int]]) -> dict[str, Answer]:
        """Makes and resets an environment for each (key, problem, seed); waits for all."""
        wanted = {key: (problem, seed) for key, problem, seed in episodes}
        begun = {key: self._call(key, OPEN_PARTS, "open", *arguments) for key, arguments in wanted.items()}
        answers = {key: answer for key, answer in begun.items() if answer is not None}
        tried: Counter[str] = Counter()
        while len(answers) < len(wanted):
            for key, answer in self.poll(self._grace_s):
                if answer.lost and key in wanted and tried[key] < self._choice.retries:
                    tried[key] += 1
                    self.counts["retries"] += 1
                    self._call(key, OPEN_PARTS, "open", *wanted[key])
                elif key in wanted:  # others are left from a run that was interrupted
                    answers[key] = answer
        for key, answer in answers.items():
            if answer.failure is not None:
                self.drop(key)
        return answers

    def play(self, key: str, turn: Turn, given: Sequence[ToolResult | None]) -> Answer | None:
        """Starts a turn; `given` holds the results of its calls that are known. Its answer if that is there at once,
        else `poll` has it."""
        return self._call(key, 1 + list(given).count(None), "play", turn, tuple(given))

    def end(self, key: str) -> Answer | None:
        """Starts the end of an episode: its reward, then it is closed. The answer as from `play`."""
        return self._call(key, END_PARTS, "end")

    def drop(self, key: str) -> None:
        """Closes the environment of an episode whose reward nobody needs; what it does is not answered any more."""
        self._awaited.pop(key, None)
        self._host.call(key, "drop")

    def awaits(self, key: str) -> bool:
        """Whether an operation of this episode has not ended."""
        return key in self._awaited

    def poll(self, timeout_s: float) -> list[tuple[str, Answer]]:
        """(key, answer) of operations that have ended; waits at most `timeout_s` for the first, and for all until
        `QUICK_S` after the last turn."""
        answers: list[tuple[str, Answer]] = []
        quick = self._begun_s + QUICK_S if self._usual_s < QUICK_S else 0.0
        try:
            while True:
                wait_s = max(0.0 if answers else timeout_s, quick - self._clock())
                key, number, future = self._arrived.get(wait_s > 0 and bool(self._awaited), wait_s)
                if self._awaited.get(key, (0, 0.0))[0] == number:
                    del self._awaited[key]
                    answers.append((key, self._counted(self._taken(future))))
        except queue.Empty:
            pass
        now = self._clock()
        for key in [key for key, (_, due) in self._awaited.items() if due < now]:
            del self._awaited[key]
            self._host.abandon(key)
            late = Answer(failure=plain_failure("no answer", "all of its deadlines are over"), lost=True)
            answers.append((key, self._counted(late)))
        return answers

    def close(self) -> None:
        """Closes the environments that are left, and ends what runs them."""
        self._host.close()

    def limit_s(self, parts: int) -> float:
        """Longest time of an operation of so many parts: each part of it, each attempt, up to its own deadline."""
        return parts * self._choice.timeout_s * (1 + self._choice.retries) + self._grace_s

    def _counted(self, answer: Answer) -> Answer:
        self.counts["retries"] += answer.retries
        if answer.failure is None:
            return answer
        self.counts["faults"] += not answer.failure.by_policy
        return replace(answer, failure=self.note(answer.failure))

    def note(self, failure: Failure) -> Failure:
        """The failure of a rollout; logged with its traceback if it is the first of its kind."""
        return noted(failure, self._seen, "environment")

    def _call(self, key: str, parts: int, operation: str, *arguments: Any) -> Answer | None:
        """Starts an operation, which waits for the last one of its episode; its answer if that is there at once."""
        future = self._host.call(key, operation, *arguments)
        if future.done() and future.exception() is None:
            self._awaited.pop(key, None)
            return self._counted(self._taken(future))
        self._number += 1
        number, now = self._number, self._clock()
        begins = max(now, self._awaited.get(key, (0, now))[1])
        self._awaited[key] = (number, begins + self.limit_s(parts))
        plays = operation == "play"
        self._begun_s = now if plays else self._begun_s

        def arrived(done: "Future[Answer]") -> None:
            self._usual_s += plays * (self._clock() - now - self._usual_s) / 16
            self._arrived.put((key, number, done))

        future.add_done_callback(arrived)
        return None

    @staticmethod
    def _taken(future: "Future[Answer]") -> Answer:
        error = future.exception()
        if error is None:
            return future.result()
        return Answer(failure=plain_failure("its process", f"{type(error).__name__}: {error}"), lost=True)


def noted(failure: Failure, seen: set[str], what: str) -> Failure:
    """The failure, logged with its traceback if it is the first of its kind; later ones are without a traceback.

    Args:
        failure: The failure of a rollout.
        seen: Kinds that were logged, to which this one is added.
        what: Failed.
    """
    if failure.kind in seen:
        return replace(failure, traceback="")
    seen.add(failure.kind)
    outcome = "it scores 0" if failure.by_policy else "its rollout is lost"
    log.warning("%s: %s\n%s; later ones of this kind are counted only", what, failure.whole, outcome)
    return failure

"""Rollouts by programs of the user's: each asks the policy over HTTP, and what it asked becomes its trajectory.

The caller's thread samples, a thread serves, and one thread for each running program waits for its end.
"""

import json
import logging
import math
import os
import secrets
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import IO, Any, get_args

import numpy as np

from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.environments.hosts import end_group
from grpo_roc_jax.rollout.collect import stable_seed
from grpo_roc_jax.rollout.engine import Engine
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RolloutStats, RunOptions
from grpo_roc_jax.serving.dialogues import Dialogues
from grpo_roc_jax.serving.joining import RecordedCall, join, joined
from grpo_roc_jax.serving.refusal import RequestRefused
from grpo_roc_jax.serving.replies import SampledChoice
from grpo_roc_jax.serving.sampling_loop import PLACES, SamplingLoop
from grpo_roc_jax.serving.server import Endpoint, ServerThread
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory

log = logging.getLogger(__name__)
PRINTED = 1 << 16
"""Bytes read of the end of what a program has printed."""
FLOOD_S = 0.01
"""How long a program that fills its pipe waits before it is read again."""
WAIT_S = 0.05
"""How long a thread waits before it looks again at what it waits for."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    status: int | None
    """None if it was killed after its time."""
    reward: float | None
    fault: str = ""
    """The last line of its error output."""
    seconds: float = 0.0


@dataclass(eq=False)
class AgentSession:
    """The rollout of one program."""

    request: RolloutRequest
    """For one rollout."""
    step: int
    most_calls: int
    asked: int = 0
    refused: bool = False
    """It asked more often than it may."""
    cut: bool = False
    """Its last answer was cut by the token budget."""
    calls: list[RecordedCall] = field(default_factory=list)

    @property
    def temperature(self) -> float | None:
        return self.request.temperature

    def place(self) -> int:
        self.asked += 1
        if self.asked > self.most_calls:
            self.refused = True
            raise RequestRefused(
                f"this rollout has asked {self.most_calls} times; raise rollout.max_turns", code="turn_limit"
            )
        return stable_seed(self.request.place, self.request.first_sample, self.asked) % PLACES

    def record(self, choice: SampledChoice) -> None:
        ids = np.asarray(choice.ids, np.int32)
        self.calls.append(RecordedCall(choice.prompt, ids, np.asarray(choice.logprobs, np.float32), choice.versions))
        self.cut = choice.finish_reason == "length"

    def stop(self, end: ProgramEnd) -> StopReason:
        """The typed outcome. What fails without an answer of the policy, or by an error of its own, is not a signal."""
        if end.status is None:
            return "deadline" if self.calls else "infrastructure"
        if end.status or not self.calls:
            return "infrastructure"
        return "turns" if self.refused else "length" if self.cut else "eos"


class AgentRuns:
    """Runs the program of `environment agent` once for each rollout."""

    def __init__(self, choice: AgentCommand, chat: ChatFormat, engine: Engine, longest: int):
        """`longest`: most tokens of the conversations of a rollout together."""
        self._choice, self._chat, self._engine, self._longest = choice, chat, engine, longest
        self._words, self._token = shlex.split(choice.command), secrets.token_urlsafe(16)
        self._programs: set[subprocess.Popen] = set()

        def make(deliver: Any) -> Endpoint:
            return Endpoint(chat, SamplingLoop(engine, None, deliver), token=self._token)

        self._server = ServerThread(make)
        self._server.endpoint.sessions = {}

    def close(self) -> None:
        """Ends the server and what still runs."""
        self._kill()
        self._server.close()

    def collect(
        self, sampler: SamplerParams, requests: Sequence[RolloutRequest], options: RunOptions
    ) -> tuple[list[Trajectory], RolloutStats]:
        """Trajectories of the requests, request by request and sample by sample, and statistics.

        Raises:
            ValueError: A request continues an earlier rollout or begins with tokens, which a program cannot.
        """
        if any(request.resume is not None or request.prefix or request.prefix_text for request in requests):
            raise ValueError("environment agent cannot go on from tokens; use a method that samples whole rollouts")
        heat, config = self._engine.programs.settings.sampling.temperature, self._engine.config
        singles = [
            replace(one, count=1, first_sample=i, temperature=heat if one.temperature is None else one.temperature)
            for one in requests
            for i in one.samples
        ]
        sessions = {
            f"{one.place}-{one.first_sample}-{secrets.token_hex(4)}": AgentSession(
                one, options.key_step, config.max_turns
            )
            for one in singles
        }
        endpoint = self._server.endpoint
        endpoint.dialogues = Dialogues(self._chat.config, self._chat.tokenizer)
        endpoint.loop.sampler, endpoint.sessions = sampler, dict(sessions)
        started = time.perf_counter()
        try:
            ends = self._run(sessions, options)
        finally:
            endpoint.sessions = {}
            self._kill()
            stats = endpoint.loop.release()
        stats.seconds = time.perf_counter() - started
        return self._trajectories(sessions, ends, stats), stats

    def _run(self, sessions: dict[str, AgentSession], options: RunOptions) -> list[ProgramEnd]:
        """Samples until all programs have ended."""
        loop, total = self._server.endpoint.loop, len(sessions)
        with ThreadPoolExecutor(min(self._choice.at_once, total), "agent") as pool:
            ends: list[Future[ProgramEnd]] = [pool.submit(self._play, *item) for item in sessions.items()]
            try:
                while left := sum(not end.done() for end in ends):
                    if options.before_chunk is not None:
                        options.before_chunk()
                    loop.turn(WAIT_S)
                    if options.progress is not None:
                        tokens, live = loop.stats.sampled_tokens, len(self._programs)
                        done = total - left
                        options.progress.update(live=live, waiting=left - live, done=done, total=total, tokens=tokens)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._kill()
                raise
        return [end.result() for end in ends]

    def _trajectories(
        self, sessions: dict[str, AgentSession], ends: list[ProgramEnd], stats: RolloutStats
    ) -> list[Trajectory]:
        stats.rollouts, stats.stops = len(sessions), dict.fromkeys(get_args(StopReason), 0)
        found = []
        for session, end in zip(sessions.values(), ends, strict=True):
            rows, stop = join(session.calls), session.stop(end)
            trajectory = self._empty(session) if not rows else None
            if trajectory is None:
                trajectory, dropped = joined(rows, self._chat, session.request, stop, self._longest)
                stats.branches += len(rows) - 1
                stats.dropped_branches += dropped
            stats.stops[stop] += 1
            if stop == "infrastructure":
                if not stats.environment_faults:
                    log.warning("an agent failed with status %s after %d calls: %s", end.status, len(rows), end.fault)
                stats.environment_faults += 1
            found.append(replace(trajectory, stop=stop, reward=end.reward, seconds=end.seconds))
        return found

    def _empty(self, session: AgentSession) -> Trajectory:
        """The rollout of a program that got no answer: the problem's prompt alone."""
        ids = np.asarray(self._chat.prompt_ids(session.request.problem), np.int32)
        nothing = RecordedCall(ids, ids[:0], np.zeros(0, np.float32), ids[:0])
        return joined(join([nothing]), self._chat, session.request, "infrastructure", len(ids))[0]

    def _play(self, name: str, session: AgentSession) -> ProgramEnd:
        """Runs the program of a session to its end."""
        problem = replace(session.request.problem, prompt=session.request.problem.prompt + session.request.suffix)
        words = [word.replace("{prompt}", problem.prompt) for word in self._words]
        address = f"http://127.0.0.1:{self._server.port}/s/{name}/v1"
        found = os.environ | {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": self._token}
        found |= {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        row = json.dumps(row_of(problem) | {"uid": problem.uid}, default=str).encode()
        started = time.perf_counter()
        with tempfile.TemporaryFile() as given:
            given.write(row)
            given.seek(0)
            pipes = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            try:
                program = subprocess.Popen(words, env=found, start_new_session=True, **pipes)
            except (OSError, ValueError) as error:  # a prompt may hold what no argument can
                return ProgramEnd(127, None, str(error))
        out, errors = Printed(program.stdout), Printed(program.stderr)
        self._programs.add(program)
        try:
            status: int | None = program.wait(self._choice.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(program)
            self._programs.discard(program)
            self._server.endpoint.forget(name)
        fault = errors.text().strip().rpartition("\n")[2][:500]
        return ProgramEnd(status, read_reward(out.text()), fault, time.perf_counter() - started)

    def _kill(self) -> None:
        for program in list(self._programs):
            end_group(program)


class Printed:
    """Reads what a program prints, and keeps its end."""

    def __init__(self, pipe: IO[bytes]):
        self._pipe, self._kept = pipe, b""
        self._thread = threading.Thread(target=self._read, daemon=True, name="agent-output")
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), PRINTED):
                self._kept = (self._kept + chunk)[-PRINTED:]
                if len(chunk) == PRINTED:
                    time.sleep(FLOOD_S)

    def text(self) -> str:
        """The end of what was printed, once the program has ended. Something that it has started may still print."""
        self._thread.join(1.0)
        return self._kept.decode(errors="replace")


def read_reward(printed: str) -> float | None:
    """The number, or the `reward` of the object, on the last line; None if there is neither."""
    try:
        value = json.loads(printed.strip().rpartition("\n")[2])
        number = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return number if math.isfinite(number) else None

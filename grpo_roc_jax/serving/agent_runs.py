"""Rollouts by programs of the user's: each asks the policy over HTTP, and what it asked becomes its trajectory.

The caller's thread samples, a thread serves, and one thread for each running program waits for its end.
"""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import IO, Any, get_args

import numpy as np

from grpo_roc_jax.environments.config import AgentCommand, OnFailure
from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.environments.episodes import noted
from grpo_roc_jax.environments.failure import Failure, ending, one_line
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

REWARD_VARIABLE = "GRPO_REWARD_FD"
"""Environment variable with the number of the descriptor that a program writes its reward to."""
MOST_REWARD_BYTES = 4096
MOST_REWARD = 1e6
"""Largest absolute value of a reward; beyond it a loss in float32 could overflow."""
PRINTED = 1 << 16
"""Bytes kept of what a program has printed."""
ENDED_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that somebody sends to a program, such as the kernel when memory is short."""
SHELL_SIGNAL = 128
"""Added to the number of a signal in the status of a shell whose program it ended."""
BUSY_STATUS = 429
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
    errors: str = ""
    """The end of its error output."""
    unread: str = ""
    """Why its reward could not be read; empty if it wrote none."""
    printed: str = ""
    """The last line of its output."""
    seconds: float = 0.0

    def failure(self, said: str, *, by_policy: bool = False) -> Failure:
        """The failure of a program that ended so."""
        last = one_line(self.errors.strip().rpartition("\n")[2])
        name = re.match(r"[\w.]+(?=: |$)", last)
        kind = name[0] if name else re.sub(r"\d+", "N", last)[:80]
        text = f"agent: {said}: {last}" if last else f"agent: {said}"
        return Failure(text, f"agent: {said}: {kind}" if kind else text, ending(self.errors), by_policy)


@dataclass(eq=False)
class AgentSession:
    """The rollout of one program."""

    request: RolloutRequest
    """For one rollout."""
    step: int
    most_calls: int
    asked: int = 0
    over: bool = False
    """It asked more often than it may."""
    full: bool = False
    """Its conversation filled the context."""
    cut: bool = False
    """Its last answer was cut by the token budget."""
    broken: bool = False
    """Its last call was answered with a fault of the server."""
    calls: list[RecordedCall] = field(default_factory=list)

    @property
    def temperature(self) -> float | None:
        return self.request.temperature

    def place(self) -> int:
        self.asked += 1
        if self.asked > self.most_calls:
            self.over = True
            raise RequestRefused(
                f"this rollout has asked {self.most_calls} times; raise rollout.max_turns", code="turn_limit"
            )
        return stable_seed(self.request.place, self.request.first_sample, self.asked) % PLACES

    def record(self, choice: SampledChoice) -> None:
        ids = np.asarray(choice.ids, np.int32)
        logprobs = np.asarray(choice.logprobs, np.float32)
        self.calls.append(RecordedCall(choice.prompt, ids, logprobs, choice.versions, choice.begun))
        self.cut, self.broken = choice.finish_reason == "length", False

    def refused(self, error: RequestRefused) -> None:
        self.broken = error.status >= 500 or error.status == BUSY_STATUS
        self.full = self.full or error.code == "context_length_exceeded"

    def outcome(self, end: ProgramEnd, on_failure: OnFailure, pays: bool) -> tuple[StopReason, Failure | None]:
        """The typed outcome, and what failed. A program that fails once it has answers fails on what the policy said.

        Args:
            end: Of the program.
            on_failure: Whether that scores 0.
            pays: Its reward counts.
        """
        if end.status is None:
            late = "took too long and asked nothing"
            return ("deadline", None) if self.calls else ("infrastructure", end.failure(late))
        if not self.calls:
            said = f"it ended with status {end.status} and without an answer of the policy"
            return "infrastructure", end.failure(said)
        if end.status and self.broken:
            return "infrastructure", end.failure(f"status {end.status} after a fault of the server")
        number = -end.status if end.status < 0 else end.status - SHELL_SIGNAL
        if number in ENDED_BY_OTHERS:
            return "infrastructure", end.failure(f"it was ended by {signal.Signals(number).name}")
        stop: StopReason = "turns" if self.over else "length" if self.full or (self.cut and not end.status) else "eos"
        if end.status and stop == "eos":
            zero = on_failure == "zero"
            return "failed" if zero else "infrastructure", end.failure(f"status {end.status}", by_policy=zero)
        if pays and not end.status and end.reward is None:
            return stop, end.failure(no_reward(end))
        return stop, None


def no_reward(end: ProgramEnd) -> str:
    """What to say of a program without a reward."""
    if end.unread:
        return f"its reward was not read: {end.unread}"
    said = f"it wrote no reward to the descriptor in {REWARD_VARIABLE}"
    if read_reward(end.printed.encode())[0] is not None:
        said += "; its last line is a number, but what it prints is not read, since the policy may have written it"
    return said


class AgentRuns:
    """Runs the program of `environment agent` once for each rollout."""

    def __init__(self, choice: AgentCommand, chat: ChatFormat, engine: Engine, longest: int, pays: bool = False):
        """
        Args:
            choice: The program.
            chat: Writes prompts and reads turns.
            engine: Samples.
            longest: Most tokens of the conversations of a rollout together.
            pays: Whether the rewards of programs count.
        """
        self._choice, self._chat, self._engine, self._longest, self._pays = choice, chat, engine, longest, pays
        self._seen: set[str] = set()
        """Kinds of failures that were logged."""
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
            rows = join(session.calls)
            stop, failure = session.outcome(end, self._choice.on_failure, self._pays)
            trajectory = self._empty(session) if not rows else None
            if trajectory is None:
                trajectory, dropped = joined(rows, self._chat, session.request, stop, self._longest)
                stats.branches += len(rows) - 1
                stats.dropped_branches += dropped
            stats.stops[stop] += 1
            if failure is not None:
                failure = noted(failure, self._seen, "environment")
                stats.environment_faults += not failure.by_policy
                stats.count_failure(failure.kind, failure.text, by_policy=failure.by_policy)
            reward = 0.0 if stop == "failed" else end.reward
            fault = failure.whole if failure is not None else ""
            found.append(replace(trajectory, stop=stop, reward=reward, seconds=end.seconds, fault=fault))
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
        found |= {"ANTHROPIC_BASE_URL": address.removesuffix("/v1"), "ANTHROPIC_API_KEY": self._token}
        found |= {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        row = json.dumps(row_of(problem) | {"uid": problem.uid}, default=str).encode()
        started = time.perf_counter()
        reading, writing = os.pipe()
        found[REWARD_VARIABLE] = str(writing)
        with tempfile.TemporaryFile() as given:
            given.write(row)
            given.seek(0)
            pipes = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            try:
                program = subprocess.Popen(words, env=found, start_new_session=True, pass_fds=[writing], **pipes)
            except (OSError, ValueError) as error:  # a prompt may hold what no argument can
                os.close(reading)
                return ProgramEnd(127, None, str(error))
            finally:
                os.close(writing)
        out, errors = Printed(program.stdout), Printed(program.stderr)
        paid = Printed(os.fdopen(reading, "rb"), first=MOST_REWARD_BYTES + 1)
        self._programs.add(program)
        try:
            status: int | None = program.wait(self._choice.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(program)
            self._programs.discard(program)
            self._server.endpoint.forget(name)
        reward, unread = read_reward(paid.content())
        printed = out.text().strip().rpartition("\n")[2][:MOST_REWARD_BYTES]
        return ProgramEnd(status, reward, errors.text(), unread, printed, time.perf_counter() - started)

    def _kill(self) -> None:
        for program in list(self._programs):
            end_group(program)


class Printed:
    """Reads what a program writes to a pipe, and keeps its end, or so many of its first bytes."""

    def __init__(self, pipe: IO[bytes], first: int = 0):
        self._pipe, self._first, self._bytes = pipe, first, b""
        self._thread = threading.Thread(target=self._read, daemon=True, name="agent-output")
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), PRINTED):
                self._bytes = (self._bytes + chunk)[: self._first] if self._first else (self._bytes + chunk)[-PRINTED:]
                if len(chunk) == PRINTED:
                    time.sleep(FLOOD_S)

    def content(self) -> bytes:
        """What was kept, once the program has ended. Something that it has started may still write."""
        self._thread.join(1.0)
        return self._bytes

    def text(self) -> str:
        """The same as text."""
        return self.content().decode(errors="replace")


def read_reward(content: bytes) -> tuple[float | None, str]:
    """(the number that a program wrote as its reward, or the `reward` of the object; what is wrong with it). None and
    an empty text if it wrote nothing."""
    if len(content) > MOST_REWARD_BYTES:
        return None, f"more than {MOST_REWARD_BYTES} bytes; must be one number, or an object with reward"
    if not content.strip():
        return None, ""
    try:
        value = json.loads(content)
        value = value["reward"] if isinstance(value, dict) else value
        number = float(None if isinstance(value, str | bool) else value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, f"{content[:80]!r}; must be one number, or an object with reward"
    if not abs(number) <= MOST_REWARD:
        return None, f"{number}; must be between {-MOST_REWARD:g} and {MOST_REWARD:g}"
    return number, ""

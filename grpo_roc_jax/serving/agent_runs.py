"""Rollouts by programs or functions of the user's: each asks the policy over HTTP, and what it asked becomes its
trajectory.

The caller's thread samples, a thread serves, and one thread for each running program waits for its end.
"""

import json
import os
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import IO, Any, get_args

import numpy as np

from grpo_roc_jax.environments.config import AgentCommand, OnFailure
from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.environments.episodes import noted
from grpo_roc_jax.environments.failure import Failure
from grpo_roc_jax.environments.hosts import end_group
from grpo_roc_jax.rollout.collect import stable_seed
from grpo_roc_jax.rollout.engine import Engine
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RolloutStats, RunOptions
from grpo_roc_jax.serving.agent_ends import MOST_PAY_BYTES, Pay, ProgramEnd, read_pay
from grpo_roc_jax.serving.agent_functions import FunctionHost
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
    trained: frozenset[str] = frozenset()
    """Agents whose answers train; empty: all."""
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

    def record(self, choice: SampledChoice, answer: str, agent: str) -> None:
        ids = np.asarray(choice.ids, np.int32)
        logprobs = np.asarray(choice.logprobs, np.float32)
        trains = not self.trained or agent in self.trained
        self.calls.append(
            RecordedCall(choice.prompt, ids, logprobs, choice.versions, choice.begun, answer, agent, trains)
        )
        self.cut, self.broken = choice.finish_reason == "length", False

    def refused(self, error: RequestRefused) -> None:
        self.broken = error.status >= 500 or error.status == BUSY_STATUS
        self.full = self.full or error.code == "context_length_exceeded"

    def paid(self, end: ProgramEnd) -> tuple[list[RecordedCall], ProgramEnd]:
        """(the calls with their rewards, the end whose reward is all that was paid). What names no call is unread."""
        given = end.pay.calls
        if not given:
            return self.calls, end
        answers = list(dict.fromkeys(call.answer for call in self.calls))
        if isinstance(given, tuple):
            if len(given) > len(answers):
                said = (
                    f"calls has {len(given)} numbers for {len(answers)} calls; give one each, in order, or by their ids"
                )
                return self.calls, replace(end, pay=Pay(), unread=said)
            given = {answer: number for answer, number in zip(answers, given, strict=False) if number is not None}
        if unknown := [name for name in given if name not in answers]:
            said = f"calls names {unknown[0]!r:.80}; must be the id of an answer that this rollout got"
            return self.calls, replace(end, pay=Pay(), unread=said)
        calls = [replace(call, reward=given.get(call.answer, 0.0)) for call in self.calls]
        total = (end.pay.reward or 0.0) + sum(call.reward for call in calls)
        return calls, replace(end, pay=replace(end.pay, reward=total))

    def outcome(
        self, end: ProgramEnd, on_failure: OnFailure, pays: frozenset[str]
    ) -> tuple[StopReason, Failure | None]:
        """The typed outcome, and what failed. A program that fails once it has answers fails on what the policy said.

        Args:
            end: Of the program.
            on_failure: Whether that scores 0.
            pays: Names of its numbers that count; the reward has an empty one.
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
        if not any(call.trains for call in self.calls):
            names = ", ".join(sorted({call.agent for call in self.calls}))
            said = f"no answer to {', '.join(sorted(self.trained))} (environment.trained); {names[:200]} asked"
            return "infrastructure", end.failure(said)
        given = {*end.pay.parts, *([] if end.pay.reward is None else [""])}
        if pays and not end.status and not pays & given:
            return stop, end.failure(no_reward(end, pays))
        return stop, None


def no_reward(end: ProgramEnd, pays: frozenset[str] = frozenset([""])) -> str:
    """What to say of a program without a reward."""
    if end.unread:
        return f"its reward was not read: {end.unread}"
    if end.pay.parts or end.pay.reward is not None:
        given = ", ".join([*([] if end.pay.reward is None else ["reward"]), *end.pay.parts])
        return (
            f"it gave {given[:200]}, but none of what reward.functions pays: {', '.join(n or 'reward' for n in pays)}"
        )
    said = f"it gave no reward (a program writes it to the descriptor in {REWARD_VARIABLE}, a function returns it)"
    if read_pay(end.printed.encode())[0] != Pay():
        said += "; its last line is a number, but what it prints is not read, since the policy may have written it"
    return said


class AgentRuns:
    """Runs the program of `environment agent` once for each rollout."""

    def __init__(
        self, choice: AgentCommand, chat: ChatFormat, engine: Engine, longest: int, pays: Collection[str] = ()
    ):
        """
        Args:
            choice: The program.
            chat: Writes prompts and reads turns.
            engine: Samples.
            longest: Most tokens of the conversations of a rollout together.
            pays: Names of the numbers of a program that count; its reward has an empty one.
        """
        self._choice, self._chat, self._engine, self._longest, self._pays = (
            choice,
            chat,
            engine,
            longest,
            frozenset(pays),
        )
        self._seen: set[str] = set()
        """Kinds of failures that were logged."""
        self._words, self._token = shlex.split(choice.command), secrets.token_urlsafe(16)
        self._programs: set[subprocess.Popen] = set()
        self._function = FunctionHost(choice.function) if choice.function else None

        def make(deliver: Any) -> Endpoint:
            return Endpoint(chat, SamplingLoop(engine, None, deliver), token=self._token)

        self._server = ServerThread(make)
        self._server.endpoint.sessions = {}

    def close(self) -> None:
        """Ends the server and what still runs."""
        self._kill()
        if self._function is not None:
            self._function.close()
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
                one, options.key_step, config.max_turns, trained=frozenset(self._choice.trained)
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
                    idle, begun = not self._server.endpoint.running, time.perf_counter()
                    loop.turn(WAIT_S)
                    loop.stats.environment_s += time.perf_counter() - begun if idle else 0.0
                    if options.progress is not None:
                        tokens = loop.stats.sampled_tokens
                        live = len(self._programs) if self._function is None else self._function.live
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
            calls, end = session.paid(end)
            rows = [row for row in join(calls) if row.mask.any() or not session.trained]
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
            reward, parts = (0.0, {}) if stop == "failed" else (end.pay.reward, end.pay.parts)
            fault = failure.whole if failure is not None else ""
            trajectory = replace(trajectory, stop=stop, reward=reward, rewards=parts, seconds=end.seconds, fault=fault)
            found.append(trajectory)
        return found

    def _empty(self, session: AgentSession) -> Trajectory:
        """The rollout of a program that got no answer: the problem's prompt alone."""
        ids = np.asarray(self._chat.prompt_ids(session.request.problem), np.int32)
        nothing = RecordedCall(ids, ids[:0], np.zeros(0, np.float32), ids[:0])
        return joined(join([nothing]), self._chat, session.request, "infrastructure", len(ids))[0]

    def _play(self, name: str, session: AgentSession) -> ProgramEnd:
        """Runs the agent of a session to its end."""
        problem = replace(session.request.problem, prompt=session.request.problem.prompt + session.request.suffix)
        address = f"http://127.0.0.1:{self._server.port}/s/{name}/v1"
        row = row_of(problem) | {"uid": problem.uid}
        if self._function is None:
            return self._play_program(name, row, problem.prompt, address)
        try:
            return self._function.play(row, address, self._token, self._choice.timeout_s)
        finally:
            self._server.endpoint.forget(name)

    def _play_program(self, name: str, columns: Mapping[str, Any], prompt: str, address: str) -> ProgramEnd:
        words = [word.replace("{prompt}", prompt) for word in self._words]
        found = os.environ | {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": self._token}
        found |= {"ANTHROPIC_BASE_URL": address.removesuffix("/v1"), "ANTHROPIC_API_KEY": self._token}
        found |= {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        row = json.dumps(columns, default=str).encode()
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
                return ProgramEnd(127, Pay(), str(error))
            finally:
                os.close(writing)
        out, errors = Printed(program.stdout), Printed(program.stderr)
        paid = Printed(os.fdopen(reading, "rb"), first=MOST_PAY_BYTES + 1)
        self._programs.add(program)
        try:
            status: int | None = program.wait(self._choice.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(program)
            self._programs.discard(program)
            self._server.endpoint.forget(name)
        pay, unread = read_pay(paid.content())
        printed = out.text().strip().rpartition("\n")[2][:MOST_PAY_BYTES]
        return ProgramEnd(status, pay, errors.text(), unread, printed, time.perf_counter() - started)

    def _kill(self) -> None:
        if self._function is not None:
            self._function.cancel()
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

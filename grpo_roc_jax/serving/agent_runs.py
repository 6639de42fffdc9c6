"""Rollouts by programs or functions of the user's: each asks the policy over HTTP, and what it asked becomes its
trajectory.

The caller's thread samples, a thread serves, and one thread for each running program waits for its end.
"""

import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

import numpy as np

from grpo_roc_jax.engine.engine import Engine
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.environments.config import AgentCommand, AgentKind, EnvironmentKind
from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.environments.episodes import noted
from grpo_roc_jax.environments.failure import Failure
from grpo_roc_jax.rollout.sampler import stable_seed
from grpo_roc_jax.sandbox.http_guard import is_loopback
from grpo_roc_jax.serving.agent_ends import AgentCall, Pay, ProgramEnd, read_pay
from grpo_roc_jax.serving.agent_functions import FunctionAgent
from grpo_roc_jax.serving.agent_programs import REWARD_VARIABLE, ProgramAgent
from grpo_roc_jax.serving.dialogues import Dialogues
from grpo_roc_jax.serving.recorded_calls import RecordedCall, conversations_of, trajectory_of
from grpo_roc_jax.serving.refusal import RequestRefused
from grpo_roc_jax.serving.replies import SampledChoice
from grpo_roc_jax.serving.sampling_loop import PLACES, SamplingLoop
from grpo_roc_jax.serving.server import TOKEN_VARIABLE, Endpoint, ServerThread
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.types import Problem, RolloutRequest, StopReason, Trajectory

ENDED_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that somebody sends to a program, such as the kernel when memory is short."""
SHELL_SIGNAL = 128
"""Added to the number of a signal in the status of a shell whose program it ended."""
BUSY_STATUS = 429
WAIT_S = 0.05
"""How long a thread waits before it looks again at what it waits for."""
ANY_ADDRESS = ("", "0.0.0.0", "::")


class Agent(Protocol):
    """Runs the agents of rollouts; thread-safe."""

    @property
    def live(self) -> int:
        """Number of agents that run."""

    def play(self, name: str, call: AgentCall) -> ProgramEnd:
        """Runs the agent of the session of that name to its end."""

    def kill(self) -> None:
        """Ends what runs."""

    def close(self) -> None:
        """Ends everything."""


@dataclass(eq=False)
class AgentSession:
    """The rollout of one program."""

    request: RolloutRequest
    """A request for this one rollout."""
    step: int
    most_calls: int
    choice: AgentKind = field(default_factory=lambda: AgentCommand(command="none"))
    """The settings of its agent."""
    agent: str = ""
    """Name of its agent, among several."""
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

    def record(self, choice: SampledChoice, answer: str, agent: str) -> None:
        ids = np.asarray(choice.ids, np.int32)
        logprobs = np.asarray(choice.logprobs, np.float32)
        trains = not self.choice.trained or agent in self.choice.trained
        self.calls.append(
            RecordedCall(choice.prompt, ids, logprobs, choice.versions, choice.begun, answer, agent, trains)
        )
        self.cut, self.broken = choice.finish_reason == "length", False

    def refused(self, error: RequestRefused) -> None:
        self.broken = error.status >= 500 or error.status == BUSY_STATUS
        self.full = self.full or error.code == "context_length_exceeded"

    def paid(self, end: ProgramEnd) -> tuple[list[RecordedCall], ProgramEnd]:
        """(the calls with their rewards, the end whose reward is all that was paid). What names no call is unread."""
        amounts = end.pay.calls
        if not amounts:
            return self.calls, end
        answers = list(dict.fromkeys(call.answer for call in self.calls))
        if isinstance(amounts, tuple):
            if len(amounts) > len(answers):
                numbers = f"calls has {len(amounts)} numbers for {len(answers)} calls"
                fault = f"{numbers}; give one each, in order, or by their ids"
                return self.calls, replace(end, pay=Pay(), unread=fault)
            amounts = {answer: number for answer, number in zip(answers, amounts, strict=False) if number is not None}
        if unknown := [name for name in amounts if name not in answers]:
            fault = f"calls names {unknown[0]!r:.80}; must be the id of an answer that this rollout got"
            return self.calls, replace(end, pay=Pay(), unread=fault)
        left = dict(amounts)  # the choices of one answer share its id: the first has its reward
        calls = [replace(call, reward=left.pop(call.answer, 0.0)) for call in self.calls]
        total = (end.pay.reward or 0.0) + sum(call.reward for call in calls)
        return calls, replace(end, pay=replace(end.pay, reward=total))

    def outcome(self, end: ProgramEnd, pays: frozenset[str]) -> tuple[StopReason, Failure | None]:
        """The typed outcome, and what failed. A program that fails once it has answers fails on what the policy said.

        Args:
            end: How the program ended.
            pays: Names of its numbers that count; the reward has an empty one.
        """
        if end.status is None:
            late = "took too long and asked nothing"
            return ("deadline", None) if self.calls else ("infrastructure", end.failure(late))
        if not self.calls:
            reason = f"it ended with status {end.status} and without an answer of the policy"
            return "infrastructure", end.failure(reason)
        if end.status and self.broken:
            return "infrastructure", end.failure(f"status {end.status} after a fault of the server")
        number = -end.status if end.status < 0 else end.status - SHELL_SIGNAL
        if number in ENDED_BY_OTHERS:
            return "infrastructure", end.failure(f"it was ended by {signal.Signals(number).name}")
        stop: StopReason = "turns" if self.over else "length" if self.full or (self.cut and not end.status) else "eos"
        if end.status and stop == "eos":
            zero = self.choice.on_failure == "zero"
            return "failed" if zero else "infrastructure", end.failure(f"status {end.status}", by_policy=zero)
        if not any(call.trains for call in self.calls):
            names = ", ".join(sorted({call.agent for call in self.calls}))
            reason = f"no answer to {', '.join(sorted(self.choice.trained))} (environment.trained); {names[:200]} asked"
            return "infrastructure", end.failure(reason)
        paid_names = {*end.pay.parts, *([] if end.pay.reward is None else [""])}
        if pays and not end.status and not pays & paid_names:
            return stop, end.failure(no_reward(end, pays))
        return stop, None


def no_reward(end: ProgramEnd, pays: frozenset[str] = frozenset([""])) -> str:
    """What to say of a program without a reward."""
    if end.unread:
        return f"its reward was not read: {end.unread}"
    if end.pay.parts or end.pay.reward is not None:
        names = ", ".join([*([] if end.pay.reward is None else ["reward"]), *end.pay.parts])
        return (
            f"it gave {names[:200]}, but none of what reward.functions pays: {', '.join(n or 'reward' for n in pays)}"
        )
    text = f"it gave no reward (a program writes it to the descriptor in {REWARD_VARIABLE}, a function returns it)"
    if read_pay(end.printed.encode())[0] != Pay():
        text += "; its last line is a number, but what it prints is not read, since the policy may have written it"
    return text


class AgentRuns:
    """Runs the agent of a problem once for each rollout, and samples what it asks for."""

    def __init__(
        self, choice: EnvironmentKind, chat: ChatFormat, engine: Engine, longest: int, pays: Collection[str] = ()
    ):
        """
        Args:
            choice: Has agents.
            chat: Writes prompts and reads turns.
            engine: Samples.
            longest: Most tokens of the conversations of a rollout together.
            pays: Names of the numbers of an agent that count; its reward has an empty one.

        Raises:
            ValueError: An agent cannot be used, or its endpoint cannot listen.
        """
        self._choice, self._chat, self._engine, self._longest = choice, chat, engine, longest
        self._pays = frozenset(pays)
        self._seen: set[str] = set()
        """Kinds of failures that were logged."""
        address, port = next((agent.address, agent.port) for agent in choice.agents.values())
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        if not self._token and not is_loopback(address):
            raise ValueError(
                f"environment.address {address} can be reached from elsewhere; set {TOKEN_VARIABLE} to a secret token"
            )
        self._token = self._token or secrets.token_urlsafe(16)

        def make(deliver: Any) -> Endpoint:
            return Endpoint(chat, SamplingLoop(engine, None, deliver), token=self._token)

        try:
            self._server = ServerThread(make, address, port)
        except OSError as error:
            raise ValueError(
                f"environment.address {address}, environment.port {port}: the endpoint cannot listen there ({error})"
            ) from error
        self._server.endpoint.sessions = {}
        host = socket.gethostname() if address in ANY_ADDRESS else address
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"
        """Where agents find the endpoint."""
        self._agents: dict[str, Agent] = {}
        try:
            for name, agent in choice.agents.items():
                self._agents[name] = make_agent(agent)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the server and what still runs."""
        for agent in self._agents.values():
            agent.close()
        self._server.close()

    @property
    def live(self) -> int:
        """Number of agents that run."""
        return sum(agent.live for agent in self._agents.values())

    def plays(self, problem: Problem) -> bool:
        """Whether an agent plays this problem; else an environment does."""
        return self._choice.name_for(problem) in self._agents

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
            replace(
                single, count=1, first_sample=i, temperature=heat if single.temperature is None else single.temperature
            )
            for single in requests
            for i in single.samples
        ]
        sessions = {}
        for single in singles:
            agent = self._choice.name_for(single.problem)
            sessions[f"{single.place}-{single.first_sample}-{secrets.token_hex(4)}"] = AgentSession(
                single, options.key_step, config.max_turns, self._choice.agents[agent], agent
            )
        endpoint = self._server.endpoint
        endpoint.dialogues = Dialogues(self._chat.config, self._chat.tokenizer)
        endpoint.loop.sampler, endpoint.sessions = sampler, dict(sessions)
        started = time.perf_counter()
        try:
            ends = self._run(sessions, options)
        finally:
            endpoint.sessions = {}
            self._kill()
            idle_s, endpoint.loop.idle_s = endpoint.loop.idle_s, 0.0
            stats = endpoint.loop.release()
        stats.seconds, stats.environment_s = time.perf_counter() - started, idle_s
        return self._trajectories(sessions, ends, stats), stats

    def _run(self, sessions: dict[str, AgentSession], options: RunOptions) -> list[ProgramEnd]:
        """Samples until all agents have ended."""
        loop, total = self._server.endpoint.loop, len(sessions)
        sizes = Counter(session.agent for session in sessions.values())
        with ExitStack() as pools:
            pool_of = {
                name: pools.enter_context(ThreadPoolExecutor(min(self._choice.agents[name].at_once, size), "agent"))
                for name, size in sizes.items()
            }
            ends: list[Future[ProgramEnd]] = [
                pool_of[session.agent].submit(self._play, name, session) for name, session in sessions.items()
            ]
            try:
                while left := sum(not end.done() for end in ends):
                    if options.before_chunk is not None:
                        options.before_chunk()
                    loop.turn(WAIT_S)
                    if options.progress is not None:
                        tokens = loop.stats.sampled_tokens
                        live, done = self.live, total - left
                        options.progress.update(live=live, waiting=left - live, done=done, total=total, tokens=tokens)
            except BaseException:
                for pool in pool_of.values():
                    pool.shutdown(wait=False, cancel_futures=True)
                while not all(end.done() for end in ends):
                    self._kill()  # once more for those that were just being started
                    wait(ends, WAIT_S)
                raise
        return [end.result() for end in ends]

    def _trajectories(
        self, sessions: dict[str, AgentSession], ends: list[ProgramEnd], stats: RolloutStats
    ) -> list[Trajectory]:
        stats.rollouts, stats.stops = len(sessions), dict.fromkeys(get_args(StopReason), 0)
        trajectories = []
        for session, end in zip(sessions.values(), ends, strict=True):
            calls, end = session.paid(end)
            rows = [row for row in conversations_of(calls) if row.mask.any() or not session.choice.trained]
            stop, failure = session.outcome(end, self._pays)
            trajectory = self._empty(session) if not rows else None
            if trajectory is None:
                trajectory, dropped = trajectory_of(rows, self._chat, session.request, stop, self._longest)
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
            trajectories.append(trajectory)
        return trajectories

    def _empty(self, session: AgentSession) -> Trajectory:
        """The rollout of a program that got no answer: the problem's prompt alone."""
        ids = np.asarray(self._chat.prompt_ids(session.request.problem), np.int32)
        nothing = RecordedCall(ids, ids[:0], np.zeros(0, np.float32), ids[:0])
        return trajectory_of(conversations_of([nothing]), self._chat, session.request, "infrastructure", len(ids))[0]

    def _play(self, name: str, session: AgentSession) -> ProgramEnd:
        """Runs the agent of a session to its end."""
        problem = replace(session.request.problem, prompt=session.request.problem.prompt + session.request.suffix)
        row = row_of(problem) | {"uid": problem.uid}
        call = AgentCall(row, problem.prompt, f"{self.url}/s/{name}/v1", self._token)
        try:
            return self._agents[session.agent].play(name, call)
        finally:
            self._server.endpoint.forget(name)

    def _kill(self) -> None:
        for agent in self._agents.values():
            agent.kill()


def make_agent(choice: AgentKind) -> Agent:
    """What runs the program or function of an agent. Raises ValueError if it cannot be used."""
    if isinstance(choice, AgentCommand) and choice.command:
        return ProgramAgent(choice)
    return FunctionAgent(choice, choice.function if isinstance(choice, AgentCommand) else "")

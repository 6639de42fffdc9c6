"""The sampler alone: problems in, trajectories with tool calls out. It knows no method, no reward and no run.

    with Sampler(model, params, tokenizer, tools) as sampler:
        rollouts, stats = sampler.roll_out([RolloutRequest(problem, place=0, count=8)])
        sampler.publish(new_params, version=1)            # after an update

Below it is the engine (`engine.engine`), which decodes rows of token ids, and beside that the executor, which runs the
calls. `ToolEnvironment` is between the two: it parses a turn, submits the calls to the executor as soon as the turn
ends, and returns the observation when all results of the turn have arrived. Other rows keep decoding meanwhile.

`EpisodeEnvironment` serves rollouts that have an environment of their own, which extends the prompt, answers turns and
pays rewards. Calls of built-in tools go to the executor as before, everything else to `environments.episodes`. An
agent's program, which asks the policy instead, is made by the caller.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax import checks
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import Engine, make_engine
from grpo_roc_jax.engine.protocol import Finish, Observe, RolloutStats, RunOptions, TurnEnd, Wait
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.engine.scheduler import check_keys
from grpo_roc_jax.engine.table import awaits_observation
from grpo_roc_jax.environments.environment import Observation
from grpo_roc_jax.environments.episode import Answer
from grpo_roc_jax.environments.episodes import GRACE_S, Episodes
from grpo_roc_jax.environments.failure import Failure, plain_failure
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import Params, init_params
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.text.chat_format import ChatFormat, ParsedTurn, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall, ToolExecutor, malformed_result
from grpo_roc_jax.tools.registry import Registry, default_registry
from grpo_roc_jax.types import RolloutRequest, StopReason, ToolCall, ToolResult, Trajectory, Turn


class Sampler:
    """A policy that is rolled out with tools: engine, chat format and executor, and the weights that it samples with.

    The executor's processes end with `close`, or with the block of `with`.
    """

    episodes: Episodes | None = None
    agents: Any = None
    weights: SamplerParams | None = None
    """What `publish` was last called with, in the layout of the engine."""

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        tokenizer: Tokenizer,
        tools: Registry | None = None,
        *,
        rollout: RolloutConfig | None = None,
        sampling: SamplingConfig | None = None,
        text: TextConfig | None = None,
        limits: ToolsConfig | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
    ):
        """
        Args:
            model: The shape of the policy, with `vocab_size` set to at least that of the tokenizer.
            params: Its weights: those of a learner, of `load_params`, or of `init_params`.
            tokenizer: What `load_tokenizer` returned.
            tools: The functions that the policy may call; by default those that `limits` enables, the Python tool
                among them.
            rollout: Rows at a time, and the most tokens of a prompt, of a response and of turns.
            sampling: Temperature and the like.
            text: The chat template, the system text, and how observations are cut.
            limits: The limits of the executor: processes, seconds, memory, isolation.
            mesh: The devices that slots and heads are divided over; by default the first one.
            seed: Random keys of tokens derive from it, from the step, the problem's place and the sample.

        Raises:
            ValueError: Parts that do not fit each other, such as a vocabulary that is too small, or the parameters of
                another model.
            TypeError: `tools` is no `Registry`, or there are no parameters.
            IsolationUnavailable: The machine cannot isolate programs as `limits` asks.
        """
        rollout, limits = rollout or RolloutConfig(), limits or ToolsConfig()
        checks.expect(tools, Registry | None, "tools", "a Registry: registry = Registry(), then registry.add(function)")
        tools = default_registry(limits.enabled) if tools is None else tools
        chat = make_chat(text or TextConfig(), tokenizer, tools.schemas)
        stops, ids = sorted(chat.stop_ids), tokenizer.vocab_size
        engine = make_engine(model, rollout, sampling or SamplingConfig(), stops, mesh, seed=seed, vocab_size=ids)
        checks.check_params(params, jax.eval_shape(lambda: init_params(jax.random.key(0), model)))
        self.engine, self.chat, self.executor = engine, chat, make_executor(limits, tools)
        self.publish(params, 0)
        self.executor.start()

    @classmethod
    def of(
        cls,
        engine: Engine,
        chat: ChatFormat,
        executor: ToolExecutor | None,
        episodes: Episodes | None = None,
        agents: Any = None,
    ) -> "Sampler":
        """A sampler of parts that the caller has made, with no weights yet.

        Args:
            engine: What `make_engine` returned.
            chat: A chat format with the engine's stop ids.
            executor: A started executor, or None where nothing calls tools.
            episodes: Environments of the user's, which answer the policy; None where tools alone do.
            agents: `serving.agent_runs.AgentRuns`, whose programs ask the policy; None without. With environments too,
                each problem says which of the two it has.
        """
        sampler = cls.__new__(cls)
        sampler.engine, sampler.chat, sampler.executor = engine, chat, executor
        sampler.episodes, sampler.agents = episodes, agents
        return sampler

    def publish(self, params: Params, version: int) -> SamplerParams:
        """Samples with these parameters from now on; rollouts in flight go on with them.

        Args:
            params: The parameters of the policy, in the layout of the trainer.
            version: Recorded with every token that they draw: the number of updates that led to them.

        Raises:
            NonFiniteWeightsError: A weight is NaN or infinite.
        """
        self.weights = None  # a second copy would take memory
        self.weights = self.engine.publish(params, version)
        return self.weights

    def roll_out(
        self,
        requests: Sequence[RolloutRequest],
        options: RunOptions | None = None,
        weights: SamplerParams | None = None,
    ) -> tuple[list[Sequence[Trajectory]], RolloutStats]:
        """(trajectories of each request, statistics of the engine).

        Args:
            requests: At least one; requests of one call differ in `place` or in their samples.
            options: Step, purpose and display; those of training step 0 by default.
            weights: What `engine.publish` returned; those of the last `publish` by default.

        Raises:
            ValueError: Nothing was published, there is no request, two ask for the same rollout, or one does not fit: a
                prompt that is too long, a temperature below 0.
        """
        weights, options = self.weights if weights is None else weights, options or RunOptions()
        if weights is None:
            raise ValueError("the sampler has no weights; call publish(params, version) with finite ones first")
        if isinstance(requests, RolloutRequest):
            raise TypeError("roll_out takes a list of requests; for one write roll_out([request])")
        requests = list(requests)
        if wrong := [request for request in requests if not isinstance(request, RolloutRequest)]:
            raise TypeError(
                f"roll_out got {type(wrong[0]).__name__}; must be RolloutRequests: RolloutRequest(problem, place=0)"
            )
        if not requests:
            raise ValueError("there is no request; pass at least one RolloutRequest")
        check_keys(requests, options.key_step)
        by_agent = [self.agents is not None and self.agents.plays(request.problem) for request in requests]
        rows: list[Sequence[Trajectory]] = [()] * len(requests)
        stats = RolloutStats()
        for agents in (True, False):
            indices = [i for i, agent in enumerate(by_agent) if agent == agents]
            if not indices:
                continue
            part = [requests[i] for i in indices]
            if agents:
                trajectories, counted = self.agents.collect(weights, part, options)
            elif self.episodes is not None:
                source = EpisodeSource(self.executor, self.episodes)
                trajectories, counted = collect_episodes(self.engine, weights, self.chat, source, part, options)
            else:
                trajectories, counted = self.engine.run(weights, *self.submission(part, options))
            for i, of_request in zip(indices, split(trajectories, [request.count for request in part]), strict=True):
                rows[i] = of_request
            stats = stats.followed_by(counted)
        return rows, stats

    def submission(self, requests: Sequence[RolloutRequest], options: RunOptions) -> tuple:
        """The arguments of `Engine.submit` after the weights: the requests with their prompts as token ids, the tools
        that answer them, and the options."""
        return with_tools(self.engine, self.chat, self.executor, requests, options)

    def close(self) -> None:
        """Ends environments and programs of agents, then the executor's processes."""
        for part in (self.agents, self.episodes, self.executor):
            if part is not None:
                part.close()

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split(rows: Sequence[Trajectory], sizes: Iterable[int]) -> list[Sequence[Trajectory]]:
    """The rows in consecutive parts of these sizes."""
    return [rows[low:high] for low, high in pairwise(accumulate(sizes, initial=0))]


ENDS: dict[str, StopReason] = {"answer": "answer", "eos": "eos"}
"""How a turn without a call ended -> how it ends its rollout; any other was cut by a limit."""


def collect_while_free(
    engine: Engine,
    submit: Callable[[Sequence[RolloutRequest]], range],
    requests: Sequence[RolloutRequest],
    take: Callable[[], RolloutRequest | None],
) -> tuple[list[list[Trajectory]], RolloutStats]:
    """(trajectories of each request, statistics) of these requests and of those that `take` gives whenever a slot is
    free, until it gives none.

    Args:
        engine: It must have no rollouts in flight.
        submit: `Engine.submit` with an environment.
        requests: The rollouts to begin with.
        take: The next one, if any.
    """
    rows: list[list[Any]] = []
    row_of_ticket: dict[int, tuple[list[Any], int]] = {}

    def begin(some: Sequence[RolloutRequest]) -> None:
        new = [[None] * request.count for request in some]
        slots_of_rows = [(row, j) for row in new for j in range(len(row))]
        row_of_ticket.update(zip(submit(some), slots_of_rows, strict=True) if slots_of_rows else ())
        rows.extend(new)

    try:
        begin(requests)
        left = True
        while row_of_ticket or left:
            while left and len(row_of_ticket) < engine.config.slots:
                request = take()
                left = request is not None
                begin([request] if left else [])
            for ticket, trajectory in engine.advance():
                row, j = row_of_ticket.pop(ticket)
                row[j] = trajectory
        return rows, engine.take_stats()
    finally:
        engine.release()


def with_tools(
    engine: Engine, chat: ChatFormat, executor: ToolExecutor, requests: Sequence[RolloutRequest], options: RunOptions
) -> tuple[list[RolloutRequest], "ToolEnvironment", RunOptions]:
    """The requests rendered, their environment and options: the arguments of `Engine.submit`."""
    rendered = render(requests, chat)
    environment = ToolEnvironment(
        chat, executor, rendered, step=options.key_step, seed=engine.seed, max_turns=engine.config.max_turns
    )
    return rendered, environment, options


def render(requests: Sequence[RolloutRequest], chat: ChatFormat) -> list[RolloutRequest]:
    """The requests with the token ids of their prompts, and prefixes as ids alone."""
    known: dict[tuple[str, str], np.ndarray] = {}
    rendered = []
    for request in requests:
        if request.resume is not None:
            prompt = request.resume.tokens[: request.resume.prompt_length]
        elif (prompt := known.get((request.problem.prompt, request.suffix))) is None:
            prompt = np.asarray(chat.prompt_ids(request.problem, request.suffix), np.int32)
            known[request.problem.prompt, request.suffix] = prompt
        prefix = (*request.prefix, *opening_ids(chat, request.prefix_text))
        rendered.append(replace(request, prompt=prompt, prefix=prefix, prefix_text=""))
    return rendered


def opening_ids(chat: ChatFormat, text: str) -> tuple[int, ...]:
    """Ids of a text that the policy continues, tags included, without the token that ends a turn."""
    ids = chat.turn_ids(text) if text else []
    return tuple(ids[:-1] if ids and ids[-1] == chat.end_id else ids)


@dataclass
class _Row:
    """What the environment remembers of a running rollout."""

    request: RolloutRequest
    sample: int
    step: int
    """The step that the rollout began in, as its random keys hold it."""
    turns: list[Turn]
    asked_again: bool
    """Whether it was cut before the observation of its last turn, so that the engine reports that turn once more."""
    pending: dict[str, int] = field(default_factory=dict)
    """Call id -> position of its result in `results`."""
    results: list[ToolResult | None] = field(default_factory=list)
    closed: bool = False
    """Whether the last turn ended with the end-of-turn token, so that its observation must not add one."""
    stop: StopReason = "length"
    """How the last turn ends the rollout if it makes no call and gets no answer."""

    @property
    def session(self) -> str:
        return f"{self.step}/{self.request.place}/{self.sample}"


class ToolEnvironment:
    """Answers the engine's turns with tool observations; one instance per engine run."""

    def __init__(
        self,
        chat: ChatFormat,
        executor: ToolExecutor,
        requests: Sequence[RolloutRequest],
        *,
        step: int,
        seed: int,
        max_turns: int,
    ):
        """
        Args:
            chat: Parses turns, writes observations.
            executor: Runs the calls.
            requests: The rendered requests, in the order in which the engine gets them.
            step: The step of requests that name none; see `RunOptions.key_step`.
            seed: The seed of the run, from which the seeds of calls derive.
            max_turns: Turns allowed; the calls of the last one are not run.
        """
        self._chat, self._executor, self._seed, self._max_turns = chat, executor, seed, max_turns
        self._rows = [_row(request, sample, step) for request in requests for sample in request.samples]
        self._row_of_call: dict[str, int] = {}
        self._answers: deque[tuple[int, Observe | Finish]] = deque()

    def turn_ended(self, index: int, turn: TurnEnd) -> Finish | Wait:
        """Parses the turn that row `index` just completed and submits its calls.

        It ends the row where the published environment does: at the token budget, at the turn limit before the calls
        of that turn are run, or without a call. A last turn without a call is named by how it ended: a turn cut by
        its own limit is `length`, so that it counts as truncated.
        """
        row = self._rows[index]
        parsed = self._parse(row, turn)
        if (stop := self._stop_after(row, turn, parsed)) is not None:
            return self._finish(row, stop)
        self._begin_answer(index)
        row.results, number = [None] * len(parsed.calls), len(row.turns)
        for position, call in enumerate(parsed.calls):
            if call.fault is not None:
                row.results[position] = malformed_result(call.message)
            elif self._is_run(call):
                call_id = f"{row.session}/{number}/{position}"
                seed = stable_seed(self._seed, row.step, row.request.problem.uid, row.sample, number, position)
                self._executor.submit(CodeCall(call_id, call.name, call.arguments, row.session, seed))
                row.pending[call_id] = position  # only now: a call that is refused may be of another row
                self._row_of_call[call_id] = index
        self._answer_if_complete(index)
        ended = self._answers and self._answers[-1][0] == index and isinstance(self._answers[-1][1], Finish)
        return self._answers.pop()[1] if ended else Wait()

    def _stop_after(self, row: _Row, turn: TurnEnd, parsed: ParsedTurn) -> StopReason | None:
        """How a turn ends its rollout; None if its calls are run."""
        if turn.reason == "length":
            return "length"
        if not parsed.calls:
            return row.stop
        return "turns" if len(row.turns) >= self._max_turns else None

    def _begin_answer(self, index: int) -> None:
        """Called before the calls of a turn are run."""

    def _is_run(self, call: ToolCall) -> bool:
        """Whether the executor runs a call."""
        return True

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        """Answers of the rows whose results are complete; waits at most `timeout_s` for the first."""
        for call_id, result in self._executor.poll(0.0 if self._answers else timeout_s, self._row_of_call):
            index = self._row_of_call.pop(call_id, None)
            if index is None:
                continue
            row = self._rows[index]
            row.results[row.pending.pop(call_id)] = result
            self._answer_if_complete(index)
        ready = list(self._answers)
        self._answers.clear()
        return ready

    def cancelled(self, index: int) -> bool:
        """The engine ended the row (deadline, early exit): its calls are killed. False if one may never have run."""
        row = self._rows[index]
        proven = self._executor.cancel(list(row.pending))
        for call_id in row.pending:
            self._row_of_call.pop(call_id, None)
        row.pending.clear()
        self._record_results(row)
        self._executor.close_session(row.session)
        return proven

    def find_stop(self, index: int, new_tokens: np.ndarray, before: np.ndarray) -> int | None:
        """Where a stop text that is not a single token ends; None if there is none."""
        return self._chat.find_stop(new_tokens, before) if self._chat.stop_texts else None

    def goes_on(self, index: int, tokens: np.ndarray) -> bool:
        """Whether a stop text that is a single token stands inside a thought or a call."""
        return self._chat.goes_on(tokens)

    def completed(self, index: int, trajectory: Trajectory) -> Trajectory:
        """The trajectory with text, calls and results of its turns."""
        return replace(trajectory, turns=tuple(self._rows[index].turns))

    def _parse(self, row: _Row, turn: TurnEnd) -> ParsedTurn:
        """The turn, added to those of its row."""
        parsed = self._chat.parse_turn(turn.tokens)
        if row.asked_again:
            row.turns.pop()
            row.asked_again = False
        row.turns.append(Turn(turn.start, turn.start + len(turn.tokens), parsed.text, parsed.calls))
        row.closed, row.stop = parsed.closed, ENDS.get(parsed.ended_by, "length")
        return parsed

    def _answer_if_complete(self, index: int) -> None:
        """Queues the observation of a turn whose results are all there, or the end after an infrastructure failure."""
        row = self._rows[index]
        if any(result is None for result in row.results):
            return
        results = self._record_results(row)
        if any(result.infra for result in results):
            self._answers.append((index, self._finish(row, "infrastructure")))
            return
        self._answers.append((index, self._observation(row, results)))

    def _observation(self, row: _Row, results: Sequence[ToolResult]) -> Observe:
        """The results of the last turn's calls as the policy sees them; what was escaped or cut is recorded."""
        shown = [self._chat.shown(result.observation) for result in results]
        changed = (r if s == r.observation else replace(r, shown=s) for r, s in zip(results, shown, strict=True))
        row.turns[-1] = replace(row.turns[-1], results=tuple(changed))
        ids = self._chat.shown_ids(shown, closed=row.closed, calls=row.turns[-1].calls)
        return Observe(np.asarray(ids, np.int32))

    def _record_results(self, row: _Row) -> tuple[ToolResult, ...]:
        """The results of the last turn, recorded. Of a row that was cut only those before the first missing one, since
        results belong to calls by their order."""
        results = tuple(map(_without_secrets, takewhile(lambda result: result is not None, row.results)))
        if results and not row.turns[-1].results:
            row.turns[-1] = replace(row.turns[-1], results=results)
        row.results = []
        return results

    def _finish(self, row: _Row, stop: StopReason) -> Finish:
        self._executor.close_session(row.session)
        return Finish(stop)


def _row(request: RolloutRequest, sample: int, step: int) -> _Row:
    past, began = request.resume, step if request.step is None else request.step
    turns, asked_again = ([], False) if past is None else (list(past.turns), awaits_observation(past))
    return _Row(request, sample, began, turns, asked_again)


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of the parts: the same in every process and version."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _without_secrets(result: ToolResult) -> ToolResult:
    """A failure of the infrastructure may name the address or the command of a service, as it was typed."""
    return replace(result, error_message=hidden(result.error_message)) if result.infra else result


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
    try:
        rendered = render(environment.open(requests, config.max_prompt_tokens), chat)
        trajectories, stats = engine.run(sampler, rendered, environment, options)
        paid = environment.paid(trajectories)
    except BaseException:
        for index in range(sum(request.count for request in requests)):
            with suppress(Exception):  # of one row, which must not keep the others from theirs
                environment.abandoned(index)
        raise
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
        self._playing: dict[str, int] = {}
        """Session whose environment is to answer -> its row."""
        self._ended: dict[str, Answer | None] = {}
        """Session -> its reward; None until it has arrived, and where there is none to ask for."""
        self._openings: dict[str, str] = {}
        """Session -> what its environment appended to the prompt, if anything."""
        self.failures: dict[str, Failure] = {}
        """Session -> the failure that its rollout ended by."""

    def open(self, requests: Sequence[RolloutRequest], max_prompt_tokens: int) -> list[RolloutRequest]:
        """Resets an environment for each rollout; the requests, split where the texts to append to prompts differ.

        Args:
            requests: The same as passed to the constructor.
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
                    message = f"its text makes the prompt longer than rollout.max_prompt_tokens ({max_prompt_tokens})"
                    answer = replace(answer, failure=self._episodes.note(plain_failure("reset", message)))
                if answer.failure is not None:
                    self._drop(row)
                    self.failures[row.session] = answer.failure
                    longer = request.problem
                elif answer.value:
                    self._openings[row.session] = answer.value
                texts.append((longer.prompt, sample))
            for text, group in groupby(texts, key=lambda pair: pair[0]):
                samples = [sample for _, sample in group]
                problem = replace(request.problem, prompt=text)
                opened.append(replace(request, problem=problem, first_sample=samples[0], count=len(samples)))
        return opened

    def _stop_after(self, row: _Row, turn: TurnEnd, parsed: ParsedTurn) -> StopReason | None:
        if row.session in self.failures:  # of its reset
            return "infrastructure"
        return "length" if turn.reason == "length" or parsed.ended_by == "none" else None

    def _begin_answer(self, index: int) -> None:
        self._playing[self._rows[index].session] = index

    def _is_run(self, call: ToolCall) -> bool:
        return call.name in self._episodes.shared

    def poll(self, timeout_s: float) -> list[tuple[int, Observe | Finish]]:
        ready: list[tuple[int, Observe | Finish]] = []
        calls = bool(self._row_of_call)
        if calls or self._answers:
            both = len(self._playing) > len(set(self._row_of_call.values()))
            ready = super().poll(min(timeout_s, BOTH_S) if both else timeout_s)
        for session, answer in self._episodes.poll(0.0 if ready or calls else timeout_s):
            if session in self._playing:
                index = self._playing.pop(session)
                ready.append((index, self._reply(self._rows[index], answer)))
            elif session in self._ended:
                self._ended[session] = answer
        return ready

    def cancelled(self, index: int) -> bool | None:
        ran = super().cancelled(index)
        row = self._rows[index]
        self._playing.pop(row.session, None)
        self._end(row)
        return ran

    def abandoned(self, index: int) -> None:
        """Closes the environment of a rollout that nobody takes, without asking for its reward."""
        self._drop(self._rows[index])
        super().cancelled(index)

    def completed(self, index: int, trajectory: Trajectory) -> Trajectory:
        opening = self._openings.get(self._rows[index].session, "")
        return replace(super().completed(index, trajectory), opening=opening)

    def paid(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with what their environments paid; those whose environment failed end as such."""
        for row in self._rows:
            self._end(row)
        while any(self._episodes.awaits(key) for key, answer in self._ended.items() if answer is None):
            self._ended |= {key: answer for key, answer in self._episodes.poll(GRACE_S) if key in self._ended}
        paid = []
        for row, trajectory in zip(self._rows, trajectories, strict=True):
            answer = self._ended.get(row.session)
            if answer is not None and answer.failure is not None:
                self.failures.setdefault(row.session, answer.failure)
            failure = self.failures.get(row.session)
            if failure is not None or answer is None:
                stop: StopReason = "failed" if failure is not None and failure.by_policy else "infrastructure"
                stop = trajectory.stop if trajectory.stop == "cancelled" else stop
                reward = 0.0 if stop == "failed" else None
                paid.append(replace(trajectory, stop=stop, reward=reward, fault=failure.whole if failure else ""))
                continue
            turns = sum(turn.reward for turn in trajectory.turns)
            reward, rewards = answer.value
            paid.append(replace(trajectory, reward=None if reward is None else reward + turns, rewards=rewards))
        return paid

    def _answer_if_complete(self, index: int) -> None:
        """Asks the environment as soon as the results of the executor are there."""
        row = self._rows[index]
        if row.pending or row.session not in self._playing:
            return
        if lost := [result for result in row.results if result is not None and result.infra]:
            message = f"{lost[0].kind}: {lost[0].error_message}"
            self.failures[row.session] = self._episodes.note(plain_failure("a call", message))
            self._record_results(row)
            del self._playing[row.session]
            self._answers.append((index, self._finish(row, "infrastructure")))
            return
        if (answer := self._episodes.play(row.session, row.turns[-1], row.results)) is not None:
            del self._playing[row.session]
            self._answers.append((index, self._reply(row, answer)))

    def _reply(self, row: _Row, answer: Answer) -> Observe | Finish:
        """How a row goes on after the answer of its environment."""
        results, observation = ((), None) if answer.value is None else answer.value
        observation = observation or Observation()
        row.turns[-1] = replace(row.turns[-1], results=results, reply=observation.text, reward=observation.reward)
        row.results = []
        if answer.failure is not None:
            self.failures[row.session] = answer.failure
            return self._finish(row, "failed" if answer.failure.by_policy else "infrastructure")
        if answer.late:
            return self._finish(row, "deadline")
        if observation.done:
            return self._finish(row, "answer")
        if not (observation.text or results):
            return self._finish(row, row.stop)
        if len(row.turns) >= self._max_turns:
            return self._finish(row, "turns")
        if not observation.text:
            return self._observation(row, results)
        if observation.role == "raw":
            return Observe(np.asarray(self._chat.raw_ids(observation.text), np.int32))
        ids = self._chat.question_ids(self._chat.shown(observation.text), closed=row.closed)
        return Observe(np.asarray(ids, np.int32))

    def _finish(self, row: _Row, stop: StopReason) -> Finish:
        self._end(row)
        return super()._finish(row, stop)

    def _end(self, row: _Row) -> None:
        if row.session not in self._ended:
            self._ended[row.session] = self._episodes.end(row.session)

    def _drop(self, row: _Row) -> None:
        self._ended[row.session] = None
        self._episodes.drop(row.session)

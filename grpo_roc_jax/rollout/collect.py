"""Rollouts with tools: turns, calls and observations become trajectories.

The engine (`rollout.engine`) handles token ids and slots; this module is its environment. It parses a turn, submits the
calls to the executor as soon as the turn ends, and returns the observation when all results of the turn have arrived.
Other rows keep decoding meanwhile.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_roc_jax.rollout.engine import Engine
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import Finish, Observe, RolloutStats, RunOptions, TurnEnd, Wait
from grpo_roc_jax.rollout.resume import awaits_observation
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.text.chat_format import ChatFormat, ParsedTurn
from grpo_roc_jax.tools.interface import CodeCall, ToolExecutor, malformed_result
from grpo_roc_jax.types import RolloutRequest, StopReason, ToolCall, ToolResult, Trajectory, Turn

ENDS: dict[str, StopReason] = {"answer": "answer", "eos": "eos"}
"""How a turn without a call ended -> how it ends its rollout; any other was cut by a limit."""


def collect(
    engine: Engine,
    sampler: SamplerParams,
    chat: ChatFormat,
    executor: ToolExecutor,
    requests: Sequence[RolloutRequest],
    options: RunOptions,
) -> tuple[list[Trajectory], RolloutStats]:
    """Rolls every request out with tools; trajectories request by request and sample by sample."""
    return engine.run(sampler, *with_tools(engine, chat, executor, requests, options))


def collect_while_free(
    engine: Engine,
    submit: Callable[[Sequence[RolloutRequest]], range],
    requests: Sequence[RolloutRequest],
    take: Callable[[], RolloutRequest | None],
) -> tuple[list[list[Trajectory]], RolloutStats]:
    """(trajectories of each request, statistics) of these requests and of those that `take` gives whenever a slot is
    free, until it gives none.

    Args:
        engine: Without rollouts in flight.
        submit: `Engine.submit` with an environment.
        requests: To begin with.
        take: The next one, if any.
    """
    rows: list[list[Any]] = []
    places: dict[int, tuple[list[Any], int]] = {}

    def begin(some: Sequence[RolloutRequest]) -> None:
        new = [[None] * request.count for request in some]
        own = [(row, j) for row in new for j in range(len(row))]
        places.update(zip(submit(some), own, strict=True) if own else ())
        rows.extend(new)

    try:
        begin(requests)
        left = True
        while places or left:
            while left and len(places) < engine.config.slots:
                request = take()
                left = request is not None
                begin([request] if left else [])
            for ticket, trajectory in engine.advance():
                row, j = places.pop(ticket)
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
    """That it began in, as its random keys hold it."""
    turns: list[Turn]
    asked_again: bool
    """Whether it was cut before the observation of its last turn, so that the engine reports that turn once more."""
    pending: dict[str, int] = field(default_factory=dict)
    """Call id -> place of its result in `results`."""
    results: list[ToolResult | None] = field(default_factory=list)
    closed: bool = False
    """Whether the last turn ended with the end-of-turn token, so that its observation must not add one."""

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
            requests: As the engine gets them.
            step: Of requests that name none; see `RunOptions.key_step`.
            seed: Of the run; seeds of calls derive from it.
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
        if turn.reason == "length":
            return self._finish(row, "length")
        if not parsed.calls:
            return self._finish(row, ENDS.get(parsed.ended_by, "length"))
        if len(row.turns) >= self._max_turns:
            return self._finish(row, "turns")
        row.results = [None] * len(parsed.calls)
        for place, call in enumerate(parsed.calls):
            self._submit(index, place, call)
        self._answer_if_complete(index)
        return Wait()

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
        row.closed = parsed.closed
        return parsed

    def _submit(self, index: int, place: int, call: ToolCall) -> None:
        row = self._rows[index]
        if call.fault is not None:
            row.results[place] = malformed_result(call.message)
            return
        turn = len(row.turns)
        call_id = f"{row.session}/{turn}/{place}"
        row.pending[call_id] = place
        self._row_of_call[call_id] = index
        self._executor.submit(
            CodeCall(
                id=call_id,
                tool=call.name,
                arguments=call.arguments,
                session=row.session,
                seed=stable_seed(self._seed, row.step, row.request.problem.uid, row.sample, turn, place),
            )
        )

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
        results = tuple(_without_secrets(result) for result in row.results if result is not None)
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

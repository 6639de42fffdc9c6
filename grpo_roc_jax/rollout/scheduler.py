"""One run of the engine: moves rows between the queue, the devices and the environment.

Each round appends the environment's answers to the live caches of their rows, gives free slots to the next rows,
enqueues a chunk of decode steps and reads one. Rows that stopped in it go to the environment, which finishes them or
submits their calls. The host blocks on the environment only when nothing can be decoded.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from grpo_roc_jax.rollout.admission import Admission, expand
from grpo_roc_jax.rollout.config import NoStepLimit
from grpo_roc_jax.rollout.decode import ChunkReport
from grpo_roc_jax.rollout.device_rows import DeviceRows, Write
from grpo_roc_jax.rollout.programs import SamplerPrograms
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import Finish, RolloutStats, RowEnvironment, RunOptions, TurnEnd, TurnReason
from grpo_roc_jax.rollout.resume import awaits_observation, starting_point
from grpo_roc_jax.rollout.table import FREE, SlotTable
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory

log = logging.getLogger(__name__)
POLL_S = 1.0
"""Longest single wait for tools; deadlines are checked in between."""


class Scheduler:
    """The state of one `Engine.run`; see there for the arguments. A row is one rollout."""

    def __init__(
        self,
        programs: SamplerPrograms,
        seed: int,
        sampler: SamplerParams,
        requests: Sequence[RolloutRequest],
        environment: RowEnvironment,
        options: RunOptions,
    ):
        config, settings = programs.rollout, programs.settings
        if options.purpose != "train":
            config = replace(config, step_limit=NoStepLimit())
        self.config, self.seed = config, seed
        self.version = sampler.version
        self.environment, self.progress = environment, options.progress
        self.before_chunk = options.before_chunk or (lambda: None)
        self.cancel_policy = options.cancel_policy if config.early_exit else None
        self.find_stop = getattr(environment, "find_stop", None)
        self.completed = getattr(environment, "completed", None)
        heat = settings.sampling.temperature
        self.rows, self.prompts = expand(requests, options.key_step, config.max_response_tokens, heat)
        self.shards = programs.shards
        self.per_shard = config.slots // self.shards
        self.is_stop = np.zeros(programs.model.vocab_size, bool)
        self.is_stop[list(settings.stop_ids)] = True
        model, longest = programs.model, max(len(row.prompt) + row.budget for row in self.rows)
        routes = (model.layers, model.experts.per_token) if model.experts.replay else None
        self.table = SlotTable(config.slots, longest, routes=routes, recurrent=model.delta is not None)
        self.slot_of = np.full(len(self.rows), FREE, np.int64)
        self.trajectories: list[Trajectory | None] = [None] * len(self.rows)
        self.unfinished = len(self.rows)
        self.admission = Admission(
            self.rows,
            self.prompts,
            shards=self.shards,
            reservable=config.reservable_tokens // self.shards,
            longest_first=config.admission == "longest",
        )
        self.may_admit = True
        """False once a row was refused, until a slot becomes free."""
        self.stats = RolloutStats(rollouts=len(self.rows))
        self.shard_tokens = np.zeros(self.shards, np.int64)
        self.device = DeviceRows(programs, config, sampler.params, self.table, self.stats)

    def run(self) -> tuple[list[Trajectory], RolloutStats]:
        """Rounds until every row has its trajectory."""
        self.started = time.perf_counter()
        while self.unfinished:
            self.before_chunk()
            self._take_answers()
            self._check_deadlines()
            self._admit()
            self.device.flush()
            if self.table.live.any():
                read = self.device.chunk()
            else:
                read = self.device.read() if self.device.flight is not None else None
            if read is not None:
                self._take_report(*read)
            self._update_progress()
        self.stats.seconds = time.perf_counter() - self.started
        self.stats.shard_tokens = tuple(int(n) for n in self.shard_tokens)
        return [trajectory for trajectory in self.trajectories if trajectory is not None], self.stats

    # Answers of the environment.

    def _take_answers(self) -> None:
        """Takes the answers that have arrived; blocks only when no row can decode and no chunk is left to read."""
        table = self.table
        if not table.waiting.any():
            return
        admits = self.may_admit and self.admission.waiting > 0
        idle = not table.live.any() and self.device.flight is None and not admits
        start = time.perf_counter()
        answers = self.environment.poll(min(POLL_S, self._until_deadline()) if idle else 0.0)
        seconds = time.perf_counter() - start
        if idle:
            self.stats.tool_wait_s += seconds
        else:
            self.stats.environment_s += seconds
        for index, answer in answers:
            slot = int(self.slot_of[index])
            if slot == FREE or not table.waiting[slot]:
                continue
            if isinstance(answer, Finish):
                self._finish(slot, answer.stop)
            else:
                self._observe(slot, np.asarray(answer.ids, np.int32))

    def _observe(self, slot: int, ids: np.ndarray) -> None:
        table, length = self.table, int(self.table.length[slot])
        if length + len(ids) >= table.total[slot]:
            # No token could follow; the row ends with its call unanswered, as in the published environment.
            self._end_early(slot, "length")
            return
        table.observe(slot, ids)
        self.stats.observation_tokens += len(ids)
        # The pending token comes first; the last of the observation is the next pending one.
        start, end = table.rewritten_from(slot, length - 1), length + len(ids) - 1
        if end > start:
            self.device.write(Write(slot, int(table.row[slot]), table.tokens[slot, start:end].copy(), start))
        table.go(slot, self.config.max_turn_tokens)

    # Ends of turns and rows.

    def _end_turn(self, slot: int, found: bool) -> None:
        """Hands the turn of a stopped row to the environment."""
        table = self.table
        turn, index = table.end_turn(slot), int(table.row[slot])
        reason: TurnReason = "turn_length"
        if turn.end >= table.total[slot]:
            reason = "length"
        elif found or self.is_stop[table.tokens[slot, turn.end - 1]]:
            reason = "stop"
        span = slice(turn.start, turn.end)
        ended = TurnEnd(
            index, turn.start, table.tokens[slot, span].copy(), table.logprobs[slot, span].copy(), reason=reason
        )
        before = time.perf_counter()
        try:
            answer = self.environment.turn_ended(index, ended)
        except Exception:  # a fault in one trajectory costs that trajectory
            if not self.stats.stops["infrastructure"]:
                log.exception("a turn could not be taken; its rollout ends as an infrastructure failure")
            with suppress(Exception):
                self.environment.cancelled(index)
            reason, answer = "turn_length", Finish("infrastructure")
        self.stats.environment_s += time.perf_counter() - before
        if reason == "length":
            self._finish(slot, "length")
        elif isinstance(answer, Finish):
            self._finish(slot, answer.stop)
        else:
            table.waiting[slot] = True
            table.waiting_since_s[slot] = time.perf_counter()

    def _finish(self, slot: int, stop: StopReason) -> None:
        table = self.table
        index = int(table.row[slot])
        trajectory = table.trajectory(slot, self.rows[index], stop, time.perf_counter())
        table.free(slot)
        self.slot_of[index] = FREE
        self.admission.release(index, slot // self.per_shard)
        self.may_admit = True
        self._record(index, trajectory)

    def _record(self, index: int, trajectory: Trajectory) -> None:
        if self.completed is not None:
            trajectory = self.completed(index, trajectory)
        self.trajectories[index] = trajectory
        self.unfinished -= 1
        self.stats.stops[trajectory.stop] += 1
        if self.cancel_policy is not None:
            for other in self.cancel_policy(index, trajectory):
                self._cancel(other)

    def _end_early(self, slot: int, stop: StopReason) -> None:
        """Ends a row for a reason of the engine's own; the environment drops its calls. A deadline that a call missed
        because the executor was down is an infrastructure failure."""
        proven = self.environment.cancelled(int(self.table.row[slot]))
        self._finish(slot, "infrastructure" if stop == "deadline" and proven is False else stop)

    def _cancel(self, index: int) -> None:
        if self.trajectories[index] is not None:
            return
        if self.slot_of[index] != FREE:
            self._end_early(int(self.slot_of[index]), "cancelled")
        elif self.admission.withdraw(index):
            self._end_unadmitted(index, "cancelled")

    def _end_unadmitted(self, index: int, stop: StopReason) -> None:
        """Ends a row that never got a slot, as it stood before."""
        self._record(index, replace(starting_point(self.rows[index]), stop=stop))

    # Deadlines.

    def _check_deadlines(self) -> None:
        config, table = self.config, self.table
        if not (config.turn_timeout_s or config.trajectory_timeout_s or config.step_limit.seconds):
            return
        now = time.perf_counter()
        late = np.zeros(len(table.row), bool)
        if config.turn_timeout_s:
            late |= table.waiting & (now - table.waiting_since_s > config.turn_timeout_s)
        if config.trajectory_timeout_s:
            late |= table.occupied & (now - table.admitted_s > config.trajectory_timeout_s)
        for slot in np.flatnonzero(late):
            if table.row[slot] != FREE:
                self._end_early(int(slot), "deadline")
        if 0 < config.step_limit.seconds < now - self.started:
            self._end_step()

    def _end_step(self) -> None:
        """Ends every row. Under `partial` all can be resumed. Under `drop` a row that waits for its tool missed the
        deadline by its own tool use, and every other row is an infrastructure failure."""
        resumes = self.config.step_limit.partial
        for slot in np.flatnonzero(self.table.occupied):
            late: StopReason = "deadline" if self.table.waiting[slot] else "infrastructure"
            if self.table.row[slot] != FREE:
                self._end_early(int(slot), "cancelled" if resumes else late)
        for index in self.admission.withdraw_all():
            if self.trajectories[index] is None:
                self._end_unadmitted(index, "cancelled" if resumes else "infrastructure")

    def _until_deadline(self) -> float:
        """Seconds to the nearest deadline, at least a millisecond."""
        config, table, now = self.config, self.table, time.perf_counter()
        ends = [float("inf")]
        if config.turn_timeout_s:
            ends.append(float(table.waiting_since_s[table.waiting].min()) + config.turn_timeout_s)
        if config.trajectory_timeout_s:
            ends.append(float(table.admitted_s[table.occupied].min()) + config.trajectory_timeout_s)
        if config.step_limit.seconds:
            ends.append(self.started + config.step_limit.seconds)
        return max(1e-3, min(ends) - now)

    # Admission.

    def _admit(self) -> None:
        """Fills free slots while reservations fit, the shard with least reserved first."""
        if not (self.admission.waiting and self.may_admit):
            return
        self.may_admit = False
        table, now = self.table, time.perf_counter()
        for shard in sorted(range(self.shards), key=lambda shard: self.admission.reserved[shard]):
            first = shard * self.per_shard
            own = np.arange(first, first + self.per_shard)
            free = own[table.row[own] == FREE].tolist()
            while free:
                index = self.admission.take(shard)
                if index is None:
                    break
                slot = self._choose_slot(self.prompts[index], free)
                free.remove(slot)
                self._occupy(slot, index, own, now)
        self.stats.reserved_peak = max(self.stats.reserved_peak, sum(self.admission.reserved))

    def _choose_slot(self, prompt: int, free: list[int]) -> int:
        """A free slot that still holds the prompt; otherwise one that no copy of this round reads."""
        holding = self.table.holders(prompt, free)
        if len(holding):
            return int(holding[0])
        return next((slot for slot in free if not self.device.is_source(slot)), free[0])

    def _occupy(self, slot: int, index: int, own: np.ndarray, now: float) -> None:
        """Gives a slot to a row, and starts it."""
        table, row = self.table, self.rows[index]
        self._provide_prompt(slot, index, own)
        table.admit(slot, index, row, self.seed, now)
        self.slot_of[index] = slot
        written, known = len(row.prompt) - 1, int(table.length[slot]) - 1
        if known > written:
            self.device.write(Write(slot, index, table.tokens[slot, written:known].copy(), written))
        if row.resume is not None and awaits_observation(row.resume):
            self._end_turn(slot, found=True)
        else:
            table.go(slot, self.config.max_turn_tokens)

    def _provide_prompt(self, slot: int, index: int, own: np.ndarray) -> None:
        """The row's prompt in the cache of the slot: there already, copied from another slot of `own`, or written."""
        table, row, prompt = self.table, self.rows[index], self.prompts[index]
        if table.held_prompt[slot] == prompt:
            self.stats.reused += 1
            return
        columns = len(row.prompt) - 1
        self.device.flush_if_queued(slot)
        holders = table.holders(prompt, own)
        if len(holders):
            self.stats.forks += 1
            if columns:
                self.device.copy_prompt(int(holders[0]), slot)
        else:
            self.stats.prompts += 1
            if columns:
                self.device.write_prompt(Write(slot, index, np.asarray(row.prompt[:-1], np.int32), 0))
        table.held_prompt[slot], table.held_columns[slot] = prompt, columns

    # Reports.

    def _take_report(self, report: ChunkReport, count: np.ndarray) -> None:
        """Takes a chunk's tokens, `count` of each slot, and ends the turns of rows that stopped in it."""
        table = self.table
        table.extend(report, count, self.version)
        drew = count > 0
        self.shard_tokens += count.reshape(self.shards, -1).sum(axis=1)
        self.stats.sampled_tokens += int(count.sum())
        found = self._stop_texts(np.flatnonzero(drew), count) if self.find_stop is not None else set()
        last = table.tokens[np.arange(len(count)), np.maximum(table.length - 1, 0)]
        stopped = drew & ((table.length >= table.limit) | self.is_stop[last])
        stopped[list(found)] = True
        for slot in np.flatnonzero(stopped).tolist():
            # The end of a row before it in this loop may have cancelled this one.
            if table.live[slot]:
                self._end_turn(slot, found=slot in found)

    def _stop_texts(self, slots: np.ndarray, count: np.ndarray) -> set[int]:
        """Rows whose stop text ended in this chunk; they are rolled back to its end."""
        table, found = self.table, set()
        for slot in slots.tolist():
            n, drawn = int(table.length[slot]), int(count[slot])
            new, before = table.tokens[slot, n - drawn : n], table.tokens[slot, table.turn_start[slot] : n - drawn]
            keep = self.find_stop(int(table.row[slot]), new.copy(), before)
            if keep is None:
                continue
            if not 1 <= keep <= drawn:
                raise ValueError(
                    f"find_stop kept {keep} of {drawn} new tokens; a stop text ends among the new tokens, so it must "
                    f"return 1 to {drawn}, or None"
                )
            found.add(slot)
            table.roll_back(slot, drawn - keep)
            self.stats.sampled_tokens -= drawn - keep
            self.shard_tokens[slot // self.per_shard] -= drawn - keep
            self.stats.dropped_tokens += drawn - keep
        return found

    def _update_progress(self) -> None:
        if self.progress is not None:
            self.progress.update(
                live=int(self.table.live.sum()),
                waiting=int(self.table.waiting.sum()),
                done=len(self.rows) - self.unfinished,
                total=len(self.rows),
                tokens=self.stats.sampled_tokens,
            )

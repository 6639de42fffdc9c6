"""One run of the engine: rows between the queue, the devices and the environment.

A round: answers of the environment are appended to the live caches of their rows; free slots take the next requests;
a chunk of decode steps is enqueued and one is read; rows that stopped in it go to the environment, which finishes them
or submits their calls. The host blocks on the environment only when nothing can be decoded.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_roc_jax.rollout.admission import Admission
from grpo_roc_jax.rollout.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.rollout.decode import Report
from grpo_roc_jax.rollout.device_rows import DeviceRows, Write
from grpo_roc_jax.rollout.programs import Programs
from grpo_roc_jax.rollout.records import Environment, Finish, Request, Rollout, RolloutStats, TurnEnd, TurnReason
from grpo_roc_jax.rollout.table import FREE, SlotTable
from grpo_roc_jax.rollout.weights import SamplerParams
from grpo_roc_jax.types import StopReason

POLL_S = 1.0
"""Longest single wait for tools; deadlines are looked at in between."""

Surplus = Callable[[int, Rollout], Iterable[int]]
"""(index, its rollout), called as each row ends -> indices no longer needed, e.g. as a group's quota is settled."""


class Run:
    """The state of one `Engine.run`; see there for the arguments."""

    def __init__(
        self,
        config: RolloutConfig,
        sampling: SamplingConfig,
        programs: Programs,
        stop_ids: tuple[int, ...],
        seed: int,
        sampler: SamplerParams,
        requests: Sequence[Request],
        environment: Environment,
        progress: Any,
        surplus: Surplus | None,
    ):
        self.config, self.seed, self.temperature = config, seed, sampling.temperature
        self.requests, self.environment, self.progress = requests, environment, progress
        self.version = sampler.version
        self.surplus = surplus if config.early_exit else None
        self.find_stop = getattr(environment, "find_stop", None)
        self.shards = programs.shards
        self.per_shard = config.slots // self.shards
        self.is_stop = np.zeros(programs.model.vocab_size, bool)
        self.is_stop[list(stop_ids)] = True
        width = max(len(request.prompt) + request.budget for request in requests)
        self.table = SlotTable(config.slots, width, keeps_mass=sampling.truncated)
        self.slot_of = np.full(len(requests), FREE, np.int64)
        self.rollouts: list[Rollout | None] = [None] * len(requests)
        self.unfinished = len(requests)
        self.admission = Admission(
            requests,
            shards=self.shards,
            reservable=config.reservable_tokens // self.shards,
            longest_first=config.admission == "longest",
        )
        self.seats_left = True
        self.stats = RolloutStats(requests=len(requests))
        self.shard_tokens = np.zeros(self.shards, np.int64)
        self.device = DeviceRows(programs, config, sampler.params, self.table, self.stats)

    def run(self) -> tuple[list[Rollout], RolloutStats]:
        """Rounds until every request has its rollout."""
        self.started = time.perf_counter()
        while self.unfinished:
            self._answers()
            self._deadlines()
            self._admit()
            self.device.flush()
            if self.table.live.any():
                read = self.device.chunk()
            else:
                read = self.device.read() if self.device.flight is not None else None
            if read is not None:
                self._report(*read)
            self._show()
        self.stats.seconds = time.perf_counter() - self.started
        self.stats.shard_tokens = tuple(int(n) for n in self.shard_tokens)
        return [rollout for rollout in self.rollouts if rollout is not None], self.stats

    # Answers of the environment.

    def _answers(self) -> None:
        """Takes what tools have answered; blocks only when no row can decode and no chunk is to be read."""
        table = self.table
        if not table.waiting.any():
            return
        seats = self.seats_left and self.admission.waiting > 0
        idle = not table.live.any() and self.device.flight is None and not seats
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
            # Not even one token could follow; the row ends on its unanswered call, as in the published environment.
            self._give_up(slot, "length")
            return
        table.observe(slot, ids)
        self.stats.observation_tokens += len(ids)
        if len(ids):
            # The pending token comes first; the last of the observation is the next pending one.
            unwritten = table.tokens[slot, length - 1 : length + len(ids) - 1].copy()
            self.device.write(Write(slot, int(table.request[slot]), unwritten, length - 1))
        table.go(slot, self.config.max_turn_tokens)

    # Ends of turns and rows.

    def _turn_end(self, slot: int, found: bool) -> None:
        """Hands a stopped row to the environment."""
        table = self.table
        start, length = int(table.turn_start[slot]), int(table.length[slot])
        reason: TurnReason = "turn_length"
        if length >= table.total[slot]:
            reason = "length"
        elif found or self.is_stop[table.tokens[slot, length - 1]]:
            reason = "stop"
        table.live[slot] = False
        table.turns[slot].append((start, length))
        turn = TurnEnd(
            request=int(table.request[slot]),
            start=start,
            tokens=table.tokens[slot, start:length].copy(),
            logprobs=table.logprobs[slot, start:length].copy(),
            reason=reason,
        )
        before = time.perf_counter()
        answer = self.environment.turn_ended(turn.request, turn)
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
        index = int(table.request[slot])
        rollout = table.rollout(slot, stop, time.perf_counter())
        table.free(slot)
        self.slot_of[index] = FREE
        self.admission.release(index, slot // self.per_shard)
        self.seats_left = True
        self._record(index, rollout)

    def _record(self, index: int, rollout: Rollout) -> None:
        self.rollouts[index] = rollout
        self.unfinished -= 1
        self.stats.stops[rollout.stop] += 1
        if self.surplus is not None:
            for other in self.surplus(index, rollout):
                self._cancel(other)

    def _give_up(self, slot: int, stop: StopReason) -> None:
        """Ends a row for a reason of the engine's own; the environment is told to drop its calls."""
        self.environment.cancelled(int(self.table.request[slot]))
        self._finish(slot, stop)

    def _cancel(self, index: int) -> None:
        if self.rollouts[index] is not None:
            return
        if self.slot_of[index] != FREE:
            self._give_up(int(self.slot_of[index]), "cancelled")
        elif self.admission.withdraw(index):
            self._record(index, self._untouched(index, "cancelled"))

    def _untouched(self, index: int, stop: StopReason) -> Rollout:
        """The rollout of a request that never got a slot."""
        request = self.requests[index]
        if request.resume is not None:
            return replace(request.resume, stop=stop, seconds=0.0)
        n = len(request.prompt)
        return Rollout(
            tokens=np.array(request.prompt, np.int32),
            policy_mask=np.zeros(n, bool),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, -1, np.int32),
            mass=None if self.table.mass is None else np.ones(n, np.float32),
            prompt_length=n,
            turns=(),
            stop=stop,
            seconds=0.0,
        )

    # Deadlines.

    def _deadlines(self) -> None:
        config, table = self.config, self.table
        if not (config.turn_timeout_s or config.trajectory_timeout_s or config.step_timeout_s):
            return
        now = time.perf_counter()
        late = np.zeros(len(table.request), bool)
        if config.turn_timeout_s:
            late |= table.waiting & (now - table.waiting_since_s > config.turn_timeout_s)
        if config.trajectory_timeout_s:
            late |= table.occupied & (now - table.admitted_s > config.trajectory_timeout_s)
        for slot in np.flatnonzero(late):
            if table.request[slot] != FREE:
                self._give_up(int(slot), "deadline")
        if config.step_timeout_s and now - self.started > config.step_timeout_s:
            self._end_step()

    def _end_step(self) -> None:
        """Ends every row: those that wait on a tool by its fault, the others by ours, or all of them resumably."""
        carry = self.config.carry_over
        for slot in np.flatnonzero(self.table.occupied):
            late: StopReason = "deadline" if self.table.waiting[slot] else "infrastructure"
            if self.table.request[slot] != FREE:
                self._give_up(int(slot), "cancelled" if carry else late)
        for index in self.admission.withdraw_all():
            if self.rollouts[index] is None:
                self._record(index, self._untouched(index, "cancelled" if carry else "infrastructure"))

    def _until_deadline(self) -> float:
        """Seconds to the nearest deadline, at least a millisecond."""
        config, table, now = self.config, self.table, time.perf_counter()
        ends = [float("inf")]
        if config.turn_timeout_s:
            ends.append(float(table.waiting_since_s[table.waiting].min()) + config.turn_timeout_s)
        if config.trajectory_timeout_s:
            ends.append(float(table.admitted_s[table.occupied].min()) + config.trajectory_timeout_s)
        if config.step_timeout_s:
            ends.append(self.started + config.step_timeout_s)
        return max(1e-3, min(ends) - now)

    # Admission.

    def _admit(self) -> None:
        """Fills free slots while reservations fit, the shard with least reserved first."""
        if not (self.admission.waiting and self.seats_left):
            return
        self.seats_left = False
        table, now = self.table, time.perf_counter()
        for shard in sorted(range(self.shards), key=lambda shard: self.admission.reserved[shard]):
            first = shard * self.per_shard
            own = np.arange(first, first + self.per_shard)
            free = own[table.request[own] == FREE].tolist()
            while free:
                index = self.admission.take(shard)
                if index is None:
                    break
                slot = self._choose(self.requests[index].group, free)
                free.remove(slot)
                self._seat(index, slot, own, now)
        self.stats.reserved_peak = max(self.stats.reserved_peak, sum(self.admission.reserved))

    def _choose(self, group: int, free: list[int]) -> int:
        """A free slot that still holds the prompt; else one that nobody copies from in this round."""
        holding = self.table.holders(group, free)
        if len(holding):
            return int(holding[0])
        return next((slot for slot in free if not self.device.is_source(slot)), free[0])

    def _seat(self, index: int, slot: int, own: np.ndarray, now: float) -> None:
        """Gives a slot to a request: its prompt from the slot itself, from a sibling's slot, or written."""
        table, request, past = self.table, self.requests[index], self.requests[index].resume
        columns = len(request.prompt) - 1
        if table.held_group[slot] == request.group:
            self.stats.reused += 1
        else:
            self.device.settle(slot)
            holders = table.holders(request.group, own)
            if len(holders):
                self.stats.forks += 1
                if columns:
                    self.device.copy_prompt(int(holders[0]), slot)
            else:
                self.stats.prompts += 1
                if columns:
                    self.device.write_prompt(Write(slot, index, np.asarray(request.prompt[:-1], np.int32), 0))
            table.held_group[slot], table.held_columns[slot] = request.group, columns
        temperature = self.temperature if request.temperature is None else request.temperature
        table.admit(slot, index, request, self.seed, temperature, now)
        self.slot_of[index] = slot
        if past is not None and len(past.tokens) - 1 > columns:
            self.device.write(Write(slot, index, np.asarray(past.tokens[columns:-1], np.int32), columns))
        if past is not None and past.waiting:
            self._turn_end(slot, found=True)
        else:
            table.go(slot, self.config.max_turn_tokens)

    # Reports.

    def _report(self, report: Report, count: np.ndarray) -> None:
        """Takes a chunk's tokens, `count` of each slot, and deals with the rows that stopped in it."""
        table = self.table
        table.extend(report.tokens, report.logprobs, report.mass, count, self.version)
        drew = count > 0
        self.shard_tokens += count.reshape(self.shards, -1).sum(axis=1)
        self.stats.sampled_tokens += int(count.sum())
        found = self._stop_texts(np.flatnonzero(drew), count) if self.find_stop is not None else set()
        last = table.tokens[np.arange(len(count)), np.maximum(table.length - 1, 0)]
        stopped = drew & ((table.length >= table.limit) | self.is_stop[last])
        stopped[list(found)] = True
        for slot in np.flatnonzero(stopped).tolist():
            # A row that stopped can still have been cancelled by the end of one before it.
            if table.live[slot]:
                self._turn_end(slot, found=slot in found)

    def _stop_texts(self, slots: np.ndarray, count: np.ndarray) -> set[int]:
        """Rows whose stop text ended in this chunk; they are rolled back to its end."""
        table, found = self.table, set()
        for slot in slots.tolist():
            n, drawn = int(table.length[slot]), int(count[slot])
            new, before = table.tokens[slot, n - drawn : n], table.tokens[slot, table.turn_start[slot] : n - drawn]
            keep = self.find_stop(int(table.request[slot]), new.copy(), before)
            if keep is None:
                continue
            if not 1 <= keep <= drawn:
                raise ValueError(
                    f"find_stop kept {keep} of {drawn} new tokens; a stop text ends among the new tokens, so 1 to "
                    f"{drawn} are wanted"
                )
            found.add(slot)
            table.roll_back(slot, drawn - keep)
            self.stats.sampled_tokens -= drawn - keep
            self.shard_tokens[slot // self.per_shard] -= drawn - keep
            self.stats.dropped_tokens += drawn - keep
        return found

    def _show(self) -> None:
        if self.progress is not None:
            self.progress.update(
                live=int(self.table.live.sum()),
                waiting=int(self.table.waiting.sum()),
                done=len(self.requests) - self.unfinished,
                total=len(self.requests),
                tokens=self.stats.sampled_tokens,
            )

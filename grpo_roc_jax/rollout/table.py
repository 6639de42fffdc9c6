"""The host's view of the slots: whose row each holds, how long it is, and its tokens; every update is vectorised."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.rollout.decode import PATCH_FIELDS, empty_patch
from grpo_roc_jax.rollout.records import Request, Rollout
from grpo_roc_jax.types import StopReason

FREE = -1


class SlotTable:
    """Mutable arrays indexed by slot. A slot is free, live (decoding), or waiting (for an observation)."""

    def __init__(self, slots: int, width: int, *, keeps_mass: bool):
        """
        Args:
            slots: B.
            width: Longest row of the run, tokens.
            keeps_mass: Whether surviving masses are recorded.
        """
        self.request = np.full(slots, FREE, np.int64)
        self.length = np.zeros(slots, np.int64)
        """Tokens of the row, the pending one included."""
        self.prompt = np.zeros(slots, np.int64)
        self.total = np.zeros(slots, np.int64)
        """Prompt + budget."""
        self.limit = np.zeros(slots, np.int64)
        """Length at which the device stops the row: `total`, or less for a turn."""
        self.turn_start = np.zeros(slots, np.int64)
        self.live = np.zeros(slots, bool)
        self.waiting = np.zeros(slots, bool)
        self.generation = np.zeros(slots, np.int64)
        """Rises when a row is rolled back or given up, so that tokens in flight for it are ignored."""
        self.admitted_s = np.zeros(slots)
        self.waiting_since_s = np.zeros(slots)
        self.held_group = np.full(slots, FREE, np.int64)
        """Group whose prompt is still in the slot's cache."""
        self.held_columns = np.zeros(slots, np.int64)
        self.tokens = np.zeros((slots, width), np.int32)
        self.mask = np.zeros((slots, width), bool)
        self.logprobs = np.zeros((slots, width), np.float32)
        self.versions = np.full((slots, width), -1, np.int32)
        self.mass = np.ones((slots, width), np.float32) if keeps_mass else None
        self.turns: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
        self._patch = empty_patch(slots)
        self._keys = np.zeros((4, slots), np.int32)
        self._temperature = np.zeros(slots, np.float32)

    @property
    def occupied(self) -> np.ndarray:
        """bool[B]."""
        return self.request != FREE

    def admit(self, slot: int, index: int, request: Request, seed: int, temperature: float, now_s: float) -> None:
        """Puts a request into a free slot, with what an earlier step sampled for it; it is not live yet."""
        past = request.resume
        tokens = request.prompt if past is None else past.tokens
        n = len(tokens)
        self.request[slot] = index
        self.length[slot] = n
        self.prompt[slot] = len(request.prompt)
        self.total[slot] = len(request.prompt) + request.budget
        self.admitted_s[slot] = now_s
        self.tokens[slot, :n] = tokens
        self.mask[slot, :n] = False if past is None else past.policy_mask
        self.logprobs[slot, :n] = 0.0 if past is None else past.logprobs
        self.versions[slot, :n] = -1 if past is None else past.versions
        if self.mass is not None:
            self.mass[slot, :n] = 1.0 if past is None or past.mass is None else past.mass
        self.turns[slot] = [] if past is None else list(past.turns)
        self.turn_start[slot] = n
        if past is not None and self.turns[slot] and (past.waiting or self.turns[slot][-1][1] == n):
            # The last turn is open (sampled up to here) or waits for its observation; either way it goes on.
            start, _ = self.turns[slot].pop()
            self.turn_start[slot] = start
        self._keys[:, slot] = np.array([seed, *request.key], np.int64).astype(np.int32)
        self._temperature[slot] = temperature
        # Even a row that is not to decode yet needs its position on the device: idle slots write garbage at theirs.
        self._write(slot, active=0)

    def go(self, slot: int, max_turn_tokens: int) -> None:
        """Makes the row live in the next chunk."""
        limit = self.total[slot]
        if max_turn_tokens:
            limit = min(limit, self.turn_start[slot] + max_turn_tokens)
        self.limit[slot] = limit
        self.live[slot], self.waiting[slot] = True, False
        self._write(slot, active=1)

    def roll_back(self, slot: int, tokens: int) -> None:
        """Drops the last `tokens` of a live row, which the device stops with the next chunk."""
        self.length[slot] -= tokens
        self.generation[slot] += 1
        self._write(slot, active=0)

    def _write(self, slot: int, *, active: int) -> None:
        position = self.length[slot] - 1
        row = (
            1,
            position,
            self.tokens[slot, position],
            active,
            self.limit[slot],
            *self._keys[:, slot],
            self._temperature[slot : slot + 1].view(np.int32)[0],
        )
        self._patch[: len(PATCH_FIELDS), slot] = row

    def take_patch(self) -> np.ndarray | None:
        """The changes since the last call; None when there are none."""
        if not self._patch[0].any():
            return None
        patch, self._patch = self._patch, empty_patch(self._patch.shape[1])
        return patch

    def extend(
        self, tokens: np.ndarray, logprobs: np.ndarray, mass: np.ndarray, count: np.ndarray, version: int
    ) -> None:
        """Appends a report's [K,B] tokens, `count` of each column, to the rows."""
        slots = np.repeat(np.arange(len(count)), count)
        steps = np.arange(len(slots)) - np.repeat(np.cumsum(count) - count, count)
        at = self.length[slots] + steps
        self.tokens[slots, at] = tokens[steps, slots]
        self.logprobs[slots, at] = logprobs[steps, slots]
        self.mask[slots, at] = True
        self.versions[slots, at] = version
        if self.mass is not None:
            self.mass[slots, at] = mass[steps, slots]
        self.length += count

    def observe(self, slot: int, ids: np.ndarray) -> None:
        """Appends an observation: off the mask, version -1."""
        span = slice(self.length[slot], self.length[slot] + len(ids))
        self.tokens[slot, span] = ids
        self.mask[slot, span] = False
        self.logprobs[slot, span] = 0.0
        self.versions[slot, span] = -1
        if self.mass is not None:
            self.mass[slot, span] = 1.0
        self.length[slot] = span.stop
        self.turn_start[slot] = span.stop

    def rollout(self, slot: int, stop: StopReason, now_s: float) -> Rollout:
        """The row as it is, copied out; an unfinished turn is closed where it stands."""
        n = int(self.length[slot])
        turns = list(self.turns[slot])
        if not self.waiting[slot] and self.turn_start[slot] < n and (not turns or turns[-1][1] < n):
            turns.append((int(self.turn_start[slot]), n))
        return Rollout(
            tokens=self.tokens[slot, :n].copy(),
            policy_mask=self.mask[slot, :n].copy(),
            logprobs=self.logprobs[slot, :n].copy(),
            versions=self.versions[slot, :n].copy(),
            mass=None if self.mass is None else self.mass[slot, :n].copy(),
            prompt_length=int(self.prompt[slot]),
            turns=tuple(turns),
            stop=stop,
            seconds=now_s - float(self.admitted_s[slot]),
            waiting=bool(self.waiting[slot]),
        )

    def free(self, slot: int) -> None:
        """Empties the slot; the prompt in its cache may still serve a sibling."""
        if self.live[slot]:
            self._write(slot, active=0)
        self.generation[slot] += 1
        self.live[slot] = False
        self.request[slot] = FREE
        self.length[slot] = 0
        self.waiting[slot] = False

    def holders(self, group: int, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Those of `slots` whose cache still begins with the group's prompt."""
        slots = np.asarray(slots, np.int64)
        return slots[self.held_group[slots] == group]

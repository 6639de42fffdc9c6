"""The host's view of the slots: which row each holds, how long it is, and its tokens; updates are vectorized."""

import numpy as np

from grpo_roc_jax.rollout.decode import PATCH_FIELDS, ChunkReport, empty_patch
from grpo_roc_jax.rollout.resume import awaits_observation, open_turn_start, starting_point
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory, Turn

FREE = -1


class SlotTable:
    """Mutable arrays indexed by slot. A slot is free, live (decoding), waiting (for an observation), or idle: its row
    has no blocks and could go on. A waiting row may have no blocks either (`parked`)."""

    def __init__(self, slots: int, width: int, *, routes: tuple[int, int] | None = None, recurrent: bool = False):
        """For B `slots` and rows of at most `width` tokens, of a model with recurrent layers or without; `routes`:
        layers, and experts of a token, to record."""
        self.recurrent = recurrent
        self.row = np.full(slots, FREE, np.int64)
        """Ticket of the row."""
        self.length = np.zeros(slots, np.int64)
        """Tokens of the row, including the pending one."""
        self.total = np.zeros(slots, np.int64)
        """Prompt + budget."""
        self.limit = np.zeros(slots, np.int64)
        """Length at which the device stops the row: `total`, or less where a turn has its own limit."""
        self.turn_start = np.zeros(slots, np.int64)
        self.live = np.zeros(slots, bool)
        self.waiting = np.zeros(slots, bool)
        self.parked = np.zeros(slots, bool)
        """Whether the row has lost its blocks; its tokens are all here."""
        self.generation = np.zeros(slots, np.int64)
        """Increases when a row is rolled back, parked or ended, so that tokens in flight for it are ignored."""
        self.admitted_s = np.zeros(slots)
        self.waiting_since_s = np.zeros(slots)
        self.overrun = np.zeros(slots, bool)
        """Whether recurrent layers have read tokens that the row no longer has."""
        self.tokens = np.zeros((slots, width), np.int32)
        self.mask = np.zeros((slots, width), bool)
        self.logprobs = np.zeros((slots, width), np.float32)
        self.versions = np.full((slots, width), -1, np.int32)
        self.routes = None if routes is None else np.full((slots, width, *routes), -1, np.int16)
        self.turns: list[list[Turn]] = [[] for _ in range(slots)]
        """Finished turns; their text, calls and results are the environment's."""
        self._patch = empty_patch(slots)
        self._keys = np.zeros((4, slots), np.int32)
        self._temperature = np.zeros(slots, np.float32)

    @property
    def occupied(self) -> np.ndarray:
        """bool[B]."""
        return self.row != FREE

    def admit(self, slot: int, ticket: int, row: RolloutRequest, seed: int, now_s: float) -> None:
        """Puts a row into a free slot, with the tokens that exist already; it is parked at first."""
        start = starting_point(row)
        n = start.length
        self.row[slot], self.parked[slot] = ticket, True
        self.overrun[slot] = False
        self.length[slot] = n
        self.total[slot] = len(row.prompt) + row.budget
        self.admitted_s[slot] = now_s
        self.tokens[slot, :n] = start.tokens
        self.mask[slot, :n] = start.policy_mask
        self.logprobs[slot, :n] = start.logprobs
        self.versions[slot, :n] = start.versions
        self._forget_routes(slot, 0)
        if self.routes is not None and start.routes is not None:
            self.routes[slot, :n] = start.routes
        self.turns[slot] = list(start.turns)
        # A turn that has no observation yet ends once more: the environment is asked again.
        resumed = self.turns[slot].pop().start if awaits_observation(start) else open_turn_start(start)
        self.turn_start[slot] = resumed
        key = (seed, row.step, row.place, row.first_sample)
        self._keys[:, slot] = np.array(key, np.int64).astype(np.int32)
        self._temperature[slot] = row.temperature

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
        self._forget_routes(slot, int(self.length[slot]) - 1)
        self.generation[slot] += 1
        self.overrun[slot] = self.recurrent
        self._write(slot, active=0)

    def _forget_routes(self, slot: int, start: int) -> None:
        """Tokens from `start` on have no recorded experts."""
        if self.routes is not None:
            self.routes[slot, start:] = -1

    def rewritten_from(self, slot: int, column: int) -> int:
        """Where to begin when tokens are appended at `column`: there, or at 0 after a roll-back that the memory of
        recurrent layers could not follow. The caller writes the row from there on."""
        begin = 0 if self.overrun[slot] else column
        self.overrun[slot] = False
        return begin

    def park(self, slot: int) -> None:
        """The row loses its blocks: what is in flight for it is dropped."""
        if self.live[slot]:
            self._write(slot, active=0)
        self.generation[slot] += 1
        self.live[slot], self.parked[slot], self.overrun[slot] = False, True, False

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

    def extend(self, report: ChunkReport, count: np.ndarray, version: int) -> None:
        """Appends a report's tokens, `count` of each column, to the rows."""
        slots = np.repeat(np.arange(len(count)), count)
        steps = np.arange(len(slots)) - np.repeat(np.cumsum(count) - count, count)
        at = self.length[slots] + steps
        self.tokens[slots, at] = report.tokens[steps, slots]
        self.logprobs[slots, at] = report.logprobs[steps, slots]
        self.mask[slots, at] = True
        self.versions[slots, at] = version
        if self.routes is not None:  # of the token that a step read
            self.routes[slots, at - 1] = report.routes[steps, :, :, slots]
        self.length += count

    def observe(self, slot: int, ids: np.ndarray) -> None:
        """Appends an observation: off the mask, version -1."""
        span = slice(self.length[slot], self.length[slot] + len(ids))
        self.tokens[slot, span] = ids
        self.mask[slot, span] = False
        self.logprobs[slot, span] = 0.0
        self.versions[slot, span] = -1
        self.length[slot] = span.stop
        self.turn_start[slot] = span.stop

    def end_turn(self, slot: int) -> Turn:
        """Closes the turn of a row, which is no longer live; returns its span."""
        turn = Turn(int(self.turn_start[slot]), int(self.length[slot]), "")
        self.live[slot] = False
        self.turns[slot].append(turn)
        return turn

    def trajectory(self, slot: int, row: RolloutRequest, stop: StopReason, now_s: float) -> Trajectory:
        """A copy of the row as a trajectory."""
        n = int(self.length[slot])
        earlier_s = 0.0 if row.resume is None else row.resume.seconds
        return Trajectory(
            tokens=self.tokens[slot, :n].copy(),
            policy_mask=self.mask[slot, :n].copy(),
            logprobs=self.logprobs[slot, :n].copy(),
            versions=self.versions[slot, :n].copy(),
            prompt_length=len(row.prompt),
            turns=tuple(self.turns[slot]),
            stop=stop,
            sample=row.first_sample,
            seconds=now_s - float(self.admitted_s[slot]) + earlier_s,
            condition=row.condition,
            temperature=row.temperature,
            routes=None if self.routes is None else self.routes[slot, :n].copy(),
        )

    def free(self, slot: int) -> None:
        """Empties the slot."""
        if self.live[slot]:
            self._write(slot, active=0)
        self.generation[slot] += 1
        self.live[slot] = False
        self.row[slot] = FREE
        self.length[slot] = 0
        self.waiting[slot] = self.parked[slot] = False

"""A scripted environment: calls end a turn, observations come after a fixed number of polls, no clock is read."""

import numpy as np

from grpo_roc_jax.rollout.engine import Finish, Observe, TurnEnd, Wait

EOS = 3
CALLS = (4, 5, 6, 7)
STOPS = (EOS, *CALLS)


class FakeTools:
    """A turn that ends with one of CALLS, or at the turn limit, waits for an observation; EOS ends the row."""

    find_stop = None

    def __init__(self, requests, *, vocab=97, max_turns=5, latency_polls=2, observation=(1, 20)):
        self.requests = requests
        self.vocab, self.max_turns = vocab, max_turns
        self.latency_polls, self.observation = latency_polls, observation
        self.turns: dict[int, int] = {}
        self.pending: list[tuple[int, int, np.ndarray]] = []
        self.ended: list[TurnEnd] = []
        self.cancels: list[int] = []
        self.now = 0

    def observation_ids(self, index: int, turn: int) -> np.ndarray:
        """A function of the request's key and the turn alone, as real tool output would be."""
        rng = np.random.default_rng((*self.requests[index].key, turn))
        return rng.integers(8, self.vocab, size=rng.integers(*self.observation)).astype(np.int32)

    def turn_ended(self, index, turn):
        self.ended.append(turn)
        self.turns[index] = self.turns.get(index, 0) + 1
        if turn.reason == "length":
            return Finish("length")
        if turn.reason == "stop" and turn.tokens[-1] == EOS:
            return Finish("eos")
        if self.turns[index] >= self.max_turns:
            return Finish("turns")
        self.pending.append((self.now + self.latency_polls, index, self.observation_ids(index, self.turns[index])))
        return Wait()

    def poll(self, timeout_s):
        self.now += 1
        due = [item for item in self.pending if item[0] <= self.now]
        self.pending = [item for item in self.pending if item[0] > self.now]
        return [(index, Observe(ids)) for _, index, ids in due]

    def cancelled(self, index):
        self.cancels.append(index)
        self.pending = [item for item in self.pending if item[1] != index]

"""A small model, requests for it, and a scripted environment that reads no clock: observations take polls."""

import copy
from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np

from grpo_roc_jax import ModelConfig, Problem, RolloutConfig, RolloutRequest, SamplingConfig, init_params, make_engine
from grpo_roc_jax.engine.protocol import Finish, Observe, Wait

STOPS = (3, 4, 5, 6, 7)
PROBLEM = Problem("p", "?", "1", "test")


def one_rollout(index, prompt, budget, sample=0, **fields):
    """A rendered request for one rollout."""
    return RolloutRequest(PROBLEM, index, first_sample=sample, prompt=prompt, budget=budget, **fields)


class FakeTools:
    """Token 3 ends the row. Turns that end with another stop, or at the limit, wait for an observation."""

    find_stop = proven = None

    def __init__(self, requests, *, vocab=97, max_turns=5, latency_polls=2, observation=(1, 20)):
        self.requests, self.vocab, self.max_turns = requests, vocab, max_turns
        self.latency_polls, self.observation = latency_polls, observation
        self.turns, self.pending, self.ended, self.cancels, self.now = {}, [], [], [], 0

    def observation_ids(self, index: int, turn: int) -> np.ndarray:
        """A function of the request's key and the turn alone, as real tool output would be."""
        request = self.requests[index]
        rng = np.random.default_rng((request.step, request.place, request.first_sample, turn))
        return rng.integers(8, self.vocab, size=rng.integers(*self.observation)).astype(np.int32)

    def turn_ended(self, index, turn):
        self.ended.append(turn)
        self.turns[index] = self.turns.get(index, 0) + 1
        if turn.reason == "length":
            return Finish("length")
        if turn.reason == "stop" and turn.tokens[-1] == STOPS[0]:
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
        return self.proven


class StopPairs(FakeTools):
    """Turns also end after every pair of tokens whose sum is divisible by 5, wherever it lies in a chunk."""

    cut = 0  # tokens that were drawn after such a pair

    def __init__(self, requests):
        super().__init__(requests, max_turns=9)

    def find_stop(self, index, new_tokens, before):
        joined = np.concatenate([before[-1:], new_tokens])
        hits = np.flatnonzero((joined[1:] + joined[:-1]) % 5 == 0) + (2 if len(before) == 0 else 1)
        if not len(hits):
            return None
        self.cut += len(new_tokens) - int(hits[0])
        return int(hits[0])


MODEL = ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab_size=97)
LENGTHS = {"max_prompt_tokens": 40, "max_response_tokens": 80, "max_turn_tokens": 15, "append_lengths": (16,)}
ROLLOUT = RolloutConfig(slots=6, chunk=4, **LENGTHS)


def sharp_params():
    """Weights sharp enough that greedy choices differ from position to position."""
    drawn = jax.jit(init_params, static_argnames="config")(jax.random.key(1), MODEL)
    return jax.tree.map(lambda leaf: leaf * 6.0 if leaf.ndim > 1 and leaf.shape[0] != MODEL.layers else leaf, drawn)


def make_requests(groups=4, siblings=5, budget=80, seed=0, **fields):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(8, 97, size=n).astype(np.int32) for n in rng.integers(1, 41, size=groups)]
    fields = {"step": 2} | fields
    return [one_rollout(g, prompts[g], budget, s, **fields) for g in range(groups) for s in range(siblings)]


@lru_cache
def engine_for(rollout, sampling, mesh):
    """One engine per shape for all tests: compiling is what they cost."""
    return make_engine(MODEL, rollout, sampling, STOPS, mesh, seed=11)


def changed(engine, clock=None, **settings):
    """The engine with another clock and other settings of `rollout`, all programs shared."""
    other = engine.sibling()
    other.clock = clock or other.clock
    other.programs = copy.copy(engine.programs)
    other.programs.rollout = replace(other.programs.rollout, **settings)
    return other


def variant(rollout=ROLLOUT, clock=None, **settings):
    """The shared engine of that shape with another clock and other settings."""
    return changed(engine_for(rollout, SamplingConfig(), None), clock, **settings)


def run(params, requests, *, rollout=ROLLOUT, sampling=None, mesh=None, tools=None, environment=None, options=None):
    engine = engine_for(rollout, sampling or SamplingConfig(), mesh)
    sampler = engine.publish(params, 5)
    environment = environment or FakeTools(requests, **(tools or {}))
    rollouts, stats = engine.run(sampler, requests, environment, options)
    return rollouts, stats, environment

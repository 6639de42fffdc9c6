"""GiGPO: turns compared with the turns of the same problem that were taken in the same state.

Source: arXiv:2505.10978, which groups by the observation before an action. The output of a Python tool does not show
the variables of the interpreter, so here the state before a turn is all calls and observations so far. Interpreters in
the same state agree in everything but values that no call has printed, such as random numbers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, flat, z_score
from grpo_roc_jax.method.family.kl_reward import later_sums
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import NotNegative, Share, kind
from grpo_roc_jax.types import Group, Trajectory, Turn, Verdict

State = Literal["calls", "observations", "turn"]


@kind("turns")
class TurnCredit(Adjustment):
    """A_t + omega F(G_k) for the tokens of turn k, G_k = r_k + gamma G_(k+1), F relative to the turns of the problem in
    the same state (GiGPO, arXiv:2505.10978). A turn that is alone in its state gets nothing."""

    omega: NotNegative = 1.0
    """Weight of the advantage within a state."""
    gamma: Share = 0.95
    """Discount of the rewards of later turns."""
    state: State = "calls"
    """What makes two states equal: calls and observations so far, observations alone, or the number of the turn."""
    standardize: bool = False
    """Whether F also divides by the standard deviation."""

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        rest, out = iter(advantages), []
        for group, rewards in zip(batch.groups, batch.rewards, strict=True):
            pairs = zip(group.pairs, rewards, strict=True)
            returns = [later_sums(turn_pay(t, v, reward), self.gamma) for (t, v), reward in pairs]
            for trajectory, credit in zip(group.trajectories, self.credits(group, returns), strict=True):
                values = next(rest).copy()
                for turn, own in zip(trajectory.turns, credit, strict=True):
                    values[turn.start : turn.end] += np.float32(self.omega * own)
                out.append(values)
        return out

    def credits(self, group: Group, returns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float64[turns] of each trajectory: F of its returns."""
        out = [np.zeros(len(row)) for row in returns]
        for places in same_state(group, self.state).values():
            values = np.array([returns[i][k] for i, k in places])
            if flat(values):
                continue
            found = z_score(values) if self.standardize else values - values.mean()
            for (i, k), value in zip(places, found, strict=True):
                out[i][k] = value
        return out

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        """Turns per state; with 1 there is no signal within states."""
        sizes = [len(places) for group in batch.groups for places in same_state(group, self.state).values()]
        return {"method/turns_per_state": float(np.mean(sizes)) if sizes else 0.0}


def turn_pay(trajectory: Trajectory, verdict: Verdict, reward: float) -> np.ndarray:
    """float64[turns]: what each turn was paid; the rest of the trajectory's reward belongs to the last turn."""
    pay = np.zeros(len(trajectory.turns))
    if len(pay):
        pay += verdict.turn_rewards or 0.0
        pay[-1] += reward - pay.sum()
    return pay


def same_state(group: Group, state: State) -> dict[bytes, list[tuple[int, int]]]:
    """The turns of a problem by the state before them: (trajectory, turn)."""
    found: dict[bytes, list[tuple[int, int]]] = {}
    for i, trajectory in enumerate(group.trajectories):
        seen = hashlib.blake2b(str(trajectory.condition).encode(), digest_size=16)
        for k, turn in enumerate(trajectory.turns):
            found.setdefault(seen.digest(), []).append((i, k))
            seen.update(json.dumps(_said(turn, state), sort_keys=True, default=repr).encode())
    return found


def _said(turn: Turn, state: State) -> list:
    """What a turn adds to the state."""
    if state == "turn":
        return []
    calls = [[call.name, call.raw if call.fault else dict(call.arguments)] for call in turn.calls]
    return [calls if state == "calls" else [], [*(result.observation for result in turn.results), turn.reply]]

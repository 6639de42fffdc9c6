"""S-GRPO: one thought, cut at several places, each cut answered. Source: arXiv:2505.07686."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.method.edit import joined
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import SecondWave, Wave
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest, condition_kind

CUT = condition_kind("cut")
"""Condition of rollouts from a thought that was cut."""


@kind("serial")
class Serial(SecondWave):
    """Rollouts from cuts of the problem's one first rollout (S-GRPO, arXiv:2505.07686; with `shaping: [serial]`)."""

    cuts: AtLeast1 = 8
    """Cuts of a thought."""
    cut: Literal["thought", "turn"] = "thought"
    """What is cut: the first turn's thought, or the whole first turn, for policies whose thoughts are short."""
    stop: str = "\nTime is up; the answer follows.</reason><answer>"
    """Text that ends a cut thought; the rollout continues after it."""

    def check(self, config: Any) -> None:
        sampled, budget = config.resample.sampled(config.group.size), config.plan.budget
        if budget.kind != "uniform":
            raise ValueError(
                f"plan.budget {budget.kind} with plan.second serial, whose rollouts are cuts of one; set plan.budget "
                "uniform"
            )
        if sampled != self.cuts + 1:
            raise ValueError(
                f"plan.second serial gives cuts + 1 = {self.cuts + 1} trajectories per problem but {sampled} are "
                f"sampled; set group.size {self.cuts + 1} with resample none"
            )

    def first_count(self, count: int) -> int:
        return 1

    def next(self, wave: Wave) -> list[RolloutRequest]:
        """The first trajectory's first thought, stopped at random places; each is continued once."""
        requests = []
        for index, group in enumerate(wave.groups if wave.number == 1 else ()):
            if not group.size:
                continue
            full = group.trajectories[0]
            ids = full.tokens[full.turns[0].start : full.turns[0].end] if full.turns else full.tokens[:0]
            length = len(ids) if self.cut == "turn" or wave.thought is None else wave.thought(full)
            plain = RolloutRequest(wave.problems[index], index, 1, condition=Condition(CUT), prefix_text=self.stop)
            points = cut_points(length, self.cuts, wave.rng)
            requests += [replace(plain, prefix=tuple(ids[:point].tolist())) for point in points]
        return requests

    def merge(
        self, groups: Sequence[Group], requests: Sequence[RolloutRequest], results: Sequence[Group]
    ) -> list[Group]:
        """Cuts come before the full thought, in order."""
        parts: list[list[Group]] = [[] for _ in groups]
        for request, result in zip(requests, results, strict=True):
            parts[request.place].append(result)
        return [joined(*some, group) if some else group for some, group in zip(parts, groups, strict=True)]


@kind("serial")
class SerialExits(Shaping):
    """2^-(c - 1) for the c-th correct exit in order, 0 for wrong ones (S-GRPO, arXiv:2505.07686)."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        return np.where(features.correct, 2.0 ** (1.0 - np.cumsum(features.correct)), 0.0)


def cut_points(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Ascending positions in 1..length-1 at which a thought is stopped (S-GRPO, arXiv:2505.07686)."""
    places = np.arange(1, max(length, 1))
    return np.sort(rng.choice(places, size=min(count, len(places)), replace=False)) if len(places) else places

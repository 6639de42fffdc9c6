"""What every exchangeable part of a method shares, and the batch that the parts read.

A method is a choice on each axis: which trajectories train (`roc`), rewards (`shaping`), advantages (`advantage`),
token weights (`weights`), the loss of a token (`surrogate`), and which rollouts are requested (`plan`). Each choice is
a frozen dataclass with its own settings; `contrib/methods/` holds one file for each further method.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import Axis, Count, PositiveShare, settings
from grpo_roc_jax.types import Group, Trajectory


@dataclass(frozen=True, eq=False)
class MethodBatch:
    """The groups of an optimizer step as the parts of a method see them; one entry per group or per trajectory."""

    groups: Sequence[Group]
    """The groups after selection."""
    features: Sequence[Features]
    """Features of the same groups."""
    rewards: Sequence[np.ndarray]
    """float64[G] of each group, after shaping."""
    masks: Sequence[np.ndarray]
    """bool[T] of each trajectory: the tokens that train."""
    state: AlgoState
    rng: np.random.Generator | None = None
    scores: Sequence[np.ndarray] | None = None
    """float32[T] of each trajectory: log-probabilities under the parameters about to be updated, in nats."""
    entropies: Sequence[np.ndarray] | None = None
    """float32[T] of each trajectory: entropies of the same policy, in nats."""
    first_scores: Sequence[np.ndarray] | None = None
    """Like `scores`, but from before the first update of the rollout batch; the sampler is compared with these."""
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Factor of each reward function in the reward, by the name of its channel."""

    def only(self, rows: Sequence[np.ndarray]) -> "MethodBatch":
        """The batch with features and rewards of only these trajectories of each group; `groups` and `masks` stay
        complete."""
        selected = [f.take(index) for f, index in zip(self.features, rows, strict=True)]
        rewards = [r[index] for r, index in zip(self.rewards, rows, strict=True)]
        return dataclasses.replace(self, features=selected, rewards=rewards)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, groups in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class Part(Axis):
    """A part of a method, chosen by kind."""

    needs_scores: ClassVar[bool] = False
    """Whether a scoring pass under the current parameters must come before the update."""
    needs_reference: ClassVar[bool] = False
    """Whether a scoring pass under the reference policy must come before the update."""
    needs_teacher: ClassVar[bool] = False
    """Whether a scoring pass under a teacher must come before the update."""
    other_prompts: ClassVar[bool] = False
    """Whether it scores or trains responses under a prompt that the learner makes from the problem. The prompts of an
    agent are its own, so that it cannot be used with one."""
    follows_policy: ClassVar[bool] = False
    """Whether its scores must be computed right before each optimizer step, also the later ones of a batch."""
    common_metrics: ClassVar[Callable[[MethodBatch], Mapping[str, float]] | None] = None
    """Metrics that do not depend on settings; computed once a step, however many parts name the same function."""

    @property
    def prefix(self) -> str:
        """`axis kind`, for messages."""
        return f"{self.axis} {self.kind}"

    def check(self, config: Any) -> None:
        """Refuses settings of other sections that the part cannot be used with. Called when a configuration is made.

        Args:
            config: The whole configuration of the run.

        Raises:
            ValueError: The message names the two settings and what to change.
        """

    def initial_memory(self) -> Mapping[str, np.ndarray]:
        """What the part remembers between steps, at step 0; saved in checkpoints by name."""
        return {}

    def earlier(self, groups: Sequence[Group], state: AlgoState) -> list[Group] | None:
        """Remembered samples of the problems of these groups, one group for each, to be scored before the update. The
        mean change of their log-probabilities is passed to `forgetting` as `drift`. None for a part that remembers
        none."""
        return None

    def forgetting(self, decay: float | np.ndarray, uids: Sequence[str], drift: Mapping[str, float]) -> Any:
        """The factor on the tracker's counts of each of these problems; `decay` is the factor from the parts before."""
        return decay

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        """The entries of the memory that change after a step.

        Args:
            sampled: All scored groups of the step, before selection.
            trained: The groups that were trained on.
            method: The configuration of the whole method.
            state: State before the step.
        """
        return {}

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        """Metrics of the part from the trajectories of a step; `features` and `rewards` of the batch are empty."""
        return {}


@settings
class WithReference:
    """Settings of parts that compare the policy with a reference; at first the reference is the policy at step 0."""

    sync_every: Count = 0
    """Every so many training steps the reference moves to the policy; with 0 it never moves."""
    sync_mix: PositiveShare = 1.0
    """alpha in reference := alpha policy + (1 - alpha) reference at such a step (TR-DPO, arXiv:2404.09656; TRL takes
    0.6)."""


def reward_weights(method: Any) -> Mapping[str, float]:
    """Factor of each reward function in the reward, by name; empty for a method without reward settings."""
    return method.reward.weights if hasattr(method, "reward") else {}


def parts_of(value: Any) -> Iterator[Part]:
    """Every part in a configuration or section, including parts inside other parts."""
    if isinstance(value, Part):
        yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts_of(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)

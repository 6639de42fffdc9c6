"""The state of a run between two steps, and the checkpoint that holds all of it."""

from dataclasses import dataclass, field
from typing import Any

from grpo_roc_jax.data.pipeline import Stream
from grpo_roc_jax.learner.update import TrainState
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.switching import StageProgress
from grpo_roc_jax.record.checkpoint import Bundle
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.run.buffer import RolloutBuffer
from grpo_roc_jax.run.sample import PartialGroup
from grpo_roc_jax.types import Group, Verdict


@dataclass
class RunState:
    """The state of a run. Between two steps all of it is in the checkpoint."""

    train: TrainState
    reference: Any
    """Parameters of the reference policy if a KL term needs them, otherwise an empty tuple."""
    stream: Stream
    method: AlgoState
    buffer: RolloutBuffer = field(default_factory=RolloutBuffer)
    step: int = 0
    """Number of completed training steps."""
    sampled: int = 0
    """Number of trajectories sampled so far."""
    accuracy_before: float | None = None
    setup_before: float | None = None
    """`eval/setup` of the evaluation that measured `accuracy_before`."""
    partial: tuple[PartialGroup, ...] = ()
    """Groups with rows that a deadline cut or that are still running, to be continued in the next step."""
    progress: StageProgress = field(default_factory=StageProgress)
    """Position among the stages of a run with stages."""

    def bundle(self) -> Bundle:
        """A snapshot of the state. Its host part does not change when the run continues."""
        host = {
            "data": self.stream.get_state(),
            "sampled": self.sampled,
            "accuracy_before": self.accuracy_before,
            "setup_before": self.setup_before,
            "buffer": {"added": self.buffer.added, "taken": self.buffer.removed},
            "carried": [[group.step, group.place, group.temperature, group.born] for group in self.partial],
        }
        if self.progress.index >= 0:
            host["stage"] = self.progress.to_json()
        arrays = {"method": self.method.to_tree(), "buffer": groups_to_tree(self.buffer.state()["groups"])}
        arrays["carried"] = groups_to_tree([_unscored(group) for group in self.partial])
        return Bundle({"state": self.train, "reference": self.reference}, host, arrays, self.step)

    def load(self, bundle: Bundle, *, position: bool = True) -> None:
        """Returns to the state that `bundle` was taken of. With `position=False` the position in the data is left
        alone."""
        self.train, self.reference = bundle.train["state"], bundle.train["reference"]
        if position:
            self.stream.set_state(bundle.host["data"])
        self.progress = StageProgress.from_json(bundle.host.get("stage"))
        self.method = AlgoState.from_tree(bundle.arrays["method"])
        self.buffer.load({"groups": groups_from_tree(bundle.arrays["buffer"]), **bundle.host["buffer"]})
        groups = groups_from_tree(bundle.arrays["carried"])
        pairs = zip(groups, bundle.host["carried"], strict=True)
        self.partial = tuple(PartialGroup(group.problem, group.trajectories, *words) for group, words in pairs)
        self.step, self.sampled = bundle.step, bundle.host["sampled"]
        self.accuracy_before, self.setup_before = bundle.host["accuracy_before"], bundle.host.get("setup_before")


def _unscored(partial: PartialGroup) -> Group:
    """The rollouts as a group, for the checkpoint. Its verdicts are placeholders."""
    verdict = Verdict(0.0, "infrastructure", None, 0, 0, 0, False, 0)
    return Group(partial.problem, partial.trajectories, (verdict,) * len(partial.trajectories))

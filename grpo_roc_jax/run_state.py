"""What a run is between two steps, and the checkpoint that holds all of it."""

from dataclasses import dataclass, field
from typing import Any

from grpo_roc_jax.buffer import RolloutBuffer
from grpo_roc_jax.checkpoint import Bundle
from grpo_roc_jax.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.data.pipeline import Stream
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.sample import Carried
from grpo_roc_jax.types import Group, Verdict
from grpo_roc_jax.update import TrainState


@dataclass
class Run:
    """The state of a run; everything in it between two steps is in the checkpoint."""

    train: TrainState
    reference: Any
    """Parameters of the reference policy where a KL term wants them, else an empty tuple."""
    stream: Stream
    method: AlgoState
    buffer: RolloutBuffer = field(default_factory=RolloutBuffer)
    step: int = 0
    """Training steps done."""
    sampled: int = 0
    """Trajectories sampled so far."""
    accuracy_before: float | None = None
    explanations: list[Group] = field(default_factory=list)
    """Supervised rows to come of the step under way (ExPO); empty between two steps."""
    carried: list[Carried] = field(default_factory=list)
    """Groups with rows that a deadline cut, to go on with in the next step."""

    def bundle(self) -> Bundle:
        """A snapshot; its host part does not change when the run goes on."""
        host = {
            "data": self.stream.get_state(),
            "sampled": self.sampled,
            "accuracy_before": self.accuracy_before,
            "buffer": {"added": self.buffer.added, "taken": self.buffer.taken},
            "carried": [[group.step, group.index, group.temperature] for group in self.carried],
        }
        arrays = {"method": self.method.to_tree(), "buffer": groups_to_tree(self.buffer.state()["groups"])}
        arrays["carried"] = groups_to_tree([_unjudged(group) for group in self.carried])
        return Bundle({"state": self.train, "reference": self.reference}, host, arrays, self.step)

    def load(self, bundle: Bundle) -> None:
        """Goes to where `bundle` was taken."""
        self.train, self.reference = bundle.train["state"], bundle.train["reference"]
        self.stream.set_state(bundle.host["data"])
        self.method = AlgoState.from_tree(bundle.arrays["method"])
        self.buffer.load({"groups": groups_from_tree(bundle.arrays["buffer"]), **bundle.host["buffer"]})
        groups = groups_from_tree(bundle.arrays["carried"])
        carried = zip(groups, bundle.host["carried"], strict=True)
        self.carried = [Carried(group.problem, group.trajectories, *words) for group, words in carried]
        self.step, self.sampled = bundle.step, bundle.host["sampled"]
        self.accuracy_before = bundle.host["accuracy_before"]


def _unjudged(carried: Carried) -> Group:
    """The rollouts as a group, for the checkpoint; its verdicts say nothing."""
    verdict = Verdict(0.0, "infrastructure", None, 0, 0, 0, False, 0)
    return Group(carried.problem, carried.trajectories, (verdict,) * len(carried.trajectories))

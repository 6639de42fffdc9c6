"""ThinkTuning: a teacher's feedback in the middle of a failed attempt, which the student continues.

Source: arXiv:2508.07616. The feedback is spliced in after the first thought. It trains with a weight of its own; the
paper's advantage-aware shaping of that weight was not available. `teacher` names a function, such as a call of a model;
the first hint of the data stands in for it.
"""

from dataclasses import replace

import numpy as np

from grpo_roc_jax.method.edit import joined, take_trajectories
from grpo_roc_jax.method.planning import SecondWave, Wave, own_text
from grpo_roc_jax.method.weights import Factor
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import NotNegative, Share, kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest, Trajectory, condition_kind

FEEDBACK = condition_kind("feedback", helped=True)
"""Condition of rollouts that continue after feedback on an attempt."""


@kind("feedback")
class Feedback(SecondWave):
    """Feedback after the first thought of a share of the failures; the continued attempts take their places
    (ThinkTuning, arXiv:2508.07616). Ratios need `surrogate.old_logprobs scored`."""

    teacher: str = ""
    """Function of (problem, attempt) -> feedback. Empty: the first hint of the data, a stand-in that has not read the
    attempt."""
    column: str = "hints"
    """Column of the data with a problem's hints."""
    share: Share = 0.25
    """Share of a group's rollouts that get feedback, if they failed."""
    intro: str = "\nWait: "
    """Text before the feedback."""

    unsampled = True

    def next(self, wave: Wave) -> list[RolloutRequest]:
        requests = []
        for problem_index, group in enumerate(wave.groups if wave.number == 1 else ()):
            failures = np.flatnonzero(~group.correct)[: round(self.share * group.size)]
            requests += [request for i in failures if (request := self.continued(wave, problem_index, int(i)))]
        return requests

    def continued(self, wave: Wave, problem_index: int, index: int) -> RolloutRequest | None:
        """The request that continues one attempt; None without feedback or without a thought."""
        problem, group = wave.problems[problem_index], wave.groups[problem_index]
        attempt, teacher = group.trajectories[index], resolve("plan.second.teacher", self.teacher)
        hints = problem.listed(self.column)
        feedback = teacher(problem, own_text(group, index)) if teacher else next(iter(hints), "")
        ids = attempt.tokens[attempt.turns[0].start : attempt.turns[0].end] if attempt.turns else attempt.tokens[:0]
        thought = tuple(ids[: wave.thought(attempt) if wave.thought else len(ids)].tolist())
        if not feedback or not thought:
            return None
        text = f"{self.intro}{feedback}\n"
        return RolloutRequest(problem, problem_index, 1, 0, Condition(FEEDBACK), prefix=thought, prefix_text=text)

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        plain = [i for i, t in enumerate(group.trajectories) if t.condition.kind != FEEDBACK and not group.correct[i]]
        if not result.size or not plain:
            return group
        spliced = tuple(with_feedback(t, len(request.prefix)) for t in result.trajectories)
        others = take_trajectories(group, [i for i in range(group.size) if i != plain[0]])
        return joined(others, replace(result, trajectories=spliced))


@kind("feedback")
class FeedbackWeight(Factor):
    """The weight of a teacher's tokens among those of the policy (ThinkTuning, arXiv:2508.07616)."""

    weight: NotNegative = 0.1
    """Weight of a token of the feedback; 0 leaves the feedback out."""

    def tokens(self, trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        if trajectory.condition.kind != FEEDBACK:
            return None
        return np.where(trajectory.versions < 0, self.weight, 1.0)


def with_feedback(trajectory: Trajectory, prefix: int) -> Trajectory:
    """The trajectory with its feedback, the unsampled tokens after `prefix` of the response, on the policy mask."""
    mask = trajectory.policy_mask.copy()
    sampled = np.flatnonzero(mask)
    mask[trajectory.prompt_length + prefix : sampled[0] if len(sampled) else None] = True
    return replace(trajectory, policy_mask=mask) if len(sampled) else trajectory

"""Success is what the verdict says: every kind of a method gets wrong rollouts that were paid and right ones that were
not, and must treat them by their verdicts.

What a method makes is observed over two steps on fixed groups, as in `test_kind_settings`, but for the table of success
rates, which every method keeps.
"""

import dataclasses

from grpo_roc_jax.contrib.methods.xrpo import solutions
from grpo_roc_jax.method.planning import best_text
from grpo_roc_jax.types import Turn
from tests.method.test_verdicts import wrongly_paid


def test_what_is_shown_as_a_solution_is_right():
    """A wrong rollout that earned more than the right one is no example, and no draft."""
    group = wrongly_paid()
    verdicts = tuple(dataclasses.replace(v, reward=r) for v, r in zip(group.verdicts, (0, 0.5, 0.25, 0), strict=True))
    texts = [dataclasses.replace(t, turns=(Turn(2, 5, f"text {t.sample}"),)) for t in group.trajectories]
    group = dataclasses.replace(group, verdicts=verdicts, trajectories=tuple(texts))
    assert best_text(group) == "text 2"
    assert solutions([group]) == {group.problem.prompt: "text 2"}

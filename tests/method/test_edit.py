"""Groups with trajectories exchanged, or under another prompt."""

from dataclasses import replace

import numpy as np

from grpo_roc_jax.method import edit
from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.types import condition_kind
from tests.helpers.method_groups import make_group, make_trajectory, method

condition_kind("helped", helped=True, moves=True, optional=True)  # of this file, so that no method has to be there


def test_replace_failures():
    group, hinted = make_group([0, 1, 0, 0]), make_group([0, 1, 1, 1], condition=["helped:1"] * 4)
    merged = edit.replace_failures(group, hinted, 2)
    assert merged.rewards.tolist() == [1, 1, 1, 0]
    assert merged.size == 4
    assert edit.replace_failures(make_group([1, 1]), hinted, 1).rewards.tolist() == [1, 1]
    assert edit.replace_failures(group, make_group([0, 0]), 1).rewards.tolist() == group.rewards.tolist()


def test_with_prompt():
    trajectory = make_trajectory(3, prompt=4, observation=2, condition="helped:1")
    moved = edit.with_prompt(trajectory, np.array([7, 8], np.int32))
    assert moved.tokens.tolist() == [7, 8, 4, 5, 6, 7, 8]
    assert moved.policy_mask.tolist() == [False, False, True, True, True, False, False]
    assert moved.logprobs[moved.policy_mask].tolist() == trajectory.logprobs[trajectory.policy_mask].tolist()
    assert (moved.prompt_length, moved.turns[0].start, moved.turns[0].end) == (2, 2, 5)
    assert moved.tokens.dtype == np.int32
    assert edit.with_prompt(moved, np.arange(4, dtype=np.int32)).length == trajectory.length
    several = edit.with_prompt(replace(trajectory, parts=(5, 4)), np.array([7, 8], np.int32))
    assert (several.parts, several.length) == ((3, 4), 7)


def test_with_plain_prompts():
    """The record stays that of the hinted prompt: the ratio is between contexts (Guide-GRPO)."""
    group = make_group([1, 0], uid="a", lengths=[2, 2], logprobs=[[-1.0, -0.9]] * 2, condition=["helped:1", ""])
    (moved,) = edit.with_plain_prompts([group], lambda problem: [9])
    assert moved.trajectories[1] is group.trajectories[1]
    row, _ = train_rows([moved], method(), AlgoState())
    assert row.tokens[0] == 9 and row.policy_mask.tolist() == [False, True, True]
    np.testing.assert_allclose(row.logprobs_old[row.policy_mask], [-1.0, -0.9])


def test_a_plain_prompt_has_what_the_environment_of_its_row_appended():
    group = make_group([1, 1, 0], condition=["helped:1", "helped:1", ""])
    openings = [" It rains.", " It snows.", " It hails."]
    rows = tuple(replace(t, opening=text) for t, text in zip(group.trajectories, openings, strict=True))
    (moved,) = edit.with_plain_prompts([replace(group, trajectories=rows)], lambda problem: [*map(ord, problem.prompt)])
    prompts = ["".join(map(chr, t.tokens[: t.prompt_length])) for t in moved.trajectories[:2]]
    assert prompts == ["? It rains.", "? It snows."] and moved.trajectories[2] is rows[2]

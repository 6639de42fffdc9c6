"""The example plug-ins: vectors of the family's specification, and their size."""

import dataclasses
import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.types import Group
from tests.samples import make_group, make_trajectory

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "plugins"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_under_sixty_lines(path):
    assert len(path.read_text().splitlines()) < 60


def test_token_weights():
    m = load("token_weights")
    first = np.log([[[0.5, 0.5]], [[0.5, 0.5]]])
    second = np.log([[[0.9, 0.1]], [[0.1, 0.9]]])
    np.testing.assert_allclose([m.divergence(first)[0], m.divergence(second)[0]], [0, 1.333333], atol=1e-5)
    np.testing.assert_allclose(m.token_weights([first, second], alpha=1.7), [1, 1.7])
    np.testing.assert_allclose(m.token_weights([np.concatenate([first, second], 1)], 1.7), [1, 1.7])
    assert m.token_weights([first]).tolist() == [1]


def test_hint_reward():
    m = load("hint_reward")
    assert m.mixed_probability(0.25, 8) == pytest.approx(0.899872, abs=1e-5)
    assert m.hint_reward(0.25, 8, -0.15) == pytest.approx(0.545800, abs=1e-5)
    assert m.hint_reward(0.25, 8, 0.3) == pytest.approx(0.899872, abs=1e-5)
    assert m.hint_reward(1.0, 8, 0.0) == 0
    assert m.hint_reward(0.25, 8, 0.0, unhinted=0.25) == 0
    assert m.hint_reward(0.25, 8, 0.0, gate=False) == -1


def test_consistency():
    m = load("consistency")
    rewards = m.consistency_rewards(np.array([1.0, 1, 0, 1]), np.array([0.9, 0.5, 0.95, 0.7]))
    assert rewards.tolist() == [1.5, 1, 0, 1.5]
    assert m.consistency_rewards(np.zeros(2), np.ones(2)).tolist() == [0, 0]
    likelihoods = m.answer_likelihoods([np.log([0.5, 0.9, 0.9])] * 2, [np.array([0, 1, 1], bool), np.zeros(3, bool)])
    np.testing.assert_allclose(likelihoods, [0.9, 0])
    slow = m.averaged({"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
    np.testing.assert_allclose(slow["w"], 0.995)


def test_clean_calls():
    """A failed call that the next turn makes good is cut out; its tokens, its observation, its error."""
    m = load("clean_calls")
    rng = np.random.default_rng(0)
    found = make_group(0, 1)
    trajectory = make_trajectory(rng, 0, turns=3)
    kinds = ("exception", "ok")
    turns = [
        dataclasses.replace(turn, results=(dataclasses.replace(turn.results[0], kind=kind),))
        for turn, kind in zip(trajectory.turns[:2], kinds, strict=True)
    ]
    trajectory = dataclasses.replace(trajectory, turns=(*turns, trajectory.turns[2]))
    verdict = dataclasses.replace(found.verdicts[0], reward=1.0, tool_calls=2, tool_errors=1, turns=3)
    (clean,) = m.purify(Group(found.problem, (trajectory,), (verdict,))).trajectories
    _, after = m.repaired(trajectory, verdict)
    low, high = trajectory.turns[0].start, trajectory.turns[1].start
    assert clean.tokens.tolist() == [*trajectory.tokens[:low], *trajectory.tokens[high:]]
    assert (after.tool_calls, after.tool_errors, after.turns) == (1, 0, 2)
    for turn, before in zip(clean.turns, trajectory.turns[1:], strict=True):
        assert clean.tokens[turn.start : turn.end].tolist() == trajectory.tokens[before.start : before.end].tolist()
        assert clean.policy_mask[turn.start : turn.end].all()
    # Another idea is no repair, a failure stays as it is, and so does a failed last call.
    assert m.repaired(trajectory, verdict, alike=1.1)[0] is trajectory
    lost = Group(found.problem, (trajectory,), (dataclasses.replace(verdict, reward=0.0),))
    assert m.purify(lost).trajectories[0] is trajectory
    unmended = dataclasses.replace(trajectory, turns=(turns[1], turns[0], trajectory.turns[2]))
    assert m.repaired(unmended, verdict)[0] is unmended


def test_meta_prediction():
    m = load("meta_prediction")
    passes = m.pass_score(6 / 8, 0.5)
    assert passes == pytest.approx(0.316228, abs=1e-5)
    notions = m.notion_share(["gcd", "sum"], {"gcd": 3, "sum": 1}, {"sum": 2})
    assert notions == 0.5
    assert m.length_score(30, [10, 50]) == 1
    assert m.length_score(50, [10, 50]) == 0
    assert m.meta_reward(notions, passes, 1.0) == pytest.approx(0.605409, abs=1e-5)


def test_two_policies():
    m = load("two_policies")
    calls = [np.array([1.0]), np.array([0.5, 0.0, 0.2])]
    generator = np.random.default_rng(0)
    picks = m.aligned(calls, 2, generator)
    assert picks[0].tolist() == [0, 0]
    assert len(set(picks[1].tolist())) == 2
    advantages = np.concatenate(m.second_advantages([np.array([1.0, 1.0]), np.array([0.5, 0.0])]))
    np.testing.assert_allclose(advantages, [0.904534, 0.904534, -0.301511, -1.507557], atol=1e-5)
    assert m.main_reward(False, True) == 0
    assert m.main_reward(True, True) == 1.0
    assert m.second_reward(True, False, 0.5) == pytest.approx(0.35)


def test_skills():
    m = load("skills")
    assert m.utility_step(0.5, 2.0) == pytest.approx(0.65)
    assert m.rubric_reward(np.array([3, 2, 1]), np.array([1, 0, 1])) == pytest.approx(0.666667, abs=1e-5)
    generator = np.random.default_rng(0)
    assert m.choose_skill(np.array([-1.0, -5.0]), 1.0, generator, explore=0.0) == 0
    assert m.choose_skill(np.zeros(4), 1.0, generator, explore=0.0) == -1
    assert {m.choose_skill(np.array([0.0, -50.0]), 1.0, generator, explore=1.0) for _ in range(30)} == {0, 1}

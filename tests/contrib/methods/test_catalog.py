"""The recipes of further methods: the invariants of the family on their compositions, as for those of the core."""

import dataclasses

import numpy as np
import pytest

from docs.methods_table import load_methods, method_table, table_differences, with_table
from grpo_roc_jax.contrib.methods.tempsamp_r1 import Anchored
from grpo_roc_jax.method.advantage import GroupRelative
from grpo_roc_jax.method.compose import initial_state, next_state, resample_group, subset
from grpo_roc_jax.method.planning import choose_problems
from grpo_roc_jax.types import Condition, Group
from tests.helpers.kind_cases import kinds_of
from tests.helpers.method_groups import make_group
from tests.method import test_catalog as core
from tests.method.test_catalog import load, rows_of

FURTHER = sorted(set(load_methods()) - set(core.METHODS))
DRAWN = {"microcoder"}
"""Methods that draw for each trajectory, so that the order of groups matters."""
ORDERED = {"s_grpo", "mc_grpo", "microcoder"}
"""Methods in which the order inside a group says something: exits in time, the first at the median, random draws."""
BY_DESIGN = {"ngrpo", "spo", "unlikeliness", "s_grpo"}
"""Methods with a gradient on groups of equal rewards by design: a virtual best reward, a baseline outside the group,
ranks among successes, pay by the order of exits."""
WITHOUT_PAPER = {"rejection", "veto"}
"""Kinds that several libraries have."""


def worded(group):
    """The group as rollouts of three wordings, with answers that tell successes from failures."""
    kinds = [Condition("paraphrase", i % 3) if i % 3 else Condition() for i in range(group.size)]
    pairs = zip(group.trajectories, kinds, strict=True)
    verdicts = tuple(dataclasses.replace(v, answer=v.status) for v in group.verdicts)
    texts = ["so" if v.reward else "so it is" for v in verdicts]
    turns = [(dataclasses.replace(t.turns[0], text=text),) for t, text in zip(group.trajectories, texts, strict=True)]
    worded = [dataclasses.replace(t, condition=c, turns=s) for (t, c), s in zip(pairs, turns, strict=True)]
    return Group(group.problem, tuple(worded), verdicts)


core.PREPARED["paraphrases"] = worded


INVARIANTS = {
    core.test_variants_are_words_of_the_command_line: set(),
    core.test_equal_rewards_have_no_gradient: BY_DESIGN,
    core.test_the_order_inside_a_group_changes_nothing: ORDERED,
    core.test_micro_batches_and_packing_change_nothing: set(),
    core.test_on_policy_every_loss_is_the_policy_gradient: set(),
}
"""What holds for every method -> the exceptions."""


@pytest.mark.parametrize(
    ("holds", "name"),
    [(holds, name) for holds, exceptions in INVARIANTS.items() for name in FURTHER if name not in exceptions],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_invariants(holds, name):
    holds(name)


@pytest.mark.parametrize("name", FURTHER)
def test_composition(name):
    core.test_composition(name, any_order=name not in DRAWN)


@pytest.mark.parametrize("name", FURTHER)
def test_prompts_and_observations_stay_out(name):
    """Ids apart for TEMPO, whose tree they make."""
    core.test_prompts_and_observations_stay_out(name, reads_ids=name == "tempo")


def estimator(config):
    """The estimate per group; for an anchored one, that of the trajectories of the policy."""
    return config.advantage.of if isinstance(config.advantage, Anchored) else config.advantage


def shiftable(config):
    """As in the core; a tracked baseline remembers rewards, and some scales take them for shares."""
    part = estimator(config)
    if not isinstance(part, GroupRelative) or part.baseline.kind == "tracker":
        return False
    if part.scale.kind in ("beta", "virtual_std"):
        return False
    return core.shiftable(config, part) or (part.baseline.kind == "median" and not config.shaping)


@pytest.mark.parametrize("name", FURTHER)
def test_a_constant_or_a_factor_on_all_rewards_changes_nothing(name):
    config = load(name)
    if not shiftable(config):
        pytest.skip("reads more of rewards than their differences")
    core.check_unit(config, core.scalable(config, estimator(config)))


def test_most_methods_are_held_to_that():
    configs = {name: load(name) for name in FURTHER}
    shifted = {name for name, config in configs.items() if shiftable(config)}
    scaled = {name for name in shifted if core.scalable(configs[name], estimator(configs[name]))}
    assert {"san", "xrpo"} <= scaled < shifted
    assert len(shifted) > 10


@pytest.mark.parametrize(("axis", "name"), [pair for pair in kinds_of("contrib") if pair[1] not in WITHOUT_PAPER])
def test_every_kind_names_its_source(axis, name):
    core.test_every_kind_names_its_source(axis, name)


def test_the_documents_table_is_the_generated_one():
    text = core.DOCUMENT.read_text(encoding="utf-8")
    measured = table_differences(text)
    assert with_table(text, method_table(measured)) == text, f"python docs/methods_table.py {core.DOCUMENT}"
    assert set(measured) == set(load_methods()), f"python -m benchmarks.first_step {core.DOCUMENT}"


def test_scalerl_composes():
    """The vector of the specification: rewards [[1, 0], [1, 1], [1, 0]], lengths [[2, 6], [3, 3], [4, 4]]."""
    config, generator = load("scalerl"), np.random.default_rng(0)
    given = zip([[1, 0], [1, 1], [1, 0]], [[2, 6], [3, 3], [4, 4]], "abc", strict=True)
    sampled = [make_group(rewards, lengths=lengths, uid=uid) for rewards, lengths, uid in given]
    selections = [resample_group(group, config, generator) for group in sampled]
    assert [selection.kept for selection in selections] == [True, False, True]
    kept_groups = [subset(g, s) for g, s in zip(sampled, selections, strict=True) if s.kept]
    rows = rows_of(kept_groups, config)
    np.testing.assert_allclose([row.advantages[row.policy_mask][0] for row in rows], [1, -1, 1, -1], atol=1e-6)
    assert {float(w) for row in rows for w in row.weights[row.policy_mask]} == {0.0625}
    assert sum(row.weights.sum() for row in rows) == 1
    state = next_state(sampled, kept_groups, config, initial_state(config))
    problems = [group.problem for group in sampled]
    assert choose_problems(problems, 2, config.plan, state, generator) == [0, 2], "b was solved in all its rollouts"
    assert choose_problems(problems, 3, config.plan, state, generator) == [0, 1, 2]
    assert choose_problems([problems[1]] * 3 + problems[:1], 2, config.plan, state, generator) == [0, 3]

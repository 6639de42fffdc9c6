"""The recipes of further methods: the invariants of the family, and what the core knows of them."""

import re
from pathlib import Path

import numpy as np
import pytest

import grpo_roc_jax
from docs import methods_table as table
from docs.methods_table import load_methods
from grpo_roc_jax.contrib.methods import hints
from grpo_roc_jax.contrib.methods.mc_grpo import Median
from grpo_roc_jax.contrib.methods.tempsamp_r1 import Anchored
from grpo_roc_jax.method.advantage import GroupRelative
from grpo_roc_jax.method.compose import initial_state, next_state, resample_group, subset
from grpo_roc_jax.method.planning import choose_problems
from grpo_roc_jax.settings.cli import CONTRIB_METHODS
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Condition, condition_kind, traits_of
from tests import test_layering as layering
from tests.helpers.method_groups import make_group, other, saying
from tests.method import test_catalog as core
from tests.method.test_catalog import load, rows_of

FURTHER = sorted(set(load_methods()) - set(core.METHODS))
DRAWN = {"microcoder"}
"""Methods that draw for each trajectory, so that the order of groups matters."""
ORDERED = {"s_grpo", "mc_grpo", "microcoder"}
"""Methods in which the order inside a group says something: exits in time, the first at the median, random draws."""
BY_DESIGN = {"ngrpo", "spo", "unlikeliness", "s_grpo"}
"""With a gradient on equal rewards: a virtual best one, a baseline outside the group, ranks, the order of exits."""


def worded(group):
    """The group as rollouts of three wordings, with answers that tell successes from failures."""
    texts = ["so" if v.reward else "so it is" for v in group.verdicts]
    kinds = [Condition("paraphrase", i % 3) if i % 3 else Condition() for i in range(group.size)]
    return other(saying(group, *texts), condition=kinds, verdicts={"answer": [v.status for v in group.verdicts]})


core.PREPARED["paraphrases"] = worded


def centered(config):
    """As in the core; a tracked baseline remembers rewards, and some scales take them for shares."""
    part = config.advantage.of if isinstance(config.advantage, Anchored) else config.advantage
    stays = {"tracker", "beta", "virtual_std"}
    if not isinstance(part, GroupRelative) or {part.baseline.kind, part.scale.kind} & stays:
        return False, False
    shifts, scales = core.centered(config, part)
    return shifts or (part.baseline.kind == "median" and not config.shaping), scales


INVARIANTS = {
    core.test_variants_are_words_of_the_command_line: (set(), lambda name: {}),
    core.test_equal_rewards_have_no_gradient: (BY_DESIGN, lambda name: {}),
    core.test_the_order_inside_a_group_changes_nothing: (ORDERED, lambda name: {}),
    core.test_gradients: (set(), lambda name: {}),
    core.test_composition: (set(), lambda name: {"any_order": name not in DRAWN}),
    core.test_prompts_and_observations_stay_out: (set(), lambda name: {"reads_ids": name == "tempo"}),  # of its tree
    core.test_a_constant_or_a_factor_on_all_rewards_changes_nothing: (set(), lambda n: {"judged": centered(load(n))}),
}
"""What holds for every method -> (the exceptions, what else the test needs to know)."""


@pytest.mark.parametrize(
    ("holds", "name"),
    [(holds, name) for holds, (exceptions, _) in INVARIANTS.items() for name in FURTHER if name not in exceptions],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_invariants(holds, name):
    holds(name, **INVARIANTS[holds][1](name))


def test_scalerl_composes():
    """The vector of the specification: rewards [[1, 0], [1, 1], [1, 0]], lengths [[2, 6], [3, 3], [4, 4]]."""
    config, generator = load("scalerl"), np.random.default_rng(0)
    given = {"a": ([1, 0], [2, 6]), "b": ([1, 1], [3, 3]), "c": ([1, 0], [4, 4])}
    sampled = [make_group(rewards, lengths=lengths, uid=uid) for uid, (rewards, lengths) in given.items()]
    selections = [resample_group(group, config, generator) for group in sampled]
    kept_groups = [subset(g, s) for g, s in zip(sampled, selections, strict=True) if s.kept]
    rows = rows_of(kept_groups, config)
    np.testing.assert_allclose([row.advantages[row.policy_mask][0] for row in rows], [1, -1, 1, -1], atol=1e-6)
    assert {float(w) for row in rows for w in row.weights[row.policy_mask]} == {0.0625}
    state = next_state(sampled, kept_groups, config, initial_state(config))
    chosen = choose_problems([group.problem for group in sampled], 2, config.plan, state, generator)
    assert chosen == [0, 2], "b was solved in all its rollouts"


def test_no_module_outside_names_a_file_of_the_folder():
    names = {path.stem for path in CONTRIB_METHODS.glob("*.py")} - {"__init__"}
    named = re.compile(rf"contrib[./]methods[./:](?:{'|'.join(names)})\b")
    others = [path for path in Path(grpo_roc_jax.__file__).parent.rglob("*.py") if CONTRIB_METHODS not in path.parents]
    assert not [path for path in others if named.search(path.read_text(encoding="utf-8"))]
    assert layering.with_device_libraries("contrib.methods.") == {"contrib.methods.tw_grpo", "contrib.methods.vespo"}


def test_names_are_given_once():
    assert traits_of(hints.HINT).helped and not traits_of(hints.WRITER).attempt
    with pytest.raises(ValueError, match=r"condition 'hint' is .* choose another name"):
        condition_kind("hint", attempt=False)
    with pytest.raises(ValueError, match=r"kind 'median' exists already: .*mc_grpo\.py; choose another name"):
        kind("median")(type("Other", (Median,), {"__doc__": "Taken."}))


def test_the_documents_table_is_the_generated_one_and_sketches_are_counted_apart():
    page = core.DOCUMENT.read_text(encoding="utf-8")
    measured = table.table_differences(page)
    assert table.with_table(page, table.method_table(measured)) == page, f"python docs/methods_table.py {core.DOCUMENT}"
    assert set(measured) == set(load_methods()), f"python -m benchmarks.first_step {core.DOCUMENT}"
    methods = load_methods()
    sketches = [m for m in methods.values() if m.stand_in]
    assert all(m.title.endswith(table.SKETCH) and m.as_in_paper for m in sketches)
    words = re.compile(rf"\b{len(methods) - len(sketches)}\b[^|.]*\b{len(sketches)} (?:are )?sketches")
    for name in ("README.md", "docs/index.md", "docs/comparison.md"):
        text = (core.DOCUMENT.parents[1] / name).read_text(encoding="utf-8")
        assert words.search(text), name
        counts = {int(count) for count in re.findall(r"(\d+)\**(?: of the)? recipes", text)}
        assert counts <= {len(methods) - len(sketches)}, f"{name}: sketches are counted apart"
    assert f"Of the {len(methods)} recipes, {len(methods) - len(sketches)} " in page
    assert f"The other {len(sketches)} are sketches" in page
    assert table.with_table(page, table.sketch_table(), *table.SKETCH_MARKS) == page, "python docs/methods_table.py"

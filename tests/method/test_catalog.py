"""Every method file: a complete header, settings that parse, and the invariants of the family on its composition."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import first_step
from docs.methods_table import load_methods, method_table, read_method, table_differences
from grpo_roc_jax import Config, Group, Scores, initial_state, next_state, subset, train_rows
from grpo_roc_jax.method.advantage import Advantage, GroupRelative, Whiten
from grpo_roc_jax.method.compose import needs_reference, needs_scores, resample_group, teacher_of
from grpo_roc_jax.method.edit import take_trajectories
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.cli import CONFIG_DIR, ConfigError, load_config
from tests.helpers.kind_cases import AXES, kinds_of
from tests.helpers.loss_batch import packed_loss
from tests.helpers.method_groups import make_group, trajectories

METHODS = {name: m for name, m in load_methods().items() if m.path.parent == CONFIG_DIR / "methods"}
PREPARED = {}
"""Condition kind -> function of a group, which gives it what a method with that condition reads."""


@functools.cache
def load(name):
    """The run configuration of a method; its sections are what the method reads."""
    return load_config(Config, [str(load_methods()[name].path)], prog="test")


DOCUMENT = CONFIG_DIR.parent / "docs" / "methods.md"


def test_the_document_has_the_generated_rows():
    text = DOCUMENT.read_text(encoding="utf-8")
    measured, command = table_differences(text), f"python docs/methods_table.py {DOCUMENT}"
    assert set(method_table(measured).splitlines()) <= set(text.splitlines()), command
    assert set(measured) >= set(METHODS) and "?" not in measured.values(), f"python -m benchmarks.first_step {DOCUMENT}"


@pytest.mark.parametrize("name", ["grpo", "rloo", "gspo"])
def test_the_documents_differences_are_the_measured_ones(name):
    assert first_step.difference(METHODS[name].path) == table_differences(DOCUMENT.read_text(encoding="utf-8"))[name]


def test_a_method_is_one_file_of_the_users(tmp_path, monkeypatch):
    """The worked example: a file and a recipe, as the document prints them, and nothing else."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Adding a method")[2]
    for name, language in (("my_methods.py", "python"), ("ranks.yaml", "yaml")):
        (tmp_path / name).write_text(text.partition(f"```{language}\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Advantage, "kinds", dict(Advantage.kinds))
    config = load_config(Config, ["ranks.yaml"], prog="test")
    assert read_method(tmp_path / "ranks.yaml").formula == "A = z(rank of R)"
    with pytest.raises(ConfigError, match=r"kind ranks has adjust, eps"):
        load_config(Config, ["ranks.yaml", "--advantage.k", "2"], prog="test")
    advantages = [row.advantages[-1] for row in rows_of([make_group([1, 0, 0.5, 0])], config)]
    expected = np.array([1.5, -1, 0.5, -1]) / np.sqrt((1.5**2 + 1 + 0.25 + 1) / 3)
    np.testing.assert_allclose(advantages, expected, atol=1e-4)


PLAIN = {"none", "custom", "constant", "uniform", "logp", "nll", "ratio", "sign_weights", "truncated_is"}
"""Kinds without a paper of their own: what does nothing, a function of the user's, what several libraries have."""


@pytest.mark.parametrize(("axis", "name"), [pair for pair in kinds_of("method") if pair[1] not in PLAIN])
def test_every_kind_names_its_source(axis, name):
    assert re.search(r"arXiv:\d{4}\.\d{5}|Schulman, 2020", AXES[axis].kinds[name].__doc__), f"{axis} {name}"


@pytest.mark.parametrize("name", METHODS)
def test_variants_are_words_of_the_command_line(name):
    """`# variant: WHAT: WORDS` in a header names another form of the method; its words change the configuration."""
    path = load_methods()[name].path
    lines = path.read_text().splitlines()
    for words in [line.rpartition(": ")[2].split() for line in lines if line.startswith("# variant: ")]:
        assert load_config(Config, [str(path), *words], prog="test") != load(name)


def only_named(channels, config):
    """The channels that the reward of a method has; none with a single function."""
    names = config.reward.names
    return {name: values for name, values in channels.items() if name in names} if len(names) > 1 else None


def groups(config, seed=0, count=3):
    """Random mixed groups with everything a composition may read."""
    generator = np.random.default_rng(seed)
    n, out = config.resample.sampled(config.group.size), []
    for g in range(count):
        rewards = generator.integers(0, 2, n).astype(float)
        if n > 1:
            rewards[:2] = (0, 1)
            rewards[2:] *= g > 0  # one success of many, which pass@k must see too
        channels = {"answer": rewards}
        channels |= {name: generator.integers(0, 2, n).astype(float) for name in ("format", "clean_tools")}
        columns = {"lengths": generator.integers(1, 9, n)}
        columns |= {name: generator.integers(0, 4, n) for name in ("calls", "observation")}
        columns |= {"logprobs": -generator.random(n).astype(np.float32), "channels": only_named(channels, config)}
        out.append(make_group(rewards, uid=f"p{g}", **columns))
    return [PREPARED.get(config.plan.condition.kind, lambda group: group)(group) for group in out]


def rows_of(some, config, noise=None):
    """Rows on policy: all passes agree with the record. `noise` fills them off the mask, as real passes do."""
    members = trajectories(some)

    def passed(factor, shift=0.0):
        values = [shift + factor * t.logprobs for t in members]
        if noise is None:
            return values
        pairs = [(t.policy_mask, value, noise.normal(size=t.length)) for t, value in zip(members, values, strict=True)]
        return [np.where(*each).astype(np.float32) for each in pairs]

    scores = Scores(
        passed(1) if needs_scores(config) else None,
        passed(-1, 1),
        passed(1) if needs_reference(config) else None,
        passed(1.5) if teacher_of(config) else None,
    )
    return train_rows(some, config, initial_state(config), rng=np.random.default_rng(0), scores=scores)


def products(rows):
    """advantage x weight of each token: on policy this is the gradient of the loss, for every surrogate."""
    return [row.advantages * row.weights for row in rows]


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"opd", "sdft", "sdpo"}))  # these have a teacher
def test_equal_rewards_have_no_gradient(name):
    config = load(name)
    n = config.group.size
    for reward in (0.0, 1.0):
        channels = only_named(dict.fromkeys(config.reward.names, [reward] * n), config)
        some = [make_group([reward] * n, uid=str(g), channels=channels) for g in range(2)]
        for product in products(rows_of(some, config)):
            np.testing.assert_allclose(product, 0, atol=1e-7)


@functools.cache
def kept_groups(config):
    """Random groups as selection leaves them, at most five trajectories each."""
    generator = np.random.default_rng(1)
    selected = [subset(g, resample_group(g, config, generator)) for g in groups(config)]
    return [take_trajectories(group, range(min(5, group.size))) for group in selected]


@functools.cache
def kept_rows(config):
    return rows_of(kept_groups(config), config)


@pytest.mark.parametrize("name", METHODS)
def test_the_order_inside_a_group_changes_nothing(name):
    config = load(name)
    selected = kept_groups(config)
    order = np.random.default_rng(3).permutation(selected[0].size)
    base = products(kept_rows(config))
    after = products(rows_of([take_trajectories(group, order) for group in selected], config))
    places = [first + i for first in range(0, len(base), selected[0].size) for i in order]
    for product, i in zip(after, places, strict=True):
        np.testing.assert_allclose(product, base[i], atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_prompts_and_observations_stay_out(name, reads_ids=False):
    """Whatever their ids are, unless the method reads ids, and whatever the passes say of them."""
    config = load(name)
    selected = kept_groups(config)
    generator = np.random.default_rng(9)

    def noisy(t):
        tokens = np.where(t.policy_mask, t.tokens, generator.integers(0, 99, t.length))
        return t if reads_ids else replace(t, tokens=tokens)

    moved = [Group(g.problem, tuple(map(noisy, g.trajectories)), g.verdicts) for g in selected]
    base, after = kept_rows(config), rows_of(moved, config, noise=generator)
    for left, right in zip(base, after, strict=True):
        on = left.policy_mask
        np.testing.assert_array_equal(on, right.policy_mask)
        for field in ("advantages", "weights", "logprobs_old", "logprobs_ref"):
            np.testing.assert_allclose(getattr(left, field)[on], getattr(right, field)[on], atol=1e-7)
        assert not right.weights[~on].any()


@pytest.mark.parametrize("name", METHODS)
def test_gradients(name):
    """One long row of everything equals one trajectory a row in micro-batches of three, away from the old policy. At
    ratio 1 the gradient of each token's log-probability is -advantage x weight, whatever the surrogate."""
    config, generator = load(name), np.random.default_rng(5)
    rows = kept_rows(config)
    old = [row.logprobs_old for row in rows]
    moved = [now + generator.normal(0, 0.1, len(now)).astype(np.float32) for now in old]
    together = packed_loss(rows, config.surrogate, moved, row_length=256, per_micro=1).slopes
    apart = packed_loss(rows, config.surrogate, moved, row_length=16, per_micro=3).slopes
    on_policy = packed_loss(rows, config.surrogate, old, row_length=256, per_micro=1).slopes
    assert all(any(np.asarray(slope).any() for slope in slopes) for slopes in (together, on_policy))
    for row, left, right, at_one in zip(rows, together, apart, on_policy, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
        assert not np.asarray(left)[~row.policy_mask].any()
        dropped = row.marked if name == "clip_cov" else np.zeros(row.length, bool)
        np.testing.assert_allclose(at_one, np.where(dropped, 0.0, -row.advantages * row.weights), atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_composition(name, any_order=True):
    """The invariants of the family's interface section, from sampled groups to rows; `any_order`: nothing is drawn."""
    config, generator = load(name), np.random.default_rng(1)
    sampled = groups(config)
    selections = [resample_group(group, config, generator) for group in sampled]
    sizes = [len(selection.indices) for selection in selections if selection.kept]
    assert sizes == [min(config.group.size, group.size) for group in sampled]
    selected = [*map(subset, sampled, selections)]
    rows = rows_of(selected, config)
    base = products(rows)
    assert any(p.any() for p in base), "no trajectory has a gradient"
    for row, trajectory in zip(rows, trajectories(selected), strict=True):
        assert np.isfinite(row.advantages).all() and np.isfinite(row.weights).all() and (row.weights >= 0).all()
        assert not row.weights[~trajectory.policy_mask].any(), "an observation or prompt token has weight"
    if any_order:
        moved = products(rows_of(selected[::-1], config))
        back = [moved[sum(sizes[g + 1 :]) : sum(sizes[g:])] for g in range(len(sizes))]
        for before, after in zip(base, [p for part in back for p in part], strict=True):
            np.testing.assert_allclose(before, after, atol=1e-6)
    after = next_state(sampled, selected, config, initial_state(config))
    again = AlgoState.from_tree(after.to_tree())
    assert after.step == 1
    np.testing.assert_array_equal(again.table.values, after.table.values)
    assert next_state([], [], config, again).step == 2, "a step may cut all of its groups"


def centered(config, estimator):
    """Whether rewards pass through a centered estimator alone, without maps; whether it divides by their spread too."""
    if config.shaping or not isinstance(estimator, GroupRelative):
        return False, False
    whitened = any(isinstance(step, Whiten) for step in getattr(config.advantage, "adjust", ()))
    shifts = whitened or estimator.baseline.kind in ("mean", "leave_one_out", "length_weighted")
    return shifts, whitened or estimator.scale.kind in ("std", "batch_std")


@pytest.mark.parametrize("name", METHODS)
def test_a_constant_or_a_factor_on_all_rewards_changes_nothing(name, judged=None):
    """What was reached, and the channels, stay. `judged`: what `centered` says of a method."""
    config = load(name)
    shifts, scales = judged or centered(config, config.advantage)
    if not shifts:
        pytest.skip("reads more of rewards than their differences")
    selected = kept_groups(config)
    for change in [lambda r: r + 5, lambda r: 3 * r][: 1 + scales]:
        paid = [replace(g, verdicts=tuple(replace(v, reward=change(v.reward)) for v in g.verdicts)) for g in selected]
        for left, right in zip(products(kept_rows(config)), products(rows_of(paid, config)), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)

"""The recipes of further methods: the invariants of the family, and what the core knows of them."""

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from docs import methods_table as table
from docs.methods_table import load_methods
from grpo_roc_jax.config import Config
from grpo_roc_jax.contrib.methods import hints
from grpo_roc_jax.contrib.methods.mc_grpo import Median
from grpo_roc_jax.contrib.methods.tempsamp_r1 import Anchored
from grpo_roc_jax.method.advantage import GroupRelative, NoScale, PassAtK, Std
from grpo_roc_jax.method.compose import initial_state, next_state, resample_group, subset
from grpo_roc_jax.method.planning import choose_problems
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS, file_layers, find_config
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import CONDITIONS, Condition, Group, condition_kind, traits_of
from tests import test_layering as layering
from tests.helpers.kind_cases import kinds_of
from tests.helpers.method_groups import make_group
from tests.method import test_catalog as core
from tests.method.test_catalog import load, rows_of
from tests.test_cli import refusal, run, write

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
    verdicts = tuple(replace(v, answer=v.status) for v in group.verdicts)
    texts = ["so" if v.reward else "so it is" for v in verdicts]
    turns = [(replace(t.turns[0], text=text),) for t, text in zip(group.trajectories, texts, strict=True)]
    worded = [replace(t, condition=c, turns=s) for (t, c), s in zip(pairs, turns, strict=True)]
    return Group(group.problem, tuple(worded), verdicts)


core.PREPARED["paraphrases"] = worded


def centered(config):
    """As in the core; a tracked baseline remembers rewards, and some scales take them for shares."""
    part = config.advantage.of if isinstance(config.advantage, Anchored) else config.advantage
    if not isinstance(part, GroupRelative) or {part.baseline.kind, part.scale.kind} & {
        "tracker",
        "beta",
        "virtual_std",
    }:
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
    core.test_a_constant_or_a_factor_on_all_rewards_changes_nothing: (
        set(),
        lambda name: {"judged": centered(load(name))},
    ),
}
"""What holds for every method -> (the exceptions, what else the test needs to know)."""


@pytest.mark.parametrize(
    ("holds", "name"),
    [(holds, name) for holds, (exceptions, _) in INVARIANTS.items() for name in FURTHER if name not in exceptions],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_invariants(holds, name):
    holds(name, **INVARIANTS[holds][1](name))


def test_most_methods_are_held_to_that():
    judged = {name: centered(load(name)) for name in FURTHER}
    shifted, scaled = ({name for name, pair in judged.items() if all(pair[:n])} for n in (1, 2))
    assert {"san", "xrpo"} <= scaled < shifted and len(shifted) > 10


@pytest.mark.parametrize(("axis", "name"), [pair for pair in kinds_of("contrib") if pair[1] not in WITHOUT_PAPER])
def test_every_kind_names_its_source(axis, name):
    core.test_every_kind_names_its_source(axis, name)


def test_the_documents_table_is_the_generated_one():
    text = core.DOCUMENT.read_text(encoding="utf-8")
    measured = table.table_differences(text)
    generated = table.with_table(text, table.method_table(measured))
    assert generated == text, f"python docs/methods_table.py {core.DOCUMENT}"
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


# ---- what the core knows of them ------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[3]
ON_DEVICE = {"contrib.methods.tw_grpo", "contrib.methods.vespo"}
"""A surrogate, and a method with passes of its own."""


def test_recipes_beside_methods_are_named_like_those_of_the_core(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = CONTRIB_METHODS / "hill.yaml"
    names = ("configs/methods/hill.yaml", "methods/hill.yaml", "methods/hill")
    assert [find_config(name) for name in names] == [path] * 3
    monkeypatch.chdir(CONTRIB_METHODS)  # by its path, it finds its base in the configs directory too
    assert [next(iter(file_layers(Path(at)))).name for at in ("hill.yaml", path)] == ["toy.yaml"] * 2
    assert not {p.name for p in CONTRIB_METHODS.glob("*.yaml")} & {p.name for p in (CONFIG_DIR / "methods").glob("*")}


def test_no_module_outside_names_a_file_of_the_folder():
    names = {path.stem for path in CONTRIB_METHODS.glob("*.py")} - {"__init__"}
    named = re.compile(rf"contrib[./]methods[./:](?:{'|'.join(names)})\b")
    others = [path for path in (ROOT / "grpo_roc_jax").rglob("*.py") if CONTRIB_METHODS not in path.parents]
    assert not [path for path in others if named.search(path.read_text(encoding="utf-8"))]
    assert layering.with_device_libraries("contrib.methods.") == ON_DEVICE


def test_its_rewards_are_known_without_the_configuration_of_a_run():
    config = "g.RewardConfig(functions=['ranking', 'screening'])"
    code = f"import grpo_roc_jax as g; print(*g.make_scorer({config}).functions)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ranking", "screening"]


def test_names_are_given_once():
    assert traits_of(hints.HINT).helped and traits_of(hints.HINT).moves and not traits_of(hints.WRITER).attempt
    assert traits_of("of another version") == traits_of("")
    assert Condition.parse("of another version:3") == Condition("of another version", 3)
    assert condition_kind("hint", helped=True, moves=True, optional=True) == "hint"
    before = dict(CONDITIONS)
    with pytest.raises(ValueError, match=r"condition 'hint' is .* choose another name"):
        condition_kind("hint", attempt=False)
    assert before == CONDITIONS
    with pytest.raises(ValueError, match=r"kind 'median' exists already: .*mc_grpo\.py; choose another name"):

        @kind("median")
        class Other(Median):
            """Taken."""

    assert type(run("--advantage.baseline", "median").advantage.baseline) is Median
    message = "advantage.of = reg (command line): must be kind group"
    assert message in refusal("--advantage", "anchored", "--advantage.of", "reg", of=Config)


def test_sketches_are_told_and_counted_apart():
    methods = load_methods()
    sketches = [m for m in methods.values() if m.stand_in]
    assert all(m.title.endswith(table.SKETCH) and m.as_in_paper for m in sketches)
    words = re.compile(rf"\b{len(methods) - len(sketches)}\b[^|.]*\b{len(sketches)} (?:are )?sketches")
    for page in ("README.md", "docs/index.md", "docs/comparison.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert words.search(text), page
        counts = {int(count) for count in re.findall(r"(\d+)\**(?: of the)? recipes", text)}
        assert counts <= {len(methods) - len(sketches)}, f"{page}: sketches are counted apart"
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert f"Of the {len(methods)} recipes, {len(methods) - len(sketches)} " in page
    assert f"The other {len(sketches)} are sketches" in page
    assert table.with_table(page, table.sketch_table(), *table.SKETCH_MARKS) == page, (
        "python docs/methods_table.py docs/methods.md"
    )
    # In its module or in the comments of its recipe, whatever follows in the table.
    methods = load_methods()
    texts = {name: " ".join(re.findall("^#.*", m.path.read_text(), re.MULTILINE)) for name, m in methods.items()}
    for path in CONTRIB_METHODS.glob("*.py"):
        if path.stem in texts:
            texts[path.stem] += ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    admitted = {name for name, text in texts.items() if ADMITS.search(text)}
    assert len(admitted) > 15 and not [name for name in admitted if not methods[name].stand_in]


ADMITS = re.compile(
    r"stands? in for|stand-in|not available|not included|recollection|this project|not from the paper|was not verified",
    re.IGNORECASE,
)


@pytest.mark.parametrize("line", ["# stand-in: a table for the model", "# as in the paper: the sum", ""])
def test_a_sketch_says_what_it_is_in_three_places(tmp_path, line):
    path = tmp_path / "mine.yaml"
    title = "# Mine" if line else f"# Mine{table.SKETCH}"
    path.write_text(f"{title}, arXiv:1\n# axes: a\n# formula: x\n# state: none\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="write all three, or none"):
        table.read_method(path)


# ---- settings of kinds, in files and on the command line ------------------------------------------------------------


def anchored(scale):
    return Anchored(of=GroupRelative(scale=scale))


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        ("--advantage pass_at_k", "advantage: pass_at_k", PassAtK()),
        ("--advantage.kind pass_at_k", "advantage: {kind: pass_at_k}", PassAtK()),
        ("--advantage pass_at_k --advantage.k 4", "advantage: {kind: pass_at_k, k: 4}", PassAtK(k=4)),
        ("--advantage.k 4 --advantage pass_at_k", "advantage: {k: 4, kind: pass_at_k}", PassAtK(k=4)),
        ("--advantage '{kind: pass_at_k, k: 4}'", "advantage:\n  kind: pass_at_k\n  k: 4", PassAtK(k=4)),
        ("--advantage '{kind: pass_at_k}' --advantage.k 4", "advantage: {kind: pass_at_k, k: 4}", PassAtK(k=4)),
        ("--advantage.k 4 --advantage='{kind: pass_at_k}'", "advantage: {k: 4, kind: pass_at_k}", PassAtK(k=4)),
        (
            "--advantage '{kind: anchored, of: {scale: std}}' --advantage.of.scale.ddof 0",
            "advantage: {kind: anchored, of: {scale: {kind: std, ddof: 0}}}",
            anchored(Std(ddof=0)),
        ),
        (
            "--advantage anchored --advantage.of.scale none",
            "advantage: {kind: anchored, of: {scale: none}}",
            anchored(NoScale()),
        ),
        ("--advantage.baseline median", "advantage: {baseline: median}", GroupRelative(baseline=Median())),
        ("--advantage.scale.ddof 0", "advantage: {scale: {ddof: 0}}", GroupRelative(scale=Std(ddof=0))),
    ],
)
def test_kinds_by_name_by_mapping_and_nested(words, text, expected, tmp_path):
    assert run(*shlex.split(words)).advantage == run(write(tmp_path, one=text)).advantage == expected

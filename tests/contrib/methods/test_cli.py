"""Files and command line are one grammar; every refusal names the setting, where it was written and what to change."""

import shlex

import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.contrib.methods.mc_grpo import Median
from grpo_roc_jax.contrib.methods.tempsamp_r1 import Anchored
from grpo_roc_jax.method.advantage import GroupRelative, NoScale, PassAtK, Std
from grpo_roc_jax.settings.options import kind
from tests.test_cli import reads_back, refusal, run, write

CHOICES = [
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
        Anchored(of=GroupRelative(scale=Std(ddof=0))),
    ),
    (
        "--advantage anchored --advantage.of.scale none",
        "advantage: {kind: anchored, of: {scale: none}}",
        Anchored(of=GroupRelative(scale=NoScale())),
    ),
    ("--advantage.baseline median", "advantage: {baseline: median}", GroupRelative(baseline=Median())),
    ("--advantage.scale.ddof 0", "advantage: {scale: {ddof: 0}}", GroupRelative(scale=Std(ddof=0))),
]


@pytest.mark.parametrize(("words", "text", "expected"), CHOICES)
def test_kinds_by_name_by_mapping_and_nested(words, text, expected, tmp_path):
    assert run(*shlex.split(words)).advantage == run(write(tmp_path, one=text)).advantage == expected


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"kind 'median' exists already: .*mc_grpo\.py; choose another name"):

        @kind("median")
        class Other(Median):
            """Taken."""

    assert type(run("--advantage.baseline", "median").advantage.baseline) is Median


def test_a_part_that_must_be_of_one_kind_says_so():
    message = "advantage.of = reg (command line): must be kind group"
    assert message in refusal("--advantage", "anchored", "--advantage.of", "reg", of=Config)


def test_dump_of_kinds_reads_back_equal(tmp_path):
    words = "--shaping overlong tool_errors --advantage anchored --advantage.of.baseline median --surrogate.kl k3 "
    words += "--weights.masks drift,top_entropy --plan.second serial --plan.temperature rising --resample none "
    reads_back(tmp_path, *words.split(), "--group.size", "9", "--plan.second.stop", "so:\n{}")

"""What a run says about settings that nothing reads under the others."""

from dataclasses import replace

import pytest

from grpo_roc_jax.cli import CONFIG_DIR, load_config
from grpo_roc_jax.config import Config, derived
from grpo_roc_jax.method.config import ShapingConfig
from grpo_roc_jax.unread import READERS, default, unread

METHODS = sorted((CONFIG_DIR / "methods").glob("*.yaml"))


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, *value) or (0.5,)
    return value + 1 if isinstance(value, (int, float)) else object()


def test_defaults_say_nothing():
    assert unread(Config()) == []


def test_rows_name_settings_that_exist():
    for section, names, _, reads in READERS:
        for name in names.split():
            assert default(getattr(Config(), section), name) == getattr(getattr(Config(), section), name)
        assert bool(reads(Config())) in (True, False)


def unchecked(config, section, **values):
    """The configuration with values that its checks would refuse, since only the notes are tried."""
    part = replace(getattr(config, section))
    for name, value in values.items():
        object.__setattr__(part, name, value)
    return replace(config, **{section: part})


@pytest.mark.parametrize("row", [row for row in READERS if not row[3](Config())], ids=lambda row: f"{row[0]}.{row[1]}")
def test_a_setting_whose_reader_is_off_is_named(row):
    section, names, reader, _ = row
    for name in names.split():
        value = changed(getattr(getattr(Config(), section), name))
        lines = unread(unchecked(Config(), section, **{name: value}))
        assert any(line.startswith(f"{section}.{name} = ") and reader in line for line in lines), name


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--loss.kind=cispo", "--loss.clip_low=0.1"], "loss.clip_low"),
        (["--loss.mismatch_level=sequence"], "loss.mismatch_level"),
        (["--plan.hints=retry", "--plan.replace=2"], "plan.replace"),
        (["--advantage.score=disco", "--advantage.baseline=median"], "advantage.baseline"),
        (["--advantage.scale=pass_at_k", "--advantage.baseline=median"], "advantage.baseline"),
        (["--model.rope_factor=4.0"], "model.rope_factor"),
        (["--resample.method=none", "--resample.no_tool_penalty=0.3"], "resample.no_tool_penalty"),
        (["--data.eval_problems=0", "--eval.every=5"], "eval.every"),
    ],
)
def test_what_is_left_behind_is_said_with_the_first_lines(words, named):
    lines = derived(load_config(Config, ["toy", *words], prog="test"))
    assert [line for line in lines if line.startswith(f"{named} = ") and "no effect here" in line]


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_no_method_sets_what_it_does_not_read(path):
    assert unread(load_config(Config, [str(path)], prog="test")) == []


def test_a_shaping_step_that_would_wipe_out_others_is_refused():
    with pytest.raises(ValueError, match="staged first"):
        ShapingConfig(steps=("overlong", "staged"))
    assert ShapingConfig(steps=("staged", "overlong")).steps

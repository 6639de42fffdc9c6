"""Files and command line read by one parser; every refusal names the key and what to change."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from grpo_roc_jax import cli


@dataclass(frozen=True)
class Section:
    """A section."""

    clip_high: float = 0.28
    """Upper clip."""
    names: tuple[str, ...] = ("a",)
    """Names."""
    text: str = ""
    """Text."""
    kind: Literal["sort", "uniform"] = "sort"
    """Kind."""
    enabled: bool = False
    """Switch."""

    def __post_init__(self) -> None:
        if self.clip_high < 0:
            raise ValueError(f"clip_high = {self.clip_high}; at least 0 is wanted")


@dataclass(frozen=True)
class Sample:
    """A configuration."""

    seed: int = 0
    """Seed."""
    loss: Section = field(default_factory=Section)


def load(*argv: str) -> Sample:
    return cli.load_config(Sample, argv, prog="test")


def test_file_then_overrides_left_to_right(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("seed: 3\nloss: {clip_high: 0.5, names: [x, y], enabled: true, text: '--a b'}\n")
    config = load(str(file), "--loss.clip_high", "0.25", "--loss.clip_high", "0.75")
    assert config == Sample(3, Section(0.75, ("x", "y"), "--a b", "sort", True))


def test_base_is_read_first(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 1\nloss: {clip_high: 0.5, names: []}\n")
    (tmp_path / "over.yaml").write_text("base: base.yaml\nloss: {clip_high: 0.6}\n")
    assert load(str(tmp_path / "over.yaml")) == Sample(1, Section(0.6, ()))


def test_dump_reads_back_equal(tmp_path):
    config = Sample(5, Section(0.1, ("p", "q: r"), "two\nlines, 'quoted' #", "uniform", True))
    file = tmp_path / "resolved.yaml"
    file.write_text(cli.dump_yaml(config))
    assert load(str(file)) == config


@pytest.mark.parametrize("words", [("--loss.enabled=true",), ("--loss.enabled", "true"), ("--loss.enabled=True",)])
def test_switches_are_spelt_as_in_the_files(words):
    assert load(*words).loss.enabled


def test_unknown_key_names_the_nearest(tmp_path):
    file = tmp_path / "typo.yaml"
    file.write_text("loss: {clip_hihg: 0.5}\n")
    with pytest.raises(cli.ConfigError, match=r"'loss.clip_hihg' \(.*typo.yaml\); did you mean 'loss.clip_high'"):
        load(str(file))
    with pytest.raises(cli.ConfigError, match=r"did you mean 'loss.kind'"):
        load("--los.kind", "sort")
    with pytest.raises(cli.ConfigError, match=r"did you mean 'loss.clip_high'"):
        load("--clip_high", "0.2")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--loss.kind", "best"), "sort"),
        (("--seed", "many"), "seed"),
        (("--loss.clip_high", "-1"), "at least 0 is wanted"),
    ],
)
def test_wrong_values_end_with_status_2_and_say_what_is_wanted(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        load(*argv)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_file_and_wrong_shape(tmp_path):
    with pytest.raises(cli.ConfigError, match=r"no configuration file 'absent.yaml'"):
        load("absent.yaml")
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n")
    with pytest.raises(cli.ConfigError, match="a mapping of sections is wanted, got a list"):
        load(str(file))

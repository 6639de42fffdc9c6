"""Runs with stages: every stage is read before the first step, and a run goes on in the stage where it was stopped."""

import json

import pytest
from test_train import shared_programs as shared_programs  # a fixture

from grpo_roc_jax.config import read_config
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml, flatten
from grpo_roc_jax.train import main, train

TWO = """
steps: 6
eval: {every: 2}
data: {world_problems: 6}
stages:
- {name: short, steps: 3, set: {rollout: {max_response_tokens: 12}, optim: {lr: 0.02}}}
- name: long
  steps: 9
  until: [{kind: solved, share: 0.01, window: 2}, {kind: steady, metric: rollout/length, window: 1, tolerance: 99}]
  restart: [optimizer]
  set: {group: {problems: 3}, sampling: {temperature: 0.9}, rollout: {max_turns: 2}}
"""


def file_of(tmp_path, text):
    path = tmp_path / "stages.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return file_of(tmp_path_factory.mktemp("config"), "base: toy.yaml\n" + TWO)


def staged_config(stages, run_dir, *more):
    from test_train import TINY

    words = [word for word in TINY if word != "--steps=4" and not word.startswith(("--optim.lr", "--rollout.max_resp"))]
    return read_config(stages, *words, f"--run_dir={run_dir}", "--rollout.max_response_tokens=16", *more)


def test_each_stage_has_its_settings_over_those_of_the_run(stages):
    config = read_config(stages)
    first, second = config.staged()
    assert (first.rollout.max_response_tokens, second.rollout.max_response_tokens) == (12, 120)
    assert (first.optim.lr, second.optim.lr, first.stages, second.steps) == (0.02, 1e-3, None, 9)
    assert second.optim.schedule == config.optim.schedule and second.rollout.max_turns == 2
    assert "stages" not in dict(flatten(read_config()))


def test_the_command_line_overrides_every_stage(stages, tmp_path):
    config = read_config(stages, "--rollout.max_response_tokens=20", "--optim.lr=0.5", "--steps=2")
    assert {one.rollout.max_response_tokens for one in config.staged()} == {20} and config.steps == 2
    assert {one.optim.lr for one in config.staged()} == {0.5}
    assert read_config(file_of(tmp_path, dump_yaml(config))) == config


def test_without_steps_a_run_has_those_of_its_stages(tmp_path):
    text = "stages: [{name: a, steps: 3}, {name: b, steps: 4}]\noptim: {schedule: constant}"
    assert read_config(file_of(tmp_path, text)).steps == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "steps: 1, set: {rollout: {max_turnz: 3}}",
            r"stage b: unknown key 'rollout.max_turnz' \(stages.*line 4\)",
        ),
        ("steps: 1, set: {optim: {lr: -1}}", r"stage b: optim.lr = -1 \(stages.yaml, line 4\): must be above 0"),
        ("steps: 1, set: {rollout: {max_response_tokens: 999}}", r"stage b: .* raise batch.row_length .*line 4"),
        ("steps: 1, set: {model: {layers: 2}}", r"stage b: model \(stages.yaml, line 4\): must be the same"),
        ("steps: 1, set: {optim: {moment_dtype: bfloat16}}", "stage b: optim.moment_dtype, clipping"),
        ("steps: 1, set: {advantage: {adjust: {kind: kl}}}", "stage b: "),
        ("steps: 1, until: [plateau]", "stage b: until plateau with eval.every = 0"),
        ("steps: 1, drop_solved: 8", "stage b: drop_solved with world:products:1, which has no end"),
        ("steps: 0", r"stages.1.steps = 0 \(stages.yaml, line 4\): must be at least 1"),
        ("steps: 1, until: [{kind: solvd}]", "unknown kind 'solvd'; .* did you mean 'solved'"),
        ("set: {}", "stages.1.steps has no default"),
    ],
)
def test_a_mistake_in_a_later_stage_is_found_with_its_line(text, said, tmp_path):
    path = file_of(tmp_path, f"base: toy.yaml\nstages:\n- {{name: a, steps: 1}}\n- {{name: b, {text}}}\n")
    with pytest.raises(ConfigError, match=said):
        read_config(path)


def test_the_dry_run_goes_over_every_stage(stages, capsys):
    assert main([stages, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "stage short:\n8 problems x 32" in said and "stage long:\n3 problems x 32" in said
    assert "9 steps = 864 rollouts of at most 144 tokens" in said


def state(run_dir, step):
    return json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "host_0.json").read_text())


@pytest.fixture(scope="module")
def whole(stages, tmp_path_factory):
    """A run of both stages that nothing stopped; the second stage ends by its conditions."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return run_dir, train(staged_config(stages, run_dir, "--checkpoint.keep=9"))


def test_a_run_goes_through_its_stages(whole):
    run_dir, summary = whole
    rows = [row for row in read_metrics(run_dir) if "rollout/reward" in row]
    assert [row["stage"] for row in rows] == [1, 1, 1, 2, 2, 2] and summary["steps"] == 6
    assert [row["roc/groups"] for row in rows] == [2, 2, 2, 3, 3, 3]
    assert [row["update/lr"] for row in rows] == pytest.approx([0.02] * 3 + [1e-3] * 3)
    events = [(event["step"], event["text"]) for event in read_events(run_dir) if event["event"] == "stage"]
    assert events == [(1, "short begins, 1 of 2"), (4, "long begins, 2 of 2")]
    assert summary["compilations_after_first_step"] == 0

"""How long a run takes: the arithmetic by hand, what an earlier run left, and what of it the plan says."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.process.progress import narrated, phase
from grpo_roc_jax.record.run_dir import Start
from grpo_roc_jax.run import durations
from grpo_roc_jax.run.policy import parameter_count
from grpo_roc_jax.run.session import plan_line


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def toy(*words):
    return read_config("toy.yaml", "--model.vocab_size=64", *words)


def test_the_arithmetic_by_hand():
    config = toy("--group.problems=2", "--group.size=8", "--rollout.slots=64", "--sft.traces=10", "--eval.samples=2")
    n, usable = parameter_count(config.model), 0.4 * 96 / 400 * 1e9
    seconds = durations.estimated(config, config.model, 16, 1e9)  # prompt and response: 24 + 120 tokens, half is 72
    assert seconds["supervised stage"] == pytest.approx(6 * n * 10 * 72 / usable)
    decoding = 60 * (0.0015 + 2 * n * 32 / usable)  # 32 rollouts at once, and 32 of an evaluation
    assert seconds["training"] == pytest.approx(decoding + 6 * n * 16 * 72 / usable)
    assert seconds["evaluation"] == pytest.approx(decoding)
    assert durations.estimated(config, config.model, 0, 1e9)["evaluation"] == 0


def test_more_rollouts_than_slots_take_turns():
    config = toy("--rollout.slots=64")  # 256 rollouts
    few = durations.estimated(replace(config, group=replace(config.group, problems=2)), config.model, 0, 1e12)
    assert durations.estimated(config, config.model, 0, 1e12)["training"] > 4 * few["training"]


def test_a_run_leaves_its_seconds_for_the_next_one_with_the_same_settings():
    lines = []
    for config in (toy(), toy("--seed=3", "--steps=5", "--sft.steps=7", "--run_dir=other")):
        with narrated(lines.append) as narrator, durations.remembered(config, narrator):
            usual = dict(narrator.usual)
            with phase("training", steps=3) as training:
                training.step(3)
    assert usual.keys() == {"training"} and usual["training"] > 0
    with narrated(lines.append) as narrator:  # a stage after another, in one process
        narrator.measured["training"] = 12.5
        with durations.remembered(toy("--group.size=5"), narrator):
            pass
    assert durations.read_timings(durations.timings_file(toy("--group.size=5"))) == {}
    assert durations.read_timings(durations.timings_file(toy("--group.size=4"))) == {}
    config = toy()
    seconds, source = durations.expected(config, config.model, 12, {"training": 2.0, "evaluation on 12 problems": 90.0})
    assert seconds == {"training": 2.0, "evaluation": 90.0} and "earlier run" in source
    assert plan_line(config, Start("fresh"), config.steps, 12, Path("runs/a"), seconds) == (
        "plan: supervised stage, 400 steps; then evaluation on 12 problems, about 90 s; then 30 steps of 256 "
        "rollouts, about 60 s; then evaluation at the end; written to runs/a"
    )
    assert plan_line(config, Start("fresh"), 0, 0, Path("a"), {}) == "plan: supervised stage, 400 steps; written to a"
    assert "plan: nothing is left" in plan_line(config, Start("resume", 32), -2, 12, Path("runs/a"), seconds)


def test_a_cache_that_holds_something_else_or_cannot_be_written_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"training": "x", "sampling": -1, "update": 2}')
    assert durations.read_timings(tmp_path / "file") == {"update": 2.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with narrated(lambda line: None) as narrator, durations.remembered(toy(), narrator):
        pass

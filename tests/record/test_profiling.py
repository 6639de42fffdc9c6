"""Traces of steps, and what a run says of what it planned and measured."""

import json

import pytest

from grpo_roc_jax import train as training
from grpo_roc_jax.config import Config
from grpo_roc_jax.planner.measured import chip_of, measured_lines, rates_of
from grpo_roc_jax.planner.topology import CHIPS
from grpo_roc_jax.record.profiling import Profile
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.settings.cli import ConfigError, load_config

WORDS = """
toy.yaml --steps=3 --group.problems=2 --group.size=2 --eval.every=0 --sft.steps=1 --data.eval_problems=2
--rollout.slots=8 --rollout.max_response_tokens=64
""".split()  # noqa: SIM905 (a command line reads better as one)


@pytest.mark.slow
def test_steps_of_a_run_are_traced(tmp_path, capsys):
    assert training.main([*WORDS, "--run_dir", str(tmp_path / "run"), "--profile", "2:3"]) == 0
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000, "it holds events"
    assert "steps 2 to 3" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "time/step_s" in row] == [1, 2, 3]


@pytest.mark.parametrize("words", ["", "0:3", "5:3", "3:", "a:b", "3-5"])
def test_what_is_no_span_of_steps_is_refused(words):
    assert Profile.parse("4") == Profile(4, 4)
    with pytest.raises(ConfigError, match=r"must be the first and the last step"):
        Profile.parse(words)
    assert training.main(["toy.yaml", "--dry-run", f"--profile={words}"]) == 2


def test_devices_have_the_figures_of_their_kind():
    kinds = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "NVIDIA H100 80GB HBM3": "h100"}
    kinds |= {"NVIDIA A100-SXM4-80GB": "a100", "Tesla T4": "t4", "NVIDIA L4": "l4", "TPU7x": "v7x"}
    assert {kind: chip_of(kind) for kind in kinds} == {kind: CHIPS[name] for kind, name in kinds.items()}
    assert chip_of("cpu") is None and chip_of("NVIDIA L40S") is None and chip_of("NVIDIA A100X") is None


def test_rates_are_those_of_the_work_that_was_done():
    config = load_config(Config, ["toy.yaml"], prog="test")
    _, _, model, mesh, _ = check_components(config, make_registry(config))
    rates = rates_of(config, model, mesh, CHIPS["h100"])
    assert rates_of(config, model, mesh, None) is None
    row = {"update/micro_batches": 2.0, "time/update_s": 4.0, "time/decode_s": 2.0}
    row |= {"rollout/sampled_tokens": 1024.0, "rollout/slot_use": 0.5}
    metrics = rates.metrics(row)
    assert metrics["update/mfu"] == pytest.approx(2 * rates.model_flops / CHIPS["h100"].flops / 4)
    steps = 1024 / (0.5 * config.rollout.slots)
    weights = min(rates.decode.fixed_traffic, rates.decode.traffic) / rates.steps
    cached = (rates.decode.traffic / rates.steps - weights) * 0.5 * rates.read
    assert metrics["rollout/decode_bytes_per_s"] == pytest.approx(steps * (weights + cached) / 2)
    twice = rates.metrics(row | {"update/micro_batches": 4.0, "rollout/sampled_tokens": 2048.0})
    assert all(twice[name] == pytest.approx(2 * metrics[name]) for name in metrics)
    (line,) = measured_lines([row | metrics])
    assert "decode" in line and "update" in line and "of the peak" in line
    assert measured_lines([row]) == [] and rates.metrics({"time/update_s": 1.0}) == {}

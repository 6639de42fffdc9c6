"""`--preflight` compiles what a run of the same settings compiles, counts it, and starts nothing."""

import re

import pytest

from grpo_roc_jax import train
from grpo_roc_jax.engine.programs import ProgramCost
from grpo_roc_jax.planner.preflight import MIB, host_parts
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.policy import parameter_count
from grpo_roc_jax.settings.cli import dump_yaml
from tests.test_train import config_in

REFERENCE = ["--surrogate.kl=k3", "--surrogate.kl.coef=0.01", "--optim.offload=True"]


def test_preflight_is_a_word_of_the_command_line_and_prints_a_table(monkeypatch, capsys):
    costs = [ProgramCost("decode/64", 1.5, 2 * MIB, MIB, 5 * MIB), ProgramCost("update/1", 2.25, MIB, 0, 3 * MIB)]
    monkeypatch.setattr(train, "preflight", lambda config: costs if config.seed == 7 else [])
    assert train.main(["toy.yaml", "--preflight", "--seed=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["decode/64", "1.50", "2.00", "5.00"],
        ["update/1", "2.25", "1.00", "3.00"],
    ]
    assert lines[3].startswith("2 programs compiled in 3.8 s; the largest, decode/64, takes 5.0")
    assert lines[4].startswith("memory of the host at most, MiB: trajectories of a step 0.7,")


def test_the_memory_of_the_host_by_hand(tmp_path):
    config = config_in(tmp_path, "--group.dynamic_sampling_rounds=1", "--optim.offload=True", "--tools.memory_mb=100")
    _, _, model, mesh, _ = check_components(config_in(tmp_path), make_registry(config))
    parts = host_parts(config, model, mesh)
    count = parameter_count(model)
    assert parts["trajectories of a step"] == 2 * 2 * 8 * 40 * 21, "rounds x problems x twice the group x row x bytes"
    assert (parts["checkpoint"], parts["moments"]) == (12 * count, 8 * count)
    assert (parts["programs of the policy"], parts["sessions"]) == (2 * 100 * MIB, 512 * 100 * MIB)
    assert parts["packed batch"] % (8 * 40 * 36) == 0 and "verifiers" not in parts


@pytest.mark.slow
def test_micro_batches_that_take_turns_with_decoding_are_programs_of_their_own(tmp_path, capsys, one_device):
    words = "--rollout.step_limit=stream", "--rollout.step_limit.lag=1"
    (tmp_path / "tiny.yaml").write_text(dump_yaml(config_in(tmp_path / "run", *words)))
    assert train.main([str(tmp_path / "tiny.yaml"), "--preflight"]) == 0
    programs = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("update")]
    assert programs == ["update/begin", "update/add", "update/finish"]


@pytest.mark.slow
@pytest.mark.parametrize("reference", [False, True])
def test_preflight_names_and_counts_every_program(tmp_path, capsys, reference):
    config = config_in(tmp_path / "run", *(REFERENCE if reference else []))
    (tmp_path / "tiny.yaml").write_text(dump_yaml(config))
    assert train.main([str(tmp_path / "tiny.yaml"), "--preflight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("program"))
    rows, last = lines[header + 1 : -2], lines[-2]
    names = [row.split()[0] for row in rows]
    kinds = {"allocate", "slots", "append", "copy", "decode", "update"} | ({"score"} if reference else set())
    assert {name.split("/")[0] for name in names} == kinds
    assert len(set(names)) == len(names)
    assert last.startswith(f"{len(rows)} programs compiled in ")
    total = {row.split()[0]: float(row.split()[-1]) for row in rows}
    decode = next(name for name in names if name.startswith("decode"))
    assert all(float(row.split()[1]) > 0 for row in rows) and total[decode] > 0
    assert re.search(r"the largest, \S+, takes [\d.]+ MiB", last)
    assert not (tmp_path / "run").exists()

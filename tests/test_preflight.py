"""`--preflight` compiles what a run of the same settings compiles, counts it, and starts nothing."""

import re

import pytest
from test_train import config_in

from grpo_roc_jax.cli import dump_yaml
from grpo_roc_jax.train import main


@pytest.mark.parametrize("reference", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_preflight_names_and_counts_every_program(tmp_path, capsys, reference):
    config = config_in(tmp_path / "run", *(["--loss.kl_coef=0.01"] if reference else []))
    (tmp_path / "tiny.yaml").write_text(dump_yaml(config))
    assert main([str(tmp_path / "tiny.yaml"), "--preflight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("program"))
    rows, last = lines[header + 1 : -1], lines[-1]
    names = [row.split()[0] for row in rows]
    kinds = {"allocate", "slots", "append", "fork", "decode", "update"} | ({"score"} if reference else set())
    assert {name.split("/")[0] for name in names} == kinds
    assert len(set(names)) == len(names)
    assert last.startswith(f"{len(rows)} programs compiled in ")
    total = {row.split()[0]: float(row.split()[-1]) for row in rows}
    decode = next(name for name in names if name.startswith("decode"))
    assert all(float(row.split()[1]) > 0 for row in rows) and total[decode] > 0
    assert re.search(r"the largest, \S+, takes [\d.]+ MiB", last)
    assert not (tmp_path / "run").exists()

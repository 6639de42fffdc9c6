"""Studies: their arms are configurations, runs are shared and skipped as they should be, and the table's numbers. And
the script for a new device."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import study
from benchmarks.studies import STUDIES
from grpo_roc_jax.config import Config
from grpo_roc_jax.settings.cli import flatten, load_config
from tests.helpers.contrib import with_contrib

NAMES = [name for name in STUDIES if name not in ("methods", "overlong", "rc")]
NAMES += [pytest.param(name, marks=with_contrib) for name in ("overlong", "rc")]


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_is_a_configuration_of_its_own(name, monkeypatch):
    """In the first world, with the first seed."""
    monkeypatch.chdir(study.ROOT)
    few = replace(STUDIES[name], seeds=1, worlds=dict([next(iter(STUDIES[name].worlds.items()))]))
    configs, jobs = set(), study.jobs_of(few, study.ROOT)
    for job in jobs:
        load_config(Config, job.cold_words, prog="study")
        configs.add(str(list(flatten(replace(load_config(Config, job.words, prog="study"), name="")))))
    assert len(configs) == len(jobs), "two arms are the same"


def row(arm, seed, errors, tokens, world="w", accuracy=(0.5, 0.75, 1.0)):
    """A raw row of a run of as many steps as `errors` has, evaluated before, in the middle and at the end."""
    steps = len(errors)
    evaluated = {0: accuracy[0], steps // 2: accuracy[1], steps: accuracy[2]}
    columns = {
        "step": list(range(steps + 1)),
        study.ERRORS: [None, *errors],
        "rollout/sampled_tokens": [None] + [tokens] * steps,
        "rollout/sampled": [None] + [10.0] * steps,
        "time/step_s": [None] + [2.0] * steps,
        "eval/all/avg@4": [evaluated.get(step) for step in range(steps + 1)],
    }
    return {"world": world, "arm": arm, "seed": seed, "words": [], "columns": columns}


def test_claims_are_corrected_over_all_of_the_study_whichever_are_shown():
    """Arms, worlds and seeds of the command line change no correction; claims that were not measured have p = 1."""

    def corrected(name, world, **options):
        whole = replace(STUDIES[name], seeds=8, first_seed=0)
        part, worlds = study.chosen(whole, SimpleNamespace(**{"arms": [], "worlds": [], "seeds": None} | options))
        assert worlds == (options.get("worlds") or list(whole.worlds))
        rows = [row(arm, seed, [0.3 - 0.1 * (arm == "roc") + 0.01 * seed] * 5, 1.0, world=world)
                for arm in whole.arms for world in whole.worlds for seed in range(8)
                if name == "confirm" or world == "toy"]  # fmt: skip
        text = study.report(part, {(r["world"], r["arm"], r["seed"]): r for r in rows}, world, whole)
        return next(line for line in text.splitlines() if "fewer failing calls than GRPO" in line).split(" | ")[-2]

    few, other = ["roc", "grpo"], "lucky70_repair0.5"
    assert {corrected("roc", "toy", arms=arms, worlds=["toy"]) for arms in ([], few)} == {f"{14 * 2 / 2**8:.3f}"}
    assert corrected("confirm", other, seeds=4) == f"{3 * 2 / 2**4:.3f}", "after the three of eight seeds"


@pytest.mark.slow
def test_a_tiny_study_runs_is_continued_and_reported(tmp_path, capsys):
    words = ["roc", "--tiny", "--worlds", "toy", "--arms", "roc", "grpo", "--seeds", "2", "--jobs", "2"]
    words += ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert study.main(words) == 0
    rows = study.read_rows(tmp_path / "study_roc.jsonl.gz")
    assert sorted(rows) == [("toy", arm, seed) for arm in ("grpo", "roc") for seed in (0, 1)]
    starts = {(seed, rows["toy", arm, seed]["columns"]["eval/all/avg@4"][0]) for _, arm, seed in rows}
    assert len(starts) == 2, "both arms start from the policy of their seed"
    assert (tmp_path / "study_roc_toy.png").stat().st_size > 10_000
    assert "difference to `roc`, paired by seed" in capsys.readouterr().out
    study.save(tmp_path / "study_roc.jsonl.gz", {key: record for key, record in rows.items() if key[1] == "roc"})
    assert study.main(words) == 0, "finished runs are read again, not repeated"
    assert study.read_rows(tmp_path / "study_roc.jsonl.gz") == rows


VALUE = re.compile(r"(-?[\d.]+)(?: ± [\d.]+)? (\[-?[\d.]+, -?[\d.]+\])( \d/\d)?")


def values_in(lines):
    return {some for line in lines for value, low_high, seeds in VALUE.findall(line)
            for some in ((value, low_high, seeds), (value, low_high, ""))}  # fmt: skip


def test_tables_of_the_evidence_hold_what_the_reports_say():
    """The cells of an arm are among those of its rows in the reports of the studies that the section names."""
    seen = 0
    for section in (study.ROOT / "docs/evidence.md").read_text().split("\n## ")[1:]:
        names = re.findall(r"\(`(\w+)`\)", section) or ["*"]
        files = [file for name in names for file in (study.ROOT / "benchmarks/results").glob(f"study_{name}_*.md")]
        reports = [line for file in files for line in file.read_text().splitlines() if line.startswith("| ")]
        for line in section.splitlines():
            if line.startswith("|") and VALUE.search(line):
                arms = {cell.removeprefix("| ").strip("`") for cell in line.split(" | ")[:2]}
                of_arm = [row for row in reports if row.split(" | ")[0].removeprefix("| ") in arms]
                assert values_in([line]) <= values_in(of_arm or reports), line
                seen += 1
    assert seen > 90


@pytest.mark.slow
def test_all_parts_of_the_script_for_a_new_device_run_on_a_cpu(tmp_path):
    out = tmp_path / "cpu"
    command = [sys.executable, "-m", "benchmarks.on_device", "--tiny", "--out", str(out)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(study.ROOT)}
    done = subprocess.run(command, cwd=study.ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report, page = json.loads((tmp_path / "cpu.json").read_text()), (tmp_path / "cpu.md").read_text()
    assert list(report["parts"]) == ["train", "doctor", "kernels", "plan", "beside"]
    assert all(f"## {name} (" in page for name in report["parts"]) and "failed" not in page
    means = report["parts"]["beside"]["result"]["means"]
    assert means["time/update_s"] > 0 and means["rollout/tokens_per_s"] > 0

"""Studies: their arms are configurations, runs are shared and skipped as they should be, and the table's numbers."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import study
from benchmarks.studies import STUDIES
from benchmarks.study_published import cost_lines, published
from grpo_roc_jax.config import Config
from grpo_roc_jax.settings.cli import flatten, load_config
from tests.helpers.contrib import with_contrib


def one_of_each(name):
    """The first seed of a study in its first world, by arm."""
    few = replace(STUDIES[name], seeds=1, worlds=dict([next(iter(STUDIES[name].worlds.items()))]))
    return {job.arm: job for job in study.jobs_of(few, study.ROOT)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[with_contrib] if name in ("overlong", "rc") else [])  # which have arms of contrib/
        for name in STUDIES
        if name != "methods"
    ],
)
def test_every_arm_is_a_configuration_of_its_own(name, monkeypatch):
    monkeypatch.chdir(study.ROOT)
    configs = {}
    for arm, job in one_of_each(name).items():
        config = load_config(Config, job.words, prog="study")
        load_config(Config, job.cold_words, prog="study")
        configs[arm] = str(list(flatten(replace(config, name=""))))
    assert len(set(configs.values())) == len(configs), "two arms are the same"


def test_the_dials_of_the_phase_diagram_are_the_shares_that_they_name(monkeypatch):
    monkeypatch.chdir(study.ROOT)
    for name, words in list(STUDIES["phase"].worlds.items())[:3]:
        shares = load_config(Config, words, prog="study").data.demonstrations.shares
        assert shares["repair"] == pytest.approx(float(name.rpartition("repair")[2])), name
        assert (shares["guess"], shares["wrong"]) == pytest.approx((0.3, 0.1))


@pytest.mark.slow
def test_arms_share_a_cold_start_unless_they_change_it():
    jobs = one_of_each("overlong")
    assert jobs["roc"].cold_dir == jobs["grpo_overlong_filter"].cold_dir != jobs["no_cold_start"].cold_dir
    recipes = one_of_each("methods")
    assert recipes["gspo"].cold_dir == recipes["grpo_roc"].cold_dir != recipes["rc_grpo"].cold_dir
    two = study.jobs_of(replace(STUDIES["roc"], seeds=2), study.ROOT)
    assert len({job.run_dir for job in two}) == len(two) == 28
    assert len({job.cold_dir for job in two}) == 4  # a world and seed each
    assert [job.seed for job in two] == sorted(job.seed for job in two), "whole seeds come first"


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


def test_values_at_the_end_and_at_equal_tokens():
    """The second arm samples twice as much, so at equal tokens it has had half of its steps."""
    falling, slow = [0.2, 0.4, 0.6, 0.8, 1.0, 0.1, 0.1, 0.1, 0.1, 0.2], [0.9] * 10
    runs = {arm: study.run_data(row(arm, 0, errors, tokens)) for arm, errors, tokens in
            (("b", falling, 200.0), ("a", slow, 100.0))}  # fmt: skip
    table = study.measured(STUDIES["phase"], runs)
    columns = [(title, metric) for title, metric, _ in STUDIES["phase"].measures]
    at = {column: i for i, column in reversed(list(enumerate(columns)))}
    assert table["b"][at["failing calls in correct", study.ERRORS]] == pytest.approx(0.12)
    assert table["b"][at["at equal tokens", study.ERRORS]] == pytest.approx(0.6)  # 1000 tokens: five steps
    assert table["b"][at["at equal seconds", study.ERRORS]] == pytest.approx(0.12)
    assert table["a"][at["at equal tokens", study.ERRORS]] == pytest.approx(0.9)
    assert table["b"][at["failing calls at the start", study.ERRORS]] == 0.2
    assert table["b"][at["accuracy", "eval"]] == 1.0 and table["b"][at["at equal tokens", "eval"]] == 0.75
    assert math.isnan(table["a"][at["turns", "rollout/turns"]])


def test_the_report_pairs_seeds_and_leaves_out_those_that_miss_an_arm():
    few = replace(STUDIES["roc"], arms={"roc": (), "grpo": ()}, worlds={"w": ()}, seeds=3)
    rows = [row("roc", 0, [0.1] * 5, 1.0), row("grpo", 0, [0.3] * 5, 1.0), row("roc", 1, [0.2] * 5, 1.0)]
    rows += [row("grpo", 1, [0.4] * 5, 1.0), row("roc", 2, [0.9] * 5, 1.0)]
    by_key = {(r["world"], r["arm"], r["seed"]): r for r in rows}
    lines = study.report(few, by_key, "w").splitlines()
    assert "seeds 0, 1:" in lines[0]
    assert "| roc | 0.150 ± 0.071 [-0.485, 0.785] |" in lines[4]
    assert any(line.startswith("| grpo | 0.200 ± 0.000 [0.200, 0.200] 2/2 |") for line in lines)
    assert lines[-2:] == ["not finished, so their seeds are left out: grpo 2", "commits: unknown"]
    assert study.report(few, {}, "w") == "w: no seed is finished in every arm"


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
    with pytest.raises(SystemExit, match="--worlds nosuch: not in this study"):
        corrected("roc", "toy", worlds=["nosuch"])


VALUE = re.compile(r"(-?[\d.]+)(?: ± [\d.]+)? (\[-?[\d.]+, -?[\d.]+\])( \d/\d)?")
"""A cell with an interval, in a report and on the page of the evidence, and the seeds that have the sign."""


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


def test_the_figure_leaves_out_an_axis_that_seeds_do_not_share(tmp_path):
    """The second seed takes its first step when the first one has ended."""
    rows = [row("roc", 0, [0.1, 0.2], 1.0), row("roc", 1, [0.1, 0.2], 1.0)]
    for record, seconds in zip(rows, (1.0, 9.0), strict=True):
        record["columns"] |= {"time/step_s": [None, seconds, seconds], study.REWARD: [None, 0.5, 0.6]}
    runs = [study.run_data(record) for record in rows]
    assert [study.shares_range(runs, x) for x in ("step", "tokens", "seconds")] == [True, True, False]
    few = replace(STUDIES["roc"], arms={"roc": ()}, worlds={"w": ()})
    study.figure(few, {(r["world"], r["arm"], r["seed"]): r for r in rows}, "w", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_cells():
    assert study.cell(np.array([np.nan])) == "-" and study.cell(np.array([0.25, np.nan])) == "0.250"
    assert study.cell(np.array([10.0, 12.0])) == "11.0 ± 1.4 [-1.7, 23.7]"
    assert study.cell(np.array([2e-6])) == "2.0e-06" and study.cell(np.array([0.0])) == "0.000"


def test_rows_of_other_settings_are_refused(tmp_path):
    (tmp_path / "study_roc.jsonl").write_text(json.dumps(row("roc", 0, [0.1], 1.0, world="toy")) + "\n")
    with pytest.raises(SystemExit, match="toy roc 0 was run with other settings"):
        study.main(["roc", "--out", str(tmp_path), "--seeds", "1"])
    with pytest.raises(SystemExit, match="--arms nothing: not in this study"):
        study.main(["roc", "--arms", "nothing"])


def test_a_published_model_has_the_same_arms_and_a_cost():
    model_study = published("Qwen/Qwen2.5-0.5B-Instruct", ["qwen3_0_6b_gsm8k"], ())
    assert set(model_study.arms) == set(STUDIES["real"].arms) and "--group.size=16" in model_study.arms["grpo_2g"]
    lines = cost_lines(model_study, "h200:8", "", 0.0)
    hours = {line.split(":")[0]: float(line.split(": ")[1].split()[0]) for line in lines[:-1]}
    assert 0 < hours["grpo"] < hours["roc"] == hours["uniform"] < hours["grpo_2g"]
    total = float(lines[-1].removeprefix("all arms with 3 seeds: at least ").split()[0])
    assert total == pytest.approx(3 * sum(hours.values()), abs=0.1)


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
    first = capsys.readouterr().out
    assert "difference to `roc`, paired by seed" in first and first.count(": done") == 4
    study.save(tmp_path / "study_roc.jsonl.gz", {key: record for key, record in rows.items() if key[1] == "roc"})
    assert study.main(words) == 0, "finished runs are read again, not repeated"
    assert study.read_rows(tmp_path / "study_roc.jsonl.gz") == rows

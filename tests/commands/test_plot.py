"""The numbers of the figure (groups of runs, means, spreads, the sampled axis) and the file itself."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from grpo_roc_jax.commands import plot
from grpo_roc_jax.view.curves import by_label, curve, last_third, load_runs, running_mean
from tests.helpers.knobs import write_lines


def make_run(root, where, rows, **settings):
    path = root / where
    path.mkdir(parents=True)
    write_lines(path / "metrics.jsonl", rows)
    if settings:
        lines = [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
        (path / "config.yaml").write_text("\n".join(lines))
    return path


def rewards(values, **more):
    return [{"step": i + 1, "rollout/reward": v, "rollout/sampled": 10.0, **more} for i, v in enumerate(values)]


@pytest.fixture
def runs(tmp_path):
    """Two seeds of roc, two of none; the second roc run is one step shorter."""
    values = {"a": [0.0, 0.5, 1.0], "b": [0.5, 1.0], "c": [0.1] * 3, "d": [0.3] * 3}
    for name, kind, seed in (("a", "roc", 0), ("b", "roc", 1), ("c", "none", 0), ("d", "none", 1)):
        make_run(tmp_path, name, rewards(values[name]), seed=seed, name=name, resample={"method": kind}, lr=1.0)
    return tmp_path


def labels(runs, **options):
    return {label: [run.path.name for run in members] for label, members in by_label(runs, **options).items()}


def test_runs_that_differ_in_the_seed_alone_share_a_label(runs, tmp_path):
    """Settings that group are named with or without their kind."""
    loaded = load_runs([str(runs / "*")])
    assert labels(loaded) == {"resample.method=roc": ["a", "b"], "resample.method=none": ["c", "d"]}
    assert labels(loaded, each=True) == {name: [name] for name in "abcd"}
    assert labels(loaded, group_by=["seed"]) == {"seed=0": ["a", "c"], "seed=1": ["b", "d"]}
    make_run(runs, "e", rewards([1.0]), seed=2, name="e", resample={"method": "none"}, lr=2.0)
    with_e = {"roc, lr=1.0": ["a", "b"], "none, lr=1.0": ["c", "d"], "none, lr=2.0": ["e"]}
    assert labels(load_runs([str(runs / "*")])) == {f"resample.method={name}": of for name, of in with_e.items()}
    for name, kind in (("a", "roc"), ("b", "uniform")):
        make_run(tmp_path, f"kinds/{name}", rewards([1.0]), name=name, resample={"kind": kind}, optim={"lr": 1.0})
    loaded = load_runs([str(tmp_path / "kinds/*")])
    for named in ("resample.kind", "resample"):
        assert labels(loaded, group_by=[named]) == {f"{named}=roc": ["a"], f"{named}=uniform": ["b"]}
    with pytest.raises(ValueError, match=r"--group_by optim\.lrr: no run has such a setting; near: optim\.lr"):
        labels(loaded, group_by=["optim.lrr"])


def test_the_figure_has_every_panel_and_is_written_without_a_display(runs, tmp_path, monkeypatch, capsys):
    """Mean and spread over the runs that have the step."""
    members = load_runs([f"{runs}/a", f"{runs}/b"])
    series = curve(members, "rollout/reward")
    assert series.x.tolist() == [1, 2, 3] and series.runs == 2
    assert series.mean.tolist() == [0.25, 0.75, 1.0]
    assert np.allclose(series.std, [np.sqrt(0.125), np.sqrt(0.125), 0.0])
    assert curve(members, "missing") is None
    figure = plot.draw(load_runs([str(runs / "*")]), plot.PlotConfig((str(runs),)))
    first, third = figure.axes[0], figure.axes[2]
    assert len(figure.axes) == 8 and first.get_title() == "reward, all sampled"
    assert len(first.collections) == 2  # one band per label
    assert first.lines[0].get_ydata().tolist() == [0.25, 0.75, 1.0]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"resample.method={kind}  (2 runs, mean ± std)" for kind in ("roc", "none")]
    assert any("not recorded" in text.get_text() for text in third.texts)
    code = (
        "import sys; from grpo_roc_jax.commands import plot; "
        f"status = plot.main(['{runs}/*', '--out', '{runs}/deep/f.png', '--x', 'sampled']); "
        "assert 'matplotlib.pyplot' not in sys.modules and 'jax' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (runs / "deep" / "f.png").read_bytes()[:4] == b"\x89PNG"
    row = next(line for line in done.stdout.splitlines() if line.startswith("resample.method=none"))
    assert row.split()[1:5] == ["2", "0.2000", "±", "0.1414"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert plot.main([str(runs / "a"), "--out", "figure"]) == 0
    assert "written: figure.png" in capsys.readouterr().out
    for out in ("folder", "p.xyz", "/dev/null/x.png"):
        assert plot.main([str(runs / "a"), "--out", out]) == 2
        assert f"--out {out}" in capsys.readouterr().err
    assert plot.main([str(runs / "z*")]) == 2
    assert "matches no directory" in capsys.readouterr().err
    make_run(tmp_path, "q [1]", rewards([1.0]))
    assert labels(load_runs(["q [1]"])) == {"q [1]": ["q [1]"]}, "a directory that exists is no pattern"


def test_labels_from_patterns_and_runs_without_configuration(runs, monkeypatch):
    """A label ends at the first equals sign before what is a path."""
    make_run(runs, "x/run", rewards([1.0]))
    make_run(runs, "y/run", rewards([1.0]))
    loaded = load_runs([f"first={runs}/[ab]", f"{runs}/a", f"{runs}/x/run", f"{runs}/y/run/metrics.jsonl"])
    assert labels(loaded) == {"first": ["a", "b"], "x/run": ["run"], "y/run": ["run"]}
    assert labels(loaded[2:3]) == {"run": ["run"]}
    assert labels(load_runs([f"{runs}/a", f"{runs}/b"])) == {"a": ["a", "b"]}
    monkeypatch.chdir(runs)
    make_run(runs, "lr=0.1", rewards([1.0]))
    named = {"lr=0.1": "", "lr=*": "", "base=lr=0.1": "base", "base=l*/metrics.jsonl": "base", "a=b=lr=0.1": "a=b"}
    for pattern, label in named.items():
        assert [(run.label, run.path.name) for run in load_runs([pattern])] == [(label, "lr=0.1")]


def test_means_over_steps_and_over_what_was_sampled(tmp_path):
    """Of the last steps, whether they have null or no value at all."""
    steps, values = np.arange(6), np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan])
    assert running_mean(steps, values, 2)[:5].tolist() == [1.0, 1.0, 3.0, 4.0, 5.0]
    assert math.isnan(running_mean(steps, values, 2)[5])
    assert running_mean(steps, values, 1) is values
    known = ~np.isnan(values)
    assert running_mean(steps[known], values[known], 2).tolist() == [1.0, 3.0, 4.0]
    rows = [{"step": i, "rollout/reward": float(i)} for i in range(1, 31)]
    rows[29]["eval/all/avg@1"] = 0.5
    rows[4]["early/only"] = 1.0
    assert last_third(rows, "rollout/reward") == np.mean(range(21, 31))
    assert last_third(rows, "eval") == 0.5
    assert math.isnan(last_third(rows, "early/only")) and math.isnan(last_third(rows, "none"))
    make_run(tmp_path, "a", [{"step": i, "rollout/reward": i / 4, "rollout/sampled": 10} for i in range(1, 5)])
    make_run(tmp_path, "b", [{"step": i, "rollout/reward": i / 2, "rollout/sampled": 20} for i in range(1, 3)])
    series = curve(load_runs([str(tmp_path / "[ab]")]), "rollout/reward", x="sampled")
    assert series.x.tolist() == [20, 20 + 20 / 3, 20 + 40 / 3, 40]
    assert np.allclose(series.mean, series.x / 40) and np.allclose(series.std, 0)
    single = curve(load_runs([str(tmp_path / "a")]), "rollout/reward", x="sampled")
    assert single.x.tolist() == [10, 20, 30, 40]
    rows = rewards([0.1, 0.2, 0.3, 0.4])
    rows[3]["eval/all/avg@2"] = 0.7
    make_run(tmp_path, "few", [{"step": 0, "eval/all/avg@2": 0.5}, *rows])
    series = curve(load_runs([str(tmp_path / "few")]), "eval", x="sampled")
    assert series.x.tolist() == [0, 40] and series.mean.tolist() == [0.5, 0.7]

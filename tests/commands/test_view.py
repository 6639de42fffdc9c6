"""What is shown is what was trained on; filters, contradictions, escaping. The figure of `plot`: its numbers (groups of
runs, means, spreads, the sampled axis) and the file."""

import io
import json
import socket
from dataclasses import replace
from functools import partial
from urllib.parse import parse_qsl

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.commands import plot, view
from grpo_roc_jax.record import trace
from grpo_roc_jax.record.segments import faults, segments
from grpo_roc_jax.view.curves import by_label, curve, last_third, load_runs, running_mean
from tests.helpers.knobs import write_lines
from tests.helpers.samples import make_group


def with_trajectory(record, **changes):
    return replace(record, trajectory=replace(record.trajectory, **changes))


log_of = partial(trace.TraceWriter, decode=lambda ids: f"<{len(ids)} ids>")


@pytest.fixture
def run(tmp_path):
    """Steps 1 and 2 with two groups of eight, and an evaluation."""
    writer = log_of(tmp_path)
    for step in (1, 2):
        records = trace.eval_records(step, [make_group(10 * step + i, 8) for i in range(2)])
        for i, why in enumerate(["kept", "quota"] * 8):
            records[i] = replace(records[i], kept=why == "kept", why=why, penalties={"total": 0.25})
        records[3] = replace(records[3], verdict=replace(records[3].verdict, reward=1 / 3))
        writer.write(step, records)
    writer.write(2, trace.eval_records(2, [make_group(99, 3)]), kind="eval")
    return tmp_path


def shown(run, **options):
    return view.choose(view.ViewConfig((str(run),), limit=0, **options))


def test_segments_cover_the_tokens_and_hold_their_text(run):
    """Problem and observations are shown; such turns make one segment. Contradictions are named."""
    record = shown(run, step=1).records[0]
    parts, trajectory = segments(record), record.trajectory
    assert [s.start for s in parts] == [0, *[s.end for s in parts[:-1]]] and parts[-1].end == trajectory.length
    assert [s.kind for s in parts] == ["prompt", "policy", "observation", "policy", "observation", "policy"]
    assert [s.text for s in parts if s.kind == "policy"] == [turn.text for turn in trajectory.turns]
    assert parts[0].text == "<20 ids>" and parts[2].text == "<15 ids>"
    for segment in parts:
        inside = trajectory.policy_mask[segment.start : segment.end]
        assert inside.all() if segment.kind == "policy" else not inside.any()
    expected = trajectory.logprobs[parts[1].start : parts[1].end].mean()
    assert parts[1].logprob == pytest.approx(expected) and parts[1].versions == (3,)
    first = trace.eval_records(1, [make_group(5, 2)])[0]
    assert faults(first) == []
    mask = first.trajectory.policy_mask | (np.arange(first.trajectory.length) < 2)
    two = ["turns and policy mask disagree on 2 tokens", "the policy mask covers tokens of the prompt"]
    assert faults(with_trajectory(first, policy_mask=mask)) == two
    leaky = with_trajectory(first, logprobs=np.full_like(first.trajectory.logprobs, -1))
    assert faults(leaky) == ["log-probabilities off the policy mask"]


def test_filters(run, capsys):
    """The page is asked for the rewards that the filter passes. Filters that match nothing name what there is."""
    every = list(trace.read_trace(run))
    for options, keep in (
        ({"step": 2}, lambda r: r.step == 2),
        ({"uid": "/11"}, lambda r: r.problem.uid == "world:gcd/11"),
        ({"reward": 0.333333}, lambda r: r.verdict.reward == 1 / 3),
        ({"status": "no_answer"}, lambda r: r.verdict.status == "no_answer"),
        ({"errors": True, "kept": "yes"}, lambda r: r.verdict.tool_errors > 0 and r.kept),
    ):
        expected = [(r.step, r.problem.uid, r.trajectory.sample) for r in every if keep(r)]
        choice = shown(run, **options)
        assert [(r.step, r.problem.uid, r.trajectory.sample) for r in choice.records] == expected
        assert 0 < choice.matched == len(expected) < len(every)
    config = view.ViewConfig(("run",), reward=1 / 3)
    asked = dict(parse_qsl(config.address.partition("?")[2]))
    assert (float(asked["low"]), float(asked["high"])) == config.rewards and config.rewards[0] < 1 / 3
    assert view.main([str(run), "--step", "2", "--status", "corect", "--text"]) == 0
    out = capsys.readouterr().out
    count = sum(record.verdict.status == "correct" for record in every if record.step == 2)
    assert out.startswith("no trajectory matches") and "steps in the log: 1, 2\n" in out
    assert "statuses in step 2: " in out and f"correct {count}" in out


def test_commands_and_the_newest_step(run, tmp_path, capsys):
    """What they print and write, and what cannot be shown."""
    assert view.main([str(run), "--html", str(run / "page.html")]) == 0
    assert (run / "page.html").read_text().startswith("<!doctype html>")
    assert view.main([str(run), "--text"]) == 0
    out = capsys.readouterr().out
    assert "2 steps with trajectories" in out and "16 of 16 trajectories match; 13 more" in out
    assert view.main([str(tmp_path / "none")]) == 2
    assert "neither metrics.jsonl nor trajectories" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as holder:
        assert view.main([str(run), "--port", str(holder.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err
    assert {record.step for record in shown(run).records} == {2} and shown(run, kind="eval").matched == 3
    lost = "step: KeyError: 'x' (mine.py, line 3)\nTraceback (most recent call last):\nKeyError: 'x'"
    failed = with_trajectory(shown(run).records[0], stop="infrastructure", fault=lost)
    log_of(run).write(3, [replace(failed, verdict=None, why="removed: infrastructure")])
    (trajectory,) = answers_in(view.page(view.ViewConfig((str(run),))))["trajectories"].values()
    assert trajectory["verdict"] is None and trajectory["fault"] == lost
    assert "step: KeyError: 'x' (mine.py, line 3)" in printed(shown(run).records[0])
    assert view.Runs([str(run)]).search(0, "mine.py", [("step", 3)]) == {"step.3": [0]}


def printed(record):
    out = io.StringIO()
    view.show([record], Console(file=out, width=140))
    return out.getvalue()


def test_the_terminal_shows_text_calls_verdict_and_reason(run):
    """Markup and escapes in the text of the policy stay text, as on the page."""
    record = next(r for r in shown(run).records if r.verdict.tool_errors)
    verdicts = [replace(record.verdict, status=status) for status in ("correct", "wrong")]
    right, wrong = (printed(replace(record, verdict=verdict)) for verdict in verdicts)
    for text in ("observation, 15 tokens", "<answer>", "exception", "ValueError", " · kept", "reference '7'"):
        assert text in right
    assert "(kept)" not in right and "penalties: total 0.25" in right and "penalties" not in wrong  # not ranked
    evil = "[bold]x[/nope] </pre><script>alert(1)</script> \x1b[31m"
    record = with_trajectory(record, turns=tuple(replace(turn, text=evil) for turn in record.trajectory.turns))
    assert "[bold]x[/nope]" in printed(record) and "\x1b[31m" not in printed(record)
    log_of(run).write(4, [record])
    html = view.page(view.ViewConfig((str(run),)))
    assert "<script>alert" not in html and "\\u003cscript>alert(1)" in html


def answers_in(html):
    """The answers that a page in a file holds."""
    return json.loads(html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


def test_the_page_holds_the_chosen_trajectories_and_the_index_of_their_steps(run):
    answers = answers_in(view.page(view.ViewConfig((str(run),), limit=0, step=2)))
    assert list(answers["trajectories"]) == [f"0.step.2.{index}" for index in range(16)]
    assert answers["start"] == "#/rollouts?step=2" and answers["state"][0]["blocks"] == {"step.2": "held"}
    for record, shown_as in zip(shown(run, step=2).records, answers["trajectories"].values(), strict=True):
        assert [s["text"] for s in shown_as["segments"]] == [s.text for s in segments(record)]
        assert (shown_as["why"], shown_as["penalties"]) == (record.why, dict(record.penalties))


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_line_costs_that_line(run, tmp_path, capsys, caplog, cut):
    """Zeros, of the same size, are not noticed before they are read."""
    page, log = tmp_path / "page.html", run / "trajectories" / "step_00000001.jsonl"
    lines = log.read_bytes().splitlines(True)
    lines[-cut] = lines[-1][:-100] if cut else bytes(len(lines[0]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))
    known = 15 if cut else 16
    for words, matched in ((["--uid", "gcd"], known + 16), (["--step", "1"], known)):
        assert view.main([str(run), "--html", str(page), *words, "--limit", "0"]) == 0
        assert f" of {matched} matching trajectories)" in capsys.readouterr().out
    assert caplog.messages == [f"{log}, line {16 if cut else 1}: cannot be read and is left out"]
    answers = answers_in(page.read_text())
    assert len(answers["trajectories"]) == 15 and answers["evaluations"]["rows"]
    assert answers["blocks"]["0"]["step.1"].get("unreadable", []) == [16] * cut
    assert len(list(trace.read_trace(run, 1))) == 15 and len(list(trace.read_trace(run))) == 31


def make_run(path, rewards, sampled=10.0, **settings):
    path.mkdir()
    rows = [{"step": i, "rollout/reward": v, "rollout/sampled": sampled} for i, v in enumerate(rewards, 1)]
    write_lines(path / "metrics.jsonl", rows)
    (path / "config.yaml").write_text(json.dumps(settings))


@pytest.fixture
def seeds(tmp_path):
    """Two seeds of roc, two of none; the second roc run is one step shorter."""
    values = {"a": [0.0, 0.5, 1.0], "b": [0.5, 1.0], "c": [0.1] * 3, "d": [0.3] * 3}
    for name, kind, seed in (("a", "roc", 0), ("b", "roc", 1), ("c", "none", 0), ("d", "none", 1)):
        make_run(tmp_path / name, values[name], seed=seed, name=name, resample={"method": kind}, lr=1.0)
    return tmp_path


def labels(runs, **options):
    return {label: [run.path.name for run in members] for label, members in by_label(runs, **options).items()}


def test_runs_that_differ_in_the_seed_alone_share_a_label(seeds):
    loaded = load_runs([str(seeds / "*")])
    assert labels(load_runs([f"a=b={seeds}/[ab]"])) == {"a=b": ["a", "b"]}, "up to the last equals sign before a path"
    assert labels(loaded) == {"resample.method=roc": ["a", "b"], "resample.method=none": ["c", "d"]}
    assert labels(loaded, each=True) == {name: [name] for name in "abcd"}
    assert labels(loaded, group_by=["seed"]) == {"seed=0": ["a", "c"], "seed=1": ["b", "d"]}
    with pytest.raises(ValueError, match="--group_by sed: no run has such a setting; near: seed"):
        labels(loaded, group_by=["sed"])


def test_the_figure_has_every_panel_and_is_written(seeds, capsys):
    """Mean and spread over the runs that have the step."""
    series = curve(load_runs([f"{seeds}/a", f"{seeds}/b"]), "rollout/reward")
    assert (series.x.tolist(), series.mean.tolist()) == ([1, 2, 3], [0.25, 0.75, 1.0])
    assert np.allclose(series.std, [np.sqrt(0.125), np.sqrt(0.125), 0.0])
    figure = plot.draw(load_runs([str(seeds / "*")]), plot.PlotConfig((str(seeds),)))
    first = figure.axes[0]
    assert len(figure.axes) == 8 and len(first.collections) == 2, "one band per label"
    assert first.lines[0].get_ydata().tolist() == [0.25, 0.75, 1.0]
    assert any("not recorded" in text.get_text() for text in figure.axes[2].texts)
    assert plot.main([f"{seeds}/*", "--out", f"{seeds}/deep/f.png", "--x", "sampled"]) == 0
    assert (seeds / "deep" / "f.png").read_bytes()[:4] == b"\x89PNG"
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resample.method=none"))
    assert row.split()[1:5] == ["2", "0.2000", "±", "0.1414"]
    for words, message in (([f"{seeds}/a", "--out", "p.xyz"], "--out p.xyz"), ([f"{seeds}/z*"], "no directory")):
        assert plot.main(words) == 2
        assert message in capsys.readouterr().err


def test_means_over_steps_and_over_what_was_sampled(tmp_path):
    """Of the last steps, whether they have null or no value at all."""
    steps, values = np.arange(6), np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan])
    assert running_mean(steps, values, 2)[:5].tolist() == [1.0, 1.0, 3.0, 4.0, 5.0]
    rows = [{"step": i, "rollout/reward": float(i)} for i in range(1, 31)]
    rows[29]["eval/all/avg@1"] = 0.5
    assert (last_third(rows, "rollout/reward"), last_third(rows, "eval")) == (np.mean(range(21, 31)), 0.5)
    make_run(tmp_path / "a", [0.25, 0.5, 0.75, 1.0])
    make_run(tmp_path / "b", [0.5, 1.0], sampled=20.0)
    series = curve(load_runs([str(tmp_path / "[ab]")]), "rollout/reward", x="sampled")
    assert series.x.tolist() == [20, 20 + 20 / 3, 20 + 40 / 3, 40]
    assert np.allclose(series.mean, series.x / 40) and np.allclose(series.std, 0)

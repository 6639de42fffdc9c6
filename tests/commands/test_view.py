"""What is shown is what was trained on; filters, contradictions, escaping, and the speed with a large run."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import socket
from unittest import mock
from urllib.parse import parse_qsl

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.commands import view
from grpo_roc_jax.record import trace
from grpo_roc_jax.record.segments import faults, headline, segments
from tests.helpers.samples import make_group


@pytest.fixture
def run(tmp_path):
    """Steps 1 and 2 with two groups of eight, and an evaluation."""
    writer = trace.TraceWriter(tmp_path, decode=lambda ids: f"<{len(ids)} ids>")
    for step in (1, 2):
        records = trace.eval_records(step, [make_group(10 * step + i, 8) for i in range(2)])
        records = [
            dataclasses.replace(record, kept=not i % 2, why=("kept", "quota")[i % 2], penalties={"total": 0.25})
            for i, record in enumerate(records)
        ]
        third = dataclasses.replace(records[3].verdict, reward=1 / 3)
        records[3] = dataclasses.replace(records[3], verdict=third)
        writer.write(step, records)
    writer.write(2, trace.eval_records(2, [make_group(99, 3)]), kind="eval")
    return tmp_path


def shown(run, **options):
    return view.choose(view.ViewConfig((str(run),), limit=0, **options))


def test_segments_cover_the_tokens_and_hold_their_text(run):
    record = shown(run, step=1).records[0]
    parts = segments(record)
    trajectory = record.trajectory
    assert [s.start for s in parts] == [0, *[s.end for s in parts[:-1]]] and parts[-1].end == trajectory.length
    assert [s.kind for s in parts] == ["prompt", "policy", "observation", "policy", "observation", "policy"]
    assert [s.text for s in parts if s.kind == "policy"] == [turn.text for turn in trajectory.turns]
    assert parts[0].text == "<20 ids>" and parts[2].text == "<15 ids>"
    for segment in parts:
        inside = trajectory.policy_mask[segment.start : segment.end]
        assert inside.all() if segment.kind == "policy" else not inside.any()
    expected = trajectory.logprobs[parts[1].start : parts[1].end].mean()
    assert parts[1].logprob == pytest.approx(expected) and parts[1].versions == (3,)


def test_without_a_tokenizer_problem_and_observations_are_shown():
    record = trace.eval_records(1, [make_group(5, 2)])[1]
    texts = [s.text for s in segments(record) if s.kind != "policy"]
    assert texts == [record.problem.prompt + " It rains."] + [r.observation for r in record.trajectory.results]


def test_two_turns_without_an_observation_between_them_make_one_segment():
    record = trace.eval_records(1, [make_group(5, 1)])[0]
    first, *rest = record.trajectory.turns
    half = (first.start + first.end + 1) // 2
    cut = (dataclasses.replace(first, end=half, text="left "), dataclasses.replace(first, start=half, text="right"))
    trajectory = dataclasses.replace(record.trajectory, turns=(*cut, *rest))
    assert segments(dataclasses.replace(record, trajectory=trajectory))[1].text == "left right"


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"step": 2}, lambda r: r.step == 2),
        ({"uid": "/11"}, lambda r: r.problem.uid == "world:gcd/11"),
        ({"sample": 3}, lambda r: r.trajectory.sample == 3),
        ({"reward": 0.0}, lambda r: r.verdict.reward == 0),
        ({"reward": 0.333333}, lambda r: r.verdict.reward == 1 / 3),
        ({"status": "no_answer"}, lambda r: r.verdict.status == "no_answer"),
        ({"kept": "no"}, lambda r: not r.kept),
        ({"errors": True, "kept": "yes"}, lambda r: r.verdict.tool_errors > 0 and r.kept),
    ],
)
def test_filters(run, options, keep):
    every = list(trace.read_trace(run))
    expected = [(r.step, r.problem.uid, r.trajectory.sample) for r in every if keep(r)]
    choice = shown(run, **options)
    assert [(r.step, r.problem.uid, r.trajectory.sample) for r in choice.records] == expected
    assert 0 < choice.matched == len(expected) < len(every)


def test_without_filters_the_newest_step_is_shown(run):
    choice = shown(run)
    assert {record.step for record in choice.records} == {2} and choice.total == 16
    assert shown(run, kind="eval").matched == 3
    with pytest.raises(FileNotFoundError, match=r"log\.traces"):
        shown(run / "nothing")


def test_a_removed_trajectory_has_no_verdict_and_is_shown(run):
    lost = "step: KeyError: 'x' (mine.py, line 3)\nTraceback (most recent call last):\nKeyError: 'x'"
    first = shown(run).records[0]
    failed = dataclasses.replace(first.trajectory, stop="infrastructure", fault=lost)
    record = dataclasses.replace(first, trajectory=failed, verdict=None, why="removed: infrastructure")
    trace.TraceWriter(run).write(3, [record])
    choice = shown(run)
    assert choice.matched == 1 and shown(run, step=3, reward=0.0).matched == 0
    assert "removed: infrastructure" in headline(choice.records[0])
    (trajectory,) = answers_in(view.page(view.ViewConfig((str(run),))))["trajectories"].values()
    assert trajectory["verdict"] is None and trajectory["fault"] == lost
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view.render(choice.records[0]))
    assert "step: KeyError: 'x' (mine.py, line 3)" in console.export_text()
    assert view.Runs([str(run)]).search(0, "mine.py", [("step", 3)]) == {"step.3": [0]}


def test_contradictions_are_named():
    record = trace.eval_records(1, [make_group(5, 1)])[0]
    assert faults(record) == []
    mask = record.trajectory.policy_mask.copy()
    mask[:2] = True
    broken = dataclasses.replace(record.trajectory, policy_mask=mask)
    texts = faults(dataclasses.replace(record, trajectory=broken))
    assert texts == ["turns and policy mask disagree on 2 tokens", "the policy mask covers tokens of the prompt"]
    leaky = dataclasses.replace(record.trajectory, logprobs=np.full_like(record.trajectory.logprobs, -1))
    assert faults(dataclasses.replace(record, trajectory=leaky)) == ["log-probabilities off the policy mask"]


def test_the_terminal_shows_text_calls_verdict_and_reason(run):
    record = next(r for r in shown(run).records if r.verdict.tool_errors)

    def printed(**verdict):
        out = io.StringIO()
        changed = dataclasses.replace(record, verdict=dataclasses.replace(record.verdict, **verdict))
        view.show([changed], Console(file=out, width=140))
        return out.getvalue()

    text = printed(status="correct")
    assert "observation, 15 tokens" in text and "<answer>" in text and "exception" in text and "ValueError" in text
    assert " · kept" in text and "(kept)" not in text and "penalties: total 0.25" in text and "reference '7'" in text
    assert "penalties" not in printed(status="wrong")  # failures are not ranked
    assert "no answer that can be read, reference '7': wrong" in printed(status="wrong", answer=None)


def test_markup_and_escapes_in_policy_text_stay_text(run):
    evil = "[bold]x[/nope] </pre><script>alert(1)</script> \x1b[31m"
    record = shown(run).records[0]
    turns = tuple(dataclasses.replace(turn, text=evil) for turn in record.trajectory.turns)
    record = dataclasses.replace(record, trajectory=dataclasses.replace(record.trajectory, turns=turns))
    out = io.StringIO()
    view.show([record], Console(file=out, width=140))
    assert "[bold]x[/nope]" in out.getvalue() and "\x1b[31m" not in out.getvalue()
    trace.TraceWriter(run).write(4, [record])
    html = view.page(view.ViewConfig((str(run),)))
    assert "<script>alert" not in html and "\\u003cscript>alert(1)" in html


def answers_in(html):
    """The answers that a page in a file holds."""
    return json.loads(html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


def test_the_page_holds_the_chosen_trajectories_and_the_index_of_their_steps(run):
    answers = answers_in(view.page(view.ViewConfig((str(run),), limit=0, step=2)))
    assert list(answers["blocks"]["0"]) == ["step.2"] and answers["blocks"]["0"]["step.2"]["count"] == 16
    assert list(answers["trajectories"]) == [f"0.step.2.{index}" for index in range(16)]
    assert answers["start"] == "#/rollouts?step=2" and answers["state"][0]["blocks"] == {"step.2": "held"}
    for record, shown_as in zip(shown(run, step=2).records, answers["trajectories"].values(), strict=True):
        assert [s["text"] for s in shown_as["segments"]] == [s.text for s in segments(record)]
        assert (shown_as["why"], shown_as["penalties"]) == (record.why, dict(record.penalties))
        assert shown_as["verdict"]["status"] == record.verdict.status
    config = view.ViewConfig((str(run),), limit=5, kept="no", errors=True)
    assert len(answers_in(view.page(config))["trajectories"]) == min(5, view.choose(config).matched) > 0


def test_the_page_of_two_runs_holds_both(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    trace.TraceWriter(other).write(5, trace.eval_records(5, [make_group(1, 2)]))
    answers = answers_in(view.page(view.ViewConfig((str(run), str(other)), limit=0)))
    assert answers["blocks"].keys() == {"0", "1"} and list(answers["blocks"]["1"]) == ["step.5"]
    assert len(answers["trajectories"]) == 18


def test_commands(run, capsys):
    assert view.main([str(run), "--html", str(run / "page.html")]) == 0
    assert (run / "page.html").read_text().startswith("<!doctype html>")
    assert view.main([str(run), "--text"]) == 0
    out = capsys.readouterr().out
    assert "2 steps with trajectories" in out and "16 of 16 trajectories match; 13 more" in out
    for how in (["--text"], []):
        assert view.main([str(run / "nothing"), *how]) == 2
    assert "neither metrics.jsonl nor trajectories" in capsys.readouterr().err


def test_the_page_opens_with_the_filters_and_on_another_port_where_its_own_is_taken(run, capsys, monkeypatch):
    monkeypatch.setattr(view.PageServer, "serve_forever", mock.Mock(side_effect=KeyboardInterrupt))
    assert view.main([str(run), "--port", "0", "--step", "2", "--errors", "--kept", "yes"]) == 0
    assert re.match(r"http://127\.0\.0\.1:\d+/#/rollouts\?step=2&kept=yes&calls=failed  \(", capsys.readouterr().out)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        assert view.main([str(run), "--port", str(holder.getsockname()[1])]) == 2
        assert "in use" in capsys.readouterr().err
    with contextlib.ExitStack() as holder:
        with contextlib.suppress(OSError):  # somebody else has it
            holder.enter_context(socket.create_server(("127.0.0.1", view.PORT)))
        assert view.main([str(run)]) == 0
    assert str(view.PORT) not in capsys.readouterr().out


@pytest.mark.parametrize("reward", [1 / 3, 0.333333, -1e6 / 7, 0.0])
def test_the_page_is_asked_for_the_rewards_that_the_filter_passes(reward):
    config = view.ViewConfig(("run",), reward=reward)
    asked = dict(parse_qsl(config.address.partition("?")[2]))
    assert (float(asked["low"]), float(asked["high"])) == config.rewards
    assert config.rewards[0] < float(f"{reward:.6g}") < config.rewards[1] or not reward


@pytest.mark.parametrize("where", [["--step", "7"], ["--status", "corect"], ["--step", "2", "--status", "corect"]])
def test_filters_that_match_nothing_name_what_there_is(run, capsys, where):
    assert view.main([str(run), *where, "--html", str(run / "page.html")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no trajectory matches") and "steps in the log: 1, 2\n" in out
    records = list(trace.read_trace(run, 2 if "2" in where else None))
    count = sum(record.verdict.status == "correct" for record in records)
    assert f"statuses in {'step 2' if '2' in where else 'the log'}: " in out and f"correct {count}" in out
    assert not (run / "page.html").exists()


def test_what_cannot_be_shown_is_a_message(run, tmp_path, capsys):
    for words in (
        [str(tmp_path / "none"), "--status", "correct", "--text"],
        [str(run), str(tmp_path / "none"), "--step", "7"],
    ):
        assert view.main([*words, "--text"]) == 2
        assert str(tmp_path / "none") in capsys.readouterr().err
    with pytest.raises(SystemExit):
        view.main([str(run), "--html", "a.html", "--atif", "b.jsonl"])
    assert "--html and --atif: one command writes one of them" in " ".join(capsys.readouterr().err.split())
    for option, value in (("--port", "99999"), ("--port", "-1"), ("--limit", "-1")):
        with pytest.raises(SystemExit):
            view.main([str(run), option, value])
        assert f"{option} {value}; must be" in " ".join(capsys.readouterr().err.split())


def cut(line):
    """What a full disk leaves of a line."""
    return line[: len(line) // 2]


DAMAGES = {
    "cut": cut,
    "cut between tokens": lambda line: line[:-100],
    "zeros": lambda line: bytes(len(line) - 1) + b"\n",
}
"""The last one, of the same size, is not noticed before it is read."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("how", [["--text"], ["--html", "page.html"], ["--atif", "out.jsonl"]], ids=lambda how: how[0])
def test_a_damaged_line_costs_that_line(run, tmp_path, capsys, caplog, monkeypatch, damage, how):
    monkeypatch.chdir(tmp_path)
    log = run / "trajectories" / "step_00000001.jsonl"
    lines = log.read_bytes().splitlines(True)
    at = 0 if damage == "zeros" else -1
    lines[at] = DAMAGES[damage](lines[at])
    log.write_bytes(b"".join(lines))
    known = 16 if damage == "zeros" else 15
    for words, matched, left in ((["--uid", "gcd"], known + 16, 31), (["--step", "1"], known, 15)):
        assert view.main([str(run), *how, *words, "--limit", "0"]) == 0
        out = capsys.readouterr().out
        assert f"{matched} of {matched} trajectories match" in out or f" of {matched} matching trajectories)" in out
        assert "--atif" not in how or f"({left} of" in out
    assert caplog.messages == [f"{log}, line {1 if at == 0 else 16}: cannot be read and is left out"]
    if "--html" in how:
        answers = answers_in((tmp_path / "page.html").read_text())
        assert len(answers["trajectories"]) == 15 and answers["evaluations"]["rows"]
        assert answers["blocks"]["0"]["step.1"].get("unreadable", []) == ([16] if at else [])
    assert len(list(trace.read_trace(run, 1))) == 15 and len(list(trace.read_trace(run))) == 31


def test_a_log_of_the_other_kind_is_named(tmp_path, capsys):
    trace.TraceWriter(tmp_path).write(3, trace.eval_records(3, [make_group(1, 2)]), kind="eval")
    assert view.main([str(tmp_path), "--text"]) == 2
    assert "--kind eval shows those that it holds" in capsys.readouterr().err


def test_a_search_decodes_only_the_trajectories_that_it_shows(tmp_path, monkeypatch):
    """How long 100,000 take is `benchmarks/bench_view.py`'s."""
    writer = trace.TraceWriter(tmp_path)
    writer.write(1, trace.eval_records(1, [make_group(seed, 32, turns=4, width=80) for seed in range(4)]))
    for step in range(2, 6):  # logs without an index, which the first look makes
        shutil.copy(tmp_path / "trajectories/step_00000001.jsonl", tmp_path / f"trajectories/step_{step:08d}.jsonl")
    decoded, from_json = [], trace.from_json
    monkeypatch.setattr(trace, "from_json", lambda line: decoded.append(line["step"]) or from_json(line))
    choice = view.choose(view.ViewConfig((str(tmp_path),), errors=True, html="x"))
    assert choice.total == 5 * 128 and choice.matched > 200 and not decoded
    assert len(choice.records) == len(decoded) == 200

"""What is shown is what was trained on; filters, contradictions, escaping, and the speed with a large run."""

import contextlib
import io
import json
import re
import socket
from dataclasses import replace
from unittest import mock
from urllib.parse import parse_qsl

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.commands import view
from grpo_roc_jax.record import trace
from grpo_roc_jax.record.segments import faults, headline, segments
from tests.helpers.samples import make_group


def with_trajectory(record, **changes):
    return replace(record, trajectory=replace(record.trajectory, **changes))


def log_of(folder):
    return trace.TraceWriter(folder, decode=lambda ids: f"<{len(ids)} ids>")


@pytest.fixture
def run(tmp_path):
    """Steps 1 and 2 with two groups of eight, and an evaluation."""
    writer = log_of(tmp_path)
    for step in (1, 2):
        records = trace.eval_records(step, [make_group(10 * step + i, 8) for i in range(2)])
        records = [
            replace(record, kept=not i % 2, why=("kept", "quota")[i % 2], penalties={"total": 0.25})
            for i, record in enumerate(records)
        ]
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
    first, second = trace.eval_records(1, [make_group(5, 2)])
    texts = [s.text for s in segments(second) if s.kind != "policy"]
    assert texts == [second.problem.prompt + " It rains."] + [r.observation for r in second.trajectory.results]
    begin, *rest = first.trajectory.turns
    half = (begin.start + begin.end + 1) // 2
    cut_turns = (replace(begin, end=half, text="left "), replace(begin, start=half, text="right"))
    assert segments(with_trajectory(first, turns=(*cut_turns, *rest)))[1].text == "left right"
    assert faults(first) == []
    mask = first.trajectory.policy_mask | (np.arange(first.trajectory.length) < 2)
    two = ["turns and policy mask disagree on 2 tokens", "the policy mask covers tokens of the prompt"]
    assert faults(with_trajectory(first, policy_mask=mask)) == two
    leaky = with_trajectory(first, logprobs=np.full_like(first.trajectory.logprobs, -1))
    assert faults(leaky) == ["log-probabilities off the policy mask"]


FILTERS = [
    ({"step": 2}, lambda r: r.step == 2),
    ({"uid": "/11"}, lambda r: r.problem.uid == "world:gcd/11"),
    ({"sample": 3}, lambda r: r.trajectory.sample == 3),
    ({"reward": 0.0}, lambda r: r.verdict.reward == 0),
    ({"reward": 0.333333}, lambda r: r.verdict.reward == 1 / 3),
    ({"status": "no_answer"}, lambda r: r.verdict.status == "no_answer"),
    ({"kept": "no"}, lambda r: not r.kept),
    ({"errors": True, "kept": "yes"}, lambda r: r.verdict.tool_errors > 0 and r.kept),
]


def test_filters(run, capsys):
    """The page is asked for the rewards that the filter passes. Filters that match nothing name what there is."""
    every = list(trace.read_trace(run))
    for options, keep in FILTERS:
        expected = [(r.step, r.problem.uid, r.trajectory.sample) for r in every if keep(r)]
        choice = shown(run, **options)
        assert [(r.step, r.problem.uid, r.trajectory.sample) for r in choice.records] == expected
        assert 0 < choice.matched == len(expected) < len(every)
    for reward in (1 / 3, 0.333333, -1e6 / 7, 0.0):
        config = view.ViewConfig(("run",), reward=reward)
        asked = dict(parse_qsl(config.address.partition("?")[2]))
        assert (float(asked["low"]), float(asked["high"])) == config.rewards
        assert config.rewards[0] < float(f"{reward:.6g}") < config.rewards[1] or not reward
    for where in ("--step 7", "--status corect", "--step 2 --status corect"):
        assert view.main([str(run), *where.split(), "--html", str(run / "page.html")]) == 0
        out, step = capsys.readouterr().out, 2 if "2" in where else None
        assert out.startswith("no trajectory matches") and "steps in the log: 1, 2\n" in out
        count = sum(record.verdict.status == "correct" for record in trace.read_trace(run, step))
        assert f"statuses in {'step 2' if step else 'the log'}: " in out and f"correct {count}" in out
        assert not (run / "page.html").exists()


def test_commands_and_the_newest_step(run, tmp_path, capsys):
    """What they print and write, and what cannot be shown."""
    none = str(tmp_path / "none")
    assert view.main([str(run), "--html", str(run / "page.html")]) == 0
    assert (run / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert view.main([str(run), "--text"]) == 0
    out = capsys.readouterr().out
    assert "2 steps with trajectories" in out and "16 of 16 trajectories match; 13 more" in out
    assert view.main([none]) == 2 and "neither metrics.jsonl nor trajectories" in capsys.readouterr().err
    for words in ([none, "--status", "correct"], [str(run), none, "--step", "7"]):
        assert view.main([*words, "--text"]) == 2
        assert none in capsys.readouterr().err
    for words, message in (
        ("--html a.html --atif b.jsonl", "--html and --atif: one command writes one of them"),
        ("--port 99999", "--port 99999; must be"),
        ("--port -1", "--port -1; must be"),
        ("--limit -1", "--limit -1; must be"),
    ):
        with pytest.raises(SystemExit):
            view.main([str(run), *words.split()])
        assert message in " ".join(capsys.readouterr().err.split())
    choice = shown(run)
    assert {record.step for record in choice.records} == {2} and choice.total == 16
    assert shown(run, kind="eval").matched == 3
    with pytest.raises(FileNotFoundError, match=r"log\.traces"):
        shown(run / "nothing")
    trace.TraceWriter(tmp_path / "evals").write(3, trace.eval_records(3, [make_group(1, 2)]), kind="eval")
    assert view.main([str(tmp_path / "evals"), "--text"]) == 2
    assert "--kind eval shows those that it holds" in capsys.readouterr().err
    lost = "step: KeyError: 'x' (mine.py, line 3)\nTraceback (most recent call last):\nKeyError: 'x'"
    failed = with_trajectory(shown(run).records[0], stop="infrastructure", fault=lost)
    log_of(run).write(3, [replace(failed, verdict=None, why="removed: infrastructure")])
    choice = shown(run)
    assert choice.matched == 1 and shown(run, step=3, reward=0.0).matched == 0
    assert "removed: infrastructure" in headline(choice.records[0])
    (trajectory,) = answers_in(view.page(view.ViewConfig((str(run),))))["trajectories"].values()
    assert trajectory["verdict"] is None and trajectory["fault"] == lost
    assert "step: KeyError: 'x' (mine.py, line 3)" in printed(choice.records[0])
    assert view.Runs([str(run)]).search(0, "mine.py", [("step", 3)]) == {"step.3": [0]}


def printed(record):
    out = io.StringIO()
    view.show([record], Console(file=out, width=140))
    return out.getvalue()


def test_the_terminal_shows_text_calls_verdict_and_reason(run):
    """Markup and escapes in the text of the policy stay text, as on the page."""
    record = next(r for r in shown(run).records if r.verdict.tool_errors)
    right, wrong, none = (
        printed(replace(record, verdict=replace(record.verdict, **verdict)))
        for verdict in ({"status": "correct"}, {"status": "wrong"}, {"status": "wrong", "answer": None})
    )
    for text in ("observation, 15 tokens", "<answer>", "exception", "ValueError", " · kept", "reference '7'"):
        assert text in right
    assert "(kept)" not in right and "penalties: total 0.25" in right and "penalties" not in wrong  # not ranked
    assert "no answer that can be read, reference '7': wrong" in none
    evil = "[bold]x[/nope] </pre><script>alert(1)</script> \x1b[31m"
    record = with_trajectory(record, turns=tuple(replace(turn, text=evil) for turn in record.trajectory.turns))
    assert "[bold]x[/nope]" in printed(record) and "\x1b[31m" not in printed(record)
    log_of(run).write(4, [record])
    html = view.page(view.ViewConfig((str(run),)))
    assert "<script>alert" not in html and "\\u003cscript>alert(1)" in html


def answers_in(html):
    """The answers that a page in a file holds."""
    return json.loads(html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


def test_the_page_holds_the_chosen_trajectories_and_the_index_of_their_steps(run, tmp_path):
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
    log_of(tmp_path / "other").write(5, trace.eval_records(5, [make_group(1, 2)]))
    answers = answers_in(view.page(view.ViewConfig((str(run), str(tmp_path / "other")), limit=0)))
    assert answers["blocks"].keys() == {"0", "1"} and list(answers["blocks"]["1"]) == ["step.5"]
    assert len(answers["trajectories"]) == 18


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


DAMAGES = {
    "cut": lambda line: line[: len(line) // 2],  # as a full disk does
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

"""Training through the endpoint: programs that ask over HTTP become trajectories, whatever becomes of the programs."""

import asyncio
import json
import math
import shlex
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.reward.score import environment_pay, make_scorer
from grpo_roc_jax.run.statistics import rollout_metrics
from grpo_roc_jax.serving.agent_ends import Pay, read_pay
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from tests.helpers.serving import FUNCTIONS, ROLLOUT, SCRIPT, collected, runs_of, small_policy
from tests.serving.agent_functions import ask
from tests.test_readme import TINY

QUESTION = g.Problem("p", "2+3=", "5", "t")


def test_a_conversation_is_one_row_with_the_ids_that_were_sampled():
    rows, stats = collected("linear", count=3, at_once=2)
    chat = small_policy()[0]
    for i, row in enumerate(rows):
        assert (row.sample, row.reward, row.parts, len(row.turns), row.temperature) == (1 + i, 1.0, (), 2, 1.0)
        assert row.tokens[: row.prompt_length].tolist() == chat.prompt_ids(g.Problem("", "2+3=", "", ""))
        assert set(row.versions[row.policy_mask]) == {9} and (row.logprobs[row.policy_mask] < 0).all()
        assert all(row.policy_mask[turn.start : turn.end].all() for turn in row.turns)
        assert "go on" in chat.tokenizer.decode(row.tokens[row.turns[0].end : row.turns[1].start].tolist())
    assert stats.rollouts == 3 and sum(stats.stops.values()) == 3 and stats.branches == 0
    assert len({row.tokens.tobytes() for row in rows}) == 3, "samples differ"
    by_function, _ = collected(count=3, function=f"{FUNCTIONS}:two_turns")  # which asks the same, samples the same
    for row, other in zip(rows, by_function, strict=True):
        assert row.tokens.tolist() == other.tokens.tolist() and (other.reward, len(other.turns)) == (1.0, 2)


def test_branches_are_rows_of_their_own():
    ((row,), stats) = collected("branch")
    assert len(row.parts) == 3 and sum(row.parts) == row.length and len(row.turns) == 4
    assert stats.branches == 2 and stats.dropped_branches == 0
    first, second = row.tokens[: row.parts[0]], row.tokens[row.parts[0] : sum(row.parts[:2])]
    shared = row.turns[1].start
    assert first[:shared].tolist() == second[:shared].tolist()
    assert row.policy_mask[:shared].any() and not row.policy_mask[row.parts[0] : row.parts[0] + shared].any()
    ((short,), stats) = collected("branch", longest=row.parts[0])
    assert short.parts == () and stats.dropped_branches == 2 and stats.metrics()["environment/dropped_branches"] == 2
    assert short.tokens.tolist() == first.tolist()


ENDED, LOST = {"eos", "length"}, {"infrastructure"}
OUTCOMES = [("crash", {"failed"}, {1}, 0.0, "status 1: no idea"), ("too long", {"length"}, {1}, None, "")]
OUTCOMES += [("too often", {"turns"}, None, None, ""), ("killed", LOST, {1}, None, "it was ended by SIGKILL")]
OUTCOMES += [("leave", ENDED, {2, 3}, 1.0, "")]  # the answer that it left is a call if it was whole by then
OUTCOMES += [("hang", {"deadline"}, {1}, None, ""), (f"{FUNCTIONS}:late", {"deadline"}, {1}, None, "")]
OUTCOMES += [("unpaid", ENDED, None, None, "a function returns it); its last line is a number, but what it")]
OUTCOMES += [("flooded", ENDED, None, None, "more than 65536 bytes")]


@pytest.mark.parametrize(("what", "stops", "turns", "reward", "words"), OUTCOMES)
def test_what_becomes_of_a_program_has_a_typed_outcome(what, stops, turns, reward, words):
    started = time.monotonic()
    choice = {"function": what} if what.startswith("/") else {"what": what}
    ((row,), stats) = collected(**choice, timeout_s=3.0 if what.endswith(("hang", "late")) else 60.0)
    assert row.stop in stops and row.reward == reward and time.monotonic() - started < 50
    assert turns is None or len(row.turns) in turns
    assert words in row.fault and bool(words) == bool(row.fault) == bool(stats.failures)
    by_policy = row.stop == "failed"
    assert stats.stops[row.stop] == 1 and stats.environment_faults == (bool(words) and not by_policy)
    assert len(row.turns) <= ROLLOUT.max_turns and row.length <= ROLLOUT.max_row_tokens


SEVERAL = {"reward": np.float32(0.5), "done": np.bool_(True), "n": np.int64(3), "list": np.ones(2)}
PAID = [(True, 1.0, {}), (SEVERAL, 0.5, {"done": 1.0, "n": 3.0}), (np.array(0.25), 0.25, {})]
PAID += [({"reward": 0, "calls": np.array([0.5])}, 0.5, {}), (Fraction(1, 4), 0.25, {})]
"""What a function may return, its reward, its other numbers."""
UNPAID = [(None, "no reward"), (math.nan, "must be between"), ({"reward": None, "speed": 1}, "reward is 'None'")]
UNPAID += [({"speed": 0.5, "style": -2}, "it gave speed, style, but none of what reward.functions pays: reward")]
UNPAID += [({"reward": 1.0, "calls": {"chatcmpl-other": 1.0}}, "'chatcmpl-other'; must be the id")]
UNPAID += [({"reward": 1.0, "calls": [1.0, 2.0]}, "2 numbers for 1 calls"), ([1.0], "must be one number")]
UNPAID += [(Fraction(10**400), "Fraction (OverflowError")]
RAISED = [(ValueError("not a number"), "ValueError"), (asyncio.CancelledError("own"), "CancelledError")]
RAISED += [(TimeoutError("slow"), "TimeoutError")]
RAISED += [(BaseExceptionGroup("several", [KeyboardInterrupt("one"), ValueError("two")]), "several")]


def returned(values, **settings):
    """(trajectories, statistics) of a function that asks once and then returns or raises these, at once."""

    async def ends(row, base_url, api_key):
        await ask(base_url, api_key, [{"role": "user", "content": "Hi"}])
        if isinstance(value := values[int(row["prompt"])], BaseException):
            raise value
        return value

    with g.settings.callables.given({"ends": ends}):
        problems = [g.Problem(str(i), str(i), "", "t") for i in range(len(values))]
        return collected(function="ends", problems=problems, **settings)


def test_whatever_a_function_returns_or_raises_has_its_outcome():
    """One run of all of them, beside each other: none ends another, and none is taken for a late one."""
    values = [value for value, *_ in (*PAID, *UNPAID, *RAISED)]
    rows, _ = returned(values)
    paid, unpaid, raised = rows[: len(PAID)], rows[len(PAID) : -len(RAISED)], rows[-len(RAISED) :]
    for (value, reward, parts), row in zip(PAID, paid, strict=True):
        assert (row.reward, row.rewards, row.fault) == (reward, parts, ""), value
    for (_, message), row in zip(UNPAID, unpaid, strict=True):
        assert row.reward is None and message in row.fault and row.stop in ("eos", "length"), (message, row.fault)
    for (_, message), row in zip(RAISED, raised, strict=True):
        assert row.stop == "failed" and row.reward == 0.0 and message in row.fault, (message, row.stop, row.fault)


def test_single_calls_are_paid_by_id_or_in_order():
    """In all forms of the endpoint; the pay of calls adds to the reward, as that of turns does in environments."""
    ((row,), _) = collected(function=f"{FUNCTIONS}:pays_by_id")
    assert row.reward == 1.25 and [turn.reward for turn in row.turns] == [0.0, 0.25, 0.0] and not row.fault
    assert environment_pay(row) == (0.0, 0.25, 1.0)
    ((row,), _) = collected(function=f"{FUNCTIONS}:pays_in_order")
    assert row.reward == 0.5 and [turn.reward for turn in row.turns] == [0.5, 0.0] and not row.fault


def test_several_numbers_are_channels():
    values = [{"reward": 1.0, "speed": 0.5, "done": True, "note": "text"}, {"speed": 0.5, "style": -2}]
    (row, names), _ = returned(values, pays=("speed",))
    assert (names.reward, names.rewards, names.fault) == (None, {"speed": 0.5, "style": -2.0}, "")
    parts = [{"kind": "environment"}, {"kind": "environment", "part": "speed", "weight": 2.0}]
    parts.append({"kind": "environment", "part": "done", "weight": 0.0})
    config = g.read_config("toy.yaml", f"--reward.functions={json.dumps(parts)}", "--environment=a:b").reward
    scored = make_scorer(config).score_all([QUESTION] * 2, [[replace(end, stop="eos")] for end in (row, names)])
    ((verdict,), second) = (group.verdicts for group in scored.groups)
    assert verdict.channels == {"environment": 1.0, "speed": 0.5, "done": 1.0} and verdict.reward == 2.0
    assert verdict.status == "correct" and second == () and scored.unscored == {"environment": 1}
    assert rollout_metrics(scored.groups, scored.counts)["environment/speed"] == 0.5


def test_which_agents_train_is_a_setting():
    ((full,), _) = collected(function=f"{FUNCTIONS}:team")
    sampled = dict(zip(("planner", "writer", "critic"), full.turns, strict=True))
    for trained in ((), ("writer", "critic"), ("critic",)):
        ((row,), stats) = collected(function=f"{FUNCTIONS}:team", trained=trained)
        assert row.reward == 1.0 and stats.environment_faults == 0
        names = trained or tuple(sampled)
        assert [turn.text for turn in row.turns] == [sampled[name].text for name in names]
        spans = np.concatenate([np.arange(turn.start, turn.end) for turn in row.turns])
        np.testing.assert_array_equal(np.nonzero(row.policy_mask)[0], np.sort(spans))
        assert not row.logprobs[~row.policy_mask].any() and set(row.versions[~row.policy_mask]) == {-1}
        assert len(row.parts) == (2 if "critic" in names and len(names) > 1 else 0)
    ((row,), stats) = collected(function=f"{FUNCTIONS}:team", trained=("Planner",))
    assert row.stop == "infrastructure" and not row.policy_mask.any() and stats.environment_faults == 1
    assert "no answer to Planner (environment.trained); critic, planner, writer asked" in row.fault


def test_a_function_that_cannot_be_called_is_refused_with_what_to_write():
    def plain(row, base_url, api_key): ...
    async def short(row, base_url): ...

    for function, message in ((plain, "async def rollout"), (short, "called with")):
        with g.settings.callables.given({"mine": function}), pytest.raises(ValueError, match=message):
            collected(function="mine")
    with pytest.raises(ValueError, match="both command and function"):
        collected(command="x", function="y")


def test_a_program_that_is_not_there_and_a_request_that_goes_on_from_tokens():
    for absent in ("/nowhere/agent {prompt}", "/nowhere/python3 agent.py"):
        ((row,), _) = collected(command=absent)
        assert row.stop == "infrastructure" and not row.policy_mask.any() and "No such file" in row.fault
    with runs_of(command="true") as (runs, weights), pytest.raises(ValueError, match="whole rollouts"):
        runs.collect(weights, [g.RolloutRequest(QUESTION, 0, prefix=(5,))], g.RunOptions())


@pytest.mark.parametrize("choice", [{"command": "sleep 30"}, {"function": f"{FUNCTIONS}:late"}])
def test_a_run_that_is_interrupted_ends_at_once(choice):
    """An agent whose start was under way when the others were ended is ended too."""
    stop = Mock(side_effect=KeyboardInterrupt)
    with runs_of(**choice) as (runs, weights):
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            runs.collect(weights, [g.RolloutRequest(QUESTION, 0, 4)], g.RunOptions(before_chunk=stop))
        assert time.monotonic() - started < 15 and not runs.live


class Three(g.Environment):
    def step(self, turn):
        return g.Observation(reward=3.0, done=True)


@pytest.mark.usefixtures("one_device")
def test_training_with_an_agent_beside_an_environment(tmp_path):
    """A column of the row says what plays it. Branches are packed, updated and recorded; nothing is compiled again."""
    for name in ("three", "asks"):
        rows = [{"prompt": f"{i}+1=", "answer": "5", "environment": name} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    agent = f"{{kind: agent, command: {sys.executable} {SCRIPT} branch}}"
    classes = json.dumps(["three=tests.serving.test_agents:Three", f"asks={agent}"])
    words = [f"--environment={{kind: by_row, classes: {classes}}}", "--reward.functions=environment", "--sft.steps=0"]
    words += [f"--data.sources={tmp_path}/three.jsonl,{tmp_path}/asks.jsonl", "--data.weights=1,1"]
    words += ["--data.eval_problems=0", "--eval.every=0", "--group.problems=4", "--reward.truncated=score"]
    summary = g.train_policy(g.read_config("toy.yaml", *TINY, *words, f"--run_dir={tmp_path}/run", "--log.traces=1"))
    assert summary["compilations_after_first_step"] == 0
    seen = set()
    for step, metrics in zip((1, 2), list(read_metrics(tmp_path / "run"))[-2:], strict=True):
        branches = 0
        for record in read_trace(tmp_path / "run", step):
            name, trajectory = record.problem.extra["environment"], record.trajectory
            seen.add(name)
            branches += max(0, len(trajectory.parts) - 1)
            wanted = 0.25 if name == "asks" else 3.0 if trajectory.stop == "answer" else 0.0
            assert trajectory.reward == wanted
            assert name == "three" or (trajectory.stop in ("eos", "length") and len(trajectory.parts) == 3)
        assert metrics.get("environment/branches", 0) == branches and metrics["time/environment_s"] > 0
        assert metrics["loss/logprob_gap_max"] < 1e-3  # the update computes what was sampled, part by part
    assert seen == {"three", "asks"}
    unread = {"rollout.max_turn_tokens=9": "leave it at 0", "advantage.adjust=self_teacher": "its own"}
    for word, message in (unread | {"rollout.step_limit={kind: drop, seconds: 9}": "timeout_s instead"}).items():
        with pytest.raises(g.ConfigError, match=message):
            g.read_config("toy.yaml", "--environment={kind: agent, command: a}", f"--{word}")


def test_a_program_that_fails_after_a_fault_of_the_server_is_no_failure_of_the_policy(monkeypatch):
    begin, decode = SamplingLoop.submit, small_policy()[0].tokenizer.decode

    def submit(self, job):
        return job.report("failed", 0, "no memory") if "FAULT" in decode(job.prompt.tolist()) else begin(self, job)

    monkeypatch.setattr(SamplingLoop, "submit", submit)
    ((row,), stats) = collected("fault")
    assert row.stop == "infrastructure" and stats.environment_faults == 1
    assert "agent: status 1 after a fault of the server: the server failed: 500" in row.fault
    ((zero,), _), ((dropped,), stats) = collected("unreadable"), collected("unreadable", on_failure="drop")
    assert (zero.stop, zero.reward) == ("failed", 0.0), "whatever it had written before"
    assert zero.fault.startswith("agent: status 1: ValueError: invalid literal for int()")
    assert (dropped.stop, stats.environment_faults) == ("infrastructure", 1)


def test_the_reward_by_hand():
    assert read_pay(b"-2\n") == (Pay(-2.0), "") and read_pay(b'{"reward": 1e6}') == (Pay(1e6), "")
    assert read_pay(b"") == read_pay(b" \n") == (Pay(), "")
    both = b'{"reward": 1, "speed": 2, "right": true, "note": "x", "calls": {"a": 1}}'
    assert read_pay(both) == (Pay(1.0, {"speed": 2.0, "right": 1.0}, {"a": 1.0}), "")
    assert read_pay(b'{"calls": [1, null]}') == (Pay(None, {}, (1.0, None)), "")
    many = json.dumps({f"a{i}": i for i in range(40)}).encode()
    whole = [b"0.5\n1.0", b"true", b"{}", b"\xff", b"[" * 2000, b'{"reward": "1"}', b"NaN", b"1" + b"0" * 400]
    for wrong in [*whole, b'{"reward": null}', b'{"a b": 1}', many, b'{"calls": 1}', b'{"calls": {"a": "x"}}']:
        assert read_pay(wrong)[0] == Pay() and "must be" in read_pay(wrong)[1], wrong


def test_a_flood_of_output_is_read_to_its_end_and_the_lines_of_the_page_are_paid(tmp_path):
    """As `docs/serving.md` writes them, in Python and in a shell."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8").splitlines()
    python, shell = (line.split("  # in ")[0] for line in page if "GRPO_REWARD_FD" in line and " # in " in line)
    (tmp_path / "agent.py").write_text(f"import os\nfor i in range(300):\n    print('x' * 100_000)\n{python}")
    for words in ((sys.executable, str(tmp_path / "agent.py")), ("sh", "-c", shell)):
        ((row,), _) = collected(command=shlex.join(words))
        assert (row.stop, row.reward) == ("infrastructure", 0.5), "it asked nothing"
    ((row,), _) = collected(command="true {prompt}", problems=[g.Problem("p", "2+3=\0", "5", "t")])
    assert row.stop == "infrastructure", "no argument holds a zero byte"

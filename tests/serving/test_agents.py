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
from types import MappingProxyType

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.record.codec import TRAJECTORY_ARRAYS, trajectory_from_json, trajectory_to_json
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.reward.score import environment_pay, make_scorer
from grpo_roc_jax.run.statistics import rollout_metrics
from grpo_roc_jax.serving.agent_ends import Pay, read_pay
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.settings.callables import import_file
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
    # A function that asks the same samples the same, from one import for all rollouts.
    by_function, stats = collected(count=3, function=f"{FUNCTIONS}:two_turns")
    for row, other in zip(rows, by_function, strict=True):
        assert row.tokens.tolist() == other.tokens.tolist() and (other.reward, len(other.turns)) == (1.0, 2)
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)
    assert stats.rollouts == 3 and stats.environment_s >= 0 and not stats.environment_faults
    assert import_file(str(FUNCTIONS)).IMPORTED == [0]


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


@pytest.mark.parametrize(
    ("what", "stops", "turns", "reward", "words"),
    [
        ("crash", {"failed"}, {1}, 0.0, "status 1: no idea"),
        ("too long", {"length"}, {1}, None, ""),
        ("too often", {"turns"}, None, None, ""),
        ("killed", LOST, {1}, None, "it was ended by SIGKILL"),
        ("shell", LOST, {1}, None, "it was ended by SIGKILL"),
        ("quiet", LOST, {0}, None, "without an answer"),
        ("endless", {"turns", "length"}, None, 1.0, ""),
        ("leave", ENDED, {2, 3}, 1.0, ""),  # the answer that it left is a call if it was whole by then
        ("hang", {"deadline"}, {1}, None, ""),
        ("object", ENDED, None, 0.25, ""),
        ("unpaid", ENDED, None, None, "a function returns it); its last line is a number, but what it"),
        ("flooded", ENDED, None, None, "more than 65536 bytes"),
        (f"{FUNCTIONS}:late", {"deadline"}, {1}, None, ""),
        (f"{FUNCTIONS}:quiet", LOST, {0}, 1.0, "without an answer"),
    ],
)
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


class Odd:
    """A value of the user's own."""

    def __init__(self, error=None):
        self.error = error

    def __float__(self):
        raise self.error or TypeError("no number")

    def __repr__(self):
        raise RuntimeError("no text")


class Stop(BaseException):
    """An exception that is no `Exception`."""


NUMBERS = {"done": 1.0, "n": 3.0}
PAID = [
    (True, 1.0, {}),
    ({"reward": False, "speed": True}, 0.0, {"speed": 1.0}),
    ({"reward": np.float32(0.5), "done": np.bool_(True), "n": np.int64(3), "list": np.ones(2)}, 0.5, NUMBERS),
    (np.bool_(True), 1.0, {}),
    (np.array(0.25), 0.25, {}),
    ({"reward": 0, "calls": np.array([0.5])}, 0.5, {}),
    (MappingProxyType({"reward": 2}), 2.0, {}),
    (Fraction(1, 4), 0.25, {}),
]
"""What a function may return, its reward, its other numbers."""
UNPAID = [
    (None, "no reward"),
    (1e30, "must be between"),
    (math.nan, "must be between"),
    ({"reward": np.float64("nan")}, "must be between"),
    ({"reward": None, "speed": 1}, "reward is 'None'"),
    ({"speed": 0.5, "style": -2}, "it gave speed, style, but none of what reward.functions pays: reward"),
    ({"reward": 1.0, "calls": {"chatcmpl-other": 1.0}}, "'chatcmpl-other'; must be the id"),
    ({"reward": 1.0, "calls": [1.0, 2.0]}, "2 numbers for 1 calls"),
    ("0.5", "must be one number"),
    ([1.0], "must be one number"),
    (np.ones(2), "must be one number"),
    (Fraction(10**400), "Fraction (OverflowError"),
    (Odd(), "Odd (TypeError: no number)"),
    ({"reward": Odd(ZeroDivisionError("x"))}, "dict (ZeroDivisionError: x)"),
    ({("a", 1): 1.0}, "dict (TypeError"),
]
RAISED = [
    (ValueError("not a number"), "ValueError"),
    (asyncio.CancelledError("own"), "CancelledError"),
    (TimeoutError("slow"), "TimeoutError"),
    (Stop("base"), "Stop: base"),
    (BaseExceptionGroup("several", [Stop("one"), ValueError("two")]), "several"),
]


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
    rows, stats = returned(values)
    paid, unpaid, raised = rows[: len(PAID)], rows[len(PAID) : -len(RAISED)], rows[-len(RAISED) :]
    for (value, reward, parts), row in zip(PAID, paid, strict=True):
        assert (row.reward, row.rewards, row.fault) == (reward, parts, ""), value
    for (_, message), row in zip(UNPAID, unpaid, strict=True):
        assert row.reward is None and message in row.fault and row.stop in ("eos", "length"), (message, row.fault)
        assert not any(turn.reward for turn in row.turns), message
    for (_, message), row in zip(RAISED, raised, strict=True):
        assert row.stop == "failed" and row.reward == 0.0 and message in row.fault, (message, row.stop, row.fault)
    assert stats.rollouts == len(values)


def test_single_calls_are_paid_by_id_or_in_order():
    """In all forms of the endpoint; the pay of calls adds to the reward, as that of turns does in environments."""
    ((row,), _) = collected(function=f"{FUNCTIONS}:pays_by_id")
    assert row.reward == 1.25 and [turn.reward for turn in row.turns] == [0.0, 0.25, 0.0] and not row.fault
    assert environment_pay(row) == (0.0, 0.25, 1.0)
    ((row,), _) = collected(function=f"{FUNCTIONS}:pays_in_order")
    assert row.reward == 0.5 and [turn.reward for turn in row.turns] == [0.5, 0.0] and not row.fault
    ((row,), _) = collected(function=f"{FUNCTIONS}:pays_several_choices")
    assert row.reward == 1.5 and sorted(turn.reward for turn in row.turns) == [0.0, 0.0, 0.5], "once"


def test_several_numbers_are_channels():
    values = [{"reward": 1.0, "speed": 0.5, "done": True, "note": "text"}, {"speed": 0.5, "style": -2}]
    (row, names), _ = returned(values, pays=("speed",))
    assert (row.reward, row.rewards, row.fault) == (1.0, {"speed": 0.5, "done": 1.0}, "")
    assert (names.reward, names.rewards, names.fault) == (None, {"speed": 0.5, "style": -2.0}, "")
    parts = [{"kind": "environment"}, {"kind": "environment", "part": "speed", "weight": 2.0}]
    parts.append({"kind": "environment", "part": "done", "weight": 0.0})
    config = g.read_config("toy.yaml", f"--reward.functions={json.dumps(parts)}", "--environment=a:b").reward
    trajectories = [[replace(row, stop="eos")], [replace(names, stop="eos")]]
    scored = make_scorer(config).score_all([g.Problem("p", "q", "5", "t")] * 2, trajectories)
    first, second = (group.verdicts for group in scored.groups)
    assert first[0].channels == {"environment": 1.0, "speed": 0.5, "done": 1.0} and first[0].reward == 2.0
    assert first[0].status == "correct" and second == () and scored.unscored == {"environment": 1}
    arrays = {name: getattr(row, name) for name in TRAJECTORY_ARRAYS}
    assert trajectory_from_json(trajectory_to_json(row), arrays).rewards == row.rewards
    assert rollout_metrics(scored.groups, scored.counts)["environment/speed"] == 0.5


def test_which_agents_train_is_a_setting():
    ((full,), _) = collected(function=f"{FUNCTIONS}:team")
    sampled = dict(zip(("planner", "writer", "critic"), full.turns, strict=True))
    for trained in ((), ("planner",), ("writer", "critic"), ("critic",)):
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
    async def by_keyword(*, row, base_url, api_key): ...
    async def yields(row, base_url, api_key):
        yield 1.0

    def given(function):
        return g.settings.callables.given({"mine": function})

    written = ((function, "async def rollout") for function in (plain, Odd, yields))
    for function, message in (*written, (short, "called with"), (by_keyword, "called with")):
        with given(function), pytest.raises(ValueError, match=message):
            collected(function="mine")
    for choice, message in (
        ({"function": f"{FUNCTIONS}:absent"}, "absent"),
        ({"command": "", "function": ""}, "neither command nor function"),
        ({"command": "x", "function": "y"}, "both command and function"),
    ):
        with pytest.raises(ValueError, match=message):
            collected(**choice)


def test_a_program_that_is_not_there_and_a_request_that_goes_on_from_tokens():
    for absent in ("/nowhere/agent {prompt}", "/nowhere/python3 agent.py"):
        ((row,), _) = collected(command=absent)
        assert row.stop == "infrastructure" and not row.policy_mask.any() and "No such file" in row.fault
    with runs_of(command="true") as (runs, weights), pytest.raises(ValueError, match="whole rollouts"):
        runs.collect(weights, [g.RolloutRequest(QUESTION, 0, prefix=(5,))], g.RunOptions())


HANGS = ({"command": f"{sys.executable} {SCRIPT} hang"}, 2.0)


@pytest.mark.parametrize(
    ("choice", "after_s"), [HANGS, ({"command": "sleep 30"}, 0.0), ({"function": f"{FUNCTIONS}:late"}, 0.0)]
)
def test_a_run_that_is_interrupted_ends_at_once(choice, after_s):
    """An agent whose start was under way when the others were ended is ended too."""

    def stop():
        if time.monotonic() >= started + after_s:
            raise KeyboardInterrupt

    with runs_of(**choice) as (runs, weights):
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            runs.collect(weights, [g.RolloutRequest(QUESTION, 0, 4)], g.RunOptions(before_chunk=stop))
        assert time.monotonic() - started < 15 + after_s and not runs.live


class Three(g.Environment):
    def step(self, turn):
        return g.Observation(reward=3.0, done=True)


@pytest.mark.usefixtures("one_device")
def test_training_with_an_agent_beside_an_environment(tmp_path):
    """A column of the row says what plays it. Branches are packed, updated and recorded; nothing is compiled again."""
    rows = [{"prompt": f"{i}+1=", "answer": "5"} for i in range(4)]
    for name in ("three", "asks"):
        text = "".join(json.dumps(row | {"environment": name}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
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
            if name == "asks":
                assert trajectory.reward == 0.25 and trajectory.stop in ("eos", "length") and len(trajectory.parts) == 3
            else:
                assert trajectory.reward == (3.0 if trajectory.stop == "answer" else 0.0)
        assert metrics.get("environment/branches", 0) == branches and metrics["time/environment_s"] > 0
        assert metrics["loss/logprob_gap_max"] < 1e-3  # the update computes what was sampled, part by part
        stops = sum(value for name, value in metrics.items() if name.startswith("rollout/stop_"))
        assert stops == pytest.approx(1, abs=0.01)
    assert seen == {"three", "asks"}


def test_settings_that_no_agent_reads_are_refused():
    for word, message in (
        ("rollout.max_turn_tokens=9", "leave it at 0"),
        ("rollout.step_limit={kind: drop, seconds: 9}", "set environment.timeout_s instead"),
        ("rollout.early_exit=true", "leave it off"),
        ("advantage.adjust=self_teacher", "its own"),
    ):
        with pytest.raises(g.ConfigError, match=message):
            g.read_config("toy.yaml", "--environment={kind: agent, command: a}", f"--{word}")


def test_a_program_that_fails_on_an_answer_is_dropped_where_the_setting_says_so():
    ((zero,), stats) = collected("unreadable")
    assert (zero.stop, zero.reward, stats.environment_faults) == ("failed", 0.0, 0), "whatever it had written before"
    first, second, *_ = zero.fault.splitlines()
    assert first.startswith("agent: status 1: ValueError: invalid literal for int()")
    assert second.startswith("Traceback")
    ((row,), stats) = collected("unreadable", on_failure="drop")
    assert (row.stop, stats.environment_faults, stats.stops["infrastructure"]) == ("infrastructure", 1, 1)
    (count,) = stats.failures.values()
    assert (count.count, count.by_policy) == (1, False)


def test_a_program_that_fails_after_a_fault_of_the_server_is_no_failure_of_the_policy(monkeypatch):
    begin = SamplingLoop.submit

    def submit(self, job):
        text = small_policy()[0].tokenizer.decode(job.prompt.tolist())
        return job.report("failed", 0, "no memory") if "FAULT" in text else begin(self, job)

    monkeypatch.setattr(SamplingLoop, "submit", submit)
    ((row,), stats) = collected("fault")
    assert row.stop == "infrastructure" and stats.environment_faults == 1
    assert "agent: status 1 after a fault of the server: the server failed: 500" in row.fault


def test_the_reward_by_hand():
    assert read_pay(b"-2\n") == (Pay(-2.0), "") and read_pay(b'{"reward": 1e6}') == (Pay(1e6), "")
    assert read_pay(b"") == read_pay(b" \n") == (Pay(), "")
    both = b'{"reward": 1, "speed": 2, "right": true, "note": "x", "calls": {"a": 1}}'
    assert read_pay(both) == (Pay(1.0, {"speed": 2.0, "right": 1.0}, {"a": 1.0}), "")
    assert read_pay(b'{"calls": [1, null]}') == (Pay(None, {}, (1.0, None)), "")
    many = json.dumps({f"a{i}": i for i in range(40)}).encode()
    whole = [b"0.5\n1.0", b"true", b"[1]", b"{}", b"\xff", b'"1"', b"[" * 2000, b'{"reward": "1"}']
    outside = [b"NaN", b"inf", b"1e9", b"1" + b"0" * 400, b'{"speed": NaN}', b'{"reward": null}']
    parts = [b'{"a b": 1}', b'{"1": 1}', many, b'{"calls": 1}', b'{"calls": {"a": "x"}}']
    for wrong in [*whole, *outside, *parts]:
        assert read_pay(wrong)[0] == Pay() and "must be" in read_pay(wrong)[1], wrong


def test_a_flood_of_output_is_read_to_its_end_and_the_lines_of_the_page_are_paid(tmp_path):
    """As `docs/serving.md` writes them, in Python and in a shell."""
    write = "os.write(int(os.environ['GRPO_REWARD_FD']), b'0.5')"
    flood = f"import os, sys; [sys.stdout.write('x' * 100_000 + '\\n') for i in range(300)]; {write}"
    agent = tmp_path / "agent.py"
    agent.write_text(flood)
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8").splitlines()
    python, shell = (line.split("  # in ")[0] for line in page if "GRPO_REWARD_FD" in line and " # in " in line)
    in_python = (("-c", flood), (str(agent),), ("-c", f"import os\n{python}"))
    for words in (*((sys.executable, *words) for words in in_python), ("sh", "-c", shell)):
        ((row,), _) = collected(command=shlex.join(words))
        assert (row.stop, row.reward) == ("infrastructure", 0.5), "it asked nothing"
    for words in (("true", "{prompt}"), (sys.executable, str(agent), "{prompt}")):
        ((row,), stats) = collected(command=shlex.join(words), problems=[g.Problem("p", "2+3=\0", "5", "t")])
        assert row.stop == "infrastructure" and stats.environment_faults == 1, "no argument holds a zero byte"

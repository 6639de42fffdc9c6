"""Training through the endpoint: programs that ask over HTTP become trajectories, whatever becomes of the programs."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.records import RunOptions
from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.record.codec import TRAJECTORY_ARRAYS, trajectory_from_json, trajectory_to_json
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.reward.score import environment_pay, make_scorer
from grpo_roc_jax.run.statistics import rollout_metrics
from grpo_roc_jax.serving.agent_ends import Pay, read_pay
from grpo_roc_jax.serving.agent_runs import AgentRuns
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.settings.callables import import_file
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.serving import ROLLOUT, small_policy
from tests.test_readme import TINY

SCRIPT = Path(__file__).with_name("agent_script.py")


def collected(what, count=1, longest=ROLLOUT.max_row_tokens, timeout_s=60.0, pays=("",), problems=(), **choice):
    chat, shared, params = small_policy()
    engine = shared.sibling()
    if "function" not in choice:
        choice["command"] = f"{sys.executable} {SCRIPT} '{what}'"
    runs = AgentRuns(AgentCommand(timeout_s=timeout_s, **choice), chat, engine, longest, pays)
    try:
        answer = "5" if "function" in choice else "5 or"
        problems = problems or [Problem("p", "2+3=", answer, "t")]
        requests = [RolloutRequest(problem, 4 + i, count, first_sample=1) for i, problem in enumerate(problems)]
        return runs.collect(engine.publish(params, 9), requests, RunOptions(step=3))
    finally:
        runs.close()


def test_a_conversation_is_one_row_with_the_ids_that_were_sampled():
    found, stats = collected("linear", count=3, at_once=2)
    chat = small_policy()[0]
    for i, one in enumerate(found):
        assert (one.sample, one.stop, one.reward, one.parts) == (1 + i, one.stop, 1.0, ())
        assert one.stop in ("eos", "length") and len(one.turns) == 2 and one.temperature == 1.0
        assert one.tokens[: one.prompt_length].tolist() == chat.prompt_ids(Problem("", "2+3=", "", ""))
        assert set(one.versions[one.policy_mask]) == {9} and (one.logprobs[one.policy_mask] < 0).all()
        assert [turn.end - turn.start for turn in one.turns] == [
            int(one.policy_mask[t.start : t.end].sum()) for t in one.turns
        ]
        assert "go on" in chat.tokenizer.decode(one.tokens[one.turns[0].end : one.turns[1].start].tolist())
    assert stats.rollouts == 3 and sum(stats.stops.values()) == 3 and stats.branches == 0
    assert len({one.tokens.tobytes() for one in found}) == 3, "samples differ"
    again = collected("linear", count=3)[0]
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in found]
    for one, other in zip(found, again, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_branches_are_rows_of_their_own():
    ((one,), stats) = collected("branch")
    assert len(one.parts) == 3 and sum(one.parts) == one.length and len(one.turns) == 4
    assert stats.branches == 2 and stats.dropped_branches == 0
    first, second = one.tokens[: one.parts[0]], one.tokens[one.parts[0] : sum(one.parts[:2])]
    shared = one.turns[1].start
    assert first[:shared].tolist() == second[:shared].tolist()
    assert one.policy_mask[:shared].any() and not one.policy_mask[one.parts[0] : one.parts[0] + shared].any()
    ((short,), stats) = collected("branch", longest=one.parts[0])
    assert short.parts == () and stats.dropped_branches == 2 and stats.metrics()["environment/dropped_branches"] == 2
    assert short.tokens.tolist() == first.tolist()


@pytest.mark.parametrize(
    ("what", "stop", "turns", "reward"),
    [
        ("crash", "failed", 1, 0.0),
        ("unreadable", "failed", 1, 0.0),
        ("too long", "length", 1, None),
        ("too often", "turns", None, None),
        ("killed", "infrastructure", 1, None),
        ("shell", "infrastructure", 1, None),
        ("quiet", "infrastructure", 0, None),
        ("endless", ("turns", "length"), None, 1.0),
        ("hang", "deadline", 1, None),
    ],
)
def test_what_becomes_of_a_program_has_a_typed_outcome(what, stop, turns, reward):
    started = time.monotonic()
    ((one,), stats) = collected(what, timeout_s=3.0 if what == "hang" else 60.0)
    assert (
        one.stop in (stop if isinstance(stop, tuple) else (stop,))
        and one.reward == reward
        and time.monotonic() - started < 50
    )
    assert turns is None or len(one.turns) == turns
    assert stats.stops[one.stop] == 1 and stats.environment_faults == (stop == "infrastructure")
    assert len(one.turns) <= ROLLOUT.max_turns and one.length <= ROLLOUT.max_row_tokens


FUNCTIONS = SCRIPT.with_name("agent_functions.py")


def test_a_function_samples_what_a_program_samples():
    """The same rows as the program that asks the same, from one import for all rollouts."""
    by_program, _ = collected("linear", count=3)
    by_function, stats = collected("", count=3, function=f"{FUNCTIONS}:two_turns")
    assert [one.tokens.tolist() for one in by_function] == [one.tokens.tolist() for one in by_program]
    assert [(one.reward, len(one.turns)) for one in by_function] == [(1.0, 2)] * 3
    assert stats.rollouts == 3 and stats.environment_s >= 0 and not stats.environment_faults
    assert import_file(str(FUNCTIONS)).IMPORTED == [0]


@pytest.mark.parametrize(
    ("name", "stop", "turns", "reward", "said"),
    [
        ("no_reward", ("eos", "length"), 1, None, "no reward"),
        ("fails", ("failed",), 1, 0.0, "ValueError"),
        ("late", ("deadline",), 1, None, ""),
        ("quiet", ("infrastructure",), 0, 1.0, "without an answer"),
        ("huge", ("eos", "length"), 1, None, "must be between"),
    ],
)
def test_what_becomes_of_a_function_has_a_typed_outcome(name, stop, turns, reward, said):
    timeout = 3.0 if name == "late" else 60.0
    ((one,), stats) = collected("", function=f"{FUNCTIONS}:{name}", timeout_s=timeout)
    assert one.stop in stop and len(one.turns) == turns and one.reward == reward and said in one.fault
    assert stats.stops[one.stop] == 1


PAID = {
    "true": (1.0, {}),
    "false by name": (0.0, {"speed": 1.0}),
    "numpy": (0.5, {"done": 1.0, "n": 3.0}),
    "numpy bool": (1.0, {}),
    "numpy array": (0.25, {}),
    "calls as array": (0.5, {}),
    "mapping": (2.0, {}),
    "fraction": (0.25, {}),
}
UNPAID = {
    "nan": "must be between",
    "numpy nan": "must be between",
    "none inside": "reward is 'None'",
    "text": "must be one number",
    "list": "must be one number",
    "array": "must be one number",
    "huge": "Fraction (OverflowError",
    "odd": "Odd (TypeError: no number)",
    "odd inside": "dict (ZeroDivisionError: x)",
    "keys": "dict (TypeError",
}
RAISED = {"cancelled": "CancelledError", "timeout": "TimeoutError", "base": "Stop: base", "group": "several"}


def test_whatever_a_function_returns_or_raises_has_its_outcome():
    """One run of all of them, beside each other: none ends another, and none is taken for a late one."""
    names = [*PAID, *UNPAID, *RAISED]
    problems = [Problem(name, name, "", "t") for name in names]
    found, stats = collected("", function=f"{FUNCTIONS}:odd", problems=problems)
    outcomes = dict(zip(names, found, strict=True))
    for name, (reward, parts) in PAID.items():
        one = outcomes[name]
        assert (one.reward, one.rewards, one.fault) == (reward, parts, ""), name
    for name, said in UNPAID.items():
        one = outcomes[name]
        assert one.reward is None and said in one.fault and one.stop in ("eos", "length"), (name, one.fault)
    for name, said in RAISED.items():
        one = outcomes[name]
        assert one.stop == "failed" and one.reward == 0.0 and said in one.fault, (name, one.stop, one.fault)
    assert stats.rollouts == len(names)


def test_single_calls_are_paid_by_id_or_in_order():
    """In all forms of the endpoint; the pay of calls adds to the reward, as that of turns does in environments."""
    ((one,), _) = collected("", function=f"{FUNCTIONS}:pays_by_id")
    assert one.reward == 1.25 and [turn.reward for turn in one.turns] == [0.0, 0.25, 0.0] and not one.fault
    assert environment_pay(one) == (0.0, 0.25, 1.0)
    ((one,), _) = collected("", function=f"{FUNCTIONS}:pays_in_order")
    assert one.reward == 0.5 and [turn.reward for turn in one.turns] == [0.5, 0.0] and not one.fault
    ((one,), _) = collected("", function=f"{FUNCTIONS}:pays_several_choices")
    assert one.reward == 1.5 and sorted(turn.reward for turn in one.turns) == [0.0, 0.0, 0.5], "once"
    for name, said in (("pays_nobody", "'chatcmpl-other'; must be the id"), ("pays_too_many", "2 numbers for 1 calls")):
        ((one,), _) = collected("", function=f"{FUNCTIONS}:{name}")
        assert one.reward is None and said in one.fault and not any(turn.reward for turn in one.turns)


def test_several_numbers_are_channels():
    ((one,), _) = collected("", function=f"{FUNCTIONS}:by_name")
    assert (one.reward, one.rewards) == (1.0, {"speed": 0.5, "done": 1.0}) and not one.fault
    ((names,), _) = collected("", function=f"{FUNCTIONS}:only_names", pays=("speed",))
    assert (names.reward, names.rewards) == (None, {"speed": 0.5, "style": -2.0}) and not names.fault
    ((none,), _) = collected("", function=f"{FUNCTIONS}:only_names")
    assert "it gave speed, style, but none of what reward.functions pays: reward" in none.fault
    parts = [{"kind": "environment"}, {"kind": "environment", "part": "speed", "weight": 2.0}]
    parts.append({"kind": "environment", "part": "done", "weight": 0.0})
    config = g.read_config("toy.yaml", f"--reward.functions={json.dumps(parts)}", "--environment=a:b").reward
    scorer = make_scorer(config)
    scored = scorer.score_all(
        [Problem("p", "q", "5", "t")] * 2, [[replace(one, stop="eos")], [replace(names, stop="eos")]]
    )
    first, second = (group.verdicts for group in scored.groups)
    assert first[0].channels == {"environment": 1.0, "speed": 0.5, "done": 1.0} and first[0].reward == 2.0
    assert first[0].status == "correct" and second == () and scored.unscored == {"environment": 1}
    assert (
        trajectory_from_json(trajectory_to_json(one), {n: getattr(one, n) for n in TRAJECTORY_ARRAYS}).rewards
        == one.rewards
    )
    assert rollout_metrics(scored.groups, scored.counts)["environment/speed"] == 0.5


@pytest.mark.parametrize(
    ("trained", "agents"),
    [
        ((), "planner writer critic"),
        (("planner",), "planner"),
        (("writer", "critic"), "writer critic"),
        (("critic",), "critic"),
    ],
)
def test_which_agents_train_is_a_setting(trained, agents):
    ((whole,), _) = collected("", function=f"{FUNCTIONS}:team")
    sampled = dict(zip(("planner", "writer", "critic"), whole.turns, strict=True))
    ((one,), stats) = collected("", function=f"{FUNCTIONS}:team", trained=trained)
    assert one.reward == 1.0 and stats.environment_faults == 0
    texts = [sampled[name].text for name in agents.split()]
    assert [turn.text for turn in one.turns] == texts, "the same ids, of these alone"
    spans = [(turn.start, turn.end) for turn in one.turns]
    assert one.policy_mask.sum() == sum(b - a for a, b in spans) and all(one.policy_mask[a:b].all() for a, b in spans)
    assert not one.logprobs[~one.policy_mask].any() and set(one.versions[~one.policy_mask]) == {-1}
    assert len(one.parts) == (2 if "critic" in agents and len(agents) > 6 else 0)


def test_an_agent_that_never_asked_is_named():
    ((one,), stats) = collected("", function=f"{FUNCTIONS}:team", trained=("Planner",))
    assert one.stop == "infrastructure" and not one.policy_mask.any() and stats.environment_faults == 1
    assert "no answer to Planner (environment.trained); critic, planner, writer asked" in one.fault


def test_a_function_that_cannot_be_called_is_refused_with_what_to_write():
    for name, message in (
        ("plain", "async def rollout"),
        ("Odd", "async def rollout"),
        ("yields", "async def rollout"),
        ("short", "called with"),
        ("by_keyword", "called with"),
        ("absent", "absent"),
        ("", "neither command nor function"),
    ):
        function = f"{FUNCTIONS}:{name}" if name else ""
        with pytest.raises(ValueError, match=message):
            collected("", function=function)
    with pytest.raises(ValueError, match="both command and function"):
        AgentCommand(command="x", function="y")


def test_a_program_that_is_not_there_and_a_run_that_is_interrupted():
    chat, shared, params = small_policy()
    engine = shared.sibling()
    request = RolloutRequest(Problem("p", "2+3=", "5", "t"), 0)
    for absent in ("/nowhere/agent {prompt}", "/nowhere/python3 agent.py"):
        runs = AgentRuns(AgentCommand(command=absent), chat, engine, 99, [""])
        ((one,), _) = runs.collect(engine.publish(params, 1), [request], RunOptions())
        assert one.stop == "infrastructure" and not one.policy_mask.any() and "No such file" in one.fault
        runs.close()
    runs = AgentRuns(AgentCommand(command=f"{sys.executable} {SCRIPT} hang"), chat, engine, 99, [""])
    until = time.monotonic() + 2

    def stop():
        if time.monotonic() > until:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.collect(engine.publish(params, 1), [request], RunOptions(before_chunk=stop))
    assert not runs.live
    with pytest.raises(ValueError, match="whole rollouts"):
        runs.collect(engine.publish(params, 1), [RolloutRequest(request.problem, 0, prefix=(5,))], RunOptions())
    runs.close()


@pytest.mark.parametrize("choice", [{"command": "sleep 30"}, {"function": f"{FUNCTIONS}:late"}])
def test_a_run_that_is_interrupted_while_agents_start_ends_at_once(choice):
    """An agent whose start was under way when the others were ended is ended too."""
    chat, shared, params = small_policy()
    engine = shared.sibling()
    runs = AgentRuns(AgentCommand(**choice), chat, engine, 99, [""])

    def stop():
        raise KeyboardInterrupt

    request = RolloutRequest(Problem("p", "2+3=", "5", "t"), 0, 4)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runs.collect(engine.publish(params, 1), [request], RunOptions(before_chunk=stop))
    assert time.monotonic() - started < 15 and not runs.live
    runs.close()


def test_training_through_it(tmp_path):
    """Two steps on rollouts with branches: packed, updated, recorded, nothing compiled again."""
    agent = f"{sys.executable} {SCRIPT} branch"
    words = [f"--environment={{kind: agent, command: {agent}}}", "--reward.functions=environment", "--sft.steps=0"]
    words += [
        "--reward.truncated=score",
        f"--run_dir={tmp_path}",
        "--log.traces=1",
    ]
    summary = g.train_policy(g.read_config("toy.yaml", *TINY, *words))
    assert summary["compilations_after_first_step"] == 0
    records = list(read_trace(tmp_path, 2))
    assert all(len(record.trajectory.parts) > 1 and record.trajectory.reward is not None for record in records)
    assert {record.trajectory.stop for record in records} <= {"length", "eos"}
    metrics = list(read_metrics(tmp_path))
    assert metrics[-1]["environment/branches"] == 2 * len(records)
    assert metrics[-1]["loss/logprob_gap_max"] < 1e-3  # the update computes what was sampled, part by part


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.max_turn_tokens=9", "leave it at 0"),
        ("rollout.step_limit={kind: drop, seconds: 9}", "set environment.timeout_s instead"),
        ("rollout.early_exit=true", "leave it off"),
    ],
)
def test_settings_that_no_agent_reads_are_refused(word, said):
    with pytest.raises(g.ConfigError, match=said):
        g.read_config("toy.yaml", "--environment={kind: agent, command: a}", f"--{word}")


def test_a_program_that_fails_on_an_answer_is_dropped_where_the_setting_says_so():
    ((zero,), stats) = collected("unreadable")
    assert (zero.stop, zero.reward, stats.environment_faults) == ("failed", 0.0, 0), "whatever it had written before"
    first, *rest = zero.fault.splitlines()
    assert first.startswith("agent: status 1: ValueError: invalid literal for int()") and rest[0].startswith(
        "Traceback"
    )
    ((one,), stats) = collected("unreadable", on_failure="drop")
    assert (one.stop, stats.environment_faults, stats.stops["infrastructure"]) == ("infrastructure", 1, 1)
    (count,) = stats.failures.values()
    assert (count.count, count.by_policy) == (1, False)


def test_a_program_that_fails_after_a_fault_of_the_server_is_no_failure_of_the_policy(monkeypatch):
    begin = SamplingLoop.submit

    def submit(self, job):
        text = small_policy()[0].tokenizer.decode(job.prompt.tolist())
        return job.report("failed", 0, "no memory") if "FAULT" in text else begin(self, job)

    monkeypatch.setattr(SamplingLoop, "submit", submit)
    ((one,), stats) = collected("fault")
    assert one.stop == "infrastructure" and stats.environment_faults == 1
    assert "agent: status 1 after a fault of the server: the server failed: 500" in one.fault


@pytest.mark.parametrize(
    ("what", "reward", "words"),
    [
        ("object", 0.25, ""),
        ("negative", -2.0, ""),
        ("linear", 1.0, ""),  # its last line says 99
        (
            "unpaid",
            None,
            "a function returns it); its last line is a number, but what it",
        ),
        ("twice", None, "must be one number, or an object with reward"),
        ("flooded", None, "more than 65536 bytes"),
        ("nan", None, "nan; must be between -1e+06 and 1e+06"),
        ("huge", None, "1000000000.0; must be between"),
        ("text", None, "must be one number"),
        ("deep", None, "must be one number"),
    ],
)
def test_the_reward_is_what_a_program_writes_to_its_descriptor(what, reward, words):
    ((one,), stats) = collected(what)
    assert one.stop in ("eos", "length") and one.reward == reward and words in one.fault
    assert bool(words) == bool(one.fault) == bool(stats.failures)


def test_the_reward_by_hand():
    assert read_pay(b" 1\n") == (Pay(1.0), "") and read_pay(b'{"reward": 1e6}') == (Pay(1e6), "")
    assert read_pay(b"") == read_pay(b" \n") == (Pay(), "")
    both = b'{"reward": 1, "speed": 2, "right": true, "note": "x", "calls": {"a": 1}}'
    assert read_pay(both) == (Pay(1.0, {"speed": 2.0, "right": 1.0}, {"a": 1.0}), "")
    assert read_pay(b'{"calls": [1, null]}') == (Pay(None, {}, (1.0, None)), "")
    many = json.dumps({f"a{i}": i for i in range(40)}).encode()
    for wrong in (b"true", b"[1]", b"{}", b"\xff", b"inf", b"1" + b"0" * 400, b'{"reward": "1"}', b'{"reward": null}'):
        assert read_pay(wrong)[0] == Pay() and read_pay(wrong)[1], wrong
    for wrong in (b'{"speed": NaN}', b'{"a b": 1}', b'{"1": 1}', many, b'{"calls": 1}', b'{"calls": {"a": "x"}}'):
        assert read_pay(wrong)[0] == Pay() and read_pay(wrong)[1], wrong


def test_the_one_liners_of_the_page_reach_the_descriptor():
    """As `docs/serving.md` writes them, in Python and in a shell."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    python, shell = (
        line.split("  # in ")[0] for line in page.splitlines() if "GRPO_REWARD_FD" in line and " # in " in line
    )
    for words in ([sys.executable, "-c", f"import os\n{python}"], ["sh", "-c", shell]):
        reading, writing = os.pipe()
        environment = {**os.environ, "GRPO_REWARD_FD": str(writing)}
        subprocess.run(words, env=environment, pass_fds=[writing], check=True)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert read_pay(pipe.read())[0] == Pay(0.5), words

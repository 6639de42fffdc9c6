"""Training through the endpoint: programs that ask over HTTP become trajectories, whatever becomes of the programs."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from serving import ROLLOUT, small_policy
from test_readme import TINY

import grpo_roc_jax as g
from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.rollout.records import RunOptions
from grpo_roc_jax.serve.agent_runs import AgentRuns, read_reward
from grpo_roc_jax.types import Problem, RolloutRequest

SCRIPT = Path(__file__).with_name("agent_script.py")


def collected(what, count=1, longest=ROLLOUT.max_row_tokens, timeout_s=60.0, **choice):
    chat, shared, params = small_policy()
    engine = type(shared)(shared.programs, shared._publisher, shared.seed)
    command = f"{sys.executable} {SCRIPT} {what}"
    runs = AgentRuns(AgentCommand(command=command, timeout_s=timeout_s, **choice), chat, engine, longest)
    try:
        request = RolloutRequest(Problem("p", "2+3=", "5 or", "t"), 4, count, first_sample=1)
        return runs.collect(engine.publish(params, 9), [request], RunOptions(step=3))
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
        ("crash", "infrastructure", 1, None),
        ("quiet", "infrastructure", 0, None),
        ("endless", ("turns", "length"), None, 1.0),
        ("hang", "deadline", 1, None),
    ],
)
def test_what_becomes_of_a_program_has_a_typed_outcome(what, stop, turns, reward):
    started = time.monotonic()
    ((one,), stats) = collected(what, timeout_s=3.0 if what == "hang" else 60.0)
    assert one.stop in stop and one.reward == reward and time.monotonic() - started < 50
    assert turns is None or len(one.turns) == turns
    assert stats.stops[one.stop] == 1 and stats.environment_faults == (stop == "infrastructure")
    assert len(one.turns) <= ROLLOUT.max_turns and one.length <= ROLLOUT.max_row_tokens


def test_a_program_that_is_not_there_and_a_run_that_is_interrupted():
    chat, shared, params = small_policy()
    engine = type(shared)(shared.programs, shared._publisher, shared.seed)
    runs = AgentRuns(AgentCommand(command="/nowhere/agent {prompt}"), chat, engine, 99)
    request = RolloutRequest(Problem("p", "2+3=", "5", "t"), 0)
    ((one,), _) = runs.collect(engine.publish(params, 1), [request], RunOptions())
    assert one.stop == "infrastructure" and not one.policy_mask.any()
    runs._words = [sys.executable, str(SCRIPT), "hang"]
    until = time.monotonic() + 2

    def stop():
        if time.monotonic() > until:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.collect(engine.publish(params, 1), [request], RunOptions(before_chunk=stop))
    assert not runs._programs
    with pytest.raises(ValueError, match="whole rollouts"):
        runs.collect(engine.publish(params, 1), [RolloutRequest(request.problem, 0, prefix=(5,))], RunOptions())
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
    ("printed", "reward"),
    [
        ("1", 1.0),
        ("x\n0.5\n\n", 0.5),
        ('{"reward": -2}', -2.0),
        ("", None),
        ("nan", None),
        ("[1]", None),
        ("1\nend", None),
    ],
)
def test_the_reward_is_on_the_last_line(printed, reward):
    assert read_reward(printed) == reward

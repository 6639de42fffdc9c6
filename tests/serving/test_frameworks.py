"""Agents of fourteen frameworks against the endpoint, where installed (`.ci/adapters frameworks`); each trains."""

import asyncio
import importlib.metadata
import json
import os
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.serving.recorded_calls import conversations_of
from tests.helpers.serving import scripted
from tests.serving.framework_agents import CITIES, FRAMEWORKS, TYPED
from tests.test_readme import TINY

pytestmark = pytest.mark.slow
QUESTION = "What is the weather in Rome?"
SEEN = Path(os.environ.get("FRAMEWORKS_TABLE", os.devnull))
"""File that gets a line of JSON for each thing that was seen."""


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    adapter = FRAMEWORKS[request.param]
    for package in adapter.packages:
        pytest.importorskip(package, reason=f"needs {request.param}", exc_type=ImportError)
    CITIES.clear()
    return request.param, adapter


def answer_of(framework, what, turns, rows=1):
    """(what it says, the calls of its session); each call is as sampled, in so many rows."""
    name, adapter = framework
    if not hasattr(adapter, what):
        note(name, what, "-")
        pytest.skip(f"{name} has none")
    with scripted(*turns, config=g.TextConfig(max_calls_per_turn=4), token="key") as server:
        session = server.session()
        agent = adapter(f"http://127.0.0.1:{server.port}/s/one/v1", "key")
        answer = asyncio.run(getattr(agent, what)(QUESTION))
        written = [server.endpoint.chat.turn_ids(turn) for turn in turns]
    assert [call.ids.tolist() for call in session.calls] == written[: len(session.calls)]
    found_rows = conversations_of(session.calls)
    assert len(found_rows) == rows and sum(row.mask.sum() for row in found_rows) == sum(map(len, written))
    return answer


def note(name, what, seen):
    with SEEN.open("a") as file:
        file.write(json.dumps({"framework": name, "what": what, "seen": seen}) + "\n")


@pytest.mark.parametrize("what", ["chat", "stream"])
def test_an_answer(framework, what):
    assert answer_of(framework, what, ["It rains."]) == "It rains."
    note(framework[0], what, "yes")


def test_a_tool_and_two_calls_in_a_turn(framework):
    name, adapter = framework
    assert answer_of(framework, "tools", adapter.turns, adapter.rows) == "It rains in Rome." and CITIES == ["Rome"]
    note(name, "tools", "yes")
    CITIES.clear()
    if adapter.several is not None:  # some make one call at a time
        assert answer_of(framework, "tools", adapter.several) == "Rain in both." and sorted(CITIES) == ["Oslo", "Rome"]
    note(name, "parallel", "yes" if adapter.several else "-")


def test_an_answer_of_a_type_is_given_or_refused_in_words(framework):
    try:
        seen = "yes" if answer_of(framework, "structured", [TYPED]) == "Rome" else "other"
    except Exception as error:
        assert "response_format" in str(error), error
        seen = "refused"
    note(framework[0], "structured", seen)


def test_three_steps_of_training(framework, tmp_path):
    name = framework[0]
    file = Path(__file__).with_name("framework_agents.py")
    words = [f"--environment={{kind: agent, function: '{file}:{name.replace('-', '_')}', timeout_s: 120}}"]
    words += ["--reward.functions=environment", "--reward.truncated=score", "--sft.steps=0", "--steps=3"]
    words += ["--rollout.max_prompt_tokens=256", "--batch.row_length=512", "--log.traces=1"]
    summary = g.train_policy(g.read_config("toy.yaml", *TINY, *words, f"--run_dir={tmp_path}"))
    assert summary["compilations_after_first_step"] == 0
    records = [record for step in (1, 2, 3) for record in read_trace(tmp_path, step)]
    assert records and all(entry.trajectory.policy_mask.any() for entry in records)
    assert all(entry.trajectory.stop in ("eos", "length", "failed") for entry in records)
    metrics = list(read_metrics(tmp_path))
    assert max(entry.get("loss/logprob_gap_max", 0.0) for entry in metrics) < 1e-3
    (package, *_) = framework[1].packages
    # Several distributions may lie below one package: its own has the shortest name.
    distribution = min(importlib.metadata.packages_distributions()[package.partition(".")[0]], key=len)
    version = f"{distribution} {importlib.metadata.version(distribution)}"
    note(name, "trained", version)

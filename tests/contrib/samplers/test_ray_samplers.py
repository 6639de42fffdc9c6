"""Samplers in real Ray actors on this machine: the tokens of one process, though one of them is killed on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.method import compose
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.policy import initial_state
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.stream.rollout_stream import RolloutStream
from grpo_roc_jax.stream.samplers import SamplerPool, remote_samplers
from grpo_roc_jax.train import sample_step, train
from tests.helpers.arena import wait_until
from tests.test_train import config_in
from tests.test_train import on_one_device as on_one_device  # a fixture

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the ray extra is not installed")

WORDS = ("--group.problems=4", "--rollout.max_response_tokens=48", "--batch.row_length=72", "--data.eval_problems=0")
REMOTE = ("--rollout.samplers=ray", "--rollout.samplers.count=2")


def kill(member) -> None:
    """Ends the process of a sampler of this machine."""
    os.kill(int(re.search(r"process (\d+)", member.host)[1]), signal.SIGKILL)


@contextmanager
def stream_of(config):
    """(policy, sampling, stream, pool) of a configuration."""
    with make_parts(config) as (policy, sampling), remote_samplers(config, policy, sampling) as pool:
        streams = config.rollout.step_limit.streams
        yield policy, sampling, RolloutStream(config, sampling, policy.mesh, pool) if streams else None, pool


def rolled_out(config, steps, before=lambda step, pool: None):
    """The rows of some steps whose weights differ, by step, problem and sample; the metrics of samplers."""
    rows, metrics = {}, []
    with stream_of(config) as (policy, sampling, stream, pool):
        params = initial_state(config, policy.model, policy.mesh).params
        problems = make_problem_stream(config.data, problems=config.group.problems, seed=config.seed)
        run = RunState(SimpleNamespace(params=params), (), problems, compose.initial_state(config))
        for step in range(steps):
            run.train.params = jax.tree.map(lambda leaf, step=step: leaf + 0.01 * step, params)
            before(step, pool)
            samples = sample_step(config, policy, sampling, run, stream)
            for group in samples.groups:
                rows |= {(step, group.problem.uid, t.sample): (t, verdict) for t, verdict in group.pairs}
            if stream is not None:
                metrics.append(stream.after_update(run, samples.groups, {})[0])
            run.step += 1
    return rows, metrics


@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize("lora", [(), ("--lora={kind: low_rank, rank: 2}",)])
def test_rows_are_those_of_one_process_though_a_sampler_is_killed(tmp_path, lora):
    """With lag 0: the same weights, keys and positions. The killed sampler's rows are sampled again, equally."""
    plain, _ = rolled_out(config_in(tmp_path, *WORDS, *lora), 3)

    def kill_in_the_middle(step, pool):
        def kill_one():
            kill(wait_until(lambda: [member for member in pool.members if member.ready and member.tasks])[0])

        if step == 1:
            threading.Thread(target=kill_one).start()

    config = config_in(tmp_path, *WORDS, *lora, *REMOTE, "--rollout.step_limit.lag=0")
    rows, metrics = rolled_out(config, 3, kill_in_the_middle)
    assert rows.keys() == plain.keys() and len(rows) == 3 * 4 * config.resample.sampled(config.group.size)
    for key, (trajectory, verdict) in rows.items():
        other, other_verdict = plain[key]
        assert (trajectory.stop, verdict) == (other.stop, other_verdict)
        np.testing.assert_array_equal(trajectory.tokens, other.tokens)
        np.testing.assert_array_equal(trajectory.versions, other.versions)
        np.testing.assert_allclose(trajectory.logprobs, other.logprobs, atol=1e-5)
    total = {name: sum(row[f"samplers/{name}"] for row in metrics) for name in ("lost", "groups_again", "rows_lost")}
    assert total["lost"] == 1 and total["groups_again"] >= 1 and total["rows_lost"] >= total["groups_again"]


@pytest.mark.usefixtures("on_one_device")
def test_a_run_goes_on_while_samplers_are_killed_and_join(tmp_path, monkeypatch):
    """Each problem is trained once, in whole groups, with tokens of at most one version before; another sampler takes
    the place of each that was killed."""
    publish, killed = SamplerPool.publish, []

    def publish_and_kill(pool, policy, trained, version):
        publish(pool, policy, trained, version)
        ready = [member for member in pool.members if member.ready]
        if version in (2, 4) and ready:
            killed.append(version)
            kill(ready[-1])

    monkeypatch.setattr(SamplerPool, "publish", publish_and_kill)
    summary = train(config_in(tmp_path / "run", *WORDS, *REMOTE, "--steps=8"))
    assert summary["steps"] == 8 and killed == [2, 4]
    rows = [row for row in read_metrics(tmp_path / "run") if "rollout/lag_max" in row]
    assert sum(row["samplers/lost"] for row in rows) == 2 and sum(row["samplers/joined"] for row in rows) >= 3
    assert max(row["rollout/lag_max"] for row in rows) <= 1
    uids = []
    for step in range(1, 9):
        records = list(read_trace(tmp_path / "run", step))
        uids += sorted({record.problem.uid for record in records})
        assert len(records) == 4 * 8
        for record in records:
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            assert step - 1 - versions.min() <= 1
    assert len(uids) == len(set(uids)) == 8 * 4


def test_an_address_without_a_cluster_is_refused(tmp_path):
    config = config_in(tmp_path, *REMOTE, "--rollout.samplers.address=127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"address = 127\.0\.0\.1:1: no Ray cluster answers there"), stream_of(config):
        pass


def test_the_benchmark_kills_a_sampler_and_accounts_for_every_group():
    words = ["--steps=7", "--kill=2", "--alone=1"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.bench_samplers", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    accounts = summary["accounts"]
    assert summary["killed"]["lost"] == 1 and summary["killed"]["seconds_to_join"] > 0
    assert accounts["groups_trained"] + accounts["groups_open"] == accounts["groups_begun"]
    assert not accounts["lost"] and not accounts["groups_twice"] and not accounts["keys_twice"]

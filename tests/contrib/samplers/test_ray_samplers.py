"""Samplers in real Ray actors on this machine: the tokens of one process, though one of them is killed on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from tests.helpers.arena import wait_until
from tests.stream.test_rollout_stream import rolled_out
from tests.test_train import config_in

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the ray extra is not installed")

WORDS = ("--group.problems=4", "--rollout.max_response_tokens=48", "--batch.row_length=72", "--data.eval_problems=0")
REMOTE = ("--rollout.samplers=ray", "--rollout.samplers.count=2")


def rows_of(config, before=lambda step, pool: None):
    """The rows of three steps whose weights differ, by step, problem and sample; the metrics of samplers."""

    def change(params, step):
        return jax.tree.map(lambda leaf: leaf + 0.01 * step, params)

    batches, metrics, _ = rolled_out(config, 3, change, before)
    pairs = ((step, group, pair) for step, groups in enumerate(batches) for group in groups for pair in group.pairs)
    return {(step, group.problem.uid, pair[0].sample): pair for step, group, pair in pairs}, metrics


@pytest.mark.parametrize("lora", [(), ("--lora={kind: low_rank, rank: 2}",)])
def test_rows_are_those_of_one_process_though_a_sampler_is_killed(tmp_path, lora):
    """With lag 0: the same weights, keys and positions. The killed sampler's rows are sampled again, equally."""
    plain, _ = rows_of(config_in(tmp_path, *WORDS, *lora))

    def kill_in_the_middle(step, pool):
        def kill_one():
            member = wait_until(lambda: [member for member in pool.members if member.ready and member.tasks])[0]
            os.kill(int(re.search(r"process (\d+)", member.host)[1]), signal.SIGKILL)

        if step == 1:
            threading.Thread(target=kill_one).start()

    config = config_in(tmp_path, *WORDS, *lora, *REMOTE, "--rollout.step_limit.lag=0")
    rows, metrics = rows_of(config, kill_in_the_middle)
    assert rows.keys() == plain.keys() and len(rows) == 3 * 4 * config.resample.sampled(config.group.size)
    for key, (trajectory, verdict) in rows.items():
        other, other_verdict = plain[key]
        assert (trajectory.stop, verdict) == (other.stop, other_verdict)
        np.testing.assert_array_equal(trajectory.tokens, other.tokens)
        np.testing.assert_array_equal(trajectory.versions, other.versions)
        np.testing.assert_allclose(trajectory.logprobs, other.logprobs, atol=1e-5)
    total = {name: sum(row[f"samplers/{name}"] for row in metrics) for name in ("lost", "groups_again", "rows_lost")}
    assert total["lost"] == 1 and total["groups_again"] >= 1 and total["rows_lost"] >= total["groups_again"]


def test_an_address_without_a_cluster_is_refused(tmp_path):
    config = config_in(tmp_path, *REMOTE, "--rollout.samplers.address=127.0.0.1:1")
    with pytest.raises(g.ConfigError, match=r"address = 127\.0\.0\.1:1: no Ray cluster answers there"):
        rolled_out(config, 1)


def test_the_benchmark_kills_a_sampler_and_accounts_for_every_group():
    words = ["--steps=7", "--kill=2", "--alone=1"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.bench_samplers", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    accounts = summary["accounts"]
    assert summary["killed"]["lost"] == 1 and summary["killed"]["seconds_to_join"] > 0
    assert accounts["groups_trained"] + accounts["groups_open"] == accounts["groups_begun"]
    assert not accounts["lost"] and not accounts["groups_twice"] and not accounts["keys_twice"]

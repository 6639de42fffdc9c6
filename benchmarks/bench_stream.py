"""How many more steps does a run do when its rollouts run on (`rollout.step_limit stream`)?

The long tail: turns of log-normal length, tools that sleep for 0.05 to 5 s (log-uniform), a small model on a CPU, real
selection, scoring pass and update. Each lag runs its steps in one process, the lags in turn, `--repeats` times. The
script of a row derives from its random key, so that all lags roll out the same work.

    python benchmarks/bench_stream.py --steps 20 --lags 0 1 2 --repeats 2 --rollout.slots=64

Prints one JSON line: steps per second of each lag (the first step left out), and their ratio to lag 0.

With `--seeds` each seed is a repeat, and the line also compares the mean reward of the rollouts in the second half of
the steps: that of each lag less that of lag 0 by seed, and the 95 % interval of a bootstrap over the seeds. A step has
as many tokens in each. With `--rows` each run appends a line to a file, and runs that the file has are not repeated.

    python benchmarks/bench_stream.py --steps 20 --seeds 0 1 2 3 4 --lags 0 1 2 --optim.lr=3e-3 --rows rows.jsonl

With `--processes 4` instead: how much sooner have so many processes rolled out a step whose groups take unequal time,
if each takes the next group when it has a free slot, than if the groups are divided beforehand? The trajectories must
be equal. The line has the seconds of both ways and their ratio. The factor of a group is random, or with `--hard 2` the
tools of every fourth group take twice as long, as where sources of unequal difficulty take turns: one of the divided
shares is then twice the others.

    python benchmarks/bench_stream.py --processes 4 --hard 2 --repeats 5 --group.problems=96 --group.size=2 \
        --resample=none --rollout.slots=4 --rollout.narrow=[] --rollout.append_lengths 32 --model.layers=1
"""

import argparse
import heapq
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.engine.protocol import Finish, Observe, RunOptions, Wait
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.pod.processes import joined
from grpo_roc_jax.rollout import sampler as sampler_module
from grpo_roc_jax.rollout.sampler import render
from grpo_roc_jax.run import sample
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.learning import make_learner
from grpo_roc_jax.run.start import fresh_run
from grpo_roc_jax.stream import rollout_stream
from grpo_roc_jax.train import sample_step
from grpo_roc_jax.types import RolloutRequest, Turn

WORDS = """
--group.problems=4 --group.size=8 --data.eval_problems=0 --rollout.slots=64 --rollout.max_response_tokens=232
--batch.row_length=256 --batch.rows=4 --sft.steps=0 --optim.lr=1e-4 --optim.schedule=constant --tools.workers=1
--tools.preload=[] --reward.functions=benchmarks.bench_stream:even --reward.truncated=score --sharding.data=1
""".split()  # noqa: SIM905 (a command line reads better as one)
TURNS = (1, 2, 3)
OBSERVATION = 12


def even(problem, trajectories):
    """Pays for an even first token."""
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


class SleepingTools:
    """Rows with turns of given lengths; after each but the last a tool sleeps."""

    def __init__(self, requests, step: int, spread: float = 0.0, hard: float = 1.0, every: int = 1):
        """`spread` is the standard deviation of the logarithm of a factor of all sleeps of a group, at most e; `hard`
        is the factor of each `every`-th group."""
        keys = [(step, r.place, sample) for r in requests for sample in r.samples]
        draws = [np.random.default_rng(key) for key in keys]
        self.turns = [np.clip(rng.lognormal(3.0, 0.8, rng.choice(TURNS)), 4, 60).astype(int).tolist() for rng in draws]
        self.sleeps = [np.exp(rng.uniform(np.log(0.05), np.log(5.0), len(TURNS))) for rng in draws]
        factors = [np.exp(min(spread * np.random.default_rng(key[:2]).normal(), 1.0)) for key in keys]
        factors = [base * hard ** (key[1] % every == 0) for base, key in zip(factors, keys, strict=True)]
        self.sleeps = [base * factor for base, factor in zip(self.sleeps, factors, strict=True)]
        self.left = [row[0] for row in self.turns]
        self.done: list[list[Turn]] = [[] for _ in self.turns]
        self.calls: list[tuple[float, int]] = []

    def find_stop(self, index, new_tokens, before):
        remaining = self.left[index]
        self.left[index] -= len(new_tokens)
        return remaining if self.left[index] <= 0 else None

    def turn_ended(self, index, turn):
        done = self.done[index]
        done.append(Turn(turn.start, turn.start + len(turn.tokens), ""))
        if len(done) >= len(self.turns[index]):
            return Finish("answer")
        heapq.heappush(self.calls, (time.perf_counter() + self.sleeps[index][len(done)], index))
        return Wait()

    def poll(self, timeout_s):
        if self.calls and timeout_s > 0:
            time.sleep(max(0.0, min(timeout_s, self.calls[0][0] - time.perf_counter())))
        ready = []
        while self.calls and self.calls[0][0] <= time.perf_counter():
            index = heapq.heappop(self.calls)[1]
            self.left[index] = self.turns[index][len(self.done[index])]
            ready.append((index, Observe(np.full(OBSERVATION, 65, np.int32))))
        return ready

    def cancelled(self, index):
        return None

    def completed(self, index, trajectory):
        return replace(trajectory, turns=tuple(self.done[index]))


def scripted(engine, chat, executor, requests, options):
    """In place of `sampler.with_tools`."""
    return render(requests, chat), SleepingTools(requests, options.key_step), options


def unequal(engine, chat, executor, requests, options, hard=None):
    """The same with groups that take unequal time."""
    shape = {"spread": 1.0} if hard is None else {"hard": hard, "every": jax.process_count()}
    return render(requests, chat), SleepingTools(requests, options.key_step, **shape), options


def several_processes(count: int) -> None:
    """Runs this command line in so many processes of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env=environ | {"JAX_PROCESS_ID": str(index)})
        for index in range(count)
    ]
    sys.exit(max(process.wait() for process in processes))


def one_of_several(options: argparse.Namespace, more: list[str]) -> dict | None:
    """The summary, in the first process."""
    config = read_config(*WORDS, "--sharding.data=-1", *more)
    seconds: dict[str, list[float]] = {"divided": [], "shared": []}
    with (
        joined(config.distributed) as processes,
        make_parts(config, processes=processes) as (policy, sampling),
        mock.patch.object(sampler_module, "with_tools", partial(unequal, hard=options.hard)),
    ):
        run = fresh_run(config, policy, sampling)
        weights = sampling.sampler.publish(policy.full(run.train.params), 0)
        sampling.sampler.engine.warmup(weights)
        size = config.resample.sampled(config.group.size)
        requests = [RolloutRequest(p, i, size) for i, p in enumerate(next(run.stream))]
        for step in range(options.repeats):
            rollouts = {}
            for way in seconds:
                patched = mock.patch.object(sample, "divided_before", lambda _, requests: len(requests))
                processes.gather(None)
                begun = time.perf_counter()
                with patched if way == "divided" else nullcontext():
                    groups = sampling.sample_requests(weights, requests, RunOptions(step)).groups
                seconds[way].append(round(time.perf_counter() - begun, 2))
                rollouts[way] = [(t.tokens.tolist(), t.sample) for group in groups for t in group.trajectories]
            assert rollouts["divided"] == rollouts["shared"]
        ratios = [divided / shared for divided, shared in zip(*seconds.values(), strict=True)]
        shape = {"processes": processes.count, "groups": len(requests), "rows": size * len(requests), "words": more}
        shape["hard"] = options.hard
        summary = {"benchmark": "shared queue", "jax": jax.__version__} | shape
        summary |= {"seconds": seconds, "ratio": round(statistics.median(ratios), 3), "equal": True}
        return summary if processes.first else None


def run_steps(config: Config, parts: tuple, learner, *, overlap: bool) -> dict[str, float]:
    """The loop of `train.train_stage` without records; means over the steps after the first."""
    (policy, sampling), steps, rows = parts, config.steps, []
    run, stream = fresh_run(config, *parts), rollout_stream.RolloutStream(config, sampling, policy.mesh)
    if overlap:
        learner.learner.meanwhile = stream.meanwhile
    begun = 0.0
    for step in range(steps):
        samples = sample_step(config, policy, sampling, run, stream)
        groups = run.buffer.take(config.group.problems)
        batches = learner.batches(groups, (), run)
        run.train, batches, measured = learner.update(run, batches)
        aged, _ = stream.after_update(run, groups, measured)
        run.method = next_state(samples.groups, groups, config, run.method, {})
        run.step += 1
        if not step:
            begun = time.perf_counter()
        else:
            rows.append(samples.metrics() | measured | aged)
    seconds = time.perf_counter() - begun
    sampling.sampler.engine.release()
    names = ("rollout/sampled_tokens", "rollout/lag_mean", "rollout/lag_max", "rollout/partial_share", "time/update_s",
             "time/overlapped_s", "rollout/dropped_stale", rollout_stream.ESS)  # fmt: skip
    columns = {name: [row[name] for row in rows if name in row] for name in names}  # some steps have nothing to learn
    means = {name: round(float(np.mean(values)), 4) for name, values in columns.items() if values}
    late = [row["rollout/reward"] for row in rows[(steps - 1) // 2 :]]  # `rows` begins with the second step
    return {"steps_per_s": (steps - 1) / seconds, "late_reward": round(float(np.mean(late)), 4)} | means


def one_run(config: Config, overlap: bool) -> dict[str, float]:
    """The steps of one seed and lag, with everything compiled before."""
    with make_parts(config) as (policy, sampling):
        sampler = sampling.sampler
        run, learner = fresh_run(config, policy, sampling), make_learner(config, policy, sampler.chat)
        sampler.engine.warmup(sampler.engine.publish(policy.full(run.train.params), 0))
        learner.warmup(run)
        del run
        return run_steps(config, (policy, sampling), learner, overlap=overlap)


def gain_of(gains: np.ndarray) -> dict[str, float]:
    """Mean over the seeds, and the 95 % interval of the means of seeds drawn with replacement."""
    drawn = np.random.default_rng(0).choice(gains, (10_000, len(gains))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"mean": round(float(gains.mean()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", help="one repeat each")
    parser.add_argument("--rows", type=Path, help="file with a JSON line a run; with --seeds")
    parser.add_argument("--still", action="store_true", help="leave the engine alone during updates")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--hard", type=float, help="factor of the tools of every P-th group")
    options, more = parser.parse_known_args()
    if options.processes:
        if "JAX_PROCESS_ID" not in os.environ:
            several_processes(options.processes)
        if (summary := one_of_several(options, more)) is not None:
            print(json.dumps(summary))
        return
    runs: dict[int, list[dict]] = {lag: [] for lag in options.lags}
    known = options.rows.read_text(encoding="utf-8").splitlines() if options.rows and options.rows.exists() else []
    known = {json.dumps(row.pop("run")): row for row in map(json.loads, known)}
    with mock.patch.object(sampler_module, "with_tools", scripted):
        for repeat, seed in enumerate(options.seeds or [0] * options.repeats):
            for lag in options.lags:
                named = [repeat if options.seeds is None else seed, lag, options.steps, not options.still, *more]
                key = json.dumps(named)
                if key not in known:
                    words = [*WORDS, f"--steps={options.steps}", "--rollout.step_limit=stream", f"--seed={seed}", *more]
                    known[key] = one_run(read_config(*words, f"--rollout.step_limit.lag={lag}"), not options.still)
                    if options.rows:
                        with options.rows.open("a", encoding="utf-8") as file:
                            file.write(json.dumps({"run": named} | known[key]) + "\n")
                runs[lag].append(known[key])
                print(lag, known[key], flush=True)
    speed = {lag: statistics.median(run["steps_per_s"] for run in each) for lag, each in runs.items()}
    summary = {
        "benchmark": "stream",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "steps": options.steps,
        "overlap": not options.still,
        "words": more,
        "steps_per_s": {lag: round(value, 4) for lag, value in speed.items()},
        "ratio": {lag: round(value / speed[options.lags[0]], 3) for lag, value in speed.items()},
        "runs": runs,
    }
    if options.seeds:
        paid = {lag: np.array([run["late_reward"] for run in each]) for lag, each in runs.items()}
        summary["late_reward"] = {lag: round(float(rewards.mean()), 4) for lag, rewards in paid.items()}
        others = options.lags[1:] if len(options.seeds) > 1 else []
        summary["gain"] = {lag: gain_of(paid[lag] - paid[options.lags[0]]) for lag in others}
        for lag, gain in summary["gain"].items():
            print(
                "reward at lag {} less lag {}: {mean:+.4f}, {low:+.4f} to {high:+.4f}".format(
                    lag, options.lags[0], **gain
                )
            )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

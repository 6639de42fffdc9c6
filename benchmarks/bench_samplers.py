"""Does a trainer with samplers in processes of their own keep up with sampling alone, though one of them is killed?

One trainer and `--samplers` Ray actors on this machine, the toy model, and tools that sleep for 0.05 to 5 s
(log-uniform) as in `bench_stream.py`: rows wait most of their time, so that slots are what is scarce. At step `--kill`
the process of a sampler gets SIGKILL, and another one takes its place. Everything runs in one call:

1. alone: one process only samples, without scoring pass and update: step after step, each of which waits for its
   slowest row, and as a stream with the lag of the trainer. The steps per second of the stream are the unit.
2. apart: the trainer takes groups from the samplers and trains on them, with a lag of `--lag`.

The ceiling of the ratio of apart to alone is the number of samplers: each has the slots of the process that samples
alone, and none of them waits for updates. It is lower where updates take longer than that, where all processes share a
few cores, or where the groups of the lag do not fill the slots of all of them.

    python benchmarks/bench_samplers.py --steps 12 --kill 5

Ends with one JSON line: steps per second of both and their ratio before the kill and in all, what the kill cost, how
long it took until the new sampler had joined and returned its first group, and the accounts: every group that began was
trained on once or is open at the end, and no random key was used for two rows that were trained on.
"""

import argparse
import json
import os
import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import jax

from benchmarks.bench_stream import WORDS, scripted
from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.contrib.samplers.ray_samplers import RayTransport
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.rollout import sampler as sampler_module
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.learning import make_learner
from grpo_roc_jax.run.start import fresh_run
from grpo_roc_jax.stream.rollout_stream import RolloutStream
from grpo_roc_jax.stream.samplers import RemoteSampler, SamplerPool, sent_bytes
from grpo_roc_jax.train import sample_step


def slow_sampler(config: Config) -> RemoteSampler:
    """A sampler whose tools sleep, in an actor."""
    mock.patch.object(sampler_module, "with_tools", scripted).start()  # until its process ends
    return RemoteSampler(config)


def alone(config: Config, parts: tuple, steps: int, *, streams: bool) -> float:
    """Steps per second of a process that only samples; the first step is left out."""
    policy, sampling = parts
    run, begun = fresh_run(config, *parts), 0.0
    sampling.sampler.engine.warmup(sampling.sampler.engine.publish(policy.full(run.train.params), 0))
    stream = RolloutStream(config, sampling, policy.mesh) if streams else None
    for step in range(steps + 1):
        begun = time.perf_counter() if step == 1 else begun
        sample_step(config, policy, sampling, run, stream)
        run.buffer.take(config.group.problems)
        run.step += 1
    seconds = time.perf_counter() - begun
    sampling.sampler.engine.release()
    return steps / seconds


class Watched(SamplerPool):
    """A pool that remembers when samplers joined and returned groups."""

    def __init__(self, *arguments):
        self.events: list[tuple[float, str, str]] = []
        super().__init__(*arguments)

    def _take(self, member):
        ready, tasks = member.ready, set(member.tasks)
        changed = super()._take(member)
        if member.ready and not ready:
            self.events.append((time.perf_counter(), "joined", member.name))
        if member in self.members and tasks - set(member.tasks):
            self.events.append((time.perf_counter(), "returned", member.name))
        return changed

    def seconds_until(self, event: str, name: str, since: float) -> float | None:
        """From then until the sampler did so first; None where the run ended before."""
        return next((at - since for at, what, who in self.events if (what, who) == (event, name)), None)


def apart(config: Config, parts: tuple, learner, pool: Watched, kill_at: int) -> dict:
    """The loop of `train.train_stage` without records."""
    (policy, sampling), run = parts, fresh_run(config, *parts)
    stream = RolloutStream(config, sampling, policy.mesh, pool)
    learner.learner.meanwhile = stream.meanwhile
    begun, metrics, keys, groups_trained, numbers = [], [], Counter(), 0, Counter()
    take, killed, killed_at = stream._take, "", 0.0

    def counted(trained):
        groups = take(trained)
        numbers.update(group.number for group in groups)
        keys.update(
            (part.step, part.place, row.sample)
            for group in groups
            for part, rows in zip(group.parts, group.rows, strict=True)
            for row in rows
        )
        return groups

    stream._take = counted
    for step in range(config.steps):
        begun.append(time.perf_counter())
        if step == kill_at:
            victim = max((m for m in pool.members if m.ready), key=lambda m: m.rows)
            os.kill(int(re.search(r"process (\d+)", victim.host)[1]), signal.SIGKILL)
            killed, killed_at = f"sampler {pool._started + 1}", time.perf_counter()
        samples = sample_step(config, policy, sampling, run, stream)
        groups = run.buffer.take(config.group.problems)
        batches = learner.batches(groups, (), run)
        run.train, batches, measured = learner.update(run, batches)
        metrics.append(measured | stream.after_update(run, groups, measured)[0])
        run.method = next_state(samples.groups, groups, config, run.method, {})
        groups_trained += len(samples.groups)
        run.step += 1
    begun.append(time.perf_counter())
    while kill_at < config.steps and not any(event[1:] == ("returned", killed) for event in pool.events):
        pool.advance(1.0)  # a short run may end before the new sampler has returned a group
        if time.perf_counter() - killed_at > 300:
            break
    total = {name: sum(row[f"samplers/{name}"] for row in metrics) for name in ("lost", "rows_lost", "groups_again")}
    still_open = {group.number for group in stream.open_groups}
    return {
        "before_kill": (kill_at - 1) / (begun[kill_at] - begun[1]),
        "all": (config.steps - 1) / (begun[-1] - begun[1]),
        "update_s": statistics.median(row["time/update_s"] for row in metrics if "time/update_s" in row),
        "lag_max": max(row["rollout/lag_max"] for row in metrics),
        "killed": total
        | {
            "seconds_to_join": pool.seconds_until("joined", killed, killed_at),
            "seconds_to_first_group": pool.seconds_until("returned", killed, killed_at),
        },
        "accounts": {
            "groups_begun": stream._begun,
            "groups_trained": groups_trained,
            "groups_open": len(still_open),
            "lost": len(set(range(stream._begun)) - set(numbers) - still_open),
            "groups_twice": sum(count > 1 for count in numbers.values()),
            "keys_twice": sum(count > 1 for count in keys.values()),
            "rows": sum(keys.values()),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--alone", type=int, default=4, help="steps of the process that only samples")
    parser.add_argument("--samplers", type=int, default=2)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--kill", type=int, default=5, help="the step in which a sampler is killed, from 2")
    args, more = parser.parse_known_args()
    remote = [f"--rollout.samplers={{kind: ray, count: {args.samplers}}}", f"--rollout.step_limit.lag={args.lag}"]
    config = read_config(*WORDS, f"--steps={args.steps}", *remote, *more)
    limit = ("--rollout.step_limit=stream", f"--rollout.step_limit.lag={args.lag}")
    plain = replace(read_config(*WORDS, *limit, *more), steps=10**6)
    print(f"ceiling: {args.samplers} times the steps of sampling alone, where updates and cores do not bound it first")
    with mock.patch.object(sampler_module, "with_tools", scripted):
        with make_parts(plain) as parts:
            parts[1].sampler.engine.warmup(
                parts[1].sampler.engine.publish(parts[0].full(fresh_run(plain, *parts).train.params), 0)
            )
            by_step, steps_alone = (alone(plain, parts, args.alone, streams=streams) for streams in (False, True))
        print(f"alone: {by_step:.3f} steps/s step by step, {steps_alone:.3f} as a stream", flush=True)
        with make_parts(config) as parts:
            policy, sampling = parts
            transport = RayTransport(config.rollout.remote, partial(slow_sampler, config), (), sent_bytes(policy))
            try:
                pool = Watched(transport, sampling, args.samplers, config.rollout.remote.timeout_s)
                learner = make_learner(config, policy, sampling.sampler.chat)
                learner.warmup(fresh_run(config, *parts))
                measured = apart(config, parts, learner, pool, args.kill)
            finally:
                transport.close()
    summary = {
        "benchmark": "samplers",
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "ray": transport._ray.__version__,
        "samplers": args.samplers,
        "lag": args.lag,
        "steps": args.steps,
        "slots": config.rollout.slots,
        "words": more,
        "ceiling": args.samplers,
        "steps_per_s": {"alone": round(steps_alone, 4), "alone_by_step": round(by_step, 4)}
        | {name: round(measured.pop(name), 4) for name in ("before_kill", "all")},
    }
    speed = summary["steps_per_s"]
    summary["ratio"] = {name: round(speed[name] / speed["alone"], 3) for name in ("before_kill", "all")}
    print(json.dumps(summary | measured))


if __name__ == "__main__":
    main()

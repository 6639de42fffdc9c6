"""What does a rollout of an agent cost beside its calls: a program that is started, one that is forked, and a function?

The agent imports a framework and asks twice, with the client of the standard library; a step is 8 rollouts at a time.
`--rollouts 64 --calls 45 --tokens 4 --variants function` is the load of many agents.
`started` is an interpreter for each rollout (`environment.warm false`), `forked` the same program from a process that
has made its imports, `function` an `async def` in threads, `processes` in four processes. The first step of each, which
imports, is not in the medians, and is reported beside them. `environment_share` is the share of a step in which nothing
was to be sampled.

`start` runs programs that import and end, without a policy: processor seconds of a rollout. `step` is the whole.

    pip install langgraph langchain-openai
    python benchmarks/bench_agents.py --cases start step --imports langgraph.prebuilt langchain_openai

Prints a JSON line for each case. Processor seconds are those of all processes together.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_roc_jax.environments.config import AgentCommand, HostProcesses
from grpo_roc_jax.serving.agent_ends import AgentCall
from grpo_roc_jax.serving.agent_programs import ProgramAgent
from grpo_roc_jax.types import Problem, RolloutRequest

AGENT = """
import asyncio, json, os, sys, time, urllib.request
{imports}

def ask(base_url, api_key, messages):
    body = json.dumps({{"messages": messages, "max_tokens": {tokens}}}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {{"Authorization": "Bearer " + api_key}})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def play(row, base_url, api_key):
    messages, took = [{{"role": "user", "content": row["prompt"]}}], []
    for call in range({calls}):
        begun = time.perf_counter()
        messages.append({{"role": "assistant", "content": ask(base_url, api_key, messages)}})
        took.append(time.perf_counter() - begun)
        messages.append({{"role": "user", "content": "go"}})
    with open({times!r}, "a") as file:
        print(json.dumps(took), file=file)
    return 1.0

async def rollout(row, base_url, api_key):
    return await asyncio.to_thread(play, row, base_url, api_key)

if __name__ == "__main__":
    reward = play(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    os.write(int(os.environ["GRPO_REWARD_FD"]), str(reward).encode())
"""


def processor_s() -> float:
    """Seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def start(options: argparse.Namespace) -> dict:
    """Processor seconds of a program that makes its imports and ends: started, and forked after the first two."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench_agent.py"
        file.write_text("".join(f"import {name}\n" for name in options.imports))
        for name, warm, count in (("started", False, options.rollouts), ("forked", True, 10 * options.rollouts)):
            spent, wall = [], []
            for rollouts in (2, 2 + count):  # the difference leaves out what is done once
                agent = ProgramAgent(AgentCommand(command=f"{sys.executable} {file}", warm=warm))
                begun, begun_s = processor_s(), time.perf_counter()
                ends = [agent.play(str(i), AgentCall({}, "", "http://127.0.0.1:1/v1", "")) for i in range(rollouts)]
                agent.close()
                assert not any(end.status for end in ends), ends[0].errors
                spent.append(processor_s() - begun)
                wall.append(time.perf_counter() - begun_s)
            a_rollout = {"processor_s": spent[1] - spent[0], "wall_s": wall[1] - wall[0]}
            measured[name] = {key: round(value / count, 3) for key, value in a_rollout.items()}
    return {"case": "start", "imports": options.imports, "rollout": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imports", nargs="*", default=["langgraph.prebuilt", "langchain_openai"])
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2, help="of a rollout")
    parser.add_argument("--tokens", type=int, default=16, help="of a call")
    parser.add_argument("--steps", type=int, default=4, help="of each variant, the first included")
    parser.add_argument("--variants", nargs="+", default=["started", "forked", "function", "processes"])
    parser.add_argument("--cases", nargs="+", choices=("start", "step"), default=("start", "step"))
    options = parser.parse_args()
    if "start" in options.cases:
        print(json.dumps(start(options)), flush=True)
    if "step" in options.cases:
        step(options)


def step(options: argparse.Namespace) -> None:
    """Whole steps of each variant."""
    from benchmarks.bench_serve import make_policy
    from grpo_roc_jax.engine.protocol import RunOptions
    from grpo_roc_jax.serving.agent_runs import AgentRuns

    chat, engine, params = make_policy(options.rollouts)
    weights = engine.publish(params, 1)
    engine.warmup(weights)
    request = RolloutRequest(Problem("p", "2+3=", "5", "bench"), 0, options.rollouts)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench_agent.py"
        times, imports = Path(folder) / "times", "\n".join(f"import {name}" for name in options.imports)
        file.write_text(AGENT.format(imports=imports, tokens=options.tokens, calls=options.calls, times=str(times)))
        command = AgentCommand(command=f"{sys.executable} {file}")
        function = AgentCommand(function=f"{file}:rollout")
        choices = {
            "started": replace(command, warm=False),
            "forked": command,
            "function": function,
            "processes": replace(function, host=HostProcesses(workers=4)),
        }
        measured = {}
        for name in options.variants:
            runs = AgentRuns(choices[name], chat, engine.sibling(), 4096, [""])
            seconds, shares, rates = [], [], []
            begun_cpu = processor_s()
            for number in range(options.steps):
                begun = time.perf_counter()
                rollouts, stats = runs.collect(weights, [request], RunOptions(step=number))
                seconds.append(time.perf_counter() - begun)
                shares.append(stats.metrics()["time/environment_s"] / stats.seconds)
                rates.append(stats.sampled_tokens / seconds[-1])
                assert all(item.reward == 1.0 for item in rollouts), rollouts[0].fault
            runs.close()
            took = [
                second for line in times.read_text().splitlines()[options.rollouts :] for second in json.loads(line)
            ]
            times.unlink()
            measured[name] = {
                "first_step_s": round(seconds[0], 2),
                "step_s": round(statistics.median(seconds[1:]), 2),
                "tokens_per_s": round(statistics.median(rates[1:]), 1),
                "call_s": {str(q): round(float(np.quantile(took, q)), 3) for q in (0.5, 0.99)},
                "environment_share": round(statistics.median(shares[1:]), 2),
                "processor_s_all_steps": round(processor_s() - begun_cpu, 2),
            }
    packages = {item.partition(".")[0].replace("_", "-") for item in options.imports}
    print(
        json.dumps(
            {
                "case": "step",
                "device": f"{os.cpu_count()} CPU cores",
                "rollouts": options.rollouts,
                "calls": options.calls,
                "steps": options.steps,
                "packages": {name: importlib.metadata.version(name) for name in sorted(packages)},
                "variants": measured,
            }
        )
    )


if __name__ == "__main__":
    main()

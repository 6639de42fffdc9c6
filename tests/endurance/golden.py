"""Golden values of the package: does a change of structure leave every number as it was?

    python -m tests.endurance.golden write before.json            # on the old code
    python -m tests.endurance.golden write after.json             # on the new code
    python -m tests.endurance.golden compare before.json after.json

`write` trains the toy with seeds 0 and 1 (metrics without times, parameters), computes the training rows of every
method file on fixed groups, and exports a small model of each family. `--parts methods exports` leaves the toy out.
Values are stored as digests; `compare` names what differs and ends with status 1.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.config import read_config
from grpo_roc_jax.method.compose import Scores, initial_state, next_state, resample_group, subset, train_rows
from grpo_roc_jax.method.planning import Wave, first_wave, next_wave
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.record.checkpoint import restore_params
from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Condition, Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict

ROOT = Path(__file__).resolve().parent.parent.parent
CLOCK = ("time/", "compile/", "tools/", "rollout/tokens_per_s", "rollout/compilations", "rollout/slot_use")
CLOCK += ("sft/tokens_per_s",)
"""Metrics that depend on the clock or on the process."""


def method_files() -> list[Path]:
    """Every recipe of a method, of the core and of `contrib/methods`, by name."""
    folders = (ROOT / "configs/methods", ROOT / "grpo_roc_jax/contrib/methods")
    return sorted((path for folder in folders for path in folder.glob("*.yaml")), key=lambda path: path.name)


def digest(*arrays) -> str:
    """A short digest of arrays by dtype, shape and bytes."""
    total = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:16]


def toy(seeds=(0, 1), words=()) -> dict:
    """Metrics by step and the digest of the final parameters of whole runs of the toy."""
    values = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            given = [str(ROOT / "configs/toy.yaml"), f"--seed={seed}", f"--run_dir={folder}/run", *words]
            command = [sys.executable, "-m", "grpo_roc_jax.train", *given]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            config = read_config(*given)
            model = resolve_model(config.model, load_tokenizer(config.text))
            like = jax.eval_shape(lambda model=model: init_params(jax.random.key(0), model))
            _, params = restore_params(Path(folder) / "run" / "checkpoints", like)
            values[f"toy/{seed}/params"] = digest(*jax.tree.leaves(params))
            for row in read_metrics(Path(folder) / "run"):
                kind = "eval" if any(name.startswith("eval/") for name in row) else "row"
                kind = "sft" if any(name.startswith("sft/") for name in row) else kind
                at = f"toy/{seed}/{kind}/{row.get('step')}"
                values |= {f"{at}/{name}": value for name, value in row.items() if not name.startswith(CLOCK)}
    return values


def golden_group(seed: int, size: int, channels: tuple[str, ...]) -> Group:
    """A group with calls, errors, channels, truncation and conditions, drawn from `seed`."""
    rng = np.random.default_rng([7, seed])
    trajectories, verdicts = [], []
    for sample in range(size):
        tokens, mask, turns, position = [rng.integers(3, 90, 12)], [np.zeros(12, bool)], [], 12
        count = int(rng.integers(1, 4))
        for index in range(count):
            length, last = int(rng.integers(2, 14)), index == count - 1
            failed, whole = bool(rng.random() < 0.4), length + (0 if last else 5)
            call = ToolCall("python", {"code": "1"}, raw="{}")
            result = ToolResult("exception" if failed else "ok", observation="Error" if failed else "1")
            turns.append(Turn(position, position + length, "x", () if last else (call,), () if last else (result,)))
            tokens.append(rng.integers(3, 90, whole))
            mask.append(np.arange(whole) < length)
            position += whole
        ids, policy = np.concatenate(tokens).astype(np.int32), np.concatenate(mask)
        stop = str(rng.choice(["answer", "eos", "length"], p=[0.7, 0.2, 0.1]))
        logprobs = np.where(policy, -rng.exponential(size=position), 0).astype(np.float32)
        versions = np.where(policy, 3, -1).astype(np.int32)
        drawn = Condition.parse(str(rng.choice(["high_reward", "low_reward"])) if seed % 2 else "")
        made = Trajectory(ids, policy, logprobs, versions, 12, tuple(turns), stop, sample, condition=drawn)
        correct = bool(rng.random() < 0.5)
        judged = (1.0, "correct", "7") if correct else (0.0, "wrong", "8")
        counts = len(made.results), sum(result.counts_as_error for result in made.results), int(rng.integers(1, 3))
        formed = bool(rng.random() < 0.9)
        paid = {name: float(rng.random()) for name in channels}
        trajectories.append(made)
        verdicts.append(Verdict(*judged, *counts, formed, count, channels=paid))
    problem = Problem(f"golden/{seed}", f"what is {seed}?", "7", "golden", {"hints": ["a", "b"], "solution": "s"})
    return Group(problem, tuple(trajectories), tuple(verdicts))


def methods() -> dict:
    """Requests, selections, rows and state of every method file on fixed groups."""
    values = {}
    for path in method_files():
        config = read_config(str(path))
        rng, state = np.random.default_rng(11), initial_state(config)
        count = config.resample.sampled(config.group.size)
        channels = ("format", "quality") if len(config.reward.functions) < 2 else config.reward.names
        for step in range(2):
            groups = [golden_group(10 * step + i, count, channels) for i in range(4)]
            failed = [_without_success(group) if i % 2 else group for i, group in enumerate(groups)]
            wave = Wave([group.problem for group in groups], count, state, rng)
            later = replace(wave, number=1, groups=failed, notes={1: "hint"})
            requested = [
                [r.place, r.count, str(r.condition), r.suffix, r.temperature, list(map(int, r.prefix)), r.prefix_text]
                for r in (*first_wave(wave, config.plan), *next_wave(later, config.plan))
            ]
            selections = [resample_group(group, config, rng) for group in groups]
            kept = [subset(g, s) for g, s in zip(groups, selections, strict=True) if s.kept]
            trajectories = [t for group in kept for t in group.trajectories]
            noise = np.random.default_rng(13)

            def near(scale, trajectories=trajectories, noise=noise):
                return [(t.logprobs + noise.normal(0, scale, t.length)).astype(np.float32) for t in trajectories]

            first, drawn = near(0.2), [noise.random(t.length).astype(np.float32) for t in trajectories]
            scores = Scores(first, drawn, near(0.1), near(0.1))
            rows = train_rows(kept, config, state, rng=rng, scores=scores)
            key = f"method/{path.stem}/{step}"
            values[f"{key}/requests"] = hashlib.sha256(json.dumps(requested).encode()).hexdigest()[:16]
            values[f"{key}/selection"] = digest(*(s.indices for s in selections), *(s.penalties for s in selections))
            for name in ("tokens", "policy_mask", "logprobs_old", "advantages", "weights", "ratio_segments"):
                values[f"{key}/{name}"] = digest(*(getattr(row, name) for row in rows))
            state = next_state(groups, kept, config, state)
            values[f"{key}/state"] = digest(*_remembered(state))
    return values


def _remembered(state) -> list:
    """What a method remembers, in the order of the first version of this script."""
    names = {"length_exponent": 0.0, "diversity": -1.0, "temperature_stage": 0}
    scalars = np.array([state.recall(name, default) for name, default in names.items()], np.float64)
    table, duals = state.table, state.memory.get("constraints", np.zeros(0))
    return [np.array([state.step], np.int64), table.keys, table.values, duals, scalars]


def _without_success(group: Group) -> Group:
    """The group with every success turned into a failure."""
    return replace(group, verdicts=tuple(replace(v, status="wrong", reward=0.0) for v in group.verdicts))


def losses() -> dict:
    """Loss and gradient of every method's surrogate on fixed arrays, and the learning rates of its optimizer."""
    values, rng = {}, np.random.default_rng(5)
    ratio = jnp.asarray(rng.normal(0, 0.3, (3, 16)), jnp.float32)
    advantages = jnp.asarray(rng.normal(0, 1, (3, 16)), jnp.float32)
    logprobs = jnp.asarray(-rng.exponential(size=(3, 16)), jnp.float32)
    mask = jnp.asarray(rng.random((3, 16)) < 0.8)
    for path in method_files():
        surrogate = read_config(str(path)).surrogate
        segments = jnp.tile(jnp.arange(16, dtype=jnp.int32), (3, 1)) * (surrogate.shared_level == "token")

        def total(d, surrogate=surrogate, segments=segments):
            shared = surrogate.shared(d, advantages, mask, segments)
            return surrogate.loss(shared, advantages, logprobs + d).sum()

        values[f"surrogate/{path.stem}"] = digest(*jax.value_and_grad(total)(ratio))
    return values


def exports() -> dict:
    """Digests of the files that a small random model of each architecture is exported to."""
    values = {}
    shape = dict(vocab_size=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=48)
    kinds = {"llama": {"tie_embeddings": False}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
    for name, more in kinds.items():
        model = ModelConfig(**shape, **more)
        with tempfile.TemporaryDirectory() as folder:
            export_model(init_params(jax.random.key(3), model), model, Path(folder) / "out")
            for path in sorted((Path(folder) / "out").iterdir()):
                values[f"export/{name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return values


PARTS = {"methods": methods, "losses": losses, "exports": exports, "toy": toy}


def compare(before: dict, after: dict) -> list[str]:
    """A line for each value that differs or exists on one side alone."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            lines.append(f"{'new' if name in after else 'gone'}: {name}")
        elif before[name] != after[name]:
            lines.append(f"differs: {name}: {before[name]} -> {after[name]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("out", type=Path)
    write.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    write.add_argument("--words", default="", help="further settings of the toy, such as '--steps=3'")
    look = commands.add_parser("compare")
    look.add_argument("before", type=Path)
    look.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        values = {}
        for part in given.parts:
            values |= toy(words=given.words.split()) if part == "toy" else PARTS[part]()
        given.out.write_text(json.dumps(finite(values), indent=1), encoding="utf-8")  # NaN is not equal to itself
        print(f"{len(values)} values in {given.out}")
        return 0
    lines = compare(json.loads(given.before.read_text()), json.loads(given.after.read_text()))
    print("\n".join(lines[:60]) or "equal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

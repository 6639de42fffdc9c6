"""Golden values of the package: does a change of structure leave every number as it was?

    python -m tests.endurance.golden write before.json            # on the old code
    python -m tests.endurance.golden write after.json             # on the new code
    python -m tests.endurance.golden compare before.json after.json

`write` trains the toy with seeds 0 and 1 (metrics without times, parameters) and computes what every method file makes
of fixed groups. Values are stored as digests; `compare` names what differs and ends with status 1.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_roc_jax.config import read_config
from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.types import Condition, Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict
from tests.helpers.knobs import digest
from tests.test_train import numbers, params_of

ROOT = Path(__file__).resolve().parent.parent.parent


def toy() -> dict:
    """Metrics by row and the digest of the final parameters of whole runs of the toy."""
    values = {}
    for seed in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            given = [str(ROOT / "configs/toy.yaml"), f"--seed={seed}", f"--run_dir={folder}/run"]
            command = [sys.executable, "-m", "grpo_roc_jax.train", *given]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            values[f"toy/{seed}/params"] = digest(*params_of(f"{folder}/run", read_config(*given))[1])
            for i, row in enumerate(numbers(f"{folder}/run")):
                row.pop("sft/tokens_per_s", None)
                values |= {f"toy/{seed}/{i}/{name}": value for name, value in row.items()}
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
        judged = (1.0, "correct", "7") if rng.random() < 0.5 else (0.0, "wrong", "8")
        counts = len(made.results), sum(result.counts_as_error for result in made.results), int(rng.integers(1, 3))
        formed = bool(rng.random() < 0.9)
        paid = {name: float(rng.random()) for name in channels}
        trajectories.append(made)
        verdicts.append(Verdict(*judged, *counts, formed, count, channels=paid))
    problem = Problem(f"golden/{seed}", f"what is {seed}?", "7", "golden", {"hints": ["a", "b"], "solution": "s"})
    return Group(problem, tuple(trajectories), tuple(verdicts))


def methods() -> dict:
    """What every method file makes of fixed groups in two steps, with its loss and gradient on fixed arrays."""
    from tests.helpers.kind_cases import KindCases  # which takes its groups from here

    class Paid(KindCases):
        def group(self, seed):
            group = super().group(seed)
            paid = [sum(verdict.channels.values()) for verdict in group.verdicts]
            channels = [{name: total % (0.3 + i) for i, name in enumerate(names)} for total in paid]
            return replace(group, verdicts=tuple(map(lambda v, c: replace(v, channels=c), group.verdicts, channels)))

    values, folders = {}, ("configs/methods", "grpo_roc_jax/contrib/methods")
    for path in sorted(path for folder in folders for path in (ROOT / folder).glob("*.yaml")):
        config = read_config(str(path))
        names = config.reward.names if len(config.reward.functions) > 1 else ("format", "quality")
        values |= {f"method/{path.stem}/{step}": value for step, value in enumerate(Paid().observed(config))}
    return values


def main(command: str, *paths: str) -> int:
    if command == "write":
        values = methods() | toy()
        Path(paths[0]).write_text(json.dumps(finite(values), indent=1), encoding="utf-8")  # NaN is not equal to itself
        print(f"{len(values)} values in {paths[0]}")
        return 0
    before, after = (json.loads(Path(path).read_text(encoding="utf-8")) for path in paths)
    names = [name for name in sorted(before | after) if before.get(name, "none") != after.get(name, "none")]
    lines = [f"differs: {name}: {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]
    print("\n".join(lines[:60]) or "equal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Does a long run with a fault every few steps still learn, and leave nothing behind?

The toy trains in this process while faults are injected: rollouts that raise, calls that cannot be sent, a full disk,
updates that are not finite, killed workers and executors. At the end: reward, accounts (closed in every step, or the
run ends), processes, descriptors and temporary files that are left, and the slope of the host's memory.

    python tests/endurance/soak.py --steps 300 --every 5 --run_dir /tmp/soak
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import grpo_roc_jax as g
from grpo_roc_jax.process.points import injected, listening
from grpo_roc_jax.record.metrics import read_metrics, series

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from tests.helpers.arena import alive, descendants

POINTS = ("rollout.turn=raise", "tool.submit=raise", "traces.write=enospc", "metrics.write=enospc")
POINTS += ("checkpoint.write=enospc", "update.weights=nan")
FAULTS = (*(f"{point}@1" for point in POINTS), "kill worker", "kill executor")
WARM_STEPS, PAGE = 50, os.sysconf("SC_PAGESIZE")
"""Steps before memory is expected to be flat; bytes."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc gives back what is freed. Else it keeps up to 60 MB of freed buffers, more in some steps than in others."""


class Faults:
    """Called with every point: arms one fault at the start of every n-th step, and notes the memory of the process."""

    def __init__(self, every: int, seed: int):
        self._every, self._rng, self._armed = every, random.Random(seed), contextlib.ExitStack()
        self.close, self.chosen, self.memory_mb = self._armed.close, Counter(), []

    def __call__(self, point: str) -> None:
        if point != "sample":
            return
        self.memory_mb.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20)
        self._armed.close()
        if len(self.memory_mb) % self._every:
            return
        fault = self._rng.choice(FAULTS)
        self.chosen[fault] += 1
        if not fault.startswith("kill"):
            self._armed.enter_context(injected(fault))
        elif family := sorted(filter(alive, descendants(os.getpid()))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(family[0] if "executor" in fault else family[-1], signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", help="further settings of the run, after --")
    options = parser.parse_args()
    if os.environ.keys().isdisjoint(ALLOCATOR):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    schedule = f"--optim.schedule.total_steps={options.steps}"
    words = [f"--steps={options.steps}", schedule, f"--run_dir={options.run_dir}", "--log.console=off"]
    faults = Faults(options.every, options.seed)
    scratch = tempfile.mkdtemp(prefix="soak-")
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    descriptors = len(os.listdir("/proc/self/fd"))
    with listening(faults), contextlib.closing(faults):
        g.train_policy(g.read_config("toy.yaml", *words, "--tools.workers=2", *options.words))
    rows, memory = read_metrics(options.run_dir), np.array(faults.memory_mb[WARM_STEPS:])
    _, rewards = series(rows, "rollout/reward")
    slope = float(np.polyfit(np.arange(len(memory)), memory, 1)[0] * 100) if len(memory) > 10 else None
    lost = [row.get("verdict/infrastructure", 0.0) for row in rows if row["step"]]
    report = {"steps": len(rewards), "faults": faults.chosen, "reward_last_10": float(np.mean(rewards[-10:]))}
    report |= {"skipped_updates": float(sum(row.get("update/skipped", 0.0) for row in rows))}
    report |= {"lost_share": float(np.mean(lost)), "host_mb_per_100_steps": slope}
    memory_mb = [round(mb, 1) for mb in faults.memory_mb[::20]]
    report |= {"host_mb": memory_mb, "processes_left": sum(map(alive, descendants(os.getpid())))}
    report |= {"descriptors_more": len(os.listdir("/proc/self/fd")) - descriptors}
    report |= {"temporary_files_left": sorted(os.listdir(scratch))}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The memory of the host: its heap, and what a dry run says that a run will take."""

import ctypes
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from grpo_roc_jax.run.policy import few_arenas


def test_threads_share_arenas_unless_the_environment_says_how_many(monkeypatch):
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *words: calls.append(words)))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    few_arenas()
    assert calls == []
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    few_arenas()
    assert calls == [(-8, 2)]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # another C library
    few_arenas()


# ---- the estimate of a dry run -------------------------------------------------------------------------------------

MIDDLE = """
data: {sources: ["world:gcd:1"], eval_problems: 0}
model: {d_model: 512, layers: 8, heads: 8, kv_heads: 4, head_dim: 64, d_ff: 1536, vocab_size: 16384}
rollout: {slots: 8, max_prompt_tokens: 96, max_response_tokens: 64, append_lengths: [32]}
group: {problems: 2, size: 2}
resample: {kind: none, drop: none}
batch: {row_length: 160, rows: 4}
tools: {workers: 1, preload: []}
steps: 1
sft: {steps: 0}
checkpoint: {keep: 1}
"""
RUN = """
import sys
from grpo_roc_jax.train import main
status = main(sys.argv[1:])
from grpo_roc_jax.run.policy import resident_bytes
print("PEAK", resident_bytes("VmHWM"))
sys.exit(status)
"""


@pytest.mark.slow
def test_the_dry_run_counts_what_a_run_on_this_machine_takes(tmp_path):
    """Within a quarter of the measured peak, in processes of their own, without the flags of these tests."""
    (tmp_path / "middle.yaml").write_text(MIDDLE + f"run_dir: {tmp_path / 'run'}\n")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}

    def output_of(*words: str) -> str:
        command = [sys.executable, "-c", RUN, str(tmp_path / "middle.yaml"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    dry, peak = output_of("--dry-run"), float(output_of("--log.console=off").split("PEAK ")[1])
    estimate = 1e6 * float(re.search(r"memory of this process at most, MB: .*; together (\d+)", dry)[1])
    print(dry.splitlines()[-3:], f"estimated {estimate / 1e6:.0f} MB, measured {peak / 1e6:.0f} MB")
    assert 0.75 < estimate / peak < 1.25
    assert "GB: masters 0.13, moments 0.27, gradients 0.13, sampler 0.13, " in dry, "float32 is what a CPU computes in"

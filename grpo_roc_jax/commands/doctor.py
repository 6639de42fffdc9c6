"""`grpo-roc doctor [--json]`: what this machine can do, and what to install for more."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import grpo_roc_jax
from grpo_roc_jax.pod.program_cache import keep_programs
from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.memory_bound import describe_memory, host_bytes

GIB = 1 << 30
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "math-verify")
"""Packages whose versions are shown."""
EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "gpu": (("jax_cuda12_plugin", "jax_cuda13_plugin"), "NVIDIA GPUs, and `plan` for them"),
    "tpu": (("libtpu",), "TPUs, and `plan` for them"),
    "gguf": (("gguf",), "models in GGUF files"),
    "notebooks": (("jupyterlab",), "the notebooks"),
    "serve": (("tornado", "llguidance"), "`serve`, and agents that ask the policy over HTTP"),
    "wandb": (("wandb",), "metrics on Weights & Biases"),
    "trackio": (("trackio",), "metrics in trackio on this machine"),
    "tensorboard": (("tensorboardX",), "metrics in TensorBoard"),
    "ray": (("ray",), "tools and environments in Ray actors"),
    "gymnasium": (("gymnasium",), "text games of Gymnasium"),
    "mcp": (("mcp",), "tools of MCP servers"),
    "openenv": (("openenv",), "environments of OpenEnv"),
    "verifiers": (("verifiers",), "tasksets of verifiers"),
    "datasets": (("datasets",), "data sets of the Hugging Face hub"),
}
"""Extra of the package -> (modules that it brings, of `gpu` one of them; what it is for)."""
ATTACHED = {"gpu": ("/dev/nvidia0", "/dev/nvidiactl"), "tpu": ("/dev/accel0", "/dev/vfio/0")}
"""Extra -> files that exist if such a device is attached."""


def examine() -> dict[str, Any]:
    """The findings, as values that JSON can hold."""
    return {
        "grpo_roc_jax": grpo_roc_jax.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "devices": devices(),
        "attached": [name for name, files in ATTACHED.items() if any(os.path.exists(file) for file in files)],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": memory_gib(),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / GIB, 1),
        "programs": str(keep_programs() or ""),
        "isolation": isolation(),
        "tool_memory": describe_memory(ToolsConfig()),
        "extras": {
            name: (any if name == "gpu" else all)(importlib.util.find_spec(module) for module in modules)
            for name, (modules, _) in EXTRAS.items()
        },
    }


def devices() -> dict[str, Any]:
    """The devices that JAX uses: number, kind and the memory of one; or why there are none."""
    try:
        local_devices = jax.local_devices()
    except RuntimeError as error:
        return {"count": 0, "fault": str(error)}
    limit = (local_devices[0].memory_stats() or {}).get("bytes_limit", 0)
    return {
        "count": len(local_devices),
        "platform": local_devices[0].platform,
        "kind": local_devices[0].device_kind,
        "bytes": limit,
    }


def memory_gib() -> float:
    """Memory of the host, or the limit of this process's control group if that is lower."""
    return round(host_bytes() / GIB, 1)


def isolation() -> dict[str, Any]:
    """The report of `grpo-roc probe --json`, which forks and therefore runs in a process of its own."""
    words = [sys.executable, "-m", "grpo_roc_jax", "probe", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"levels": [], "enough": False, "fault": done.stderr.strip()[-500:]}


def to_do(report: Mapping[str, Any]) -> Iterator[str]:
    """What should be installed or changed, most important first."""
    used = {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}.get(report["devices"].get("platform", ""))
    for name in report["attached"]:
        if name == used:
            continue
        if not report["extras"][name]:
            yield f"a {name.upper()} is attached, but JAX cannot use it: {install_command(name)}"
        else:
            yield f"a {name.upper()} is attached, but JAX does not use it: unset JAX_PLATFORMS, and check its driver"
    if not report["devices"]["count"]:
        yield f"JAX has no device: {report['devices']['fault']}"
    if not report["isolation"]["enough"]:
        yield (
            "programs of the policy cannot be isolated at level L2: `grpo-roc probe` names the remedies; or use a "
            "service (tools.executor sandbox_fusion), or --tools.min_level L0 for code that you trust"
        )
    if report["memory_gib"] < 4:
        yield f"{report['memory_gib']} GiB is little memory even for the toy: lower tools.workers and tools.memory_mb"
    if report["free_disk_gib"] < 2:
        yield f"{report['free_disk_gib']} GiB of disk are free here; put run_dir elsewhere, or lower checkpoint.keep"


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as text."""
    at, levels = report["devices"], report["isolation"]["levels"]
    size = f", {at['bytes'] / GIB:.1f} GiB each" if at.get("bytes") else ""
    shown = f"{at['count']} x {at['platform']} ({at['kind']}{size})" if at["count"] else "none"
    yield f"grpo_roc_jax {report['grpo_roc_jax']}, Python {report['python']}, {report['system']}"
    yield "packages   " + ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    yield f"devices    {shown}"
    memory, disk = report["memory_gib"], report["free_disk_gib"]
    yield f"host       {report['cores']} cores, {memory} GiB of memory, {disk} GiB disk"
    yield f"programs   {report['programs'] or 'not kept; every start compiles them again'}"
    yield f"isolation  {levels[-1] if levels else 'none'} of {', '.join(levels) or 'none'} (`grpo-roc probe` explains)"
    yield f"tools      with default settings {report['tool_memory']}"
    yield "extras     " + (", ".join(name for name, there in report["extras"].items() if there) or "none")
    for name, there in report["extras"].items():
        if not there:
            yield f"           without {name:<12} {install_command(name)} for {EXTRAS[name][1]}"
    advice = list(to_do(report))
    yield "to do      " + ("; ".join(advice) if advice else "nothing: `grpo-roc train` will run")
    yield "models     `grpo-roc train CONFIG.yaml --preflight` compiles a run here, `grpo-roc plan` for other chips"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0 if training can run here, else 5."""
    parser = argparse.ArgumentParser(prog="grpo-roc doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    options = parser.parse_args(argv)
    report = examine()
    print(json.dumps(report | {"to_do": list(to_do(report))}) if options.json else "\n".join(lines(report)))
    return 0 if report["devices"]["count"] and report["isolation"]["enough"] else 5

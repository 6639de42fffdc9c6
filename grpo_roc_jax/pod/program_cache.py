"""JAX's persistent compilation cache, on by default: a run that starts again reads its programs instead of compiling.

JAX's own settings decide where one of them is given: JAX_COMPILATION_CACHE_DIR names another directory,
JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import jax

USUAL_MIN_S = 1.0
"""JAX's default of the compile time below which a program is not kept; a small run has many such programs."""


def keep_programs(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The directory in which programs are kept from now on; None if the cache is off or no directory can be made."""
    if not jax.config.jax_enable_compilation_cache:
        return None
    if not jax.config.jax_compilation_cache_dir:
        root = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "grpo_roc_jax" / "programs" / _machine()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if jax.config.jax_persistent_cache_min_compile_time_secs == USUAL_MIN_S:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return Path(jax.config.jax_compilation_cache_dir)


def _machine() -> str:
    """A name for the instructions of this CPU: its programs fail on one that has others, and hosts may share a home."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"

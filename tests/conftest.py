"""Eight virtual CPU devices, strict rank promotion, one compilation cache a session; no accelerator is touched."""

import atexit
import gc
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Many tests build the same small programs, some in subprocesses, which inherit the setting.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax_cache_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of the suite's time is compilation. Without LLVM's optimisation, and with XLA's older fusion emitters, it takes a
# quarter of the time; both change speed, not meaning. Subprocesses inherit it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_finish():
    """What the tests import stays, so that the garbage collector need not look at it again: 6 % of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def one_device(monkeypatch):
    """Runs of the test have one device, for which programs compile in half of the time."""
    from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
    from grpo_roc_jax.run import components

    monkeypatch.setattr(components, "make_mesh", lambda _: make_mesh(ShardingConfig(), jax.devices()[:1]))

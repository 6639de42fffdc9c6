"""Eight virtual CPU devices, strict rank promotion, one compilation cache a session; no accelerator is touched."""

import atexit
import gc
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Many tests build the same small programs, some in subprocesses, which inherit the setting.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax_cache_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of the suite's time is compilation. Without LLVM's optimisation, with XLA's older fusion emitters and all of a
# program in one module, it takes a fifth of the time; all of them change speed, not meaning. Subprocesses inherit it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray then listens on the loopback interface only

import jax
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.helpers.contrib import HAS_CONTRIB
from tests.helpers.parts import in_slice, part_of

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Bytecode is kept, whatever the environment says: else every process of the suite compiles the package from source.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


HERE = Path(__file__).resolve().parent
collect_ignore = [] if HAS_CONTRIB else ["contrib"]  # whose tests go with it
FIRST = """
test_train model/test_families engine/test_engine serving/test_agents test_knob_effects sandbox/test_faults
serving/tinker_api/test_tinker_endpoint learner/test_update
method/test_catalog contrib/methods/test_catalog sandbox/test_sessions method/test_kind_settings model/test_transformer
learner/test_loss run/test_rounds record/test_checkpoint method/test_roc model/test_attention
model/test_convert model/test_pool engine/test_model_families reward/test_verify
commands/test_run_tools
""".split()  # noqa: SIM905 (shorter than a list)
"""Files of the most time, longest first, so that all workers end at the same time."""
PLACES = {HERE / f"{name}.py": i for i, name in enumerate(FIRST)}
TOGETHER = (
    # transformers and torch, which tensorboardX imports too, take some ten seconds to import
    "model/test_families test_knob_effects model/test_lora model/test_convert text/test_templates commands/test_export "
    "record/test_metrics gguf_files/test_as_transformers",
    # runs, which share their programs in a process: the first one traces and compiles for twelve seconds
    "test_train test_restart test_faults test_stored_run test_methods_run test_environment_examples test_readme "
    "contrib/methods/test_runs run/test_start stream/test_rollout_stream run/test_stages run/test_policy "
    "run/test_record_kept run/test_sample commands/test_chat commands/test_evaluate commands/test_replay",
    # the policy of `helpers/serving.py`, and the trainer of `helpers/tinker_server.py`
    "serving/test_agents serving/test_agent_hosts serving/test_endpoint serving/test_other_forms "
    "serving/test_dialogues serving/test_odd_requests "
    "serving/test_answer_formats serving/test_clients serving/test_verifiers_clients "
    "test_servers test_adapter_examples",
    "serving/tinker_api/test_tinker_endpoint serving/tinker_api/test_tinker_odd_requests "
    "serving/tinker_api/test_tinker_programs "
    "serving/tinker_api/test_tinker_client",
    # the programs of one engine
    "engine/test_engine engine/test_run_options engine/test_publish rollout/test_collect",
)
"""Files that one worker runs, since they share what is dear to set up."""
GROUPS = {f"tests/{name}.py": names for names in TOGETHER for name in names.split()}
NAMED_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def fault_rows() -> list[str]:
    """The rows of the table of faults."""
    lines = (HERE.parent / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and NAMED_TEST.search(line)]


class ByFile(LoadScopeScheduling):
    """A file, or a group of files, to each worker at a time."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return GROUPS.get(file, file)


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Sorts the tests, and marks those that docs/faults.md names; TESTS_PART=0/8 marks an eighth of them.

    With TESTS_SLICE=3/32 some thirty-second of the slow tests is left, the same one whatever else is collected.
    """
    if part := os.environ.get("TESTS_SLICE"):
        items[:] = [item for item in items if not item.get_closest_marker("slow") or in_slice(item.nodeid, part)]
    items.sort(key=lambda item: (PLACES.get(item.path, len(PLACES)), item.path))
    named = {(HERE / file, name) for row in fault_rows() for file, name in NAMED_TEST.findall(row)}
    faults = [item for item in items if (item.path, getattr(item, "originalname", item.name)) in named]
    faults.sort(key=lambda item: item.get_closest_marker("slow") is None)  # so that each part has some slow ones
    for item in part_of(faults):
        item.add_marker(pytest.mark.faults)


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

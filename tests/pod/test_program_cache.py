"""The compilation cache: on by default, left to JAX's settings where they are given, and counted."""

import jax
import pytest

from grpo_roc_jax.pod.program_cache import USUAL_MIN_S, keep_programs
from grpo_roc_jax.record.metrics import CompilationCounter

NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")


@pytest.fixture
def settings():
    """Sets JAX's settings of the cache by position of `NAMES`, and restores them."""
    saved = {name: getattr(jax.config, name) for name in NAMES}
    yield lambda *values: [jax.config.update(name, value) for name, value in zip(NAMES, values, strict=True)]
    for name, value in saved.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_home_directory_unless_jax_has_another_setting(settings, tmp_path):
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    settings(None, USUAL_MIN_S, True)
    folder = keep_programs(home)
    assert folder.parent == tmp_path / "grpo_roc_jax" / "programs" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
    settings("elsewhere", 3.0, True)
    assert str(keep_programs(home)) == "elsewhere" and jax.config.jax_persistent_cache_min_compile_time_secs == 3.0
    settings(None, USUAL_MIN_S, False)
    assert keep_programs(home) is None and jax.config.jax_compilation_cache_dir is None
    (tmp_path / "file").touch()
    settings(None, USUAL_MIN_S, True)
    assert keep_programs({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None


def test_what_comes_from_the_cache_is_counted():
    """The suite keeps its programs too (conftest.py); these two are one program for JAX's cache."""
    with CompilationCounter() as counted:
        for _ in range(2):

            def unusual(x):
                return x * 77.125 - 3.5

            jax.jit(unusual).lower(jax.ShapeDtypeStruct((3, 5), "float32")).compile()
    assert counted.count == 2 and counted.hits in (1, 2)  # two where an earlier session has kept it
    assert counted.metrics()["compile/cache_hits"] == counted.hits

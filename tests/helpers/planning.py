"""Plans by arithmetic, as several tests make them."""

from collections.abc import Iterator, Mapping

import jax
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.estimate import Deployment
from grpo_roc_jax.planner.topology import parse_topology
from grpo_roc_jax.settings.cli import load_config


def deployment(*words: str, topology: str = "v5e:2x2", environ: Mapping[str, str] | None = None) -> Deployment:
    """What a plan knows of a run with these words before any program is compiled; of its first stage by default."""
    config = planning.chosen_stages(load_config(Config, [*words], prog="test"), "")[0]
    return planning.deployment_of(config, parse_topology(topology, environ or {}), "", True, 0.0)


SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")


@pytest.fixture
def platform_kept() -> Iterator[None]:
    """Puts back what a plan, or a command that keeps its programs, sets in JAX."""
    before = {name: getattr(jax.config, name) for name in ("jax_platforms", *SETTINGS)}
    yield
    for name, value in before.items():
        jax.config.update(name, value)

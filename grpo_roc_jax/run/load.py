"""Opening a policy that was trained here or published: settings that fit it, its weights, its tools."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from grpo_roc_jax.cli import ConfigError, load_config
from grpo_roc_jax.config import Config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.sharding import param_shardings
from grpo_roc_jax.model.transformer import compute_dtype
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.run.components import Components, make_components
from grpo_roc_jax.run.policy import load_trained, split_checkpoint
from grpo_roc_jax.text.templates import TemplateError, load_template

PUBLISHED = """
--text.tokenizer=model --text.tools_section=True --text.observation_tokens=512 --rollout.max_turns=10
--rollout.append_lengths 32 128 512 --data.eval_problems=0
""".split()  # noqa: SIM905 (a command line reads better as one)
"""Settings for a published model, before those of the command line."""
LONGEST = 8192
"""Most tokens of a whole dialogue with a published model that was made for longer texts."""


def load_run_policy(components: Components, checkpoints: Path, step: int | None = None) -> tuple[int, Any]:
    """(training step, parameters of the policy) of the newest valid checkpoint, or of that step.

    Raises:
        ConfigError: There is none, or it is of another model.
    """
    found, trained = load_trained(checkpoints, components.model, components.mesh, components.config.lora, step)
    return found, components.full(trained)


def settings_for(source: str, overrides: Sequence[str], prog: str) -> Config:
    """The configuration of a run, or one that fits a published model, with the overrides of the command line."""
    if _is_run(source):
        run, _ = split_checkpoint(source)
        return load_config(Config, [str(run / "config.yaml"), *_one_row(), *overrides], prog=prog)
    folder = find_model(source)
    made_for = resolve_config(ModelConfig(path=str(folder))).max_positions or LONGEST
    longest = min(made_for, LONGEST)
    words = [f"--model.path={folder}", *PUBLISHED, *_one_row(), f"--rollout.max_prompt_tokens={longest * 3 // 4}"]
    words += [f"--rollout.max_response_tokens={longest // 4}", f"--batch.row_length={longest}"]
    try:
        load_template(folder)
        words.append("--text.template=model")
    except TemplateError:
        words.append("--text.system=default")
    return load_config(Config, [*words, *overrides], prog=prog)


def _one_row() -> list[str]:
    """Settings for a copy of the parameters and one row on every device, however the run was sharded."""
    return [f"--rollout.slots={jax.device_count()}", "--sharding.data=-1", "--sharding.fsdp=1", "--sharding.tensor=1"]


def _is_run(source: str) -> bool:
    try:
        split_checkpoint(source)
    except ConfigError:
        return False
    return True


@contextmanager
def open_policy(
    source: str, overrides: Sequence[str] = (), *, prog: str = "open_policy"
) -> Iterator[tuple[Components, SamplerParams]]:
    """(components, policy to sample with) of a run or a published model, with its tools started.

        with open_policy("runs/toy") as (components, sampler):
            ...

    Args:
        source: A run, one of its checkpoints, or a published model: a directory or a hub id.
        overrides: `--section.field=value` words over the settings of the run.
        prog: Name in messages.

    Raises:
        ConfigError, ValueError: Neither a run nor a published model, or settings that do not fit.
    """
    config = settings_for(source, overrides, prog)
    with make_components(config) as components:
        if _is_run(source):
            run, step = split_checkpoint(source)
            _, params = load_run_policy(components, run / "checkpoints", step)
        else:
            shardings, dtype = param_shardings(components.model, components.mesh), compute_dtype(components.model)
            params = load_params(Path(config.model.path), components.model, shardings, dtype=dtype, stacked=False)
        yield components, components.engine.publish(params, 0)

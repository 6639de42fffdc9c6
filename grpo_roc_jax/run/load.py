"""Opening a policy that was trained here or published: settings that fit it, its weights, its tools."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.update import trained_shardings
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, read_published, settings_path
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import ADAPTER_CONFIG, LowRank, load_adapter, read_lora
from grpo_roc_jax.model.sharding import Mesh, ShardingConfig, param_shardings
from grpo_roc_jax.model.transformer import Params, compute_dtype
from grpo_roc_jax.record.checkpoint_files import newest_whole, saved_stage
from grpo_roc_jax.rollout.config import RolloutConfig
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.policy import PolicyModel, load_trained, split_checkpoint
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.settings.cli import ConfigError, build, config_errors, file_layers, load_config
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.settings.layers import Layer, read_words
from grpo_roc_jax.settings.options import fields_of, settings
from grpo_roc_jax.text.templates import TemplateError, load_template

PUBLISHED = """
--text.tokenizer=model --text.tools_section=True --text.observation_tokens=512 --rollout.max_turns=10
--rollout.append_lengths 32 128 512 --data.eval_problems=0
""".split()  # noqa: SIM905 (a command line reads better as one)
"""Settings for a published model, before those of the command line."""
LONGEST = 8192
"""Most tokens of a whole dialogue with a published model that was made for longer texts."""
DIALOGUE = 512
"""Tokens that the cache of a dialogue has room for at first."""


def load_policy(policy: PolicyModel, source: str) -> tuple[int, Params]:
    """(training step, parameters of the policy) of a run, one of its checkpoints, or a published model or adapter
    (step 0).

    Raises:
        ConfigError: No valid checkpoint, or one of another model.
    """
    model, mesh, lora = policy.model, policy.mesh, policy.lora
    if is_run(source):
        run, step = split_checkpoint(source)
        found, trained = load_trained(run / "checkpoints", model, mesh, lora, step)
        return found, policy.full(trained)
    if lora.rank:
        return 0, policy.full(load_pairs(source, lora, model, mesh))
    folder, shardings = find_model(model.path), param_shardings(model, mesh)
    return 0, load_params(folder, model, shardings, dtype=compute_dtype(model), stacked=False)


def load_pairs(source: str, lora: LowRank, model: ModelConfig, mesh: Mesh) -> Params:
    """The pairs of a PEFT adapter directory, laid out on the mesh.

    Raises:
        CheckpointError: They do not fit the model.
    """
    pairs = load_adapter(find_model(source), lora, model, find_family(read_published(find_model(model.path))))
    return jax.device_put(pairs, trained_shardings(model, mesh, lora))


@config_errors()
def settings_for(source: str, overrides: Sequence[str], prog: str, *, dialogue: bool = True) -> Config:
    """The configuration of a run, or one that fits a published model, with the overrides of the command line.

    Args:
        source: A run, one of its checkpoints, or a published model or PEFT adapter: a directory or a hub id.
        overrides: `--section.field=value` words.
        prog: Name in messages.
        dialogue: One row on every device, and most of the tokens for what was said before; otherwise the run's slots,
            and most of the tokens for the response.
    """
    words = _one_row() if dialogue else []
    if is_run(source):
        run, step = split_checkpoint(source)
        config = load_config(Config, [str(run / "config.yaml"), *words, *overrides], prog=prog)
        config = config.staged()[stage_of(run, step)] if config.stages else config
    else:
        words += published_words(source, overrides, dialogue=dialogue)
        config = load_config(Config, [*words, *overrides], prog=prog)
    named = "kv_start" in (read_words(overrides).values.get("rollout") or {})
    return growing(config) if dialogue and not named else config


def growing(config: Config) -> Config:
    """The configuration with a cache that begins with `DIALOGUE` tokens a row and grows with what is said."""
    rollout = config.rollout
    start, most = rollout.slots * DIALOGUE, rollout.kv_tokens or rollout.slots * rollout.max_row_tokens
    return config if start >= most else replace(config, rollout=replace(rollout, kv_start=start))


SERVED = frozenset("name seed text model lora sharding distributed rollout sampling tools".split())  # noqa: SIM905
"""Sections that say how a policy answers; all others are of training."""
TRAINED = frozenset(["step_limit", "early_exit"])
"""Settings of `rollout` that are of training too."""


@config_errors()
def serving_settings(source: str, overrides: Sequence[str], prog: str) -> Config:
    """`settings_for` of a policy that only answers: settings of the learner, of data, rewards and environments are
    those by default, whatever the run has, so that none of them stands in the way.

    Args:
        source: A run, one of its checkpoints, or a published model or PEFT adapter.
        overrides: `--section.field=value` words.
        prog: Name in messages.
    """
    if any(word in ("--help", "-h") for word in overrides):
        return load_config(Config, list(overrides), prog=prog)
    if is_run(source):
        run, step = split_checkpoint(source)
        layers = [*file_layers(run / "config.yaml")]  # one, as a run writes it
        stages, index = layers[-1].values.get("stages") or (), stage_of(run, step)
        if index < len(stages) and isinstance(stages[index], dict):
            layers.append(Layer(f"stage {index + 1}", dict(stages[index].get("set") or {})))
    else:
        layers = [read_words(published_words(source, overrides, dialogue=False))]
    kept = [replace(layer, values=_served(layer.values)) for layer in layers]
    words = read_words(overrides)
    served = [*kept, replace(words, values=_served(words.values))]
    found = build(ServedSections, [replace(layer, values=_only_rows(layer.values)) for layer in served])
    parts = 2 * found.sharding.sequence
    fit = read_words([f"--batch.row_length={-(-found.rollout.max_row_tokens // parts) * parts}"])
    return build(Config, [*served, fit])


@settings
class ServedSections:
    """What the length of a row follows from."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def _only_rows(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("rollout", "sharding") if name in values}


def _served(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a layer that says how a policy answers; names that no section has are left to be refused."""
    found = {name: value for name, value in values.items() if name in SERVED or name not in fields_of(Config)}
    if isinstance(found.get("rollout"), Mapping):
        found["rollout"] = {name: value for name, value in found["rollout"].items() if name not in TRAINED}
    return found


def published_words(source: str, overrides: Sequence[str], *, dialogue: bool) -> list[str]:
    """Settings that fit a published model or adapter, as words of a command.

    Raises:
        ConfigError: It is neither.
    """
    words: list[str] = []
    path, folder = source, find_model(source)
    if (folder / ADAPTER_CONFIG).is_file():
        lora = read_lora(folder)
        words += ["--lora=low_rank", f"--lora.rank={lora.rank}", f"--lora.alpha={lora.alpha}", "--lora.targets"]
        words += lora.targets
        path = _base_model(folder, overrides)
        folder = find_model(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{source} holds neither config.yaml, as a run does, nor config.json, as a model does")
    published = read_published(folder)
    published = (find_family(published).defaults or {}) | published
    longest = min(published.get("max_position_embeddings") or LONGEST, LONGEST)
    prompt = longest * 3 // 4 if dialogue else longest // 4
    words += [f"--model.path={settings_path(path)}", *PUBLISHED, f"--batch.row_length={longest}"]
    words += [f"--rollout.max_prompt_tokens={prompt}", f"--rollout.max_response_tokens={longest - prompt}"]
    try:
        template = load_template(folder)
        words.append("--text.template=model")
        if not template.convention_for(()):
            words.append("--text.calls=hermes")  # it says nothing of calls; the system text tells the model a form
    except TemplateError:
        words.append("--text.system=default")
    return words


def stage_of(run: Path, step: int | None) -> int:
    """Index of the stage that a checkpoint of a run was saved in; the newest one without a step."""
    newest = newest_whole(run / "checkpoints") if step is None else None
    path = newest.path if newest else run / "checkpoints" / f"step_{step or 0:08d}"
    saved = saved_stage(path) if path.is_dir() else None
    return saved["index"] if saved else 0


def _base_model(adapter: Path, overrides: Sequence[str]) -> str:
    """The path of the model that an adapter belongs to: `--model.path`, or what the adapter names."""
    named = read_json_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path") or ""
    path = str(read_words(overrides).values.get("model", {}).get("path", named))
    try:
        find_model(path)
    except ValueError as error:
        raise ConfigError(
            f"the adapter {adapter} belongs to {path!r}; name its directory: --model.path DIR ({error})"
        ) from error
    return path


def _one_row() -> list[str]:
    """Settings for a copy of the parameters and one row on every device, however the run was sharded."""
    return [f"--rollout.slots={jax.device_count()}", "--sharding.data=-1", "--sharding.fsdp=1", "--sharding.tensor=1"]


def is_run(source: str) -> bool:
    """Whether it is a run or one of its checkpoints."""
    try:
        split_checkpoint(source)
    except ConfigError:
        return False
    return True


@contextmanager
def open_policy(
    source: str, overrides: Sequence[str] = (), *, prog: str = "open_policy"
) -> Iterator[tuple[Config, GroupSampler]]:
    """(configuration, what samples and scores with the policy) of a run or a published model, with its tools started
    and its weights published.

        with open_policy("runs/toy") as (config, sampling):
            rollouts, stats = sampling.sampler.roll_out(requests)

    Args:
        source: A run, one of its checkpoints, or a published model or PEFT adapter: a directory or a hub id.
        overrides: `--section.field=value` words over the settings of the run.
        prog: Name in messages.

    Raises:
        ConfigError: Neither a run nor a published model, or settings that do not fit.
    """
    config = settings_for(source, overrides, prog)
    with make_parts(config) as (policy, sampling):
        sampling.sampler.publish(load_policy(policy, source)[1], 0)
        yield config, sampling

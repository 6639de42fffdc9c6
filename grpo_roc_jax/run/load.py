"""Opens a policy that was trained here or published: settings that fit it, its weights, its tools."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.config import RolloutConfig
from grpo_roc_jax.gguf_files.folder import is_gguf
from grpo_roc_jax.learner.update import trained_shardings
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, read_published, settings_path
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import ADAPTER_CONFIG, LowRank, load_adapter, read_lora
from grpo_roc_jax.model.sharding import Mesh, ShardingConfig, param_shardings
from grpo_roc_jax.model.transformer import Params, compute_dtype
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.record.checkpoint_files import newest_whole, saved_stage
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.policy import PolicyModel, load_trained, split_checkpoint
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.settings.cli import ConfigError, build, config_errors, file_layers, load_config
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.settings.layers import Layer, opened, read_words
from grpo_roc_jax.settings.options import fields_of, settings
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.templates import TemplateError, load_template

log = logging.getLogger(__name__)

PUBLISHED = """
--text.tokenizer=model --text.tools_section=True --text.observation_tokens=512 --rollout.max_turns=10
--rollout.append_lengths 32 128 512 --data.eval_problems=0
""".split()  # noqa: SIM905 (a command line reads better as one)
"""Settings for a published model; those of the command line override them."""
LONGEST = 8192
"""Most tokens of a whole dialogue with a published model that supports longer texts."""
DIALOGUE = 512
"""Tokens per row that the cache of a dialogue has room for at first."""


def load_policy(policy: PolicyModel, source: str) -> tuple[int, Params]:
    """(training step, parameters of the policy) of a run, one of its checkpoints, or a published model or adapter (step
    0).

    Raises:
        ConfigError: There is no valid checkpoint, or it belongs to another model.
    """
    model, mesh, lora = policy.model, policy.mesh, policy.lora
    if is_run(source):
        run, step = split_checkpoint(source)
        with phase(f"loading {source}", routine=True):
            restored_step, trained = load_trained(run / "checkpoints", model, mesh, lora, step)
            return restored_step, policy.full(trained)
    if lora.rank:
        return 0, policy.full(load_pairs(source, lora, model, mesh))
    folder, shardings = find_model(model.path), param_shardings(model, mesh)
    return 0, load_params(folder, model, shardings, dtype=compute_dtype(model), stacked=False)


def warn_of_tools(source: str, chat: ChatFormat) -> None:
    """Warns if a published model has tools that no prompt names."""
    if not is_run(source) and (unnamed := chat.unnamed_tools()):
        log.warning("%s", unnamed)


def load_pairs(source: str, lora: LowRank, model: ModelConfig, mesh: Mesh) -> Params:
    """The low-rank matrices of a PEFT adapter directory, laid out on the mesh.

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
        prog: Program name in messages.
        dialogue: If true, one row on every device, with most of its tokens for the earlier turns; otherwise the slots
            of the run, with most tokens for the response.
    """
    words = _one_row() if dialogue else []
    if is_run(source):
        run, step = split_checkpoint(source)
        config = load_config(Config, [str(run / "config.yaml"), *words, *overrides], prog=prog)
        config = config.staged()[min(stage_of(run, step), len(config.stages) - 1)] if config.stages else config
    else:
        words += published_words(source, overrides, dialogue=dialogue)
        config = load_config(Config, [*words, *overrides], prog=prog)
    named = "kv_start" in (read_words(overrides).values.get("rollout") or {})
    return growing(config) if dialogue and not named else config


def growing(config: Config) -> Config:
    """The configuration with a cache that starts at `DIALOGUE` tokens a row and grows with the dialogue."""
    rollout = config.rollout
    start, most = rollout.slots * DIALOGUE, rollout.kv_tokens or rollout.slots * rollout.max_row_tokens
    return config if start >= most else replace(config, rollout=replace(rollout, kv_start=start))


SERVED = frozenset("name seed text model lora sharding distributed rollout sampling tools".split())  # noqa: SIM905
"""Sections that determine how a policy answers. All others concern training."""
TRAINED = frozenset(["step_limit", "early_exit"])
"""Settings of `rollout` that concern training only."""


@config_errors()
def serving_settings(source: str, overrides: Sequence[str], prog: str) -> Config:
    """Like `settings_for`, for a policy that only answers. Settings of the learner, of data, rewards and environments
    take their defaults, whatever the run has, so that none of them can prevent serving.

    Args:
        source: A run, one of its checkpoints, or a published model or PEFT adapter.
        overrides: `--section.field=value` words.
        prog: Program name in messages.
    """
    if any(word in ("--help", "-h") for word in overrides):
        return load_config(Config, list(overrides), prog=prog)
    if is_run(source):
        run, step = split_checkpoint(source)
        layers = [*file_layers(run / "config.yaml")]  # one, as a run writes it
        stages = layers[-1].values.get("stages") or ()
        index = min(stage_of(run, step), len(stages) - 1)
        if stages and isinstance(stages[index], dict):
            layers.append(Layer(f"stage {index + 1}", dict(stages[index].get("set") or {})))
    else:
        layers = [read_words(published_words(source, overrides, dialogue=False))]
    served_files = [replace(layer, values=_served(layer.values)) for layer in layers]
    words = read_words(overrides, Config)
    served = [*served_files, replace(words, values=_served(words.values))]
    sections = build(ServedSections, [replace(layer, values=_only_rows(layer.values)) for layer in served])
    parts = 2 * sections.sharding.sequence
    fit = read_words([f"--batch.row_length={-(-sections.rollout.max_row_tokens // parts) * parts}"])
    return build(Config, [*served, fit])


@settings
class ServedSections:
    """The sections that determine the length of a row."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def _only_rows(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("rollout", "sharding") if name in values}


def _served(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a layer that determines how a policy answers. Unknown section names stay, so that they are refused
    later."""
    values_served = {name: value for name, value in values.items() if name in SERVED or name not in fields_of(Config)}
    if isinstance(values_served.get("rollout"), Mapping):
        values_served["rollout"] = {
            name: value for name, value in values_served["rollout"].items() if name not in TRAINED
        }
    return values_served


def published_words(source: str, overrides: Sequence[str], *, dialogue: bool) -> list[str]:
    """Settings that fit a published model or adapter, as words of a command line.

    Raises:
        ConfigError: `source` is neither.
    """
    words: list[str] = []
    try:
        path, folder = source, find_model(source)
    except ValueError as error:
        if Path(source).expanduser().exists() or is_gguf(source):
            raise
        expected = "a run, one of its checkpoints, the directory of a model, a hub id ORG/NAME or a GGUF file"
        raise ConfigError(f"{source}: no such directory; must be {expected}") from error
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
            # The template says nothing about tool calls; the system text describes their format to the model.
            words.append("--text.calls=hermes")
    except TemplateError:
        words.append("--text.system=default")
    return words


def stage_of(run: Path, step: int | None) -> int:
    """Index of the stage that a checkpoint of a run was saved in; of the newest checkpoint if `step` is None."""
    newest = newest_whole(run / "checkpoints") if step is None else None
    path = newest.path if newest else run / "checkpoints" / f"step_{step or 0:08d}"
    saved = saved_stage(path) if path.is_dir() else None
    return saved["index"] if saved else 0


def _base_model(adapter: Path, overrides: Sequence[str]) -> str:
    """The path of the model that an adapter belongs to: `--model.path`, or the one that the adapter names."""
    config = read_json_object(adapter / ADAPTER_CONFIG)
    named, revision = config.get("base_model_name_or_path") or "", config.get("revision") or "main"
    model = opened(read_words(overrides).values.get("model"))
    path = str(model.get("path", "")) if isinstance(model, dict) else ""
    if not path and revision != "main" and not Path(named).is_dir():
        raise ConfigError(
            f"the adapter {adapter} belongs to revision {revision!r} of {named!r}, but the newest one would be "
            "fetched; name a directory with that revision: --model.path DIR"
        )
    path = path or named
    try:
        find_model(path)
    except ValueError as error:
        raise ConfigError(
            f"the adapter {adapter} belongs to {path!r}; name its directory: --model.path DIR ({error})"
        ) from error
    return path


def _one_row() -> list[str]:
    """Settings for one copy of the parameters and one row on every device, however the run was sharded and whatever its
    cache held for all of its rows."""
    rollout = [f"--rollout.slots={jax.device_count()}", "--rollout.kv_tokens=0", "--rollout.kv_start=0"]
    return [*rollout, "--sharding.data=-1", *(f"--sharding.{axis}=1" for axis in ("fsdp", "sequence", "tensor"))]


def is_run(source: str) -> bool:
    """Whether `source` is a run or one of its checkpoints."""
    try:
        split_checkpoint(source)
    except ConfigError:
        return False
    return True


@contextmanager
def open_policy(
    source: str | os.PathLike[str], overrides: Sequence[str] = (), *, prog: str = "open_policy"
) -> Iterator[tuple[Config, GroupSampler]]:
    """(configuration, group sampler) of a run or a published model, with its tools started and its weights published.

        with open_policy("runs/toy") as (config, sampling):
            rollouts, stats = sampling.sampler.roll_out(requests)

    Args:
        source: A run, one of its checkpoints, or a published model or PEFT adapter: a directory or a hub id.
        overrides: `--section.field=value` words over the settings of the run.
        prog: Program name in messages.

    Raises:
        ConfigError: `source` is neither a run nor a published model, or the settings do not fit it.
    """
    source = os.fspath(source)
    if isinstance(overrides, str):
        raise TypeError(f"overrides is the text {overrides!r:.80}; must be a list of words: [{overrides!r:.80}]")
    config = settings_for(source, overrides, prog)
    with make_parts(config) as (policy, sampling):
        warn_of_tools(source, sampling.sampler.chat)
        sampling.sampler.publish(load_policy(policy, source)[1], 0)
        yield config, sampling

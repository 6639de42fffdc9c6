"""Makes, from a configuration, the parts that training, evaluation and chat share, and checks them against
each other."""

import datetime
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from grpo_roc_jax import checks
from grpo_roc_jax.config import Config
from grpo_roc_jax.data.config import split_name
from grpo_roc_jax.engine.engine import Engine, make_engine
from grpo_roc_jax.engine.publish import check_weights
from grpo_roc_jax.environments.config import Hosted
from grpo_roc_jax.environments.environment import Environment, classes_of, environment_tools, merged_tools
from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.learner.offload import check_host_memory
from grpo_roc_jax.learner.update import trained_shardings
from grpo_roc_jax.method.compose import method_parts
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, resolve_config
from grpo_roc_jax.model.experts import check_grouped
from grpo_roc_jax.model.parallel import attention_for
from grpo_roc_jax.model.rope_scaling import LongRopeScaling
from grpo_roc_jax.model.sharding import (
    check_divisible,
    head_copies,
    make_mesh,
    platform_of,
    process_count,
    processes_together,
    slot_shards,
)
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.pod.program_cache import keep_programs
from grpo_roc_jax.pod.team import Team
from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.record.run_dir import saved_settings
from grpo_roc_jax.reward.config import EnvironmentReward
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.rollout.sampler import Sampler
from grpo_roc_jax.run.policy import PolicyModel, frozen_weights
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.cli import ConfigError, config_errors, flatten
from grpo_roc_jax.settings.secrets import HIDDEN, hides_something
from grpo_roc_jax.text.chat_format import ChatFormat, make_chat
from grpo_roc_jax.text.config import PublishedTemplate, TextConfig, TokenizerFile
from grpo_roc_jax.text.dialogue_text import published_template
from grpo_roc_jax.text.tokenizer import Tokenizer, load_tokenizer
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.registry import BUILT_IN, Registry, default_registry
from grpo_roc_jax.types import Problem
from grpo_roc_jax.worlds.functions import FUNCTIONS, function_tools
from grpo_roc_jax.worlds.worlds import WORLD_PREFIX


def refuse_hidden(config: Config) -> None:
    """Refuses settings that were read from the files of a run in which a secret was hidden.

    Raises:
        ConfigError: There are such settings; the message names them.
    """
    names = [name for name, value in flatten(config) if hides_something(value)]
    if names:
        raise ConfigError(
            f"{', '.join(names)}: a secret was hidden in the files of the run ({HIDDEN}); give the whole value again, "
            f"with --{names[0]} VALUE"
        )


@contextmanager
def make_parts(
    config: Config,
    *,
    registry: Registry | None = None,
    processes: Processes | None = None,
) -> Iterator[tuple[PolicyModel, GroupSampler]]:
    """Makes (the model on its mesh, the group sampler) from a configuration. Starts the executor; closes it and the
    scorer at the end of the block.

        with make_parts(config) as (policy, sampling):
            sampler, scorer = sampling.sampler, sampling.scorer

    Args:
        config: Configuration of the run.
        registry: Tools to use instead of the built-in ones that `tools.enabled` names.
        processes: Processes of the run, from `processes.joined`; by default this process alone.

    Raises:
        ConfigError: Parts do not fit each other (vocabulary, mesh, slots), weights cannot be read, a reward function
            cannot be used, or an executor does not start.
    """
    checks.expect(config, Config, "config", "a Config, such as read_config('toy.yaml')")
    refuse_hidden(config)
    keep_programs()
    processes = processes or Processes()
    registry = make_registry(config) if registry is None else registry
    _, chat, model, mesh, engine = check_components(config, registry)
    processes.together = processes_together(mesh)
    with config_errors(RewardError):
        scorer = make_scorer(config.reward)
        base = frozen_weights(config, model, mesh)
        executor = make_executor(config.tools, registry)
    episodes = make_episodes(config, registry)
    agents = make_agents(config, chat, engine)
    try:
        with config_errors(ExecutorFailed, IsolationUnavailable), phase("starting the tools", routine=True):
            executor.start()
        processes.team = Team(processes) if processes.together > 1 else None
        sampler = Sampler.of(engine, chat, executor, episodes, agents)
        sampling = GroupSampler(sampler, scorer, processes, config.resample, config.group.size)
        yield PolicyModel(model, mesh, base, config.lora), sampling
    finally:
        if processes.team is not None:
            processes.team.close()
        Sampler.of(engine, chat, executor, episodes, agents).close()
        scorer.close()


@contextmanager
def serving_parts(config: Config) -> Iterator[tuple[PolicyModel, Sampler]]:
    """Makes (the model on its mesh, its sampler) for the settings that `load.serving_settings` returns. No tool,
    environment or scorer is made.

    Raises:
        ConfigError: See `make_parts`.
    """
    refuse_hidden(config)
    keep_programs()
    processes = Processes()
    _, chat, model, mesh, engine = check_components(config, make_registry(config))
    processes.together = processes_together(mesh)
    with config_errors():
        base = frozen_weights(config, model, mesh)
    processes.team = Team(processes) if processes.together > 1 else None
    try:
        yield PolicyModel(model, mesh, base, config.lora), Sampler.of(engine, chat, None)
    finally:
        if processes.team is not None:
            processes.team.close()


@config_errors()
def make_registry(config: Config) -> Registry:
    """The tools that the executor runs: those that `tools.enabled` names or, with an environment, those in its class
    attribute `uses`. A source `world:functions` adds its functions.

    Raises:
        ConfigError: There is no such tool or environment.
    """
    if classes := find_environments(config):
        return default_registry(dict.fromkeys(name for cls in classes for name in getattr(cls, "uses", ())))
    registry = default_registry(config.tools.enabled)
    sources = (*config.data.sources, *(source for _, source in map(split_name, config.data.eval_sources)))
    if not any(source.startswith(f"{WORLD_PREFIX}{FUNCTIONS}:") for source in sources):
        return registry
    return Registry([*(tool for tool in BUILT_IN if tool.name in registry.names), *function_tools()])


def find_environments(config: Config) -> tuple[type, ...]:
    """The environment classes; empty where tools alone answer the policy.

    Raises:
        ValueError: A class cannot be found, or its server does not answer.
    """
    return classes_of(config.environment.factories())


@config_errors()
def tool_schemas(config: Config, registry: Registry) -> list[dict[str, Any]]:
    """The JSON schemas of all tools that the policy may call.

    Raises:
        ConfigError: A tool of the environment has no schema, rewards of the environment would not be used, or no
            environment returns rewards although they are asked for.
    """
    classes, names = find_environments(config), config.reward.names
    paid = any(isinstance(part, EnvironmentReward) for part in config.reward.functions)
    if not classes:
        if paid and not config.environment.agents:
            raise ValueError("reward.functions environment without an environment that pays; name one in environment")
        return registry.schemas
    pay = [
        cls.__name__ for cls in classes if getattr(cls, "get_reward", Environment.get_reward) != Environment.get_reward
    ]
    if pay and not paid:
        raise ValueError(
            f"environment {pay[0]} has get_reward, but reward.functions = {', '.join(names)}; add environment to them"
        )
    return merged_tools([*registry, *environment_tools(classes)]).schemas


@config_errors()
def make_episodes(config: Config, registry: Registry) -> Episodes | None:
    """What runs the user's environments; None where tools alone answer the policy.

    Raises:
        ConfigError: An environment class cannot be used, or cannot be sent to the workers that run it.
    """
    if not isinstance(config.environment, Hosted) or not find_environments(config):
        return None
    return Episodes(config.environment, config.tools, registry.names)


@config_errors()
def make_agents(config: Config, chat: ChatFormat, engine: Engine) -> Any:
    """What runs the agents of the environment; None without any.

    Raises:
        ConfigError: The extra `serve` is not installed, or an agent cannot be used.
    """
    if not config.environment.agents:
        return None
    try:
        from grpo_roc_jax.serving.agent_runs import AgentRuns
    except ImportError as error:
        raise ValueError(f"environment agent needs the extra serve ({error}); {install_command('serve')}") from error
    pays = {part.part for part in config.reward.functions if isinstance(part, EnvironmentReward)}
    return AgentRuns(config.environment, chat, engine, config.longest_trajectory, pays)


@config_errors()
def check_components(config: Config, registry: Registry) -> tuple[Tokenizer, ChatFormat, ModelConfig, Mesh, Engine]:
    """Makes the parts that start no process and checks them against each other. Compiles nothing.

    Raises:
        ConfigError: See `make_parts`.
    """
    for setting, name in named_functions(config):
        resolve(setting, name)
    text, tokenizer, model = read_text_and_shape(config)
    mesh = make_mesh(config.sharding)
    check_together(config, mesh)
    check_grouped(model, platform_of(mesh), os.environ.get("XLA_FLAGS", ""))
    if config.optim.offload:
        check_host_memory(mesh)
    model = fit_length(model, config.rollout.max_row_tokens)
    check_layout(config, model, mesh, platform_of(mesh), process_count(mesh))
    chat = make_chat(text, tokenizer, tool_schemas(config, registry))
    stops = sorted(chat.stop_ids)
    engine = make_engine(
        model, config.rollout, config.sampling, stops, mesh, seed=config.seed, vocab_size=tokenizer.vocab_size
    )
    return tokenizer, chat, model, mesh, engine


def check_layout(config: Config, model: ModelConfig, mesh: Mesh | AbstractMesh, platform: str, processes: int) -> None:
    """Checks that a mesh divides the model, the adapter, the rows of the update and the slots of each process. Plans
    for devices that are elsewhere check the same.

    Raises:
        ValueError: something is not divisible, or not supported on such a mesh; the message says what to change.
    """
    check_divisible(model, mesh)
    tensor = mesh.shape["tensor"]
    if config.lora.rank and head_copies(model, tensor) > 1:
        raise ValueError(
            f"sharding.tensor = {tensor} with model.kv_heads = {model.kv_heads} and lora, whose frozen weights are "
            f"shared with the sampler as they are; lower sharding.tensor to {model.kv_heads}"
        )
    trained_shardings(model, mesh, config.lora)
    attention_for(config.update.attention, model, config.batch.row_length, mesh, platform)
    check_weights(config.rollout.weight_dtype, model)
    samplers = processes // processes_together(mesh, processes)
    config.rollout.check_shards(max(1, slot_shards(mesh) // samplers))


def read_text_and_shape(config: Config) -> tuple[TextConfig, Tokenizer, ModelConfig]:
    """The text settings, the tokenizer, and the shape of the model, all of which may be those at `model.path`.

    Raises:
        ValueError, OSError: They cannot be read, or do not fit the settings.
    """
    text, model = resolve_text(config), resolve_config(config.model)
    tokenizer = load_tokenizer(text, model.vocab_size if model.path else 0)
    return text, tokenizer, resolve_model(model, tokenizer)


def check_together(config: Config, mesh: Mesh) -> None:
    """Refuses settings that are not supported where several processes sample as one, and samplers in other processes
    that cannot be started.

    Raises:
        ValueError: The message names the settings and what to change.
    """
    remote = config.rollout.remote
    if remote is not None and importlib.util.find_spec(remote.package) is None:
        raise ValueError(f"rollout.samplers {remote.kind} needs the package: {install_command(remote.package)}")
    together, refused = processes_together(mesh), ""
    if config.rollout.step_limit.streams and remote is None:
        refused = "rollout.step_limit stream, whose chunks have no order among the programs of the update"
    elif config.environment.agents:
        refused = "environment agent, whose programs are served by one process"
    if together > 1 and refused:
        raise ValueError(
            f"sharding.tensor = {config.sharding.tensor} lets {together} processes sample as one, which excludes "
            f"{refused}; change that, or lower sharding.tensor to the devices of a process"
        )


def named_functions(config: Config) -> list[tuple[str, str]]:
    """(setting, name) of each user function that a configuration names."""
    functions = [(f"method.{name}", getattr(config.method, name)) for name in ("edit_groups", "edit_rows")]
    for part in method_parts(config):
        functions += [(f"{part.prefix} {name}", getattr(part, name, "")) for name in ("function", "judge")]
    return functions + [("reward.functions", part.path) for part in config.reward.custom]


def prompt_length(config: Config, chat: ChatFormat, ends: Sequence[str] | None = None) -> Callable[[Problem], int]:
    """Returns a function that counts the tokens of a problem's prompt, the longest of those with these ends; by default
    with what a prompt of training must end with. It raises ValueError if no environment fits the problem."""
    if ends is None:
        ends = [end + prompt_suffix(config.shaping, 0) for end in config.plan.condition.required] or [""]

    def length(problem: Problem) -> int:
        config.environment.name_for(problem)
        return max(len(chat.prompt_ids(problem, end)) for end in ends)

    return length


def run_date(config: Config, run_dir: Path) -> str:
    """The date that the chat template renders: the configured one, that of the run which is resumed in `run_dir`, or
    today's; empty for a template that uses no date."""
    template = config.text.template
    if not isinstance(template, PublishedTemplate) or template.date:
        return getattr(template, "date", "")
    before = saved_settings(run_dir) or {}
    if before.get("text.template.date"):
        return before["text.template.date"]
    try:
        asks = published_template(resolve_text(config), with_tools=config.text.tools_section).asks_date
    except (ValueError, OSError):  # `check_components` reports what is wrong with it
        return ""
    return datetime.date.today().isoformat() if asks else ""


def with_date(config: Config, date: str) -> Config:
    """The configuration with `date` as the date of its chat template."""
    if not date:
        return config
    return replace(config, text=replace(config.text, template=replace(config.text.template, date=date)))


def resolve_text(config: Config) -> TextConfig:
    """The text settings, with the tokenizer `model` replaced by the directory of `model.path`.

    Raises:
        ValueError: `model.path` is empty.
    """
    source = config.text.tokenizer
    if source.kind != "model":
        return config.text
    if not config.model.path:
        raise ValueError("text.tokenizer = model takes the tokenizer at model.path, which is empty; set one of them")
    folder = str(find_model(config.model.path))
    special_tokens = {name: getattr(source, name) for name in ("eos_token", "pad_token", "added_tokens")}
    return replace(config.text, tokenizer=TokenizerFile(path=folder, **special_tokens))


def resolve_model(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The model configuration with its vocabulary size filled in from the tokenizer.

    Raises:
        ValueError: An explicit vocabulary size is too small for the tokenizer's ids.
    """
    if model.vocab_size and model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size}; must be 0 or at least {tokenizer.vocab_size}, the tokenizer's ids"
        )
    return model if model.vocab_size else replace(model, vocab_size=tokenizer.vocab_size)


def fit_length(model: ModelConfig, tokens: int) -> ModelConfig:
    """The model configuration for rows of at most `tokens` tokens. LongRoPE takes its long factors if rows may exceed
    the original context length, as vLLM does for its `max_model_len`.

    Raises:
        ValueError: The model was made for shorter rows, or chooses keys in rows of this length; the message names both
            lengths.
    """
    name = model.path or "the model"
    if model.max_positions and tokens > model.max_positions:
        raise ValueError(
            f"rollout.max_prompt_tokens + max_response_tokens = {tokens}, but {name} was made for texts of "
            f"{model.max_positions} tokens (max_position_embeddings); lower the two"
        )
    if model.extras.indexed_keys and tokens > model.extras.indexed_keys:
        raise ValueError(
            f"rollout.max_prompt_tokens + max_response_tokens = {tokens}, but in {name} an indexer chooses "
            f"{model.extras.indexed_keys} keys (index_topk) of longer texts, which is not supported; lower the two"
        )
    scaling = model.rope_scaling
    if isinstance(scaling, LongRopeScaling) and tokens > scaling.original_length:
        return replace(model, rope_scaling=replace(scaling, extended=True))
    return model


def describe_device() -> str:
    """Kind and number of devices, for logs and summaries."""
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"

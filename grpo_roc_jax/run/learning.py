"""From a configuration to the learner of a run; and the teacher of on-policy distillation, a second policy, of any
size, that scores what the first one sampled."""

import math
from functools import partial

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.group_learner import GroupLearner, SecondPolicy, reference_mixer
from grpo_roc_jax.learner.learner import Learner
from grpo_roc_jax.learner.update import make_score
from grpo_roc_jax.method.compose import teacher_of
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import resolve_config
from grpo_roc_jax.model.sharding import Mesh, check_divisible
from grpo_roc_jax.rollout.publish import unstack
from grpo_roc_jax.run.components import fit_length, resolve_model, resolve_text
from grpo_roc_jax.run.load import load_policy, settings_for
from grpo_roc_jax.run.policy import PolicyModel, frozen_weights, update_settings
from grpo_roc_jax.settings.cli import ConfigError, config_errors
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer, load_tokenizer


def make_learner(config: Config, policy: PolicyModel, chat: ChatFormat) -> GroupLearner:
    """The learner of a run; its functions compile at first use.

    Args:
        config: Of the run.
        policy: From `make_parts`.
        chat: Of its sampler; makes the prompts that a method trains under instead of those of the rollouts.

    Raises:
        ConfigError: The teacher that the method names cannot be used.
    """
    learner = Learner(
        policy.model,
        config.surrogate,
        config.optim,
        policy.mesh,
        batch=config.batch,
        update=update_settings(config, policy),
        base=policy.base,
        lora=policy.lora,
        temperature=config.sampling.temperature,
        several_temperatures=bool(config.plan.temperature.all),
        rows=most_rows(config),
        longest=config.longest_trajectory,
        in_parts=takes_turns(config, policy.mesh),
    )
    teacher = load_teacher(config, policy, chat.tokenizer)
    return GroupLearner(config, learner, chat.prompt_ids, reference_mixer(learner), teacher)


def takes_turns(config: Config, mesh: Mesh) -> bool:
    """Whether rollouts go on between the micro-batches of an update. Over `data` gradients are added once, at its
    end, so that it stays one program there."""
    limit = config.rollout.step_limit
    return limit.streams and limit.lag > 0 and mesh.shape["data"] == 1


def most_rows(config: Config) -> int:
    """Rows that one optimizer step can have."""
    group, plan = config.group, config.plan
    groups = math.ceil(group.problems / config.batch.updates.parts)
    rows = groups * group.size
    if config.resample.kind == "none":
        count = config.resample.sampled(group.size)
        largest, whole = plan.budget.largest(count, group.problems), count * group.problems
        # The groups of one round share its budget; those of several rounds may all be large ones.
        if largest > count:
            rows = groups * largest if group.dynamic_sampling_rounds else min(whole, groups * largest)
    return rows + (1 + group.dynamic_sampling_rounds) * group.problems * plan.second.extra_rows


def find_teacher(config: Config, tokenizer: Tokenizer) -> tuple[Config, ModelConfig] | None:
    """(settings, model) of the teacher that a method names, with nothing loaded; None if it names none.

    Raises:
        ConfigError: There is no such model, or its vocabulary or length does not fit.
    """
    part = teacher_of(config)
    if part is None or isinstance(part, SelfTeacher):
        return None
    name = f"{part.prefix}: path = {part.path!r}"
    if not part.path:
        raise ConfigError(f"{name}; must be a run or the directory of a published model")
    try:
        found = settings_for(part.path, (), name, dialogue=False)
        other = load_tokenizer(resolve_text(found))
        check_vocabulary(tokenizer, other)
        model = resolve_model(resolve_config(found.model), other)
        model = fit_length(model, config.rollout.max_row_tokens)
    except (ConfigError, ValueError, OSError) as error:
        raise ConfigError(f"{name} cannot be the teacher: {error}") from error
    return found, model


def check_vocabulary(own: Tokenizer, other: Tokenizer) -> None:
    """Refuses a teacher to which the ids of the student mean something else.

    Raises:
        ValueError: With the first id that differs.
    """
    said = "a teacher must share the vocabulary of its student"
    if other.vocab_size < own.vocab_size:
        raise ValueError(f"it has {other.vocab_size} ids, and this run has {own.vocab_size}; {said}")
    for token in range(own.vocab_size):
        mine, others = own.decode([token]), other.decode([token])
        if mine != others:
            raise ValueError(f"id {token} is {others!r} there and {mine!r} in this run; {said}")


def load_teacher(config: Config, policy: PolicyModel, tokenizer: Tokenizer) -> SecondPolicy | None:
    """The teacher of a run on the mesh of its student; None if the method names none.

    Raises:
        ConfigError: It does not fit, or cannot be read.
    """
    found = find_teacher(config, tokenizer)
    if found is None:
        return None
    (settings, model), mesh = found, policy.mesh
    with config_errors():
        check_divisible(model, mesh)
        like = PolicyModel(model, mesh, frozen_weights(settings, model, mesh), settings.lora)
        _, params = load_policy(like, teacher_of(config).path)
    if not isinstance(params["layers"], tuple):
        params = jax.jit(partial(unstack, config=model))(params)
    return SecondPolicy(params, make_score(model, config.update, mesh, temperature=config.sampling.temperature))

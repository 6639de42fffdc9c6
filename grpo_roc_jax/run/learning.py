"""Makes the learner of a run from its configuration, and the teacher of on-policy distillation: a second policy, of any
size, that scores what the first one sampled."""

import math
from functools import partial

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner.group_learner import GroupLearner, SecondPolicy, reference_mixer
from grpo_roc_jax.learner.learner import Learner
from grpo_roc_jax.learner.update import make_score
from grpo_roc_jax.method.compose import teacher_of
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import Mesh, check_divisible
from grpo_roc_jax.run.components import fit_length, read_text_and_shape
from grpo_roc_jax.run.load import load_policy, settings_for
from grpo_roc_jax.run.policy import PolicyModel, frozen_weights, update_settings
from grpo_roc_jax.settings.cli import ConfigError, config_errors
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer


def make_learner(config: Config, policy: PolicyModel, chat: ChatFormat) -> GroupLearner:
    """The learner of a run. Its functions compile at first use.

    Args:
        config: Configuration of the run.
        policy: From `make_parts`.
        chat: Chat format of its sampler. It renders the prompts of methods that train under other prompts than those of
            the rollouts.

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
    """Whether rollouts continue between the micro-batches of an update. With a mesh axis `data` above 1 the gradients
    are reduced once, at the end of the update, which is then a single program."""
    limit = config.rollout.step_limit
    return limit.streams and limit.lag > 0 and mesh.shape["data"] == 1


def most_rows(config: Config) -> int:
    """Largest number of rows that one optimizer step can have."""
    group, plan = config.group, config.plan
    groups = math.ceil(group.problems / config.batch.updates.parts)
    rows = groups * group.size
    if config.resample.kind == "none":
        count = config.resample.sampled(group.size)
        largest, all_rows = plan.budget.largest(count, group.problems), count * group.problems
        # The groups of one round share its budget; those of several rounds may all be large ones.
        if largest > count:
            rows = groups * largest if group.dynamic_sampling_rounds else min(all_rows, groups * largest)
    return rows + (1 + group.dynamic_sampling_rounds) * group.problems * plan.second.extra_rows


def find_teacher(config: Config, tokenizer: Tokenizer) -> tuple[Config, ModelConfig] | None:
    """(settings, model) of the teacher that a method names, without loading its weights; None if it names none.

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
        config_of_teacher = settings_for(part.path, (), name, dialogue=False)
        _, other, model = read_text_and_shape(config_of_teacher)
        check_vocabulary(tokenizer, other)
        model = fit_length(model, config.rollout.max_row_tokens)
    except (ConfigError, ValueError, OSError) as error:
        raise ConfigError(f"{name} cannot be the teacher: {error}") from error
    return config_of_teacher, model


def check_vocabulary(student: Tokenizer, teacher: Tokenizer) -> None:
    """Refuses a teacher whose token ids differ in meaning from those of the student.

    Raises:
        ValueError: The message names the first id that differs.
    """
    requirement = "a teacher must share the vocabulary of its student"
    if teacher.vocab_size < student.vocab_size:
        raise ValueError(f"it has {teacher.vocab_size} ids, and this run has {student.vocab_size}; {requirement}")
    for token in range(student.vocab_size):
        mine, others = student.decode([token]), teacher.decode([token])
        if mine != others:
            raise ValueError(f"id {token} is {others!r} there and {mine!r} in this run; {requirement}")


def load_teacher(config: Config, policy: PolicyModel, tokenizer: Tokenizer) -> SecondPolicy | None:
    """Loads the teacher of a run onto the mesh of its student; None if the method names none.

    Raises:
        ConfigError: The teacher does not fit or cannot be read.
    """
    teacher = find_teacher(config, tokenizer)
    if teacher is None:
        return None
    (settings, model), mesh = teacher, policy.mesh
    with config_errors():
        check_divisible(model, mesh)
        like = PolicyModel(model, mesh, frozen_weights(settings, model, mesh), settings.lora)
        _, params = load_policy(like, teacher_of(config).path)
    if not isinstance(params["layers"], tuple):
        params = jax.jit(partial(unstack, config=model))(params)
    return SecondPolicy(params, make_score(model, config.update, mesh, temperature=config.sampling.temperature))

"""The teacher of on-policy distillation: a second policy, of any size, that scores what the first one sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.learner.update import make_score
from grpo_roc_jax.method.compose import teacher_of
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.method.edit import with_prompt
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import resolve_config
from grpo_roc_jax.model.sharding import check_divisible
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.publish import unstack
from grpo_roc_jax.run.components import Components, fit_length, resolve_model, resolve_text
from grpo_roc_jax.run.load import load_policy, settings_for
from grpo_roc_jax.run.policy import frozen_weights
from grpo_roc_jax.settings.cli import ConfigError, config_errors
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer, load_tokenizer
from grpo_roc_jax.types import Group, Trajectory


@dataclass(frozen=True, eq=False)
class SecondPolicy:
    """Its parameters in the compute dtype, and its scoring pass."""

    params: Params
    score_batch: Callable[[Any, TrainBatch], tuple[Any, Any]]


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


def load_teacher(components: Components) -> SecondPolicy | None:
    """The teacher of a run on the mesh of its student; None if the method names none.

    Raises:
        ConfigError: It does not fit, or cannot be read.
    """
    found = find_teacher(components.config, components.tokenizer)
    if found is None:
        return None
    config, (settings, model), mesh = components.config, found, components.mesh
    with config_errors():
        check_divisible(model, mesh)
        like = replace(components, config=settings, model=model, base=frozen_weights(settings, model, mesh))
        _, params = load_policy(like, teacher_of(config).path)
    if not isinstance(params["layers"], tuple):
        params = jax.jit(partial(unstack, config=model))(params)
    return SecondPolicy(params, make_score(model, config.update, mesh, temperature=config.sampling.temperature))


def rows_shown_more(
    part: SelfTeacher, groups: Sequence[Group], chat: ChatFormat, longest: int
) -> list[Trajectory | None]:
    """Each trajectory after the prompt of its teacher; None where that shows no more, or exceeds `longest` tokens."""
    found: list[Trajectory | None] = []
    for group in groups:
        suffixes = [part.suffix(group, i) for i in range(group.size)]
        prompts = {text: chat.prompt_ids(group.problem, text) for text in set(suffixes) if text}
        for trajectory, text in zip(group.trajectories, suffixes, strict=True):
            fits = bool(text) and len(prompts[text]) <= longest
            found.append(with_prompt(trajectory, np.asarray(prompts[text], np.int32)) if fits else None)
    return found

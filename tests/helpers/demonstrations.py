"""Demonstrations of one kind, and the chat format of the toy vocabulary that reads them."""

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.text.chat_format import ChatFormat, Trace, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.worlds.demonstrations import demonstrate
from grpo_roc_jax.worlds.worlds import world_problem

KINDS = ("guess", "repair", "clean", "wrong")


def only(kind: str) -> DemonstrationConfig:
    return DemonstrationConfig(**{name: float(name == kind) for name in KINDS})


def traces(kind: str, family: str, count: int = 40, level: int = 1) -> list[Trace]:
    """Of the first problems of a world."""
    return [demonstrate(world_problem(family, level, 0, index), only(kind), 0) for index in range(count)]


def answer_of(trace: Trace) -> str:
    return trace.turns[-1].split("\\boxed{")[1].split("}")[0]


def toy_chat(**settings) -> ChatFormat:
    config = TextConfig(**settings)
    return make_chat(config, load_tokenizer(config))

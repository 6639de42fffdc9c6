"""Reinforcement learning for language models that think with a Python tool, in JAX.

The package is a pipeline of values. A reader starts at `train.py` and meets the stages in the order they run. Importing
the package loads nothing heavy and touches no accelerator: the names below are loaded when they are first used.

    import grpo_roc_jax as g

    config = g.read_config("toy.yaml", "--steps=5")
    summary = g.train_policy(config)

For a loop of your own see `examples/grpo_roc_in_one_page.py`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    # A run.
    "Config": "config",
    "ConfigError": "settings.cli",
    "read_config": "config",
    "train_policy": "train:train",
    "evaluate_policy": "run.evaluate",
    "open_policy": "run.load",
    # The values.
    "Problem": "types",
    "RolloutRequest": "types",
    "Trajectory": "types",
    "Turn": "types",
    "Verdict": "types",
    "Group": "types",
    "TrainRow": "types",
    # A loop of one's own.
    "make_parts": "run.components",
    "fresh_run": "run.start",
    "cold_start": "run.start",
    "make_learner": "run.learning",
    "RunOptions": "engine.protocol",
    "resample": "method.compose:resample_group",
    "subset": "method.compose",
    "scoring_rows": "method.compose",
    "Scores": "method.compose",
    "train_rows": "method.compose",
    "initial_state": "method.compose",
    "next_state": "method.compose",
    # Parts alone.
    "Sampler": "rollout.sampler",
    "Learner": "learner.learner",
    "load_tokenizer": "text.tokenizer",
    "init_params": "model.transformer",
    "ModelConfig": "model.config",
    "RolloutConfig": "engine.config",
    "SamplingConfig": "engine.config",
    "TextConfig": "text.config",
    "ToolsConfig": "tools.config",
    "RewardConfig": "reward.config",
    "BatchConfig": "learner.pack",
    "OptimConfig": "learner.update",
    "Clip": "method.surrogate",
    "final_answer": "reward.answer",
    "make_engine": "engine.engine",
    "make_executor": "tools.executor",
    "make_scorer": "reward.score",
    "Registry": "tools.registry",
    "Environment": "environments.environment",
    "Observation": "environments.environment",
    "ToolUnavailable": "tools.registry",
    "kind": "settings.options",
}
"""Public name -> its module, and its name there if that differs."""

_RENAMED = {
    "make_components": "`make_parts(config)`, which gives (policy, sampling)",
    "roll_out": "`sampling.sampler.roll_out(requests)` of `make_parts`",
    "score": "`sampling.scorer.score_all(problems, rollouts)` of `make_parts`",
}
"""Name of an earlier version -> what does the same now."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:  # of `from grpo_roc_jax import NAME` Python would drop the words of an AttributeError
        raise ImportError(f"{__name__}.{name} is gone; use {_RENAMED[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names: {', '.join(_HOMES)}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

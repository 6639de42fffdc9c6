"""How far do the sampler's log-probabilities move with fewer bits (`rollout.low_precision`)?

A trained policy rolls out its held-out problems with each choice, with tools. The update's forward scores the same rows
in the dtype of the run; the gap is between what the sampler recorded and these scores, over the tokens that it drew.

    python benchmarks/sampler_gap.py RUN [--samples 4] [--section.field=value ...]

Prints one JSON line: for each choice the mean and largest gap in nats, the share of tokens with a gap above 0.1, the
effective sample size of the importance weights, and the bytes of cache a token.
"""

import argparse
import json

import jax
import numpy as np

from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.method.compose import scoring_rows
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.learning import make_learner
from grpo_roc_jax.run.load import load_policy, settings_for
from grpo_roc_jax.run.policy import cache_bytes
from grpo_roc_jax.run.sample import sample_groups

CHOICES = [("full", "full"), ("int8", "full"), ("float8", "full"), ("full", "int8"), ("int8", "int8")]
"""Of cache and weights."""


def measure(arguments: argparse.Namespace, words: list[str]) -> dict[str, float]:
    """Gaps under one choice."""
    config = settings_for(arguments.run, words, "sampler_gap", dialogue=False)
    with make_parts(config) as (policy, sampling):
        learner = make_learner(config, policy, sampling.sampler.chat).learner
        step, params = load_policy(policy, arguments.run)
        weights = sampling.sampler.publish(params, step)
        options = RunOptions(step, "evaluate")
        groups = sample_groups(sampling, weights, eval_problems(config.data), arguments.samples, options).groups
        scores, _ = learner.score_rows(params, scoring_rows(groups), config.sampling.temperature)
        rows = [t for group in groups for t in group.trajectories]
        gaps = [(now - t.logprobs)[t.policy_mask] for t, now in zip(rows, scores, strict=True)]
        gap = np.concatenate(gaps).astype(np.float64)
        ratio, token = np.exp(gap), cache_bytes(policy.model, 4, config.rollout.cache_dtype)[0]
        return {
            "reward": float(np.mean([verdict.reward for group in groups for verdict in group.verdicts])),
            "tokens": len(gap),
            "mean": float(np.abs(gap).mean()),
            "largest": float(np.abs(gap).max()),
            "above_0.1": float(np.mean(np.abs(gap) > 0.1)),
            "sample_size": float(ratio.sum() ** 2 / (len(gap) * (ratio**2).sum())),
            "cache_bytes_a_token": token,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--samples", type=int, default=4)
    arguments, more = parser.parse_known_args()
    needed = ["--weights.factors=truncated_is", "--surrogate.old_logprobs=scored"]
    choices = {}
    for cache, weights in CHOICES:
        words = [f"--rollout.low_precision.cache={cache}", f"--rollout.low_precision.weights={weights}"]
        choices[f"cache {cache}, weights {weights}"] = measure(arguments, [*needed, *words, *more])
    print(json.dumps({"benchmark": "sampler_gap", "jax": jax.__version__, "words": more, "choices": choices}))


if __name__ == "__main__":
    main()

"""GRPO-RoC on one page: the training loop of `grpo_roc_jax.train`, written out with the library's public functions.

    python examples/grpo_roc_in_one_page.py                          # the toy, five steps
    python examples/grpo_roc_in_one_page.py toy.yaml --steps=30      # any recipe, any setting

A step rolls out 2G trajectories per problem with the Python tool, scores them, keeps the cleanest successes and a fair
share of the failures (resampling on correct), and takes one optimizer step on the G that are left. What `train` adds to
this page: checkpoints and resume, evaluation, traces, waves, several updates per batch, several processes, signals.
"""

import sys
import time

import numpy as np

import grpo_roc_jax as g

FIVE_STEPS = ("toy.yaml", "--steps=5", "--sft.steps=150", "--group.problems=4", "--group.size=8")


def main(words: list[str]) -> None:
    config = g.read_config(*(words or FIVE_STEPS))
    # Tokenizer, chat format, model shape, mesh, engine, tool executor and scorer; started here, ended with the block.
    with g.make_components(config) as parts:
        run = g.fresh_run(parts)  # parameters, optimizer state, data stream, what the method remembers
        g.cold_start(parts, run)  # the supervised stage: how to call a tool and how to answer
        learner = g.make_learner(parts)  # compiles the update at its first call
        for _ in range(config.steps):
            print(describe(train_step(parts, learner, run)))


def train_step(parts, learner, run) -> dict[str, float]:
    """One step of GRPO-RoC; the state of the run is replaced by the next one."""
    started, config = time.perf_counter(), parts.config
    rng = np.random.default_rng([config.seed, run.step])

    # 1. The policy as the engine samples with it, checked against the trainer's log-probabilities.
    sampler = parts.engine.publish(parts.full(run.train.params), run.step)

    # 2. Roll out 2G trajectories per problem. The model writes code, a sandboxed Python process runs it, and the output
    #    becomes the next tokens of the context; they are masked out of the loss.
    problems = next(run.stream)
    count = config.resample.sampled(config.group.size)
    requests = [g.RolloutRequest(problem, place, count) for place, problem in enumerate(problems)]
    rollouts, stats = g.roll_out(parts, sampler, requests)

    # 3. Score: reward 1 for a right answer; failed calls and malformed answers are counted, not punished.
    groups = g.score(parts, problems, rollouts)

    # 4. Resample on correct: of the successes the ones with the fewest errors, of the failures a uniform draw, G in
    #    all. Groups with equal rewards teach nothing and are dropped.
    selections = [g.resample(group, config, rng) for group in groups]
    kept = [g.subset(group, chosen) for group, chosen in zip(groups, selections, strict=True) if chosen.kept]

    # 5. Advantages: each reward against the mean of its group, over its standard deviation. Each token gets the
    #    advantage of its trajectory and a weight that holds the normalizer of the whole batch.
    rows = g.train_rows(kept, config, run.method, rng=rng)

    # 6. Pack the rows, take the gradient of the clipped surrogate, and the optimizer step.
    batch = learner.on_mesh(rows, config.sampling.temperature)
    run.train, _, metrics = learner.update(run, [batch])

    # 7. What the method remembers (success rates of problems, dual variables), and the clock.
    run.method = g.next_state(groups, kept, config, run.method)
    run.step += 1
    return {
        "step": run.step,
        "reward": float(np.mean([group.rewards.mean() for group in groups])),
        "errors in correct": failed_share([v for group in groups for v in group.verdicts if v.status == "correct"]),
        "errors in kept": failed_share([v for group in kept for v in group.verdicts if v.status == "correct"]),
        "kept": sum(group.size for group in kept),
        "tokens": stats.sampled_tokens,
        "loss": metrics["loss/value"],
        "entropy": metrics["loss/entropy"],
        "seconds": time.perf_counter() - started,
    }


def failed_share(verdicts) -> float:
    """Failed share of the tool calls of these trajectories; 0 without a call."""
    calls = sum(verdict.tool_calls for verdict in verdicts)
    return sum(verdict.tool_errors for verdict in verdicts) / calls if calls else 0.0


def describe(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in figures.items())


if __name__ == "__main__":
    main(sys.argv[1:])

"""GRPO-RoC on one page: the training loop of `grpo_roc_jax.train`, written out with the library's public functions.

    python examples/grpo_roc_in_one_page.py                                   # the toy, five steps, about two minutes
    python examples/grpo_roc_in_one_page.py toy.yaml --steps=30               # any recipe, any setting
    python examples/grpo_roc_in_one_page.py toy.yaml --resample=none          # plain GRPO, to compare

A step samples 2G trajectories per problem with the Python tool and scores them. It keeps the cleanest successes and a
uniform draw of the failures (resampling on correct), and takes one optimizer step on the G that are left. Each step
prints one line:

    reward             mean reward of all sampled trajectories
    errors in correct  failed share of the tool calls inside correct trajectories, before selection
    errors in kept     the same after selection: the data that the policy learns from
    kept               trajectories that were trained on; groups with equal rewards are dropped
    tokens             tokens sampled in this step
    loss, entropy      of the update; entropy is in nats per token
    seconds            wall-clock time; that of the first step includes compilation

`train` adds to this page: checkpoints and resume, evaluation on held-out problems, trajectory logs, methods that sample
in several waves, several updates per batch, several processes, and an orderly end on signals.
"""

import sys
import time

import numpy as np

import grpo_roc_jax as g

DEFAULTS = ("toy.yaml", "--steps=5")
QUESTION = g.Problem("example", "gcd(720,432)=?", "144", "example")
"""Its fields: an identifier, the text, the reference answer, the source."""


def main(words: list[str]) -> None:
    # The same words as on the command line of `grpo-roc train`; `config` is a frozen dataclass of sections.
    config = g.read_config(*(words or DEFAULTS))
    # Tokenizer, chat format, model shape, device mesh, rollout engine, tool executor and scorer. The executor starts
    # sandboxed processes here; they end with the block.
    with g.make_components(config) as parts:
        run = g.fresh_run(parts)  # parameters, optimizer state, stream of problems, what the method remembers
        print(f"supervised stage: {config.sft.steps} steps on demonstrations of tool calls and answers", flush=True)
        g.cold_start(parts, run)
        learner = g.make_learner(parts)  # its functions compile at the first call
        print("before:", answer(parts, run, QUESTION), sep="\n")
        for _ in range(config.steps):
            print(describe(train_step(parts, learner, run)), flush=True)
        print("after:", answer(parts, run, QUESTION), sep="\n")


def train_step(parts, learner, run) -> dict[str, float]:
    """Takes one step of GRPO-RoC, which updates `run`, and returns what it measured.

    Args:
        parts: From `make_components`.
        learner: From `make_learner`.
        run: From `fresh_run`.
    """
    started, config = time.perf_counter(), parts.config
    rng = np.random.default_rng([config.seed, run.step])

    # 1. Publish the policy: the engine gets a copy of the weights in its own layout and compares its log-probabilities
    #    with those of the trainer. (`full` merges an adapter; without one it returns the parameters.)
    sampler = parts.engine.publish(parts.full(run.train.params), run.step)

    # 2. Roll out 2G trajectories per problem. The model writes code, a sandboxed Python process runs it, and the output
    #    is appended to the context. These tokens are masked out of the loss: the policy did not write them. The random
    #    key of each token is derived from the seed, the step, the problem's place and the sample.
    problems = next(run.stream)
    count = config.resample.sampled(config.group.size)  # 2G under `resample: roc`, G under `resample: none`
    requests = [g.RolloutRequest(problem, place, count) for place, problem in enumerate(problems)]
    rollouts, stats = g.roll_out(parts, sampler, requests, g.RunOptions(run.step))

    # 3. Score: 1 for a right answer, 0 otherwise. A verdict also counts the failed calls and the malformed answers,
    #    which change no reward. There is one group per problem.
    groups = g.score(parts, problems, rollouts)

    # 4. Resample on correct: of the successes those with the fewest errors, of the failures a uniform draw, G in all.
    #    A group whose rewards are all equal has no signal and is dropped.
    selections = [g.resample(group, config, rng) for group in groups]
    kept = [g.subset(group, chosen) for group, chosen in zip(groups, selections, strict=True) if chosen.kept]

    # 5. Advantages: each reward minus the mean of its group, over its standard deviation. Every token of a trajectory
    #    gets its advantage, and a weight that contains the normalizer of the whole batch. Some methods also need the
    #    log-probabilities of a reference policy or of the current one; `rows` computes them first.
    rows, _ = learner.rows(kept, run)

    # 6. Pack the rows into a batch of fixed shape on the device mesh, then take the gradient of the clipped surrogate
    #    and an optimizer step. The buffers of `run.train` are donated, so the result takes their place.
    batch = learner.on_mesh(rows, config.sampling.temperature)
    run.train, _, metrics = learner.update(run, [batch])

    # 7. What the method remembers (success rates of problems, dual variables), the step counter, and the reference
    #    policy, which a few methods move. Its buffers are donated too, where it moves.
    run.method = g.next_state(groups, kept, config, run.method)
    run.step += 1
    run.reference = learner.next_reference(run)
    return {
        "step": run.step,
        "reward": float(np.mean([group.rewards.mean() for group in groups])),
        "errors in correct": failed_share(groups),
        "errors in kept": failed_share(kept),
        "kept": sum(group.size for group in kept),
        "tokens": stats.sampled_tokens,
        "loss": metrics.get("loss/value", 0.0),
        "entropy": metrics.get("loss/entropy", 0.0),
        "seconds": time.perf_counter() - started,
    }


def failed_share(groups) -> float:
    """Failed share of the tool calls inside correct trajectories; 0 without a call."""
    verdicts = [verdict for group in groups for verdict in group.verdicts if verdict.status == "correct"]
    calls = sum(verdict.tool_calls for verdict in verdicts)
    return sum(verdict.tool_errors for verdict in verdicts) / calls if calls else 0.0


def answer(parts, run, problem) -> str:
    """One greedy rollout of a problem as text, tool calls and their outputs included, and its verdict."""
    sampler = parts.engine.publish(parts.full(run.train.params), run.step)
    requests = [g.RolloutRequest(problem, place=0, temperature=0.0)]
    rollouts, _ = g.roll_out(parts, sampler, requests, g.RunOptions(run.step, "evaluate"))
    (group,) = g.score(parts, [problem], rollouts)
    if not group.size:
        return "  lost to a failure of the infrastructure"
    text = parts.tokenizer.decode(group.trajectories[0].tokens.tolist())
    return f"  {text}\n  -> {group.verdicts[0].status}"


def describe(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in figures.items())


if __name__ == "__main__":
    main(sys.argv[1:])

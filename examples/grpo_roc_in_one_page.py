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
    # `policy` is the model on its devices. `sampling` has the sampler, which is engine, chat format and tool executor,
    # and the scorer. The executor starts sandboxed processes here; they end with the block.
    with g.make_parts(config) as (policy, sampling):
        sampler, scorer = sampling.sampler, sampling.scorer
        run = g.fresh_run(config, policy, sampling)  # parameters, optimizer state, problems, the method's memory
        print(f"supervised stage: {config.sft.steps} steps on demonstrations of tool calls and answers", flush=True)
        g.cold_start(config, policy, sampler.chat, run)
        learner = g.make_learner(config, policy, sampler.chat)  # its functions compile at the first call
        sampler.publish(policy.full(run.train.params), run.step)
        print("before:", answer(sampler, scorer, QUESTION), sep="\n")
        for _ in range(config.steps):
            print(describe(train_step(config, sampler, scorer, learner, run)), flush=True)
            sampler.publish(policy.full(run.train.params), run.step)
        print("after:", answer(sampler, scorer, QUESTION), sep="\n")


def train_step(config, sampler, scorer, learner, run) -> dict[str, float]:
    """Takes one step of GRPO-RoC, which updates `run`, and returns what it measured.

    Args:
        config: Of the run.
        sampler: With the policy published.
        scorer: Of the same parts.
        learner: From `make_learner`.
        run: From `fresh_run`.
    """
    started = time.perf_counter()
    rng = np.random.default_rng([config.seed, run.step])

    # 1. The policy is published already: the sampler got a copy of the weights in its own layout and compared its
    #    log-probabilities with those of the trainer. (`full` merges an adapter; without one it returns the parameters.)

    # 2. Roll out 2G trajectories per problem. The model writes code, a sandboxed Python process runs it, and the output
    #    is appended to the context. These tokens are masked out of the loss: the policy did not write them. The random
    #    key of each token is derived from the seed, the step, the problem's place and the sample.
    problems = next(run.stream)
    count = config.resample.sampled(config.group.size)  # 2G under `resample: roc`, G under `resample: none`
    requests = [g.RolloutRequest(problem, index, count) for index, problem in enumerate(problems)]
    rollouts, stats = sampler.roll_out(requests, g.RunOptions(run.step))

    # 3. Score: 1 for a right answer, 0 otherwise. A verdict also counts the failed calls and the malformed answers,
    #    which change no reward. There is one group per problem.
    groups = scorer.score_all(problems, rollouts).groups

    # 4. Resample on correct: of the successes those with the fewest errors, of the failures a uniform draw, G in all.
    #    A group whose rewards are all equal has no signal and is dropped.
    selections = [g.resample(group, config, rng) for group in groups]
    kept_groups = [g.subset(group, chosen) for group, chosen in zip(groups, selections, strict=True) if chosen.kept]

    # 5. Advantages: each reward minus the mean of its group, over its standard deviation. Every token of a trajectory
    #    gets its advantage, and a weight that contains the normalizer of the whole batch. Some methods also need the
    #    log-probabilities of a reference policy or of the current one; `rows` computes them first.
    rows, _ = learner.rows(kept_groups, run)

    # 6. Pack the rows into a batch of fixed shape on the device mesh, then take the gradient of the clipped surrogate
    #    and an optimizer step. The buffers of `run.train` are donated, so the result takes their place.
    batch = learner.on_mesh(rows, config.sampling.temperature)
    run.train, _, metrics = learner.update(run, [batch])

    # 7. What the method remembers (success rates of problems, dual variables), the step counter, and the reference
    #    policy, which a few methods move. Its buffers are donated too, where it moves.
    run.method = g.next_state(groups, kept_groups, config, run.method)
    run.step += 1
    run.reference = learner.next_reference(run)
    return {
        "step": run.step,
        "reward": float(np.mean([group.rewards.mean() for group in groups])),
        "errors in correct": failed_share(groups),
        "errors in kept": failed_share(kept_groups),
        "kept": sum(group.size for group in kept_groups),
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


def answer(sampler, scorer, problem) -> str:
    """One greedy rollout of a problem as text, tool calls and their outputs included, and its verdict."""
    rollouts, _ = sampler.roll_out([g.RolloutRequest(problem, place=0, temperature=0.0)], g.RunOptions(0, "evaluate"))
    (group,) = scorer.score_all([problem], rollouts).groups
    if not group.size:
        return "  lost to a failure of the infrastructure"
    text = sampler.chat.tokenizer.decode(group.trajectories[0].tokens.tolist())
    return f"  {text}\n  -> {group.verdicts[0].status}"


def describe(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in figures.items())


if __name__ == "__main__":
    main(sys.argv[1:])

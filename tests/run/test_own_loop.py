"""A loop of one's own, from public names: with a reference policy, with an adapter, and with parts that need passes."""

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.settings.callables import given

TINY = """
--steps=3 --sft.steps=0 --group.problems=2 --group.size=2 --resample=none --resample.drop=none --model.d_model=16
--model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=8 --model.d_ff=16 --rollout.slots=8
--rollout.max_prompt_tokens=24 --rollout.max_response_tokens=16 --rollout.append_lengths=16 --batch.row_length=120
--batch.rows=2 --tools.workers=1 --data.eval_problems=0 --sharding.data=-1 --tools.preload=[] --optim.warmup_steps=0
--optim.lr=0.01 --reward.functions even --reward.truncated=score --optim.schedule=constant
""".split()  # noqa: SIM905 (a command line reads better as one)
PASSES = ["--surrogate.old_logprobs=scored", "--weights.factors=[truncated_is]"]
REFERENCES = {
    "k3 with an adapter": ["--surrogate.kl=k3", "--surrogate.kl.coef=0.5", "--lora=low_rank", "--lora.rank=2"],
    "a reference that moves": ["--surrogate.kl=k3", "--surrogate.kl.sync_every=1", "--surrogate.kl.sync_mix=0.5"],
    "a teacher of the reference": ["--advantage.adjust=[{kind: self_teacher, weights: reference}]"],
}


def even(problem, trajectories):
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


@pytest.fixture
def parts(request):
    config = g.read_config("toy.yaml", *TINY, *request.param)
    with given({"even": even}), g.make_parts(config) as (policy, sampling):
        yield config, policy, sampling


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("parts", REFERENCES.values(), ids=REFERENCES, indirect=True)
def test_a_loop_with_a_reference_takes_steps(parts):
    """Steps as in README, after the supervised stage."""
    config, policy, sampling = parts
    run, learner = g.fresh_run(*parts), g.make_learner(config, policy, sampling.sampler.chat)
    g.cold_start(config, policy, sampling.sampler.chat, run)

    def state():
        return [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(t)] for t in (run.train.params, run.reference)]

    (before, reference), apart = state(), []
    for _ in range(3):
        sampling.sampler.publish(policy.full(run.train.params), run.step)
        problems = next(run.stream)
        requests = [g.RolloutRequest(problem, index, config.group.size) for index, problem in enumerate(problems)]
        rollouts, _ = sampling.sampler.roll_out(requests, g.RunOptions(run.step))
        groups = sampling.scorer.score_all(problems, rollouts).groups
        run.train, _, metrics = learner.update(run, learner.batches(groups, (), run))
        run.method, run.step = g.next_state(groups, groups, config, run.method), run.step + 1
        run.reference = learner.next_reference(run)
        apart.append(metrics["update/kl_reference"])
    assert apart[0] == pytest.approx(0, abs=1e-5) and all(np.isfinite(apart))
    params, after = state()
    assert params != before, "the policy has moved"
    moves = config.surrogate.kl.kind == "k3" and bool(getattr(config.surrogate.kl, "sync_every", 0))
    assert (after != reference) is moves


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("parts", [PASSES, ["--surrogate=clip_cov"]], ids=["passes", "clip_cov"], indirect=True)
def test_a_step_without_groups_has_no_rows(parts):
    run, learner = g.fresh_run(*parts), g.make_learner(parts[0], parts[1], parts[2].sampler.chat)
    assert learner.rows([], run)[0] == [] and learner.batches([], (), run) == []
    assert g.train_rows([], parts[0], run.method) == []

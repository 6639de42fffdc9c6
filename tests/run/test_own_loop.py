"""A loop of one's own, from public names: with a reference policy, with an adapter, and with parts that need passes."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.record.checkpoint import Checkpointer
from grpo_roc_jax.settings.callables import given

ROOT = Path(__file__).resolve().parents[2]
TINY = """
--steps=3 --sft.steps=0 --group.problems=2 --group.size=2 --resample=none --resample.drop=none --model.d_model=16
--model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=8 --model.d_ff=16 --rollout.slots=8
--rollout.max_prompt_tokens=24 --rollout.max_response_tokens=16 --rollout.append_lengths=16 --batch.row_length=120
--batch.rows=2 --tools.workers=1 --data.eval_problems=0 --sharding.data=-1 --tools.preload=[] --optim.warmup_steps=0
--optim.lr=0.01 --reward.functions even --reward.truncated=score --optim.schedule=constant
""".split()  # noqa: SIM905 (a command line reads better as one)
REFERENCES = {
    "k3": ["--surrogate.kl=k3", "--surrogate.kl.coef=0.5"],
    "k3 with an adapter": ["--surrogate.kl=k3", "--surrogate.kl.coef=0.5", "--lora=low_rank", "--lora.rank=2"],
    "a reference that moves": ["--surrogate.kl=k3", "--surrogate.kl.sync_every=1", "--surrogate.kl.sync_mix=0.5"],
    "divergence in the reward": ["--shaping=[kl]"],
    "a teacher of the reference": ["--advantage.adjust=[{kind: self_teacher, weights: reference}]"],
}
DEFAULT = ("k3 with an adapter", "a reference that moves", "a teacher of the reference")
"""Run by default: k3 alone takes a step in the test of buffers; what else reads a reference is tested in `method`."""


def even(problem, trajectories):
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


@pytest.fixture
def parts(request):
    config = g.read_config("toy.yaml", *TINY, *request.param)
    with given({"even": even}), g.make_parts(config) as (policy, sampling):
        yield config, policy, sampling


def bytes_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def begun(parts):
    """A fresh run of these parts, and its learner."""
    config, policy, sampling = parts
    return g.fresh_run(*parts), g.make_learner(config, policy, sampling.sampler.chat)


def step(parts, learner, run):
    """One step as in README; its metrics."""
    config, policy, sampling = parts
    sampling.sampler.publish(policy.full(run.train.params), run.step)
    problems = next(run.stream)
    requests = [g.RolloutRequest(problem, index, config.group.size) for index, problem in enumerate(problems)]
    rollouts, _ = sampling.sampler.roll_out(requests, g.RunOptions(run.step))
    groups = sampling.scorer.score_all(problems, rollouts).groups
    run.train, _, metrics = learner.update(run, learner.batches(groups, (), run))
    run.method, run.step = g.next_state(groups, groups, config, run.method), run.step + 1
    run.reference = learner.next_reference(run)
    return metrics


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(words, id=name, marks=[pytest.mark.slow] * (name not in DEFAULT))
        for name, words in REFERENCES.items()
    ],
    indirect=True,
)
def test_a_loop_with_a_reference_takes_steps(parts):
    run, learner = begun(parts)
    config, policy, sampling = parts
    g.cold_start(config, policy, sampling.sampler.chat, run)
    before = bytes_of(run.reference)
    apart = [step(parts, learner, run)["update/kl_reference"] for _ in range(3)]
    assert apart[0] == pytest.approx(0, abs=1e-5) and all(np.isfinite(apart))
    assert bytes_of(run.train.params) != before, "the policy has moved"
    moves = config.surrogate.kl.kind == "k3" and bool(getattr(config.surrogate.kl, "sync_every", 0))
    assert (bytes_of(run.reference) != before) is moves


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("parts", [REFERENCES["k3"]], ids=["k3"], indirect=True)
def test_no_two_parts_of_the_state_share_a_buffer(parts, tmp_path):
    """What is donated must belong to its owner alone: policy, moments, reference, the sampler's weights; at the start,
    after the supervised stage, and as a checkpoint restores it."""

    def buffers(tree):
        return [s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]

    def owners(run):
        weights = sampling.sampler.engine.publish(policy.full(run.train.params), 0)
        pointers = buffers(run.train) + buffers(run.reference) + buffers(weights.params)
        assert len(set(pointers)) == len(pointers)
        sampling.sampler.engine.release()

    config, policy, sampling = parts
    run, learner = begun(parts)
    owners(run)
    g.cold_start(config, policy, sampling.sampler.chat, run)
    owners(run)
    with Checkpointer(tmp_path, config.checkpoint) as checkpointer:
        checkpointer.save(0, run.bundle())
        checkpointer.wait()
        run.load(checkpointer.restore_latest(run.bundle()))
    owners(run)
    learner.warmup(run)
    step(parts, learner, run)
    owners(run)


@pytest.mark.usefixtures("one_device")
def test_the_one_page_example_has_room_for_a_reference(capsys):
    """It runs without one in `test_readme.py`."""
    page = runpy.run_path(str(ROOT / "examples" / "grpo_roc_in_one_page.py"))
    words = [word for word in TINY if not word.startswith("--reward.functions") and word != "even"]
    page["main"](["toy.yaml", *words, "--steps=2", *REFERENCES["k3 with an adapter"]])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")] == ["1", "2"]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "parts",
    [["--surrogate.old_logprobs=scored", "--weights.factors=[truncated_is]"], ["--surrogate=clip_cov"]],
    ids=["passes", "clip_cov"],
    indirect=True,
)
def test_a_step_without_groups_has_no_rows(parts):
    run, learner = begun(parts)
    assert learner.rows([], run)[0] == [] and learner.batches([], (), run) == []
    assert g.train_rows([], parts[0], run.method) == []

"""Planning in the loop: which rows fit, which trajectories a round leaves out, what the update compiles for; and the
steps of the learner when memory runs out."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from docs.methods_table import load_methods
from grpo_roc_jax import train
from grpo_roc_jax.config import Config, ratio_is_one
from grpo_roc_jax.learner import group_learner, pack
from grpo_roc_jax.learner.learner import Learner, UpdateBatch
from grpo_roc_jax.learner.update import OptimConfig, make_score
from grpo_roc_jax.method.planning import SecondWave
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.run import demonstrate, learning, run_state, sample, statistics
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.train import main
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest, Trajectory, Turn
from grpo_roc_jax.worlds.worlds import world_problem
from tests.helpers import method_groups
from tests.helpers.samples import make_group
from tests.learner.test_update import MODEL, ONE, UPDATE, batch_on, mesh_of, state_on, step_of
from tests.learner.test_update import rows as rows  # a fixture

TOKENIZER = g.load_tokenizer(g.TextConfig(tokenizer="bytes"))
CHAT = make_chat(g.TextConfig(tokenizer="bytes"), TOKENIZER)
PROBLEM = Problem("p", "1+1=?", "2", "t")


def method(name, *words):
    return load_config(Config, [str(load_methods()[name].path), *words], prog="test")


def limits(prompt=60, response=20):
    return SimpleNamespace(rollout=SimpleNamespace(max_prompt_tokens=prompt, max_response_tokens=response))


def test_what_does_not_fit_is_left_out_and_a_first_wave_goes_plain(optional=Condition("budget", 1)):  # noqa: B008
    plain = len(CHAT.prompt_ids(PROBLEM))
    tight = limits(prompt=plain + 4)
    assert sample.fits(tight, CHAT, RolloutRequest(PROBLEM, 0, condition=optional, suffix="four"))
    long = RolloutRequest(PROBLEM, 0, condition=optional, suffix="fives")
    assert not sample.fits(tight, CHAT, long)
    assert sample.plain_where_too_long(tight, CHAT, [long], [PROBLEM]) == [RolloutRequest(PROBLEM, 0)]
    token = RolloutRequest(PROBLEM, 0, condition=Condition("high_reward"), suffix="fives")
    assert sample.plain_where_too_long(tight, CHAT, [token], [PROBLEM]) == [token], "a reward token is never dropped"
    for n in (15, 16):  # a cut leaves room for a token after "stop" and its prefix
        cut = RolloutRequest(PROBLEM, 0, condition=Condition("cut"), prefix=tuple(range(n)), prefix_text="stop")
        assert sample.fits(limits(response=20), CHAT, cut) == (n == 15)


def test_thought_length():
    for text in ("think</reason><tool_call>", "think"):
        tokens = np.asarray([1, 2, *CHAT.raw_ids(text)], np.int32)
        turns = (Turn(2, len(tokens), text),)
        trajectory = Trajectory(tokens, tokens < 0, tokens * 0.0, tokens * 0 - 1, 2, turns, "answer", 0)
        assert sample.thought_length(trajectory, TOKENIZER) == len("think")


def batches_of_problems():
    """Nine batches of four problems, and a state in which all are equally uncertain."""
    batches = iter([[replace(PROBLEM, uid=f"{b}{i}") for i in range(4)] for b in range(9)])
    return batches, SimpleNamespace(
        table=SimpleNamespace(get=lambda uids: {k: np.ones(len(uids)) for k in ("alpha", "beta")})
    )


def test_draw_problems_takes_one_batch_and_most_rows_bounds_every_plan():
    (batches, state), rng = batches_of_problems(), np.random.default_rng(0)
    config = method("grpo", "--group.problems=4")
    assert [p.uid for p in sample.draw_problems(config, batches, state, rng)] == ["00", "01", "02", "03"]
    assert len(list(batches)) == 8
    assert learning.most_rows(method("grpo", "--group.problems=8", "--group.size=4", "--batch.updates=3")) == 3 * 4
    assert learning.most_rows(method("roc_inverse", "--group.problems=2", "--group.size=4")) == 8


class Placed(group_learner.GroupLearner):
    """A learner that scores with what it is given instead of compiled programs."""

    def on_mesh(self, rows, temperature, extra=()):
        packed = [row.weights for row in (*rows, *extra)]
        return UpdateBatch(list(rows), packed, SimpleNamespace(fill=1.0), temperature)

    def score(self, params, groups, temperature):
        trajectories = [t for group in groups for t in group.trajectories]
        return g.Scores([(t.logprobs - params * t.policy_mask).astype(np.float32) for t in trajectories])


def placed(config, update=None, kind=Placed):
    learner = Learner(g.ModelConfig())
    learner.update_step = update
    return kind(config, learner, None)


def a_run():
    return run_state.RunState(SimpleNamespace(params=0.0), 0.0, None, AlgoState())


def test_epochs_pass_over_the_parts_again_and_explanations_train_in_the_first_optimizer_step_only():
    config = method("grpo", "--batch.updates={kind: several, parts: 2, epochs: 3}", "--group.problems=4")
    groups = [make_group(seed, 4) for seed in range(4)]
    batches = placed(config).batches(groups, (), a_run())
    assert [len(batch.rows) for batch in batches] == [len(batch.packed) for batch in batches] == [8] * 6
    for k in range(2):
        assert all(batch.packed is batches[k].packed for batch in batches[k::2])
    assert sum(batch.measured.get("time/rows_s", 0) > 0 for batch in batches) == 1
    assert len(placed(method("grpo")).batches(groups, (), a_run())) == 1

    class Explaining(Placed):
        def explanation_rows(self, explained, run):
            return batches[0].rows[:2]

    explained = placed(config, kind=Explaining).batches(groups, groups[:1], a_run())
    assert [len(batch.packed) for batch in explained] == [10, *[8] * 5]


def round_of(config, sample_requests, problems, **given):
    """A round whose requests get what a function returns."""
    sampling = SimpleNamespace(sampler=SimpleNamespace(chat=CHAT), sample_requests=sample_requests)
    return sample.run_round(config, sampling, None, problems, AlgoState(), np.random.default_rng(0), **given)


def test_samples_and_places_are_numbered_through_a_step():
    """Random keys derive from them: no two rollouts of a step may share a pair."""
    pairs, carried = [], []

    def sample_requests(weights, requests, options, partial):
        pairs.extend((request.place, number) for request in requests for number in request.samples)
        carried.append(partial)
        return sample.ScoredRollouts(tuple(Group(request.problem, (), ()) for request in requests))

    class Again(SecondWave):
        def next(self, wave):
            return [RolloutRequest(PROBLEM, index, 3) for index in range(2)] if wave.number < 2 else []

    config = method("grpo", "--group.size=3", "--resample.drop=none")
    config = replace(config, plan=replace(config.plan, second=Again()))
    for first in (0, 8):
        round_of(config, sample_requests, [PROBLEM] * 2, step=3, first_place=first, partial=("cut",))
    assert len(set(pairs)) == len(pairs) == 24
    assert sorted(pairs) == [(first + index, i) for first in (0, 8) for index in range(2) for i in range(6)]
    assert carried == [("cut",), ()] * 2, "groups of the step before are continued with the first wave"


def test_a_rebuilt_batch_sees_the_step_before_it_and_keeps_the_importance_weights_of_the_first():
    """Rows that are rebuilt for their covariances keep the gap between sampler and trainer, without what training has
    changed since, which is in the ratio."""
    seen = []

    def update(train, packed):
        return SimpleNamespace(params=train.params + 0.2), {"loss/value": np.float32(train.params)}

    class Noted(Placed):
        def score(self, params, groups, temperature):
            seen.append((params, len(groups)))
            return super().score(params, groups, temperature)

    words = ["--weights.factors=truncated_is", "--surrogate.old_logprobs=scored", "--group.problems=2"]
    config = method("clip_cov", "--batch.updates=2", *words)
    learner, run = placed(config, update, Noted), replace(a_run(), train=SimpleNamespace(params=0.1))
    given = learner.batches([make_group(seed, 4) for seed in (1, 2)], (), run)
    train, batches, metrics = learner.update(run, given)
    assert seen == [(0.1, 2), (0.1, 1), (0.1 + 0.2, 1)], "all, then what each update trains on"
    assert (train.params, run.train.params) == (pytest.approx(0.5), 0.1)
    assert batches[0] is given[0] and batches[1].rows is not given[1].rows
    assert metrics["loss/value"] == pytest.approx(0.2)
    for row, before in zip(batches[1].rows, given[1].rows, strict=True):
        np.testing.assert_allclose(row.weights, before.weights, rtol=1e-6)
        np.testing.assert_array_equal(row.logprobs_old, before.logprobs_old)
        assert row.marked is not None
    assert metrics["mismatch/geometric_ratio"] == pytest.approx(np.exp(-0.1), abs=1e-5)


RATIO = ["gspo", "gmpo", "cispo", "dual_clip", "delta", "tis", "mis", "sapo"]
RATIO += ["icepop", "dppo", "dppo_kl", "clip_cov", "kl_cov", "kl_corrected"]


def test_recipes_in_which_the_ratio_matters_have_several_updates(names=tuple(RATIO)):
    for name in names:
        config = method(name)
        assert not ratio_is_one(config), name
        assert config.optim.schedule.total_steps == config.steps * config.batch.updates.total, name
    with pytest.raises(ConfigError, match="measured on held-out problems"):
        method("rc_grpo", "--data.eval_problems=0")


WARNS = [("", [], False), ("grpo", [], True), ("grpo", ["--batch.updates=2"], False)]  # nobody chose the default
WARNS += [("dapo", ["--surrogate.old_logprobs=scored"], True)]


@pytest.mark.parametrize(("name", "words", "warns"), WARNS)
def test_a_dry_run_says_when_no_ratio_can_differ_from_1(name, words, warns, capsys):
    assert main([*([f"methods/{name}.yaml"] if name else []), *words, "--dry-run"]) == 0
    assert ("every importance ratio is 1" in capsys.readouterr().out) == warns


def test_parts_are_runs_of_whole_groups_and_rows_of_own_parts_are_checked():
    groups = [make_group(i, n) for i, n in enumerate((2, 3, 1, 2))]
    assert [[g.size for g in part] for part in group_learner.parts_of(groups, 3)] == [[2], [3], [1, 2]]
    assert [len(rows) for rows in group_learner.split_rows(list(range(8)), groups, 3)] == [2, 3, 3]
    empty = replace(groups[0], trajectories=(), verdicts=())
    assert group_learner.parts_of([empty, *groups[1:]], 4) == [[groups[1]], [groups[2]], [groups[3]]]
    row = SimpleNamespace(length=3, weights=np.full(3, np.nan), advantages=np.ones(3))
    with pytest.raises(ValueError, match="not finite"):
        group_learner.checked_rows([row], [row])


def test_rows_keep_the_temperature_that_they_were_drawn_at():
    """Groups that waited for a step with another temperature train at their own; records without one at the step's."""
    config = method("dr_grpo", "--group.problems=2", "--batch.row_length=160", "--batch.rows=2", "--group.size=3")
    mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
    learner = Learner(g.ModelConfig(), mesh=mesh, batch=config.batch, several_temperatures=True)
    rows = g.train_rows([waiting := make_group(0, 3)], config, AlgoState(), rng=np.random.default_rng(0))
    packed = learner.on_mesh(rows, 1.1)
    heats = [set(values.tolist()) for values in pack.unpack(packed.packed.temperatures, packed.placement)]
    assert heats == [{float(np.float32(t.temperature or 1.1))} for t in waiting.trajectories]
    assert len({heat for row_heats in heats for heat in row_heats}) == 2
    plain_learner = Learner(g.ModelConfig(vocab_size=512), mesh=mesh, batch=config.batch)
    same = [replace(row, temperature=heat) for row, heat in zip(rows, (None, 1.0, 0.0), strict=True)]
    assert plain_learner.on_mesh(same, 1.0).packed.temperatures is None, "one temperature needs none; greedy is at 1"
    mixed = plain_learner.on_mesh(same, 0.5)
    assert [set(heat.tolist()) for heat in pack.unpack(mixed.packed.temperatures, mixed.placement)] == [{0.5}, {1}, {1}]
    with pytest.raises(ValueError, match=r"row 1 has ids from -?\d+ to \d+, but the model has"):
        plain_learner.on_mesh([rows[0], replace(rows[1], tokens=rows[1].tokens + 10**6)], 1.0)


def test_a_demonstration_joins_the_group():
    """The world's own way to the answer, scored like a rollout; none that is too long."""
    problem = world_problem("products", 1, 0, 3)
    chat = make_chat(g.TextConfig(), g.load_tokenizer(g.TextConfig()))
    scorer, group = g.make_scorer(g.RewardConfig()), replace(method_groups.make_group([1, 0]), problem=problem)
    shown = demonstrate.with_demonstration(scorer, chat, 256, group)
    scorer.close()
    last = shown.trajectories[2]
    assert shown.correct.tolist() == [True, False, True]
    assert str(last.condition) == "demonstration" and last.prompt_length == len(chat.prompt_ids(problem))
    assert [chat.parse_turn(last.tokens[t.start : t.end]).text for t in last.turns] == [t.text for t in last.turns]
    assert all(last.policy_mask[t.start : t.end].all() for t in last.turns)
    assert demonstrate.with_demonstration(scorer, chat, 16, group) is group
    unknown = replace(group, problem=replace(problem, extra={}))
    assert demonstrate.with_demonstration(scorer, chat, 256, unknown) is unknown


OPTIM = OptimConfig(lr=1e-2, warmup_steps=0, eps=1e-2)
"""With the usual `eps` Adam's first step moves a parameter by the learning rate even if its gradient is rounding."""


def learner_of(axes, fails):
    """A learner whose update runs out of memory where `fails` says so of the shape of a micro-batch."""
    step = step_of(axes, optim=OPTIM)

    def update(state, batch):
        if fails(batch.tokens.shape[1]):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes")
        return step(state, batch)

    learner = Learner(MODEL, mesh=mesh_of(axes))
    learner.update_step = update
    return learner


def test_memory_that_runs_out_halves_micro_batches_and_changes_no_gradient(rows, caplog):
    """The trained parameters stay those of the whole micro-batches, and later steps begin with the halves."""
    axes = (1, 1, 1)
    batch, _ = batch_on(axes, rows, g.BatchConfig(row_length=32, rows=2))
    count = batch.tokens.shape[1]
    tight = learner_of(axes, lambda rows: rows == count)
    expected, measured = learner_of(axes, lambda rows: False).optimizer_step(state_on(axes, OPTIM), batch)
    for _ in range(2):
        state, numbers = tight.optimizer_step(state_on(axes, OPTIM), batch)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert float(numbers["update/grad_norm"]) == pytest.approx(float(measured["update/grad_norm"]), rel=1e-6)
        assert numbers["update/micro_batches"] == 2 * measured["update/micro_batches"]
    assert tight.halvings.counts == {"update": 1} and caplog.text.count("memory ran out") == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):  # never enough
        learner_of(axes, lambda rows: True).optimizer_step(state_on(axes, OPTIM), batch)


def test_rollouts_go_on_between_the_parts_of_an_update():
    calls, learner = [], Learner(MODEL)

    def parts(state, rows, *, between):
        for part in rows:
            calls.append(part)
            between()
        return state, {}

    learner.parts, learner.meanwhile = parts, lambda: calls.append("chunk")
    assert learner.optimizer_step("state", "cd") == ("state", {}) and calls == ["c", "chunk", "d", "chunk"]
    undivided, plain = (1, 2, 1), g.read_config()
    lag0, lag1 = (g.read_config(f"rollout.step_limit={{kind: stream, lag: {lag}}}") for lag in (0, 1))
    for config, axes, expected in ((plain, ONE, 0), (lag0, ONE, 0), (lag1, undivided, 1), (lag1, (2, 1, 1), 0)):
        assert learning.takes_turns(config, mesh_of(axes)) == expected


def test_a_scoring_pass_that_runs_out_of_memory_gives_the_same_scores(rows):
    """Injected twice: micro-batches of four rows become those of one."""
    batch, _ = batch_on((1, 1, 1), rows, g.BatchConfig(row_length=32, rows=4))
    learner, score = learner_of((1, 1, 1), lambda rows: False), make_score(MODEL, UPDATE, mesh_of((1, 1, 1)))
    params = state_on().params
    expected = jax.device_get(score(params, batch))[0]
    with injected("score.memory=oom@1,score.memory=oom@2") as happened:
        logprobs = learner.halvings.run("score", partial(score, params), batch)[0]
    assert learner.halvings.counts == {"score": 2} and happened.total() == 2
    np.testing.assert_allclose(np.asarray(logprobs).reshape(expected.shape), expected, atol=1e-5)


def test_rounds_of_a_step_have_places_of_their_own(monkeypatch):
    places = []

    def run_round(config, sampling, weights, problems, state, rng, *, first_place, **placed):
        places.append(first_place)
        return sample.StepSamples()

    monkeypatch.setattr(train, "run_round", run_round)
    monkeypatch.setattr(train, "draw_problems", lambda *_: [])
    config = method("grpo", "--group.dynamic_sampling_rounds=2", "--group.problems=4")
    sampler = SimpleNamespace(engine=SimpleNamespace(publish=lambda *_: None))
    policy, sampling = SimpleNamespace(full=lambda params: params), SimpleNamespace(sampler=sampler)
    train.sample_step(config, policy, sampling, a_run())
    assert places == [0, 4, 8]


@pytest.mark.parametrize(("words", "scored"), [([], False), (["--surrogate.old_logprobs=scored"], True)])
def test_rows_carry_the_scores_of_a_pass_that_the_method_takes(words, scored):
    config, group = g.read_config(*words), make_group(1, 4)
    logprobs = [np.full(t.length, -0.5, np.float32) for t in group.trajectories]

    class Scored(group_learner.GroupLearner):
        def score(self, *_):
            return g.Scores(logprobs, [-2 * values for values in logprobs])

    run = SimpleNamespace(train=SimpleNamespace(params=None), method=AlgoState(), step=0)
    made, measured = Scored(config, Learner(MODEL), None).rows([group], run)
    for row, values in zip(made, logprobs, strict=True):
        assert (row.scored is not None) is scored
        if scored:
            assert row.scored[0] is values and (row.scored[1] == 1.0).all()
    gaps = [np.abs(t.logprobs + 0.5)[t.policy_mask] for t in group.trajectories]  # the loss compares with the pass
    mean, largest = np.concatenate(gaps).mean(), max(map(np.max, gaps))
    expected = {"loss/logprob_gap_mean": mean, "loss/logprob_gap_max": largest} if scored else {}
    assert {k: v for k, v in measured.items() if "gap" in k} == pytest.approx(expected, rel=1e-5)


def test_groups_that_a_deadline_cut_are_those_of_the_step_that_completes_them():
    def sampled(weights, requests, options, partial):
        cut = [sample.PartialGroup(r.problem, (), options.step, r.place, None) for r in requests[::2]]
        earlier = sample.PartialGroup(PROBLEM, (), options.step - 1, requests[-1].place, None)
        groups = [make_group(i, 2) if i % 2 else Group(r.problem, (), ()) for i, r in enumerate(requests)]
        return sample.ScoredRollouts(tuple(groups), partial=(*cut, earlier))

    config = load_config(Config, ["toy.yaml"], prog="test")
    for problems, complete in ((4, 2), (1, 0)):
        samples = round_of(config, sampled, [PROBLEM] * problems, step=3, first_place=8)
        assert [group.size for group in samples.groups] == [2] * complete and len(samples.partial) > complete
        selections = tuple(g.resample(group, config, np.random.default_rng(0)) for group in samples.groups)
        metrics = replace(samples, selections=selections).metrics()
        assert metrics["roc/groups"] == complete
        assert ("no group was sampled to its end" in statistics.why_nothing_kept(metrics)) == (complete == 0)

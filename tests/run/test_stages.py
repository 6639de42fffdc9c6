"""Runs with stages: every stage is read before the first step, and a run goes on in the stage where it was stopped."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.learner.update import CosineDecay, TrainState
from grpo_roc_jax.method import advantage, state, surrogate, switching
from grpo_roc_jax.method.shaping import Overlong
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.run_dir import Start
from grpo_roc_jax.run import load, run_state, watch
from grpo_roc_jax.run import stages as run_stages
from grpo_roc_jax.run.evaluate import read_counts
from grpo_roc_jax.run.session import Claim
from grpo_roc_jax.run.stages import enter_stage, observe
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml
from grpo_roc_jax.train import train
from tests.test_train import TINY, numbers, params_hash
from tests.test_train import shared_programs as shared_programs  # a fixture

STAGES = """
steps: 9
eval: {every: 2}
data: {sources: ["world:gcd:1"], world_problems: 6}
reward: {functions: ["tests.run.test_stages:half"]}
stages:
- {name: short, steps: 2, set: {rollout: {max_response_tokens: 12}, optim: {lr: 0.02}}}
- name: long
  steps: 9
  until: [{kind: solved, share: 0.3, window: 2}, {kind: steady, metric: rollout/length, window: 1, tolerance: 99}]
  set: {group: {problems: 3}, sampling: {temperature: 0.9}, rollout: {max_turns: 2}}
- name: hard
  steps: 2
  choose: {rollouts: 4, lowest: 0}
  restart: [optimizer]
  set: {rollout: {max_response_tokens: 14}}
"""


def half(problem, trajectories):
    """Pays every trajectory of odd problems, and an even first token of the others."""
    odd = int(problem.uid.split(":")[-1]) % 2
    return [float(odd or t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


def file_of(folder, text, name="stages"):
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    file_of(folder, dump_yaml(read_config(*TINY)), "tiny")
    return file_of(folder, "base: tiny.yaml\n" + STAGES)


def test_each_stage_has_its_settings_and_the_command_line_overrides_all(stages, tmp_path):
    config = read_config(stages)
    first, second, third = config.staged()
    assert [stage.rollout.max_response_tokens for stage in config.staged()] == [12, 16, 14]
    assert (first.optim.lr, second.optim.lr, first.stages, second.steps) == (0.02, 0.01, None, 9)
    assert (third.group.problems, second.group.problems, second.rollout.max_turns) == (2, 3, 2)
    config = read_config(stages, "--rollout.max_response_tokens=11", "--optim.lr=0.5", "--steps=2")
    assert {stage.rollout.max_response_tokens for stage in config.staged()} == {11} and config.steps == 2
    assert read_config(file_of(tmp_path, dump_yaml(config))) == config


BASE = "base: toy.yaml\nshaping: [{kind: overlong, limit: 99, buffer: 9}]\nadvantage: {adjust: [turns]}\n"
CLIPPED, GROUPED = (
    surrogate.Clip(clip_low=0.1, clip_high=0.3),
    advantage.GroupRelative(baseline=advantage.NoBaseline(), adjust=(advantage.TurnCredit(),)),
)


def test_the_command_line_overrides_single_settings_of_a_kind(tmp_path):
    for staged, word, expected in (
        ("surrogate: {kind: clip, clip_low: 0.1, clip_high: 0.4}", "surrogate.clip_high=0.3", CLIPPED),
        ("surrogate: {kind: cispo, high: 3}", "surrogate.clip_high=0.3", surrogate.Cispo(high=3.0)),
        ("surrogate: {kind: clip, clip_low: 0.1}", "surrogate=cispo", surrogate.Cispo()),
        ("optim: {schedule: cosine}", "optim.schedule.total_steps=9", CosineDecay(total_steps=9)),
        ("advantage: {scale: none, baseline: none}", "advantage.scale.kind=std", GROUPED),
        ("shaping: [{kind: overlong, limit: 35, buffer: 20}]", "shaping.overlong.limit=30", (Overlong(30, 20),)),
    ):
        config = read_config(file_of(tmp_path, f"{BASE}stages: [{{name: a, steps: 3, set: {{{staged}}}}}]"), word)
        (stage,) = config.staged()
        assert expected in (stage.surrogate, stage.optim.schedule, stage.advantage, stage.shaping), staged
        assert read_config(file_of(tmp_path, dump_yaml(config))).staged() == (stage,)


def test_a_mistake_in_a_later_stage_is_found_with_its_line(tmp_path):
    for text, message in (
        ("set: {rollout: {max_turnz: 3}}", r"stage b: unknown key 'rollout.max_turnz' \(stages.*line 4\)"),
        ("set: {optim: {lr: -1}}", r"stage b: optim.lr = -1 \(stages.yaml, line 4\): must be above 0"),
        ("set: {model: {layers: 2}}", r"stage b: model \(stages.yaml, line 4\): must be the same"),
        ("until: [plateau]", "stage b: until plateau with eval.every = 0"),
        ("choose: {}", "stage b: choose with world:products:1, which has no end"),
    ):
        stages = f"- {{name: a, steps: 1}}\n- {{name: b, steps: 1, {text}}}\n"
        with pytest.raises(ConfigError, match=message):
            read_config(file_of(tmp_path, f"base: toy.yaml\nstages:\n{stages}"))


def fakes(stages, stage, progress, *, step=5, carried=None):
    """(session, run) whose policy and data are numbers; the run was restored after `step` steps."""
    config = read_config(stages)
    claim = run_stages.at_stage(Claim(config, Path(), Start("resume", step), None, config, progress=carried), stage)
    train = TrainState(jnp.int32(7), {"norm": jnp.ones(2)}, jnp.zeros(2))
    data = SimpleNamespace(place=0, set_state=lambda place: setattr(data, "place", place))
    run = run_state.RunState(train, (), data, state.AlgoState(), step=step, progress=progress, partial=("cut",))
    run.bundle = lambda: "held"
    run.buffer.add([SimpleNamespace(size=1)])
    noted = []
    parts = {name: SimpleNamespace(model=None, mesh=None) for name in ("checkpointer", "policy")}
    parts["sampling"] = SimpleNamespace(processes=SimpleNamespace(once=lambda work: work()))
    parts |= {"writer": mock.Mock(), "events": SimpleNamespace(note=lambda *event: noted.append(event))}
    return SimpleNamespace(claim=claim, config=claim.config, noted=noted, held_out=(), **parts), run


def test_a_stage_begins_without_what_the_one_before_left(stages):
    session, run = fakes(stages, 1, switching.StageProgress(0, 0))
    enter_stage(session, run, 3)
    assert run.progress == switching.StageProgress(1, 5, ((), ())) and session.checkpointer.latest == "held"
    assert (len(run.buffer), run.buffer.counts, run.partial) == (0, (1, 1, 0), ())
    assert session.noted == [(6, "stage", "long begins, 2 of 3; 2 groups of the stage before are dropped")]
    assert run.stream.place == 3 and observe(session, run, {}) == {"stage": 2.0}


def test_a_stage_goes_on_where_it_was(stages):
    progress = switching.StageProgress(1, 4, ((0.1,), (9.0,)))
    session, run = fakes(stages, 1, progress)
    enter_stage(session, run, 3)
    assert (run.progress, run.partial, len(run.buffer), session.noted) == (progress, ("cut",), 1, [])
    observe(session, run, {"roc/all_correct": 1.0, "roc/groups": 2.0, "rollout/length": 9.0})
    assert run.progress.values == ((0.1, 0.5), (9.0, 9.0)) and run_stages.stage_over(session, run)
    assert run_stages.steps_left(session, run) == 4
    following = run_stages.next_claim(session.claim, run)
    assert (following.stage, following.config.rollout.max_response_tokens, following.config.steps) == (2, 14, 9)
    assert following.progress == run.progress and following.start == Start("resume", 5, began=5)
    run.step = 9
    assert run_stages.next_claim(session.claim, run) is None


def test_a_policy_is_opened_with_the_settings_of_its_stage(stages, tmp_path):
    (tmp_path / "config.yaml").write_text(dump_yaml(read_config(stages)))
    for step, host in ((0, {}), (4, {"stage": switching.StageProgress(1, 2).to_json()})):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step:08d}/host_0.json").write_text(json.dumps(host))
    names = [f"{tmp_path}/checkpoints/step_{step:08d}" for step in (0, 4, 9)]
    configs = [load.settings_for(name, ["--rollout.max_turns=7"], "test", dialogue=False) for name in names]
    assert [run.rollout.max_response_tokens for run in configs] == [12, 16, 12]
    assert [run.group.problems for run in configs] == [2, 3, 2] and {run.rollout.max_turns for run in configs} == {7}


@pytest.fixture(scope="module")
def trained(stages, tmp_path_factory):
    """A run of all stages that nothing stopped; the second one ends by its conditions."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    return run_dir, train(read_config(stages, f"--run_dir={run_dir}", "--checkpoint.keep=9"))


@pytest.mark.slow
def test_a_run_goes_through_its_stages(trained):
    run_dir, summary = trained
    rows = [row for row in read_metrics(run_dir) if "rollout/reward" in row]
    assert [row["stage"] for row in rows] == [1, 1, 2, 2, 3, 3] and summary["steps"] == 6
    assert [row["roc/groups"] for row in rows] == [2, 2, 3, 3, 2, 2]
    assert [row["update/lr"] for row in rows] == pytest.approx([0.02] * 2 + [0.01] * 4)
    events = [(event["step"], event["text"]) for event in read_events(run_dir) if event["event"] == "stage"]
    assert events == [(1, "short begins, 1 of 3"), (3, "long begins, 2 of 3"), (5, "hard begins, 3 of 3")]
    assert summary["compilations_after_first_step"] == 0
    assert json.loads((run_dir / "checkpoints/step_00000004/host_0.json").read_text())["stage"]["index"] == 1
    counts = read_counts(run_dir / "difficulty_3.jsonl")  # problems that are always solved leave the last stage
    solved = {uid for uid, (won, tried) in counts.items() if won == tried}
    assert len(counts) == 6 and {tried for _, tried in counts.values()} == {4}
    assert solved >= {uid for uid in counts if int(uid[-1]) % 2} and len(solved) < 6
    (event,) = (event for event in read_events(run_dir) if event["event"] == "chosen")
    text = f"{6 - len(solved)} of 6 problems that the policy tried 4 times are solved in a share in [0, 0.95] and stay"
    assert event["text"] == text
    last = [json.loads(line) for line in (run_dir / "trajectories/step_00000006.jsonl").read_bytes().splitlines()]
    assert not solved & {record["problem"]["uid"] for record in last if "problem" in record}


def test_a_stage_keeps_what_its_policy_solves_sometimes():
    counts = {f"p{i}": (i % 5, 4) for i in range(9)} | {"p9": (0, 0)}

    def chosen(**settings):
        return run_stages.solved_sometimes(counts, switching.ProblemChoice(rollouts=4, **settings), "hard")[0]

    assert chosen() == {"p1", "p2", "p3", "p6", "p7", "p8", "p9"}, "one that was not judged stays"
    assert chosen(lowest=0.0) == set(counts) - {"p4"} and chosen(highest=1.0) == set(counts) - {"p0", "p5"}
    assert chosen(lowest=0.5, highest=0.5) == {"p2", "p7", "p9"}
    del counts["p9"]
    with pytest.raises(watch.Stopped, match=r"stage hard: none of 9 .* in \[0.9, 0.95\]; the policy solves 44% of"):
        chosen(lowest=0.9)
    problems = [SimpleNamespace(uid=f"p{i}") for i in range(50)]  # what is tried does not change with the process
    few = run_stages.drawn(problems, 20, seed=3)
    assert few == run_stages.drawn(problems, 20, seed=3) == [problem for problem in problems if problem in few]
    assert len(few) == 20 and run_stages.drawn(problems, 99, seed=3) == problems


@pytest.mark.slow
@pytest.mark.parametrize("step", range(6))
def test_a_run_that_was_killed_goes_on_in_its_stage(trained, stages, tmp_path, step):
    run_dir = shutil.copytree(trained[0], tmp_path / "run")
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join(line for line in lines if json.loads(line)["step"] <= step))
    (run_dir / "summary.json").unlink()
    for path in run_dir.glob("checkpoints/step_*"):
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    if step < 4:
        (run_dir / "difficulty_3.jsonl").unlink()
    summary = train(read_config(stages, f"--run_dir={run_dir}", "--checkpoint.keep=9", "--resume=auto"))
    assert numbers(run_dir) == numbers(trained[0]) and params_hash(run_dir) == params_hash(trained[0])
    assert read_events(run_dir) == read_events(trained[0]) and summary["accuracy_after"] == trained[1]["accuracy_after"]
    before = (run_dir / "metrics.jsonl").read_bytes()
    again = train(read_config(stages, f"--run_dir={run_dir}", "--checkpoint.keep=9", "--resume=auto"))
    assert again == summary and (run_dir / "metrics.jsonl").read_bytes() == before

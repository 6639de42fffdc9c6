"""Runs with stages: every stage is read before the first step, and a run goes on in the stage where it was stopped."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import pytest

from grpo_roc_jax import train as training
from grpo_roc_jax.config import EvalConfig, read_config
from grpo_roc_jax.learner.update import CosineDecay, TrainState
from grpo_roc_jax.method.advantage import GroupRelative, NoBaseline, NoScale, TurnCredit
from grpo_roc_jax.method.shaping import Overlong
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.surrogate import Cispo, Clip
from grpo_roc_jax.method.switching import ProblemChoice, StageProgress
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import JsonlWriter, read_metrics
from grpo_roc_jax.record.run_dir import Start
from grpo_roc_jax.run import stages as run_stages
from grpo_roc_jax.run.evaluate import read_counts
from grpo_roc_jax.run.load import serving_settings, settings_for
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.session import Claim
from grpo_roc_jax.run.stages import enter_stage, observe
from grpo_roc_jax.run.watch import Stopped
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml, flatten
from grpo_roc_jax.train import train
from grpo_roc_jax.types import Problem
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
    assert "stages" not in dict(flatten(read_config()))
    text = "stages: [{name: a, steps: 3, set: {optim: {lr: 1.0e-4, warmup_steps: 7}}}]"
    (only,) = read_config(file_of(tmp_path, text), "--optim", "{lr: 1e-3}").staged()
    assert (only.optim.lr, only.optim.warmup_steps) == (1e-3, 7), "a mapping sets what it names"
    config = read_config(stages, "--rollout.max_response_tokens=11", "--optim.lr=0.5", "--steps=2")
    assert {stage.rollout.max_response_tokens for stage in config.staged()} == {11} and config.steps == 2
    assert {stage.optim.lr for stage in config.staged()} == {0.5}
    assert read_config(file_of(tmp_path, dump_yaml(config))) == config


BASE = "base: toy.yaml\nshaping: [{kind: overlong, limit: 99, buffer: 9}]\nadvantage: {adjust: [turns]}\n"
CLIP, COSINE = "clip_low: 0.1, clip_high: 0.4", CosineDecay(total_steps=9)
CLIPPED, GROUPED = Clip(clip_low=0.1, clip_high=0.3), GroupRelative(baseline=NoBaseline(), adjust=(TurnCredit(),))
HALF = GroupRelative(adjust=(TurnCredit(omega=0.5),))
UNSCALED = replace(HALF, scale=NoScale())


@pytest.mark.parametrize(
    ("staged", "word", "expected"),
    [
        (f"surrogate: {{kind: clip, {CLIP}}}", "surrogate.clip_high=0.3", CLIPPED),
        (f"surrogate: {{{CLIP}}}", "surrogate.clip_high=0.3", CLIPPED),
        ("surrogate: {kind: cispo, high: 3}", "surrogate.clip_high=0.3", Cispo(high=3.0)),
        ("surrogate: {kind: clip, clip_low: 0.1}", "surrogate=cispo", Cispo()),
        ("optim: {schedule: {kind: cosine, total_steps: 70}}", "optim.schedule.total_steps=9", COSINE),
        ("optim: {schedule: cosine}", "optim.schedule.total_steps=9", COSINE),
        ("advantage: {scale: none, baseline: none}", "advantage.scale.kind=std", GROUPED),
        ("advantage: {kind: group, scale: none, baseline: none, adjust: [turns]}", "advantage.scale=std", GROUPED),
        ("advantage: {kind: group, adjust: [turns]}", "advantage.adjust.turns.omega=0.5", HALF),
        ("advantage: {kind: group, scale: none}", "advantage.adjust.turns.omega=0.5", UNSCALED),
        ("shaping: [{kind: overlong, limit: 35, buffer: 20}]", "shaping.overlong.limit=30", (Overlong(30, 20),)),
    ],
)
def test_the_command_line_overrides_single_settings_of_a_kind(staged, word, expected, tmp_path):
    config = read_config(file_of(tmp_path, f"{BASE}stages: [{{name: a, steps: 3, set: {{{staged}}}}}]"), word)
    (stage,) = config.staged()
    assert expected in (stage.surrogate, stage.optim.schedule, stage.advantage, stage.shaping)
    assert read_config(file_of(tmp_path, dump_yaml(config))).staged() == (stage,)


def test_without_steps_beside_them_a_run_has_those_of_its_stages(tmp_path):
    table = (("", (), 7), ("steps: 5\n", (), 5), ("base: toy.yaml\n", (), 7), ("", ("--steps=2",), 2))
    for before, words, steps in (*table, ("", ("--stages=[{name: c, steps: 6}]",), 6)):
        for a, b in ((3, 4), ("'3'", "4.0")):
            text = f"{before}stages: [{{name: a, steps: {a}}}, {{name: b, steps: {b}}}]\noptim: {{schedule: constant}}"
            assert read_config(file_of(tmp_path, text), *words).steps == steps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1, set: {rollout: {max_turnz: 3}}", r"stage b: unknown key 'rollout.max_turnz' \(stages.*line 4\)"),
        ("steps: 1, set: {optim: {lr: -1}}", r"stage b: optim.lr = -1 \(stages.yaml, line 4\): must be above 0"),
        ("steps: 1, set: {model: {layers: 2}}", r"stage b: model \(stages.yaml, line 4\): must be the same"),
        ("steps: 1, set: {optim: {moment_dtype: bfloat16}}", "stage b: optim.moment_dtype, clipping"),
        ("steps: 1, until: [plateau]", "stage b: until plateau with eval.every = 0"),
        ("steps: 9, until: [plateau], set: {eval: {every: 9}}", "with eval.every = 9 .* below its 9 steps"),
        ("steps: 9, until: [plateau], set: {eval: {every: 2}, data: {eval_problems: 0}}", "data.eval_problems = 0"),
        ("steps: 1, set: {method: {files: [a.py]}}", "stage b: method.files are read once"),
        ("steps: 1, set: {optim.lr: 1}", "unknown key 'optim.lr' .*line 4.; write it as optim: {lr: ...}"),
        ("steps: 1, choose: {}", "stage b: choose with world:products:1, which has no end"),
        ("steps: 0", r"stages.1.steps = 0 \(stages.yaml, line 4\): must be at least 1"),
    ],
)
def test_a_mistake_in_a_later_stage_is_found_with_its_line(text, message, tmp_path):
    path = file_of(tmp_path, f"base: toy.yaml\nstages:\n- {{name: a, steps: 1}}\n- {{name: b, {text}}}\n")
    with pytest.raises(ConfigError, match=message):
        read_config(path)


def test_the_dry_run_goes_over_every_stage(stages, capsys):
    assert training.main([stages, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "stage short:\n2 problems x 8" in printed and "stage long:\n3 problems x 8" in printed
    assert "9 steps = 216 rollouts of at most 40 tokens" in printed


class FakeData:
    place = 0

    def set_state(self, place):
        if place == "other":
            raise ValueError("other data")
        self.place = place


def fakes(stages, stage, progress, *, step=5, carried=None):
    """(session, run) whose policy and data are numbers; the run was restored after `step` steps."""
    config = read_config(stages)
    claim = run_stages.at_stage(Claim(config, Path(), Start("resume", step), None, config, progress=carried), stage)
    train = TrainState(jnp.int32(7), {"norm": jnp.ones(2)}, jnp.zeros(2))
    run = RunState(train, (), FakeData(), AlgoState(), step=step, progress=progress, partial=("cut",))
    run.bundle = lambda: "held"
    run.buffer.add([SimpleNamespace(size=1)])
    noted = []
    parts = {name: SimpleNamespace(model=None, mesh=None) for name in ("checkpointer", "policy")}
    parts["sampling"] = SimpleNamespace(processes=SimpleNamespace(once=lambda work: work()))
    parts |= {"writer": mock.Mock(), "events": SimpleNamespace(note=lambda *event: noted.append(event))}
    return SimpleNamespace(claim=claim, config=claim.config, noted=noted, held_out=(), **parts), run


def test_a_stage_begins_without_what_the_one_before_left(stages):
    session, run = fakes(stages, 1, StageProgress(0, 0))
    enter_stage(session, run, 3)
    assert run.progress == StageProgress(1, 5, ((), ())) and session.checkpointer.latest == "held"
    assert (len(run.buffer), run.buffer.counts, run.partial) == (0, (1, 1, 0), ())
    assert session.noted == [(6, "stage", "long begins, 2 of 3; 2 groups of the stage before are dropped")]
    assert run.stream.place == 3 and observe(session, run, {}) == {"stage": 2.0}


def test_a_stage_goes_on_where_it_was(stages):
    progress = StageProgress(1, 4, ((0.1,), (9.0,)))
    session, run = fakes(stages, 1, progress)
    enter_stage(session, run, 3)
    assert (run.progress, run.partial, len(run.buffer), session.noted) == (progress, ("cut",), 1, [])
    observe(session, run, {"roc/all_correct": 1.0, "roc/groups": 2.0, "rollout/length": 9.0})
    assert run.progress.values == ((0.1, 0.5), (9.0, 9.0)) and run_stages.stage_over(session, run)
    assert (
        run_stages.steps_left(session, run) == 4
        and run_stages.steps_left(*fakes(stages, 0, StageProgress(0, 4, ()))) == 1
    )
    following = run_stages.next_claim(session.claim, run)
    assert (following.stage, following.config.rollout.max_response_tokens, following.config.steps) == (2, 14, 9)
    assert following.progress == run.progress and following.start == Start("resume", 5, began=5)
    run.step = 9
    assert run_stages.next_claim(session.claim, run) is None


def test_other_data_begin_at_their_start_with_a_stage_and_are_refused_within_it(stages):
    session, run = fakes(stages, 1, StageProgress(0, 0))
    enter_stage(session, run, "other")
    assert run.stream.place == 0
    session, run = fakes(stages, 1, StageProgress(1, 4, ((), ())))
    with pytest.raises(ConfigError, match="other data"):
        enter_stage(session, run, "other")
    session.claim = replace(session.claim, start=Start("resume", 5, forced=True))
    enter_stage(session, run, "other")
    session.writer.say.assert_called_once_with(run_stages.OTHER_DATA)
    assert run.stream.place == 0, "--force reads them from their start"


def test_what_an_evaluation_decided_is_carried_to_the_next_session(stages):
    """The checkpoint of a step is written before its evaluation, so it does not hold what the conditions read there."""
    over = StageProgress(1, 3, ((0.5, 0.5), (9.0, 9.0)))
    session, run = fakes(stages, 2, StageProgress(1, 3, ((0.5,), (9.0,))), carried=over)
    session.claim = replace(session.claim, all_stages=read_config(stages, "--data.world_problems=6"))
    with mock.patch.object(run_stages, "choose_problems"), mock.patch.object(run_stages, "start_train_state") as fresh:
        enter_stage(session, run, 3)
    assert run.progress.index == 2 and fresh.call_count == 1
    session, run = fakes(stages, 2, StageProgress(0, 3), step=4, carried=None)  # an older checkpoint than expected
    enter_stage(session, run, 3)
    assert run.progress.index == 0 and session.noted == [] and run_stages.next_claim(session.claim, run).stage == 0


def test_a_run_without_further_steps_begins_no_stage(stages):
    """`grpo-roc sft` ends before the first step, so it need not try the problems of a stage that chooses some."""
    session, run = fakes(stages, 1, StageProgress(0, 0), step=9)
    enter_stage(session, run, 3)
    assert (run.progress, run.partial, session.noted) == (StageProgress(0, 0), ("cut",), [])


def test_a_resumed_run_shows_a_stage_all_metrics_of_the_evaluation_that_was_due(stages, tmp_path):
    """A condition may read any of them; those of the step are in the checkpoint, and are not shown twice."""
    session, run = fakes(stages, 1, StageProgress(1, 4, ((0.1,), ())))
    first, second = session.claim.stages[1].until
    stage = replace(session.claim.stages[1], until=(first, replace(second, metric="eval/gcd/avg@1")))
    all_stages = session.claim.all_stages
    all_stages = replace(all_stages, stages=(all_stages.stages[0], stage, *all_stages.stages[2:]))
    session.claim, session.run_dir = replace(session.claim, all_stages=all_stages), tmp_path
    measured = {f"eval/all/avg@{session.config.eval.samples}": 0.5, "eval/gcd/avg@1": 0.25}
    row = {"roc/all_correct": 1.0, "roc/groups": 2.0} | measured
    JsonlWriter(tmp_path / "metrics.jsonl").write(5, row)
    observe(session, run, training.evaluation_metrics(session, run))
    assert run.progress.values == ((0.1,), (0.25,)) and training.evaluate_once(session, run) == 0.5


@pytest.mark.parametrize("change", ["problems", "temperature", "nothing"])
def test_the_record_of_an_evaluation_is_that_of_the_same_problems_and_settings(stages, tmp_path, change):
    session, run = fakes(stages, 1, StageProgress(1, 4))
    session.run_dir, session.held_out = tmp_path, [Problem("p", "1+1?", "2", "s")]
    name, setup = f"eval/all/avg@{session.config.eval.samples}", training.evaluation_setup(session)
    JsonlWriter(tmp_path / "metrics.jsonl").write(5, {name: 0.5, "eval/setup": setup})
    if change == "nothing":
        assert training.evaluate_once(session, run) == 0.5
        return
    if change == "problems":
        session.held_out = [Problem("p", "1+2?", "3", "s")]
    else:
        session.config = replace(session.config, eval=EvalConfig(temperature=0.0))
    with pytest.raises(AttributeError, match=r"no attribute .sampler"):  # measuring again takes more than these parts
        training.evaluate_once(session, run)


def test_a_session_is_opened_for_each_stage(stages, tmp_path, monkeypatch):
    opened, evaluated, saved = [], [], [(True, "")] * 3
    run = SimpleNamespace(step=0, progress=StageProgress())

    @contextlib.contextmanager
    def open_session(claim, tools):
        opened.append((claim.stage, claim.start.kind, claim.config.rollout.max_response_tokens))
        checkpointer = SimpleNamespace(save_latest=saved.pop)
        yield SimpleNamespace(claim=claim, config=claim.config, checkpointer=checkpointer)

    def begin(session):
        stage = session.claim.stage
        run.progress = StageProgress(stage, run.step, ((0.5,), (9.0,)) if stage == 1 else ())
        return run

    @contextlib.contextmanager
    def open_loop(session, run):
        run.step += 2
        run.progress = replace(run.progress, values=tuple(2 * values for values in run.progress.values))
        yield SimpleNamespace(compiled_after_first=1)

    parts = {"open_session": open_session, "begin": begin, "open_loop": open_loop, "stage_over": lambda *_: True}
    parts |= {"state_kept": lambda session: contextlib.nullcontext(), "finish": lambda *given: {"finished": given[1:]}}
    parts["evaluate_once"] = lambda session, run: evaluated.append(session.claim.stage)
    for name, part in parts.items():
        monkeypatch.setattr(f"grpo_roc_jax.train.{name}", part)
    summary = train(read_config(stages, f"--run_dir={tmp_path / 'run'}"))
    assert opened == [(0, "fresh", 12), (1, "resume", 16), (2, "resume", 14)] and evaluated == [0, 1]
    assert (run.step, summary["finished"][2]) == (6, 3)
    run.step, saved[:] = 0, [(False, "the disk is full")]
    with pytest.raises(Stopped, match="the stage has ended, but the disk is full"):
        train(read_config(stages, f"--run_dir={tmp_path / 'other'}"))


def test_a_policy_is_opened_with_the_settings_of_its_stage(stages, tmp_path):
    (tmp_path / "config.yaml").write_text(dump_yaml(read_config(stages)))
    for step, host in ((0, {}), (4, {"stage": StageProgress(1, 2).to_json()})):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step:08d}/host_0.json").write_text(json.dumps(host))
    names = [f"{tmp_path}/checkpoints/step_{step:08d}" for step in (0, 4, 9)]
    configs = [settings_for(name, ["--rollout.max_turns=7"], "test", dialogue=False) for name in names]
    assert [run.rollout.max_response_tokens for run in configs] == [12, 16, 12]
    assert [run.group.problems for run in configs] == [2, 3, 2] and {run.rollout.max_turns for run in configs} == {7}
    fewer = replace(read_config(stages), stages=read_config(stages).stages[:1])  # resumed with `--force`
    (tmp_path / "config.yaml").write_text(dump_yaml(fewer))
    for read in (settings_for, serving_settings):
        assert read(names[1], [], "test").rollout.max_response_tokens == 12


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
        return run_stages.solved_sometimes(counts, ProblemChoice(rollouts=4, **settings), "hard")[0]

    assert chosen() == {"p1", "p2", "p3", "p6", "p7", "p8", "p9"}, "one that was not judged stays"
    assert chosen(lowest=0.0) == set(counts) - {"p4"} and chosen(highest=1.0) == set(counts) - {"p0", "p5"}
    assert chosen(lowest=0.5, highest=0.5) == {"p2", "p7", "p9"}
    del counts["p9"]
    with pytest.raises(Stopped, match=r"stage hard: none of 9 .* in \[0.9, 0.95\]; the policy solves 44% of"):
        chosen(lowest=0.9)
    problems = [SimpleNamespace(uid=f"p{i}") for i in range(50)]  # what is tried does not change with the process
    few = run_stages.drawn(problems, 20, seed=3)
    assert few == run_stages.drawn(problems, 20, seed=3) != run_stages.drawn(problems, 20, seed=4)
    assert few == [problem for problem in problems if problem in few] and len(few) == 20
    assert run_stages.drawn(problems, 0, seed=3) == run_stages.drawn(problems, 99, seed=3) == problems


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

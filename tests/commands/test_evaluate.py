"""The command line of evaluation: which problems, which policy, what is printed."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.commands import difficulty
from grpo_roc_jax.commands.evaluate import EvaluateConfig, chosen_problems, folder_of, main, show_table
from grpo_roc_jax.config import read_config
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.learner.update import init_train_state
from grpo_roc_jax.process.points import injected, listening
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.trace import read_trace, to_line
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml
from tests.helpers.knobs import write_lines
from tests.helpers.small_model import publish
from tests.test_train import shared_programs as shared_programs  # a fixture

TINY = (
    "--model.d_model=32 --model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=16 --model.d_ff=32 "
    "--rollout.slots=8 --rollout.max_prompt_tokens=40 --rollout.max_response_tokens=24 --rollout.max_turns=2 "
    "--batch.row_length=64 --batch.rows=2 --data.eval_problems=4 --data.sources world:gcd:1 world:products:1"
)


def gold(tmp_path, rows=3):
    path = tmp_path / "gold.jsonl"
    write_lines(path, [{"question": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(rows)])
    return path


def test_problems_of_files_worlds_and_the_run(tmp_path):
    path = str(gold(tmp_path))
    data = DataConfig(eval_problems=6, sources=("world:gcd:1", path), weights=(1.0, 2.0), eval_sources=("world:gcd:2",))
    problems = chosen_problems(EvaluateConfig("r"), data)
    assert len(problems) == 6 and {problem.source for problem in problems} == {"world:gcd:2"}
    assert len(chosen_problems(EvaluateConfig("r", problems=2), data)) == 2
    every = chosen_problems(EvaluateConfig("r", data=(path, "world:gcd:1")), data)  # one was trained on: allowed
    assert [problem.answer for problem in every[:3]] == ["0", "2", "4"] and len(every) == 3 + 64
    some = chosen_problems(EvaluateConfig("r", data=(path, "world:gcd:1"), problems=2), data)
    assert len(some) == 4 and len({problem.source for problem in some}) == 2


def test_the_table_reads_scores_then_reasons():
    row = {"problems": 3.0, "avg@2": 0.5, "pass@1": 0.5, "pass@2": 0.75, "pass^2": 0.25, "maj@2": float("nan")}
    names = "tool_error_rate tool_error_in_correct tool_calls turns length truncated no_answer infrastructure"
    row |= dict.fromkeys(names.split(), 0.125)

    def lines(*given):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(show_table(*given))
        return [line.split() for line in console.export_text().splitlines()]

    table = lines({"gsm8k": row, "all": row}, 2, {"gsm8k": {"avg@2": (0.25, 0.75)}})
    assert table[:2] == [["gsm8k", "all"], ["problems", "3", "3"]] and ["maj@2", "nan", "nan"] in table
    assert table[table.index(["avg@2", "0.500", "0.500"]) + 1] == ["95%", "0.250-0.750", "nan-nan"]
    single = lines({"all": row | {"avg@1": 0.5}}, 1)
    assert sum("@" in line[0] for line in single) == 1 and not any("95%" in line for line in single)


def test_what_cannot_be_evaluated_is_a_message_and_a_status(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 0")
    for words, message in (
        (["--rollout.slotz", "3"], "did you mean 'rollout.slots'"),
        (["--data", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--data", "world:gcd:1", "--keep", f"{tmp_path}/config.yaml/kept"], "choose another with --keep"),
    ):
        assert main([str(tmp_path), *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("holds", ["checkpoints", "config.yaml", "metrics.jsonl", "trajectories"])
def test_a_run_is_not_resumed_as_an_evaluation(tmp_path, capsys, monkeypatch, holds):
    """It would replace the configuration of the run and remove its trajectories."""
    run = tmp_path / "run"
    (run / holds).mkdir(parents=True)
    words = [str(run), "--data", "world:gcd:1", "--keep", str(run), "--resume"]
    for command, out in ((main, []), (difficulty.main, ["--out", str(tmp_path / "out")])):
        assert command([*words, *out]) == 2
        assert f"it holds {holds} and is no evaluation" in capsys.readouterr().err
        assert [path.name for path in run.iterdir()] == [holds]
    (run / "asked.json").touch()
    options = EvaluateConfig("r", keep=str(run), resume=True)
    if holds == "checkpoints":
        with pytest.raises(ConfigError):
            folder_of(options)
    else:
        assert folder_of(options) == run
    (run / "below").mkdir()
    (run / "config.yaml").touch()
    for place, name in (("run", "."), ("run/below", "..")):  # a directory that is named by a dot is in use, too
        monkeypatch.chdir(tmp_path / place)
        assert folder_of(EvaluateConfig("r", keep=name)) == tmp_path / "run-2"


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_two_published_models_are_compared_on_the_problems_of_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = (str(publish(tmp_path / name, seed)) for seed, name in enumerate(("one", "two")))
    path = gold(tmp_path)
    odd = [{"question": "no answer"}, {"question": "0 + 0 = ?", "answer": "0"}, {"question": "z " * 900, "answer": "1"}]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in odd))
    words = ["--data", str(path), "--samples", "2", "--out", "table.json", "--tools.workers=1", "--tools.preload=[]"]
    words += ["--rollout.max_response_tokens=16", "--rollout.slots=8"]
    assert main([one, "--against", two, *words]) == 0
    printed = capsys.readouterr().out
    for text in ("4 problems of 6 rows", "1 bad, 1 duplicate dropped", "1 over-long prompts dropped, 3 problems left"):
        assert text in printed
    assert "less" in printed and "3 problems)" in printed and "95%" in printed
    report = json.loads((tmp_path / "table.json").read_text())
    low, high = report["intervals"]["all"]["avg@2"]
    assert 0 <= low <= report["table"]["all"]["avg@2"] <= high <= 1
    assert report["differences"]["avg@2"]["problems"] == 3 and report["against"]["run"] == two
    for name, policy in (("one", report), ("two", report["against"])):
        folder = tmp_path / "runs" / "evaluations" / name
        assert policy["trajectories"] == str(folder.relative_to(tmp_path))
        assert len(list(read_trace(folder, kind="eval"))) == 6 and (folder / "config.yaml").is_file()
    assert main([one]) == 2
    assert "no problem is left to evaluate on; name some with --data" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "evaluations" / "one-2").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_an_evaluation_that_was_stopped_goes_on_with_the_next_part(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(publish(tmp_path / "one"))
    words = [model, "--data", f"sums={gold(tmp_path, 4)}", "--tools.workers=1", "--samples", "4"]
    words += ["--rollout.max_response_tokens=16", "--rollout.slots=1"]  # a part for each problem

    def rolled_out(keep, out, *more, status=0):
        """How often a run of the command scored something."""
        reached = []
        with listening(reached.append):
            assert main([*words, "--keep", keep, "--out", out, *more]) == status
        return reached.count("reward")

    assert rolled_out("kept", "whole.json") == 4
    with injected("reward=int@3"), pytest.raises(KeyboardInterrupt):
        main([*words, "--keep", "kept", "--out", "cut.json"])  # in `kept-2`
    assert rolled_out("kept-2", "cut.json", "--resume") == 2, "two parts are left"
    assert rolled_out("kept-2", "again.json", "--resume") == 0, "it has ended: nothing is rolled out"
    rolled_out("kept-2", "cut.json", "--resume", "--samples", "3", status=2)
    assert "holds an evaluation of another policy or with other settings" in capsys.readouterr().err
    full, cut, again = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "cut", "again"))
    assert (cut["table"], cut["intervals"]) == (full["table"], full["intervals"]) and again["table"] == full["table"]
    assert set(cut["table"]) == {"sums", "all"} and not (tmp_path / "kept-2" / "parts").exists()
    first, second = (list(read_trace(tmp_path / name, kind="eval")) for name in ("kept", "kept-2"))
    for pair in zip(first, second, strict=True):
        # Log-probabilities to rounding: a matrix kernel may treat a batch of fewer rows differently.
        np.testing.assert_allclose(*(record.trajectory.logprobs for record in pair), atol=5e-6)
        reference, other = (json.loads(to_line(record)) | {"seconds": 0, "logprobs": ""} for record in pair)
        assert reference == other
    with pytest.raises(ValueError, match="name it with --keep"):
        EvaluateConfig(model, resume=True)


@pytest.mark.slow
def test_a_run_is_evaluated_from_its_checkpoint_alone(tmp_path, capsys):
    """And rolls out for the filter of problems; its policy is untrained."""
    config, run = read_config(*TINY.split()), str(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    with make_parts(config) as (policy, _):
        state = init_train_state(jax.random.key(0), policy.model, config.optim, policy.mesh)
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        for step in (5, 7):
            checkpointer.save(step, Bundle({"state": state, "reference": ()}))
    out, problems = tmp_path / "table.json", str(gold(tmp_path))
    assert main([run, "--samples", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "policy after 7 training steps, 2 rollouts a problem" in printed and "world:products:1" in printed
    table = json.loads(out.read_text())["table"]
    assert table["all"]["problems"] == 4 and table["all"]["samples"] == 8
    folder = tmp_path / "evaluations" / "newest"
    assert len(list(read_trace(folder, kind="eval"))) == 8 and not (tmp_path / "trajectories").exists()
    assert 0 <= table["all"]["pass^2"] <= table["all"]["avg@2"] <= table["all"]["pass@2"] <= 1
    assert main([f"{run}/checkpoints/step_00000005", "--problems", "1", "--data", problems, "world:gcd:1"]) == 0
    assert "policy after 5 training steps" in capsys.readouterr().out
    assert main([f"{run}/checkpoints/step_00000009"]) == 2
    assert "no valid checkpoint of step 9" in capsys.readouterr().err
    words = [run, "--data", problems, "--out", f"{run}/kept.jsonl", "--samples", "2", "--lowest", "0"]
    words += ["--keep", f"{run}/rolled"]
    assert difficulty.main([*words, "--highest", "0"]) == 0
    printed = capsys.readouterr().out
    assert "policy after 7 training steps" in printed and "3 kept" in printed, "it solves nothing"
    assert {problem.answer for problem in load_problems(tmp_path / "kept.jsonl")[0]} == {"0", "2", "4"}
    reached = []
    with listening(reached.append):
        assert difficulty.main([*words, "--highest", "1", "--resume"]) == 0 and "3 kept" in capsys.readouterr().out
    assert "reward" not in reached, "nothing is rolled out again"

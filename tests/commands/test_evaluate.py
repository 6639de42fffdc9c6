"""The command line of evaluation: which problems, which policy, what is printed."""

import json
import re

import jax
import numpy as np
import pytest

from grpo_roc_jax.commands import difficulty
from grpo_roc_jax.commands.evaluate import EvaluateConfig, chosen_problems, folder_of, main
from grpo_roc_jax.config import read_config
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.learner.update import init_train_state
from grpo_roc_jax.process.points import injected, listening
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.trace import read_trace, to_line
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.settings.cli import dump_yaml
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
    assert [problem.source for problem in chosen_problems(EvaluateConfig("r"), data)] == ["world:gcd:2"] * 6
    some = chosen_problems(EvaluateConfig("r", data=(path, "world:gcd:1"), problems=2), data)
    assert len(some) == 4 and len({problem.source for problem in some}) == 2


def test_a_run_is_not_resumed_as_an_evaluation(tmp_path, capsys, monkeypatch):
    """It would replace the configuration of the run and remove its trajectories."""
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    words = [str(run), "--data", "world:gcd:1", "--keep", str(run), "--resume"]
    for command, out in ((main, []), (difficulty.main, ["--out", str(tmp_path / "out")])):
        assert command([*words, *out]) == 2
        assert "it holds trajectories and is no evaluation" in capsys.readouterr().err
        assert [path.name for path in run.iterdir()] == ["trajectories"]
    (run / "config.yaml").touch()
    monkeypatch.chdir(run)
    assert folder_of(EvaluateConfig("r", keep=".")) == tmp_path / "run-2", "a directory named by a dot is in use, too"


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
    first, second = (list(read_trace(tmp_path / name, kind="eval")) for name in ("kept", "kept-2"))
    for pair in zip(first, second, strict=True):  # to rounding: a matrix kernel may treat fewer rows differently
        np.testing.assert_allclose(*(record.trajectory.logprobs for record in pair), atol=5e-6)
        reference, other = (json.loads(to_line(record)) | {"seconds": 0, "logprobs": ""} for record in pair)
        assert reference == other


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
    assert re.search(r"avg@2 +0\.000 .*\n *95% +0\.000-0\.\d{3}", printed)
    table = json.loads(out.read_text())["table"]
    assert table["all"]["problems"] == 4 and table["all"]["samples"] == 8
    folder = tmp_path / "evaluations" / "newest"
    assert len(list(read_trace(folder, kind="eval"))) == 8 and not (tmp_path / "trajectories").exists()
    assert main([f"{run}/checkpoints/step_00000005", "--problems", "1", "--data", problems, "world:gcd:1"]) == 0
    assert "policy after 5 training steps" in capsys.readouterr().out
    words = [run, "--data", problems, "--out", f"{run}/kept.jsonl", "--samples", "2", "--lowest", "0"]
    assert difficulty.main([*words, "--highest", "0"]) == 0
    printed = capsys.readouterr().out
    assert "policy after 7 training steps" in printed and "3 kept" in printed, "it solves nothing"
    assert {problem.answer for problem in load_problems(tmp_path / "kept.jsonl")[0]} == {"0", "2", "4"}

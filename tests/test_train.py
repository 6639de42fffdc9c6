"""The loop: a run equals itself however often it is stopped, learns what it is paid for, and says why it ends."""

import functools
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import grpo_roc_jax as g
from grpo_roc_jax.commands.chat import Dialogue, to_json
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.learner import learner
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.record import checkpoint, metrics, trace
from grpo_roc_jax.run import components
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.train import Stopped, main

README = Path(__file__).resolve().parent.parent / "README.md"
TINY = """
--steps=4 --group.problems=2 --group.size=4 --data.eval_problems=4 --model.d_model=16 --model.layers=1 --model.heads=2
--model.kv_heads=1 --model.head_dim=8 --model.d_ff=16 --rollout.slots=8 --rollout.max_prompt_tokens=24
--rollout.max_response_tokens=16 --rollout.append_lengths 16 --batch.row_length=40
--sft.steps=0 --optim.schedule=constant --batch.rows=2 --tools.workers=2 --log.console=off
--reward.functions tests.test_train:even --reward.truncated=score --optim.lr=0.01 --optim.warmup_steps=0
--checkpoint.every=1 --sharding.data=-1 --tools.preload=[]
""".split()  # noqa: SIM905 (a command line reads better as one)


def even(problem, trajectories):
    """Pays for an even first token: a signal that a random policy meets about half of the time."""
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


def rare(problem, trajectories):
    """Pays one first token in sixteen: about four in ten groups of eight hold both a success and a failure."""
    return [float(t.tokens[t.prompt_length] % 16 == 0) for t in trajectories]


def config_in(run_dir, *more: str) -> g.Config:
    return load_config(g.Config, [*TINY, f"--run_dir={run_dir}", *more], prog="test")


def numbers(run_dir):
    """Metrics by step without what depends on the clock or on the process."""
    clock = ("time/", "compile/", "tools/", "rollout/tokens_per_s", "rollout/compilations", "rollout/slot_use")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in metrics.read_metrics(run_dir)]


def params_of(run_dir, config: g.Config, step=None) -> tuple[int, list[np.ndarray]]:
    """Step and parameters of the newest checkpoint, or of that of a step."""
    model = components.resolve_model(config.model, g.load_tokenizer(config.text))
    like = jax.eval_shape(lambda: g.init_params(jax.random.key(0), model))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), like)
    step, params = checkpoint.restore_params(Path(run_dir) / "checkpoints", like, step=step)
    return step, list(map(np.asarray, jax.tree.leaves(params)))


def params_hash(run_dir, step=None) -> str:
    leaves = params_of(run_dir, config_in(run_dir), step)[1]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


ENGINES: dict = {}
"""Engines of this process by what they were made of."""
STEPS = {name: functools.cache(getattr(learner, name)) for name in ("make_update_step", "make_score")}


def engine_of(model, rollout, sampling, stops, mesh, *, seed, vocab_size):
    """An engine of its own with the programs of equal settings."""
    key = model, rollout, sampling, tuple(stops), mesh, vocab_size
    if key not in ENGINES:
        ENGINES[key] = g.make_engine(model, rollout, sampling, stops, mesh, seed=seed, vocab_size=vocab_size)
    engine = ENGINES[key].sibling()
    engine.seed = seed
    return engine


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Runs of one process share the programs that equal settings make."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(components, "make_engine", engine_of)
        for name, make in STEPS.items():
            patched.setattr(learner, name, make)
        yield


@pytest.fixture(scope="module")
def on_one_device():
    """All runs of a module that ask for it have one device, as those of `one_device` have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(components, "make_mesh", lambda _: make_mesh(ShardingConfig(), jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """A run of four steps that nothing stopped."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    summary = g.train_policy(config_in(run_dir))
    return run_dir, summary


def test_sampler_and_trainer_agree_and_nothing_compiles_after_the_first_step(full_run):
    run_dir, summary = full_run
    assert 0 <= summary["max_logprob_gap"] < 1e-5
    assert summary["compilations_after_first_step"] == 0 and summary["steps"] == 4
    assert json.loads((run_dir / "summary.json").read_text()) == json.loads(json.dumps(summary))


def test_resumed_run_equals_the_whole_one(full_run, tmp_path):
    run_dir = tmp_path / "run"
    g.train_policy(config_in(run_dir, "--steps=2", "--resume=auto"))
    g.train_policy(config_in(run_dir, "--resume=auto"))
    *rows, last = numbers(run_dir)
    *expected, last_expected = numbers(full_run[0])
    for row in (*rows, *expected):  # the first part ended with an evaluation that the whole run does not have there
        for name in [name for name in row if name.startswith("eval/")]:
            del row[name]
    assert (rows, last) == (expected, last_expected)
    assert params_hash(run_dir) == params_hash(full_run[0])
    with pytest.raises(g.ConfigError, match="holds a run already; --resume auto"):
        g.train_policy(config_in(run_dir))


def test_trace_recomputes_selection_and_advantages(full_run):
    run_dir, _ = full_run
    config, seen = config_in(run_dir), 0
    for step in range(1, 5):
        records, start = list(trace.read_trace(run_dir, step)), 0
        rng = np.random.default_rng([config.seed, step - 1])
        for group in trace.groups_of(records):
            selection = g.resample(group, config, rng)
            mine = records[start : start + group.size]
            start += group.size
            assert [r.kept for r in mine] == [i in selection.indices for i in range(group.size)]
            assert [r.why for r in mine] == list(selection.reasons)
            if not selection.kept:
                continue
            rewards = group.rewards[selection.indices]
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            means = [r.advantages[r.trajectory.policy_mask].mean() for r in mine if r.kept]
            np.testing.assert_allclose(means, expected, atol=1e-5)
            seen += 1
    assert seen


def test_refill_fills_the_batch(tmp_path):
    words = ["--steps=2", "--group.dynamic_sampling_rounds=12", "--resample.min_positive=0"]
    g.train_policy(config_in(tmp_path, *words, "--reward.functions", "tests.test_train:rare"))
    rows = [row for row in metrics.read_metrics(tmp_path) if row["step"] > 0]
    # What one step's rounds give beyond two groups waits in the buffer for the next step.
    assert all(total >= 2 * (i + 1) for i, total in enumerate(np.cumsum([row["roc/groups_kept"] for row in rows])))
    assert max(row["roc/groups"] for row in rows) > 2


def test_no_signal_ends_with_its_status(tmp_path):
    nothing = {"tests.test_train:even": lambda problem, trajectories: [0.0] * len(trajectories)}
    with pytest.raises(Stopped, match="no learning signal: 2 steps") as stop:
        g.train_policy(config_in(tmp_path / "run", "--limits.empty_steps=2"), functions=nothing)
    assert stop.value.status == 3


def test_impossible_combinations_are_refused_before_anything_is_built(capsys):
    assert main(["--surrogate.clip_hihg", "0.3"]) == 2
    assert "kind clip has " in capsys.readouterr().err
    for words, message in [
        (["--rollout.max_response_tokens=4000"], "raise batch.row_length"),
        (["--batch.updates=9"], "a step trains on whole groups"),
        (["--sampling.temperature=0"], "greedy rollouts"),
        (["--group.size=1"], "no signal against itself"),
    ]:
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_ends_with_the_lines_that_matter(capsys):
    """After the resolved configuration, if that is asked for."""
    assert main(["toy.yaml", "--dry-run=full", "--seed=7"]) == 0
    printed = capsys.readouterr().out
    assert "seed: 7" in printed
    data, matters = printed.split("\n\n")[-2:]
    lines = matters.splitlines()
    assert "prompts of 12 to 17 tokens" in data
    assert len(lines) <= 10 and lines[0].startswith("8 problems x 32 sampled -> 16 kept")
    assert "together" in lines[-2] and lines[-1] == "no problem was found"


def launch(run_dir, *more: str, piped: bool = False) -> subprocess.Popen:
    words = [*TINY, f"--run_dir={run_dir}", "--resume=auto", *more]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "grpo_roc_jax.train", *words]
    stdout = subprocess.PIPE if piped else subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


def wait_for_step(run_dir, step: int, process) -> None:
    deadline = time.monotonic() + 600  # longer than any load delays it
    while time.monotonic() < deadline and process.poll() is None:
        path = Path(run_dir) / "metrics.jsonl"
        if path.exists() and any(row["step"] >= step and "loss/value" in row for row in metrics.read_metrics(path)):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} never came: {process.stderr.read().decode()[-2000:]}")


@pytest.mark.slow
def test_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """Killed three times, each time after another of its steps."""
    whole_dir, run_dir, step = tmp_path / "whole", tmp_path / "run", 0
    full_process = launch(whole_dir, "--steps=8")
    for _ in range(3):
        process = launch(run_dir, "--steps=8")
        wait_for_step(run_dir, step + 1, process)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        step = int(max(row["step"] for row in metrics.read_metrics(run_dir)))
    assert launch(run_dir, "--steps=8").wait(300) == full_process.wait(300) == 0
    assert numbers(run_dir) == numbers(whole_dir)
    assert params_hash(run_dir) == params_hash(whole_dir)


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_its_status(tmp_path):
    process = launch(tmp_path / "run", "--steps=500", "--checkpoint.every=0")
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr.decode()[-2000:]
    rows = len(metrics.read_metrics(tmp_path / "run"))
    again = launch(tmp_path / "run", f"--steps={rows + 1}")
    _, stderr = again.communicate(timeout=300)
    assert again.returncode == 0, stderr.decode()[-2000:]
    assert [row["step"] for row in metrics.read_metrics(tmp_path / "run")] == list(range(rows + 2))


@pytest.mark.slow
def test_the_toy_learns_and_answers_ten_questions_in_one_dialogue(tmp_path):
    """The README's promise, by the README's command. A prompt of the toy has room for one question."""
    toy = tmp_path / "toy"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # as a user runs it
    command = [sys.executable, "-m", "grpo_roc_jax.train", f"--run_dir={toy}"]
    subprocess.run(command, check=True, env={**environment, "JAX_PLATFORMS": "cpu"}, timeout=1500)
    summary = json.loads((toy / "summary.json").read_text())
    assert summary["accuracy_after"] >= 0.9 and summary["tool_error_in_correct"] <= 0.03
    assert 0 <= summary["max_logprob_gap"] < 1e-4
    means = [row["loss/logprob_gap_mean"] for row in metrics.read_metrics(toy) if "loss/logprob_gap_mean" in row]
    assert means and max(means) < 1e-6
    assert summary["compilations_after_first_step"] == 0

    (match,) = re.findall(r'chat runs/a --prompt "(gcd\((\d+),(\d+)\)=\?)"', README.read_text(encoding="utf-8"))
    questions = [(match[0], str(math.gcd(int(match[1]), int(match[2]))))]
    questions += [(problem.prompt, problem.answer) for problem in eval_problems(DataConfig(eval_problems=9))]
    with g.open_policy(str(toy)) as (_, sampling):
        dialogue = Dialogue(sampling.sampler)
        answers = [to_json(question, dialogue.ask(question))["answer"] for question, _ in questions]
    assert answers[0] == questions[0][1]
    assert sum(answer == right for answer, (_, right) in zip(answers, questions, strict=True)) >= 9


def reference_and_params(run_dir, step):
    """Leaves of the reference and of the policy in a checkpoint."""
    tree = ocp.load(Path(run_dir).absolute() / "checkpoints" / f"step_{step:08d}" / "train")
    return [list(map(np.asarray, jax.tree.leaves(part))) for part in (tree["reference"], tree["state"]["params"])]


@pytest.mark.slow
def test_the_reference_follows_the_policy(tmp_path):
    """It moves after steps 2 and 4 to 0.6 policy + 0.4 reference, and stays in between."""
    moving = "--surrogate.kl={kind: k3, coef: 0.1, sync_every: 2, sync_mix: 0.6}"
    summary = g.train_policy(config_in(tmp_path / "whole", moving, "--checkpoint.keep=9"))
    assert summary["compilations_after_first_step"] == 0
    first, start = reference_and_params(tmp_path / "whole", 0)
    _, policy = reference_and_params(tmp_path / "whole", 1)
    assert all(np.array_equal(a, b) for a, b in zip(first, start, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(policy, start, strict=True))
    for step, unmoved in [(1, first), (3, reference_and_params(tmp_path / "whole", 2)[0])]:
        reference, _ = reference_and_params(tmp_path / "whole", step)
        assert all(np.array_equal(a, b) for a, b in zip(reference, unmoved, strict=True))
        after, policy = reference_and_params(tmp_path / "whole", step + 1)
        for moved, new, old in zip(after, policy, reference, strict=True):
            np.testing.assert_allclose(moved, 0.6 * new + 0.4 * old, atol=1e-7)
    rows = [row for row in numbers(tmp_path / "whole") if "loss/value" in row]
    assert rows[0]["loss/kl_ref"] < 1e-9 < rows[1]["loss/kl_ref"]
    assert abs(rows[0]["update/kl_reference"]) < 1e-5

"""A second start in the directory of a run goes on, shows that the run has ended, or refuses and changes nothing."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_roc_jax.config import Config, LimitsConfig, WatchConfig
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.record import checkpoint_files, metrics
from grpo_roc_jax.record.run_dir import decide
from grpo_roc_jax.run.session import state_kept, state_leaves
from grpo_roc_jax.run.watch import Stopped, Watch, Watchdog
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.train import main
from tests.helpers.knobs import other_values
from tests.test_knob_effects import CASES, ELSEWHERE
from tests.test_train import TINY, launch, numbers, params_hash, wait_for_step
from tests.test_train import on_one_device as on_one_device  # fixtures
from tests.test_train import shared_programs as shared_programs

pytestmark = pytest.mark.usefixtures("on_one_device")
WORDS = [*TINY, "--eval.every=2", "--resume=auto"]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """A run of four steps that nothing stopped, with an evaluation on its way."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*WORDS, f"--run_dir={run_dir}", "--checkpoint.keep=9"]) == 0
    return run_dir


@pytest.fixture
def copy(full_run, tmp_path):
    return shutil.copytree(full_run, tmp_path / "run")


def again(run_dir, *more):
    return main([*WORDS, f"--run_dir={run_dir}", "--checkpoint.keep=9", *more])


def state(run_dir):
    """Content and time of every file."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run_dir.rglob("*") if p.is_file()}


def names_of(run_dir):
    return {path.name for path in run_dir.glob("trajectories/*")}


def test_checkpoints_that_cannot_be_used_are_refused_and_nothing_is_cut(copy, capsys):
    settings = (copy / "config.yaml").read_bytes()
    (copy / "config.yaml").write_text("steps: [")  # nor are settings
    before = state(copy)
    assert again(copy, "--steps=6") == 2
    assert "config.yaml cannot be read" in capsys.readouterr().err
    assert state(copy) == before
    (copy / "config.yaml").write_bytes(settings)
    for manifest in copy.glob(f"checkpoints/*/{checkpoint_files.MANIFEST}"):
        manifest.write_bytes(manifest.read_bytes()[:100])
    before = state(copy)
    assert again(copy, "--steps=6") == 2
    printed = capsys.readouterr().err
    assert printed.count(f"{checkpoint_files.MANIFEST} cannot be read") == 5 and "none of them can be used" in printed
    assert state(copy) == before


def test_an_evaluation_that_was_due_is_made_up(full_run, copy):
    """After a kill in the second step, once three rows of metrics are written."""
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    (copy / "summary.json").unlink()
    for path in [*copy.glob("checkpoints/step_*"), *copy.glob("trajectories/*")]:
        kind, number = path.name.removesuffix(".jsonl").split("_")
        if int(number) > 2 or (kind == "eval" and int(number) == 2):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert again(copy) == 0
    assert numbers(copy) == numbers(full_run) and names_of(copy) == names_of(full_run)
    assert params_hash(copy) == params_hash(full_run)


def test_the_closing_evaluation_keeps_the_trajectories_of_the_last_step(full_run, copy):
    for rows in (6, 7):  # without its row and with it
        lines = (full_run / "metrics.jsonl").read_bytes().splitlines(True)
        (copy / "metrics.jsonl").write_bytes(b"".join(lines[:rows]))
        (copy / "summary.json").unlink()
        assert again(copy) == 0
        assert len((copy / "metrics.jsonl").read_bytes().splitlines()) == len(lines) == 7
        assert numbers(copy) == numbers(full_run) and names_of(copy) == names_of(full_run)
        summary, expected = (json.loads((run / "summary.json").read_text()) for run in (copy, full_run))
        assert summary["accuracy_after"] == expected["accuracy_after"]


def test_the_same_command_after_the_end_changes_no_file(copy, capsys):
    before = state(copy)
    assert again(copy, "--log.console=plain") == 0
    printed = capsys.readouterr().out
    assert "the run has ended after step 4" in printed and "accuracy on held-out problems" in printed
    assert state(copy) == before


def moments(run_dir):
    """Name -> [shape, dtype] of the first moments in the newest checkpoint."""
    leaves = checkpoint_files.read_manifest(checkpoint_files.newest_whole(run_dir / "checkpoints")).leaves
    return {name: leaf for name, leaf in leaves.items() if "/mu/" in name}


def test_other_settings_are_shown_and_refused(copy, capsys):
    """Moments are cast to another dtype; clipping may be left out, since its state has the same names."""
    before, saved = state(copy), moments(copy)
    assert again(copy, "--optim.lr=0.5", "--advantage.baseline=none", "--steps=5") == 2
    text = capsys.readouterr().err
    assert "  optim.lr: 0.01 -> 0.5\n" in text and "--force" in text and "steps" not in text.replace("settings", "")
    words = ("--optim.lr=0.5", "--steps=5", "--optim.moment_dtype=bfloat16", "--optim.max_grad_norm=0.0")
    assert again(copy, *words) == 2
    assert "optim.moment_dtype: float32 -> bfloat16" in (text := capsys.readouterr().err) and "--force" in text
    assert state(copy) == before
    assert again(copy, *words, "--force", "--log.console=plain") == 0
    text = capsys.readouterr().out
    assert "changed since the run began: optim.lr: 0.01 -> 0.5" in text and "resumed after step 4" in text
    assert "optim.moment_dtype: float32 -> bfloat16" in text
    assert "lr: 0.5" in (copy / "config.yaml").read_text()
    assert moments(copy) == {name: [shape, "bfloat16"] for name, (shape, _) in saved.items()}


def test_force_takes_other_data_from_their_start(copy, capsys):
    assert again(copy, "--steps=5", "--seed=7") == 2
    assert "--force" in capsys.readouterr().err
    assert again(copy, "--steps=5", "--seed=7", "--force", "--log.console=plain") == 0
    assert "they begin at their start" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--model.layers=2", "--surrogate.kl=k3"])
def test_force_is_not_offered_where_it_could_not_work(copy, capsys, words):
    before = state(copy)
    for more in ((), ("--force",)):
        assert again(copy, "--steps=5", words, *more) == 2
        printed = capsys.readouterr().err
        assert "was begun with other settings" in printed and "the training state has other arrays" in printed
        assert "--force" not in printed and "another --run_dir" in printed
    assert state(copy) == before


@pytest.mark.slow
def test_every_setting_that_force_is_offered_for_can_be_forced(full_run):
    """All settings with another value: either `--force` is not offered, or the saved arrays are those of the state but
    for the dtype of moments, which are cast. (Other data begin at their start.)"""
    saved = checkpoint_files.read_manifest(checkpoint_files.newest_whole(full_run / "checkpoints")).leaves
    offered, refused, words = [], [], [*WORDS, f"--run_dir={full_run}"]
    plain = load_config(Config, words, prog="test")
    keys = [*CASES, *ELSEWHERE.split()]
    changes = [(key, value) for key in keys for value in values_of(key, CASES.get(key), plain)]
    for key, value in changes:
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            config = load_config(Config, [*words, f"--{key}={text}"], prog="test")
            leaves = state_leaves(config)
        except ConfigError:
            continue  # not without other settings
        try:
            decide(full_run, config, leaves=lambda leaves=leaves: leaves)
        except ConfigError as error:
            if "--force" not in str(error):
                refused.append(key)
                continue
            offered.append(key)
            changed = {name for name in saved | leaves if saved.get(name) != leaves.get(name)}
            assert all("/mu/" in name and saved[name][0] == leaves[name][0] for name in changed), key
    assert len(offered) > 100 and {"optim.moment_dtype", "seed", "optim.max_grad_norm"} <= set(offered)
    assert {"model.layers", "model.d_model", "lora"} <= set(refused)
    assert not {"optim.lr", "reward.extraction"} & set(refused)


def values_of(key, case, config):
    """Other values of a setting; none where its section is not there."""
    if case is not None and case.value is not None:
        return [case.value]
    with contextlib.suppress(AttributeError, TypeError, StopIteration):
        return other_values(config, key)
    return []


def test_stop_counters_survive_a_resume():
    fine = {"time/step_s": 1.0, "loss/value": 0.0, "update/skipped": 0.0, "update/signal": 1.0}
    watch, skipped = Watch(LimitsConfig(skipped_updates=3)), fine | {"update/skipped": 1.0}
    watch.recall([{"step": 0, "eval/all/avg@1": 0.5}, fine, skipped, skipped])
    with pytest.raises(Stopped, match="diverged: 3 updates"):
        watch.look(skipped)


def test_a_preempted_run_that_could_not_be_saved_says_so():
    """By a session of which only the checkpointer is asked."""
    saved, said = [(False, "the state after step 3 is not saved")], []
    session = SimpleNamespace(run_dir=Path("runs/a"), config=Config(), sampling=SimpleNamespace(processes=Processes()))
    session.watchdog, session.writer = Watchdog(session.run_dir, WatchConfig()), SimpleNamespace(say=said.append)
    session.checkpointer = SimpleNamespace(latest=object(), save_latest=lambda: saved[-1])
    with pytest.raises(Stopped, match="interrupted, and the state after step 3 is not") as stop, state_kept(session):
        raise Preempted
    assert stop.value.status == 5
    saved.append((True, "the state after step 3 is saved"))
    for error in (Preempted(), OSError("disk"), Stopped(3, "no signal")):
        said.clear()
        with pytest.raises(type(error)) as seen, state_kept(session):
            raise error
        noted = "the state after step 3 is saved; run the same command with --resume auto to continue"
        assert seen.value.__notes__ == [noted] and "--run_dir runs/a --resume auto" in said[1]
        assert ("--text" in said[3]) is isinstance(error, Stopped)  # no signal: the rollouts say why


def test_an_exception_in_a_step_saves_the_steps_before_it(tmp_path):
    run_dir = tmp_path / "run"
    with injected("sample=eio@3"), pytest.raises(OSError, match="Input/output") as seen:
        again(run_dir, "--checkpoint.every=0")
    assert "the state after step 2 is saved" in seen.value.__notes__[0]
    assert checkpoint_files.newest_whole(run_dir / "checkpoints").step == 2


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_announce_an_end_stop_the_run(number):
    preemption, before = Preemption(), signal.signal(number, signal.SIG_DFL)  # `nohup pytest` ignores SIGHUP
    try:
        with pytest.raises(Preempted), preemption.installed():
            os.kill(os.getpid(), number)
            time.sleep(1)
    finally:
        signal.signal(number, before)
    assert preemption.asked


@pytest.mark.slow
def test_a_closed_output_and_a_hangup_cost_nothing(tmp_path):
    """`| head -1`, then SIGHUP: metrics are complete, and the state is saved at the last of their steps."""
    process = launch(tmp_path / "run", "--steps=500", "--checkpoint.every=0", "--log.console=plain", piped=True)
    assert process.stdout.readline()
    process.stdout.close()
    wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGHUP)
    printed = process.stderr.read().decode()
    assert process.wait(60) == 143, printed
    last = int(metrics.read_metrics(tmp_path / "run")[-1]["step"])
    assert last >= 2 and f"the state after step {last} is saved" in printed and "nobody reads the output" in printed

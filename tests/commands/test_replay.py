"""A batch that was kept is replayed alone: the numbers of the run come out again, and a bad row is named."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.commands.replay import main
from grpo_roc_jax.config import read_config
from grpo_roc_jax.record.batches import keep_batch, read_batch
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.train import main as train
from grpo_roc_jax.types import TRAIN_ROW_FIELDS, TrainRow
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alarmed_run(tmp_path_factory):
    """A run with an alarm in every step, and the file of the second step."""
    run_dir = tmp_path_factory.mktemp("runs") / "alarmed"
    words = "--steps=3 --resume=auto --checkpoint.keep=9 --watch.steps=1 --watch.sample_size=0 --watch.reward_spread=9"
    assert train([*TINY, f"--run_dir={run_dir}", *words.split(), "--watch.entropy_high=0.001"]) == 0
    return run_dir, sorted((run_dir / "batches").iterdir())[0]


def test_a_replay_gives_the_numbers_of_the_run(alarmed_run, capsys):
    run_dir, path = alarmed_run
    events = {event["event"] for event in read_events(run_dir)}
    assert events >= {"reward_spread", "entropy_high", "batch"}
    about, _ = read_batch(path)
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert f"update of step {about['step']} (reward_spread), with the parameters after step {about['step'] - 1}" in out
    row = next(row for row in read_metrics(run_dir) if row["step"] == about["step"])
    for name in ("loss/value", "update/grad_norm", "loss/entropy"):
        assert f"{name} {row[name]:.4g}" in out


def test_the_row_that_is_not_finite_is_named(alarmed_run, tmp_path, capsys):
    with np.load(alarmed_run[1]) as archive:
        arrays = dict(archive)
    np.savez(tmp_path / "bad.npz", **arrays | {"0/1/logprobs_old": arrays["0/1/logprobs_old"] * np.nan})
    assert main([str(tmp_path / "bad.npz")]) == 0
    out = capsys.readouterr().out
    assert out.count("NOT FINITE") == 1 and "row 1: NOT FINITE: logprobs_old; loss nan" in out


def test_rows_are_read_back_as_they_were_kept(tmp_path):
    """All that the loss reads; a row of several contexts would else be one long context. So are the numbers of a policy
    that diverged, for which batches are kept."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 2, 6).astype(kind) for name, kind in TRAIN_ROW_FIELDS.items()}
    arrays["policy_mask"][[0, 4]] = False  # the first token of each context
    arrays |= {name: np.float32([1, np.nan, np.inf, 0, 1, 1]) for name in ("advantages", "weights", "logprobs_old")}
    more = {"marked": arrays["policy_mask"], "routes": rng.integers(0, 4, (6, 2, 1)).astype(np.int16)}
    row = TrainRow(**arrays, **more, temperature=0.5, entropy_coefficient=0.25, parts=(4, 2))
    path = keep_batch(tmp_path, read_config(), 1, [SimpleNamespace(rows=[row], temperature=1.0)], "why")
    ((loaded,),) = read_batch(path)[1]
    for item in fields(TrainRow):
        np.testing.assert_array_equal(getattr(loaded, item.name), getattr(row, item.name))


def test_an_unreadable_file_is_refused(alarmed_run, tmp_path, capsys):
    (tmp_path / "cut.npz").write_bytes(alarmed_run[1].read_bytes()[:200])
    assert main([str(tmp_path / "cut.npz")]) == 2 and "replay: " in capsys.readouterr().err

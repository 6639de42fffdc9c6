"""A run directory in object storage: whatever ends the copying, the store holds a run that can go on."""

import itertools
import json
import os
import shutil
import signal
import time
from unittest import mock

import numpy as np
import pytest

from grpo_roc_jax.process.points import InjectedFault, injected, listening
from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record import storage
from grpo_roc_jax.record.metrics import JsonlWriter, read_metrics
from grpo_roc_jax.record.run_dir import choose_run_dir, locked
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.train import main
from tests.helpers.bucket import served


@pytest.fixture
def bucket(monkeypatch):
    with served() as made:
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        yield made


def take_step(folder, step, keep=2):
    """What a run writes in a step: trajectories, a row, a checkpoint; the newest of those stay."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    (folder / f"trajectories/step_{step:08d}.jsonl").write_text("{}\n")
    JsonlWriter(folder / "metrics.jsonl").write(step, {"x": step})
    staging = folder / "checkpoints" / files.staging_name(step)
    staging.mkdir(parents=True)
    files.write_host(staging, 0, json.dumps({"step": step}), {"a": np.full(3, keep)})
    files.prune(files.commit(staging, step, {}, 1), keep=keep)


def copy_of(address, folder):
    folder.mkdir(exist_ok=True)
    made = storage.Copy(address, folder)
    made.begin(resume=True)
    return made


def resumed_step(address, folder):
    """The step at which a start in an empty directory goes on; -1 where the store holds no run."""
    copy_of(address, folder)
    if (newest := files.newest_whole(folder / "checkpoints")) is None:
        return -1
    files.verify(newest)
    steps = [*range(1, newest.step + 1)]
    assert [row["step"] for row in read_metrics(folder)][: newest.step] == steps
    assert all((folder / f"trajectories/step_{step:08d}.jsonl").exists() for step in steps)
    return newest.step


def test_whenever_the_copying_ends_the_store_holds_a_run_that_can_go_on(tmp_path):
    begun, reached = 0, set()
    for number in itertools.count(1):
        address, folder = f"file://{tmp_path}/store{number}/run", tmp_path / f"here{number}"
        made, copied = copy_of(address, folder), -1
        with injected(f"storage.write=raise@{number}") as happened:
            try:
                for step, keep in ((1, 1), (2, 2), (2, 1)):  # the last one is saved again
                    take_step(folder, step, keep)
                    made.copy()
                    copied = step
            except InjectedFault:
                begun += 1
        step = resumed_step(address, tmp_path / f"there{number}")
        assert step in (copied, copied + 1) or (copied, step) == (2, 1)
        reached.add(step)
        if not happened:
            break
    assert begun == number - 1 > 15 and reached == {-1, 1, 2}


@pytest.mark.parametrize("written", [1, 3, 5, 8, 11])
def test_a_checkpoint_that_is_deleted_while_it_is_copied_holds_up_no_other(tmp_path, written):
    address, folder = f"file://{tmp_path}/store/run", tmp_path / "here"
    made, objects = copy_of(address, folder), itertools.count(1)
    take_step(folder, 1)
    take_step(folder, 2)

    def prune(point):
        if point == "storage.write" and next(objects) == written:
            take_step(folder, 3)  # which deletes the first

    with listening(prune):
        made.copy()
    shutil.copytree(tmp_path / "store", tmp_path / "now")
    assert resumed_step(f"file://{tmp_path}/now/run", tmp_path / "there") == 2
    made.copy()
    assert not list((tmp_path / "store").rglob("step_00000001/*"))
    assert resumed_step(address, tmp_path / "later") == 3


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("store", ["file://{}/store", "gs://bucket/some"])
def test_a_run_goes_on_elsewhere_and_the_one_before_ends(store, tmp_path):
    address, here, there = store.format(tmp_path) + "/run", tmp_path / "here", tmp_path / "there"
    first = copy_of(address, here)
    for step in (1, 2, 3):
        take_step(here, step)
        first.copy()
    take_step(here, 4)  # not copied any more
    there.mkdir()
    (there / "old.txt").write_text("of another run")
    assert resumed_step(address, there) == 3
    assert sorted(path.name for path in there.glob("[a-z]*")) == ["checkpoints", "metrics.jsonl", "trajectories"]
    assert len([*there.glob("checkpoints/*")]) == 2 and len([*there.glob("trajectories/*")]) == 3
    with mock.patch("os.kill") as kill:
        first.keep(pause_s=0.0)
    assert kill.call_args_list == [mock.call(os.getpid(), signal.SIGTERM)]
    with pytest.raises(storage.StorageFailed, match=r"lacks the end of .*here: another run writes to"):
        first.finish()
    assert resumed_step(address, here) == 3, "what the run before has not copied is replaced"
    with pytest.raises(ConfigError, match="other settings"), locked(here), storage.copied(address, here, True):
        raise ConfigError("other settings")  # a start that is refused after it fetched
    (here / "metrics.jsonl").write_text("of a start in between")
    assert resumed_step(address, here) == 3, "it fetches again"


def test_failures_are_tried_again_and_named(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    address, folder = f"file://{tmp_path}/store/run", tmp_path / "here"
    made = copy_of(address, folder)
    take_step(folder, 1)
    with injected("storage.write=eio@3"):
        made.finish()
    assert pauses == [0.5] and resumed_step(address, tmp_path / "a") == 1
    made = copy_of(address, folder)
    take_step(folder, 2)
    refused = pytest.raises(storage.StorageFailed, match=r"store/run lacks the end of .*here: .*injected")
    with injected("storage.write=eio"), refused:
        made.finish()


def test_what_is_refused(bucket, tmp_path, monkeypatch, capsys):
    assert choose_run_dir("n", "gs://bucket/a/b", "auto").as_posix() == "runs/bucket/a/b"
    for named, message in (
        (("x[1]", ""), r"has a '\[' in its path, where no checkpoint can"),  # Orbax takes it for a pattern
        (("a/../..", ""), "must name a directory below runs"),
        (("n", "gs://b/../c"), "gs://BUCKET/RUN"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_run_dir(*named, "auto")
    address, folder = f"file://{tmp_path}/store/run", tmp_path / "here"
    take_step(folder, 1)
    copy_of(address, folder).copy()
    with pytest.raises(ConfigError, match="holds a run already; --resume auto"):
        storage.Copy(address, tmp_path / "there").begin(resume=False)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(ConfigError, match=r"is empty, and .* was copied there"):
        copy_of(address, folder)
    monkeypatch.chdir(tmp_path)
    bucket.refuse, bucket.status = 1, 403
    assert main(["toy.yaml", "--run_dir=gs://bucket/run"]) == 2
    assert "gs://bucket/run cannot be used" in capsys.readouterr().err and not (tmp_path / "runs").exists()

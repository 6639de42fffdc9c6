"""Saving is atomic, restoring is exact, corruption is detected and skipped; host values as JSON and back."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.process.points import injected
from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer, CheckpointMismatch, restore_params
from grpo_roc_jax.record.codec import finite, from_json, groups_from_tree, groups_to_tree, to_json
from grpo_roc_jax.types import Group, ToolCall, ToolResult
from tests.helpers.disks import filled, small_disk
from tests.helpers.disks import synced as synced  # a fixture
from tests.helpers.same import assert_same
from tests.helpers.samples import make_group


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(value: float = 1.0, width: int = 8, devices: int = 1) -> State:
    """Two leaves of `value`-dependent content, sharded over `devices`; Adam moments likewise."""
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    split, replicated = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    embed = value + np.random.default_rng(0).normal(size=(16, width)).astype(np.float32)
    norm = np.full(width, value, jnp.bfloat16)
    params = {"embed": jax.device_put(embed, split), "norm": jax.device_put(norm, replicated)}
    step = jax.device_put(np.int32(value), replicated)
    return State(step, params, optax.adamw(1e-2).init(params), jax.random.key(int(value)))


def bundle_of(value: float, **options) -> Bundle:
    rng = np.random.default_rng(int(value))
    rng.normal(size=3)
    host = {"rng": rng.bit_generator.state, "iterator": {"next_index": int(value)}, "name": "ü", "pair": (1, 2.5)}
    arrays = {"tracker": {"value": rng.normal(size=5), "count": np.arange(5)}, "empty": np.zeros((0, 3), np.int32)}
    return Bundle(make_state(value, **options), host, arrays)


def assert_same_bundle(restored: Bundle, expected: Bundle) -> None:
    def raw(leaf):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return np.asarray(leaf)

    assert jax.tree.structure(restored.train) == jax.tree.structure(expected.train)
    for a, b in zip(jax.tree.leaves(restored.train), jax.tree.leaves(expected.train), strict=True):
        assert raw(a).dtype == raw(b).dtype and raw(a).tobytes() == raw(b).tobytes()
    assert {k: v for k, v in restored.host.items() if k != "step"} == dict(expected.host)
    for a, b in zip(jax.tree.leaves(restored.arrays), jax.tree.leaves(expected.arrays), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def save_steps(directory, steps, keep=5) -> None:
    with Checkpointer(directory, CheckpointConfig(keep=keep)) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, bundle_of(step))
        checkpointer.wait()
        assert checkpointer.saved == list(steps) and not checkpointer.failures


def restore(directory, like=None) -> Bundle | None:
    with Checkpointer(directory, CheckpointConfig()) as checkpointer:
        return checkpointer.restore_latest(like or make_state())


def names_in(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_is_bit_exact(tmp_path):
    assert restore(tmp_path) is None
    save_steps(tmp_path, [3, 4])
    restored = restore(tmp_path)
    assert restored.step == 4 and restored.host["step"] == 4
    assert_same_bundle(restored, bundle_of(4))


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 2), (4, 4)])
def test_the_mesh_may_change_between_saving_and_restoring(tmp_path, before, after):
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, bundle_of(1, devices=before))
    like = make_state(9, devices=after)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    for template in (like, abstract):
        restored = restore(tmp_path, template)
        assert_same_bundle(restored, bundle_of(1))
        assert restored.train.params["embed"].sharding == like.params["embed"].sharding
        assert len(restored.train.params["embed"].sharding.device_set) == after


def test_another_number_of_processes_reads_what_the_first_process_kept(tmp_path):
    save_steps(tmp_path, [1])
    entry = files.newest_whole(tmp_path)
    manifest = replace(files.read_manifest(entry), processes=2)
    (entry.path / files.MANIFEST).write_text(json.dumps(manifest.to_json()))
    assert_same_bundle(restore(tmp_path), bundle_of(1))


def test_checkpoints_are_due_every_so_many_steps():
    for every, steps in ((2, [2, 4]), (1, [1, 2, 3, 4]), (0, [])):
        checkpointer = Checkpointer("unused", CheckpointConfig(every=every))
        assert [step for step in range(5) if checkpointer.due(step)] == steps


def test_buffers_may_be_donated_and_host_arrays_changed_while_saving(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 - 5, tree), donate_argnums=0)
    weights = {"w": jnp.ones((2048, 512))}
    update({"w": jnp.zeros((2048, 512))})
    notes = np.arange(1000)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, Bundle(weights, {}, {"notes": notes}))
        notes[:] = -1
        for _ in range(5):
            weights = update(weights)
        weights["w"].block_until_ready()
        restored = checkpointer.restore_latest(weights)
    assert np.unique(np.asarray(restored.train["w"])).tolist() == [1.0]
    assert restored.arrays["notes"].tolist() == list(range(1000))


def change(path, edit):
    path.write_bytes(edit(path.read_bytes()))


def largest_shard(path):
    return max((p for p in (path / "train").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
    middle = largest_shard(path).stat().st_size // 2
    change(largest_shard(path), lambda content: content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def truncate(path):
    change(largest_shard(path), lambda content: content[: len(content) // 2])


def alter(file, old, new):
    return lambda path: change(path / file, lambda text: text.replace(old, new))


CORRUPTIONS = {
    "a flipped bit": (flip, "does not match its checksum"),
    "a truncated shard": (truncate, "bytes of"),
    "a missing shard": (lambda path: shutil.rmtree(path / "train" / "state"), "is missing"),
    "a missing archive": (lambda path: (path / "arrays_0.npz").unlink(), "arrays_0.npz is missing"),
    "an altered number": (alter("host_0.json", b'"next_index": 2', b'"next_index": 7'), "not match its checksum"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "no manifest"),
    "an empty manifest": (lambda path: (path / "manifest.json").write_text(""), "cannot be read"),
    "an altered manifest": (alter("manifest.json", b'"step": 2', b'"step": 12'), "own checksum"),
    "a renamed directory": (lambda path: path.rename(path.with_name("step_00000012")), "belongs to step 2"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruption_is_named_and_the_previous_checkpoint_wins(tmp_path, caplog, kind):
    corrupt, message = CORRUPTIONS[kind]
    save_steps(tmp_path, [1, 2])
    corrupt(tmp_path / "step_00000002")
    restored = restore(tmp_path)
    assert_same_bundle(restored, bundle_of(1))
    assert message in caplog.text and "skipped" in caplog.text


@pytest.fixture
def pauses(monkeypatch):
    """The seconds of pauses, which take no time."""
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def test_a_read_that_fails_for_a_while_is_tried_again(tmp_path, pauses):
    save_steps(tmp_path, [1, 2])
    for read in (files.newest_whole, restore):
        pauses.clear()
        with injected(",".join(f"checkpoint.read=eio@{n}" for n in (1, 2, 3))):
            assert read(tmp_path).step == 2
        assert [seconds for seconds in pauses if seconds in files.PAUSES_S] == [*files.PAUSES_S]


@pytest.mark.usefixtures("pauses")
def test_a_disk_that_fails_refuses_and_removes_no_checkpoint(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_00000002").rename(tmp_path / "staging_step_00000002")
    with injected("checkpoint.read=eio"):
        with pytest.raises(files.NoValidCheckpoint, match="none of them can be used"):
            restore(tmp_path)
        with pytest.raises(files.NoValidCheckpoint, match="Input/output error"):
            files.newest_whole(tmp_path)
        files.recover(tmp_path)
        files.prune(tmp_path / "step_00000001", 1)
    assert names_in(tmp_path) == ["staging_step_00000002", "step_00000001"]


def test_only_a_first_save_that_was_interrupted_starts_again(tmp_path):
    (tmp_path / "staging_step_00000000").mkdir()
    assert restore(tmp_path) is None and files.newest_whole(tmp_path) is None
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(files.NoValidCheckpoint, match="no manifest"):
        restore(tmp_path)


def test_a_held_state_is_saved_once_and_what_is_on_disk_is_said(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.latest = replace(bundle_of(3), step=3)
        assert checkpointer.save_latest() == checkpointer.save_latest() == (True, "the state after step 3 is saved")
        assert checkpointer.saved == [3] and checkpointer.has(3) and not checkpointer.has(4)
        checkpointer.latest = replace(bundle_of(4), step=4)
        with injected("checkpoint.write=enospc"):
            saved, words = checkpointer.save_latest()
        assert not saved and "step 4 is not saved" in words and "No space" in words and "step_00000003" in words
        checkpointer.save(5, bundle_of(5))
        assert checkpointer.has(5) and 5 not in checkpointer.saved, "it is being written"
        jax.tree.map(lambda leaf: leaf.delete(), checkpointer.latest.train)
        assert "the update that failed had replaced it" in checkpointer.save_latest()[1]


def test_another_model_is_refused_with_the_difference(tmp_path):
    save_steps(tmp_path, [1])
    with pytest.raises(CheckpointMismatch, match=r"params/embed: saved float32\[16, 8\], expected float32\[16, 4\]"):
        restore(tmp_path, make_state(width=4))
    other = make_state()
    with pytest.raises(CheckpointMismatch, match=r"params/extra: saved nothing, expected float32\[2\]"):
        restore(tmp_path, replace(other, params={**other.params, "extra": jnp.zeros(2)}))


def test_parameters_alone_can_be_read_without_the_optimizer(tmp_path):
    assert restore_params(tmp_path / "none", make_state().params) is None
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, Bundle({"state": make_state(step), "reference": ()}))
    step, params = restore_params(tmp_path, make_state(devices=4).params)
    assert step == 2 and np.array_equal(params["embed"], make_state(2).params["embed"])
    assert len(params["embed"].sharding.device_set) == 4
    with pytest.raises(CheckpointMismatch, match=r"embed: saved float32\[16, 8\], expected float32\[16, 4\]"):
        restore_params(tmp_path, make_state(width=4).params)
    step, params = restore_params(tmp_path, make_state().params, step=1)
    assert step == 1 and np.array_equal(params["embed"], make_state(1).params["embed"])
    assert restore_params(tmp_path, make_state().params, step=7) is None
    flip(tmp_path / "step_00000002")
    assert restore_params(tmp_path, make_state().params)[0] == 1
    assert restore_params(tmp_path, make_state().params, step=2) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_never_written(tmp_path, bad):
    save_steps(tmp_path, [1])
    state = make_state(2)
    poisoned = state.replace(params={**state.params, "embed": state.params["embed"].at[3, 3].set(bad)})
    with Checkpointer(tmp_path, CheckpointConfig(keep=1)) as checkpointer:
        assert not checkpointer.save(2, Bundle(poisoned))
        assert "NaN or infinity" in checkpointer.failures[0]
    assert [entry.step for entry in files.entries(tmp_path)] == [1]


def test_only_the_newest_stay_and_none_is_removed_before_its_successor_is_verified(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 4], keep=2)
    assert names_in(tmp_path) == ["step_00000003", "step_00000004"]
    with injected("checkpoint.commit=eio"), Checkpointer(tmp_path, CheckpointConfig(keep=1)) as checkpointer:
        checkpointer.save(5, bundle_of(5))
        checkpointer.wait()
        assert "Input/output error" in checkpointer.failures[0]
    assert names_in(tmp_path) == ["step_00000003", "step_00000004"]


def test_what_a_kill_left_is_cleared_and_a_step_that_is_saved_again_is_replaced(tmp_path, caplog):
    """Torn checkpoints are not counted among those that stay, and complete ones get their name."""
    save_steps(tmp_path, [1, 2, 3])
    truncate(tmp_path / "step_00000002")
    (tmp_path / "step_00000003").rename(tmp_path / "staging_step_00000003")
    (tmp_path / "staging_step_00000005").mkdir()
    (tmp_path / "staging_step_00000005" / "host_0.json").write_text("{")
    (tmp_path / "trash_step_00000000_0").mkdir()
    assert restore(tmp_path).step == 3  # complete, although not renamed yet
    assert files.whole_steps(tmp_path) == [3, 1]
    assert "staging_step_00000005 skipped: no manifest" in caplog.text
    with Checkpointer(tmp_path, CheckpointConfig(keep=3)) as checkpointer:
        for value in (4, 7):
            checkpointer.save(4, bundle_of(value))
    assert names_in(tmp_path) == [f"step_0000000{step}" for step in (1, 3, 4)]
    assert_same_bundle(restore(tmp_path), bundle_of(7))


def test_everything_is_synced_before_a_checkpoint_gets_its_name(tmp_path, synced):
    save_steps(tmp_path, [1])
    final, staging = tmp_path / "step_00000001", tmp_path / files.staging_name(1)
    named = synced.index(final)
    inside = {staging / path.relative_to(final) for path in final.rglob("*")}
    inside |= {staging, staging / f"{files.MANIFEST}.part"}
    assert len(inside) > 7 and inside <= {*synced[:named]} and tmp_path in synced[named:]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, caplog):
    weights = [{"w": jnp.asarray(np.random.default_rng(s).normal(size=(512, 512)).astype(np.float32))} for s in (1, 2)]
    with small_disk(tmp_path / "disk", "1500k") as disk:
        with Checkpointer(disk, CheckpointConfig(keep=1)) as checkpointer:
            assert checkpointer.save(1, Bundle(weights[0]))
            checkpointer.save(2, Bundle(weights[1]))
            checkpointer.wait()
            assert checkpointer.saved == [1] and len(checkpointer.failures) == 1
            assert "No space left" in caplog.text and "newest checkpoint: step_00000001" in caplog.text
            assert [p.name for p in disk.iterdir()] == ["step_00000001"]  # the partial checkpoint was removed
            restored = checkpointer.restore_latest(weights[0])
            assert restored.step == 1 and np.array_equal(restored.train["w"], weights[0]["w"])
            filled(disk)  # not even host state fits
            assert not checkpointer.save(3, Bundle(weights[0], {}, {"a": np.arange(1 << 16)}))
        strict = Checkpointer(disk, CheckpointConfig(fail_on_error=True))
        with pytest.raises(OSError, match="no checkpoint at step 4"), strict:
            strict.save(4, Bundle(weights[0]))


def test_values_that_cannot_be_restored_are_refused_before_writing(tmp_path):
    with Checkpointer(tmp_path / "c", CheckpointConfig()) as checkpointer:
        for bundle, message in [
            (Bundle({"a": np.zeros(3)}), "train/a is a ndarray"),
            (Bundle({"a": 3}), "train/a is a int"),
            (Bundle({"a": jnp.zeros((0, 2))}), "leave empty arrays out"),
            (Bundle({}, {}, {"a": [1, 2]}), "arrays: a is a list"),
            (Bundle({}, {}, {"a/b": np.zeros(2)}), "without '/'"),
            (Bundle({}, {"x": object()}), "cannot store a object"),
        ]:
            with pytest.raises((TypeError, ValueError), match=message):
                checkpointer.save(1, bundle)
    assert not (tmp_path / "c").exists()


def odd_group(seed, size):
    """A group with every field in use, and with values that JSON does not have."""
    group = make_group(seed, size)
    odd = {"rows": np.eye(2), "pair": (1, None), "text": "é\ud800"}
    first = group.trajectories[0]
    call = ToolCall("", odd, "{", "malformed_call", "bad")
    turn = replace(first.turns[0], calls=(call,), results=(ToolResult("timeout", exit_code=-9),))
    last = replace(first.turns[-1], **[{"reply": "and now?"}, {"reward": 0.5}][seed % 2])
    rows = replace(first, turns=(turn, *first.turns[1:-1], last)), *group.trajectories[1:]
    verdict = replace(group.verdicts[0], reward=0.1 + 0.2, channels={"format": np.float32(0.1)})
    return Group(replace(group.problem, extra=odd), rows, (verdict, *group.verdicts[1:]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_buffered_groups_are_restored_exactly(tmp_path, count):
    groups = tuple(odd_group(seed, 2 + seed) for seed in range(count))
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, Bundle({"w": jnp.ones(2)}, {}, {"groups": groups_to_tree(groups)}))
        restored = checkpointer.restore_latest({"w": jnp.ones(2)})
    assert_same(groups_from_tree(restored.arrays["groups"]), groups)


def save_forever(directory: str, first: int, ready) -> None:
    """Runs in a child: checkpoint after checkpoint until it is killed."""
    with Checkpointer(directory, CheckpointConfig(keep=2)) as checkpointer:
        for step in range(first, first + 1000):
            checkpointer.save(step, kill_bundle(step))
            if step == first + 1:
                ready.set()


def kill_bundle(step: int) -> Bundle:
    values = np.random.default_rng(step).normal(size=(64, 256)).astype(np.float32)
    return Bundle({"w": jnp.asarray(values)}, {"rng": step * 7}, {"a": values[0]})


@pytest.mark.parametrize("times", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_while_saving_the_newest_complete_checkpoint_is_found(tmp_path, times):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.record.test_checkpoint", "test_checkpoint"])
    rng = np.random.default_rng(0)
    newest, torn = 0, 0
    for _ in range(times):
        ready = context.Event()
        child = context.Process(target=save_forever, args=(str(tmp_path), newest + 1, ready))
        child.start()
        assert ready.wait(120), "the child saved nothing"
        time.sleep(rng.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        restored = restore(tmp_path, {"w": jnp.zeros((64, 256))})
        expected = kill_bundle(restored.step)
        assert np.array_equal(restored.train["w"], expected.train["w"])
        assert restored.host["rng"] == restored.step * 7 and np.array_equal(restored.arrays["a"], expected.arrays["a"])
        assert restored.step > newest  # the checkpoint before the last one started is never lost
        started = max(entry.step for entry in files.entries(tmp_path))
        assert restored.step >= started - 1
        torn += started != restored.step
        newest = restored.step
    assert torn, "no kill hit a save; widen the interval"


VALUES = {
    "plain": [1, 2.5, "a", True, None, {"b": [1, {"c": "d"}]}],
    "tuple": (1, ("a", [2.5]), ()),
    "bytes": b"\x00\xff",
    "keys that are not text": {1: "a", (2, "b"): b"c"},
    "keys that are tags": {"__tuple__": [1], "__bytes__": "AA=="},
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "empty array": np.zeros((0, 3), np.float32),
    "scalar": np.float32(0.1),
    "complex": np.complex64(1 + 2j),
    "flags": np.array([True, False]),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_return_as_they_were(value):
    assert_same(from_json(json.loads(json.dumps(to_json(value)))), value)


def test_a_value_without_an_exact_form_is_refused_and_numbers_that_json_does_not_have_become_null():
    for value in ({1, 2}, object(), np.array(["a"]), np.array([None])):
        with pytest.raises(TypeError, match=f"cannot store a {type(value).__name__}"):
            to_json({"a": [value]})
    nan, inf = float("nan"), float("inf")
    numbers = {"a": [1, nan, (2.5, -inf)], "b": {"c": inf, "d": "text"}, "e": None}
    assert finite(numbers) == {"a": [1, None, [2.5, None]], "b": {"c": None, "d": "text"}, "e": None}
    assert finite(1.5) == 1.5 and finite((1, 2)) == [1, 2]

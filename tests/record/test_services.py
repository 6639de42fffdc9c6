"""Tables of rollouts go to Weights & Biases and to trackio, from their thread, without network."""

import contextlib
import sys

import pytest

from grpo_roc_jax.record import loggers
from grpo_roc_jax.record.metrics import LogConfig, Trackio, WandbOffline, make_writer
from grpo_roc_jax.record.tables import COLUMNS, tables
from tests.helpers.method_groups import method
from tests.helpers.samples import make_group
from tests.record.test_metrics import RunLike, fake_service
from tests.record.test_trace import run_step


def records(groups=2):
    return run_step(0, method(4), [make_group(seed, 8) for seed in range(groups)])[2]


def test_the_tables_hold_every_rollout_and_the_text_of_kept_and_dropped_ones():
    made = records()
    by_name = tables(made)
    assert by_name["rollouts"].columns == COLUMNS and len(by_name["rollouts"].rows) == len(made) == 16
    for row, record in zip(by_name["rollouts"].rows, made, strict=True):
        named = dict(zip(COLUMNS, row, strict=True))
        assert (named["problem"], named["sample"]) == (record.problem.uid, record.trajectory.sample)
        assert (named["verdict"], named["reward"]) == (record.verdict.status, record.verdict.reward)
        assert (named["kept"], named["why"]) == (record.kept, record.why)
        assert named["penalty"] == pytest.approx(named["error_penalty"] + named["format_penalty"])
        assert (named["advantage"] is not None) is (record.advantages is not None)
    shown = [dict(zip(by_name["trajectories"].columns, row, strict=True)) for row in by_name["trajectories"].rows]
    assert [entry["kept"] for entry in shown] == [True, True, False, False] and all(entry["text"] for entry in shown)
    assert tables([]) == {"rollouts": (COLUMNS, []), "trajectories": ((*COLUMNS[:12], "text"), [])}


@pytest.mark.parametrize("kind", [WandbOffline, Trackio])
def test_services_get_rows_and_tables(tmp_path, monkeypatch, kind):
    calls, made = [], records()
    monkeypatch.setitem(sys.modules, kind.package, fake_service(calls))
    with make_writer(tmp_path, RunLike(log=LogConfig(console="off", wandb=kind(project="p")))) as writer:
        writer.sample(5, made[0], made)
        writer.write(5, {"rollout/reward": 0.5})
    shown = {name: ("table", list(rows.columns), rows.rows) for name, rows in tables(made).items()}
    assert calls[1:] == [("log", {"step": 5} | shown), ("log", {"step": 5, "rollout/reward": 0.5}), ("finish", None)]


class Unread(list):
    def __iter__(self):
        raise AssertionError("tables are made")


def test_a_service_without_tables_gets_none_made():
    with pytest.raises(AssertionError, match="are made"):
        tables(Unread())
    with contextlib.closing(loggers.Background(loggers.MetricsWriter, "plain")) as background:
        background.sample(1, None, Unread())


def test_trackio_keeps_rows_and_tables_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed; pip install -e '.[trackio]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its directory when it is imported
    made = records()
    for step in (1, 2):  # the second is a resumed run
        with make_writer(tmp_path, RunLike(log=LogConfig(console="off", wandb=Trackio(project="p")))) as writer:
            writer.sample(step, made[0], made)
            writer.write(step, {"rollout/reward": 0.25 * step})
    runs = sys.modules["trackio"].Api().runs("p")
    assert len(list(runs)) == 1


def test_wandb_keeps_rows_and_tables_in_the_run_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed; pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = records()
    with make_writer(tmp_path, RunLike(log=LogConfig(console="off", wandb=WandbOffline(project="p")))) as writer:
        writer.sample(1, made[0], made)
        writer.write(1, {"rollout/reward": 0.25})
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 1 and any("rollouts" in path.name for path in runs[0].rglob("*.table.json"))

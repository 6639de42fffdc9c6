"""The stream's benchmark goes on where it was stopped, and compares lags seed by seed."""

import json
import sys

from benchmarks import bench_stream


def test_runs_of_the_file_are_not_repeated(tmp_path, monkeypatch, capsys):
    """Stopped in the third of four runs, so that two are left. Lag 1 gains 1 with one seed, 3 with the other."""
    ran = []

    def one_run(config, overlap):
        if len(ran) == 2 and stops:
            raise KeyboardInterrupt
        lag = config.rollout.step_limit.lag
        ran.append((config.seed, lag))
        return {"steps_per_s": 1.0 + lag, "late_reward": config.seed + lag * (1.0 + 2 * config.seed)}

    monkeypatch.setattr(bench_stream, "one_run", one_run)
    rows = tmp_path / "rows.jsonl"
    words = ["bench_stream.py", "--steps=2", "--seeds", "0", "1", "--lags", "0", "1", f"--rows={rows}"]
    for stops in (True, False, False):
        monkeypatch.setattr(sys, "argv", words)
        try:
            bench_stream.main()
        except KeyboardInterrupt:
            assert stops
    assert ran == [(0, 0), (0, 1), (1, 0), (1, 1)] and len(rows.read_text().splitlines()) == 4
    *_, line, summary = capsys.readouterr().out.splitlines()
    assert line == "reward at lag 1 less lag 0: +2.0000, +1.0000 to +3.0000"
    assert json.loads(summary)["gain"] == {"1": {"mean": 2.0, "low": 1.0, "high": 3.0}}
    monkeypatch.setattr(sys, "argv", [*words, "--optim.lr=3e-3"])
    bench_stream.main()
    assert len(ran) == 8, "other settings are other runs"

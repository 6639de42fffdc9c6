"""The server answers loopback alone, by questions alone; the answers are those of the log."""

import base64
import http.client
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.record import index, trace
from grpo_roc_jax.record.accuracy import bootstrap, intervals
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.types import Group, Problem
from grpo_roc_jax.view.answers import Runs, difference
from grpo_roc_jax.view.page_server import PageServer
from grpo_roc_jax.view.pages import policy
from tests.helpers.demo import write_run
from tests.helpers.samples import make_trajectory, make_verdict


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", 0, steps=6, groups=2, size=4)
    write_run(folder / "b", 1, steps=6, groups=2, size=4)
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def server(root):
    with PageServer(Runs([str(root / "a"), str(root / "b")])) as page_server:
        thread = threading.Thread(target=page_server.serve_forever, daemon=True)
        thread.start()
        yield page_server
        page_server.shutdown()


def ask(server, path, method="GET", **headers):
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    line.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name.replace("_", "-"), value)
    line.endheaders()
    response = line.getresponse()
    return response.status, response.read(), dict(response.getheaders())


def answer(server, path):
    status, content, _ = ask(server, f"/api/{path}")
    assert status == 200, content
    return json.loads(content)


def test_it_listens_on_loopback_with_a_policy_on_every_answer(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/api/state", "/nothing"):
        _, _, headers = ask(server, path)
        assert headers["Content-Security-Policy"] == policy(served=True)
        assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers


def test_other_methods_and_other_hosts_are_refused(server):
    """`tests/test_servers.py` has what pages of other sites send."""
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
        assert ask(server, "/", method)[0] == 501
    for host in ("evil.example", "127.0.0.1", "localhost:1", ""):
        status, content, _ = ask(server, "/api/state", Host=host)
        assert status == 403 and b"demo" not in content, host
    assert ask(server, "/api/state", Host=f"localhost:{server.server_port}")[0] == 200


ESCAPES = [
    "/../secret.txt",
    "/%2e%2e/secret.txt",
    "//etc/passwd",
    "/api/../../secret.txt",
    "/static/viewer.js",
    "/api/trajectory?run=0&block=../secret.txt&row=0",
    "/api/trajectory?run=0&block=step.1/../../../secret&row=0",
    "/api/trajectory?run=-1&block=step.1&row=0",
    "/api/trajectory?run=2&block=step.1&row=0",
    "/api/trajectory?run=0&block=step.1&row=-1",
    "/api/trajectory?run=0&block=step.1&row=999",
    *(f"/api/trajectory?run=0&block={block}&row=0" for block in ("step", "step.-1", "step.1.2", f"step.{10**20}")),
    "/api/blocks?run=0&blocks=step.1%00.txt",
    "/api/metrics?run=x",
    "/api/metrics",
    "/api/search?run=0&blocks=step.1",
    "/api/__class__",
]


def test_no_address_leads_out_of_the_questions(server):
    for path in ESCAPES:
        status, content, _ = ask(server, path)
        assert status == 404 and b"secret\n" not in content and content != b"secret", path


def test_state_metrics_and_blocks_are_those_of_the_files(server, root):
    state = answer(server, "state")
    assert [entry["name"] for entry in state] == [str(root / "a"), str(root / "b")]
    assert state[0]["label"] == state[1]["label"]  # they differ in the seed alone
    assert list(state[0]["blocks"]) == ["eval.0", *(f"step.{i}" for i in range(1, 6)), "eval.6", "step.6"]
    metrics, rows = answer(server, "metrics?run=1"), read_metrics(root / "b")
    assert metrics["steps"] == [row["step"] for row in rows]
    assert metrics["columns"]["rollout/reward"] == [row.get("rollout/reward") for row in rows]
    assert metrics["columns"]["rollout/reward"][0] is None
    blocks = answer(server, "blocks?run=0&blocks=step.3,step.99,eval.6")
    assert [(block["kind"], block["step"]) for block in blocks] == [("step", 3), ("eval", 6)]
    log = root / "a" / "trajectories" / "step_00000003.jsonl"
    assert blocks[0] == json.loads(index.load(log, "step", 3))


def test_a_changed_file_has_another_stamp(tmp_path):
    run = Runs([str(write_run(tmp_path / "a", 0, steps=1, groups=1, size=2))])
    before = run.state()[0]["blocks"]
    trace.TraceWriter(tmp_path / "a", decode=None).write(1, list(trace.read_trace(tmp_path / "a", 1))[:1])
    after = run.state()[0]["blocks"]
    assert before["step.1"] != after["step.1"] and before["eval.0"] == after["eval.0"]


def test_alarms_come_from_metrics_and_events(tmp_path):
    folder = write_run(tmp_path / "a", 0, steps=8, groups=1, size=2)
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"step": 2, "event": "preempted", "text": "x"}\n{"step": 3, "ev')
    events = Runs([str(folder)]).metrics(0)["events"]
    assert [(event["step"], event["name"]) for event in events] == [
        (2, "preempted"),
        (4, "reward_spread"),
        (7, "entropy_band"),
    ]
    assert events[1]["text"] == "below 0.05 for three steps"


def test_a_trajectory_is_that_of_the_log(server, root):
    records = list(trace.read_trace(root / "a", 2))
    trajectory = answer(server, "trajectory?run=0&block=step.2&row=3")
    record = records[3]
    assert trajectory["turns"][0]["text"] == record.trajectory.turns[0].text and trajectory["why"] == record.why
    tokens = np.frombuffer(base64.b64decode(trajectory["arrays"]["tokens"]), np.int32)
    assert (tokens == record.trajectory.tokens).all()
    text = "".join(trajectory["pieces"][str(i)] for i in tokens)
    assert text == "".join(segment["text"] for segment in trajectory["segments"])
    assert ("advantage" in trajectory["arrays"]) == record.kept


def test_search_finds_text_and_neither_names_of_fields_nor_arrays(server, root):
    matches = answer(server, "search?run=0&text=MODULE+has+another&blocks=step.1,step.2")
    expected = {
        f"step.{step}": [
            index
            for index, record in enumerate(trace.read_trace(root / "a", step))
            if any("module has another" in turn.text for turn in record.trajectory.turns)
        ]
        for step in (1, 2)
    }
    assert matches == {name: places for name, places in expected.items() if places} != {}
    assert answer(server, "search?run=0&text=policy_mask&blocks=step.1") == {}
    assert answer(server, "search?run=0&text=AAAA&blocks=step.1") == {}


def test_evaluations_have_the_intervals_of_the_command(server, root):
    evals = answer(server, "evaluations")
    records = list(trace.read_trace(root / "b", 6, "eval"))
    groups = {record.problem.uid: [] for record in records}
    for record in records:
        groups[record.problem.uid].append(record.verdict.status == "correct")
    values = np.array([np.mean(correct) for correct in groups.values()])
    row = next(r for r in evals["rows"] if (r["run"], r["step"], r["source"]) == (1, 6, "all"))
    assert row["mean"] == pytest.approx(values.mean()) and row["problems"] == 24
    assert (row["low"], row["high"]) == bootstrap(values)
    pairs = [(d["run"], d["step"], d["against_run"], d["against_step"]) for d in evals["differences"]]
    assert pairs == [(0, 6, 0, 0), (1, 6, 1, 0), (1, 6, 0, 6)]


def test_a_difference_by_hand():
    result = difference((1, 8, {"a": 1.0, "b": 0.0, "c": 1.0}), (0, 4, {"b": 1.0, "c": 1.0, "a": 0.0, "d": 1.0}))
    assert (result["problems"], result["mean"]) == (3, 0.0) and result["low"] < 0 < result["high"]
    assert [result[name] for name in ("both", "first", "second", "neither")] == [1, 1, 1, 0]
    assert difference((1, 8, {}), (0, 4, {"a": 1.0}))["mean"] is None


def test_a_problem_of_two_sources_counts_in_both_as_in_evaluate(tmp_path):
    rng = np.random.default_rng(0)
    groups = []
    for source, right in (("a", 4), ("b", 0)):
        for uid in ("p", "q"):
            verdicts = tuple(
                replace(make_verdict(rng, make_trajectory(rng, i)), status="correct" if i < right else "wrong")
                for i in range(4)
            )
            trajectories = tuple(make_trajectory(rng, i) for i in range(4))
            groups.append(Group(Problem(uid, "?", "1", source), trajectories, verdicts))
    trace.TraceWriter(tmp_path).write(0, trace.eval_records(0, groups), kind="eval")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    rows = {row["source"]: row for row in Runs([str(tmp_path)]).evaluations()["rows"]}
    bounds = intervals(groups, 4)
    for source, mean, problems in (("a", 1.0, 2), ("b", 0.0, 2), ("all", 0.5, 4)):
        assert (rows[source]["mean"], rows[source]["problems"]) == (mean, problems)
        assert (rows[source]["low"], rows[source]["high"]) == bounds[source]["avg@4"]

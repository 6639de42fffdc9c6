"""The server answers loopback alone, by questions alone; the answers are those of the log."""

import base64
import hashlib
import http.client
import json
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from grpo_roc_jax.record import index, trace
from grpo_roc_jax.record.accuracy import bootstrap, intervals
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.types import Group, Problem
from grpo_roc_jax.view.answers import Runs, difference
from grpo_roc_jax.view.page_server import PageServer
from grpo_roc_jax.view.pages import page, part, policy
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


def ask(server, path):
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    line.putrequest("GET", path)
    line.endheaders()
    response = line.getresponse()
    return response.status, response.read(), dict(response.getheaders())


def answer(server, path):
    status, content, _ = ask(server, f"/api/{path}")
    assert status == 200, content
    return json.loads(content)


def test_it_listens_on_loopback_and_no_address_leads_out_of_the_questions(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/api/state", "/nothing"):
        _, _, headers = ask(server, path)
        assert headers["Content-Security-Policy"] == policy(served=True)
        assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers
    blocks = ["step", "step.-1", "step.1.2", f"step.{10**20}", "../secret.txt", "step.1/../../../secret"]
    places = [f"run=0&block={block}&row=0" for block in blocks]
    places += [f"run={run}&block=step.1&row={row}" for run, row in ((-1, 0), (2, 0), (0, -1), (0, 999))]
    files = ["/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/api/../../secret.txt", "/static/viewer.js"]
    questions = [
        "blocks?run=0&blocks=step.1%00.txt",
        "metrics?run=x",
        "metrics",
        "search?run=0&blocks=step.1",
        "__class__",
    ]
    questions += [f"trajectory?{place}" for place in places]
    for path in [*files, *(f"/api/{question}" for question in questions)]:
        status, content, _ = ask(server, path)
        assert status == 404 and b"secret\n" not in content and content != b"secret", path


def test_what_is_asked_is_answered_from_the_files(server, root):
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
    records = list(trace.read_trace(root / "a", 2))
    trajectory = answer(server, "trajectory?run=0&block=step.2&row=3")
    record = records[3]
    assert trajectory["turns"][0]["text"] == record.trajectory.turns[0].text and trajectory["why"] == record.why
    tokens = np.frombuffer(base64.b64decode(trajectory["arrays"]["tokens"]), np.int32)
    assert (tokens == record.trajectory.tokens).all()
    text = "".join(trajectory["pieces"][str(i)] for i in tokens)
    assert text == "".join(segment["text"] for segment in trajectory["segments"])
    assert ("advantage" in trajectory["arrays"]) == record.kept
    places = {
        f"step.{step}": [
            number
            for number, record in enumerate(trace.read_trace(root / "a", step))
            if any("module has another" in turn.text for turn in record.trajectory.turns)
        ]
        for step in (1, 2)
    }
    expected = {name: numbers for name, numbers in places.items() if numbers}
    assert answer(server, "search?run=0&text=MODULE+has+another&blocks=step.1,step.2") == expected != {}
    for text in ("policy_mask", "AAAA"):
        assert answer(server, f"search?run=0&text={text}&blocks=step.1") == {}
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


def test_alarms_stamps_of_files_and_problems_of_two_sources(tmp_path):
    folder = write_run(tmp_path / "a", 0, steps=8, groups=1, size=2)
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"step": 2, "event": "preempted", "text": "x"}\n{"step": 3, "ev')
    runs = Runs([str(folder)])
    events = runs.metrics(0)["events"]
    named = [(2, "preempted"), (4, "reward_spread"), (7, "entropy_band")]
    assert [(event["step"], event["name"]) for event in events] == named
    assert events[1]["text"] == "below 0.05 for three steps"
    before = runs.state()[0]["blocks"]
    trace.TraceWriter(folder, decode=None).write(8, list(trace.read_trace(folder, 8))[:1])
    after = runs.state()[0]["blocks"]
    assert before["step.8"] != after["step.8"] and before["eval.0"] == after["eval.0"], (
        "a changed file has another stamp"
    )
    rng, groups = np.random.default_rng(0), []
    for source, status in (("a", "correct"), ("b", "wrong")):
        for uid in ("p", "q"):
            trajectories = tuple(make_trajectory(rng, i) for i in range(4))
            verdicts = tuple(replace(make_verdict(rng, row), status=status) for row in trajectories)
            groups.append(Group(Problem(uid, "?", "1", source), trajectories, verdicts))
    trace.TraceWriter(tmp_path).write(0, trace.eval_records(0, groups), kind="eval")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    rows = {row["source"]: row for row in Runs([str(tmp_path)]).evaluations()["rows"]}
    bounds = intervals(groups, 4)
    for source, mean, problems in (("a", 1.0, 2), ("b", 0.0, 2), ("all", 0.5, 4)):
        assert (rows[source]["mean"], rows[source]["problems"]) == (mean, problems)
        assert (rows[source]["low"], rows[source]["high"]) == bounds[source]["avg@4"]
    result = difference((1, 8, {"a": 1.0, "b": 0.0, "c": 1.0}), (0, 4, {"b": 1.0, "c": 1.0, "a": 0.0, "d": 1.0}))
    assert (result["problems"], result["mean"]) == (3, 0.0) and result["low"] < 0 < result["high"]
    assert [result[name] for name in ("both", "first", "second", "neither")] == [1, 1, 1, 0]
    assert difference((1, 8, {}), (0, 4, {"a": 1.0}))["mean"] is None


# ---- the page itself: what it may do, and that no text of a run can end the element that holds it -------------------

EVIL = "</script><script>alert(1)</script><!--<script>{{script}}{{data}}{{style}}\u2028 é \ud800"


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts = [], {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data):
        if self.cdata_elem in self.texts:
            self.texts[self.cdata_elem][-1] += data


def test_text_of_a_run_cannot_end_its_element_and_the_page_runs_its_own_script_alone():
    parsed = Reader(page({"name": EVIL, "value": float("nan")}))
    scripts = [attributes for tag, attributes in parsed.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert json.loads(parsed.texts["script"][0]) == {"name": EVIL, "value": None}
    assert parsed.texts["script"][1] == part("viewer.js") and parsed.texts["style"] == [part("viewer.css")]
    for data in (None, {}):
        parsed = Reader(page(data))
        rule = next(a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
        texts = [parsed.texts["script"][1], parsed.texts["style"][0]]
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert re.findall("'sha256-([^']+)'", rule) == hashes
        assert rule.startswith("default-src 'none'; ") and "unsafe" not in rule and "http" not in rule
        assert ("connect-src 'self'" in rule) == (data is None)
        names = {name for _, attributes in parsed.elements for name in attributes}
        assert not names & {"src", "href", "style"} and not any(name.startswith("on") for name in names)
    assert "frame-ancestors 'none'" in policy(served=True)
    script = part("viewer.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", script)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script + part("viewer.css") + part("page.html"))

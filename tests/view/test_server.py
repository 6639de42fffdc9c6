"""The server answers loopback alone, by questions alone; the answers are those of the log."""

import base64
import hashlib
import json
import re
import threading
from html.parser import HTMLParser

import numpy as np
import pytest

from grpo_roc_jax.record import index, trace
from grpo_roc_jax.record.accuracy import bootstrap
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.view.answers import Runs, difference
from grpo_roc_jax.view.page_server import PageServer
from grpo_roc_jax.view.pages import page, part, policy
from tests.helpers.demo import write_run
from tests.helpers.serving import exchange


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate("ab"):
        write_run(folder / name, seed, steps=6, groups=2, size=4)
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def server(root):
    with PageServer(Runs([str(root / "a"), str(root / "b")])) as page_server:
        threading.Thread(target=page_server.serve_forever, daemon=True).start()
        yield page_server
        page_server.shutdown()


def ask(server, path):
    status, headers, content = exchange(server.server_port, "GET", path)
    return status, content, headers


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
    files = ["/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/static/viewer.js"]
    questions = ["blocks?run=0&blocks=step.1%00.txt", "metrics?run=x", "search?run=0&blocks=step.1", "__class__"]
    questions += [f"trajectory?{place}" for place in places]
    for path in [*files, *(f"/api/{question}" for question in questions)]:
        status, content, _ = ask(server, path)
        assert status == 404 and b"secret\n" not in content and content != b"secret", path


def test_what_is_asked_is_answered_from_the_files(server, root):
    state = answer(server, "state")
    assert [entry["name"] for entry in state] == [str(root / "a"), str(root / "b")]
    assert list(state[0]["blocks"]) == ["eval.0", *(f"step.{i}" for i in range(1, 6)), "eval.6", "step.6"]
    metrics, rows = answer(server, "metrics?run=1"), read_metrics(root / "b")
    assert metrics["steps"] == [row["step"] for row in rows]
    assert metrics["columns"]["rollout/reward"] == [row.get("rollout/reward") for row in rows]
    blocks = answer(server, "blocks?run=0&blocks=step.3,step.99,eval.6")
    assert [(block["kind"], block["step"]) for block in blocks] == [("step", 3), ("eval", 6)]
    assert blocks[0] == json.loads(index.load(root / "a/trajectories/step_00000003.jsonl", "step", 3))
    trajectory, records = answer(server, "trajectory?run=0&block=step.2&row=3"), list(trace.read_trace(root / "a", 2))
    record = records[3]
    assert trajectory["turns"][0]["text"] == record.trajectory.turns[0].text and trajectory["why"] == record.why
    tokens = np.frombuffer(base64.b64decode(trajectory["arrays"]["tokens"]), np.int32)
    assert (tokens == record.trajectory.tokens).all()
    text = "".join(segment["text"] for segment in trajectory["segments"])
    assert text == "".join(trajectory["pieces"][str(i)] for i in tokens)
    assert ("advantage" in trajectory["arrays"]) == record.kept
    turns = ((i, turn.text) for i, record in enumerate(records) for turn in record.trajectory.turns)
    places = sorted({number for number, text in turns if "module has another" in text})
    assert answer(server, "search?run=0&text=MODULE+has+another&blocks=step.2") == {"step.2": places} and places
    assert answer(server, "search?run=0&text=policy_mask&blocks=step.1") == {}
    evals = answer(server, "evaluations")
    groups = {}
    for record in trace.read_trace(root / "b", 6, "eval"):
        groups.setdefault(record.problem.uid, []).append(record.verdict.status == "correct")
    values = np.array([np.mean(correct) for correct in groups.values()])
    row = next(r for r in evals["rows"] if (r["run"], r["step"], r["source"]) == (1, 6, "all"))
    assert row["mean"] == pytest.approx(values.mean()) and row["problems"] == 24
    assert (row["low"], row["high"]) == bootstrap(values)
    assert {r["source"] for r in evals["rows"]} == {"all", "world:gcd", "world:divisors"}
    pairs = [(d["run"], d["step"], d["against_run"], d["against_step"]) for d in evals["differences"]]
    assert pairs == [(0, 6, 0, 0), (1, 6, 1, 0), (1, 6, 0, 6)]


def test_alarms_stamps_of_files_and_differences(tmp_path):
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
    assert before["step.8"] != runs.state()[0]["blocks"]["step.8"], "a changed file has another stamp"
    result = difference((1, 8, {"a": 1.0, "b": 0.0, "c": 1.0}), (0, 4, {"b": 1.0, "c": 1.0, "a": 0.0, "d": 1.0}))
    assert (result["problems"], result["mean"]) == (3, 0.0) and result["low"] < 0 < result["high"]
    assert [result[name] for name in ("both", "first", "second", "neither")] == [1, 1, 1, 0]


EVIL = "</script><script>alert(1)</script><!--<script>{{script}}{{data}}{{style}}\u2028 é \ud800"


class Reader(HTMLParser):
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
    assert "frame-ancestors 'none'" in policy(served=True)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|srcdoc", part("viewer.js"))

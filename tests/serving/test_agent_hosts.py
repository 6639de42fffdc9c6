"""Where agents run: functions in threads, processes and actors, programs that are forked, agents of other machines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.environments.config import AgentCommand, EnvironmentByRow, HostActors, HostProcesses, HostThreads
from grpo_roc_jax.serving.agent_ends import AgentCall
from grpo_roc_jax.serving.agent_programs import FORKED, ProgramAgent, python_words
from tests.helpers.serving import FUNCTIONS, SCRIPT, collected, runs_of, wait_for
from tests.serving import agent_functions

WHERE, BY_ANSWER = f"{FUNCTIONS}:where", f"{FUNCTIONS}:by_answer"


def requests(*how):
    return [g.RolloutRequest(g.Problem(f"p{i}", "2+3=", "5", "t", {"how": value}), i) for i, value in enumerate(how)]


@pytest.mark.parametrize("host", [HostThreads(), HostProcesses(workers=2)], ids=["threads", "processes"])
def test_a_function_is_imported_once_wherever_it_runs(host):
    """Six rollouts share the processes, which stay warm for the next step, and sample the same in any host."""
    with runs_of(function=WHERE, host=host) as (runs, weights):
        steps = [runs.collect(weights, [replace(requests("")[0], count=6)], g.RunOptions(step=3))[0] for _ in range(2)]
    places = {(row.rewards["process"], row.rewards["module"]) for step in steps for row in step}
    processes, threads = {process for process, _ in places}, host.kind == "threads"
    assert len(processes) == len(places) == (1 if threads else 2) and (os.getpid() in processes) == threads
    assert [row.tokens.tolist() for row in steps[0]] == [row.tokens.tolist() for row in steps[1]]


def test_a_process_that_dies_or_blocks_costs_its_own_rollouts():
    """Also those of a function that was passed are sent to processes."""
    with runs_of(function=BY_ANSWER, host=HostProcesses(workers=3), timeout_s=2.0) as (runs, weights):
        (crash, block, leave), stats = runs.collect(weights, requests("crash", "block", "leave"), g.RunOptions())
        assert crash.stop == "infrastructure" and "HostLost" in crash.fault and crash.policy_mask.any()
        assert block.stop == "deadline" and not block.fault
        assert (leave.stop, leave.reward) == ("failed", 0.0) and "SystemExit: enough" in leave.fault
        assert stats.environment_faults == 1
        ends, _ = runs.collect(weights, requests("", "", ""), g.RunOptions())
        assert [row.reward for row in ends] == [1.0] * 3, "all three processes are there again"
    with g.settings.callables.given({"mine": agent_functions.two_turns}):
        ((row,), _) = collected(function="mine", host=HostProcesses(workers=1))
    assert row.reward == 1.0 and len(row.turns) == 2


@pytest.mark.slow
def test_a_function_in_ray_actors():
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    host = HostActors(2, cpus=0.5)
    try:
        rows, _ = collected(count=4, function=WHERE, host=host)
        assert len({row.rewards["process"] for row in rows}) == 2 and {row.reward for row in rows} == {1.0}
        with runs_of(function=BY_ANSWER, host=host, timeout_s=20.0) as (runs, weights):
            crash, fine = runs.collect(weights, requests("crash", ""), g.RunOptions())[0]
        assert crash.stop == "infrastructure" and fine.reward == 1.0
    finally:
        ray.shutdown()


PROGRAM = """
import json, os, sys, colorsys, near
row = json.load(sys.stdin)

def main():
    import wave
    if sys.argv[1:] == ["fail"]:
        raise ValueError("bad row")
    import numpy as np
    print(json.dumps({
        "argv": sys.argv[1:], "name": __name__, "file": __file__, "key": os.environ["OPENAI_API_KEY"],
        "near": near.KEY, "row": row["prompt"], "path": sys.path[0], "draw": float(np.random.rand()),
        "leads": os.getsid(0) == os.getpid(), "loaded": near.LOADED}))
    os.write(int(os.environ["GRPO_REWARD_FD"]), b"0.5")

if __name__ == "__main__":
    main()
"""
NEAR = """
import os, sys
KEY = os.environ["OPENAI_API_KEY"]
LOADED = [name for name in ("colorsys", "wave", "numpy") if name in sys.modules]
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program beside a module of its own; packages in `site-packages` are installed."""
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site-packages{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "near.py").write_text(NEAR)
    (tmp_path / "agent.py").write_text(PROGRAM)
    return tmp_path / "agent.py"


def call(number=0):
    return AgentCall({"prompt": f"row {number}"}, "what is it?", f"http://127.0.0.1:1/s/{number}/v1", f"key{number}")


def played(words, count=1, **settings):
    with closing(ProgramAgent(AgentCommand(command=f"{sys.executable} {words}", **settings))) as agent:
        return [agent.play(str(i), call(i)) for i in range(count)]


@pytest.mark.parametrize(("words", "warm"), [("-u {}", True), ("-m agent", True), ("-u {}", False)])
def test_a_forked_program_is_what_a_started_one_is(program, monkeypatch, words, warm):
    """Words, variables, input, path, its own modules and random numbers; packages alone are there before."""
    monkeypatch.chdir(program.parent)
    ends = played(f"{words.format(program)} '{{prompt}}' {{base_url}}", 4, warm=warm)
    for i, end in enumerate(ends):
        assert (end.status, end.pay.reward, end.errors) == (0, 0.5, ""), end
        report = json.loads(end.printed)
        assert report["argv"] == ["what is it?", f"http://127.0.0.1:1/s/{i}/v1"]
        assert (report["name"], report["file"], report["path"]) == ("__main__", str(program), str(program.parent))
        assert (report["key"], report["near"], report["row"]) == (f"key{i}", f"key{i}", f"row {i}") and report["leads"]
    loaded = [json.loads(end.printed)["loaded"] for end in ends]
    assert loaded[0] == ["colorsys"] and loaded[-1] == (["colorsys", "wave", "numpy"] if warm else ["colorsys"])
    assert len({json.loads(end.printed)["draw"] for end in ends}) == 4


THREAD = "import threading, time, os; threading.Thread(target=lambda: (time.sleep(0.2), os.write(2, b'x'))).start()"


@pytest.mark.parametrize("warm", [True, False])
def test_the_end_of_a_forked_program_is_that_of_a_started_one(tmp_path, program, warm):
    (failed,) = played(f"{program} fail", warm=warm)
    assert failed.status == 1 and failed.errors.startswith("Traceback") and failed.errors.endswith("bad row\n")
    assert "_fork_server" not in failed.errors and failed.errors.count("File") == 2
    file = tmp_path / "ends.py"
    for text, status, errors in (
        ("import sys; sys.exit('enough')", 1, "enough\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("import atexit, os; atexit.register(lambda: os.write(2, b'late'))", 0, "late"),
        (THREAD, 0, "x"),
        ("raise KeyboardInterrupt", -2, None),
        ("1 +", 1, None),
    ):
        file.write_text(text)
        (end,) = played(file, warm=warm)
        assert end.status == status and (end.errors == errors or errors is None), text
    assert "SyntaxError: invalid syntax" in end.errors and "_fork_server" not in end.errors
    file.write_text("import time; time.sleep(100)")
    (late,) = played(file, timeout_s=1.0, warm=warm)
    assert late.status is None and late.seconds < 20


def test_which_programs_are_forked():
    for words, split in (("python a.py x", 1), ("/usr/bin/python3.12 -u -O a.py", 3), ("python -m mine.agent x", 1)):
        assert python_words(words.split()) == split, words
    for words in ("python", "python -c 1", "python -m", "python -X dev a.py", "env python a.py", "pythonic a.py"):
        assert python_words(words.split()) is None, words


def test_packages_that_start_threads_are_not_forked(program, caplog):
    """A thread of the parent does not exist in a fork, and what it holds stays held."""
    thread = "threading.Thread(target=lambda: time.sleep(99), daemon=True).start()"
    (program.with_name("site-packages") / "busy.py").write_text(f"import threading, time\n{thread}\n")
    program.write_text(f"import busy\n{PROGRAM}")
    assert [end.pay.reward for end in played(program, 3)] == [0.5] * 3
    assert caplog.text.count("programs are started, not forked: a package starts a thread") == 1


def test_a_fork_server_that_dies_ends_its_runs_and_the_next_are_started(program):
    with closing(ProgramAgent(AgentCommand(command=f"{sys.executable} {program}"))) as agent:
        assert agent.play("a", call()).pay.reward == 0.5
        program.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time\ntime.sleep(60)\n")
        killed = agent.play("b", call())
        assert killed.status == -9 and killed.seconds < 30
        program.write_text(PROGRAM)
        assert agent.play("c", call()).pay.reward == 0.5


def ends_within(seconds, pid):
    """Whether a process of no parent of ours ends; it is killed otherwise."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_forked_programs_end_with_the_trainer_also_if_one_ends_at_that_moment(tmp_path):
    """Its end cannot be told any more; the fork server ends the others all the same."""
    ours, theirs = socket.socketpair()
    words = [sys.executable, FORKED, str(theirs.fileno())]
    server = subprocess.Popen(words, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    pids, lines = [], ours.makefile("rb")
    with open(os.devnull, "r+b") as null:
        for number, seconds in enumerate((0.5, 60)):
            (program := tmp_path / f"{number}.py").write_text(f"import time; time.sleep({seconds})")
            request = {"number": number, "words": [str(program)], "environment": {}, "pay": "P", "unbuffered": False}
            socket.send_fds(ours, [json.dumps(request).encode() + b"\n"], [null.fileno()] * 4)
            pids.append(json.loads(lines.readline())["pid"])
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(1.0)
    lines.close()
    ours.close()
    os.kill(server.pid, signal.SIGCONT)
    assert server.wait(20) == 0 and ends_within(10.0, pids[1]), "a program goes on without its trainer"


TRAINER = """
from grpo_roc_jax.serving import agent_ends, agent_programs
agent = agent_programs.ProgramAgent(agent_programs.AgentCommand(command={command!r}))
for seconds in ("0", "60"):
    agent.play(seconds, agent_ends.AgentCall({{}}, seconds, "http://127.0.0.1:9/v1", ""))
"""


def test_started_programs_end_with_a_killed_trainer(tmp_path):
    command = f"""sh -c 'sleep "$1" & echo $! $$ >> {tmp_path}/pids; wait' sh {{prompt}}"""
    trainer, pids = tmp_path / "trainer.py", tmp_path / "pids"
    trainer.write_text(TRAINER.format(command=command))
    process = subprocess.Popen([sys.executable, trainer])
    wait_for(lambda: pids.exists() and pids.read_text().count("\n") == 2, 60)
    process.kill()
    process.wait()
    assert all(ends_within(10.0, int(pid)) for pid in pids.read_text().split())


def test_an_agent_of_another_machine_asks_with_the_token(monkeypatch):
    """On all addresses of this machine, by a process that gets nothing but the words of a command."""
    monkeypatch.delenv("GRPO_SERVE_TOKEN", raising=False)
    match = r"environment\.address 0\.0\.0\.0 can be reached from elsewhere; set GRPO_S"
    with pytest.raises(ValueError, match=match), runs_of(function=WHERE, address="0.0.0.0"):
        pass
    monkeypatch.setenv("GRPO_SERVE_TOKEN", "secret")
    monkeypatch.setattr("socket.gethostname", lambda: "127.0.0.1")  # its own name may not resolve here
    given = "OPENAI_BASE_URL={base_url} OPENAI_API_KEY={api_key} GRPO_REWARD_FD=$GRPO_REWARD_FD"
    command = f"sh -c 'env -i {given} {sys.executable} {SCRIPT} linear'"
    with runs_of(command=command, address="0.0.0.0", timeout_s=120.0) as (runs, weights):
        ((row,), _) = runs.collect(weights, requests(""), g.RunOptions())
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{runs.url}/v1/models", timeout=30)
    assert row.reward == 0.25 and len(row.turns) == 2, row.fault


def test_agents_of_a_mix_share_an_endpoint():
    with pytest.raises(ValueError, match="agents with 2 addresses"):
        EnvironmentByRow(classes=("a={kind: agent, command: x}", "b={kind: agent, command: x, port: 8001}"))
    mix = EnvironmentByRow(classes=("a={kind: agent, command: x}", "b={kind: agent, function: 'y:z'}", "c=d.py:C"))
    assert list(mix.agents) == ["a", "b"] and list(mix.paths) == ["c"]

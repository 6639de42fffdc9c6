"""Task directories of Harbor: read, worked on in the sandbox, graded by their tests."""

import asyncio
import os
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.contrib.environments.harbor_tasks import harbor_class, harbor_problems, read_reward, read_task
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.environments.config import EnvironmentHarbor
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.types import Turn
from tests.test_readme import TINY

TASKS = Path(__file__).parents[3] / "examples" / "environments" / "harbor"
TEST = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"


def make_task(folder, *, toml="", test=TEST, instruction="Do it.", **files):
    """A task directory; names of further files have `__` for a slash."""
    for name, text in {"task.toml": toml, "instruction.md": instruction, "tests/test.sh": test, **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def environments():
    """Makes environments in the sandbox, all in one executor."""
    shared = {}

    def make(tasks=TASKS, **settings):
        made = harbor_class(EnvironmentHarbor(tasks=str(tasks), **{"timeout_s": 60.0, **settings}))
        made.executor = shared.setdefault("executor", made.executor)
        return made

    yield make
    shared["executor"].started().close()


def rollout(environment, commands, folder=None, name=""):
    """(what the commands printed, the reward) of a rollout in a task of that name, or in the first one."""
    problem = next(p for p in harbor_problems(str(folder or TASKS)) if name in p.uid)

    async def play():
        instance = environment()
        instance.reset(problem)
        printed = [await instance.bash(command) for command in commands]
        try:
            return printed, await instance.get_reward()
        finally:
            instance.close()

    return asyncio.run(play())


def test_commands_share_their_files_and_say_how_they_ended(environments, tmp_path, caplog):
    """Also where tests write nothing."""
    commands = ["cd /tmp; pwd; echo out; echo err >&2; exit 3", "pwd; echo x > note", "cat note", "sleep 30"]
    printed, _ = rollout(environments(command_s=1.0), [*commands, "seq 100000 | wc"], name="greeting")
    assert printed[0].endswith("out\nerr\n\n[exit status 3]") and printed[1].strip() in ("/app", "/scratch/app")
    assert printed[2] == "x\n" and "[ended after 1 s]" in printed[3] and printed[4].split()[0] == "100000"
    make_task(tmp_path / "slow", toml="[verifier]\ntimeout_sec = 1.0\n", test="echo busy; sleep 30")
    make_task(tmp_path / "silent", test="echo nothing; exit 4", toml="[verifier]\ntimeout_sec = 9\n")
    for name, message in (("slow", "took too long"), ("silent", "status 4")):
        assert rollout(environments(tmp_path), [], tmp_path, name)[1] == {"reward": 0.0}
        assert message in caplog.text and name in caplog.text
    # The tests of a task pay.
    median = "{ v[NR] = $1 }\nEND { h = int(NR / 2); print NR % 2 ? v[h + 1] : (v[h] + v[h + 1]) / 2 }"
    for name, command, paid in (
        ("total", "echo 42 > /app/sum.txt", {"reward": 0.5, "sum": 1.0, "count": 0.0}),
        ("median", f"cat > /app/median.awk <<'END'\n{median}\nEND", {"reward": 1.0}),
        ("greeting", "true", {"reward": 0.0}),
    ):
        assert rollout(environments(), [command], name=name)[1] == paid, name


def test_a_policy_sees_no_tests_and_plants_no_reward(environments, tmp_path):
    """Neither the tests nor the directory of the task can be read; what stands where they go is removed."""
    test = "#!/bin/bash\n[ -e /tests/planted ] && exit 1\n[ -e /app/done ] && echo 1 > /logs/verifier/reward.txt\n"
    make_task(tmp_path / "secret", test=test, toml="[verifier]\ntimeout_sec = 9\n")
    attempts = [
        f"ls /tests {tmp_path}",
        "mkdir -p /tests /logs/verifier; echo 9 > /logs/verifier/reward.txt; echo 1 > /tests/planted",
        "rm -rf /scratch/logs; ln -s /app /scratch/logs",
        "(while true; do echo 5 > /logs/verifier/reward.txt; done) &",
        "cp -r /app /scratch/.git; chmod 000 /app; kill -9 $PPID 2>/dev/null; echo still",
    ]
    printed, rewards = rollout(environments(tmp_path), attempts, tmp_path)
    assert "test.sh" not in printed[0] and rewards == {"reward": 0.0}
    assert rollout(environments(tmp_path), ["touch /app/done"], tmp_path)[1] == {"reward": 1.0}


def test_the_time_of_a_task_ends_its_commands(environments, tmp_path):
    make_task(tmp_path / "short", toml="[agent]\ntimeout_sec = 1.0\n[verifier]\ntimeout_sec = 9\n")

    async def step():
        instance = environments(tmp_path)()
        instance.reset(next(harbor_problems(str(tmp_path))))
        assert await instance.step(Turn(0, 0, "")) is None
        printed = [await instance.bash("sleep 5"), await instance.bash("echo more")]
        assert "[ended after" in printed[0] and printed[1] == "the time for this task is over"
        assert await instance.get_reward() == {"reward": 1.0}
        return await instance.step(Turn(0, 0, ""))

    assert asyncio.run(step()).done


def test_variables_and_files_of_a_task(environments, tmp_path):
    """Dockerfiles as people write them: variables, defaults of arguments, patterns, quotes, folders below the current
    one, a mark at the beginning. What the verifier knows, the policy does not."""
    docker = "\ufeffFROM x\nARG PART=in\nENV ROOT=/app NAME='a b'\nENV PATH=\"$ROOT/bin:${PATH}\" LEVEL=${NONE:-3}\n"
    docker += "WORKDIR\t$ROOT/work\nRUN mkdir -p deep/er /app/other\nCOPY --link a.txt 'b.'* /app/${PART}/\n"
    docker += 'COPY --chown=me:me bin/ /app/bin/\nCOPY ["sub", "copied"]\nCOPY [h]ttp.txt "/app/in/"\n'
    files = {f"environment__{name}": name for name in ("a.txt", "b.txt", "http.txt", "sub__task.toml")}
    files |= {"environment__Dockerfile": docker, "environment__bin__tool": "#!/bin/sh\necho tool $LEVEL $MODE\n"}
    toml = '[verifier]\ntimeout_sec = 9\nenv = { KEY = "k" }\n[environment]\nenv = { MODE = "m" }\nmemory = "1G"\n'
    test = "#!/bin/bash\n[ $KEY$MODE$LEVEL = km3 ] && echo 0.25 > /logs/verifier/reward.txt"
    task = read_task(make_task(tmp_path / "t", toml=f"{toml}[metadata]\nlevel = 2\n", test=test, **files))
    assert (task.workdir, task.memory_mb, task.needs_container) == ("/app/work", 1024, "")
    (tmp_path / "t" / "environment" / "bin" / "tool").chmod(0o755)
    (problem,) = harbor_problems(str(tmp_path))  # a file of its own is no further task
    assert problem.extra["level"] == 2
    looks = ['pwd -P; tool; echo "$NAME$KEY"; ls /app; ls', "cat copied/*; cat /app/in/*"]
    printed, rewards = rollout(environments(tmp_path), looks, tmp_path)
    (here, *rest), last = (text.split("\n") for text in printed)
    assert here.endswith("/app/work") and last == ["sub__task.tomla.txtb.txthttp.txt"]
    assert rest == ["tool 3 m", "a b", "bin", "in", "other", "work", "copied", "deep", ""]
    assert rewards == {"reward": 0.25}


def dockerfile(line):
    return {"environment__Dockerfile": f"FROM x\n{line}\n"}


WRONG = [
    ({"toml": "[agent]\ntimeout_sec = -1\n"}, "timeout_sec = -1"),
    ({"toml": "[verifier]\ntimeout_sec = 899\n"}, r"environment\.timeout_s = 900 ends it; must be 5 more"),
    ({"toml": "verifier = 3\n"}, "must be a table"),
    ({"toml": '[[steps]]\nname = "one"\n'}, "several steps, which are not served"),
    ({"toml": '[environment]\ndocker_image = "x"\n'}, "names an image"),
    ({"environment__docker-compose.yaml": ""}, "services of its own"),
    ({"toml": '[environment]\nmemory = "much"\n'}, r"memory = 'much'; must be a size such as \"2G\""),
    (dockerfile("RUN apt-get install -y git"), "needs a container: its Dockerfile has"),
    (dockerfile("COPY --chown=me --from=other /x /app/"), "needs a container: its Dockerfile has 'COPY --chown=me"),
    (dockerfile("WORKDIR /srv"), "it uses /srv"),
    (dockerfile("COPY a.txt"), "names no file or no target"),
    (dockerfile("COPY gone.txt ."), "does not exist"),
    (dockerfile("COPY ../../../etc/passwd ."), "lies outside"),
    ({}, r"no tests/test\.sh"),
]


@pytest.mark.parametrize(("files", "message"), WRONG, ids=str)
def test_a_task_that_cannot_run_is_refused_at_the_start(tmp_path, files, message):
    make_task(tmp_path / "t", **files)
    if not files:
        (tmp_path / "t" / "tests" / "test.sh").unlink()
    with pytest.raises(ValueError, match=message):
        harbor_class(EnvironmentHarbor(tasks=str(tmp_path)))


def test_sources_and_settings(environments, tmp_path, monkeypatch):
    stream = make_problem_stream(DataConfig(sources=(f"harbor:{TASKS}",), shuffle=False), problems=3, seed=0)
    problems = next(stream)
    assert [problem.uid for problem in problems] == ["harbor/greeting", "harbor/median", "harbor/total"]
    assert problems[0].prompt.startswith("Write the word") and problems[0].extra["difficulty"] == "easy"
    make_task(tmp_path / "c", instruction="<!-- harbor-canary GUID x -->\n# canary 2\n\nReal.\n")
    assert [problem.prompt for problem in harbor_problems(str(tmp_path))] == ["Real."]
    with pytest.raises(ValueError, match="no task below it"):
        list(harbor_problems(str(tmp_path / "none")))
    with pytest.raises(ValueError, match=r"environment\.tasks does not hold"):
        environments()().reset(next(harbor_problems(str(tmp_path))))
    make_task(tmp_path / "again" / "c")
    with pytest.raises(ValueError, match="two tasks are named 'c'"):
        list(harbor_problems(str(tmp_path)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no command `docker`"):
        harbor_class(EnvironmentHarbor(tasks=str(TASKS), container="docker"))


def test_the_memory_of_a_task_and_rewards_as_text_and_as_json(tmp_path):
    for size, megabytes in {"": 512, 'memory = "2.5G"': 2560, "memory_mb = 1": 64}.items():
        assert read_task(make_task(tmp_path / "t", toml=f"[environment]\n{size}\n")).memory_mb == megabytes, size
    for as_json, as_text, wanted in (
        (None, "0.5\n", {"reward": 0.5}),
        ('{"reward": 1, "style": 0.25}', "0", {"reward": 1.0, "style": 0.25}),
        ('{"a": 1, "b": 0, "note": "x"}', None, {"reward": 0.5, "a": 1.0, "b": 0.0}),
        ("0.75", None, {"reward": 0.75}),
        ('{"reward": null, "passed": 12}', None, {"reward": 0.0, "passed": 12.0}),
        ('{"reward": true, "a": 1e999}', None, {"reward": 1.0}),
        *((*both, {"reward": 0.0}) for both in (("{", "1"), ("[1]", "1"), (None, "inf"), (None, "yes"), (None, None))),
    ):
        assert read_reward(as_json, as_text)[0] == wanted, as_json


DOCKER = r"""#!/bin/bash
# Stands for docker: the container is the directory $HERE, below which its absolute paths are.
echo "$@" >> $HERE/log
case $1 in
  run) mkdir -p $HERE/app ;;
  cp) cp -r "$2" $HERE${3#*:} && sed -i "s:/logs:$HERE/logs:" $HERE/tests/* 2>/dev/null || true ;;
  exec)
    cd $HERE/app && shift 2
    for folder in app tests logs; do set -- "${@//\/$folder/$HERE/$folder}"; done
    "$@" ;;
esac
"""


def test_containers_by_the_command_docker(tmp_path, monkeypatch):
    """A script in place of docker. A command is late where it outlived its time, whatever its exit status says."""
    (docker := tmp_path / "docker").write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))

    def played(name, commands, command_s=60.0, **files):
        make_task(tmp_path / name / "one", **files)
        choice = EnvironmentHarbor(tasks=str(tmp_path / name), container="docker", command_s=command_s)
        return rollout(harbor_class(choice), commands, tmp_path / name)

    test, commands = "[ -e x ] && echo 0.5 > /logs/verifier/reward.txt\n", ["echo $((6 * 7)); touch x", "exit 2"]
    printed = played("built", commands, test=test, **dockerfile("RUN apt-get install git"))
    assert printed == (["42\n", "[exit status 2]"], {"reward": 0.5})
    toml, late = '[environment]\ndocker_image = "image"\nworkdir = "/srv"\n', "[ended after 1 s]"
    commands = ["cat a/b", "trap '' TERM; sleep 9", "sleep 9", "exit 124"]
    printed, _ = played("named", commands, command_s=1.0, toml=toml, environment__a__b="text")
    assert printed[::3] == ["text", "[exit status 124]"] and all(text.endswith(late) for text in printed[1:3])
    build, *_ = calls = (tmp_path / "log").read_text().splitlines()
    assert build.startswith("build -q -t grpo-roc-one ")
    first, second = (call for call in calls if call.startswith("run"))
    assert first.endswith(" --network none grpo-roc-one sleep infinity")
    assert second.endswith(" --network none -w /srv image sleep infinity")
    with pytest.raises(ValueError, match="neither environment/Dockerfile nor"):
        played("bare", [])


@pytest.mark.slow
def test_three_tasks_train(tmp_path):
    """Two steps: rollouts of a policy that knows nothing are cut, their tests run, and rewards arrive by name."""
    words = [f"--data.sources=harbor:{TASKS}", "--data.eval_problems=0", "--environment.kind=harbor"]
    words += [f"--environment.tasks={TASKS}", "--reward.functions=environment", "--sft.steps=0", "--steps=2"]
    words += [f"--run_dir={tmp_path / 'run'}", "--rollout.max_prompt_tokens=1024", "--batch.row_length=1280"]
    g.train_policy(g.read_config("toy.yaml", *TINY, *words, "--reward.truncated=score"))
    steps = [row for row in read_metrics(tmp_path / "run") if "rollout/reward" in row]
    assert len(steps) == 2 and all(step.get("environment/faults", 0) == 0 for step in steps)
    assert any(step.get("environment/sum") == 0 for step in steps)
    assert any(0 < step["rollout/reward"] <= 0.67 for step in steps), "the untouched median passes two of three cases"

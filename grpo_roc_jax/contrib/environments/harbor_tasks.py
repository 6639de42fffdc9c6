"""Task directories of Harbor (Terminal-Bench's successor): `instruction.md`, `task.toml`, `environment/`, `tests/`.

`harbor:DIR` as a data source makes a problem of each task below a directory. As an environment the policy gets one
tool, `bash`, in a workspace of its own for each rollout: a session of the sandbox, or a container. When the rollout
ends, `tests/` is put there, `tests/test.sh` runs, and what it writes to `/logs/verifier/reward.json` or `reward.txt`
is the reward.
Form: harborframework.com/docs/tasks.
"""

import asyncio
import atexit
import base64
import contextlib
import io
import itertools
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from grpo_roc_jax.environments.config import EnvironmentHarbor
from grpo_roc_jax.environments.environment import Environment, Observation
from grpo_roc_jax.sandbox import Executor, ExecutorSettings, Program, ProgramLimits
from grpo_roc_jax.sandbox.isolation import readable_paths
from grpo_roc_jax.sandbox.result import INFRA_KINDS
from grpo_roc_jax.tools.registry import ToolUnavailable
from grpo_roc_jax.types import Problem, Turn

log = logging.getLogger(__name__)
LINKS = ("app", "tests", "logs", "workspace")
"""Directories at the root that a rollout may write in the sandbox."""
IGNORED = ("FROM", "ENV", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "USER", "ARG", "SHELL", "MAINTAINER", "STOPSIGNAL")
"""Instructions of a Dockerfile that change no file; `ENV` is read."""
SEARCHED = "/usr/local/bin:/usr/bin:/bin"
"""Where commands are found in the sandbox."""
AGENT_S, VERIFIER_S = 600.0, 600.0
"""Harbor's own defaults of `[agent] timeout_sec` and `[verifier] timeout_sec`."""
MARGIN_S = 5.0
"""What starting and reading take besides the tests."""
MOST_OUTPUT = 20_000
"""Characters of the output of a command; the middle of a longer one is left out."""
MOST_FILES_MB = 8
"""Of the files of a task, packed."""
MOST_REWARD = 1 << 16
"""Bytes of a file with a reward."""


@dataclass(frozen=True)
class HarborTask:
    """A task directory, read."""

    path: Path
    instruction: str
    agent_s: float
    """Seconds that the policy has."""
    verifier_s: float
    """Seconds that its tests have."""
    workdir: str = "/app"
    container_workdir: str = ""
    """`[environment] workdir` of its `task.toml`; empty leaves a container in the directory of its image."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of commands and tests."""
    image_variables: Mapping[str, str] = field(default_factory=dict)
    """Those of `ENV` in its Dockerfile, which an image has by itself."""
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int = 512
    storage_mb: int = 256
    image: str = ""
    """Container image, if the task names one."""
    copies: tuple[tuple[str, str], ...] = ()
    """(path below `environment/`, absolute target) of the files that a workspace begins with."""
    needs_container: str = ""
    """Why it cannot run in the sandbox; empty if it can."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def has_dockerfile(self) -> bool:
        return (self.path / "environment" / "Dockerfile").is_file()


# ---- reading -------------------------------------------------------------------------------------------------------


def task_folders(directory: str) -> list[Path]:
    """The task directories at or below a directory, by name.

    Raises:
        ValueError: There is none.
    """
    root, folders = Path(directory).expanduser(), []
    for path in sorted(root.rglob("task.toml"), key=lambda path: path.parent.parts) if root.is_dir() else ():
        if path.is_file() and not any(path.is_relative_to(folder) for folder in folders):  # not a file of another task
            folders.append(path.parent)
    if not folders:
        raise ValueError(f"harbor:{directory}: no task below it; each is a directory with task.toml and instruction.md")
    return folders


def read_task(path: Path) -> HarborTask:
    """A task directory.

    Raises:
        ValueError: A file is missing or malformed, or the task needs what is not served.
    """
    try:
        settings = tomllib.loads((path / "task.toml").read_text(encoding="utf-8-sig"))
        if settings.get("steps"):
            raise ValueError("it has several steps, which are not served; leave it out")
        instruction = (path / "instruction.md").read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        steps = "; tasks of several steps are not served" if (path / "steps").is_dir() else ""
        raise ValueError(f"task {path}: {error}{steps}") from None
    if not (path / "tests" / "test.sh").is_file():
        raise ValueError(f"task {path}: there is no tests/test.sh, which writes the reward")
    agent, verifier, machine = (_section(settings, name, path) for name in ("agent", "verifier", "environment"))
    try:
        docker = _dockerfile(path / "environment")
    except (OSError, ValueError) as error:
        raise ValueError(f"task {path}: environment/Dockerfile: {error}") from None
    multiple = any((path / "environment" / name).is_file() for name in ("docker-compose.yaml", "docker-compose.yml"))
    why = "it has services of its own (docker-compose)" if multiple else docker.needs_container
    if not docker.exists and machine.get("docker_image"):
        why = why or f"it names an image, {machine['docker_image']}"
    return HarborTask(
        path,
        _without_canary(instruction),
        _seconds(agent, "agent", AGENT_S, path),
        _seconds(verifier, "verifier", VERIFIER_S, path),
        str(machine.get("workdir") or docker.workdir),
        str(machine.get("workdir") or ""),
        _variables(machine, path),
        docker.variables,
        _variables(verifier, path),
        memory_mb=_megabytes(machine, "memory", 512, path),
        storage_mb=min(_megabytes(machine, "storage", 256, path), 1024),
        image=str(machine.get("docker_image") or ""),
        copies=docker.copies,
        needs_container=why,
        metadata=_section(settings, "metadata", path),
    )


def harbor_problems(directory: str) -> Iterator[Problem]:
    """A problem for each task; its column `harbor_task` says where it is."""
    folders = task_folders(directory)
    names = [path.name for path in folders]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"harbor:{directory}: two tasks are named {twice!r}; their directories must differ")
    for path in folders:
        task = read_task(path)
        known = {name: value for name, value in task.metadata.items() if isinstance(value, str | int | float)}
        extra = {**known, "harbor_task": str(path.resolve())}
        yield Problem(f"harbor/{task.name}", task.instruction, "", Path(directory).name or "harbor", extra)


def _section(settings: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"task {path}: [{name}] of task.toml is {type(section).__name__}; must be a table")
    return section


def _seconds(section: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = section.get("timeout_sec", default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"task {path}: [{name}] timeout_sec = {value!r}; must be a number of seconds above 0")
    return float(value)


def _variables(section: Mapping[str, Any], path: Path) -> dict[str, str]:
    return {str(name): str(value) for name, value in _section(section, "env", path).items()}


def _megabytes(section: Mapping[str, Any], name: str, default: int, path: Path) -> int:
    """`memory_mb = 2048`, or `memory = "2G"` of older tasks."""
    key = f"{name}_mb" if f"{name}_mb" in section else name
    value = section.get(key, f"{default}M")
    text = str(value).strip() if key == name else f"{value}M"
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", text, re.IGNORECASE)
    if size is None:
        kinds = "a number of megabytes" if key != name else f'a size such as "2G"; or set {name}_mb'
        raise ValueError(f"task {path}: [environment] {key} = {value!r}; must be {kinds}")
    return max(64, int(float(size[1]) * 1024.0 ** ("KMGT".index(size[2].upper()) - 1)))


def _without_canary(text: str) -> str:
    """The instruction without a mark that keeps it out of training corpora, in its first lines."""
    lines = text.lstrip("\n").splitlines(keepends=True)
    while lines and "canary" in lines[0].lower() and lines[0].lstrip().startswith(("<!--", "#")):
        lines = lines[1:]
    return "".join(lines).strip()


@dataclass
class Dockerfile:
    """What the sandbox can do of a Dockerfile."""

    exists: bool = False
    workdir: str = "/app"
    variables: dict[str, str] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    needs_container: str = ""


def _dockerfile(folder: Path) -> Dockerfile:
    dockerfile, path = Dockerfile(), folder / "Dockerfile"
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        dockerfile.copies = tuple((name, f"/app/{name}") for name in names if not name.startswith("docker-compose"))
        return dockerfile
    dockerfile.exists, known = True, {"PATH": SEARCHED}
    for line in re.sub(r"\\\n", " ", path.read_text(encoding="utf-8-sig")).splitlines():
        word, rest = [*line.split(maxsplit=1), "", ""][:2]
        word, rest = word.upper(), rest.strip()
        if not word or word.startswith("#"):
            continue
        if word in ("WORKDIR", "ENV", "ARG", "COPY", "ADD"):
            rest = _expanded(rest, known)
        if word == "WORKDIR":
            dockerfile.workdir = _below(dockerfile.workdir, rest.strip("\"'"))
        elif word in ("ENV", "ARG"):
            pairs = re.findall(r"(\w+)=(\"[^\"]*\"|'[^']*'|\S*)", rest) or [tuple(rest.partition(" ")[::2])]
            values = {name: value.strip().strip("\"'") for name, value in pairs}
            dockerfile.variables |= values if word == "ENV" else {}
            known |= values
        elif word in ("COPY", "ADD") and (names := _copied_names(rest)) is not None:
            *sources, target = names or [""]
            if not sources:
                raise ValueError(f"{line.strip()[:80]!r} names no file or no target")
            for source in sources:
                # as Docker does, a pattern stands for the files that fit it
                matches = sorted(folder.glob(source)) if re.search(r"[*?[]", source) else []
                for name in [str(entry.relative_to(folder)) for entry in matches] or [source]:
                    dockerfile.copies += (_copied(folder, name, target, dockerfile.workdir),)
        elif word == "RUN" and re.fullmatch(r"mkdir( -p)?( [\w./-]+)+", rest):
            names = rest.removeprefix("mkdir").removeprefix(" -p").split()
            dockerfile.copies += tuple(("", _below(dockerfile.workdir, name)) for name in names)
        elif word not in IGNORED:
            dockerfile.needs_container = dockerfile.needs_container or f"its Dockerfile has {line.strip()[:80]!r}"
    return dockerfile


def _expanded(text: str, known: Mapping[str, str]) -> str:
    """A text with the values of variables in it (`$NAME`, `${NAME}`, `${NAME:-else}`); one that is not known is empty,
    as for Docker."""

    def value(match: re.Match[str]) -> str:
        return known.get(match[1] or match[2]) or match[3] or ""

    return re.sub(r"(?<!\\)\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, text)


def _copied_names(text: str) -> list[str] | None:
    """The sources and the target of a COPY or ADD, as words or as a JSON list. None where it takes more than files of
    the folder as they lie there: those of another stage, an address, lines of the Dockerfile itself."""
    while flag := re.match(r"--(\w+)\S*\s*", text):
        if flag[1] not in ("chown", "chmod", "link"):
            return None
        text = text[flag.end() :]
    try:
        names = [str(name) for name in json.loads(text)] if text.startswith("[") else shlex.split(text)
    except json.JSONDecodeError:  # a pattern such as [ab].txt
        names = shlex.split(text)
    return None if any(re.match(r"<<|\w+://|git@", name) for name in names[:-1]) else names


def _below(workdir: str, path: str) -> str:
    return path if path.startswith("/") else f"{workdir.rstrip('/')}/{path.removeprefix('./')}"


def _copied(folder: Path, source: str, target: str, workdir: str) -> tuple[str, str]:
    """(source, absolute target), as COPY does: a file into a directory that ends with a slash or is the current one."""
    absolute = target if target.startswith("/") else f"{workdir.rstrip('/')}/{target}"
    into = target.endswith("/") or target in (".", "./") or absolute.rstrip("/") == workdir.rstrip("/")
    absolute = re.sub(r"/(\./?)?$", "", absolute)
    return source, f"{absolute}/{Path(source).name}" if into and (folder / source).is_file() else absolute


# ---- workspaces ------------------------------------------------------------------------------------------------------


class Workspace(Protocol):
    """Where the commands of one rollout run."""

    async def open(self, task: HarborTask) -> None:
        """Makes it, with the files that the task begins with."""

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        """(exit status, None after `seconds`; output) of a command of the policy."""

    async def verify(self) -> dict[str, Any]:
        """Puts the tests there and runs them: `status`, `output`, and the text of `reward.json` and `reward.txt`."""

    def close(self) -> None:
        """Removes it."""


def packed(folder: Path, pairs: list[tuple[str, str]]) -> str:
    """Files of a folder, as (path in it, path in the archive), as a compressed archive in base64; an empty path makes a
    directory.

    Raises:
        ValueError: They are missing, outside of the folder, or too large.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for source, target in pairs:
            path = (folder / source).resolve()
            if source and not path.is_relative_to(folder.resolve()):
                raise ValueError(f"{folder / source} lies outside of its task; copy it there")
            if not path.exists():
                raise ValueError(f"{folder / source} does not exist")
            info = tarfile.TarInfo(target.strip("/"))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            if source:
                archive.add(path, target.strip("/"), filter=_plain)
            else:
                archive.addfile(info)
    if buffer.tell() > MOST_FILES_MB << 20:
        raise ValueError(
            f"the files of {folder} have {buffer.tell() >> 20} MiB packed; must be at most {MOST_FILES_MB}"
        )
    return base64.b64encode(buffer.getvalue()).decode()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file without its owner and date."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
    return info


COMMON = """
import base64, io, json, os, shutil, subprocess, sys, tarfile

def remove(path):
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)

def unpack(text):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text))) as archive:
        archive.extractall("/scratch", filter="data")
        for member in archive:  # the sandbox ignores chmod, so a program is made as one
            if member.isfile() and member.mode & 0o100:
                path = os.path.join("/scratch", member.name)
                with open(path, "rb") as file:
                    content = file.read()
                os.unlink(path)
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
                    file.write(content)

def read(path):
    try:
        if not os.path.islink(path):
            with open(path, errors="replace") as file:
                return file.read(MOST_REWARD)
    except OSError:
        return None

def run(words, seconds, variables, output):
    place = WORKDIR if os.path.isdir(WORKDIR) else "/scratch"
    with open(output, "wb") as file:
        try:
            return subprocess.run(words, cwd=place, env=variables, timeout=seconds, stdin=subprocess.DEVNULL,
                                  stdout=file, stderr=subprocess.STDOUT, start_new_session=True).returncode
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            file.write(str(error).encode())
            return 126

def cut(path):
    with open(path, "rb") as file:
        size = os.path.getsize(path)
        if size <= MOST:
            return file.read().decode(errors="replace")
        head = file.read(MOST // 2)
        file.seek(size - MOST // 2)
        left = size - MOST
        text = b"\\n[... %d bytes ...]\\n" % left
        return (head + text + file.read()).decode(errors="replace")
"""
"""Runs in the sandbox, before the first command; the policy has `bash` and never this interpreter."""


class SandboxWorkspace:
    """A session of the sandbox, in whose root the directories `LINKS` lead to its own files."""

    def __init__(self, executor: "SharedExecutor"):
        self._shared, self._executor = executor, None
        self._task: HarborTask | None = None
        self._session = f"harbor-{next(_NUMBERS)}"
        self._calls = itertools.count()

    async def open(self, task: HarborTask) -> None:
        self._task, self._executor = task, await asyncio.to_thread(self._shared.started)
        files = packed(task.path / "environment", list(task.copies)) if task.copies else ""
        fixed = f"WORKDIR, MOST, MOST_REWARD = {task.workdir!r}, {MOST_OUTPUT}, {MOST_REWARD}\n"
        made = sorted({"/" + name for name in LINKS} - {"/tests"} | {task.workdir})
        folders = f"for path in {made!r}: os.makedirs(path.replace('/', '/scratch/', 1), exist_ok=True)\n"
        await self._cell(COMMON + fixed + folders + "if (text := sys.stdin.read()): unpack(text)\n", files)

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        task = self._task
        assert task is not None
        path = {"PATH": SEARCHED, "HOME": "/scratch", "LANG": "C.UTF-8", "TMPDIR": "/scratch"}
        return {**path, **task.image_variables, **task.variables, **more}

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        words = ["/bin/bash", "-c", command]
        code = (
            f"status = run({words!r}, {seconds!r}, {self._variables({})!r}, '/scratch/.output')\n"
            "print(json.dumps([status, cut('/scratch/.output')]))\nremove('/scratch/.output')\n"
        )
        answer = await self._cell(code)
        return (None, "") if answer is None else (answer[0], answer[1])

    async def verify(self) -> dict[str, Any]:
        task = self._task
        assert task is not None
        names = sorted(path.name for path in (task.path / "tests").iterdir())
        files = packed(task.path / "tests", [(name, f"tests/{name}") for name in names])
        variables = self._variables(task.verifier_variables)
        code = (
            "for path in ('/scratch/tests', '/scratch/logs', '/scratch/.output'): remove(path)\n"
            "os.makedirs('/scratch/logs/verifier')\nunpack(sys.stdin.read())\n"
            f"status = run(['/bin/bash', '/tests/test.sh'], {task.verifier_s!r}, {variables!r}, '/scratch/.output')\n"
            "found = {name: read('/scratch/logs/verifier/' + name) for name in ('reward.json', 'reward.txt')}\n"
            "print(json.dumps({'status': status, 'output': cut('/scratch/.output')} | found))\n"
        )
        return await self._cell(code, files) or {"status": None, "output": "the sandbox ended the tests"}

    async def _cell(self, code: str, stdin: str = "") -> Any:
        """What a cell prints, as JSON; None where the policy's doing ended it.

        Raises:
            ToolUnavailable: The sandbox failed.
        """
        assert self._executor is not None
        program = Program(f"{self._session}-{next(self._calls)}", code, stdin, self._session)
        result = await self._executor.arun(program)
        if result.kind in INFRA_KINDS:
            raise ToolUnavailable(f"harbor: the sandbox failed: {result.kind} {result.error_message}")
        if result.kind != "ok":
            log.debug("harbor: a cell ended as %s: %s %s", result.kind, result.error_type, result.error_message)
            return None
        return json.loads(result.stdout.strip().splitlines()[-1]) if result.stdout.strip() else None

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close_session(self._session)


_NUMBERS = itertools.count()


class SharedExecutor:
    """The executor of all rollouts of a process, started with the first one."""

    def __init__(self, limits: ProgramLimits):
        self.limits, self._lock, self._executor = limits, threading.Lock(), None

    def started(self) -> Executor:
        """Raises ToolUnavailable if the machine offers no isolation of level L3."""
        with self._lock:
            if self._executor is None:
                paths = tuple(path for path in ("/usr", "/bin", "/etc/alternatives") if os.path.exists(path))
                settings = ExecutorSettings(
                    limits=self.limits, min_level="L3", preload=(), bare_root=False, read_paths=paths, links=LINKS
                )
                executor = Executor(settings)
                try:
                    executor.start()
                except Exception as error:
                    raise ToolUnavailable(f"harbor: the sandbox does not start: {error}") from error
                atexit.register(executor.close)
                self._executor = executor
            return self._executor


class DockerWorkspace:
    """A container, by the command `docker`."""

    def __init__(self) -> None:
        self._name, self._task = "", None

    async def open(self, task: HarborTask) -> None:
        self._task = task
        image = task.image or f"grpo-roc-{re.sub(r'[^a-z0-9._-]', '-', task.name.lower())}"
        if not task.image:
            await self._docker("build", "-q", "-t", image, str(task.path / "environment"), seconds=1800)
        self._name = f"grpo-roc-harbor-{os.getpid()}-{next(_NUMBERS)}"
        words = ["--memory", f"{task.memory_mb}m", "--network", "none"]
        words += ["-w", task.container_workdir] if task.container_workdir else []
        await self._docker("run", "-d", "--rm", "--name", self._name, *words, image, "sleep", "infinity")
        for source, target in () if task.has_dockerfile else task.copies:
            parent = str(Path(target).parent)
            await self._execute(["mkdir", "-p", parent], 30, {})
            await self._docker("cp", str(task.path / "environment" / source), f"{self._name}:{parent}")

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        return await self._execute(["bash", "-c", command], seconds, {})

    async def verify(self) -> dict[str, Any]:
        task = self._task
        assert task is not None
        await self._execute(["rm", "-rf", "/tests", "/logs/verifier"], 30, {})
        await self._execute(["mkdir", "-p", "/logs/verifier"], 30, {})
        await self._docker("cp", str(task.path / "tests"), f"{self._name}:/tests")
        status, output = await self._execute(["bash", "/tests/test.sh"], task.verifier_s, task.verifier_variables)
        results: dict[str, Any] = {"status": status, "output": output}
        for name in ("reward.json", "reward.txt"):
            code, text = await self._execute(["head", "-c", str(MOST_REWARD), f"/logs/verifier/{name}"], 30, {})
            results[name] = text if code == 0 else None
        return results

    async def _execute(self, words: list[str], seconds: float, more: Mapping[str, str]) -> tuple[int | None, str]:
        task = self._task
        assert task is not None
        variables = [word for pair in {**task.variables, **more}.items() for word in ("-e", "=".join(pair))]
        limit, started = f"{seconds:g}", time.monotonic()
        inside = ["timeout", "-k", "1", limit, *words]
        status, output = await _called("docker", "exec", *variables, self._name, *inside, seconds=seconds + MARGIN_S)
        late = status in (124, 137) and time.monotonic() - started >= float(limit)  # either can be the command's
        return (None if late else status), _shortened(output)

    async def _docker(self, *words: str, seconds: float = 120.0) -> str:
        status, output = await _called("docker", *words, seconds=seconds)
        if status != 0:
            raise ToolUnavailable(f"harbor: docker {words[0]} failed: {output.strip()[-300:]}")
        return output

    def close(self) -> None:
        if self._name:
            with contextlib.suppress(OSError):
                os.posix_spawnp("docker", ["docker", "rm", "-f", self._name], os.environ, setpgroup=0)


async def _called(*words: str, seconds: float) -> tuple[int | None, str]:
    """(exit status, None if it took too long; output) of a command on the host."""
    child = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), seconds)
    except TimeoutError:
        child.kill()
        await child.wait()
        return None, ""
    return child.returncode, output.decode(errors="replace")


def _shortened(text: str) -> str:
    half, left = MOST_OUTPUT // 2, len(text) - MOST_OUTPUT
    return text if left <= 0 else f"{text[:half]}\n[... {left} characters ...]\n{text[-half:]}"


# ---- the environment -----------------------------------------------------------------------------------------------


class HarborEnvironment(Environment):
    """One rollout in a task."""

    choice: ClassVar[EnvironmentHarbor]
    executor: ClassVar[SharedExecutor]
    tasks: ClassVar[Mapping[str, HarborTask]] = {}
    """By their directories."""

    _workspace: Workspace | None = None
    _begun_s = 0.0

    def reset(self, problem: Problem) -> None:
        """Reads the task; its workspace is made by the first command, or by the tests."""
        folder = problem.extra.get("harbor_task")
        if folder not in self.tasks:
            raise ValueError(
                f"problem {problem.uid!r} is of the task {folder!r}, which environment.tasks does not hold; name the "
                "same directory there and in data.sources harbor:DIR"
            )
        self._task = self.tasks[folder]

    async def bash(self, command: str) -> str:
        """Runs a command in a shell and returns what it prints. Files stay, variables and directories do not.

        Args:
            command: The command, which may have several lines.
        """
        workspace = await self._opened()
        left = self._begun_s + self._task.agent_s - time.monotonic()
        if left <= 0:
            return "the time for this task is over"
        seconds = min(self.choice.command_s, left)
        status, output = await workspace.run(command, seconds)
        if status is None:
            return f"{output}\n[ended after {seconds:.0f} s]".lstrip("\n")
        return output if status == 0 else f"{output}\n[exit status {status}]".lstrip("\n")

    async def step(self, turn: Turn) -> Observation | None:
        """A turn without a call ends the rollout, and so does the end of the task's time."""
        over = self._workspace is not None and time.monotonic() > self._begun_s + self._task.agent_s
        return Observation(done=True) if over else None

    async def get_reward(self) -> dict[str, float | None]:
        """Runs the tests: `reward` and whatever else they write by name; 0 where they write nothing."""
        workspace = await self._opened()
        results = await workspace.verify()
        numbers, wrong = read_reward(results.get("reward.json"), results.get("reward.txt"))
        if wrong:
            after = "took too long" if results["status"] is None else f"ended with status {results['status']}"
            last = " ".join(str(results["output"]).strip()[-300:].split())
            log.warning("task %s: %s; its tests %s, so the reward is 0: %s", self._task.name, wrong, after, last)
        return {**numbers}

    async def _opened(self) -> Workspace:
        if self._workspace is None:
            workspace = self.new_workspace()
            try:
                await workspace.open(self._task)
            except BaseException as error:
                workspace.close()
                if isinstance(error, ValueError):
                    raise ToolUnavailable(f"task {self._task.name}: {error}") from error
                raise
            self._workspace, self._begun_s = workspace, time.monotonic()
        return self._workspace

    @classmethod
    def new_workspace(cls) -> Workspace:
        """Where a rollout works, not open yet."""
        return DockerWorkspace() if cls.choice.container == "docker" else SandboxWorkspace(cls.executor)

    def close(self) -> None:
        if self._workspace is not None:
            self._workspace.close()


def read_reward(as_json: str | None, as_text: str | None) -> tuple[dict[str, float], str]:
    """(numbers by name, `reward` among them; what is wrong with the files).

    `reward.json` counts before `reward.txt`. Without a `reward` in it, the reward is the mean of its numbers.
    """
    if as_json is not None:
        try:
            value = json.loads(as_json)
        except (ValueError, RecursionError):
            return {"reward": 0.0}, "reward.json is no JSON"
        value = value if isinstance(value, dict) else {"reward": value}
        numbers = {
            str(name): float(number)
            for name, number in value.items()
            if isinstance(number, int | float) and abs(number) <= sys.float_info.max
        }
        if not numbers:
            return {"reward": 0.0}, "reward.json holds no number"
        if "reward" in value and "reward" not in numbers:
            fault = f"reward.json holds the reward {value['reward']!r:.40}, which is no number"
            return {**numbers, "reward": 0.0}, fault
        return {"reward": sum(numbers.values()) / len(numbers), **numbers}, ""
    if as_text is not None:
        try:
            number = float(as_text.strip())
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return {"reward": number}, ""
        return {"reward": 0.0}, f"reward.txt holds {as_text[:40]!r}, which is no number"
    return {"reward": 0.0}, "there is no /logs/verifier/reward.json or reward.txt"


def harbor_class(choice: EnvironmentHarbor) -> type[HarborEnvironment]:
    """The environment of the tasks of a directory, all of which are read.

    Raises:
        ValueError: One cannot run as the settings say.
    """
    tasks = [read_task(path) for path in task_folders(choice.tasks)]
    for task in tasks:
        if task.verifier_s + MARGIN_S > choice.timeout_s:
            raise ValueError(
                f"task {task.name}: [verifier] timeout_sec = {task.verifier_s:g} in its task.toml, but "
                f"environment.timeout_s = {choice.timeout_s:g} ends it; must be {MARGIN_S:g} more: raise the setting"
            )
    if choice.container == "docker":
        if shutil.which("docker") is None:
            raise ValueError(
                "environment.container docker: there is no command `docker` on this machine; install Docker, or set "
                "sandbox for tasks that need no image"
            )
        for task in tasks:
            if not (task.image or task.has_dockerfile):
                raise ValueError(
                    f"task {task.name} has neither environment/Dockerfile nor [environment] docker_image, one of which "
                    "environment.container docker needs; add one, or set sandbox"
                )
    else:
        _check_sandbox(tasks)
    most = max(max(task.verifier_s for task in tasks), choice.command_s) + MARGIN_S
    limits = ProgramLimits(
        wall_s=most,
        cpu_s=most,
        memory_mb=max(task.memory_mb for task in tasks),
        scratch_mb=max(task.storage_mb for task in tasks),
        scratch_files=1 << 16,
        file_mb=max(task.storage_mb for task in tasks),
        descriptors=256,
        processes=choice.processes,
    )
    shared = {"choice": choice, "executor": SharedExecutor(limits)}
    known = {str(task.path.resolve()): task for task in tasks}
    return type("HarborEnvironment", (HarborEnvironment,), {**shared, "tasks": known})


def _check_sandbox(tasks: list[HarborTask]) -> None:
    for task in tasks:
        places = [task.workdir, *(target for _, target in task.copies)]
        outside = next((place for place in places if not place.startswith(tuple(f"/{name}" for name in LINKS))), "")
        why = task.needs_container or (f"it uses {outside}" if outside else "")
        if why:
            raise ValueError(
                f"task {task.name} needs a container: {why}. The sandbox copies files into "
                f"{', '.join('/' + name for name in LINKS)} and takes the programs of this machine; set "
                "environment.container docker, or leave the task out"
            )
        if task.copies:
            packed(task.path / "environment", list(task.copies))
    covered = [
        path for path in readable_paths() for name in LINKS if path.startswith(f"/{name}/") or path == f"/{name}"
    ]
    if covered:
        raise ValueError(
            f"the interpreter of this run lies in {covered[0]}, where tasks have their files; set "
            "environment.container docker, or install it elsewhere"
        )

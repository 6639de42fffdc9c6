"""Settings seen on the host: dialogue, data, verdicts, the supervised stage, the run directory and its files."""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp

from grpo_roc_jax import train
from grpo_roc_jax.commands.export import text_files
from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.update import TrainState
from grpo_roc_jax.pod import processes
from grpo_roc_jax.process.points import listening, reach
from grpo_roc_jax.record import loggers
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.reward import verify
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.reward.trial import sample_trajectories
from grpo_roc_jax.run import session, start
from grpo_roc_jax.run.components import make_registry, resolve_text
from grpo_roc_jax.run.watch import RULES, Alarms, Stopped, Watch, Watchdog
from grpo_roc_jax.text.chat_format import Trace, make_chat
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem, Turn
from tests.helpers.knobs import Seen, digest, files, only, seen
from tests.helpers.knobs_step import scripted_parts, scripted_programs
from tests.text.test_templates import make_directory

TEMPLATES = Path(__file__).parent.parent / "text" / "templates"

# ---- text ----------------------------------------------------------------------------------------------------------

ADDED = ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CALL = '<tool_call>{"name": "python_code_with_standard_io", "arguments": {"code": "1"}}</tool_call>'


@functools.cache
def tokenizer_folder(template: str) -> Path:
    """A published-looking directory: bytes with added tokens, and a chat template."""
    folder = files() / f"tokenizer_{template}"
    folder.mkdir(exist_ok=True)  # the module may be imported under two names
    return make_directory(folder, template, added=ADDED)


def dialogue(config: Config) -> Any:
    """Ids of a prompt, a turn and observations, the parsed calls of a turn, and the text files of an export."""
    for name in ("chatml_tools", "thinking"):
        tokenizer_folder(name)
    text = resolve_text(config)
    tokenizer = load_tokenizer(text)
    try:
        schemas = make_registry(config).schemas
        chat = make_chat(text, tokenizer, schemas)
        exported = text_files(text, tokenizer, schemas)
    except ValueError as error:
        return f"refused: {error}"
    problem = Problem("p", "What is 6 * 7?", "42", "s")
    turn = chat.turn_ids(f"so</reason>{CALL}\n{CALL}")
    row = chat.trace_row(Trace(problem, (f"so</reason>{CALL}", "<answer>7</answer>"), (("7 " * 300,),)))
    text = f"so {CALL}\n{CALL} ```tool_code\nf(a=1)\n```"
    both = chat.parse_turn([*tokenizer.encode(text), tokenizer.eos_id])
    ends = (chat.end_id, sorted(chat.stop_ids), chat.stop_texts, tokenizer.eos_id, exported.pad_id, exported.files)
    return digest(chat.prompt_ids(problem), turn, row, both, chat.observation_ids(["a", "b\n" * 200]), ends)


JSON = {"text.tokenizer": {"kind": "file", "path": "{files}/tokenizer_chatml_tools"}}
THINKING = {"text.tokenizer": "{files}/tokenizer_thinking", "text.template": "model"}
QWEN = THINKING | {"text.template.file": str(TEMPLATES / "qwen3_5.jinja")}
# ---- reward --------------------------------------------------------------------------------------------------------


class ScriptedWorker:
    """Replaces a verification process: each comparison is correct, but takes longer than the first look."""

    started: ClassVar[list[list[str]]] = []
    limits: ClassVar[set[float]] = set()
    returncode, pid = 0, -1

    def __init__(self, command: list[str], **_: Any):
        self.started.append(command[-1:])
        (down, inward), (outward, up) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(inward, "wb"), os.fdopen(outward, "rb")
        threading.Thread(target=self.serve, args=(os.fdopen(down), os.fdopen(up, "wb", 0)), daemon=True).start()

    def serve(self, down: Any, up: Any) -> None:
        with down, up:
            up.write(b'["ready", "seccomp"]\n')
            for line in down:
                self.limits.add(limit := json.loads(line)["limit_s"])
                up.write(b'"timeout"\n' if limit == verify.FIRST_LOOK_S else b'"correct"\n')

    def wait(self, timeout: float | None = None) -> int:
        return 0

    poll = wait


def slow(problem: Problem, trajectories: Any) -> list[float]:
    threading.Event().wait(0.05)
    return [1.0] * len(trajectories)


def fast(problem: Problem, trajectories: Any) -> list[float]:
    return [0.5] * len(trajectories)


def lenient(criterion: str, problem: Problem, reply: str) -> float:
    threading.Event().wait(0.01)
    return 0.5


def verify_threads() -> set[threading.Thread]:
    """The threads of verification workers."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("verify-")}


def judged(config: Config) -> Any:
    """Verdicts on fixed trajectories, and how the verification processes were started."""
    rows = list(sample_trajectories().values())
    texts = [
        "<answer>42</answer>",
        "the answer is 42",
        r"<result>\boxed{42}</result>",
        r"<answer>\boxed{x + x}</answer>",
        r"<answer>\boxed{42\%}</answer>",
        r"<answer>\boxed{2x, 42}</answer>",
        r"<answer>\boxed{0, 2, 1}</answer>",
    ]
    rows += [replace(rows[0], turns=(Turn(0, 4, text),)) for text in texts]
    rows.append(replace(rows[0], stop="length"))
    rows = [replace(row, reward=0.7) for row in rows]
    ScriptedWorker.started, ScriptedWorker.limits = [], set()
    with mock.patch.object(subprocess, "Popen", ScriptedWorker):
        scorer = make_scorer(config.reward)
        rubric = {"rubric": ["boxed"], "points": [{"text": "the answer", "weight": 3}]}
        listed = Problem("r", "?", "2, 0, 1", "s", {"years": 8, "months": 1})
        problems = [Problem("p", "?", "42", "s", rubric), Problem("q", "?", "2x", "s"), listed]
        before = verify_threads()
        scored = scorer.score_all(problems, [rows] * len(problems))
        threads = len(verify_threads() - before)
        scorer.close()
    limits = sorted(set(map(tuple, ScriptedWorker.started))), sorted(ScriptedWorker.limits)
    return [group.verdicts for group in scored.groups], scored.faults, limits, threads


# ---- the run -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """An empty working directory."""
    with tempfile.TemporaryDirectory(dir=files()) as folder, contextlib.chdir(folder):
        yield Path(folder)


def small_state(*_: Any, **__: Any) -> TrainState:
    return TrainState(step=jnp.zeros((), jnp.int32), params={"w": jnp.ones(1)}, opt_state={"m": jnp.zeros(1)})


def run(config: Config, times: int = 1) -> Any:
    """The files of consecutive runs, the names and steps of their metrics, the number of lines they showed, what
    Weights & Biases was told, and whether they waited for a notice."""
    printed, service, waiting = io.StringIO(), mock.MagicMock(), set()
    patches = [
        mock.patch.object(session, "make_parts", scripted_parts),
        mock.patch.object(start, "initial_state", small_state),
        mock.patch.object(loggers, "require"),
        mock.patch.dict(sys.modules, {"wandb": service}),
        contextlib.redirect_stdout(printed),
        listening(lambda point: waiting.update({thread.name for thread in threading.enumerate()} & {"notice"})),
        scripted_programs(),
    ]
    with elsewhere() as folder, contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for _ in range(times):
            train.train(config)
        paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
        names = sorted(path for path in paths if not re.search("checkpoints/step_.*/", path))
        rows = [(row["step"], sorted(row)) for path in folder.rglob("metrics.jsonl") for row in read_metrics(path)]
    told = [{name: call.kwargs[name] for name in ("project", "mode")} for call in service.init.mock_calls[:1]]
    return names, rows, told, waiting, len(printed.getvalue().splitlines())


def rerun(config: Config) -> Any:
    return run(config, 2)


def watched(config: Config) -> Any:
    """The step at which each kind of bad run is stopped, and its status."""
    fine = {"loss/value": 0.0, "update/skipped": 0.0, "update/signal": 1.0}
    empty = {"roc/all_correct": 1.0, "roc/all_wrong": 1.0}
    ends = []
    for metrics in (empty, fine | {"update/skipped": 1.0}, fine | {"verdict/infrastructure": 0.3}):
        watch = Watch(config.limits)
        try:
            for _ in range(200):
                watch.look(metrics)
                ends.append("fine")
        except Stopped as error:
            ends.append(error.status)
    return ends


def alarmed(config: Config) -> Any:
    """The times that two points may take, of which one has taken 1,000 s; and the alarms of steps that get worse in
    every respect, up to the one that ends the run."""
    times = itertools.count(0.0, 1e3)
    dog = Watchdog(Path("none"), config.watch, clock=lambda: next(times))
    with dog.watching():
        reach("sample")
        reach("update")
    alarms, raised = Alarms(config.watch), [dog.limit_s("sample"), dog.limit_s("update")]
    for step in range(32):
        bad = max(0, step - 11)
        row = {name: (1.0 - 0.08 * bad) if side == "below" else (1.0 + 0.3 * bad) for _, name, side in RULES}
        row |= {"loss/logprob_gap_mean": 0.001 * bad, "rollout/truncated": 0.04 * bad}
        row["update/grad_norm"] = 1.0 + 0.1 * bad
        try:
            raised.append(alarms.look(step, row))
        except Stopped as error:
            return [*raised, str(error)]
    return raised


# ---- devices -------------------------------------------------------------------------------------------------------


def met(config: Config) -> Any:
    """What JAX learns about the other processes, or why it is refused."""
    environ = {} if config.distributed.kind != "never" else {"JAX_COORDINATOR_ADDRESS": "other:1"}
    initialize = mock.Mock()
    patched = (
        mock.patch.multiple(jax.distributed, initialize=initialize, shutdown=mock.Mock()),
        mock.patch.object(processes, "service", mock.Mock()),
    )
    try:
        with patched[0], patched[1], processes.joined(config.distributed, environ):
            return repr(initialize.mock_calls)
    except ValueError as error:
        return f"refused: {error}"


# ---- cases ---------------------------------------------------------------------------------------------------------

DATED = THINKING | {"text.template.file": str(TEMPLATES / "llama3.jinja")}
TEXT = (
    seen(dialogue, "text", system="default", instruction="default", observation_tokens=32, max_calls_per_turn=2),
    only(dialogue, "text", tokenizer="bytes"),
    only(dialogue, "text", JSON, template="llama3"),
    only(dialogue, "text.tokenizer", JSON, eos_token="<|endoftext|>", pad_token="<|im_start|>"),
    only(dialogue, "text.tokenizer", JSON, path=str(Path(train.__file__).parent / "text" / "toy.model")),
    only(dialogue, "text.tokenizer", JSON, added_tokens=("<|high_reward|>", "<|low_reward|>")),
    only(dialogue, "text.template", THINKING, file=str(TEMPLATES / "chatml_tools.jinja")),
    only(dialogue, "text.template", QWEN, variables=("enable_thinking=false",)),
    only(dialogue, "text.template", DATED, date="2024-02-29"),
)


def judging(*functions: Any) -> dict[str, Any]:
    return {"reward.functions": functions}


HERE = "tests.helpers.knobs_host:"
CRITERIA = judging({"kind": "criteria", "rules": ("answer",)})
LATE = judging({"kind": "criteria", "rules": ("a",), "judge": f"{HERE}lenient"})
TRIAL = judging("environment") | {"environment": "tests.helpers.knobs_tools:Trial"}
REWARD = (
    seen(judged, "reward", functions=("answer", {"kind": "format", "weight": 0.5}, f"{HERE}slow"), answer_tag="result"),
    only(judged, "reward.functions.answer", timeout_s=2.0),
    seen(judged, "reward.truncated.reward", {"reward.truncated": {"kind": "fixed", "reward": 0.1}}),
    seen(judged, "reward.functions.function", judging(f"{HERE}slow"), path=f"{HERE}fast", timeout_s=0.001),
    seen(judged, "reward.functions.several_answers", judging("several_answers"), separator=", 42"),
    seen(judged, "reward.functions.criteria", CRITERIA, rules=("x",), column="points", judge=f"{HERE}lenient"),
    only(judged, "reward.functions.criteria", LATE, timeout_s=0.001),
    seen(judged, "reward.functions.environment", TRIAL, part="speed", success=0.5),
)
QUIET = {"log.console": "off", "data.eval_problems": 0, "data.eval_sources": ()}
RUN = (
    seen(run, "steps log.console log.traces", QUIET),
    only(run, "checkpoint", QUIET, every=1),
    only(run, "checkpoint", QUIET | {"checkpoint.every": 1}, keep=1),
    only(run, "log", QUIET | {"log.console": "plain"}, samples=1),
    only(run, "eval", {"log.console": "off"}, every=1),
    seen(run, "log.tensorboard", QUIET),
    seen(rerun, "resume", QUIET | {"steps": 1}),
    seen(run, "log.wandb", QUIET),
    only(run, "log.wandb", QUIET | {"log.wandb": "offline"}, project="other"),
    seen(watched, "limits"),
    seen(alarmed, "watch", {"watch.grad_norm": 2.0}, stop=("truncated",), reward_spread=0.1, entropy_low=1.2),
    only(alarmed, "watch", {"watch.grad_norm": 2.0}, grad_norm=1.8),
    only(run, "watch", QUIET | {"watch.steps": 3}, notice_url="http://127.0.0.1:9/preempted"),
    Seen(run, ("name", "run_dir"), QUIET, {"name": "other", "run_dir": "here"}),
    Seen(
        lambda config: config.stage_after(None, 0) < len(config.stages or ()),
        (),
        {},
        {"stages": ({"name": "a", "steps": 2},)},
    ),
)
FOUR = {"distributed": {"kind": "address", "coordinator": "here:99", "processes": 4, "process": 1}}
SEEN = (
    *(*TEXT, *REWARD, *RUN),
    seen(met, "distributed", FOUR, coordinator="there:99"),
    Seen(met, (), {}, {"distributed": "cluster"}),
)

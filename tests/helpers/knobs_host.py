"""Settings seen on the host: dialogue, data, verdicts, the supervised stage, the run directory and its files."""

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from grpo_roc_jax import train
from grpo_roc_jax.commands.export import text_files
from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.learner.update import TrainState, make_schedule
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import axes_shardings, make_mesh
from grpo_roc_jax.model.transformer import param_axes
from grpo_roc_jax.pod import processes
from grpo_roc_jax.pod.notice import noticed
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.record import loggers
from grpo_roc_jax.record.checkpoint import Bundle, Checkpointer
from grpo_roc_jax.record.metrics import make_writer, read_metrics
from grpo_roc_jax.reward import verify
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.reward.trial import sample_trajectories
from grpo_roc_jax.run import session, start, supervised
from grpo_roc_jax.run.components import make_registry, resolve_text
from grpo_roc_jax.run.watch import RULES, Alarms, Stopped, Watch, Watchdog
from grpo_roc_jax.text.chat_format import Trace, make_chat
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem, Turn
from tests.helpers.knobs import Seen, digest, files, only, seen, write_lines
from tests.helpers.knobs_step import scripted_parts, scripted_programs

TEMPLATES = Path(__file__).parent.parent / "text" / "templates"

# ---- text ----------------------------------------------------------------------------------------------------------

ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CALL = '<tool_call>{"name": "python_code_with_standard_io", "arguments": {"code": "1"}}</tool_call>'

FORGETS = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content if m.role != 'assistant' or loop.last else m.content.split('</think>')[-1] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""A chat template that drops the thinking of earlier turns."""


@functools.cache
def tokenizer_folder(template: str) -> Path:
    """A published-looking directory: bytes with added tokens, and a chat template."""
    folder = files() / f"tokenizer_{template}"
    folder.mkdir(exist_ok=True)  # the module may be imported under two names
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(ADDED)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return folder


def dialogue(config: Config) -> Any:
    """Ids of a prompt, a turn and observations, the parsed calls of a turn, and the text files of an export."""
    for name in ("chatml_tools", "thinking"):
        tokenizer_folder(name)
    (files() / "forgets.jinja").write_text(FORGETS)
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
# ---- data ----------------------------------------------------------------------------------------------------------


def data(config: Config) -> Any:
    """The first problems and traces of a run, its held-out problems, and the notes of loading."""
    write_lines(files() / "more.jsonl", [{"question": f"How many are {i}?", "answer": str(i)} for i in range(5)])
    bad = [{"question": "q", "answer": None}, {"question": "r", "answer": "1"}]
    write_lines(files() / "bad.jsonl", bad)
    traces = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    write_lines(files() / "traces.jsonl", traces)
    try:
        stream = make_problem_stream(config.data, problems=4, seed=config.seed)
        problems = [next(stream) for _ in range(3)]
        seen = [(p.uid, p.prompt, p.answer) for batch in problems for p in batch]
    except ValueError as error:
        return f"refused: {error}"
    try:
        demonstrated = next(make_trace_stream(config.data, traces=8, seed=config.seed))
    except ValueError as error:  # the files of problems hold no traces
        demonstrated = str(error)
    held_out = [(p.uid, p.prompt) for p in eval_problems(config.data)]
    return digest(seen, stream.notes, held_out, demonstrated)


# ---- reward --------------------------------------------------------------------------------------------------------


class ScriptedWorker:
    """Replaces a verification process: each comparison is correct, but takes longer than the first look."""

    started: ClassVar[list[list[str]]] = []
    limits: ClassVar[set[float]] = set()

    def __init__(self, command: list[str], **_: Any):
        self.started.append(command[-1:])
        down, self.stdin = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        self.stdout, up = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        self.returncode, self.pid = 0, -1

        def serve() -> None:
            with down, up:
                up.write(b'["ready", "seccomp"]\n')
                up.flush()
                for line in down:
                    self.limits.add(limit := json.loads(line)["limit_s"])
                    up.write(b'"timeout"\n' if limit == verify.FIRST_LOOK_S else b'"correct"\n')
                    up.flush()

        threading.Thread(target=serve, daemon=True).start()

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0


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


# ---- the supervised stage ------------------------------------------------------------------------------------------


def taught(config: Config) -> Any:
    """Rows and learning rates of the supervised stage, and what it wrote."""
    batches: list[str] = []
    rates: list[float] = []

    def scripted(model: Any, loss: Any, optim: Any, *_: Any, **__: Any) -> Any:
        rates.extend(float(make_schedule(optim)(i)) for i in range(config.sft.steps))

        def step(state: Any, batch: Any) -> tuple[Any, dict]:
            batches.append(digest([np.asarray(leaf) for leaf in jax.device_get(jax.tree.leaves(batch))]))
            return state, {"loss/nll": 1.0}

        return step

    written: list[int] = []
    writer = SimpleNamespace(say=lambda text: None, write_sft=lambda step, metrics: written.append(step))
    started = mock.Mock(return_value=SimpleNamespace(params="taught"))
    patched = mock.patch.multiple(supervised, make_update_step=scripted, start_train_state=started)
    with scripted_parts(config) as (policy, sampling), patched:
        supervised.supervise(config, policy, sampling.sampler.chat, None, writer)
    return batches, rates, written


# ---- the run -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """An empty working directory."""
    before = Path.cwd()
    folder = Path(tempfile.mkdtemp(dir=files()))
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def small_state(*_: Any, **__: Any) -> TrainState:
    return TrainState(step=jnp.zeros((), jnp.int32), params={"w": jnp.ones(1)}, opt_state={"m": jnp.zeros(1)})


def run_of(config: Config, times: int) -> Any:
    """The files of consecutive runs, the steps in their metrics, and the number of lines they showed."""
    printed = io.StringIO()
    components = mock.patch.object(session, "make_parts", scripted_parts)
    state = mock.patch.object(start, "initial_state", small_state)
    with elsewhere() as folder, contextlib.redirect_stdout(printed), components, state, scripted_programs():
        for _ in range(times):
            train.train(config)
        names = sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if "checkpoints/step_" not in str(path)
        )
        checkpoints = sorted(str(path.relative_to(folder)) for path in folder.rglob("step_*") if path.is_dir())
        rows = [(row["step"], sorted(row)) for path in folder.rglob("metrics.jsonl") for row in read_metrics(path)]
    return names, checkpoints, rows, len(printed.getvalue().splitlines())


def run(config: Config) -> Any:
    return run_of(config, 1)


def rerun(config: Config) -> Any:
    return run_of(config, 2)


def has_stage(config: Config) -> bool:
    return config.stage_after(None, 0) < len(config.stages or ())


def watched(config: Config) -> Any:
    """The step at which each kind of bad run is stopped, and its status."""
    fine = {"loss/value": 0.0, "update/skipped": 0.0, "update/signal": 1.0}
    empty = {"roc/all_correct": 1.0, "roc/all_wrong": 1.0}
    kinds = (empty, fine | {"update/skipped": 1.0}, fine | {"verdict/infrastructure": 0.3})
    ends = []
    for metrics in kinds:
        watch = Watch(config.limits)
        looks = 0
        try:
            while looks < 200:
                looks += 1
                watch.look(metrics)
            ends.append("never")
        except Stopped as error:
            ends.append((looks, error.status))
    return ends


def alarmed(config: Config) -> Any:
    """The alarms of steps that get worse in every respect, up to the one that ends the run."""
    alarms, raised = Alarms(config.watch), []
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


def limited(config: Config) -> Any:
    """The time that two points may take after what they took before."""
    now = [0.0]
    dog = Watchdog(Path("none"), config.watch, clock=lambda: now[0])
    with dog.watching():
        reach("sample")
        now[0] = 1e3
        reach("update")
    return dog.limit_s("sample"), dog.limit_s("update")


def polled(config: Config) -> Any:
    """The addresses that are asked for a notice."""
    seen, asked_once = set(), threading.Event()

    def open_one(request: Any, timeout: float) -> Any:
        seen.add(request.full_url)
        asked_once.set()
        return io.BytesIO(b"FALSE")

    opener = SimpleNamespace(open=open_one)
    with mock.patch("urllib.request.build_opener", lambda *_: opener), noticed(config.watch.notice_url, 0.001):
        asked_once.wait(1.0 if config.watch.notice_url else 0.01)
    return seen


def blocked(config: Config) -> str:
    """The outcome of saving into a directory that cannot be created."""
    with elsewhere() as folder, Checkpointer(folder / "taken" / "x", config.checkpoint) as checkpointer:
        (folder / "taken").write_text("a file")
        try:
            return str(checkpointer.save(1, Bundle({"w": jnp.ones(1)})))
        except OSError as error:
            return type(error).__name__


class Service:
    """Replaces the wandb package and keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def init(self, **options: Any) -> "Service":
        self.received.append({name: options[name] for name in ("project", "mode", "name")})
        return self

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, row: dict) -> None:
        self.received.append(row)

    def finish(self) -> None:
        self.received.append("finished")


def reported(config: Config) -> Any:
    """What Weights & Biases receives."""
    service = Service()
    patched = mock.patch.dict(sys.modules, {"wandb": service}), mock.patch.object(loggers, "require")
    quiet = contextlib.redirect_stdout(io.StringIO())
    with elsewhere() as folder, patched[0], patched[1], quiet, make_writer(folder, config) as writer:
        writer.write(1, {"loss/value": 1.0})
    return service.received


# ---- devices -------------------------------------------------------------------------------------------------------


def spread(config: Config) -> Any:
    """The mesh over the eight devices of the tests and the placement of each parameter, or why there is no mesh."""
    try:
        mesh = make_mesh(config.sharding)
    except ValueError as error:
        return f"refused: {error}"
    model = ModelConfig(vocab_size=64)
    places = jax.tree.map(lambda sharding: str(sharding.spec), axes_shardings(param_axes(model), mesh))
    return dict(mesh.shape), mesh.devices.shape, places


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

OWN_TEMPLATE = THINKING | {"text.template.file": "{files}/forgets.jinja", "text.calls": "hermes"}
DATED = THINKING | {"text.template.file": str(TEMPLATES / "llama3.jinja")}
TEXT = (
    seen(dialogue, "text", system="default", instruction="default", observation_tokens=32, max_calls_per_turn=2),
    only(dialogue, "text", tokenizer="bytes"),
    only(dialogue, "text", JSON, template="llama3"),
    only(dialogue, "text.tokenizer", JSON, eos_token="<|endoftext|>", pad_token="<|im_start|>"),
    only(dialogue, "text.tokenizer", JSON, path=str(Path(train.__file__).parent / "text" / "toy.model")),
    only(dialogue, "text.tokenizer", JSON, added_tokens=("<|high_reward|>", "<|low_reward|>")),
    only(dialogue, "text.template", THINKING, file=str(TEMPLATES / "chatml_tools.jinja")),
    only(dialogue, "text.template", OWN_TEMPLATE, history="refuse"),
    only(dialogue, "text.template", QWEN, variables=("enable_thinking=false",)),
    only(dialogue, "text.template", DATED, date="2024-02-29"),
)
WORLDS = {"data.sources": ("world:products:1", "world:gcd:1"), "data.eval_sources": ()}
TRACES = WORLDS | {"data.trace_sources": ("world:gcd:1", "{files}/traces.jsonl")}
DATA = (
    seen(data, "data", sources=("{files}/more.jsonl",), eval_sources=("{files}/more.jsonl",)),
    only(data, "data", prompt_column="solution", answer_column="explained"),
    only(data, "data", {"data.sources": ("{files}/bad.jsonl",)}, bad_rows="fail"),
    only(data, "data", WORLDS, weights=(1.0, 3.0), world_problems=3, trace_sources=("{files}/traces.jsonl",)),
    only(data, "data", TRACES, trace_weights=(1.0, 9.0)),
    only(data, "data.demonstrations", WORLDS, guess=5.0, repair=5.0, clean=5.0, wrong=5.0),
    seen(taught, "sft", WORLDS | {"sft.steps": 4, "sft.traces": 4}, warmup_steps=1, reward_tokens="token"),
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
    seen(blocked, "checkpoint.fail_on_error"),
    seen(reported, "log.wandb"),
    only(reported, "log.wandb", {"log.wandb": "offline"}, project="other"),
    seen(watched, "limits"),
    seen(alarmed, "watch", {"watch.grad_norm": 2.0}, stop=("truncated",), reward_spread=0.1, entropy_low=1.2),
    only(alarmed, "watch", {"watch.grad_norm": 2.0}, grad_norm=1.8),
    seen(limited, "watch.stall_factor watch.stall_floor_s", {"watch.steps": 3}),
    only(polled, "watch", {"watch.steps": 3}, notice_url="http://127.0.0.1:9/preempted"),
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
    *(*TEXT, *DATA, *REWARD, *RUN),
    only(spread, "sharding", data=2, fsdp=2, sequence=2, tensor=2),
    seen(met, "distributed", FOUR, coordinator="there:99"),
    Seen(met, (), {}, {"distributed": "cluster"}),
)

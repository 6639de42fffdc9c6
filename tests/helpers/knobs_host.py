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
from tests.helpers.knobs import cases, digest, files, write_lines
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
FORGETTING = THINKING | {"text.template.file": "{files}/forgets.jinja", "text.calls": "hermes"}
QWEN = THINKING | {"text.template.file": str(TEMPLATES / "qwen3_5.jinja")}
TEXT = (
    cases(dialogue, {"text.tokenizer": "bytes", "text.system": "default", "text.tools_section": True})
    | cases(dialogue, {"text.instruction": "default", "text.observation_tokens": 32, "text.max_calls_per_turn": 2})
    | cases(dialogue, {"text.calls": "gemma"})
    | cases(dialogue, {"text.tokenizer.eos_token": "<|endoftext|>", "text.tokenizer.pad_token": "<|im_start|>"}, JSON)
    | cases(dialogue, {"text.template": "llama3"}, JSON)
    | cases(dialogue, {"text.tokenizer.added_tokens": ("<|high_reward|>", "<|low_reward|>")}, JSON)
    | cases(dialogue, {"text.template.file": str(TEMPLATES / "chatml_tools.jinja")}, THINKING)
    | cases(dialogue, {"text.template.history": "refuse"}, FORGETTING)
    | cases(dialogue, {"text.template.variables": ("enable_thinking=false",)}, QWEN)
    | cases(
        dialogue,
        {"text.template.date": "2024-02-29"},
        THINKING | {"text.template.file": str(TEMPLATES / "llama3.jinja")},
    )
    | cases(dialogue, {"text.tokenizer.path": str(Path(train.__file__).parent / "text" / "toy.model")}, JSON)
)

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


WORLDS = {"data.sources": ("world:products:1", "world:gcd:1"), "data.eval_sources": ()}
DATA = (
    cases(data, {"data.sources": ("{files}/more.jsonl",), "data.shuffle": True})
    | cases(data, {"data.eval_problems": 4, "data.eval_seed": 5, "data.eval_sources": ("{files}/more.jsonl",)})
    | cases(data, {"data.prompt_column": "solution", "data.answer_column": "explained"})
    | cases(data, {"data.bad_rows": "fail"}, {"data.sources": ("{files}/bad.jsonl",)})
    | cases(data, {"data.weights": (1.0, 3.0), "data.world_problems": 3}, WORLDS)
    | cases(data, {"data.trace_sources": ("{files}/traces.jsonl",)}, WORLDS)
    | cases(
        data,
        {"data.trace_weights": (1.0, 9.0)},
        WORLDS | {"data.trace_sources": ("world:gcd:1", "{files}/traces.jsonl")},
    )
    | cases(data, {f"data.demonstrations.{kind}": 5.0 for kind in ("guess", "repair", "clean", "wrong")}, WORLDS)
)

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
    said = [
        "<answer>42</answer>",
        "the answer is 42",
        r"<result>\boxed{42}</result>",
        r"<answer>\boxed{x + x}</answer>",
        r"<answer>\boxed{42\%}</answer>",
        r"<answer>\boxed{2x, 42}</answer>",
        r"<answer>\boxed{0, 2, 1}</answer>",
    ]
    rows += [replace(rows[0], turns=(Turn(0, 4, text),)) for text in said]
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


ANSWER = {"weight": 2.0, "workers": 1, "timeout_s": 2.0, "memory_mb": 512, "strict": True}
CALLED = {"weight": 2.0, "path": "tests.helpers.knobs_host:fast", "timeout_s": 0.001}
OWN = {"reward.functions": ("tests.helpers.knobs_host:slow",)}
SEVERAL = {"weight": 2.0, "separator": ", 42"}
CRITERIA = {"weight": 2.0, "rules": ("x",), "column": "points", "judge": "tests.helpers.knobs_host:lenient"}
PICKY = {"reward.functions": ({"kind": "criteria", "rules": ("answer",)},)}
LATE = {"reward.functions": ({"kind": "criteria", "rules": ("a",), "judge": "tests.helpers.knobs_host:lenient"},)}
REWARD = (
    cases(judged, {"reward.functions": ("answer", {"kind": "format", "weight": 0.5}, "tests.helpers.knobs_host:slow")})
    | cases(judged, {"reward.extraction": "lenient", "reward.answer_tag": "result"})
    | cases(judged, {"reward.truncated": "score"})
    | cases(judged, {"reward.truncated.reward": 0.2}, {"reward.truncated": {"kind": "fixed", "reward": 0.1}})
    | cases(judged, {f"reward.functions.answer.{name}": value for name, value in ANSWER.items()})
    | cases(judged, {"reward.functions.format.weight": 2.0, "reward.functions.clean_tools.weight": 2.0})
    | cases(judged, {f"reward.functions.function.{name}": value for name, value in CALLED.items()}, OWN)
    | cases(
        judged,
        {f"reward.functions.several_answers.{name}": value for name, value in SEVERAL.items()},
        {"reward.functions": ("several_answers",)},
    )
    | cases(judged, {f"reward.functions.criteria.{name}": value for name, value in CRITERIA.items()}, PICKY)
    | cases(judged, {"reward.functions.criteria.timeout_s": 0.001}, LATE)
    | cases(
        judged,
        {"reward.functions.environment.weight": 2.0, "reward.functions.environment.success": 0.5}
        | {"reward.functions.environment.part": "speed"},
        {"reward.functions": ("environment",), "environment": "tests.helpers.knobs_tools:Trial"},
    )
)

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


SFT = cases(
    taught,
    {
        "sft.steps": 6,
        "sft.traces": 5,
        "sft.lr": 1e-3,
        "sft.warmup_steps": 1,
        "sft.reward_tokens": "token",
    },
    WORLDS | {"sft.steps": 4, "sft.traces": 4},
)

# ---- the run -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """An empty working directory."""
    before = Path.cwd()
    place = Path(tempfile.mkdtemp(dir=files()))
    os.chdir(place)
    try:
        yield place
    finally:
        os.chdir(before)
        shutil.rmtree(place)


def small_state(*_: Any, **__: Any) -> TrainState:
    return TrainState(step=jnp.zeros((), jnp.int32), params={"w": jnp.ones(1)}, opt_state={"m": jnp.zeros(1)})


def run_of(config: Config, times: int) -> Any:
    """The files of consecutive runs, the steps in their metrics, and the number of lines they showed."""
    said = io.StringIO()
    components = mock.patch.object(session, "make_parts", scripted_parts)
    state = mock.patch.object(start, "initial_state", small_state)
    with elsewhere() as place, contextlib.redirect_stdout(said), components, state, scripted_programs():
        for _ in range(times):
            train.train(config)
        names = sorted(
            str(path.relative_to(place)) for path in place.rglob("*") if "checkpoints/step_" not in str(path)
        )
        kept = sorted(str(path.relative_to(place)) for path in place.rglob("step_*") if path.is_dir())
        rows = [(row["step"], sorted(row)) for path in place.rglob("metrics.jsonl") for row in read_metrics(path)]
    return names, kept, rows, len(said.getvalue().splitlines())


def run(config: Config) -> Any:
    return run_of(config, 1)


def rerun(config: Config) -> Any:
    return run_of(config, 2)


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
    alarms, found = Alarms(config.watch), []
    for step in range(32):
        bad = max(0, step - 11)
        row = {name: (1.0 - 0.08 * bad) if side == "below" else (1.0 + 0.3 * bad) for _, name, side in RULES}
        row |= {"loss/logprob_gap_mean": 0.001 * bad, "rollout/truncated": 0.04 * bad}
        row["update/grad_norm"] = 1.0 + 0.1 * bad
        try:
            found.append(alarms.look(step, row))
        except Stopped as error:
            return [*found, str(error)]
    return found


def limited(config: Config) -> Any:
    """The time that two points may take after what they took before."""
    now = [0.0]
    dog = Watchdog(Path("none"), config.watch, clock=lambda: now[0])
    with dog.watching():
        reach("sample")
        now[0] = 1e3
        reach("update")
    return dog.limit_s("sample"), dog.limit_s("update")


def asked(config: Config) -> Any:
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
    with elsewhere() as place, Checkpointer(place / "taken" / "x", config.checkpoint) as checkpointer:
        (place / "taken").write_text("a file")
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
    with elsewhere() as place, patched[0], patched[1], quiet, make_writer(place, config) as writer:
        writer.write(1, {"loss/value": 1.0})
    return service.received


SHORT = {"steps": 2, "log.console": "off", "data.eval_problems": 0, "data.eval_sources": ()}
RUN = (
    cases(run, {"name": "other", "run_dir": "here", "steps": 1, "log.console": "plain", "log.traces": 0}, SHORT)
    | cases(run, {"checkpoint.every": 1}, SHORT)
    | cases(
        lambda config: config.stage_after(None, 0) < len(config.stages or ()), {"stages": ({"name": "a", "steps": 2},)}
    )
    | cases(run, {"checkpoint.keep": 1}, SHORT | {"checkpoint.every": 1})
    | cases(run, {"log.samples": 1}, SHORT | {"log.console": "plain"})
    | cases(run, {"log.tensorboard": True, "eval.every": 1}, {"steps": 2, "log.console": "off"})
    | cases(rerun, {"resume": "auto"}, SHORT | {"steps": 1})
    | cases(
        watched,
        {
            "limits.empty_steps": 3,
            "limits.skipped_updates": 2,
            "limits.infrastructure_share": 0.5,
            "limits.infrastructure_steps": 2,
        },
    )
    | cases(
        alarmed,
        {
            "watch.stop": ("truncated",),
            "watch.steps": 2,
            "watch.history": 2,
            "watch.reward_spread": 0.1,
            "watch.tool_calls": 1.5,
            "watch.entropy_low": 1.2,
            "watch.entropy_high": 3.0,
            "watch.truncated": 0.3,
            "watch.grad_norm": 1.8,
            "watch.logprob_gap": 0.005,
            "watch.sample_size": 0.9,
            "watch.answers": 3.0,
        },
        {"watch.grad_norm": 2.0},
    )
    | cases(limited, {"watch.stall_factor": 3.0, "watch.stall_floor_s": 60.0}, {"watch.steps": 3})
    | cases(asked, {"watch.notice_url": "http://127.0.0.1:9/preempted"}, {"watch.steps": 3})
    | cases(blocked, {"checkpoint.fail_on_error": True})
    | cases(reported, {"log.wandb": "offline"})
    | cases(reported, {"log.wandb.project": "other"}, {"log.wandb": "offline"})
)

# ---- devices -------------------------------------------------------------------------------------------------------


def spread(config: Config) -> Any:
    """The mesh over the eight devices of the tests and the placement of each parameter, or why there is no mesh."""
    try:
        mesh = make_mesh(config.sharding)
    except ValueError as error:
        return f"refused: {error}"
    model = ModelConfig(vocab_size=64)
    places = jax.tree.map(lambda place: str(place.spec), axes_shardings(param_axes(model), mesh))
    return dict(mesh.shape), mesh.devices.shape, places


SHARDING = cases(spread, {"sharding.data": 2, "sharding.fsdp": 2, "sharding.sequence": 2, "sharding.tensor": 2})


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


FOUR = {
    "distributed": "address",
    "distributed.coordinator": "here:99",
    "distributed.processes": 4,
    "distributed.process": 1,
}
DISTRIBUTED = (
    cases(met, {"distributed": "cluster"})
    | cases(met, {"distributed.coordinator": "there:99", "distributed.processes": 5, "distributed.process": 2}, FOUR)
    | cases(met, {"distributed.join_timeout_s": 7.0, "distributed.heartbeat_s": 8.0}, FOUR)
)

CASES = TEXT | DATA | REWARD | SFT | RUN | SHARDING | DISTRIBUTED

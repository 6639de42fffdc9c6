"""Settings seen on the host: dialogue, verdicts, the alarms of a run, and how it joins others."""

import contextlib
import functools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax

import grpo_roc_jax as g
from grpo_roc_jax import train
from grpo_roc_jax.commands.export import text_files
from grpo_roc_jax.pod import processes
from grpo_roc_jax.reward import score, trial
from grpo_roc_jax.run import components, watch
from grpo_roc_jax.text.chat_format import Trace, make_chat
from tests.helpers.knobs import Seen, digest, files, only, seen
from tests.text.test_templates import make_directory

TEMPLATES = Path(__file__).parent.parent / "text" / "templates"
ADDED = ["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CALL = '<tool_call>{"name": "python_code_with_standard_io", "arguments": {"code": "1"}}</tool_call>'


@functools.cache
def tokenizer_folder(template: str) -> Path:
    """A published-looking directory: bytes with added tokens, and a chat template."""
    folder = files() / f"tokenizer_{template}"
    folder.mkdir(exist_ok=True)  # the module may be imported under two names
    return make_directory(folder, template, added=ADDED)


def dialogue(config: g.Config) -> Any:
    """Ids of a prompt, a turn and observations, the parsed calls of a turn, and the text files of an export."""
    for name in ("chatml_tools", "thinking"):
        tokenizer_folder(name)
    text = components.resolve_text(config)
    tokenizer = g.load_tokenizer(text)
    try:
        schemas = components.make_registry(config).schemas
        chat = make_chat(text, tokenizer, schemas)
        exported = text_files(text, tokenizer, schemas)
    except ValueError as error:
        return f"refused: {error}"
    problem = g.Problem("p", "What is 6 * 7?", "42", "s")
    turn = chat.turn_ids(f"so</reason>{CALL}\n{CALL}")
    row = chat.trace_row(Trace(problem, (f"so</reason>{CALL}", "<answer>7</answer>"), (("7 " * 300,),)))
    text = f"so {CALL}\n{CALL} ```tool_code\nf(a=1)\n```"
    both = chat.parse_turn([*tokenizer.encode(text), tokenizer.eos_id])
    ends = (chat.end_id, sorted(chat.stop_ids), chat.stop_texts, tokenizer.eos_id, exported.pad_id, exported.files)
    return digest(chat.prompt_ids(problem), turn, row, both, chat.observation_ids(["a", "b\n" * 200]), ends)


JSON = {"text.tokenizer": {"kind": "file", "path": "{files}/tokenizer_chatml_tools"}}
THINKING = {"text.tokenizer": "{files}/tokenizer_thinking", "text.template": "model"}
QWEN = THINKING | {"text.template.file": str(TEMPLATES / "qwen3_5.jinja")}


def slow(problem: g.Problem, trajectories: Any) -> list[float]:
    time.sleep(0.05)
    return [1.0] * len(trajectories)


def lenient(criterion: str, problem: g.Problem, reply: str) -> float:
    time.sleep(0.01)
    return 0.5


def judged(config: g.Config) -> Any:
    """Verdicts on fixed trajectories, and what a replaced verifier is made with and asked for."""
    rows, asked = list(trial.sample_trajectories().values()), []
    texts = ["42", r"\boxed{x + x}", r"\boxed{42\%}", r"\boxed{2x, 42}", r"\boxed{0, 2, 1}"]
    texts = ["the answer is 42", r"<result>\boxed{42}</result>", *(f"<answer>{text}</answer>" for text in texts)]
    rows += [replace(rows[0], turns=(g.Turn(0, 4, text),)) for text in texts]
    rows = [replace(row, reward=0.7) for row in [*rows, replace(rows[0], stop="length")]]

    def verifier(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return SimpleNamespace(compare=lambda pairs: asked.append(pairs) or ["correct"] * len(pairs), close=dict)

    with mock.patch.object(score, "Verifier", verifier):
        scorer = score.make_scorer(config.reward)
        rubric = {"rubric": ["boxed"], "points": [{"text": "the answer", "weight": 3}]}
        listed = g.Problem("r", "?", "2, 0, 1", "s", {"years": 8, "months": 1})
        problems = [g.Problem("p", "?", "42", "s", rubric), g.Problem("q", "?", "2x", "s"), listed]
        scored = scorer.score_all(problems, [rows] * len(problems))
        scorer.close()
    return [group.verdicts for group in scored.groups], scored.faults, asked


def alarmed(config: g.Config) -> Any:
    """The alarms of steps that get worse in every respect, up to the one that ends the run."""
    alarms, raised = watch.Alarms(config.watch), []
    with contextlib.suppress(watch.Stopped):
        for step in range(32):
            bad = max(0, step - 11)
            row = {name: (1.0 - 0.08 * bad) if side == "below" else (1.0 + 0.3 * bad) for _, name, side in watch.RULES}
            row |= {"loss/logprob_gap_mean": 0.001 * bad, "rollout/truncated": 0.04 * bad}
            raised.append(alarms.look(step, row | {"update/grad_norm": 1.0 + 0.1 * bad}))
    return raised


def met(config: g.Config) -> Any:
    """What JAX learns about the other processes, or why it is refused."""
    environ = {} if config.distributed.kind != "never" else {"JAX_COORDINATOR_ADDRESS": "other:1"}
    initialize = mock.Mock()
    patched = mock.patch.multiple(jax.distributed, initialize=initialize, shutdown=mock.Mock())
    try:
        with patched, mock.patch.object(processes, "service"), processes.joined(config.distributed, environ):
            return repr(initialize.mock_calls)
    except ValueError as error:
        return f"refused: {error}"


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
    seen(judged, "reward.truncated.reward", {"reward.truncated": {"kind": "fixed", "reward": 0.1}}),
    seen(judged, "reward.functions.function", judging(f"{HERE}slow"), path="tests.test_train:even", timeout_s=0.001),
    seen(judged, "reward.functions.several_answers", judging("several_answers"), separator=", 42"),
    seen(judged, "reward.functions.criteria", CRITERIA, rules=("x",), column="points", judge=f"{HERE}lenient"),
    only(judged, "reward.functions.criteria", LATE, timeout_s=0.001),
    seen(judged, "reward.functions.environment", TRIAL, part="speed", success=0.5),
)
FOUR = {"distributed": {"kind": "address", "coordinator": "here:99", "processes": 4, "process": 1}}
SEEN = (
    *TEXT,
    *REWARD,
    seen(alarmed, "watch", {"watch.grad_norm": 2.0}, stop=("truncated",), reward_spread=0.1, entropy_low=1.2),
    only(alarmed, "watch", {"watch.grad_norm": 2.0}, grad_norm=1.8),
    seen(met, "distributed", FOUR, coordinator="there:99"),
    Seen(met, (), {}, {"distributed": "cluster"}),
)

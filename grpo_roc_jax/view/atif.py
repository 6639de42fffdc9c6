"""Trajectories in ATIF, the format of Harbor, with token ids and log-probabilities: written one on a line, and read.

The first message comes from the user, each turn is a step of the agent with its calls and their results, and an
environment's reply is a step of the user. A file of other origin can be read if its steps have token ids and each
prompt continues the steps before.

Source: ATIF 1.8 as the models of `harbor` 0.25 define it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.record import codec
from grpo_roc_jax.record.trace import TraceRecord, from_json, to_line
from grpo_roc_jax.settings.files import parse_json, read_text
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict

EXTRA_KEY = "grpo_roc"
"""Key in `extra` of what ATIF has no field for: a line of the trajectory log without the arrays below."""
BESIDE = ("tokens", "logprobs")
"""Arrays of a line that are stored in the steps."""

Document = Mapping[str, Any]


def to_atif(record: TraceRecord) -> dict[str, Any]:
    """A trajectory as a document of ATIF."""
    trajectory = record.trajectory
    steps: list[dict[str, Any]] = [{"source": "user", "message": record.problem.prompt + trajectory.opening}]
    for turn in trajectory.turns:
        steps.append(_agent_step(turn, trajectory))
        if turn.reply:
            steps.append({"source": "user", "message": turn.reply})
    fields = {name: value for name, value in json.loads(to_line(record)).items() if name not in BESIDE}
    end = trajectory.turns[-1].end if trajectory.turns else 0
    reward = {} if record.verdict is None else {"reward": float(record.verdict.reward)}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": str(record.step),
        "trajectory_id": f"{record.step}-{record.problem.uid}-{trajectory.sample}",
        "agent": {"name": "grpo-roc-jax", "version": str(trajectory.versions.max(initial=-1))},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {"total_completion_tokens": int(trajectory.policy_mask.sum()), "extra": reward},
        "extra": {EXTRA_KEY: fields, "token_ids_after": trajectory.tokens[end:].tolist()},
    }


def documents(records: Iterable[TraceRecord]) -> Iterator[dict[str, Any]]:
    """The document of each record, with ids that differ: a problem that comes twice in a step is numbered, `ID/2`."""
    seen: Counter[str] = Counter()
    for record in records:
        document = to_atif(record)
        name = document["trajectory_id"]
        seen[name] += 1
        yield document if seen[name] == 1 else {**document, "trajectory_id": f"{name}/{seen[name]}"}


def _agent_step(turn: Turn, trajectory: Trajectory) -> dict[str, Any]:
    calls = [
        {"tool_call_id": f"call_{turn.start}_{i}", "function_name": call.name, "arguments": dict(call.arguments)}
        for i, call in enumerate(turn.calls)
    ]
    results = [
        {"source_call_id": call["tool_call_id"], "content": result.shown or result.observation}
        for call, result in zip(calls, turn.results, strict=False)
    ]
    metrics = {
        "prompt_token_ids": trajectory.tokens[: turn.start].tolist(),
        "completion_token_ids": trajectory.tokens[turn.start : turn.end].tolist(),
        "logprobs": trajectory.logprobs[turn.start : turn.end].tolist(),
    }
    step: dict[str, Any] = {"source": "agent", "message": turn.text, "llm_call_count": 1, "metrics": metrics}
    step |= {"tool_calls": calls} if calls else {}
    return step | ({"observation": {"results": results}} if results else {})


def from_atif(document: Document) -> TraceRecord:
    """The record of a document.

    Raises:
        ValueError: It has no steps with token ids and log-probabilities, or a prompt does not continue what precedes
            it.
    """
    name = document.get("trajectory_id") or "a trajectory"
    steps = [step for step in document.get("steps", ()) if (step.get("metrics") or {}).get("completion_token_ids")]
    extra = document.get("extra") or {}
    tokens: list[int] = []
    spans, logprobs = [], []
    for step in steps:
        given = step["metrics"]
        prompt, completion = given.get("prompt_token_ids") or [], given["completion_token_ids"]
        if prompt[: len(tokens)] != tokens or len(given.get("logprobs") or ()) != len(completion):
            raise ValueError(
                f"{name}, step {step['step_id']}: its prompt must continue the tokens before it, and each token "
                "sampled needs a log-probability"
            )
        tokens = [*prompt, *completion]
        spans.append((len(prompt), len(tokens)))
        logprobs += given["logprobs"]
    tokens += extra.get("token_ids_after") or []
    if not tokens:
        raise ValueError(f"{name}: no step has metrics.completion_token_ids")
    mask = np.zeros(len(tokens), bool)
    for start, end in spans:
        mask[start:end] = True
    sampled = np.zeros(len(tokens), np.float32)
    sampled[mask] = logprobs
    if EXTRA_KEY in extra:
        arrays = {"tokens": np.array(tokens, np.int32), "logprobs": sampled}
        return from_json(extra[EXTRA_KEY] | {key: codec.encode_array(value) for key, value in arrays.items()})
    return _foreign(document, steps, spans, (np.array(tokens, np.int32), mask, sampled))


def _foreign(
    document: Document,
    steps: Sequence[Document],
    spans: Sequence[tuple[int, int]],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> TraceRecord:
    """A record of a document that another program wrote."""
    turns = tuple(_turn(step, *span) for step, span in zip(steps, spans, strict=True))
    tokens, mask, logprobs = arrays
    name = str(document.get("trajectory_id") or document.get("session_id") or "atif")
    question = next((_text(step["message"]) for step in document["steps"] if step["source"] == "user"), "")
    versions = np.where(mask, 0, -1).astype(np.int32)
    trajectory = Trajectory(tokens, mask, logprobs, versions, spans[0][0], turns, "eos", 0)
    reward = ((document.get("final_metrics") or {}).get("extra") or {}).get("reward")
    calls = [result for turn in turns for result in turn.results]
    verdict = None
    if reward is not None:
        status = "correct" if reward > 0 else "wrong"
        verdict = Verdict(float(reward), status, None, len(calls), 0, 0, True, len(turns))
    return TraceRecord(
        0,
        -1,
        Problem(name, question, "", (document.get("agent") or {}).get("name", "atif")),
        trajectory,
        verdict,
        False,
        "read",
    )


def _turn(step: Document, start: int, end: int) -> Turn:
    answers = {result.get("source_call_id"): result for result in (step.get("observation") or {}).get("results", ())}
    listed = step.get("tool_calls") or ()
    calls = [ToolCall(call["function_name"], call["arguments"], json.dumps(call["arguments"])) for call in listed]
    answered = takewhile(lambda call: answers.get(call["tool_call_id"]) is not None, listed)  # by order, see `Turn`
    results = [ToolResult("ok", observation=_text(answers[call["tool_call_id"]].get("content"))) for call in answered]
    return Turn(start, end, _text(step["message"]), tuple(calls), tuple(results))


def _text(content: Any) -> str:
    """The text of a message, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or f"[{part.get('type')}]" for part in content)
    return content or ""


def read_atif(path: Path) -> Iterator[TraceRecord]:
    """Records of a file: one document, or one on each line. Raises ValueError as `from_atif` does."""
    text = read_text(path)
    try:
        documents = [parse_json(text, str(path))]
    except ValueError:
        documents = [parse_json(line, str(path)) for line in text.splitlines() if line.strip()]
    return (_record(document, path) for document in documents)


def _record(document: Any, path: Path) -> TraceRecord:
    try:
        return from_atif(document)
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is not a document of ATIF: {error!r:.200}") from error

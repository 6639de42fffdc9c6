"""Requests for samples: their fields, checked, and their results as the parts of them come."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_roc_jax.engine.steering import DrawSettings, RowSteering
from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.serving.sampling_fields import warm_enough
from grpo_roc_jax.serving.sampling_loop import sampled
from grpo_roc_jax.serving.server import UNFINISHED
from grpo_roc_jax.serving.tinker.futures import Pending
from grpo_roc_jax.serving.tinker.trainer import Readings, Wanted
from grpo_roc_jax.serving.tinker.wire import OfPrompt, SampledSequence, Sparse, write_samples

MOST_TOP = 256
"""Most likely ids, draws or targets of a position at most."""
MOST_SAMPLES = 1024
MOST_STOPS, LONGEST_STOP = 64, 256
"""Texts that stop, and characters of one."""
HOTTEST = 1e6
EMPTY = -99999.0
"""Log-probability of an empty cell."""


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request for samples, checked."""

    prompt: np.ndarray
    count: int
    max_tokens: int
    """0 for a prompt that fills the context and is scored alone."""
    temperature: float
    drawing: DrawSettings
    seed: int | None
    stop_ids: frozenset[int]
    stops: tuple[str, ...]
    prompt_logprobs: bool
    last_n: int
    """How many of the last tokens have log-probabilities; 0 for all."""
    topk: int
    sampled_topk: int
    draws: int
    targets: np.ndarray | None
    """int32[P-1,K]: ids to score at each position after the first; -1 for none."""
    sparse: Sparse | None
    """The places of the targets, if they came as a sparse array."""

    @property
    def of_prompt(self) -> bool:
        """Whether the result says something about the prompt."""
        return self.prompt_logprobs or self.topk > 0 or self.draws > 0 or self.targets is not None

    def steering(self) -> list[RowSteering]:
        """What each sample asks of its draws; empty for nothing."""
        plain = self.drawing == DrawSettings()
        return [] if plain else [RowSteering(self.drawing) for _ in range(self.count)]


def read_sample_request(
    body: dict[str, Any], vocab_size: int, context: int, reserved: int, eos: frozenset[int]
) -> SampleRequest:
    """The fields of a sampling request.

    Args:
        body: The body of the request.
        vocab_size: Size of the model's vocabulary.
        context: Tokens of the longest prompt with its answer.
        reserved: Those of them that a shorter prompt leaves empty.
        eos: Ids that stop an answer unless the request names others.

    Raises:
        RequestRefused: Of the wrong type, out of range, or not served.
    """
    params = field_of(body, "sampling_params", dict, {})
    prompt = _prompt(body, vocab_size)
    P = len(prompt)
    if field_of(body, "record_stability_info", bool, False):
        raise RequestRefused(
            "record_stability_info is for stable_reinforce, which is not served; leave it out and take another "
            "loss_fn (importance_sampling, ppo, cispo, gspo)"
        )
    count, temperature = field_of(body, "num_samples", int, 1), field_of(params, "temperature", (int, float), 1.0)
    if not 1 <= count <= MOST_SAMPLES or not 0 <= temperature <= HOTTEST:
        raise RequestRefused(
            f"num_samples {count}, temperature {temperature}; must be 1 to {MOST_SAMPLES}, and 0 to {HOTTEST:g}"
        )
    drawing = _drawing(params, vocab_size)
    numbers = {}
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        numbers[name] = field_of(body, name, int, 0)
        if not 0 <= numbers[name] <= min(MOST_TOP, vocab_size):
            raise RequestRefused(f"{name} = {numbers[name]}; must be 0 to {min(MOST_TOP, vocab_size)}", name)
    given = field_of(body, "target_prompt_logprobs", dict)
    scored = field_of(body, "prompt_logprobs", bool, False)
    of_prompt = scored or given is not None or numbers["topk_prompt_logprobs"] > 0 or numbers["prompt_alt_tokens_k"] > 0
    max_tokens = _max_tokens(params, P, context, reserved, of_prompt=of_prompt)
    last_n = field_of(body, "prompt_logprobs_last_n", int, 0)
    if not 0 <= last_n < max(P, 1):
        raise RequestRefused(f"prompt_logprobs_last_n = {last_n}; must be 1 to {P - 1}, the prompt without its first")
    stop_ids, stops = _stops(params.get("stop"), eos)
    targets, sparse = _targets(given, P, vocab_size)
    return SampleRequest(
        prompt=prompt,
        count=count,
        max_tokens=max_tokens,
        temperature=warm_enough(temperature),
        drawing=drawing,
        seed=field_of(params, "seed", int),
        stop_ids=stop_ids,
        stops=stops,
        prompt_logprobs=scored,
        last_n=last_n,
        topk=numbers["topk_prompt_logprobs"],
        sampled_topk=numbers["topk_sample_logprobs"],
        draws=numbers["prompt_alt_tokens_k"],
        targets=targets,
        sparse=sparse,
    )


def _prompt(body: dict[str, Any], vocab_size: int) -> np.ndarray:
    ids: list[int] = []
    for chunk in field_of(field_of(body, "prompt", dict, {}), "chunks", list, []):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise RequestRefused("the prompt holds an image or audio; only chunks of text tokens are sampled from")
        ids += field_of(chunk, "tokens", list, [])
    if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise RequestRefused("the prompt must hold at least one id, all in the vocabulary; use get_tokenizer()")
    return np.array(ids, np.int32)


def _drawing(params: dict[str, Any], vocab_size: int) -> DrawSettings:
    """The truncation of each draw; values that truncate nothing are left out."""
    top_k, top_p = field_of(params, "top_k", int, -1), field_of(params, "top_p", (int, float), 1.0)
    if top_k < -1 or not 0 < top_p <= 1:
        raise RequestRefused(f"top_k {top_k}, top_p {top_p}; must be -1 (all) or more, and above 0 to 1")
    return DrawSettings(top_k=top_k if 0 < top_k < vocab_size else None, top_p=top_p if top_p < 1 else None)


def _max_tokens(params: dict[str, Any], P: int, context: int, reserved: int, *, of_prompt: bool) -> int:
    """The most tokens of an answer to a prompt of P tokens. Clients that only score a prompt ask for one token, but a
    prompt that fills the context is scored without it."""
    room, most = context - max(reserved, P), field_of(params, "max_tokens", int)
    if most is not None and most < 1:
        raise RequestRefused(f"max_tokens = {most}; must be at least 1", "max_tokens")
    if room < (0 if of_prompt and most == 1 else 1):
        raise RequestRefused(f"a prompt of {P} tokens leaves no room in a context of {context}; raise --context")
    return room if most is None else min(most, room)


def _stops(stop: Any, eos: frozenset[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """(ids, texts) that end an answer."""
    if stop is None:
        return eos, ()
    listed = [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or not all(type(item) in (str, int) for item in listed) or "" in listed:
        raise RequestRefused(f"stop {stop!r:.80}; must be a text, texts or token ids", "stop")
    ids, texts = ([item for item in listed if type(item) is kind] for kind in (int, str))
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise RequestRefused(f"stop has {len(texts)} texts; must be at most {MOST_STOPS} of {LONGEST_STOP} characters")
    return frozenset(ids), tuple(texts)


def _checked_width(width: int) -> int:
    if not 1 <= width <= MOST_TOP:
        name = "target_prompt_logprobs"
        raise RequestRefused(f"{name} has {width} ids at a position; must be 1 to {MOST_TOP}", name)
    return width


def _targets(given: dict[str, Any] | None, P: int, vocab_size: int) -> tuple[np.ndarray | None, Sparse | None]:
    """(ids [P-1,K] with -1 where there is none, the places of a sparse array)."""
    if given is None:
        return None, None
    name, wrong = "target_prompt_logprobs", (TypeError, ValueError, OverflowError, IndexError)
    try:
        values = np.array(given["data"], np.int64).reshape(-1)
        rows, width = given["shape"]
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in (rows, width)):
            raise ValueError(f"its shape is {rows!r:.40}, {width!r:.40}")
        if rows != P - 1:
            raise RequestRefused(f"{name} has {rows} rows; must be {P - 1}, the prompt without its first token", name)
        if given.get("sparse_crow_indices") is None:
            table, sparse = values.reshape(rows, _checked_width(width)), None
        else:
            crow, col = (np.array(given[f"sparse_{part}_indices"], np.int64) for part in ("crow", "col"))
            sizes = np.diff(crow)
            if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(values) or len(col) != len(values):
                raise ValueError("its indices do not fit its values")
            if (sizes < 0).any() or (len(col) and not (col.min() >= 0 and col.max() < width)):
                raise ValueError("its indices are out of range")
            table = np.full((rows, _checked_width(max(int(sizes.max(initial=0)), 1))), -1, np.int64)
            table[np.arange(table.shape[1]) < sizes[:, None]] = values
            sparse = Sparse((rows, width), crow, col)
    except (KeyError, *wrong) as error:
        raise RequestRefused(f"{name} is no int64 array of two dimensions: {error}", name) from None
    if table.size and (table.min() < -1 or table.max() >= vocab_size):
        raise RequestRefused(
            f"{name} has ids from {table.min()} to {table.max()}; must be -1 to {vocab_size - 1}", name
        )
    if not (table >= 0).any():
        raise RequestRefused(f"{name} names no id; leave it out", name)
    return table.astype(np.int32), sparse


Read = Callable[[np.ndarray, Wanted], Readings]
"""What the model expects after each of some tokens."""


def of_prompt(request: SampleRequest, read: Read, seed: int) -> OfPrompt:
    """What a result says about its prompt."""
    prompt, P = request.prompt, len(request.prompt)
    columns = [] if request.targets is None else [np.maximum(request.targets, 0)]
    if request.prompt_logprobs:
        columns.append(prompt[1:, None])
    logprobs = np.full(P, np.nan, np.float32) if request.prompt_logprobs else None
    topk = None
    if request.topk:
        topk = np.zeros((P, request.topk), np.int32), np.full((P, request.topk), EMPTY, np.float32)
    empty = np.zeros((0, request.draws))
    drawn = (empty.astype(np.int32), empty.astype(np.float32)) if request.draws else None
    targets = None
    if P > 1:
        wanted = np.concatenate(columns, axis=1).astype(np.int32) if columns else None
        readings = read(prompt[:-1], Wanted(wanted, request.topk))
        first = max(1, P - request.last_n) if request.last_n else 1
        if logprobs is not None:
            logprobs[first:] = readings.scored[first - 1 :, -1]
        if topk is not None:
            for leaf, new in zip(topk, readings.top, strict=True):
                leaf[first:] = new[first - 1 :]
        if request.targets is not None:
            named = request.targets >= 0
            targets = np.where(named, readings.scored[:, : request.targets.shape[1]], 0.0).astype(np.float32)
            if request.sparse is not None:
                sizes = np.diff(request.sparse.crow)
                targets = targets[np.arange(targets.shape[1]) < sizes[:, None]]
        if request.draws:
            drawn = read(prompt[:-1], Wanted(draws=request.draws, temperature=request.temperature, seed=seed)).drawn
    return OfPrompt(logprobs, topk, targets, request.sparse, drawn)


class Gathered:
    """The parts of a sampling result as they come; on the thread of the event loop."""

    def __init__(
        self,
        pending: Pending,
        request: SampleRequest,
        compute: Callable[[Callable[[], Any], Callable], None],
        read: Read,
    ):
        """
        Args:
            pending: The pending result of the request.
            asked: What it asks for.
            compute: Computes its first argument elsewhere and hands the result to its second on this thread.
            read: What the model expects, for that other thread.
        """
        self.pending, self.request, self._compute, self._read = pending, request, compute, read
        self.answers: list[SampledSequence | None] = [None] * request.count
        self.prompt: OfPrompt | None = None
        self.parts, self.cached = request.count + request.of_prompt, 0

    def begin(self, seed: int) -> None:
        """Has computed what the result says about the prompt. An answer without room is empty."""
        if not self.request.max_tokens:
            for sample in range(self.request.count):
                self._answered(sample, SampledSequence(np.zeros(0, np.int32), np.zeros(0, np.float32), False))
        if self.request.of_prompt:
            self._compute(lambda: of_prompt(self.request, self._read, seed), self._of_prompt)

    def report(self, event: str, sample: int, value: Any) -> None:
        """See `SampleJob.report`."""
        if event == "failed":
            self.pending.fail(value)
        elif event == "paused":
            self.pending.queue_state = "paused_rate_limit"
        elif event == "seated":
            self.pending.queue_state = "active"
            self.cached = max(self.cached, value[0]) if sample == 0 else self.cached
        elif event == "ended" and value.stop in UNFINISHED:
            self.pending.fail(RuntimeError(f"sampling ended early: {value.stop}"))
        elif event == "ended":
            span = sampled(value)
            answer = SampledSequence(value.tokens[span], value.logprobs[span], value.stop == "eos")
            if not self.request.sampled_topk:
                self._answered(sample, answer)
                return
            request, tokens = self.request, value.tokens[:-1]

            def top() -> SampledSequence:
                of_tokens = self._read(tokens, Wanted(top=request.sampled_topk, temperature=request.temperature))
                return replace(answer, topk=tuple(leaf[-len(answer.tokens) :] for leaf in of_tokens.top))

            self._compute(top, lambda with_top: self._answered(sample, with_top))

    def _answered(self, sample: int, answer: SampledSequence) -> None:
        self.answers[sample] = answer
        self._part()

    def _of_prompt(self, of_prompt: OfPrompt) -> None:
        self.prompt = of_prompt
        self._part()

    def _part(self) -> None:
        self.parts -= 1
        if not self.parts:
            self.pending.finish(write_samples(self.answers, self.prompt, self.cached))

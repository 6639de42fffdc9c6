"""The bodies of requests, checked: what to sample, and in which form to answer."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.steering import TOP, DrawSettings
from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.text.tokenizer import Tokenizer

MAX_CHOICES = 64
"""Samples and prompts of a request together."""
MAX_STOPS = 16
MAX_STOP_LENGTH = 64
"""Characters of a stop text."""
COLDEST = 1e-20
"""Temperatures below it are 0, which is greedy: logits that are divided by less may not be finite in float32."""
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0
"""Bounds of `repetition_penalty`, for the same reason."""
MOST_BIASED = 4096
"""Tokens of `logit_bias`."""
MOST_BANNED = 1024
"""Texts of `bad_words`."""
MOST_UNREAD = 32
FIELD = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""A name that a header can hold."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (0, False),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "functions": ([],),
    "logits_processors": ([],),
}
"""Fields that are not supported, with the values that ask for nothing: an answer without what they ask for would not be
an answer to the request."""
READ = frozenset((
    "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "logit_bias", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "bad_words", "logprobs", "top_logprobs", "return_token_ids",
    "return_tokens_as_token_ids", "return_weight_versions", "response_format", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "structured_outputs",
))  # fmt: skip
"""Fields that `read_sampling_fields` and `answer_formats.read_format` know, with those of the answer's form."""
ABOUT = frozenset((
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "cache_salt", "priority", "service_tier", "data_parallel_rank", "kv_transfer_params", "betas",
))  # fmt: skip
"""Fields that speak of the request, its sender and its price, and ask nothing of the answer."""
IDLE: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "disable_parallel_tool_use": (False,),
    "reasoning": ({},),
    "reasoning_effort": ("none",),
    "thinking": ({"type": "disabled"},),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "length_penalty": (1,),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "background": (False,),
    "function_call": ("none", "auto"),
    "effort": ("none",),
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}
"""Fields that are not read, with the values that ask for what is done anyway; also of objects within a request."""


@dataclass(frozen=True)
class SamplingFields:
    """How to sample, and what the answer has to hold."""

    max_tokens: int | None
    temperature: float | None
    seed: int | None
    count: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool
    """`return_token_ids`."""
    draw: DrawSettings
    """What is other than the settings of the server; `ends` is what the request itself names."""
    ignore_eos: bool
    """Whether a stop id that the request does not name ends nothing."""


def read_sampling_fields(body: Mapping[str, Any], sampling: SamplingConfig, tokenizer: Tokenizer) -> SamplingFields:
    """The sampling fields of a request, or of its `sampling_params`.

    Args:
        body: The request, or its `sampling_params`.
        sampling: What the server draws with where a request says nothing.
        tokenizer: The tokenizer of the policy.

    Raises:
        RequestRefused: Of the wrong type, out of range, or not supported by the engine.
    """
    _refuse_others(body)
    stops = field_of(body, "stop", (str, list), [])
    stops = [stops] if isinstance(stops, str) else stops
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops) or len(stops) > MAX_STOPS:
        raise RequestRefused(f"stop must be up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters", "stop")
    temperature = field_of(body, "temperature", (int, float))
    if temperature is not None and not 0 <= temperature <= 100:
        raise RequestRefused(f"temperature = {temperature}; must be 0 to 100", "temperature")
    count = field_of(body, "n", int, 1)
    if not 1 <= count <= MAX_CHOICES:
        raise RequestRefused(f"n = {count}; must be 1 to {MAX_CHOICES}", "n")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = field_of(body, name, int)
    if max_tokens is not None and max_tokens < 1:
        raise RequestRefused(f"{name} = {max_tokens}; must be at least 1", name)
    min_tokens = field_of(body, "min_tokens", int, 0)
    if not 0 <= min_tokens <= (min_tokens if max_tokens is None else max_tokens):
        raise RequestRefused(
            f"min_tokens = {min_tokens}; must be 0 to {name}, {max_tokens or 'the room'}", "min_tokens"
        )
    if min_tokens and stops:
        raise RequestRefused("min_tokens holds for token ids that stop, not for texts; leave out stop", "min_tokens")
    options = field_of(body, "stream_options", dict, {})
    stop_ids = field_of(body, "stop_token_ids", list, [])
    stop_ids = frozenset(read_ids(stop_ids, "stop_token_ids").tolist() if stop_ids else ())
    ends = frozenset(i for i in stop_ids if i < tokenizer.vocab_size) if min_tokens else frozenset()
    return SamplingFields(
        max_tokens,
        None if temperature is None else warm_enough(temperature),
        field_of(body, "seed", int),
        count,
        tuple(stops),
        stop_ids,
        field_of(body, "stream", bool, False),
        bool(options.get("include_usage")),
        body.get("logprobs") is not None and body.get("logprobs") is not False,
        field_of(body, "return_token_ids", bool, False),
        replace(_read_draw(body, sampling, tokenizer), min_tokens=min_tokens, ends=ends),
        field_of(body, "ignore_eos", bool, False),
    )


def warm_enough(temperature: float) -> float:
    """The temperature of a request as it is drawn with."""
    return float(temperature) if temperature >= COLDEST else 0.0


def unread(body: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Names of the fields that ask for something although nothing reads them; `read` are those that are."""

    def asks(name: str, value: Any) -> bool:
        if value in (None, [], {}, "", *NEUTRAL.get(name, ()), *IDLE.get(name, ())):
            return False
        return not isinstance(value, dict) or any(asks(key, part) for key, part in value.items())

    names = [name for name, value in body.items() if name not in read and name not in ABOUT and asks(name, value)]
    return [name for name in names if FIELD.fullmatch(name)][:MOST_UNREAD]


def _number(
    body: Mapping[str, Any], name: str, low: float, high: float, neutral: float, *, above: bool = False
) -> float:
    """A number of a request between two bounds; `above`: not the lower one itself."""
    value = field_of(body, name, (int, float), neutral)
    if not low <= value <= high or (above and value == low):
        span = f"above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
        raise RequestRefused(f"{name} = {value}; must be {span}", name)
    return float(value)


def _read_draw(body: Mapping[str, Any], sampling: SamplingConfig, tokenizer: Tokenizer) -> DrawSettings:
    vocabulary = tokenizer.vocab_size
    top_k = field_of(body, "top_k", int, sampling.top_k)
    if top_k < -1:
        raise RequestRefused(f"top_k = {top_k}; must be at least 1, or 0 or -1 for all tokens", "top_k")
    cuts = {
        "top_k": min(max(top_k, 0), vocabulary),
        "top_p": _number(body, "top_p", 0, 1, sampling.top_p, above=True),
        "min_p": _number(body, "min_p", 0, 1, sampling.min_p),
    }
    return DrawSettings(
        **{name: None if value == getattr(sampling, name) else value for name, value in cuts.items()},
        bias=_read_bias(body, vocabulary),
        presence=_number(body, "presence_penalty", -2, 2, 0),
        frequency=_number(body, "frequency_penalty", -2, 2, 0),
        repetition=_number(body, "repetition_penalty", LEAST_REPETITION, MOST_REPETITION, 1),
        banned=_read_banned(body, tokenizer),
        top=_read_top(body),
    )


def _read_top(body: Mapping[str, Any]) -> int:
    """How many of the most likely tokens a request asks for: `top_logprobs`, or a number above 1 as `logprobs`."""
    logprobs, top = field_of(body, "logprobs", (bool, int), False), field_of(body, "top_logprobs", int, 0)
    for name, value in (("logprobs", logprobs), ("top_logprobs", top)):
        if not 0 <= value <= TOP:
            raise RequestRefused(f"{name} = {value}; must be 0 to {TOP}", name)
    if top and not logprobs:
        raise RequestRefused("top_logprobs without logprobs; set logprobs", "top_logprobs")
    return top or (logprobs if type(logprobs) is int and logprobs > 1 else 0)


def _read_banned(body: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ids of `bad_words`: of each text as it is and, where that is as long, after a space."""
    texts, banned = field_of(body, "bad_words", list, []), []
    if (
        not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts)
        or len(texts) > MOST_BANNED
    ):
        raise RequestRefused(
            f"bad_words must be up to {MOST_BANNED} texts of 1 to {MAX_STOP_LENGTH} characters", "bad_words"
        )
    for text in texts:
        plain = tuple(tokenizer.encode(text))
        spaced = tuple(tokenizer.encode(" " + text.lstrip()))
        banned += [plain] if plain else []
        banned += [spaced] if spaced and len(spaced) == len(plain) and spaced[0] != plain[0] else []
    return tuple(dict.fromkeys(banned))


def _read_bias(body: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    """`logit_bias`: from ids, which JSON writes as text, to numbers from -100 to 100."""
    listed = field_of(body, "logit_bias", dict, {})
    if len(listed) > MOST_BIASED:
        raise RequestRefused(f"logit_bias of {len(listed)} tokens; must be at most {MOST_BIASED}", "logit_bias")
    bias = {}
    for name, value in listed.items():
        if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocabulary):
            raise RequestRefused(
                f"logit_bias of {name!r:.40}; must be by token id, 0 to {vocabulary - 1}", "logit_bias"
            )
        if not isinstance(value, int | float) or isinstance(value, bool) or not -100 <= value <= 100:
            raise RequestRefused(f"logit_bias of {name} = {value!r:.40}; must be -100 to 100", "logit_bias")
        bias[int(name)] = float(value)
    return {token: value for token, value in bias.items() if value}


def _refuse_others(body: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise RequestRefused(f"{name} = {body[name]!r:.80} is not supported; leave it out", name, "unsupported")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none", "required") and not isinstance(choice, dict):
        raise RequestRefused(f"tool_choice = {choice!r:.80}; must be auto, none or required", "tool_choice")


def read_ids(value: Any, name: str) -> np.ndarray:
    """int32 ids from a list; raises RequestRefused for anything else."""
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 1 << 31 for i in value):
        raise RequestRefused(f"{name} must be a list of at least one token id", name)
    return np.asarray(value, np.int32)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that a request offers.

    Raises:
        RequestRefused: They are not functions with a name.
    """
    tools = field_of(body, "tools", list, [])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused("tools must be of type function, each with a function and its name", "tools")
    # `strict` speaks to the server: the policy reads the same as without it.
    tools = [tool | {"function": {k: v for k, v in tool["function"].items() if k != "strict"}} for tool in tools]
    return [] if body.get("tool_choice") == "none" else tools


def read_forced(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The tool that `tool_choice` forces: its name, empty for any of them; None if none is forced.

    Raises:
        RequestRefused: It is not offered.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise RequestRefused(f"tool_choice = {choice!r:.80} without tools; offer some, or leave it out", "tool_choice")
    if choice == "required":
        return names[0] if len(names) == 1 else ""
    if isinstance(choice, dict) and choice.get("type", "function") != "function":
        raise RequestRefused(
            f"tool_choice is of type {choice['type']!r:.80}; must be function, with a name. To allow some tools only, "
            "offer those alone",
            "tool_choice",
            "unsupported",
        )
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise RequestRefused(f"tool_choice names {name!r:.80}; the tools are {', '.join(names)[:200]}", "tool_choice")
    return str(name)


def stop_finder(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[np.ndarray, np.ndarray], int | None] | None:
    """See `SampleJob.find_stop`; None without a stop text."""
    if not stops:
        return None
    reach = 4 * max(map(len, stops))  # a character has at most four bytes, a token at least one

    def find(new: np.ndarray, before: np.ndarray) -> int | None:
        old, ids = before[-reach:].tolist(), new.tolist()
        earlier = tokenizer.decode(old)

        def ends(n: int) -> bool:
            text = tokenizer.decode(old + ids[:n])
            return any(text.count(stop) > earlier.count(stop) for stop in stops)

        return next((n for n in range(1, len(ids) + 1) if ends(n)), None) if ends(len(ids)) else None

    return find

"""The three forms of an answer: chat completion, text completion, token ids; each whole or in pieces of a stream."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.steering import RowSteering
from grpo_roc_jax.serving.answer_formats import (
    AROUND,
    AnswerGrammars,
    GrammarMask,
    TurnFormat,
    TurnGrammar,
    read_format,
    strict_schemas,
)
from grpo_roc_jax.serving.dialogues import (
    HELD_BACK,
    Context,
    Dialogues,
    TurnAnswer,
    new_parts,
    parts_of,
    read_answer,
)
from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.serving.sampling_fields import (
    MAX_CHOICES,
    READ,
    SamplingFields,
    read_forced,
    read_ids,
    read_sampling_fields,
    read_tools,
    unread,
)
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.types import TRUNCATED_STOPS

JSON = dict[str, Any]
READ_AGAIN = 24
"""Last ids that are decoded again with those that follow: the text of an id may depend on the ones before it."""


@dataclass(eq=False)
class SampledChoice:
    """One sampled answer, as far as it is known."""

    index: int
    prompt: np.ndarray
    begun: int = 0
    """Last ids of the prompt that the turn begins with."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Versions of the weights that drew the ids; empty until the answer has ended."""
    stop: str = ""
    """How it ended; empty before."""
    cached: int = 0
    """Tokens of the prompt that were found in the cache."""
    text: str = ""
    """The decoded ids, without the last ones where these end within a character."""
    sent: dict[str, int] = field(default_factory=dict)
    """Characters of each part that the stream has had."""
    offset: int = 0
    """Characters of the tokens whose log-probabilities the stream has had."""
    _start: int = 0
    _decoded: str = ""
    """Text of the ids from `_start` on that `text` holds."""

    def read(self, tokenizer: Tokenizer) -> None:
        """Extends the text by that of the last ids: the difference between two decodings of these alone."""
        now = tokenizer.decode(self.ids[self._start :])
        if now.endswith("\ufffd"):
            return
        self.text += now[len(self._decoded) :]
        self._decoded = now
        if len(self.ids) - self._start > 2 * READ_AGAIN:
            self._start = len(self.ids) - READ_AGAIN
            self._decoded = tokenizer.decode(self.ids[self._start :])

    @property
    def finish_reason(self) -> str | None:
        return ("length" if self.stop in TRUNCATED_STOPS else "stop") if self.stop else None

    @property
    def weight_versions(self) -> list[JSON]:
        """Spans of ids that one version of the weights has drawn."""
        edges = [0, *(np.flatnonzero(np.diff(self.versions)) + 1).tolist(), len(self.versions)]
        return [{"version": int(self.versions[a]), "start": a, "end": b} for a, b in pairwise(edges) if b > a]


class ReplyForm:
    """What the forms share. `prompts` are sampled `fields.count` times each; choices are numbered in that order."""

    path = name = chunk_name = prefix = ""
    closing = "data: [DONE]\n\n"
    """Ends a stream."""
    goes_on: Callable[[np.ndarray], bool] | None = None
    """See `SampleJob`."""
    reads: frozenset[str] = READ
    """Fields of a body that are read."""

    def __init__(self, body: Mapping[str, Any], tokenizer: Tokenizer, sampling: SamplingConfig):
        self.body, self.tokenizer = body, tokenizer
        self.fields: SamplingFields = read_sampling_fields(self._sampling_fields(), sampling, tokenizer)
        self.format = TurnFormat(read_format(self._sampling_fields()))
        self.not_applied: list[str] = unread(body, self.reads)
        """Fields of the request that change nothing here."""
        self.steering: Sequence[RowSteering] = ()
        """What each choice asks of its draws; empty for nothing."""
        self.model = self.agent = field_of(body, "model", str, "policy")
        self.prompts: list[np.ndarray] = []
        self.choices: list[SampledChoice] = []
        self.id, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
        self.begun = 0
        """Last ids of each prompt that the turn begins with."""
        self.known = 0
        """Tokens of earlier turns among those of the prompts."""

    def _sampling_fields(self) -> Mapping[str, Any]:
        return self.body

    def masks(self, grammars: AnswerGrammars) -> list[GrammarMask]:
        """For each choice the tokens that may follow, where the request says what the answer must look like.

        Raises:
            RequestRefused: That cannot be enforced.
        """
        raise NotImplementedError

    def scored(self, choice: SampledChoice, start: int = 0) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """(id, log-probability, most likely ids with theirs) of the sampled tokens from one on."""
        tops = self.steering[choice.index].top[start:] if self.steering else []
        listed = [[*zip(ids.tolist(), values.tolist(), strict=True)] for ids, values in tops] or [[]] * len(choice.ids)
        return [*zip(choice.ids[start:], choice.logprobs[start:], listed, strict=False)]

    def fault_of(self, choice: SampledChoice) -> str:
        """Why the form of a choice could not be enforced; empty if it was."""
        mask = self.steering[choice.index].mask if self.steering else None
        return mask.fault if isinstance(mask, GrammarMask) else ""

    def begin(self) -> None:
        """Makes the choices."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.fields.count)]
        if len(prompts) > MAX_CHOICES:
            raise RequestRefused(f"{len(prompts)} choices; must be at most {MAX_CHOICES}", "n")
        self.choices = [SampledChoice(i, prompt, self.begun) for i, prompt in enumerate(prompts)]

    def drawn(self, choice: SampledChoice, ids: list[int], logprobs: list[float]) -> Iterator[JSON]:
        """Adds to a choice; the pieces of a stream that follow from it."""
        first = not choice.ids
        choice.ids += ids
        choice.logprobs += logprobs
        if self.fields.stream:
            choice.read(self.tokenizer)
            yield from self._pieces(choice, ids, logprobs, first)

    def _pieces(self, choice: SampledChoice, ids: list[int], logprobs: list[float], first: bool) -> Iterator[JSON]:
        raise NotImplementedError

    def ended(self, choice: SampledChoice) -> Iterator[JSON]:
        """The last pieces of a choice."""
        raise NotImplementedError

    def whole(self) -> JSON:
        """The answer without a stream."""
        raise NotImplementedError

    def last_pieces(self) -> Iterator[JSON]:
        """The pieces of a stream after those of the choices."""
        if self.fields.usage_in_stream:
            yield self.around([], usage=self.usage)

    def framed(self, piece: JSON) -> str:
        """A piece as it is sent."""
        return f"data: {json.dumps(piece)}\n\n"

    def fault(self, error: RequestRefused) -> JSON:
        """The piece that tells of an error in the middle of a stream."""
        return error.body

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.stop for choice in self.choices)

    @property
    def version(self) -> int:
        """The oldest weights that drew a token of the answer; -1 if it has none."""
        return min((int(choice.versions.min()) for choice in self.choices if choice.versions.size), default=-1)

    @property
    def usage(self) -> JSON:
        prompt, sampled = sum(map(len, self.prompts)), sum(len(choice.ids) for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices[:: self.fields.count])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def around(self, choices: list[JSON], **others: Any) -> JSON:
        """Choices with what surrounds them."""
        name = self.chunk_name if self.fields.stream else self.name
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | others

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self.body.get("return_tokens_as_token_ids") else self.tokenizer.decode([token])

    def _token_fields(self, choice: SampledChoice) -> JSON:
        extra: JSON = {"token_ids": choice.ids} if self.fields.token_ids else {}
        return extra | ({"weight_versions": choice.weight_versions} if self._shows_versions else {})

    @property
    def _shows_versions(self) -> bool:
        return bool(self.body.get("return_weight_versions"))

    def before_stop(self, text: str) -> str:
        """The text up to the first stop text."""
        return text[: min((at for stop in self.fields.stops if (at := text.find(stop)) >= 0), default=None)]

    @property
    def _held(self) -> int:
        """Last characters of an unfinished answer that may become a stop text or a mark."""
        return max(HELD_BACK, *map(len, self.fields.stops), 0)

    def piece(self, choice: SampledChoice, content: JSON, **others: Any) -> JSON:
        """A piece of a stream."""
        return self.around([{"index": choice.index, **content, "finish_reason": None} | others])


class ChatReply(ReplyForm):
    """`/v1/chat/completions`."""

    path, name, chunk_name, prefix = "/v1/chat/completions", "chat.completion", "chat.completion.chunk", "chatcmpl-"

    reads = READ | {"messages", "tools", "tool_choice"}
    reads_within: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Field that holds an object -> the fields of it that are read."""

    def __init__(
        self,
        body: Mapping[str, Any],
        tokenizer: Tokenizer,
        sampling: SamplingConfig,
        *,
        dialogues: Dialogues,
        session: str,
    ):
        super().__init__(self.as_chat(body), tokenizer, sampling)
        self.not_applied = unread(body, self.reads)
        for name, read in self.reads_within.items():
            within = body.get(name)
            self.not_applied += [f"{name}.{key}" for key in unread(within if isinstance(within, Mapping) else {}, read)]
        self.dialogues = dialogues
        tools, messages = read_tools(self.body), self.body.get("messages")
        self.context: Context = dialogues.context(session, messages, tools, read_forced(self.body, tools))
        self.prompts, self.known = [self.context.ids], self.context.known
        self.begun = len(self.context.begun_ids)
        self.goes_on = self.context.goes_on
        if self.context.chat.config.max_calls_per_turn == 1:  # a turn ends with its first call anyway
            one_call = ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use")
            self.not_applied = [name for name in self.not_applied if name not in one_call]
        strict = strict_schemas(self.body, field_of(self.body, "tools", list, []) if tools else [])
        self.format = replace(self.format, strict=strict)
        self._tools = tools

    def masks(self, grammars: AnswerGrammars) -> list[GrammarMask]:
        context = self.context
        turn = TurnGrammar(context.chat, self._tools, self.format)
        text = turn.text()
        self.not_applied += turn.unenforced
        ends = {context.chat.end_id, context.chat.call_end_id}
        return grammars.masks(text, ends, context.begun_ids, self.format.params[0], self.fields.count)

    def as_chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request in the form of chat completions.

        Raises:
            RequestRefused: It is malformed, or asks for what is not served.
        """
        return body

    def _logprobs(self, choice: SampledChoice, start: int = 0) -> JSON | None:
        if not self.fields.logprobs:
            return None

        def entry(token: int, value: float) -> JSON:
            return {"token": self._token(token), "logprob": value, "bytes": list(self.tokenizer.token_bytes(token))}

        tokens = [
            entry(token, value) | {"top_logprobs": [entry(*alternative) for alternative in top]}
            for token, value, top in self.scored(choice, start)
        ]
        return {"content": tokens, "refusal": None}

    def _opening(self, choice: SampledChoice) -> Iterator[JSON]:
        """The first pieces of a choice."""
        extra = {"prompt_token_ids": choice.prompt.tolist()} if self.fields.token_ids else {}
        yield self.piece(choice, {"delta": {"role": "assistant", "content": ""}}) | extra

    def _pieces(self, choice: SampledChoice, ids: list[int], logprobs: list[float], first: bool) -> Iterator[JSON]:
        if first:
            yield from self._opening(choice)
        context, shown = self.context, self.before_stop(choice.text)
        begun = context.chat.tokenizer.decode(context.begun_ids)
        reasoning, text = parts_of(context.chat, begun + shown, tools=context.tools)
        if not reasoning and context.chat.opens_thought and not begun:
            text = ""  # the prompt has opened a thought: whether this is one is known when it is closed
        if begun:
            reasoning, text = new_parts(context, reasoning, text)
        delta = self._growth(choice, *(part[: max(0, len(part) - self._held)] for part in (reasoning, text)))
        fields = {"logprobs": self._logprobs(choice, len(choice.ids) - len(ids))} if self.fields.logprobs else {}
        fields |= {"token_ids": ids} if self.fields.token_ids else {}
        if delta or fields:
            yield self.piece(choice, {"delta": delta}, **fields)

    def _growth(self, choice: SampledChoice, reasoning: str, content: str) -> JSON:
        delta = {}
        for name, text in (("reasoning_content", reasoning), ("content", content)):
            if new := text[choice.sent.get(name, 0) :]:
                delta[name], choice.sent[name] = new, len(text)
        return delta

    def ended(self, choice: SampledChoice) -> Iterator[JSON]:
        if not self.fields.stream:
            return
        if not choice.ids:  # it ended before its first token
            yield from self._opening(choice)
        answer = self.answer(choice)
        if delta := self._growth(choice, answer.reasoning, answer.content):
            yield self.piece(choice, {"delta": delta})
        calls = _tool_calls(answer)
        for i, call in enumerate(calls):  # one a piece: some clients read only the first of a piece
            yield self.piece(choice, {"delta": {"tool_calls": [{"index": i} | call]}})
        versions = {"weight_versions": choice.weight_versions} if self._shows_versions else {}
        reason = "tool_calls" if calls else choice.finish_reason
        yield self.piece(choice, {"delta": {}}, finish_reason=reason, **versions)

    def answer(self, choice: SampledChoice) -> TurnAnswer:
        """The parsed turn of a choice that has ended, which is remembered."""
        answer = read_answer(self.context, choice.ids, self.fields.stops)
        ids = np.concatenate([choice.prompt, np.asarray(choice.ids, np.int32)])
        self.dialogues.remember(self.context, answer, ids)
        return answer

    def whole(self) -> JSON:
        choices = []
        for choice in self.choices:
            answer = self.answer(choice)
            calls = _tool_calls(answer)
            message: JSON = {"role": "assistant", "content": answer.content or (None if calls else "")}
            message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            message |= {"tool_calls": calls} if calls else {}
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(choice),
                    "finish_reason": "tool_calls" if calls else choice.finish_reason,
                }
                | self._token_fields(choice)
            )
        extra = {"prompt_token_ids": self.context.ids.tolist()} if self.fields.token_ids else {}
        return self.around(choices, usage=self.usage, policy_version=self.version, **extra)


class EventReply(ChatReply):
    """A chat completion in another form, whose stream is of named events."""

    closing = ""

    def framed(self, piece: JSON) -> str:
        return f"event: {piece['type']}\n{super().framed(piece)}"

    def last_pieces(self) -> Iterator[JSON]:
        return iter(())


def call_ids(prefix: str, answer: TurnAnswer) -> list[str]:
    """A new id for each call of an answer. They sort as the calls stand: some clients (smolagents) send calls that ran
    at a time back in the order of their ids, and another order would be another conversation."""
    common = uuid.uuid4().hex[:18]
    return [f"{prefix}{common}{number:06x}" for number in range(len(answer.calls))]


def _tool_calls(answer: TurnAnswer) -> list[JSON]:
    return [
        {
            "id": own_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for own_id, call in zip(call_ids("call_", answer), answer.calls, strict=True)
    ]


class PlainReply(ReplyForm):
    """What `/v1/completions` and `/inference/v1/generate` share: a form is that of the whole answer."""

    def __init__(self, body: Mapping[str, Any], tokenizer: Tokenizer, sampling: SamplingConfig, *, chat: ChatFormat):
        super().__init__(body, tokenizer, sampling)
        self.end_id = chat.end_id

    def masks(self, grammars: AnswerGrammars) -> list[GrammarMask]:
        answer = self.format.answer
        assert answer is not None
        text = f"start: WS {answer.rule}\nWS: /{AROUND}/\n"
        count = len(self.prompts) * self.fields.count
        return grammars.masks(text, {self.tokenizer.eos_id, self.end_id}, (), answer.param, count)


class TextReply(PlainReply):
    """`/v1/completions`; a prompt is text, in which tags of the template count, or token ids."""

    path, name, chunk_name, prefix = "/v1/completions", "text_completion", "text_completion", "cmpl-"
    reads = READ | {"prompt"}

    def __init__(self, body: Mapping[str, Any], tokenizer: Tokenizer, sampling: SamplingConfig, *, chat: ChatFormat):
        super().__init__(body, tokenizer, sampling, chat=chat)
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        for item in prompt if several else [prompt]:
            ids = np.asarray(chat.raw_ids(item), np.int32) if isinstance(item, str) else read_ids(item, "prompt")
            if not len(ids):
                raise RequestRefused("prompt is empty; must be text or token ids", "prompt")
            self.prompts.append(ids)

    def _logprobs(self, choice: SampledChoice, start: int = 0) -> JSON | None:
        if not self.fields.logprobs:
            return None
        scored = self.scored(choice, start)
        tokens = [self._token(token) for token, _, _ in scored]
        offsets = np.cumsum([choice.offset, *map(len, tokens)])[:-1].tolist()
        tops = [{self._token(other): score for other, score in [*top, (token, value)]} for token, value, top in scored]
        listed = {"tokens": tokens, "token_logprobs": [value for _, value, _ in scored]}
        return listed | {"top_logprobs": tops if self.fields.draw.top else None, "text_offset": offsets}

    def _pieces(self, choice: SampledChoice, ids: list[int], logprobs: list[float], first: bool) -> Iterator[JSON]:
        sent, text = choice.sent.get("text", 0), self.before_stop(choice.text)
        text = text[sent : max(sent, len(text) - self._held)]
        choice.sent["text"] = sent + len(text)
        fields = {"token_ids": ids} if self.fields.token_ids else {}
        fields |= {"prompt_token_ids": choice.prompt.tolist()} if self.fields.token_ids and first else {}
        scores = self._logprobs(choice, len(choice.ids) - len(ids))
        choice.offset += sum(map(len, scores["tokens"])) if scores else 0
        yield self.piece(choice, {"text": text, "logprobs": scores}, **fields)

    def _text(self, choice: SampledChoice) -> str:
        """The text up to a stop text, without the token that ended it."""
        ids = choice.ids
        ended = choice.finish_reason == "stop" and ids and ids[-1] in self.tokenizer.special_ids
        return self.before_stop(self.tokenizer.decode(ids[:-1] if ended else ids))

    def ended(self, choice: SampledChoice) -> Iterator[JSON]:
        if self.fields.stream:
            rest = self._text(choice)[choice.sent.get("text", 0) :]
            yield self.piece(choice, {"text": rest, "logprobs": None}, finish_reason=choice.finish_reason)

    def whole(self) -> JSON:
        choices = []
        for choice in self.choices:
            extra = {"prompt_token_ids": choice.prompt.tolist()} if self.fields.token_ids else {}
            answer = {"index": choice.index, "text": self._text(choice), "finish_reason": choice.finish_reason}
            answer |= {"logprobs": self._logprobs(choice)}
            choices.append(answer | self._token_fields(choice) | extra)
        return self.around(choices, usage=self.usage, policy_version=self.version)


class TokenReply(PlainReply):
    """`/inference/v1/generate`: token ids in and out, with log-probabilities and the versions that drew them.

    A log-probability carries its token as `token_id:ID`, which the client of verifiers reads, and as a number, which
    vLLM's route sends.
    """

    path, name, prefix = "/inference/v1/generate", "generate", "gen-"
    reads = frozenset({"model", "token_ids", "prompt_token_ids", "sampling_params", "stream", "return_token_ids"})

    def __init__(self, body: Mapping[str, Any], tokenizer: Tokenizer, sampling: SamplingConfig, *, chat: ChatFormat):
        super().__init__(body, tokenizer, sampling, chat=chat)
        self.not_applied += unread(self._sampling_fields(), READ)
        if self.fields.stream or body.get("stream"):
            raise RequestRefused("stream is not supported here; use /v1/completions with token ids", "stream")
        self.prompts = [read_ids(body.get("token_ids", body.get("prompt_token_ids")), "token_ids")]

    def _sampling_fields(self) -> Mapping[str, Any]:
        return field_of(self.body, "sampling_params", dict, {})

    def ended(self, choice: SampledChoice) -> Iterator[JSON]:
        return iter(())

    def whole(self) -> JSON:
        choices = [
            {
                "index": choice.index,
                "token_ids": choice.ids,
                "finish_reason": choice.finish_reason,
                "logprobs": {
                    "content": [
                        _numbered(token, value)
                        | ({"top_logprobs": [_numbered(*alternative) for alternative in top]} if top else {})
                        for token, value, top in self.scored(choice)
                    ]
                },
                "weight_versions": choice.weight_versions,
            }
            for choice in self.choices
        ]
        return self.around(choices, request_id=self.id, usage=self.usage, policy_version=self.version)


def _numbered(token: int, logprob: float) -> JSON:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}

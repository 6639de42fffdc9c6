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
class GrowingText:
    """The text of ids that come one after another."""

    text: str = ""
    """Without the last ids where these end within a character."""
    unfinished: str = ""
    """The text of those last ids, U+FFFD for each part of a character."""
    _ids: list[int] = field(default_factory=list)
    """The last ids."""
    _decoded: str = ""
    """Their text as far as `text` ends with it."""

    def add(self, ids: Sequence[int], tokenizer: Tokenizer) -> None:
        """Extends the text by the difference between two decodings of the last ids alone."""
        self._ids += ids
        now = tokenizer.decode(self._ids)
        # Some decoders replace all bytes in a row until they are whole characters, those of finished ones as well.
        finished = now.rstrip("\ufffd")
        if len(finished) > len(self._decoded):
            self.text, self._decoded = self.text + finished[len(self._decoded) :], finished
        self.unfinished = now[len(self._decoded) :]
        if len(self._ids) > 2 * READ_AGAIN and not self.unfinished:
            last = self._ids[-READ_AGAIN:]
            decoded = tokenizer.decode(last)
            if not decoded.startswith("\ufffd"):  # it would begin within a character
                self._ids, self._decoded = last, decoded

    def place_of(self, token: int, tokenizer: Tokenizer) -> int:
        """Where a further id begins: with the character that it goes on with, or after all before it."""
        goes_on = b"\x80" <= tokenizer.token_bytes(token)[:1] < b"\xc0"
        return len(self.text) + (0 if goes_on else len(self.unfinished))


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
    growing: GrowingText = field(default_factory=GrowingText)
    offsets: list[int] = field(default_factory=list)
    """Where in the text each id begins, for forms that say it."""
    sent: dict[str, int] = field(default_factory=dict)
    """Characters of each part that the stream has had."""

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
    reads_within: ClassVar[Mapping[str, frozenset[str]]] = {"stream_options": frozenset({"include_usage"})}
    """Field that holds an object -> the fields of it that are read."""

    def __init__(self, body: Mapping[str, Any], tokenizer: Tokenizer, sampling: SamplingConfig):
        self.body, self.tokenizer = body, tokenizer
        self.fields: SamplingFields = read_sampling_fields(self._sampling_fields(), sampling, tokenizer)
        self.sampling = sampling
        """What the server draws with where the request says nothing."""
        self.format = TurnFormat(read_format(self._sampling_fields()))
        self.not_applied: list[str] = self._unread(body)
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

    def _unread(self, body: Mapping[str, Any]) -> list[str]:
        names = unread(body, self.reads)
        for name, read in self.reads_within.items():
            within = body.get(name)
            names += [f"{name}.{key}" for key in unread(within if isinstance(within, Mapping) else {}, read)]
        return names

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
        self.choices = [SampledChoice(i, prompt, self.begun) for i, prompt in enumerate(prompts)]

    def drawn(self, choice: SampledChoice, ids: list[int], logprobs: list[float]) -> Iterator[JSON]:
        """Adds to a choice; the pieces of a stream that follow from it."""
        first = not choice.ids
        choice.ids += ids
        choice.logprobs += logprobs
        self._read(choice, ids)
        if self.fields.stream:
            yield from self._pieces(choice, ids, logprobs, first)

    def _read(self, choice: SampledChoice, ids: list[int]) -> None:
        """Extends the text of a choice, if something is made of it before its end."""
        if self.fields.stream:
            choice.growing.add(ids, self.tokenizer)

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
        """The name of a token, with the space that it begins with."""
        return f"token_id:{token}" if self.body.get("return_tokens_as_token_ids") else self._named(token)

    def _named(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="replace")

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
        self.not_applied = self._unread(body)
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
        context, shown = self.context, self.before_stop(choice.growing.text)
        begun = context.chat.tokenizer.decode(context.begun_ids)
        reasoning, text = parts_of(context.chat, begun + shown, tools=context.tools)
        if not reasoning and context.chat.opens_thought and not begun:
            text = ""  # the prompt has opened a thought: whether this is one is known when it is closed
        if begun:
            reasoning, text = new_parts(context, reasoning, text)
        # Text is sent after the whole thought: it must be longer than what is held back.
        sendable = _without_last(reasoning, self._held - len(text)), _without_last(text, self._held)
        delta = self._growth(choice, *sendable)
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


def _without_last(text: str, count: int) -> str:
    return text[: max(0, len(text) - max(0, count))]


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
        prompts = prompt if several else [prompt]
        if (count := len(prompts) * self.fields.count) > MAX_CHOICES:
            raise RequestRefused(f"{count} choices; must be at most {MAX_CHOICES}", "n")
        for item in prompts:
            ids = np.asarray(chat.raw_ids(item), np.int32) if isinstance(item, str) else read_ids(item, "prompt")
            if not len(ids):
                raise RequestRefused("prompt is empty; must be text or token ids", "prompt")
            self.prompts.append(ids)

    def _logprobs(self, choice: SampledChoice, start: int = 0) -> JSON | None:
        if not self.fields.logprobs:
            return None
        scored = self.scored(choice, start)
        tokens = [self._token(token) for token, _, _ in scored]
        tops = [{self._token(other): score for other, score in [*top, (token, value)]} for token, value, top in scored]
        listed = {"tokens": tokens, "token_logprobs": [value for _, value, _ in scored]}
        tops = tops if self.fields.draw.top else None
        return listed | {"top_logprobs": tops, "text_offset": choice.offsets[start:]}

    def _named(self, token: int) -> str:
        """A part of a character by its bytes, as OpenAI names it: parts of several have one name each."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"bytes:{str(data)[2:-1]}"

    def _read(self, choice: SampledChoice, ids: list[int]) -> None:
        if not self.fields.logprobs:
            super()._read(choice, ids)
            return
        for token in ids:  # one by one, for the place of each
            offset = choice.growing.place_of(token, self.tokenizer)
            choice.offsets.append(max([offset, *choice.offsets[-1:]]))
            choice.growing.add([token], self.tokenizer)

    def _pieces(self, choice: SampledChoice, ids: list[int], logprobs: list[float], first: bool) -> Iterator[JSON]:
        sent, text = choice.sent.get("text", 0), self.before_stop(choice.growing.text)
        text = text[sent : max(sent, len(text) - self._held)]
        choice.sent["text"] = sent + len(text)
        fields = {"token_ids": ids} if self.fields.token_ids else {}
        fields |= {"prompt_token_ids": choice.prompt.tolist()} if self.fields.token_ids and first else {}
        scores = self._logprobs(choice, len(choice.ids) - len(ids))
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
    reads_within: ClassVar[Mapping[str, frozenset[str]]] = {}

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

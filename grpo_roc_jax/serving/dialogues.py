"""Messages of a chat as token ids, and back.

Messages come back altered: without the thought, with other white space, with calls written as text. What was sampled is
therefore remembered under a key of the messages so far in a normal form. A request that continues a remembered
conversation goes on from its ids; only what follows is encoded.
"""

import ast
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.text.calls import THOUGHTS, without_thoughts
from grpo_roc_jax.text.chat_format import ChatFormat, make_chat
from grpo_roc_jax.text.config import CHATML_TAGS, TextConfig
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.types import Problem, ToolCall

REMEMBERED_TOKENS = 1 << 24
"""Ids of conversations that are remembered, the longest unused leave first; 64 MiB."""
FORMATS = 256
"""Most chat formats that are cached: one for each system text with its tools."""
CALLS_AS_TEXT = "Calling tools:\n"
"""Before the list of calls in a message of smolagents."""
CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "```tool_code")
"""Where the calls of a turn begin."""
HELD_BACK = max(map(len, (*CALL_MARKS, *CHATML_TAGS, "<|end_of_text|>")))
"""Last characters of an unfinished turn that may turn out to be such a mark."""


@dataclass(frozen=True)
class Said:
    """One message."""

    role: Literal["user", "assistant", "tool"]
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments as canonical JSON."""
    reasoning: str = ""

    @property
    def normal(self) -> str:
        """The form in which messages are compared."""
        text, calls = self.text, self.calls
        if self.role == "assistant":
            text = without_thoughts(text)
            before, mark, rest = text.partition(CALLS_AS_TEXT)
            if mark and not calls and (written := _written_calls(rest)):
                text, calls = before, written
        return json.dumps([self.role, " ".join(text.split()), calls])


@dataclass(frozen=True)
class Context:
    """The ids of a request's messages."""

    ids: np.ndarray
    key: bytes
    """Of the messages; see `Dialogues.remember`."""
    chat: ChatFormat
    """Parses the answer."""
    tools: bool
    """Whether calls in the answer are reported as such."""
    known: int = 0
    """First ids that come from earlier turns."""


@dataclass(frozen=True)
class TurnAnswer:
    """A sampled turn in the terms of the API."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class Dialogues:
    """Conversations under one tokenizer."""

    def __init__(self, config: TextConfig, tokenizer: Tokenizer):
        self._config, self._tokenizer = replace(config, instruction="", tools_section=False), tokenizer
        self._formats: OrderedDict[tuple[str, str], ChatFormat] = OrderedDict()
        self._known: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._held = 0

    def context(self, session: str, messages: Any, tools: Sequence[Mapping[str, Any]] = ()) -> Context:
        """The ids of a request's messages, the next turn of the policy opened.

        Args:
            session: Conversations of different sessions do not know of each other.
            messages: As OpenAI's chat completions take them.
            tools: The same.

        Raises:
            RequestRefused: Messages that are malformed or cannot be written in this template.
        """
        system, said = read_messages(messages)
        listed = json.dumps(list(tools))
        chat = self._format(system, listed)
        key = _digest(session.encode(errors="replace"), system.encode(), listed.encode())
        keys = [key := _digest(key, one.normal.encode()) for one in said]
        ids: list[int] = []
        begin = 0
        for i in reversed(range(len(said))):
            if said[i].role == "assistant" and (found := self._known.get(keys[i])) is not None:
                self._known.move_to_end(keys[i])
                ids, begin = found.tolist(), i + 1
                break
        known = len(ids)
        self._extend(chat, ids, said[begin:])
        return Context(np.asarray(ids, np.int32), keys[-1], chat, bool(tools), known)

    def remember(self, context: Context, answer: TurnAnswer, ids: np.ndarray) -> None:
        """Notes the ids of a conversation up to and with the answer to its last message."""
        key = _digest(context.key, said_of(answer).normal.encode())
        self._held += len(ids) - len(self._known.pop(key, ()))
        self._known[key] = ids
        while self._held > REMEMBERED_TOKENS:
            self._held -= len(self._known.popitem(last=False)[1])

    def _format(self, system: str, tools: str) -> ChatFormat:
        key = (system, tools)
        if key not in self._formats:
            listed = json.loads(tools)
            config = replace(self._config, tools_section=bool(listed), system=system or self._config.system)
            try:
                self._formats[key] = make_chat(config, self._tokenizer, listed)
            except (ValueError, KeyError, TypeError) as error:
                raise RequestRefused(f"the chat template refuses system text or tools: {error}", "tools") from error
            if len(self._formats) > FORMATS:
                self._formats.popitem(last=False)
        self._formats.move_to_end(key)
        return self._formats[key]

    def _extend(self, chat: ChatFormat, ids: list[int], said: Sequence[Said]) -> None:
        """Appends further messages to ids; user text and outputs of tools are plain text."""
        opened, at = False, 0
        while at < len(said):
            one = said[at]
            if opened and one.role != "assistant":
                _close(chat, ids)
            closed = ids[-1:] == [chat.end_id] and not opened
            if one.role == "assistant":
                if not opened:
                    raise RequestRefused("an assistant message must follow a message of a user or tool", "messages")
                ids += [*chat.raw_ids(written(chat, one)), chat.end_id]
            elif one.role == "user":
                first = Problem("", one.text, "", "serve")
                ids += chat.question_ids(one.text, closed=closed) if ids else chat.prompt_ids(first)
            elif not ids:
                raise RequestRefused("a tool message must follow the call that it answers", "messages")
            else:
                outputs = [one.text]
                while at + 1 < len(said) and said[at + 1].role == "tool":
                    at += 1
                    outputs.append(said[at].text)
                ids += chat.shown_ids(outputs, closed=closed, calls=())
            opened, at = one.role != "assistant", at + 1
        if not opened:
            raise RequestRefused("the last message must be of a user or tool", "messages")


def _close(chat: ChatFormat, ids: list[int]) -> None:
    """Takes the turn that they open from the end of ids."""
    turn = chat.raw_ids(chat.glue.prompt_close)
    if not turn or ids[-len(turn) :] != turn:
        raise RequestRefused("this chat template cannot write a user message after the output of a tool", "messages")
    del ids[-len(turn) :]


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=16).digest()


def read_messages(messages: Any) -> tuple[str, list[Said]]:
    """(system text, the other messages, consecutive ones of a user joined).

    Raises:
        RequestRefused: They are malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list of at least one message", "messages")
    systems: list[str] = []
    said: list[Said] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise RequestRefused(f"{where} is {type(message).__name__}; must be an object", "messages")
        role, text = message.get("role"), text_of(message.get("content"), where)
        if role in ("system", "developer") and not said:
            systems.append(text)
        elif role in ("system", "developer", "user"):
            said.append(Said("user", text))
        elif role == "assistant":
            reasoning = field_of(message, "reasoning_content", str) or field_of(message, "reasoning", str, "")
            said.append(Said("assistant", text, _calls_of(message, where), reasoning))
        elif role == "tool":
            said.append(Said("tool", text))
        else:
            raise RequestRefused(f"{where}.role is {role!r}; must be system, user, assistant or tool", "messages")
    system, said = "\n\n".join(systems), _merged(said)
    return (system, said) if said else ("", [Said("user", system)])


def _merged(said: Sequence[Said]) -> list[Said]:
    """Messages, with consecutive ones of a user as one."""
    found: list[Said] = []
    for of_user, run in groupby(said, lambda one: one.role == "user"):
        messages = list(run)
        found += [Said("user", "\n\n".join(one.text for one in messages))] if of_user else messages
    return found


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: text, null, or a list of text parts."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    texts = ["" if text is None else text for text in texts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestRefused(f"{where}.content must be text or a list of text parts; images are not supported")
    return "".join(texts).encode(errors="replace").decode()  # JSON may hold unpaired surrogates


def _calls_of(message: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    try:
        return tuple(_call(call["function"]) for call in message.get("tool_calls") or ())
    except (KeyError, TypeError, ValueError):
        raise RequestRefused(f"{where}.tool_calls must be calls of functions with JSON arguments", "messages") from None


def _call(function: Mapping[str, Any]) -> tuple[str, str]:
    arguments = function["arguments"]
    return function["name"], json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments)


def _written_calls(text: str) -> tuple[tuple[str, str], ...]:
    """Calls from a Python list of them; none if it is something else."""
    try:
        return tuple(_call(call["function"]) for call in ast.literal_eval(text.strip()))
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ()


def said_of(answer: TurnAnswer) -> Said:
    """The message by which an answer comes back."""
    calls = tuple((call.name, json.dumps(call.arguments)) for call in answer.calls)
    return Said("assistant", answer.content, calls, answer.reasoning)


def written(chat: ChatFormat, said: Said) -> str:
    """The text of a turn that was not sampled here, in the form of the template."""
    text = said.text if THOUGHTS[1][1] in said.text else f"{said.reasoning}</reason>{said.text}"
    calls = (f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in said.calls)
    return chat.written(text + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls))


def split_thought(text: str) -> tuple[str, str]:
    """(thought, what follows it) of a turn; a thought that is not closed counts as text unless it is marked."""
    for opening, closing in THOUGHTS:
        thought, mark, rest = text.partition(closing)
        if mark or text.lstrip().startswith(opening):
            return thought.strip().removeprefix(opening).strip("\n"), rest.lstrip("\n")
    return "", text


def content_of(text: str, calls: Sequence[ToolCall] = ()) -> str:
    """The text of a turn before its calls."""
    marks = [*CALL_MARKS, *(call.raw for call in calls if call.raw)]
    ends = [at for mark in marks if (at := text.find(mark)) >= 0]
    return text[: min(ends)].rstrip() if ends else text


def read_answer(context: Context, ids: Sequence[int], stops: Sequence[str]) -> TurnAnswer:
    """A sampled turn as content, reasoning and calls; a stop text and what follows it is cut off. Malformed calls
    stay text, since the API has no place for them."""
    parsed = context.chat.parse_turn(ids)
    text = parsed.text
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if ends:
        return TurnAnswer(*split_thought(text[: min(ends)])[::-1])
    reasoning, text = split_thought(text)
    calls = tuple(call for call in parsed.calls if call.fault is None) if context.tools else ()
    return TurnAnswer(content_of(text, calls) if calls else text, reasoning, calls)

"""Messages of a chat as token ids, and back.

Messages come back altered: without the thought, with other white space, with calls written as text. What was sampled is
therefore remembered under a key of the messages so far in a normal form. A request that continues a remembered
conversation goes on from its ids; only what follows is encoded. A last message of an assistant is a turn that has
begun, which the answer goes on with.
"""

import ast
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.text.calls import THOUGHTS, without_thoughts
from grpo_roc_jax.text.chat_format import ChatFormat, make_chat
from grpo_roc_jax.text.config import CHATML_TAGS, TextConfig
from grpo_roc_jax.text.conventions import CONVENTIONS
from grpo_roc_jax.text.replies import UnmatchedReply, answered_id, id_of_call, in_order_of_calls
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.types import Problem, ToolCall

REMEMBERED_TOKENS = 1 << 24
"""Ids of conversations that are remembered, the longest unused leave first; 64 MiB."""
FORMATS = 256
"""Most chat formats that are cached: one for each system text with its tools."""
CALLS_AS_TEXT = "Calling tools:\n"
"""Before the list of calls in a message of smolagents."""
CALL_MARKS = tuple(mark for form in CONVENTIONS.values() for mark in form.openings)
"""Where the calls of a turn begin."""
HELD_BACK = max(map(len, (*CALL_MARKS, *CHATML_TAGS, "<|end_of_text|>", "<|start|>assistant<|channel|>commentary")))
"""Last characters of an unfinished turn that may turn out to be such a mark."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold a thought; the first that is given counts."""


@dataclass(frozen=True)
class DialogueMessage:
    """One message."""

    role: Literal["user", "assistant", "tool"]
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments as canonical JSON; arguments that are no JSON as a JSON string."""
    reasoning: str = ""

    @property
    def normal(self) -> str:
        """The form in which messages are compared."""
        text, calls = self.text, self.calls
        if self.role == "assistant":
            text = without_thoughts(text)
            before, mark, rest = text.partition(CALLS_AS_TEXT)
            if mark and not calls and (written := _written_calls(rest)):
                text, calls = before, tuple(call for call, _ in written)
            text = " ".join(text.split())
        return json.dumps([self.role, text.strip(), calls])

    @property
    def thought(self) -> str:
        """The form in which thoughts are compared; empty if the message has none."""
        marked = self.role == "assistant" and self.text.lstrip().startswith(tuple(mark for mark, _ in THOUGHTS))
        return " ".join((self.reasoning or (split_thought(self.text)[0] if marked else "")).split())


@dataclass(frozen=True, eq=False)
class SampledDialogue:
    """A conversation up to and with a sampled turn."""

    ids: np.ndarray
    calls: tuple[ToolCall, ...]
    """Of that turn; their own ids and names may stand around their results."""


@dataclass(frozen=True)
class Context:
    """The ids of a request's messages."""

    ids: np.ndarray
    key: bytes
    """Digest of the messages, without a turn that has begun; see `Dialogues.remember`."""
    chat: ChatFormat
    """Parses the answer."""
    tools: bool
    """Whether calls in the answer are reported as such."""
    thoughts: tuple[str, ...] = ()
    """The thought of each of these messages, empty for none."""
    known: int = 0
    """First ids that come from earlier turns."""
    begun: DialogueMessage | None = None
    """The last message, if it is of an assistant: the answer goes on with its turn."""
    begun_ids: tuple[int, ...] = ()
    """Its ids, the last ones of `ids`."""

    def goes_on(self, ids: np.ndarray) -> bool:
        """See `SampleJob.goes_on`."""
        return self.chat.goes_on([*self.begun_ids, *ids.tolist()])


@dataclass(frozen=True)
class TurnAnswer:
    """A sampled turn in the terms of the API."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class Dialogues:
    """Conversations under one tokenizer."""

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, *, most_tokens: int = REMEMBERED_TOKENS):
        """`most_tokens`: ids of conversations that are remembered."""
        self._config, self._tokenizer = replace(config, instruction="", tools_section=False), tokenizer
        self._most_tokens = most_tokens
        self._formats: OrderedDict[tuple[str, str], ChatFormat] = OrderedDict()
        self._known: OrderedDict[tuple[bytes, tuple[str, ...]], SampledDialogue] = OrderedDict()
        """By the digest of the messages and the thought of each."""
        self._thoughts: dict[bytes, dict[tuple[str, ...], None]] = {}
        """The thoughts of what is known, by the digest of the messages; the last sampled last."""
        self.remembered = 0
        """Number of ids that are remembered."""

    def context(
        self, session: str, messages: Any, tools: Sequence[Mapping[str, Any]] = (), forced: str | None = None
    ) -> Context:
        """The ids of a request's messages, the next turn of the policy opened.

        Args:
            session: Conversations of different sessions do not know of each other.
            messages: As OpenAI's chat completions take them.
            tools: The same.
            forced: Name of the tool that the turn must call, empty for any of them. The turn begins with the opening of
                the call, after a thought of no length; the policy goes on.

        Raises:
            RequestRefused: Messages that are malformed or cannot be written in this template.
        """
        system, turns = read_messages(messages)
        listed = json.dumps(list(tools))
        chat = self._format(system, listed)
        begun = turns.pop() if turns[-1].role == "assistant" else None
        if begun is not None and begun.calls:
            raise RequestRefused(
                "the last message is an assistant's with tool_calls; their results must follow it", "messages"
            )
        key = _digest(session.encode(errors="replace"), system.encode(), listed.encode())
        keys = [key := _digest(key, turn.normal.encode()) for turn in turns]
        thoughts = tuple(turn.thought for turn in turns)
        ids: list[int] = []
        begin = 0
        calls: tuple[ToolCall, ...] = ()
        for i in reversed(range(len(turns))):
            recorded = self._recorded(keys[i], thoughts[: i + 1]) if keys[i] in self._thoughts else None
            if recorded is not None:
                self._known.move_to_end((keys[i], recorded))
                entry = self._known[keys[i], recorded]
                ids, begin, calls = entry.ids.tolist(), i + 1, entry.calls
                thoughts = recorded + thoughts[i + 1 :]
                break
        known = len(ids)
        opened = self._extend(chat, ids, turns[begin:], calls)
        begun_ids: list[int] = []
        if begun is not None:
            if not opened:
                ids += chat.reopened_ids() if ids else chat.prompt_ids(Problem("", "", "", "serve"))
            if begun.text.strip() or begun.reasoning:
                begun_ids = chat.raw_ids(written(chat, begun))
            ids += begun_ids
        elif not opened:
            raise RequestRefused("there is no message to answer", "messages")
        if forced is not None:
            if begun is not None:
                raise RequestRefused(
                    "tool_choice forces a call, but the last message has begun the turn", "tool_choice"
                )
            begun_ids = chat.raw_ids(chat.call_opening(forced))
            ids += begun_ids
        return Context(np.asarray(ids, np.int32), key, chat, bool(tools), thoughts, known, begun, tuple(begun_ids))

    def _recorded(self, key: bytes, thoughts: tuple[str, ...]) -> tuple[str, ...] | None:
        """The thoughts under which messages are known, the last sampled first; None if a request gives others."""
        for recorded in reversed(self._thoughts[key]):
            if all(given in ("", thought) for given, thought in zip(thoughts, recorded, strict=True)):
                return recorded
        return None

    def remember(self, context: Context, answer: TurnAnswer, ids: np.ndarray) -> None:
        """Notes the ids of a conversation up to and with the answer to its last message."""
        turn = message_of(answer)
        if (begun := context.begun) is not None:
            turn = replace(turn, text=begun.text + turn.text, reasoning=begun.reasoning + turn.reasoning)
        key, thoughts = _digest(context.key, turn.normal.encode()), (*context.thoughts, turn.thought)
        if (key, thoughts) in self._known:
            self._forget(key, thoughts)
        self._known[key, thoughts] = SampledDialogue(ids, answer.calls)
        self._thoughts.setdefault(key, {})[thoughts] = None
        self.remembered += len(ids)
        while self.remembered > self._most_tokens:
            self._forget(*next(iter(self._known)))

    def _forget(self, key: bytes, thoughts: tuple[str, ...]) -> None:
        self.remembered -= len(self._known.pop((key, thoughts)).ids)
        del self._thoughts[key][thoughts]
        if not self._thoughts[key]:
            del self._thoughts[key]

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

    def _extend(
        self, chat: ChatFormat, ids: list[int], messages: Sequence[DialogueMessage], calls: tuple[ToolCall, ...]
    ) -> bool:
        """Appends further messages to ids; user text and outputs of tools are plain text.

        Args:
            chat: Writes them.
            ids: Grow by the messages.
            messages: The messages.
            calls: Tool calls of the turn before them.

        Returns:
            Whether they open a turn of the policy.
        """
        opened, at = False, 0
        while at < len(messages):
            turn = messages[at]
            if opened and turn.role != "assistant":
                _close(chat, ids)
            closed = ids[-1:] == [chat.end_id] and not opened
            if turn.role == "assistant":
                if not opened:
                    ids += chat.reopened_ids() if ids else chat.prompt_ids(Problem("", "", "", "serve"))
                calls = tuple(ToolCall(name, {}, "") for name, _ in turn.calls)
                ids += [*chat.raw_ids(written(chat, turn)), chat.call_end_id if calls else chat.end_id]
            elif turn.role == "user":
                first = Problem("", turn.text, "", "serve")
                ids += chat.question_ids(turn.text, closed=closed) if ids else chat.prompt_ids(first)
            elif not ids:
                raise RequestRefused("a tool message must follow the call that it answers", "messages")
            else:
                outputs = [turn.text]
                while at + 1 < len(messages) and messages[at + 1].role == "tool":
                    at += 1
                    outputs.append(messages[at].text)
                closed = not opened and chat.closes_calls(ids[-1])
                ids += chat.shown_ids(outputs, closed=closed, calls=calls)
            opened, at = turn.role != "assistant", at + 1
        return opened


def _close(chat: ChatFormat, ids: list[int]) -> None:
    """Takes the turn that they open from the end of ids."""
    turn = chat.prompt_close_ids
    if not turn or ids[-len(turn) :] != turn:
        raise RequestRefused("this chat template cannot write a user message after the output of a tool", "messages")
    del ids[-len(turn) :]


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=16).digest()


def read_messages(messages: Any) -> tuple[str, list[DialogueMessage]]:
    """(system text, the other messages, consecutive ones of a user joined, results in the order of their calls).

    Raises:
        RequestRefused: They are malformed, or a result answers no call.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list of at least one message", "messages")
    systems: list[str] = []
    turns: list[DialogueMessage] = []
    for from_tool, run in groupby(enumerate(messages), lambda item: _role(*item) == "tool"):
        if from_tool:
            turns += _results(list(run), messages)
            continue
        for i, message in run:
            where, role = where_of(i, message), message["role"]
            text = text_of(message.get("content"), f"{where}.content") or field_of(message, "refusal", str, "")
            if role in ("system", "developer") and not turns:
                systems.append(text)
            elif role == "assistant":
                calls = tuple(call for call, _ in _calls_of(message, where))
                answered = i + 1 == len(messages) or _role(i + 1, messages[i + 1]) == "tool"
                if message.get("tool_calls") and not answered:  # OpenAI lets a `function_call` stay without one
                    raise RequestRefused(
                        f"{where}: no result for its calls; a tool message for each must follow it", "messages"
                    )
                turns.append(DialogueMessage("assistant", text, calls, _reasoning(message)))
            else:
                turns.append(DialogueMessage("user", text))
    system, turns = "\n\n".join(systems), _merged(turns)
    return (system, turns) if turns else ("", [DialogueMessage("user", system)])


WHERE = " where"
"""Key of a message that was translated from another form: its place in the request. No request can have it."""


def where_of(index: int, message: Mapping[str, Any]) -> str:
    """The place of a message in the request, for errors."""
    where = message.get(WHERE)
    return where if isinstance(where, str) else f"messages[{index}]"


def _role(i: int, message: Any) -> str:
    """The role of a message, `tool` for both names of it."""
    if not isinstance(message, dict):
        raise RequestRefused(f"messages[{i}] is {type(message).__name__}; must be an object", "messages")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool", "function"):
        where = where_of(i, message)
        raise RequestRefused(f"{where}.role is {role!r:.80}; must be system, user, assistant or tool", "messages")
    return "tool" if role == "function" else role


def _reasoning(message: Mapping[str, Any]) -> str:
    return next((text for name in REASONING if (text := field_of(message, name, str))), "")


def _results(run: list[tuple[int, Any]], messages: list[Any]) -> Iterator[DialogueMessage]:
    """The results of one turn, in the order of its calls."""
    begin = run[0][0]
    before = messages[begin - 1] if begin else {}
    where = where_of(begin - 1, before)
    text = text_of(before.get("content"), f"{where}.content")
    calls = _calls_of(before, where) if before.get("role") == "assistant" else ()
    calls = calls or _written_calls(text.partition(CALLS_AS_TEXT)[2])
    has_calls = bool(calls) or any(mark in text for mark in (*CALL_MARKS, CALLS_AS_TEXT))
    replies = [
        (field_of({"tool_call_id": answered_id(m)}, "tool_call_id", str), field_of(m, "name", str) or "")
        for _, m in run
    ]
    try:
        if not calls and before.get("role") != "assistant" and any(own_id for own_id, _ in replies):
            raise RequestRefused(
                f"{where_of(*run[0])}: a tool message must follow the call that it answers, in an assistant's message",
                "messages",
            )
        named = [(own_id, name) for (name, _), own_id in calls]
        order = in_order_of_calls(named, replies, strict=not has_calls)
    except UnmatchedReply as error:
        path = "messages" if error.reply is None else where_of(*run[error.reply])
        raise RequestRefused(f"{path}: {error}", "messages") from error
    texts = [text_of(message.get("content"), f"{where_of(i, message)}.content") for i, message in run]
    yield from (DialogueMessage("tool", texts[i]) for i in order)


def _merged(turns: Sequence[DialogueMessage]) -> list[DialogueMessage]:
    """Messages, with consecutive ones of a user as one."""
    merged: list[DialogueMessage] = []
    for of_user, run in groupby(turns, lambda turn: turn.role == "user"):
        messages = list(run)
        merged += [DialogueMessage("user", "\n\n".join(turn.text for turn in messages))] if of_user else messages
    return merged


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: text, null, or a list of text parts."""
    parts = content if isinstance(content, list) else [content]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    texts = [part.get(kind) if kind in ("text", "refusal") else part for part, kind in zip(parts, kinds, strict=True)]
    texts = ["" if text is None else text for text in texts]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        kind = wrong[0].get("type") if isinstance(wrong[0], dict) else type(wrong[0]).__name__
        raise RequestRefused(
            f"{where} holds {kind!r:.80}; must be text or a list of text parts; images are not supported"
        )
    return "".join(texts).encode(errors="replace").decode()  # JSON may hold unpaired surrogates


Called = tuple[tuple[str, str], str | None]
"""(name and canonical arguments of a call, its id)."""


def _calls_of(message: Mapping[str, Any], where: str) -> tuple[Called, ...]:
    calls, old = message.get("tool_calls") or (), message.get("function_call")
    try:
        calls_read = tuple(_called(call) for call in calls)
        return calls_read or (((_call(old), None),) if old else ())
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestRefused(f"{where}.tool_calls must be calls of functions with a name", "messages") from None


def _called(call: Mapping[str, Any]) -> Called:
    own_id = id_of_call(call)
    return _call(call["function"]), own_id if isinstance(own_id, str) else None


def _call(function: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments; missing ones are none, and text that is no JSON stays text, as the policy wrote it."""
    name, arguments = function["name"], function.get("arguments")
    if not isinstance(name, str):
        raise TypeError(name)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = arguments.encode(errors="replace").decode()
    return name, json.dumps(arguments)


def _written_calls(text: str) -> tuple[Called, ...]:
    """Calls from a Python list of them; none if it is something else."""
    try:
        return tuple(_called(call) for call in ast.literal_eval(text.strip()))
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError, AttributeError):
        return ()


def message_of(answer: TurnAnswer) -> DialogueMessage:
    """The message by which an answer comes back."""
    calls = tuple((call.name, json.dumps(call.arguments)) for call in answer.calls)
    return DialogueMessage("assistant", answer.content, calls, answer.reasoning)


def written(chat: ChatFormat, message: DialogueMessage) -> str:
    """The text of a turn that was not sampled here, in the form of the template."""
    closing = THOUGHTS[1][1]
    unsplit = not message.reasoning and closing in message.text  # the client sends the turn back as it was sampled
    text = message.text if unsplit else f"{message.reasoning}{closing}{message.text}"
    calls = (f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in message.calls)
    return chat.written(text + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls))


def split_thought(text: str) -> tuple[str, str]:
    """(thought, what follows it) of a turn; a thought that is not closed counts as text unless it is marked.

    A thought that begins with a mark ends at the mark that belongs to it, any other at the first one that closes some.
    """
    begun = text.lstrip()
    for opening, closing in THOUGHTS:
        if begun.startswith(opening):
            thought, _, rest = begun.removeprefix(opening).partition(closing)
            return thought.strip(), rest.lstrip("\n")
    closed = [(at, closing) for _, closing in THOUGHTS if (at := text.find(closing)) >= 0]
    if not closed:
        return "", text
    at, closing = min(closed)
    return text[:at].strip(), text[at + len(closing) :].lstrip("\n")


def parts_of(chat: ChatFormat, text: str, *, tools: bool) -> tuple[str, str]:
    """(thought, text before the first call) of a turn, or of its beginning; without `tools` calls are text."""
    before = chat.before_calls(text) if tools else text
    parts = chat.split(before)
    thought, rest = split_thought(before) if parts is None else parts
    return thought, rest.rstrip() if before != text else rest


def read_answer(context: Context, ids: Sequence[int], stops: Sequence[str]) -> TurnAnswer:
    """A sampled turn as content, reasoning and calls; a stop text and what follows it is cut off. Malformed calls
    stay text, since the API has no place for them. Of a turn that the request has begun, only what follows is content.
    """
    chat, begun = context.chat, list(context.begun_ids)
    parsed = chat.parse_turn([*begun, *map(int, ids)])
    text = parsed.text
    ends = [at for stop in stops if (at := text.find(stop, len(chat.tokenizer.decode(begun)))) >= 0]
    calls = tuple(call for call in parsed.calls if call.fault is None) if context.tools and not ends else ()
    reasoning, content = parts_of(chat, text[: min(ends)] if ends else text, tools=bool(calls))
    if begun:
        reasoning, content = new_parts(context, reasoning, content)
    return TurnAnswer(content, reasoning, calls)


def new_parts(context: Context, reasoning: str, content: str) -> tuple[str, str]:
    """Thought and content without those of the turn that the request has begun."""
    before = parts_of(context.chat, context.chat.tokenizer.decode(context.begun_ids), tools=context.tools)
    cut = [text.removeprefix(old) for text, old in zip((reasoning, content), before, strict=True)]
    return cut[0], cut[1]

"""Rows with `messages`, the common format of chat fine-tuning data, to supervised traces.

A row is one conversation: system and user messages, then assistant messages with tool messages between them, which are
matched to calls by `tool_call_id`. The prompt opens the assistant turn with `<reason>`: a thought in a field of its own
(`reasoning_content`) is written there, and a text that begins otherwise starts with `</reason>`, which closes an empty
thought.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from grpo_roc_jax.data.problems import (
    SYSTEM_ROLES,
    BadRow,
    LoadReport,
    UnusableRow,
    message_text,
    read_rows,
    refuse_media,
)
from grpo_roc_jax.settings.files import parse_json
from grpo_roc_jax.text.chat_format import Trace
from grpo_roc_jax.text.replies import ANSWERED_KEYS, UnmatchedReply, answered_id, id_of_call, in_order_of_calls
from grpo_roc_jax.types import Problem

TOOL_ROLES = ("tool", "function", "ipython")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message that can hold a thought; several must hold the same one."""
READ_KEYS = {
    "assistant": {"role", "content", "tool_calls", "function_call", "name", *REASONING},
    **{role: {"role", "content", "name", *ANSWERED_KEYS} for role in TOOL_ROLES},
}
"""Keys that are read of the messages of a role; for roles not listed these are `role`, `content` and `name`."""
FOLLOWS = {"system": ("system", "user"), "user": ("user", "assistant"), "assistant": TOOL_ROLES} | {
    role: (*TOOL_ROLES, "assistant") for role in TOOL_ROLES
}
"""Role of a message -> allowed roles of the next one."""


def load_traces(path: str | Path, *, bad_rows: Literal["drop", "fail"] = "drop") -> tuple[list[Trace], LoadReport]:
    """Traces of a file of `messages` rows, in file order, and a report of the file.

    Assistant `tool_calls` become `<tool_call>` blocks; `<think>` and `reasoning_content` are read as `<reason>`.
    Results are matched to calls by `tool_call_id`. The report names keys of messages that are not read. System texts
    are replaced by `text.system` and counted. If a row has its own `tools` (OpenAI schemas, as a list or as JSON text),
    its system message lists these instead of the run's, under `text.tools_section`; a row that calls another tool is
    bad.

    Raises:
        ValueError: As in `problems.load_problems`.
    """
    path = Path(path).expanduser()
    traces: list[Trace] = []
    bad: list[BadRow] = []
    rows = own_system = own_tools = 0
    unread: Counter[str] = Counter()
    for number, row in read_rows(path):
        rows += 1
        row = _without_nulls(row) if path.suffix == ".parquet" else row
        try:
            messages = _messages(row)
            unread.update({key for message in messages for key in _unread(message)})
            tools = _tools(row, messages)
            trace = _trace(messages, f"{path.stem}:{number}", path.stem, _success(row))
            traces.append(replace(trace, tools=tools))
            own_tools += bool(tools)
            own_system += messages[0]["role"] == "system"
        except UnusableRow as reason:
            bad.append(BadRow(str(path), number, str(reason)))
    report = LoadReport(
        str(path), rows, len(traces), "messages", "messages", tuple(bad), 0, own_system, own_tools, unread=dict(unread)
    )
    report.check(bad_rows)
    return traces, report


def _unread(message: Mapping[str, Any]) -> set[str]:
    """Keys of a message that have a value and are not read; `weight: 0` and `train: false` are values."""
    read = READ_KEYS.get(message["role"], {"role", "content", "name"})
    return {
        str(key) for key, value in message.items() if key not in read and not (value is None or value in ("", [], {}))
    }


def _without_nulls(value: Any) -> Any:
    """The value without null entries. Parquet gives every struct of a column the keys of all structs in it."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _decoded(value: Any, refusal: str) -> Any:
    """The value, decoded from JSON if it is text."""
    try:
        return parse_json(value, "it") if isinstance(value, str) else value
    except ValueError as error:
        raise UnusableRow(f"{refusal}: {error}") from error


def _function(call: Any) -> Any:
    """The function of an OpenAI schema or call, either given directly or under `function`."""
    return call.get("function", call) if isinstance(call, Mapping) else None


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls, old = message.get("tool_calls") or [], message.get("function_call")
    if not isinstance(calls, list):
        raise UnusableRow(f"'tool_calls' is {type(calls).__name__}; must be a list")
    if calls and old and [_function(call) for call in calls] != [old]:
        raise UnusableRow("an assistant message with 'tool_calls' and another 'function_call'; must be one of them")
    return calls or ([old] if old else [])


def _messages(row: Any) -> list[Mapping[str, Any]]:
    if isinstance(row, str):
        raise UnusableRow(row)
    refuse_media(row)
    messages = _decoded(row.get("messages"), "column 'messages' is text but not JSON")
    if not isinstance(messages, list) or not messages:
        raise UnusableRow("column 'messages' is missing, empty or not a list")
    for message in messages:
        refuse_media(message if isinstance(message, Mapping) else {})
    messages = [_with_thought(message) if isinstance(message, Mapping) else message for message in messages]
    texts = [message_text(m.get("content") or "") if isinstance(m, Mapping) else None for m in messages]
    if None in texts:
        raise UnusableRow("column 'messages' holds something other than messages with text")
    other = next((m["role"] for m in messages if not isinstance(m.get("role", ""), str)), None)
    if other is not None:
        raise UnusableRow(f"a message has the role {other!r:.80}; must be text")
    roles = ["system" if message.get("role") in SYSTEM_ROLES else message.get("role") for message in messages]
    return [{**m, "role": role, "content": text} for m, role, text in zip(messages, roles, texts, strict=True)]


def _with_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with thoughts among the parts of its content moved to a key of their own."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    thoughts = [
        part.get("thinking", part.get("text"))
        for part, kind in zip(content, kinds, strict=True)
        if kind in ("thinking", "reasoning")
    ]
    if not thoughts or not all(isinstance(thought, str) for thought in thoughts):
        return message
    rest = [part for part, kind in zip(content, kinds, strict=True) if kind not in ("thinking", "reasoning")]
    return {"reasoning_content": "\n".join(thoughts), **message, "content": rest or ""}


def _tools(row: Any, messages: list[Mapping[str, Any]]) -> str:
    """The row's `tools` as JSON text; empty if it has none."""
    tools = _decoded(row.get("tools"), "column 'tools' is text but not JSON")
    if not tools:
        return ""
    functions = [_function(tool) for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions):
        raise UnusableRow("column 'tools' holds something other than function schemas with a name")
    names = {function["name"] for function in functions}
    for message in messages:
        for call in _calls(message):
            function = _function(call)
            called = function.get("name") if isinstance(function, Mapping) else None
            if called is not None and (not isinstance(called, str) or called not in names):
                raise UnusableRow(f"a call of {called!r}, which is not one of its tools ({', '.join(sorted(names))})")
    return json.dumps([{"type": "function", "function": function} for function in functions], ensure_ascii=False)


def _success(row: Any) -> dict[str, bool]:
    """Whether the row's `reward` reaches 1, for the reward-conditioned stage; empty without such a column."""
    reward = row.get("reward")
    return {"success": reward >= 1} if isinstance(reward, int | float) else {}


def _trace(messages: list[Mapping[str, Any]], uid: str, source: str, extra: Mapping[str, Any]) -> Trace:
    prompt: list[str] = []
    turns: list[str] = []
    called: list[list[Any]] = []
    replies: list[list[Mapping[str, Any]]] = []
    before = "system"
    for message in messages:
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in FOLLOWS.get(before, ()):
            raise UnusableRow(f"a {role!r} message after a {before!r} message; must be one question and its answer")
        if role == "user":
            prompt.append(content)
        elif role == "assistant":
            called.append(_calls(message))
            turns.append(_turn(content, called[-1], _reasoning(message)))
            replies.append([])
        elif role != "system":
            replies[-1].append(message)
        before = role
    if not turns:
        raise UnusableRow("no assistant message")
    if replies[-1]:
        raise UnusableRow("the conversation ends with a tool message")
    observations = [_in_order(calls, results) for calls, results in zip(called, replies, strict=True)]
    problem = Problem(uid=uid, prompt="\n\n".join(prompt).strip(), answer="", source=source, extra=extra)
    if not problem.prompt:
        raise UnusableRow("the question is empty")
    return Trace(problem, tuple(turns), tuple(observations[:-1]), kind="messages")


def _in_order(calls: list[Any], replies: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """The results of a turn in the order of its calls."""
    if not replies:
        return ()
    names = [(_function(call) or {}).get("name") for call in calls]
    ids = [_text_of_id(id_of_call(call)) if isinstance(call, Mapping) else None for call in calls]
    given = [(_text_of_id(answered_id(reply)), str(reply.get("name") or "")) for reply in replies]
    try:
        order = in_order_of_calls(list(zip(ids, map(str, names), strict=True)), given, strict=True)
    except UnmatchedReply as error:
        raise UnusableRow(str(error)) from error
    return tuple(replies[i]["content"] for i in order)


def _text_of_id(own_id: Any) -> str | None:
    """An id as text; None if there is none."""
    return None if own_id in (None, "") else str(own_id)


def _reasoning(message: Mapping[str, Any]) -> str:
    thoughts = [message[key] for key in REASONING if message.get(key)]
    thought = thoughts[0] if thoughts else ""
    if not isinstance(thought, str):
        raise UnusableRow(f"a thought that is {type(thought).__name__}; must be text")
    if any(other != thought for other in thoughts):
        raise UnusableRow(
            f"an assistant message with different thoughts in {' and '.join(filter(message.get, REASONING))}"
        )
    return _marked(thought).strip().removeprefix("<reason>").removesuffix("</reason>").strip()


_THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
"""Marks of thoughts in data of several model families; all but the first are read at the beginning of a text only."""


def _marked(text: str) -> str:
    for opening, closing in _THOUGHT_MARKS[1:]:
        if text.startswith(opening) and closing in text:
            text = text.replace(opening, "<reason>", 1).replace(closing, "</reason>", 1)
    return text.replace("<think>", "<reason>").replace("</think>", "</reason>")


def _turn(content: str, tool_calls: Any, reasoning: str) -> str:
    """What the policy writes after the `<reason>` that the prompt ends with."""
    content = _marked(content.strip())
    if reasoning:
        thought, mark, rest = content.partition("</reason>")
        if mark and thought.removeprefix("<reason>").strip() not in ("", reasoning):
            raise UnusableRow("an assistant message with one thought in its text and another in a key of its own")
        content = f"{reasoning}</reason>{rest.lstrip() if mark else content}"
    else:
        content = content.removeprefix("<reason>") if content.startswith("<reason>") else f"</reason>{content}"
    if not tool_calls and not content.removeprefix("</reason>").strip():
        raise UnusableRow("an assistant message without text, thought and calls; nothing can be learned from it")
    for call in tool_calls:
        function = _function(call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UnusableRow("a tool call without a function name")
        arguments = function.get("arguments", function.get("parameters"))
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        arguments = _decoded(arguments, "a tool call whose arguments are not JSON")
        if not isinstance(arguments, Mapping):
            raise UnusableRow(f"a tool call whose arguments are {type(arguments).__name__}; must be an object")
        call_text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        content += f"\n<tool_call>\n{call_text}\n</tool_call>"
    return content

"""Rows with `messages`, the common format of chat fine-tuning data, to supervised traces.

A row is one conversation: system and user messages, then assistant messages with tool messages between them. The
prompt opens the assistant turn with `<reason>`, so a text that begins otherwise starts with `</reason>`, which closes
an empty thought.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from grpo_roc_jax.data.problems import SYSTEM_ROLES, BadRow, LoadReport, UnusableRow, message_text, read_rows
from grpo_roc_jax.settings.files import parse_json
from grpo_roc_jax.text.chat_format import Trace
from grpo_roc_jax.types import Problem

TOOL_ROLES = ("tool", "function", "ipython")
FOLLOWS = {"system": ("system", "user"), "user": ("user", "assistant"), "assistant": TOOL_ROLES} | {
    role: (*TOOL_ROLES, "assistant") for role in TOOL_ROLES
}
"""Role of a message -> roles of the next one."""


def load_traces(path: str | Path, *, bad_rows: Literal["drop", "fail"] = "drop") -> tuple[list[Trace], LoadReport]:
    """Traces of a file of `messages` rows, in file order, and a report of the file.

    Assistant `tool_calls` become `<tool_call>` blocks; `<think>` is read as `<reason>`. System texts are replaced by
    `text.system` and counted. A row's own `tools` (OpenAI schemas, as a list or as JSON text) are listed in its system
    message in place of the run's, under `text.tools_section`; a row that calls another tool is bad.

    Raises:
        ValueError: As in `problems.load_problems`.
    """
    path = Path(path).expanduser()
    traces: list[Trace] = []
    bad: list[BadRow] = []
    rows = own_system = own_tools = 0
    for number, row in read_rows(path):
        rows += 1
        row = _without_nulls(row) if path.suffix == ".parquet" else row
        try:
            messages = _messages(row)
            tools = _tools(row, messages)
            trace = _trace(messages, f"{path.stem}:{number}", path.stem, _success(row))
            traces.append(replace(trace, tools=tools))
            own_tools += bool(tools)
            own_system += messages[0]["role"] == "system"
        except UnusableRow as reason:
            bad.append(BadRow(str(path), number, str(reason)))
    report = LoadReport(str(path), rows, len(traces), "messages", "messages", tuple(bad), 0, own_system, own_tools)
    report.check(bad_rows)
    return traces, report


def _without_nulls(value: Any) -> Any:
    """The value without null entries: Parquet gives every struct of a column the keys of all of them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _decoded(value: Any, refusal: str) -> Any:
    """The value, read as JSON if it is text."""
    try:
        return parse_json(value, "it") if isinstance(value, str) else value
    except ValueError as error:
        raise UnusableRow(f"{refusal}: {error}") from error


def _function(call: Any) -> Any:
    """The function of an OpenAI schema or call, which may stand alone or under `function`."""
    return call.get("function", call) if isinstance(call, Mapping) else None


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UnusableRow(f"'tool_calls' is {type(calls).__name__}; must be a list")
    return calls


def _messages(row: Any) -> list[Mapping[str, Any]]:
    if isinstance(row, str):
        raise UnusableRow(row)
    messages = _decoded(row.get("messages"), "column 'messages' is text but not JSON")
    if not isinstance(messages, list) or not messages:
        raise UnusableRow("column 'messages' is missing, empty or not a list")
    texts = [message_text(m.get("content") or "") if isinstance(m, Mapping) else None for m in messages]
    if None in texts:
        raise UnusableRow("column 'messages' holds something other than messages with text")
    roles = ["system" if message.get("role") in SYSTEM_ROLES else message.get("role") for message in messages]
    return [{**m, "role": role, "content": text} for m, role, text in zip(messages, roles, texts, strict=True)]


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
            if called is not None and called not in names:
                raise UnusableRow(f"a call of {called!r}, which is not one of its tools ({', '.join(sorted(names))})")
    return json.dumps([{"type": "function", "function": function} for function in functions], ensure_ascii=False)


def _success(row: Any) -> dict[str, bool]:
    """Whether the row's `reward` reaches 1, for the reward-conditioned stage; empty without such a column."""
    reward = row.get("reward")
    return {"success": reward >= 1} if isinstance(reward, int | float) else {}


def _trace(messages: list[Mapping[str, Any]], uid: str, source: str, extra: Mapping[str, Any]) -> Trace:
    prompt: list[str] = []
    turns: list[str] = []
    observations: list[list[str]] = []
    before = "system"
    for message in messages:
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in FOLLOWS.get(before, ()):
            raise UnusableRow(f"a {role!r} message after a {before!r} message; must be one question and its answer")
        if role == "user":
            prompt.append(content)
        elif role == "assistant":
            turns.append(_turn(content, _calls(message)))
            observations.append([])
        elif role != "system":
            observations[-1].append(content)
        before = role
    if not turns:
        raise UnusableRow("no assistant message")
    if observations[-1]:
        raise UnusableRow("the conversation ends with a tool message")
    problem = Problem(uid=uid, prompt="\n\n".join(prompt).strip(), answer="", source=source, extra=extra)
    return Trace(problem, tuple(turns), tuple(map(tuple, observations[:-1])), kind="messages")


def _turn(content: str, tool_calls: Any) -> str:
    """What the policy writes after the `<reason>` that the prompt ends with."""
    content = content.strip().replace("<think>", "<reason>").replace("</think>", "</reason>")
    content = content.removeprefix("<reason>") if content.startswith("<reason>") else f"</reason>{content}"
    for call in tool_calls:
        function = _function(call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UnusableRow("a tool call without a function name")
        arguments = _decoded(function.get("arguments", {}), "a tool call whose arguments are not JSON")
        call_text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        content += f"\n<tool_call>\n{call_text}\n</tool_call>"
    return content

"""How models write tool calls and read the outputs, under one protocol: Hermes, XML, Llama 3, Gemma 3, Mistral here,
further forms in `text.dialects`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_roc_jax.text.calls import (
    CALL_CLOSE,
    CALL_OPEN,
    LINE_BEGIN,
    CallSpan,
    State,
    Tools,
    after_space,
    begins,
    block_end,
    call_of,
    functions_of,
    json_span,
    malformed,
    parse_call,
    requires_nothing,
)
from grpo_roc_jax.text.dialects import DIALECTS
from grpo_roc_jax.text.forms import CALL_ID, CODE, CallForm, as_json, or_json, properties_of, typed, value_end
from grpo_roc_jax.text.literals import CodeStrings, fence_end, python_call, python_calls
from grpo_roc_jax.types import ToolCall

CallConvention = CallForm


class HermesCalls(CallForm):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or several times."""

    stop_text = CALL_CLOSE
    openings = (CALL_OPEN,)
    how_to = (
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        close = text.find(CALL_CLOSE, at)
        opened = text.find(CALL_OPEN, at, len(text) if close < 0 else close)
        if opened >= 0:
            return self._block(text, opened, tools)
        return CallSpan(close, close + len(CALL_CLOSE), (parse_call(None),), "broken") if close >= 0 else None

    def _block(self, text: str, opened: int, tools: Tools) -> CallSpan:
        begin = opened + len(CALL_OPEN)
        state, end, after = block_end(text, begin)
        return CallSpan(opened, after, (parse_call(text[begin:end], tools),), state, ended=after > end)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        written = (call.raw if call.fault else f"\n{as_json(call, 'arguments')}\n" for call in calls)
        return "\n".join([text_before, *(f"{CALL_OPEN}{text}{CALL_CLOSE}" for text in written)])


class XmlCalls(HermesCalls):
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`, once or several times.

    Values are plain text on lines of their own; the schema of the tool says which of them are JSON. A value that begins
    with a line ends where `</parameter>` begins one; marks inside the strings of Python code are text. A call that is
    not closed to its end is never run. JSON between the tags is read too, and written where a value holds the marks of
    this form.
    Source: the chat templates of Qwen3-Coder, Qwen3.5 and Nemotron 3.
    """

    how_to = ""
    _function = re.compile(r"\s*<function=([^<>\n]*)>")
    _parameter = re.compile(r"\s*<parameter=([^<>\n]*)>")
    _cuts = {  # noqa: RUF012
        "\n</parameter>": re.compile(r"\n</function>\s*</tool_call>"),
        "</parameter>": re.compile(r"</function>\s*</tool_call>"),
    }

    def _block(self, text: str, opened: int, tools: Tools) -> CallSpan:
        begin = opened + len(CALL_OPEN)
        body = after_space(text, begin)
        head = self._function.match(text, body)
        if head is None:
            unfinished = body < len(text) and re.fullmatch(r"<function=[^<>\n]*", text[body : body + 300]) is not None
            if unfinished or begins(text, body, "<function=") == "open":
                return CallSpan(opened, len(text), (parse_call(text[begin:]),), "open", ended=False)
            return super()._block(text, opened, tools)
        state, end, values, sure = self._values(text, head.end())
        fault = "a parameter is not closed" if state == "broken" else "the call ends before </function>"
        if state == "closed":
            end = after_space(text, end)
            state = begins(text, end, CALL_CLOSE)
            if state != "broken":
                call = self._call(head[1], values, text[begin:end], tools)
                ended = state == "closed"
                after = end + len(CALL_CLOSE) if ended else len(text)
                if not sure and CALL_OPEN not in text[after:]:
                    return CallSpan(opened, after, (call,), "open", ended=False)
                return CallSpan(opened, after, (call,), state, ended)
            fault = "nothing may stand between </function> and </tool_call>"
        close = text.find(CALL_CLOSE, end) if state == "broken" else -1
        raw, after = (text[begin:], len(text)) if close < 0 else (text[begin:close], close + len(CALL_CLOSE))
        return CallSpan(opened, after, (malformed(raw, fault, head[1].strip()),), state, ended=close >= 0)

    def _values(self, text: str, at: int) -> tuple[State, int, list[tuple[str, str]], bool]:
        """(state, end of `</function>` or of the readable part, names and texts of the parameters, whether the last of
        them is sure to end there: its closing mark is not in a string of code that goes on)."""
        values: list[tuple[str, str]] = []
        cuts: dict[str, int] = {}
        sure, coded = True, False
        while True:
            parameter = self._parameter.match(text, at)
            if parameter is None:
                begin = after_space(text, at)
                if text.startswith("</function>", begin):
                    return "closed", begin + len("</function>"), values, sure
                rest = text[begin : begin + 300]
                unfinished = re.fullmatch(r"<parameter=[^<>\n]*", rest) is not None or any(
                    mark.startswith(rest) for mark in ("<parameter=", "</function>")
                )
                return ("open" if unfinished else "broken"), begin, values, sure
            start = parameter.end()
            closing = "\n</parameter>" if text.startswith("\n", start) else "</parameter>"
            code = parameter[1].strip() == CODE and not coded
            coded = coded or code
            if code or cuts.get(closing, -1) < start:
                cuts[closing] = self._cut(text, start, closing, code)
            state, end = value_end(text, start, closing, ("<parameter=", "</function>"), code=code)
            sure = sure and state == "closed"
            if end == len(text) or end > cuts[closing]:
                cut_off = cuts[closing] < len(text)
                return ("broken", cuts[closing], values, sure) if cut_off else ("open", len(text), values, sure)
            values.append((parameter[1].strip(), text[start:end].removeprefix("\n")))
            at = end + len(closing)

    def _cut(self, text: str, at: int, closing: str, code: bool) -> int:
        """Where the call ends at the latest; the length of the text without such a place."""
        strings = CodeStrings(text, at) if code else None
        for cut in self._cuts[closing].finditer(text, at):
            if strings is None or strings.around(cut.start()) != "closed":
                return cut.start()
        return len(text)

    @staticmethod
    def _call(name: str, values: Sequence[tuple[str, str]], raw: str, tools: Tools) -> ToolCall:
        known = properties_of(name.strip(), tools)
        arguments = {key: typed(value, known.get(key, {})) for key, value in values}
        return call_of({"name": name.strip(), "arguments": arguments}, raw)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        return "\n".join([text_before, *(self._written(call, tools) for call in calls)])

    def _written(self, call: ToolCall, tools: Tools) -> str:
        if call.fault:
            return f"{CALL_OPEN}{call.raw}{CALL_CLOSE}"
        return or_json(self, call, tools, self._as_xml, lambda call: HermesCalls().write_calls("", [call])[1:])

    @staticmethod
    def _as_xml(call: ToolCall) -> str:
        lines = (
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
            "</parameter>\n"
            for key, value in call.arguments.items()
        )
        return f"{CALL_OPEN}\n<function={call.name}>\n{''.join(lines)}</function>\n{CALL_CLOSE}"


class LlamaCalls(CallForm):
    """`{"name": ..., "parameters": {...}}` at the start of a line, or JSON or code after `<|python_tag|>`.

    `;` or a line end separates calls; prose may follow them. Code is the argument of the first tool that takes `code`;
    `name.call(a=1)` names its tool.
    Source: the prompt formats of Llama 3.1 and 3.2 in Meta's model documentation.
    """

    end_tokens = ("<|eom_id|>",)
    openings = ("<|python_tag|>",)
    _tag = "<|python_tag|>"
    _keys = ("name", "type", "function", "parameters", "arguments")
    _begins = re.compile(rf'\s*\{{\s*"(?:{"|".join(_keys)})"')
    _line = re.compile(LINE_BEGIN + r'\{\s*"(?:name|type|function)"', re.MULTILINE)
    _given = re.compile(r'"(?:parameters|arguments)"\s{0,8}:')
    _between = re.compile(r"\s*[;,]?\s*")

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        return super().find_calls(text, over=over, tools=tools) if over else []

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        if at:
            further = self._between.match(text, at).end()
            if text.startswith("{", further) and self._begins.match(text, further):
                return self._object(text, at, further, tools)
        elif self._begins.match(text):
            return self._object(text, 0, after_space(text, 0), tools)
        spans = (self._after_tag(text, at, tools), self._on_a_line(text, at, tools))
        return min((span for span in spans if span is not None), key=lambda span: span.start, default=None)

    def _after_tag(self, text: str, at: int, tools: Tools) -> CallSpan | None:
        """The call after the first tag that is followed by JSON of a call, or else the code after the last tag."""
        tag = -1
        while (position := text.find(self._tag, at)) >= 0:
            tag, at = position, position + len(self._tag)
            begin = after_space(text, at)
            if self._may_call(text, begin):
                return self._object(text, tag, begin, tools)
        code = text[tag + len(self._tag) :]
        return CallSpan(tag, len(text), (_code_call(code, tools),), "closed") if tag >= 0 else None

    def _may_call(self, text: str, begin: int) -> bool:
        """Whether JSON of a call, or of a list of calls, begins at `begin`; the text may end inside its first key."""
        head = "".join(text[begin : begin + 300].split())
        inside = head.removeprefix("[")
        keys = (f'{{"{key}"' for key in self._keys)
        return bool(head) and any(inside.startswith(key) or key.startswith(inside) for key in keys)

    def _object(self, text: str, start: int, begin: int, tools: Tools) -> CallSpan:
        """The call, or list of calls, whose JSON begins at `begin`."""
        state, end = json_span(text, begin)
        if state != "closed":
            line = self._line.search(text, end) if state == "broken" else None
            end = line.start() if line else len(text)
            return CallSpan(start, end, (parse_call(text[begin:end]),), state, ended=line is not None)
        raw = text[begin:end]
        if raw[0] == "[":
            return CallSpan(start, end, tuple(_listed_calls(raw, tools)), "closed")
        return CallSpan(start, end, (parse_call(raw, tools),), "closed")

    def _on_a_line(self, text: str, at: int, tools: Tools) -> CallSpan | None:
        """The next object at the start of a line that has parameters, or names a tool that needs none."""
        idle = {name for name in functions_of(tools) if requires_nothing(name, tools)}
        given = -1
        while (line := self._line.search(text, at)) is not None:
            begin = after_space(text, line.start())
            if given < begin:
                match = self._given.search(text, begin)
                given = match.start() if match else len(text)
            if given == len(text) and not idle:
                return None
            state, end = json_span(text, begin)
            if given < (end if state == "closed" else len(text)):
                return self._object(text, line.start(), begin, tools)
            if state == "open":
                return None
            if state == "closed" and (call := parse_call(text[begin:end], tools)).fault is None and call.name in idle:
                return CallSpan(line.start(), end, (call,), "closed")
            at = end
        return None

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = "; ".join(call.raw if call.fault else as_json(call, "parameters") for call in calls)
        return f"{text_before}{self._tag}{texts}" if text_before.strip() or not self._begins.match(texts) else texts

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "ipython", "content": text}


class GemmaCalls(CallForm):
    """A ```` ```tool_code ```` block with Python calls that have keyword arguments, as in Gemma's guide."""

    openings = ("```tool_code",)
    _open = re.compile(r"```tool_code[^\S\n]*(?=\n)")

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        opened = self._open.search(text, at)
        if opened is None:
            return None
        begin = opened.end()
        fence = fence_end(text, begin)
        end, after = fence or (len(text), len(text))
        calls = tuple(python_calls(text[begin + 1 : end]))
        return CallSpan(opened.start(), after, calls, "closed" if fence else "open", ended=fence is not None)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = (call.raw.strip() if call.fault else _as_python(call) for call in calls)
        return "\n".join(
            [
                *([text_before.rstrip()] if text_before.strip() else []),
                *(f"```tool_code\n{text}\n```" for text in texts),
            ]
        )

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "user", "content": f"```tool_output\n{text}\n```"}


class MistralCalls(CallForm):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` once a call.

    Source: the chat templates of Mistral 7B v0.3 and Nemo (the list), Mistral Small 3.2 and Devstral (the marks).

    Args:
        marked: `write_calls` writes the form with marks. Both are read.
    """

    openings = ("[TOOL_CALLS]",)
    _tag, _arguments = "[TOOL_CALLS]", "[ARGS]"
    _head = re.compile(r"([^\[\]{}\n]*)(?:\[CALL_ID\]([^\[\]{}\n]*))?(?:\[ARGS\])?\s*(?=\{)")
    _bare = re.compile(r"([^\[\]{}\n]{1,100})(?:\[CALL_ID\][^\[\]{}\n]*)?(?:\[ARGS\])?\s*(null)?\s*")

    def __init__(self, *, marked: bool):
        self._marked = marked

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        return super().find_calls(text, over=over, tools=tools) if over else []

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        tag = text.find(self._tag, at)
        if tag < 0:
            return None
        begin = tag + len(self._tag)
        body = after_space(text, begin)
        if text[body : body + 1] in ("{", "["):
            state, end = json_span(text, body)
            if state != "closed":
                return CallSpan(tag, len(text), (parse_call(text[begin:]),), state, ended=False)
            return CallSpan(tag, end, tuple(_listed_calls(text[body:end], tools)), "closed")
        head = self._head.match(text, begin)
        if head is None:
            further = text.find(self._tag, begin)
            end = len(text) if further < 0 else further
            bare = self._bare.fullmatch(text, begin, end)
            if bare and (bare[2] or further >= 0) and requires_nothing(bare[1].strip(), tools):
                call = {"name": bare[1].strip(), "arguments": {}}
                return CallSpan(tag, end, (call_of(call, text[begin:end]),), "closed")
            name, mark, _ = text[begin:end].partition(self._arguments)
            fault = malformed(text[begin:end], "the arguments are no JSON object", name.strip())
            return CallSpan(tag, end, (fault if mark else parse_call(text[begin:end]),), "broken", ended=further >= 0)
        name, own_id = head[1].strip(), (head[2] or "").strip()
        state, end = json_span(text, head.end())
        further = text.find(self._tag, end) if state == "broken" else -1
        end = end if state == "closed" else len(text) if further < 0 else further
        try:
            call = {"name": name, "arguments": json.loads(text[head.end() : end]), "id": own_id}
        except (RecursionError, ValueError):
            fault = malformed(text[begin:end], "the arguments are no JSON object", name)
            return CallSpan(tag, end, (fault,), state, ended=state == "closed" or further >= 0)
        return CallSpan(tag, end, (call_of(call, json.dumps(call), tools),), "closed")

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        if self._marked:
            return text_before + "".join(f"{self._tag}{self._marked_text(call)}" for call in calls)
        texts = (
            call.raw.strip() if call.fault else f'{as_json(call, "arguments")[:-1]}, "id": "{CALL_ID.format(i)}"}}'
            for i, call in enumerate(calls, 1)
        )
        return f"{text_before}{self._tag} [{', '.join(texts)}]"

    def _marked_text(self, call: ToolCall) -> str:
        if call.fault:
            return call.raw.strip()
        return f"{call.name}{self._arguments}{json.dumps(dict(call.arguments), ensure_ascii=False)}"


CONVENTIONS: dict[str, CallConvention] = {
    "hermes": HermesCalls(),
    "xml": XmlCalls(),
    "llama3": LlamaCalls(),
    "gemma": GemmaCalls(),
    "mistral": MistralCalls(marked=False),
    "mistral_args": MistralCalls(marked=True),
    **DIALECTS,
}


def _listed_calls(raw: str, tools: Tools) -> list[ToolCall]:
    """The calls of a JSON list, or of one object."""
    try:
        decoded = json.loads(raw)
    except (RecursionError, ValueError):
        return [parse_call(raw)]
    return [call_of(call, json.dumps(call), tools) for call in (decoded if isinstance(decoded, list) else [decoded])]


def _code_call(body: str, tools: Tools) -> ToolCall:
    """`name.call(a=1)`, or code for the first tool that takes some."""
    if not body.strip():
        return malformed(body, "the call is empty")
    name, called, arguments = body.strip().partition(".call(")
    if called and name.isidentifier():
        return python_call(f"{name}({arguments}")
    names = [name for name in functions_of(tools) if "code" in properties_of(name, tools)]
    if not names:
        return malformed(body, "no tool takes code; write a JSON object with the name of a tool and its parameters")
    return call_of({"name": names[0], "arguments": {"code": body.strip("\n")}}, body)


def _as_python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"

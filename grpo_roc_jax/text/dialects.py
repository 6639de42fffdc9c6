"""Further forms of tool calls: GLM, DeepSeek, Kimi K2, Granite, Phi-4-mini, Llama 3.2 and OLMo 3 (as Python),
FunctionGemma, Gemma 4, gpt-oss (harmony). Each names the public text that it follows. `CodeCalls` belongs to no
model family: it is the shortest form, for models that learn to call here."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from grpo_roc_jax.text.calls import (
    CALL_CLOSE,
    CALL_OPEN,
    LINE_BEGIN,
    CallSpan,
    State,
    Tools,
    absent_end,
    after_space,
    begins,
    block_end,
    call_of,
    functions_of,
    json_span,
    malformed,
    parse_call,
)
from grpo_roc_jax.text.forms import (
    CODE,
    PYTHON_TOOL,
    CallForm,
    as_json,
    or_json,
    plain_name,
    properties_of,
    typed,
    value_end,
)
from grpo_roc_jax.text.literals import Broken, Ended, GemmaValues, bracket_end, python_value
from grpo_roc_jax.types import ToolCall

CUT_OFF = "the call is cut off"


def _hermes(call: ToolCall) -> str:
    return f"{CALL_OPEN}\n{as_json(call, 'arguments')}\n{CALL_CLOSE}"


def _arguments(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _json_call(name: str, arguments: str, raw: str, tools: Tools) -> ToolCall:
    """A call of a name with its arguments as JSON, which may be left out or null for a tool that requires none."""
    try:
        given = json.loads(arguments) if arguments.strip() else None
    except (RecursionError, ValueError):
        return malformed(raw, "the arguments are no JSON object", name)
    return call_of({"name": name, "arguments": given}, raw, tools)


class GlmCalls(CallForm):
    """`<tool_call>name`, then `<arg_key>x</arg_key>` and `<arg_value>value</arg_value>` for each argument.

    Text stands as it is; the schema of the tool says which values are JSON. Marks inside the strings of Python code are
    text. Source: the chat template of GLM-4.5.
    """

    stop_text = CALL_CLOSE
    end_tokens, past_ends = ("<|observation|>",), ("<|user|>",)
    thought = ("\n<think>", "</think>")
    openings = (CALL_OPEN,)
    marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|observation|>")
    _head = re.compile(r"\s*([^\s<>{}\[\]\"][^\n<>{}\[\]\"]*?)\s*(?=<arg_key>|</tool_call>|\Z)")
    _key = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        close = text.find(CALL_CLOSE, at)
        opened = text.find(CALL_OPEN, at, len(text) if close < 0 else close)
        if opened < 0:
            stray = CallSpan(close, close + len(CALL_CLOSE), (parse_call(None),), "broken")
            return stray if close >= 0 else None
        begin = opened + len(CALL_OPEN)
        head = self._head.match(text, begin)
        if head is None:
            state, end, after = block_end(text, begin)
            return CallSpan(opened, after, (parse_call(text[begin:end], tools),), state, ended=after > end)
        values: list[tuple[str, str]] = []
        end = head.end()
        sure, coded = True, False
        while (key := self._key.match(text, end)) is not None:
            code = key[1].strip() == CODE and not coded
            coded = coded or code
            value, end = value_end(text, key.end(), "</arg_value>", ("<arg_key>", CALL_CLOSE), code=code)
            sure = sure and value == "closed"
            if end == len(text):
                fault = malformed(text[begin:], CUT_OFF, head[1])
                return CallSpan(opened, len(text), (fault,), "open", ended=False)
            values.append((key[1].strip(), text[key.end() : end]))
            end += len("</arg_value>")
        end = after_space(text, end)
        state: State = begins(text, end, CALL_CLOSE)
        if state == "closed":
            known = properties_of(head[1], tools)
            arguments = {name: typed(value, known.get(name, {})) for name, value in values}
            call = call_of({"name": head[1], "arguments": arguments}, text[begin:end])
            end += len(CALL_CLOSE)
            sure = sure or CALL_OPEN in text[end:]
            return CallSpan(opened, end, (call,), "closed" if sure else "open", ended=sure)
        if state == "broken" and (begins(text, end, "<arg_key>") == "broken"):
            close = text.find(CALL_CLOSE, end)
            raw, after = (text[begin:], len(text)) if close < 0 else (text[begin:close], close + len(CALL_CLOSE))
            fault = malformed(raw, "not readable as keys and values of arguments", head[1])
            return CallSpan(opened, after, (fault,), "broken", ended=close >= 0)
        return CallSpan(opened, len(text), (malformed(text[begin:], CUT_OFF, head[1]),), "open", ended=False)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = (
            f"{CALL_OPEN}{call.raw}{CALL_CLOSE}" if call.fault else or_json(self, call, tools, self._written, _hermes)
            for call in calls
        )
        return "\n".join([self.write_text(text_before), *texts])

    def write_text(self, text: str) -> str:
        return f"\n{text.strip()}" if text.strip() else ""

    @staticmethod
    def _written(call: ToolCall) -> str:
        lines = (
            f"<arg_key>{key}</arg_key>\n<arg_value>"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return f"{CALL_OPEN}{call.name}\n{''.join(lines)}{CALL_CLOSE}"


class DeepSeekCalls(CallForm):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` between marks of the section (V3.1), or
    `function<｜tool▁sep｜>name` and a block of JSON (V3, R1). Both are read.

    Source: the chat templates of DeepSeek-V3-0324 and DeepSeek-V3.1.

    Args:
        fenced: `write_calls` writes the form of V3.
    """

    _first, _last = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _begin, _sep, _end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    openings = (_first, _begin)
    past_ends = ("<｜end▁of▁sentence｜>",)
    marks = (_first, _last, _begin, _sep, _end, "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
             "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜User｜>", "<｜Assistant｜>")  # fmt: skip
    _head = re.compile(r"([^\n<]*)<｜tool▁sep｜>(?:([^\n{<]*)\n```json\n)?\s*(?=[{n<])")

    def __init__(self, *, fenced: bool):
        self._fenced = fenced

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        position = text.find(self._begin, at)
        if position < 0:
            return None
        begin = position + len(self._begin)
        start = position - len(self._first) if text.endswith(self._first, at, position) else position
        head = self._head.match(text, begin)
        absent = absent_end(text, head.end(), self._end) if head else -1
        if head is None or (absent < 0 and text[head.end()] != "{"):
            return self._unread(text, start, begin, begin, "must be a name, the separator and a JSON object")
        name = (head[1] if head[2] is None else head[2]).strip()
        state, end = ("closed", absent) if absent >= 0 else json_span(text, head.end())
        if state != "closed":
            return self._unread(text, start, begin, end, "the arguments are no JSON object", name, state)
        call = _json_call(name, text[head.end() : end], text[begin:end], tools)
        close = after_space(text, end)
        close = after_space(text, close + 3) if text.startswith("```", close) else close
        state = begins(text, close, self._end)
        if state != "closed":
            waits = state == "open" or begins(text, close, "```") == "open"
            if waits:
                return CallSpan(start, len(text), (call,), "open", ended=False)
            return self._unread(text, start, begin, end, "nothing may follow the JSON object", name)
        after = close + len(self._end)
        last = after_space(text, after)
        return CallSpan(
            start, last + len(self._last) if text.startswith(self._last, last) else after, (call,), "closed"
        )

    def _unread(
        self, text: str, start: int, begin: int, end: int, message: str, name: str = "", state: State = "broken"
    ) -> CallSpan:
        close = text.find(self._end, end) if state == "broken" else -1
        raw, after = (text[begin:], len(text)) if close < 0 else (text[begin:close], close + len(self._end))
        return CallSpan(start, after, (malformed(raw, message, name),), state, ended=close >= 0)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        between = "\n" if self._fenced else ""
        texts = (f"{self._begin}{call.raw if call.fault else self._written(call)}{self._end}" for call in calls)
        return f"{text_before}{self._first}{between.join(texts)}{self._last}"

    def _written(self, call: ToolCall) -> str:
        if self._fenced:
            return f"function{self._sep}{call.name}\n```json\n{_arguments(call)}\n```"
        return f"{call.name}{self._sep}{_arguments(call)}"


class KimiCalls(CallForm):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` between marks of the
    section; the output returns under this id.

    Source: the chat template of Kimi-K2-Instruct.
    """

    _first, _last = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _begin, _sep, _end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    openings = (_first, _begin)
    marks = (_first, _last, _begin, _sep, _end)
    _head = re.compile(r"\s*(?:functions\.)?([^\s<]+?)(?::(\d{1,9}))?\s*<\|tool_call_argument_begin\|>\s*(?=[{n<])")

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        position = text.find(self._begin, at)
        if position < 0:
            return None
        begin = position + len(self._begin)
        first = text.rfind(self._first, at, position)
        start = first if first >= 0 and not text[first + len(self._first) : position].strip() else position
        head = self._head.match(text, begin)
        state, end = json_span(text, head.end()) if head and text[head.end()] == "{" else ("broken", begin)
        if head and (absent := absent_end(text, head.end(), self._end)) >= 0:
            state, end = "closed", absent
        if head is not None and state == "closed":
            close = after_space(text, end)
            state = begins(text, close, self._end)
            if state != "broken":
                call = _json_call(head[1], text[head.end() : end], text[begin:end], tools)
                ended = state == "closed"
                after = close + len(self._end) if ended else len(text)
                last = after_space(text, after)
                after = last + len(self._last) if text.startswith(self._last, last) else after
                return CallSpan(start, after, (call,), state, ended)
        close = text.find(self._end, end) if state == "broken" else -1
        raw, after = (text[begin:], len(text)) if close < 0 else (text[begin:close], close + len(self._end))
        fault = malformed(raw, "must be functions.NAME:0, the mark of arguments and a JSON object")
        return CallSpan(start, after, (fault,), state, ended=close >= 0)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = (
            f"{self._begin}{call.raw if call.fault else self._written(call, i)}{self._end}"
            for i, call in enumerate(calls)
        )
        return f"{text_before}{self._first}{''.join(texts)}{self._last}"

    def _written(self, call: ToolCall, index: int) -> str:
        return f"functions.{call.name}:{index}{self._sep}{_arguments(call)}"

    def reply_id(self, call: ToolCall | None, index: int) -> str:
        head = self._head.match(call.raw) if call else None
        number = index if head is None or head[2] is None else int(head[2])
        return self.probe_id(plain_name(call.name if call and call.name else "tool"), number)

    def probe_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"


class JsonListCalls(CallForm):
    """A list of JSON calls after a mark: `<|tool_call|>[{"name": ..., "arguments": {...}}]`.

    Source: the model cards of Granite 3 and Phi-4-mini, whose chat templates write no calls.

    Args:
        openings: What a call may begin with; the first is written.
        closing: What closes it; empty if nothing does. It may be left out.
        marks: See `CallForm`.
        past_ends: The same.
    """

    def __init__(self, openings: tuple[str, ...], closing: str, marks: tuple[str, ...], past_ends: tuple[str, ...]):
        self.openings, self._closing, self.marks, self.past_ends = openings, closing, marks, past_ends
        self._open = re.compile(r"(?:" + "|".join(map(re.escape, openings)) + r")\s*(?=[\[{])")

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        return super().find_calls(text, over=over, tools=tools) if over else []

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        opened = self._open.search(text, at)
        if opened is None:
            return None
        state, end = json_span(text, opened.end())
        raw = text[opened.end() : end if state == "closed" else len(text)]
        if state != "closed":
            further = self._open.search(text, end)
            after = further.start() if further else len(text)
            fault = parse_call(text[opened.end() : after])
            return CallSpan(opened.start(), after, (fault,), state, ended=further is not None)
        try:
            decoded = json.loads(raw)
        except (RecursionError, ValueError):
            decoded = None
        listed = decoded if isinstance(decoded, list) else [decoded]
        calls = [parse_call(raw)] if decoded is None else [call_of(call, json.dumps(call), tools) for call in listed]
        close = after_space(text, end)
        closed = bool(self._closing) and text.startswith(self._closing, close)
        return CallSpan(opened.start(), close + len(self._closing) if closed else end, tuple(calls), "closed")

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = (call.raw if call.fault else as_json(call, "arguments") for call in calls)
        return f"{text_before}{self.openings[0]}[{', '.join(texts)}]{self._closing}"


class GraniteCalls(JsonListCalls):
    """Granite 3: outputs are messages of the role `tool_response`."""

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "tool_response", "content": text}


class PythonCalls(CallForm):
    """`name(a=1, b="x")`, in a list or one a line between tags. Values are Python or JSON.

    Source: Meta's prompt format of Llama 3.2 (the list), the chat template of OLMo 3 (the tags, and JSON values).

    Args:
        tags: Around the calls; empty for a list that begins a line.
        as_json: Values are written and read first as JSON.
    """

    _name = re.compile(r"\s*([\w./:-]+)\s*(?=\()")
    _list = re.compile(LINE_BEGIN + r"(?:<\|python_tag\|>)?\[(?=\s*([\w./:-]+)\()", re.MULTILINE)
    _usual = re.compile(r"[A-Za-z_][\w.-]*")
    _pair = re.compile(r"\s*([^\s=,()\[\]{}\"']+)\s*=(?!=)")

    def __init__(self, tags: tuple[str, str] | None, *, as_json: bool):
        self._tags, self._as_json = tags, as_json
        self.openings = tags[:1] if tags else ()
        self.marks = tags or ()
        self.end_tokens = () if tags else ("<|eom_id|>",)

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        return super().find_calls(text, over=over, tools=tools) if over or self._tags else []

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        if self._tags:
            opened = text.find(self._tags[0], at)
            if opened < 0:
                return None
            return self._sequence(text, opened, opened + len(self._tags[0]), self._tags[1], "\n")
        known = functions_of(tools)
        for opening in self._list.finditer(text, at):  # `[2(x+1)]` is prose, unless a tool has such a name
            if self._usual.fullmatch(opening[1]) or opening[1] in known:
                return self._sequence(text, opening.start(), opening.end(), "]", ",")
        return None

    def _sequence(self, text: str, start: int, begin: int, closing: str, between: str) -> CallSpan:
        """The calls from `begin` to the closing mark."""
        calls: list[ToolCall] = []
        at = begin
        while True:
            here = after_space(text, at)
            state = begins(text, here, closing)
            if state == "closed" and calls:
                return CallSpan(start, here + len(closing), tuple(calls), "closed")
            if here >= len(text) or (state == "open" and calls):
                return self._cut(text, start, begin, calls)
            if between == "," and calls:
                if text[here] != ",":
                    return self._broken(text, start, begin, here, closing)
                here += 1
            name = self._name.match(text, here)
            if name is None:
                if re.fullmatch(r"\s*[\w./:-]*", text[here : here + 200]) and len(text) - here < 200:
                    return self._cut(text, start, begin, calls)
                return self._broken(text, start, begin, here, closing)
            state, end, commas = bracket_end(text, name.end())
            if state == "open":
                return self._cut(text, start, begin, calls)
            if state == "broken":
                return self._broken(text, start, begin, end, closing)
            calls.append(self._call(text, name[1], name.end(), end, commas))
            at = end

    def _cut(self, text: str, start: int, begin: int, calls: list[ToolCall]) -> CallSpan:
        """Calls that the end of the text cuts off. None of them is run, since more may have been intended."""
        return CallSpan(start, len(text), (malformed(text[begin:], CUT_OFF),), "open", ended=False)

    @staticmethod
    def _broken(text: str, start: int, begin: int, at: int, closing: str) -> CallSpan:
        close = text.find(closing, at)
        raw, after = (text[begin:], len(text)) if close < 0 else (text[begin:close], close + len(closing))
        fault = malformed(raw, "must be calls such as name(argument=value)")
        return CallSpan(start, after, (fault,), "broken", ended=close >= 0)

    def _call(self, text: str, name: str, begin: int, end: int, commas: Sequence[int]) -> ToolCall:
        raw, arguments = text[begin:end], {}
        edges = [begin, *commas, end - 1]
        for left, right in pairwise(edges):
            part = text[left + 1 : right]
            if not part.strip():
                continue
            pair = self._pair.match(part)
            if pair is None:
                return malformed(name + raw, "arguments are given by name: tool(argument=value)", name)
            try:
                arguments[pair[1]] = python_value(part[pair.end() :], as_json=self._as_json)
            except ValueError:
                fault = "the values of the arguments are plain ones, written out and not computed"
                return malformed(name + raw, fault, name)
        return call_of({"name": name, "arguments": arguments}, name + raw)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = [self._faulty(call.raw.strip()) if call.fault else self._written(call) for call in calls]
        if self._tags:
            return f"{text_before}{self._tags[0]}{chr(10).join(texts)}{self._tags[1]}"
        return f"{text_before.rstrip()}\n[{', '.join(texts)}]" if text_before.strip() else f"[{', '.join(texts)}]"

    def _faulty(self, raw: str) -> str:
        """The text of a faulty call. Without marks only a name with a bracket begins a call."""
        return raw if self._tags or re.match(r"\w+\s*\(", raw) else f"call({raw})"

    def _written(self, call: ToolCall) -> str:
        values = (
            f"{key}={json.dumps(value, ensure_ascii=False) if self._as_json else repr(value)}"
            for key, value in call.arguments.items()
        )
        return f"{call.name}({', '.join(values)})"


class OlmoCalls(PythonCalls):
    """OLMo 3: outputs are messages of the role `environment`."""

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "environment", "content": text}


class GemmaFunctionCalls(CallForm):
    """`call:name{key:value}` between marks, with strings between marks of their own. The output follows in the same
    turn.

    A string that contains its mark is written as JSON. Source: the chat templates of Gemma 4 and FunctionGemma.

    Args:
        begin: Mark before a call.
        end: Mark after a call.
        quote: Mark around a string.
        response: Ends a turn of calls, and begins the output.
        turn_end: Ends any other turn.
        thought: Marks around a thought, if the family has any.
    """

    _head = re.compile(r"\s*call:\s*([^\s{}]+?)\s*(?=\{)")

    thinks_if = "<|think|>"

    def __init__(
        self, begin: str, end: str, quote: str, response: str, turn_end: str, thought: tuple[str, str] | None = None
    ):
        self._begin, self._end = begin, end
        self._values = GemmaValues(quote)
        self.end_tokens, self.past_ends = (response,), (turn_end,)
        self.openings, self.marks = (begin,), (begin, end, quote, response)
        self.thought = thought

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        opened = text.find(self._begin, at)
        if opened < 0:
            return None
        begin = opened + len(self._begin)
        head = self._head.match(text, begin)
        name, state, end = "", "broken", begin
        if head is None:
            unfinished = len(text) - begin < 200 and re.fullmatch(r"\s*(?:c|ca|cal|call|call:[^{}]*)?", text[begin:])
            state = "open" if unfinished else "broken"
        else:
            name = head[1]
            try:
                arguments, end = self._values.read(text, head.end())
            except Ended:
                state = "open"
            except Broken as error:
                end = error.args[0]
            else:
                close = after_space(text, end)
                state = begins(text, close, self._end)
                if state != "broken":
                    call = call_of({"name": name, "arguments": arguments}, text[begin:end])
                    ended = state == "closed"
                    after = close + len(self._end) if ended else len(text)
                    return CallSpan(opened, after, (call,), state, ended)
        close = text.find(self._end, end) if state == "broken" else -1
        raw, after = (text[begin:], len(text)) if close < 0 else (text[begin:close], close + len(self._end))
        message = CUT_OFF if state == "open" else "must be call:NAME{key:value}"
        return CallSpan(opened, after, (malformed(raw, message, name),), state, ended=close >= 0)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        return text_before + "".join(f"{self._begin}{self._written(call)}{self._end}" for call in calls)

    def _written(self, call: ToolCall) -> str:
        return call.raw if call.fault else f"call:{call.name}{self._values.write(dict(call.arguments))}"


class HarmonyCalls(CallForm):
    """Messages with channels: a call is one to `functions.name` with JSON, a thought one on the channel `analysis`.

    `<|call|>` ends a turn of a call, `<|return|>` the last turn. Source: OpenAI's guide to the harmony format, and the
    chat template of gpt-oss.
    """

    end_tokens = ("<|call|>",)
    turn_end = "<|return|>"
    past_ends = ("<|end|>",)
    thought = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    thoughts = (("<|channel|>analysis<|message|>", "<|end|>"),)
    openings = (" to=functions.", "<|channel|>commentary to=", "<|start|>assistant to=")
    _message = re.compile(
        r"(?:\A|(?<=</reason>)|(?<=</think>)|<\|start\|>assistant)([^<]*)(?:<\|channel\|>([^<]*))?(?:<\|constrain\|>([^<]*))?<\|message\|>"
    )
    _to = re.compile(r"(?:\A|\s)to=(\S+)")
    _over = re.compile(r"<\|(?:end|call|return|start)\|>")

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        while (head := self._message.search(text, at)) is not None:
            to = next((recipient for part in head.groups() if part and (recipient := self._to.search(part))), None)
            if to is None:
                at = head.end()
                continue
            return self._call(text, head.start(), head.end(), to[1], tools)
        return None

    def _call(self, text: str, start: int, begin: int, recipient: str, tools: Tools) -> CallSpan:
        name = recipient.removeprefix("functions.")
        if recipient == "python" and name not in functions_of(tools):
            takers = [tool for tool in functions_of(tools) if CODE in properties_of(tool, tools)]
            if takers:  # the built-in tool of the guide takes its code as plain text
                return self._code(text, start, begin, takers[0])
        body = after_space(text, begin)
        state, end = json_span(text, body) if text[body : body + 1] == "{" else ("broken", body)
        over = self._over.search(text, end if state != "open" else len(text))
        close = over.end() if over and over.group() != "<|start|>" else over.start() if over else len(text)
        raw = text[begin : over.start() if over else len(text)]
        if state == "closed" and not text[end : over.start() if over else len(text)].strip():
            return CallSpan(start, close, (_json_call(name, text[body:end], raw, tools),), "closed")
        empty = raw.strip() in ("", "null") and over is not None
        call = _json_call(name, raw, raw, tools) if empty else malformed(raw, "the arguments are no JSON object", name)
        return CallSpan(start, close, (call,), "closed" if empty else state, ended=over is not None)

    def _code(self, text: str, start: int, begin: int, name: str) -> CallSpan:
        """The call of a tool with the code that begins at `begin`, or with the arguments that hold it."""
        over = self._over.search(text, begin)
        close = over.end() if over and over.group() != "<|start|>" else over.start() if over else len(text)
        raw = text[begin : over.start() if over else len(text)]
        try:
            given = json.loads(raw)
        except (RecursionError, ValueError):
            given = None
        arguments = given if isinstance(given, dict) and CODE in given else {CODE: raw}
        call = call_of({"name": name, "arguments": arguments}, raw)
        return CallSpan(start, close, (call,), "closed" if over else "open", ended=over is not None)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        before = (
            f"<|channel|>commentary<|message|>{text_before.strip()}<|end|><|start|>assistant"
            if text_before.strip()
            else ""
        )
        return before + "<|call|><|start|>assistant".join(map(self._written, calls))

    @staticmethod
    def _written(call: ToolCall) -> str:
        arguments = call.raw if call.fault else _arguments(call)
        return f" to=functions.{call.name}<|channel|>commentary json<|message|>{arguments}"

    def write_text(self, text: str) -> str:
        return f"<|channel|>final<|message|>{text}"

    def split(self, text: str) -> tuple[str, str] | None:
        """(text on the channel `analysis`, the other text without a recipient)."""
        thoughts, rest, at = [], [], 0
        while (head := self._message.search(text, at)) is not None:
            over = self._over.search(text, head.end())
            at = over.start() if over else len(text)
            content, header = text[head.end() : at], " ".join(filter(None, head.groups()))
            if not self._to.search(header):
                (thoughts if "analysis" in header else rest).append(content)
        return "\n".join(thoughts), "\n".join(rest)


class CodeCalls(CallForm):
    """`<python>print(6*7)</python>`: code as it is, for the library's Python tool, or, where that is not listed, the
    first tool that takes `code`.

    The first closing mark ends the call, wherever it stands: code that is cut inside a string is no Python, so it fails
    and does nothing. A call of another tool, or with code that holds a mark, is JSON between the marks, with
    `<\\/python>` for the closing one inside a string. A call costs some 6 tokens besides its code, as JSON about 30.
    """

    stop_text = "</python>"
    openings = ("<python>",)
    marks = ("<python>", "</python>")
    how_to = (
        "To run code, write it between <python> and </python>. To call another function, write a JSON object with its "
        'name and arguments there: <python>{"name": NAME, "arguments": ARGUMENTS}</python>.'
    )
    _open, _close = "<python>", "</python>"
    _json = re.compile(r'\s*\{\s*"(?:name|arguments)"\s*:')

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        close = text.find(self._close, at)
        opened = text.find(self._open, at, len(text) if close < 0 else close)
        after = close + len(self._close)
        if opened < 0:
            stray = malformed("", f"{self._close} without {self._open}")
            return CallSpan(close, after, (stray,), "broken") if close >= 0 else None
        begin = opened + len(self._open)
        if close < 0:
            return CallSpan(opened, len(text), (malformed(text[begin:], CUT_OFF),), "open", ended=False)
        return CallSpan(opened, after, (self._call(text[begin:close], tools),), "closed")

    def _call(self, body: str, tools: Tools) -> ToolCall:
        if not body.strip():
            return malformed(body, "the call is empty")
        if self._json.match(body):
            return parse_call(body, tools)
        takers = [name for name in functions_of(tools) if "code" in properties_of(name, tools)]
        if not takers:
            return malformed(
                body, "no tool takes code; must be a JSON object with the name of a tool and its arguments"
            )
        name = PYTHON_TOOL if PYTHON_TOOL in takers else takers[0]
        return call_of({"name": name, "arguments": {"code": body}}, body)

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        texts = (call.raw if call.fault else self._written(call) for call in calls)
        return "\n".join([text_before, *(f"{self._open}{text}{self._close}" for text in texts)])

    def _written(self, call: ToolCall) -> str:
        code = call.arguments.get("code")
        bare = call.name == PYTHON_TOOL and set(call.arguments) == {"code"} and isinstance(code, str) and code.strip()
        if bare and not self._json.match(code) and self._open not in code and self._close not in code:
            return code
        return as_json(call, "arguments").replace(self._close, "<\\/python>")


_GRANITE = GraniteCalls(
    ("<|tool_call|>", CALL_OPEN),
    "",
    ("<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ("<|end_of_text|>",),
)
_PHI = JsonListCalls(
    ("<|tool_call|>", "functools"),
    "<|/tool_call|>",
    ("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
    ("<|end|>",),
)
DIALECTS: dict[str, CallForm] = {
    "glm": GlmCalls(),
    "deepseek": DeepSeekCalls(fenced=True),
    "deepseek_v31": DeepSeekCalls(fenced=False),
    "kimi": KimiCalls(),
    "granite": _GRANITE,
    "phi": _PHI,
    "pythonic": PythonCalls(None, as_json=False),
    "olmo": OlmoCalls(("<function_calls>", "</function_calls>"), as_json=True),
    "function_gemma": GemmaFunctionCalls(
        "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>", "<end_of_turn>"
    ),
    "gemma4": GemmaFunctionCalls(
        "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<turn|>", ("<|channel>thought\n", "\n<channel|>")
    ),
    "harmony": HarmonyCalls(),
    "code": CodeCalls(),
}

"""`/v1/messages`: Anthropic's form of a conversation, for command-line agents that speak it, over the same dialogues.

A request is read as one of chat completions; an answer is that turn as blocks: a thought, text, calls. Form:
docs.anthropic.com/en/api/messages. A key may come as `x-api-key`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from grpo_roc_jax.serving.dialogues import WHERE, TurnAnswer, text_of
from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.serving.replies import JSON, EventReply, SampledChoice, call_ids

COUNT_TOKENS = "/v1/messages/count_tokens"
"""Says how long a request is; samples nothing."""
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERRORS |= {429: "rate_limit_error", 500: "api_error"}
"""Status -> the type of an error; any other is an `invalid_request_error`."""

SAME_FIELDS = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "return_token_ids",
               "return_weight_versions")  # fmt: skip
"""Fields that chat completions have too."""
OWN_FIELDS = ("messages", "system", "tools", "tool_choice", "stop_sequences", "output_config", "output_format")


def error_body(path: str, error: RequestRefused) -> JSON:
    """The body of an error, in the form of the path that was asked for."""
    if not path.endswith((MessagesReply.path, COUNT_TOKENS)):
        return error.body
    kind = ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesReply(EventReply):
    """One answer, whole or as a stream of events."""

    path, name, chunk_name, prefix = "/v1/messages", "message", "message", "msg_"
    reads = frozenset({*SAME_FIELDS, *OWN_FIELDS})
    reads_within: ClassVar[Mapping[str, frozenset[str]]] = {
        "output_config": frozenset({"format"}),
        "tool_choice": frozenset({"type", "name"}),
    }
    _open = ""
    """Type of the block that the stream is in."""
    _blocks = 0
    """Blocks that are finished."""

    def as_chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return _chat_body(body)

    # ---- the stream

    def fault(self, error: RequestRefused) -> JSON:
        return error_body(self.path, error)

    def _opening(self, choice: SampledChoice) -> Iterator[JSON]:
        yield {"type": "message_start", "message": self._message([], None, self._usage() | {"output_tokens": 0})}

    def _pieces(self, choice: SampledChoice, ids: list[int], logprobs: list[float], first: bool) -> Iterator[JSON]:
        if first:
            yield from self._opening(choice)
        for piece in super()._pieces(choice, ids, logprobs, False):
            yield from self._grown(piece["choices"][0]["delta"])

    def ended(self, choice: SampledChoice) -> Iterator[JSON]:
        if not self.fields.stream:
            return
        if not choice.ids:  # it ended before its first token
            yield from self._opening(choice)
        answer = self.answer(choice)
        yield from self._grown(self._growth(choice, answer.reasoning, answer.content))
        yield from self._closed()
        for block in _tool_uses(answer):
            yield self._event("content_block_start", content_block=block | {"input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield self._event("content_block_delta", delta=delta)
            yield self._event("content_block_stop")
            self._blocks += 1
        usage = {"output_tokens": len(choice.ids)}
        yield {"type": "message_delta", "delta": self._stop(choice, answer), "usage": usage}
        yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> JSON:
        return {"type": kind, "index": self._blocks} | fields

    def _grown(self, delta: Mapping[str, str]) -> Iterator[JSON]:
        """The events of new text of the thought and of the message."""
        for name, kind in (("reasoning_content", "thinking"), ("content", "text")):
            if not delta.get(name):
                continue
            if self._open not in ("", kind):
                yield from self._closed()
            if not self._open:
                self._open = kind
                yield self._event("content_block_start", content_block=_block(kind, ""))
            yield self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: delta[name]})

    def _closed(self) -> Iterator[JSON]:
        if self._open:
            yield self._event("content_block_stop")
            self._open, self._blocks = "", self._blocks + 1

    # ---- the answer

    def whole(self) -> JSON:
        (choice,) = self.choices
        answer = self.answer(choice)
        texts = (("thinking", answer.reasoning), ("text", answer.content))
        content = [*(_block(kind, text) for kind, text in texts if text), *_tool_uses(answer)]
        return self._message(content, self._stop(choice, answer), self._usage()) | self._token_fields(choice)

    def _stop(self, choice: SampledChoice, answer: TurnAnswer) -> JSON:
        text = self.tokenizer.decode(choice.ids)
        stop = min((stop for stop in self.fields.stops if stop in text), key=text.find, default=None)
        cut = choice.finish_reason == "length"
        reason = "tool_use" if answer.calls else "stop_sequence" if stop else "max_tokens" if cut else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self) -> JSON:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _message(self, content: list[JSON], stop: JSON | None, usage: JSON) -> JSON:
        around = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        stop = stop or {"stop_reason": None, "stop_sequence": None}
        return around | stop | {"usage": usage, "policy_version": self.version}


def _block(kind: str, text: str) -> JSON:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _tool_uses(answer: TurnAnswer) -> list[JSON]:
    return [
        {"type": "tool_use", "id": own_id, "name": call.name, "input": dict(call.arguments)}
        for own_id, call in zip(call_ids("toolu_", answer), answer.calls, strict=True)
    ]


# ---- requests ------------------------------------------------------------------------------------------------------


def _chat_body(body: Mapping[str, Any]) -> JSON:
    system = text_of(body.get("system"), "system")
    turns = field_of(body, "messages", list, [])
    messages = [message for i, turn in enumerate(turns) for message in _messages(turn, f"messages[{i}]")]
    form = field_of(field_of(body, "output_config", dict, {}), "format", dict) or field_of(body, "output_format", dict)
    chat = {name: body[name] for name in SAME_FIELDS if name in body}
    return chat | {
        "messages": [*([{"role": "system", "content": system}] if system else []), *messages],
        "tools": [_tool(tool) for tool in field_of(body, "tools", list, [])],
        "tool_choice": _tool_choice(field_of(body, "tool_choice", dict, {})),
        "stop": field_of(body, "stop_sequences", list, []),
        "response_format": form,
    }


def _tool(tool: Any) -> JSON:
    kind = (tool.get("type") or "custom") if isinstance(tool, dict) else type(tool).__name__
    if kind != "custom" or not isinstance(tool.get("name"), str):
        raise RequestRefused(f"a tool of type {kind!r:.80}; must be of one's own, with name and input_schema", "tools")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value}}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise RequestRefused(f"tool_choice is of type {kind!r:.80}; must be auto, any, tool or none", "tool_choice")
    return "required" if kind == "any" else kind


def _messages(turn: Any, where: str) -> Iterator[JSON]:
    """A turn as messages: results of tools come before the text beside them, as they follow the calls."""
    if not isinstance(turn, dict) or turn.get("role") not in ("user", "assistant", "system"):
        role = turn.get("role") if isinstance(turn, dict) else type(turn).__name__
        raise RequestRefused(f"{where}.role is {role!r:.80}; must be user or assistant", "messages")
    content = turn.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts, thoughts, calls, results = [], [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind == "text":
            texts.append(text_of(block.get("text"), where))
        elif kind == "thinking":
            thoughts.append(text_of(block.get("thinking"), where))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = text_of(block.get("content"), where)
            if field_of(block, "is_error", bool, False) and not text.lstrip().lower().startswith("error"):
                text = f"Error: {text}"  # templates have no other place for it
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text, WHERE: where})
        elif kind != "redacted_thinking":
            raise RequestRefused(
                f"{where} holds a block of type {kind!r:.80}; must be text, thinking, tool_use or tool_result",
                "messages",
            )
    yield from results
    if texts or thoughts or calls or not results:
        message: JSON = {"role": turn["role"], "content": "".join(texts), WHERE: where}
        message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        yield message | ({"tool_calls": calls} if calls else {})

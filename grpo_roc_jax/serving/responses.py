"""`/v1/responses`: OpenAI's newer form, in which a conversation is a list of items, over the same dialogues.

A request is read as one of chat completions; an answer is that turn as items: a thought, a message, calls. Form:
platform.openai.com/docs/api-reference/responses. `previous_response_id` goes on from an answer that is remembered here.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from grpo_roc_jax.serving.dialogues import WHERE, TurnAnswer
from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.serving.replies import JSON, EventReply, SampledChoice, call_ids
from grpo_roc_jax.serving.sampling_fields import unread

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of parts of a content that hold text."""
SAME_FIELDS = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "stop", "stop_token_ids",
               "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "structured_outputs",
               "min_tokens", "ignore_eos", "bad_words", "return_token_ids", "return_weight_versions")  # fmt: skip
"""Fields that chat completions have too; those after `top_p`, but for `stream`, are none of OpenAI's form."""
OWN_FIELDS = ("input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens", "include",
              "top_logprobs", "text", "store")  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that is read."""
UNSUPPORTED = ("background", "conversation", "prompt")
"""Fields that ask for what is not served."""


class ResponsesReply(EventReply):
    """One answer, whole or as a stream of events."""

    path, name, chunk_name, prefix = "/v1/responses", "response", "response", "resp_"
    reads = frozenset({*SAME_FIELDS, *OWN_FIELDS})
    reads_within: ClassVar[Mapping[str, frozenset[str]]] = {"text": frozenset({"format"})}

    def __init__(
        self, body: Mapping[str, Any], *settings: Any, session: str, remembered: "RememberedResponses", **talk: Any
    ):
        self._request, self._session, self._remembered = body, session, remembered
        self._events = 0
        self._output: list[JSON] = []
        """Items that are finished."""
        self._open: JSON | None = None
        """The item that the stream is in, with its text so far."""
        self._scored: list[JSON] = []
        """Log-probabilities of tokens that came before their text could be sent."""
        super().__init__(body, *settings, session=session, **talk)

    def as_chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        before = field_of(body, "previous_response_id", str, "")
        known = self._remembered.get(self._session, before) if before else ()
        self._messages = [*known, *messages_of(body.get("input"))]
        instructions = field_of(body, "instructions", str, "")
        system = [{"role": "system", "content": instructions}] if instructions else []
        return _chat_body(body, [*system, *self._messages])

    def _unread(self, body: Mapping[str, Any]) -> list[str]:
        entries = [entry for entry in field_of(body, "include", list, []) if isinstance(entry, str)]
        others = {f"include.{entry}": True for entry in entries if entry != LOGPROBS}
        return [*super()._unread(body), *unread(others, ())]

    # ---- the stream

    def fault(self, error: RequestRefused) -> JSON:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> JSON:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1} | fields

    def _opening(self, choice: SampledChoice) -> Iterator[JSON]:
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))

    def _pieces(self, choice: SampledChoice, ids: list[int], logprobs: list[float], first: bool) -> Iterator[JSON]:
        if first:
            yield from self._opening(choice)
        for piece in super()._pieces(choice, ids, logprobs, False):
            yield from self._grown(piece["choices"][0])

    def ended(self, choice: SampledChoice) -> Iterator[JSON]:
        if not self.fields.stream:
            return
        if not choice.ids:  # it ended before its first token
            yield from self._opening(choice)
        answer = self.answer(choice)
        yield from self._grown({"delta": self._growth(choice, answer.reasoning, answer.content)})
        if self._open is not None:
            yield from self._closed(self._open)
        if not answer.calls and all(item["type"] != "message" for item in self._output):
            yield from self._begun("message")  # an answer without text has a message too, as outside of a stream
            yield from self._closed(self._open)
        for item in self._calls(answer):
            at = len(self._output)
            yield self._event("response.output_item.added", output_index=at, item=item | {"arguments": ""})
            where = {"item_id": item["id"], "output_index": at}
            yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield self._event("response.function_call_arguments.done", **where, arguments=item["arguments"])
            yield self._event("response.output_item.done", output_index=at, item=item)
            self._output.append(item)
        response = self._ended_response(choice, self._output, answer)
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        yield self._event(kind, response=response)

    def _grown(self, piece: Mapping[str, Any]) -> Iterator[JSON]:
        """The events of new text of the thought and of the message."""
        self._scored += (piece.get("logprobs") or {}).get("content", [])
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            new = piece["delta"].get(name)
            if not new:
                continue
            if self._open is not None and self._open["type"] != kind:
                yield from self._closed(self._open)
            if self._open is None:
                yield from self._begun(kind)
            self._open["text"] += new
            logprobs = {"logprobs": self._scored_until_now()} if kind == "message" else {}
            yield self._event(f"response.{_TEXT[kind]}.delta", **self._place(), delta=new, **logprobs)

    def _scored_until_now(self) -> list[JSON]:
        """The log-probabilities that the stream has not had; the open message has them then."""
        entries, self._scored = self._scored, []
        self._open["logprobs"] += entries
        return entries

    def _begun(self, kind: str) -> Iterator[JSON]:
        """The events that begin an item of text."""
        self._open = {"id": _new_id(kind), "type": kind, "text": "", "logprobs": []}
        item = _item(self._open, "in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._event("response.content_part.added", **self._place(), part=_part(self._open))

    def _closed(self, opened: JSON) -> Iterator[JSON]:
        """The events that end an item of text."""
        logprobs = {}
        if opened["type"] == "message":
            self._scored_until_now()
            logprobs = {"logprobs": opened["logprobs"]}
        yield self._event(f"response.{_TEXT[opened['type']]}.done", **self._place(), text=opened["text"], **logprobs)
        yield self._event("response.content_part.done", **self._place(), part=_part(opened))
        item = _item(opened, "completed")
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _place(self) -> JSON:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    # ---- the answer

    def whole(self) -> JSON:
        (choice,) = self.choices
        answer, items = self.answer(choice), []
        entries = (self._logprobs(choice) or {}).get("content", [])
        for kind, text in (("reasoning", answer.reasoning), ("message", answer.content)):
            if text or (kind == "message" and not answer.calls):
                opened = {"id": _new_id(kind), "type": kind, "text": text, "logprobs": entries}
                items.append(_item(opened, "completed"))
        return self._ended_response(choice, [*items, *self._calls(answer)], answer)

    @staticmethod
    def _calls(answer: TurnAnswer) -> list[JSON]:
        return [
            {
                "id": _new_id("function_call"),
                "type": "function_call",
                "call_id": call_id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
                "status": "completed",
            }
            for call_id, call in zip(call_ids("call_", answer), answer.calls, strict=True)
        ]

    def _ended_response(self, choice: SampledChoice, output: list[JSON], answer: TurnAnswer) -> JSON:
        cut = choice.finish_reason == "length" and not answer.calls
        if self._request.get("store") is not False:
            messages = [*self._messages, self._turn(output, answer)]
            if self.context.begun is not None:  # the request began the turn
                messages[-2:] = [_joined(*messages[-2:])]
            messages = [{name: value for name, value in message.items() if name != WHERE} for message in messages]
            self._remembered.add(self._session, self.id, messages)
        return self._response("incomplete" if cut else "completed", output, self._usage()) | self._token_fields(choice)

    @staticmethod
    def _turn(output: Sequence[JSON], answer: TurnAnswer) -> JSON:
        """The answer as a message of chat completions."""
        message: JSON = {"role": "assistant", "content": answer.content}
        message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        calls = [_call_of(item) for item in output if item["type"] == "function_call"]
        return message | ({"tool_calls": calls} if calls else {})

    def _usage(self) -> JSON:
        usage = self.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,  # nothing is charged for them; the client needs the field
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, output: list[JSON], usage: JSON | None = None) -> JSON:
        body, draw = self._request, self.fields.draw
        used = {"temperature": self.fields.temperature, "top_p": draw.top_p}
        used = {name: getattr(self.sampling, name) if value is None else value for name, value in used.items()}
        repeated = {
            name: body.get(name)
            for name in ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "user")
        }
        defaults = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        defaults |= {"truncation": "disabled", "text": {"format": {"type": "text"}}, "store": True}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(output),
            "usage": usage,
            "policy_version": self.version,
            **used,
            **repeated,
            **{name: value if body.get(name) is None else body[name] for name, value in defaults.items()},
        }


_TEXT = {"reasoning": "reasoning_text", "message": "output_text"}
"""Kind of item -> the name of its text in events."""
_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}{uuid.uuid4().hex}"


def _part(opened: JSON) -> JSON:
    if opened["type"] == "reasoning":
        return {"type": "reasoning_text", "text": opened["text"]}
    return {"type": "output_text", "text": opened["text"], "annotations": [], "logprobs": opened["logprobs"]}


def _item(opened: JSON, status: str) -> JSON:
    """A thought or a message as an item."""
    item = {"id": opened["id"], "type": opened["type"], "status": status, "content": [_part(opened)]}
    return item | ({"summary": []} if opened["type"] == "reasoning" else {"role": "assistant"})


# ---- requests ------------------------------------------------------------------------------------------------------


def _chat_body(body: Mapping[str, Any], messages: list[JSON]) -> JSON:
    """The request as one of chat completions.

    Raises:
        RequestRefused: It asks for what is not served.
    """
    for name in UNSUPPORTED:
        if body.get(name):
            raise RequestRefused(f"{name} is not supported; leave it out", name, "unsupported")
    chat = {name: body[name] for name in SAME_FIELDS if name in body}
    include = field_of(body, "include", list, [])
    logprobs = LOGPROBS in include or bool(field_of(body, "top_logprobs", int, 0))
    form = field_of(field_of(body, "text", dict, {}), "format", dict, {"type": "text"})
    if (most := field_of(body, "max_output_tokens", int)) is not None and most < 1:
        raise RequestRefused(f"max_output_tokens = {most}; must be at least 1", "max_output_tokens")
    return chat | {
        "messages": messages,
        "tools": [_tool(tool) for tool in field_of(body, "tools", list, [])],
        "tool_choice": _tool_choice(body.get("tool_choice")),
        "max_tokens": most,
        "response_format": form,
        **({"logprobs": True, "top_logprobs": body.get("top_logprobs")} if logprobs else {}),
    }


def _tool(tool: Any) -> JSON:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        raise RequestRefused(f"a tool of type {kind!r:.80}; must be function, with a name", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    named = isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str)
    return {"type": "function", "function": {"name": choice["name"]}} if named else choice


def messages_of(items: Any) -> list[JSON]:
    """Items of a request or of an answer as messages of chat completions.

    A turn of the assistant holds its thoughts, its message and its calls. An item of somebody else ends it, and so does
    a further message of the assistant, unless calls of the turn wait for their results.

    Raises:
        RequestRefused: An item is malformed, or of a kind that is not served.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestRefused("input must be text or a list of at least one item", "input")
    messages: list[JSON] = []
    thoughts: list[str] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise RequestRefused(f"{where} is {type(item).__name__}; must be an object", "input")
        kind, role = item.get("type") or "message", item.get("role")
        if kind == "reasoning":
            thoughts += filter(None, [_text(item.get("content") or item.get("summary") or [], where)])
        elif kind == "message" and role == "assistant":
            turn = _turn_of(messages, thoughts, where, speaks=True)
            turn["content"] = "\n".join(filter(None, [turn["content"], _text(item.get("content"), where)]))
        elif kind == "function_call":
            _turn_of(messages, thoughts, where).setdefault("tool_calls", []).append(_call_of(item))
        elif kind in ("message", "function_call_output"):
            if thoughts:  # that nothing followed
                _turn_of(messages, thoughts, where)
            message = {"role": role} if kind == "message" else {"role": "tool", "tool_call_id": item.get("call_id")}
            content = item.get("content" if kind == "message" else "output")
            messages.append(message | {"content": _text(content, where), WHERE: where})
        else:
            raise RequestRefused(
                f"{where} is of type {kind!r:.80}; must be message, reasoning, function_call or function_call_output",
                "input",
            )
    if thoughts:
        _turn_of(messages, thoughts, where)
    return messages


def _turn_of(messages: list[JSON], thoughts: list[str], where: str, *, speaks: bool = False) -> JSON:
    """The assistant's turn of an item, which gets the thoughts before the item; `speaks`: the item is a message."""
    goes_on = bool(messages) and messages[-1]["role"] == "assistant"
    if not goes_on or (speaks and not messages[-1].get("tool_calls")):
        messages.append({"role": "assistant", "content": "", WHERE: where})
    turn = messages[-1]
    if thoughts:
        turn["reasoning_content"] = "\n".join([*filter(None, [turn.get("reasoning_content")]), *thoughts])
        thoughts.clear()
    return turn


def _call_of(item: Mapping[str, Any]) -> JSON:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _joined(begun: JSON, rest: JSON) -> JSON:
    """A turn that a request began, with what the policy added to it."""
    thought = begun.get("reasoning_content", "") + rest.get("reasoning_content", "")
    joined = rest | {"content": begun["content"] + rest["content"]}
    return joined | ({"reasoning_content": thought} if thought else {})


def _text(content: Any, where: str) -> str:
    """The text of a content: text, or a list of parts."""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and part.get("type") == "refusal":
            part = part.get("refusal")
        elif isinstance(part, dict) and part.get("type") in TEXT_PARTS:
            part = part.get("text")
        if part is not None and not isinstance(part, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestRefused(f"{where} holds {kind!r:.80}; must be text or parts of text", "input")
        texts.append(part or "")
    return "".join(texts)


class RememberedResponses:
    """The conversations that answers ended, by id; the longest unused leave first."""

    def __init__(self, most_characters: int = 1 << 26):
        self._most, self._held = most_characters, 0
        self._known: dict[tuple[str, str], tuple[int, Sequence[JSON]]] = {}

    def get(self, session: str, name: str) -> Sequence[JSON]:
        """The messages up to and with an answer.

        Raises:
            RequestRefused: It is not known, in this session.
        """
        response = self._known.pop((session, name), None)
        if response is None:
            raise RequestRefused(
                f"no response {name!r:.80} is remembered; send the whole conversation as input",
                "previous_response_id",
                "previous_response_not_found",
                404,
            )
        self._known[session, name] = response
        return response[1]

    def add(self, session: str, name: str, messages: Sequence[JSON]) -> None:
        """Notes the conversation that an answer ends."""
        size = sum(len(json.dumps(message)) for message in messages)
        self._known[session, name] = (size, messages)
        self._held += size
        while self._held > self._most:
            oldest = next(iter(self._known))
            self._held -= self._known.pop(oldest)[0]

"""Chat templates of model directories: rendered as transformers does, and split into the text around a dialogue.

A template renders a whole conversation each time; a dialogue here only grows. `make_glue` renders conversations of
placeholders and cuts out the text around them: before the problem, between the problem and the assistant, between a
turn and an observation. `check_append_only` compares a dialogue grown with this text to the template's rendering of
the whole conversation and reports the first difference, for example a template that drops the thinking of earlier
turns.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jinja2.ext

from grpo_roc_jax.settings.files import read_text
from grpo_roc_jax.text.config import PublishedTemplate
from grpo_roc_jax.text.conventions import CONVENTIONS, CallConvention
from grpo_roc_jax.text.template_bounds import BoundedEnvironment
from grpo_roc_jax.text.tokenizer import MORE_TEMPLATES, MOST_TEMPLATE_BYTES, named_tokens, read_json
from grpo_roc_jax.types import ToolCall

Message = Mapping[str, Any]
USER = "xUSERx"
"""Placeholder for a text: letters, which no template changes."""


class TemplateError(ValueError):
    """A chat template that cannot be used as configured."""


@dataclass(frozen=True)
class Glue:
    """The trusted text around problems, turns and observations; tags in it become special ids."""

    prompt_open: str
    """Text before the problem: start, system message and tools, the user's header."""
    prompt_close: str
    """Text from the end of the user message to the start of the policy's turn."""
    end: str
    """Text that ends a turn of the policy."""
    user_open: str
    """Text from the end token of the policy's turn to the next user message."""
    observation_open: str
    """Text from the end token of the policy's turn to the first observation."""
    observation_between: str
    """Text between the observations of one turn."""
    observation_close: str
    """Text from the last observation to the start of the policy's next turn."""
    json_observations: bool = False
    """Whether the template writes observations as JSON strings."""
    as_user: bool = False
    """Whether the template has no message for observations, so that they are `<tool_response>` blocks of a user
    message."""
    thought_open: str = ""
    """Text before the thought of a demonstrated turn; empty if `prompt_close` has opened it."""
    thought_close: str = "</reason>"
    """Text after the thought of a demonstrated turn."""
    marks: tuple[str, ...] = ()
    """Beginnings of the template's marks, such as `<think` and `[/INST`; no observation may imitate them."""
    call_end: str = ""
    """Text that ends a turn of calls, if it differs from `end`."""
    user_trims: tuple[bool, bool] = (False, False)
    """Whether the template removes white space from the start, and from the end, of a user message."""
    observation_trims: tuple[bool, bool] = (False, False)
    """The same of an observation."""


_MARK = re.compile(r"</?[A-Za-z][\w-]{1,30}(?=[>=])|\[/?[A-Z][A-Z_]{1,30}(?=\])|<</?SYS(?=>>)")


class ChatTemplate:
    """A jinja chat template and the special tokens it refers to."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str = "chat template",
        settings: PublishedTemplate = PublishedTemplate(),  # noqa: B008
    ):
        self.origin, self._source = origin, source
        self.marks = tuple(sorted(set(_MARK.findall(source))))
        """Beginnings of the marks that it mentions, special tokens or not."""
        self.thinks = "</think>" in source
        """Whether the template marks thoughts with `<think>`."""
        self.asks_date = "strftime_now" in source
        """Whether the template renders today's date."""
        self._given = dict(special_tokens) | settings.given
        try:
            self._template = _environment(settings.date).from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise TemplateError(f"{origin}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as `apply_chat_template(..., tokenize=False)` gives it.

        Raises:
            TemplateError: The template refuses the conversation or has an error.
        """
        try:
            return self._template.environment.render(
                self._template,
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **({"documents": None} | self._given | variables),
            )
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise TemplateError(f"{self.origin}: {error}") from error

    @cached_property
    def convention(self) -> str:
        """Name of the calling convention that the template uses; `hermes` if it does not mention calls."""
        return self.convention_for(()) or "hermes"

    def convention_for(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Name of the calling convention that reads a call as this template writes it; empty if it does not mention
        calls.

        A template that writes no call may still name the marks of one.

        Raises:
            TemplateError: It writes calls, but no convention reads them.
        """
        written = ""
        for name, text in self._written_calls(tools):
            written = text or written
            if text and reads_back(CONVENTIONS[name], text):
                return name
        if written:
            raise TemplateError(
                f"{self.origin} writes the call of a tool as {written[:300]!r}, which no form of calls reads; set "
                f"text.calls to the form that the model writes ({', '.join(CONVENTIONS)}), or name another template in "
                "text.template.file"
            )
        return next((name for name, signs in SIGNS if any(sign in self._source for sign in signs)), "")

    def _written_calls(self, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """(name of a convention, a turn of one structured call as the template writes it, or "" if it writes none).
        Conventions whose opening marks occur in the turn come first, and of these the ones whose own form does."""
        turns = {name: self.written_call(form, tools) for name, form in CONVENTIONS.items()}

        def distance(name: str) -> tuple[bool, bool]:
            form, turn = CONVENTIONS[name], turns[name]
            marked = any(mark in turn for mark in form.openings)
            return not marked, form.write_calls("", [PROBE], _PROBE_TOOLS).strip() not in turn

        yield from sorted(turns.items(), key=lambda turn: distance(turn[0]))

    def written_call(self, form: CallConvention, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a template writes for a turn of one call, with the ids of this form; a part of the call if it writes no
        more. Its arguments are passed as an object, or as JSON text if the template requires that."""
        part = ""
        for arguments in (dict(PROBE.arguments), json.dumps(PROBE.arguments, ensure_ascii=False)):
            call = {"id": form.probe_id(PROBE.name, 0), "type": "function", "function": {"name": PROBE.name}}
            call["function"]["arguments"] = arguments
            for content in ("", None):
                turn = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    text = self.render([{"role": "user", "content": USER}, turn], tools=tools)
                except TemplateError:
                    continue
                after = text.rpartition(USER)[2]
                if PROBE.name in after and MARKER in after:
                    return after
                part = part or (after if PROBE.name in after or MARKER in after else "")
        return part


MARKER = "xPROBEx"
PROBE = ToolCall("look_up_7", {"place": f'the "{MARKER}"\nof é', "count": 3}, "")
"""A call by which forms are recognized: its arguments need the quoting of their form."""
_PROBE_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}, "count": {"type": "integer"}}}
_PROBE_TOOLS = [{"type": "function", "function": {"name": PROBE.name, "parameters": _PROBE_SCHEMA}}]
SIGNS = (
    ("gemma4", ("<|tool_call>",)),
    ("function_gemma", ("<start_function_call>",)),
    ("olmo", ("<function_calls>",)),
    ("granite", ("<|start_of_role|>",)),
    ("phi", ("<|tool|>", "<|/tool_call|>")),
    ("kimi", ("<|tool_call_begin|>", "<|im_middle|>")),
    ("deepseek", ("<｜tool▁calls▁begin｜>",)),
    ("harmony", ("<|channel|>",)),
    ("mistral_args", ("[ARGS]",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<arg_key>",)),
    ("xml", ("<function=",)),
    ("hermes", ("<tool_call>", "<tool_response>")),
    ("llama3", ("<|python_tag|>", "ipython")),
    ("gemma", ("<start_of_turn>",)),
)
"""Convention -> marks by which a template that writes no call is known."""


def reads_back(convention: CallConvention, text: str) -> bool:
    """Whether a convention reads the probe from a turn as a template writes it."""
    calls = convention.find_calls(text, over=True, tools=_PROBE_TOOLS)
    return [(call.name, call.arguments, call.fault) for call in calls] == [(PROBE.name, PROBE.arguments, None)]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the text to train on. Masks come from ids here, so the tag renders its content."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(date: str) -> jinja2.Environment:
    """The sandboxed jinja environment that published templates are written for. `date`, if given, is its
    current date."""

    def refuse(message: str) -> None:
        raise TemplateError(f"the chat template refuses: {message}")

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        now = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now()
        return now.strftime(form)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = environment.bounded_filter(tojson)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    return environment


def load_template(
    folder: Path,
    settings: PublishedTemplate = PublishedTemplate(),  # noqa: B008
    *,
    with_tools: bool = False,
) -> ChatTemplate:
    """The chat template of a model directory, or the one in `settings.file` with the directory's special tokens.

    Args:
        folder: Has `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`.
        settings: File, variables and date of the template.
        with_tools: Whether to prefer the template named `tool_use` if the directory has several.

    Raises:
        TemplateError: There is no template.
    """
    specials = named_tokens(folder)
    if settings.file:
        path = Path(settings.file).expanduser()
        if not path.is_file():
            raise TemplateError(f"text.template.file = {settings.file!r} is not a file; name a jinja template")
        return ChatTemplate(read_text(path, MOST_TEMPLATE_BYTES), specials, str(path), settings)
    for name in (*((f"{MORE_TEMPLATES}/tool_use.jinja",) if with_tools else ()), "chat_template.jinja"):
        if (folder / name).is_file():
            return ChatTemplate(read_text(folder / name, MOST_TEMPLATE_BYTES), specials, str(folder / name), settings)
    config = read_json(folder / "tokenizer_config.json")
    source = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):
        named = {
            e.get("name"): e.get("template")
            for e in source
            if isinstance(e, Mapping) and isinstance(e.get("name"), str)
        }
        source = (named.get("tool_use") if with_tools else None) or named.get("default")
    if not isinstance(source, str):
        raise TemplateError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); set "
            "text.template to chatml, or name one in text.template.file"
        )
    return ChatTemplate(source, specials, str(folder), settings)


# ---- splitting a template ------------------------------------------------------------------------------------------

TURN, FIRST, SECOND = "xTURNx", "xFIRSTx", "xSECONDx"
PROBE_IDS = ("xCALLxID1", "xCALLxID2")
"""Placeholders of the ids of calls in the text around observations: nine characters, as Mistral's templates require."""
PROBE_NAMES = ("xNAMExOFx1", "xNAMExOFx2")
"""Placeholders of the names of tools in the text around observations."""


def _thought_marks(
    template: ChatTemplate, convention: CallConvention, prompt_open: str, prompt_close: str
) -> tuple[str, str]:
    """(text before the thought of a turn, text after it), given the text around a problem."""
    if convention.thought is not None and convention.thinks_if in prompt_open:
        return convention.thought
    closing = prompt_close.rstrip()
    if not template.thinks or closing.endswith("</think>"):
        return "", "\n"
    return "" if closing.endswith("<think>") else "<think>\n", "\n</think>\n\n"


def make_glue(
    template: ChatTemplate,
    convention: CallConvention,
    *,
    system: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    ends: Sequence[str],
) -> Glue:
    """The text around problem, turns and observations, cut out of rendered conversations of placeholders.

    Args:
        template: The chat template of the model.
        convention: Defines the message that returns an observation.
        system: System text; empty for no system message.
        tools: Schemas for the template.
        ends: Candidates for the token that ends a turn; the first of them after a rendered turn is taken.

    Raises:
        TemplateError: The template accepts no tool output in the convention's form, drops a placeholder, or writes no
            end token after a turn.
    """

    def rendered(*messages: Message, user: str = USER) -> str:
        return template.render([*_start(system, user), *messages], tools=tools, add_generation_prompt=True)

    def observed(*texts: str) -> str:
        return _first_accepted(
            lambda turn: rendered(turn, *_answers(convention, texts, as_user)),
            (_calls(len(texts)), _calls(1), {"role": "assistant", "content": TURN}),
            (end, *convention.end_tokens, *ends),
        )

    prompt_open, prompt_close = _around(rendered(), USER, template)
    question = rendered({"role": "assistant", "content": TURN}, {"role": "user", "content": FIRST})
    ends = [*ends, *convention.past_ends]
    end, user_open = _after_turn(_around(question, FIRST, template)[0], ends, template)
    as_user = False
    try:
        as_user = FIRST not in observed(FIRST)
    except TemplateError:  # for templates that know two roles only
        as_user = True
    before, after = _around(observed(FIRST), FIRST, template)
    between = _around(observed(FIRST, SECOND), FIRST, template)[1]
    after_calls = _around(before, TURN, template)[1]
    call_end = _call_end(after_calls, (end, *convention.end_tokens, *ends), template)
    thought_open, thought_close = _thought_marks(template, convention, prompt_open, prompt_close)
    return Glue(
        prompt_open=prompt_open,
        prompt_close=prompt_close,
        end=convention.turn_end or end,
        call_end=call_end,
        user_open=user_open,
        observation_open=after_calls.partition(call_end)[2],
        observation_between=_around(between, SECOND, template)[0],
        observation_close=after,
        as_user=as_user,
        user_trims=_trims(lambda text: rendered(user=text), USER),
        observation_trims=_trims(observed, FIRST),
        json_observations=f'{FIRST}\\"{FIRST}' in observed(f'{FIRST}"{FIRST}'),
        thought_open=thought_open,
        thought_close=thought_close,
        marks=template.marks,
    )


def _trims(render: Callable[[str], str], text: str) -> tuple[bool, bool]:
    """Whether a rendering removes white space before, and after, a text."""
    plain, spaced = render(text).partition(text), render(f" {text} ").partition(text)
    return plain[0] == spaced[0], plain[2] == spaced[2]


def _start(system: str, user: str = USER) -> list[Message]:
    user = {"role": "user", "content": user}
    return [{"role": "system", "content": system}, user] if system else [user]


def _calls(number: int) -> Message:
    """A turn of structured calls, the last of which has `TURN` as its argument."""
    texts = [*("x" for _ in range(number - 1)), TURN]
    calls = [
        {"id": own_id, "type": "function", "function": {"name": name, "arguments": {"code": text}}}
        for own_id, name, text in zip(PROBE_IDS, PROBE_NAMES, texts, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _answers(convention: CallConvention, texts: Sequence[str], as_user: bool) -> list[Message]:
    """The messages that return outputs. Consecutive user messages are joined into one, since templates of strictly
    alternating roles refuse them."""
    blocks = ({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"} for text in texts)
    messages: list[Message] = list(blocks) if as_user else [convention.observation(text) for text in texts]
    if len(messages) > 1 and all(message["role"] == "user" for message in messages):
        return [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]
    ids = [{"name": name, "tool_call_id": own_id} for name, own_id in zip(PROBE_NAMES, PROBE_IDS, strict=True)]
    return [
        {**message, **{key: value for key, value in id_fields.items() if key == "tool_call_id" or key in message}}
        for message, id_fields in zip(messages, ids, strict=False)
    ]


def _first_accepted(render: Callable[[Message], str], turns: Sequence[Message], ends: Sequence[str]) -> str:
    """The conversation with the first of these turns that the template renders and closes before the output, or else
    with the last."""
    for turn in turns[:-1]:
        try:
            text = render(turn)
        except TemplateError:
            continue
        before_output = text.partition(TURN)[2].partition(FIRST)[0]
        if text.count(TURN) == 1 and any(end and end in before_output for end in ends):
            return text
    return render(turns[-1])


def _call_end(text: str, ends: Sequence[str], template: ChatTemplate) -> str:
    """The token that ends a turn of calls, found in the text between its calls and their output: the first of `ends` if
    that is there, else the earliest one."""
    ends_found = sorted((text.find(end), end) for end in ends if end and end in text)
    if not ends_found:
        raise TemplateError(
            f"{template.origin}: no end token between a turn and the output of its call; got {text!r}, which holds "
            f"none of {list(ends)}; name the token in text.tokenizer.eos_token"
        )
    return ends[0] if ends[0] in text else ends_found[0][1]


def _after_turn(text: str, ends: Sequence[str], template: ChatTemplate) -> tuple[str, str]:
    """(the token that ends the turn `TURN`, the text after it)."""
    close_turn = _around(text, TURN, template)[1]
    positions = {close_turn.find(end): end for end in ends if end and end in close_turn}
    if not positions:
        raise TemplateError(
            f"{template.origin}: no end token after a turn; got {close_turn!r}, which holds none of {ends}; name the "
            "token in text.tokenizer.eos_token"
        )
    position, end = min(positions.items())
    if close_turn[:position].strip():
        raise TemplateError(f"{template.origin}: writes {close_turn[:position]!r} between a turn and its end token")
    return end, close_turn[position + len(end) :]


def _around(text: str, mark: str, template: ChatTemplate) -> tuple[str, str]:
    before, marker, after = text.partition(mark)
    if not marker or mark in after:
        raise TemplateError(
            f"{template.origin}: the content of a message must be rendered exactly once and unchanged; got {text!r}"
        )
    return before, after


def check_append_only(
    template: ChatTemplate,
    convention: CallConvention,
    glue: Glue,
    *,
    system: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Describes where the template would rewrite earlier turns; empty if rendering only ever appends.

    A conversation of two tool turns with thinking is grown with the glue and compared, after each turn, with the
    template's rendering of the whole conversation. If the template refuses it, the turns are structured calls.
    """
    refused = ""
    # If turns of calls end by a token of their own, no output follows a turn of text.
    for structured in (False, True) if glue.call_end in ("", glue.end) else (True,):
        messages, grown = _start(system), glue.prompt_open + USER + glue.prompt_close
        for i in range(2):
            if structured:
                sampled, turn = None, _calls(1)
            else:
                sampled, turn = _thought(glue, f"{TURN}{i + 1}")
            messages += [turn, *_answers(convention, [f"{FIRST}{i}"], glue.as_user)]
            tail = (glue.call_end or glue.end) + glue.observation_open + f"{FIRST}{i}" + glue.observation_close
            try:
                rendering = template.render(messages, tools=tools, add_generation_prompt=True)
            except TemplateError as error:
                refused = refused or f"after tool turn {i + 1}: {error}"
                break
            grown = _grown(grown, sampled, tail, rendering)
            if difference := _first_difference(grown, rendering):
                return f"after tool turn {i + 1}: {difference}"
        else:
            return ""
    return refused


def _thought(glue: Glue, text: str) -> tuple[str, Message]:
    """(what the policy samples to think and write `text`, the message for it)."""
    opening, thought = "<think>\n", "first\n</think>\n\n"
    before = glue.prompt_close.rstrip()
    if before.endswith("</think>"):
        return text, {"role": "assistant", "content": text}
    sampled = thought + text if before.endswith("<think>") else opening + thought + text
    return sampled, {"role": "assistant", "content": opening + thought + text}


def _grown(grown: str, sampled: str | None, tail: str, rendering: str) -> str:
    """The dialogue after one more turn. The policy samples the spaces before the turn. If `sampled` is None the turn is
    a structured call, whose text is taken from `rendering`."""
    rest = rendering[len(grown) :]
    if sampled is not None:
        return grown + rest[: len(rest) - len(rest.lstrip())] + sampled + tail
    call = rest.removesuffix(tail)
    return grown + (call if TURN in call else TURN) + tail


def _first_difference(grown: str, rendering: str) -> str:
    if grown == rendering:
        return ""
    at = next(
        (i for i, (a, b) in enumerate(zip(grown, rendering, strict=False)) if a != b), min(len(grown), len(rendering))
    )
    near = slice(max(0, at - 40), at + 40)
    return f"sampled {grown[near]!r}, rendered {rendering[near]!r}"

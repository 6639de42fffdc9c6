"""Answers in a form that the request names: JSON, JSON of a schema, a regular expression, one of several texts; and
calls whose arguments follow the schema of their tool (`strict`).

The form is written as a grammar of the whole turn of the policy, in the marks of the chat template: a thought, then the
answer or a call. The library llguidance says which tokens may follow (`engine.steering.TokenMask`); it reads the
grammar on the host, 0.01 ms a token with a vocabulary of 49,000. The end of the turn is allowed where the grammar is
complete, and nowhere else. Form of grammars: github.com/guidance-ai/llguidance, docs/syntax.md.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.serving.refusal import RequestRefused, field_of
from grpo_roc_jax.text.calls import THOUGHTS
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
GRAMMARS = 64
"""Compiled grammars that are kept."""
MOST_SCHEMA = 1 << 18
"""Characters of a schema."""
FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
    "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex",
))  # fmt: skip
"""Formats of texts that JSON Schema defines."""
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose parts are schemas by names of the user's."""
VALUES = ("const", "enum", "default", "examples", "required", "x-guidance")
"""Keywords that hold no schema."""
SPACES = "( |\\n[ \\t]{0,32})?"
"""White space between the tokens of JSON: none, a space, or a line with its indentation. Without a bound a policy could
write it forever."""
AROUND = "[ \\n]{0,3}"
"""White space around an answer."""
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields of vLLM; since its version 0.12 they are in `structured_outputs`, without the prefix."""
THOUGHT, ANSWER, ARGUMENTS = "Qthought7Q", "Qanswer7Q", {"Qname7Q": 1}
"""Stand for the parts of a turn while its text is taken apart; no template holds them."""


@dataclass(frozen=True)
class AnswerFormat:
    """What the answer must look like."""

    rule: str
    """Right side of a rule in a grammar."""
    param: str
    """Field of the request that asks for it."""


@dataclass(frozen=True)
class TurnFormat:
    """What the turn must look like."""

    answer: AnswerFormat | None = None
    """None for any text."""
    strict: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the arguments of tools that ask for it, by name."""

    @property
    def params(self) -> tuple[str, ...]:
        """The fields of the request that ask for something."""
        return (*([self.answer.param] if self.answer else []), *(["tools.strict"] if self.strict else []))


# ---- requests ------------------------------------------------------------------------------------------------------


def read_format(body: Mapping[str, Any]) -> AnswerFormat | None:
    """What a request of chat completions or of completions asks its answer to be; None for text.

    Raises:
        RequestRefused: It is malformed, or of a kind that is not served.
    """
    formats = [_response_format(field_of(body, "response_format", dict, {}))]
    structured = field_of(body, "structured_outputs", dict, {})
    constraints = {f"structured_outputs.{name}": value for name, value in structured.items()}
    constraints |= {name: body[name] for name in GUIDED if body.get(name) not in (None, "")}
    formats += [_guided(name, value) for name, value in constraints.items() if value not in (None, False)]
    chosen = [form for form in formats if form is not None]
    if len(chosen) > 1:
        raise RequestRefused(f"{chosen[0].param} and {chosen[1].param} are both given; leave one out", chosen[1].param)
    return chosen[0] if chosen else None


def _response_format(form: Mapping[str, Any]) -> AnswerFormat | None:
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(_json({"type": "object"}), "response_format")
    if kind != "json_schema":
        raise RequestRefused(
            f"response_format is of type {str(kind)!r:.80}; must be text, json_object or json_schema", "response_format"
        )
    # Chat completions nest the schema, responses do not.
    inner = form if "schema" in form and "json_schema" not in form else field_of(form, "json_schema", dict, {})
    if not isinstance(inner.get("schema"), dict | bool):
        raise RequestRefused(
            "response_format of type json_schema holds no schema; must have json_schema: {name, schema}",
            "response_format",
        )
    return AnswerFormat(_json(inner["schema"], "response_format"), "response_format")


def _guided(name: str, value: Any) -> AnswerFormat | None:
    kind = re.sub(r"^guided_|^structured_outputs\.", "", name)
    if kind == "json_object":
        return AnswerFormat(_json({"type": "object"}), name)
    if kind == "json":
        try:
            schema = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"{name} is no JSON: {error}", name) from None
        if not isinstance(schema, dict | bool):
            raise RequestRefused(f"{name} is {type(schema).__name__}; must be a schema", name)
        return AnswerFormat(_json(schema, name), name)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise RequestRefused(f"{name} must be a list of at least one text", name)
        return AnswerFormat("(" + " | ".join(map(_quoted, value)) + ")", name)
    if kind == "regex" and isinstance(value, str):
        return AnswerFormat("/" + re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", value) + "/", name)
    raise RequestRefused(f"{name} is not supported; ask for json, regex or choice", name, "unsupported")


def strict_schemas(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments of the tools that say `strict`, by name."""
    functions = [tool["function"] for tool in tools]
    return {
        function["name"]: field_of(function, "parameters", dict, {"type": "object"})
        for function in functions
        if function.get("strict") is True
    }


def _json(schema: Any, param: str = "tools") -> str:
    """A rule for JSON of a schema."""
    try:
        if isinstance(schema, dict):
            schema = {"x-guidance": {"whitespace_pattern": SPACES}, **_without_marks(schema)}
        text = json.dumps(schema)
    except RecursionError:
        raise RequestRefused("a schema that is nested too deeply; must be flatter", param) from None
    if len(text) > MOST_SCHEMA:
        raise RequestRefused(f"a schema of {len(text)} characters; must be at most {MOST_SCHEMA}", param)
    return f"%json {text}" if isinstance(schema, dict) else f"%json {json.dumps({'anyOf': [schema]})}"


def _without_marks(schema: Any) -> Any:
    """A schema without formats that JSON Schema does not define: they mark what a text is for (`password`, `path`) and
    say nothing about its characters."""
    if isinstance(schema, list):
        return [_without_marks(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if name in BY_NAME and isinstance(value, dict):
            plain[name] = {key: _without_marks(part) for key, part in value.items()}
        else:
            plain[name] = value if name in VALUES else _without_marks(value)
    return plain


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---- the grammar of a turn -----------------------------------------------------------------------------------------


class TurnGrammar:
    """Writes turns of a chat format as a grammar."""

    def __init__(self, chat: ChatFormat, tools: Sequence[Mapping[str, Any]], form: TurnFormat):
        self._chat, self._form = chat, form
        self._names = [tool["function"]["name"] for tool in tools]
        self.unenforced: tuple[str, ...] = ()
        """What this template has no way to hold a policy to."""
        self._rules: list[str] = []

    def text(self) -> str:
        """The grammar.

        Raises:
            RequestRefused: The template writes answers in a way that cannot be taken apart.
        """
        answer = self._form.answer
        starts = self._turns(ANSWER, ANSWER, answer.rule if answer else self._plain())
        if not starts:
            raise RequestRefused("this chat template writes answers in a form that no grammar describes", "messages")
        for name in self._names:
            starts += self._calls(name)
        self.unenforced = self.unenforced if self._form.strict else ()
        start = f"start: {' | '.join(starts)}"
        return "\n".join([start, *self._rules, f"WS: /{AROUND}/", "FREE: /(.|\\n)*/", ""])

    def _add(self, rule: str, options: str = "") -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name}{options}: {rule}")
        return name

    def _plain(self) -> str:
        """Any text in which no call begins."""
        texts = [mark for mark in self._chat.call_marks if self._names and isinstance(self._chat.pieces(mark)[0], str)]
        if not texts:
            return "FREE"
        without = " & ".join(f"~/(.|\\n)*{_in_regex(mark)}(.|\\n)*/" for mark in texts)
        self._rules.append(f"PLAIN: /(.|\\n)*/ & {without}")
        return "PLAIN"

    def _turns(self, body: str, mark: str, rule: str) -> list[str]:
        """Alternatives of a turn with this body, `mark` of which stands for what `rule` describes: without a thought,
        and after one."""
        rules = []
        if around := self._around(self._chat.written(f"</reason>{body}"), mark, rule):
            rules.append(self._add(around))
        before, _, after = self._chat.written(f"{THOUGHT}</reason>{body}").partition(THOUGHT)
        closing = next((end for _, end in THOUGHTS if after.lstrip().startswith(end)), "")
        if closing and (around := self._around(after.partition(closing)[2], mark, rule)):
            rules.append(self._add(f"{self._literal(before)} {self._until(closing)} {around}"))
        return rules

    def _around(self, text: str, mark: str, rule: str) -> str:
        """A rule for the rest of a turn. What follows the opening of a call that is written without JSON is free."""
        before, has, after = text.partition(mark)
        if has:
            return f"{self._opening(before)} {rule} {self._literal(after)}"
        opening = next((opener for opener in self._chat.call_marks if opener in text), "")
        self.unenforced = ("tools.strict",)
        if not opening:
            return ""
        before, _, after = text.partition(opening)
        specials = [f"<[{piece}]>" for piece in self._chat.pieces(text) if isinstance(piece, int)]
        rest = f"(FREE ({' | '.join(dict.fromkeys(specials))}))* FREE" if specials else "FREE"
        return f"{self._opening(before + opening)} {rest}"

    def _opening(self, text: str) -> str:
        """The text before arguments; any text may stand for `ANSWER` in it."""
        lead, has, call = text.partition(ANSWER)
        if not has:
            return self._literal(text)
        opening = next((mark for mark in self._chat.call_marks if call.lstrip().startswith(mark)), "")
        first = opening or next(iter(self._chat.pieces(call.strip())))
        if isinstance(first, int):
            return f"{self._literal(lead)} FREE {self._literal(call)}"
        return f"{self._literal(lead)} {self._until(first)} {self._literal(call.partition(first)[2])}"

    def _until(self, closing: str) -> str:
        """Any text up to and with a mark."""
        (piece, *more) = self._chat.pieces(closing)
        if isinstance(piece, int) and not more:
            return f"FREE <[{piece}]>"
        return self._add(f"/(.|\\n)*{_in_regex(closing)}/", "[lazy]")

    def _literal(self, text: str) -> str:
        """A fixed text; the white space at its ends may be another."""
        inner = text.strip()
        if not inner:
            return "WS"
        parts = [part for piece in self._chat.pieces(inner) for part in _without_ids(piece)]
        pieces = [
            f"<[{part}]>" if isinstance(part, int) else _CALL_ID if part is None else _quoted(part) for part in parts
        ]
        return " ".join(["WS", *pieces, *(["WS"] if text != text.rstrip() else [])])

    def _calls(self, name: str) -> list[str]:
        """Alternatives of a turn that calls a tool."""
        schema = self._form.strict.get(name)
        arguments = _json(schema if schema is not None else {"type": "object"})
        call = json.dumps({"name": name, "arguments": ARGUMENTS})
        body, mark = f"\n<tool_call>\n{call}\n</tool_call>", json.dumps(ARGUMENTS)
        more = self._chat.config.max_calls_per_turn - 1
        parts = self._chat.written(f"</reason>{body}{body}").split(mark)
        rule, between = arguments, parts[1] if more and len(parts) == 3 else ""
        if between:
            again = " | ".join(self._again(other, mark, between, name) for other in self._names)
            rule = f"{arguments} ({again}){{0,{more}}}"
        turns = self._turns(body, mark, rule)
        return turns if self._form.answer is not None else [*turns, *self._turns(ANSWER + body, mark, rule)]

    def _again(self, name: str, mark: str, between: str, first: str) -> str:
        """A further call."""
        schema = self._form.strict.get(name)
        text = between.replace(json.dumps(first), json.dumps(name))
        return f"{self._literal(text)} {_json(schema if schema is not None else {'type': 'object'})}"


_CALL_ID = "/[A-Za-z0-9]{9}/"
"""The id of a call where the template writes one (Mistral)."""


class AnswerGrammars:
    """Compiles grammars for one tokenizer. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[tuple[str, frozenset[int]], Any] = OrderedDict()
        self._of_ends: dict[frozenset[int], Any] = {}

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise RequestRefused(
                f"the form of an answer is enforced by the package llguidance, which is not installed ({error}): "
                f"{install_command('serve')}, or start with --no-enforce-formats",
                "response_format",
                "unsupported",
            ) from None
        return llguidance

    def compiled(self, grammar: str, ends: Collection[int], param: str) -> Any:
        """The state before the first token.

        Raises:
            RequestRefused: With what is wrong in it.
        """
        key = (grammar, frozenset(ends))
        if key not in self._compiled:
            matcher = self._library.LLMatcher
            compiled = matcher(self._of(key[1]), matcher.grammar_from_lark(grammar), log_level=0)
            if compiled.is_error():
                raise RequestRefused(f"{param}: {_reason(compiled.get_error())}", param)
            self._compiled[key] = compiled
            if len(self._compiled) > GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def _of(self, ends: frozenset[int]) -> Any:
        if ends not in self._of_ends:
            library = self._library
            words = _Vocabulary(self._tokenizer, min(ends))
            self._of_ends[ends] = library.LLTokenizer(
                library.TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=sorted(ends)
            )
        return self._of_ends[ends]

    def masks(
        self, grammar: str, ends: Collection[int], begun: Sequence[int], param: str, count: int
    ) -> "list[GrammarMask]":
        """A mask for each of so many rows that go on after the ids that a turn begins with.

        Raises:
            RequestRefused: The grammar is wrong, or the turn begins with something else.
        """
        matcher = self.compiled(grammar, ends, param).deep_copy()
        if begun and matcher.try_consume_tokens(list(begun)) != len(begun):
            raise RequestRefused(
                f"the turn that the last message has begun is not the beginning of what {param} asks for", "messages"
            )
        return [GrammarMask(matcher.deep_copy(), ends) for _ in range(count)]


class _Vocabulary:
    """The tokens in the form that the library reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int):
        self.eos_token_id = end
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


class GrammarMask:
    """The tokens that a grammar lets follow; see `engine.steering.TokenMask`. If the library gives up (a grammar that
    grows too large), the turn ends there, and `fault` says why."""

    def __init__(self, matcher: Any, ends: Iterable[int]):
        self._matcher, self._ends, self.fault = matcher, list(ends), ""

    def allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error() or not bits.any():
            self.fault = self.fault or _reason(self._matcher.get_error()) or "no token may follow"
            bits = np.zeros(max(len(bits), max(self._ends) // 32 + 1), np.uint32)
            for end in self._ends:
                bits[end // 32] |= np.uint32(1 << end % 32)
        return bits

    def take(self, ids: Sequence[int]) -> None:
        if not self.fault and not self._matcher.is_stopped() and not self._matcher.consume_tokens(list(ids)):
            self.fault = _reason(self._matcher.get_error()) or "a token that may not follow"


def _without_ids(piece: int | str) -> Iterator[int | str | None]:
    """Parts of a text, None for the id of a call."""
    if isinstance(piece, int):
        yield piece
        return
    first, *rest = re.split(r"00000000[1-9]", piece)
    yield from [first] if first else []
    for part in rest:
        yield None
        yield from [part] if part else []


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _reason(text: str) -> str:
    """What the library says, without the place in a grammar that the request does not know."""
    reason = re.split(r"^ *\d+ \| ", text.strip(), maxsplit=1, flags=re.MULTILINE)[0]
    reason = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", reason)
    return " ".join(reason.split())[:300]

"""The dialogue as token ids: prompts from problems, tool calls out of turns, observations in.

The ids of a conversation only grow: prompt, sampled turn, observation, sampled turn, ... Nothing is rendered twice,
so no template can rewrite history and nothing sampled is ever re-encoded. A turn is opened for the policy with
`<reason>` already written (arXiv:2508.20722, Fig. 3, and the published template).

Text that is not ours (problems, observations) is encoded as plain text; observations are escaped besides, because in
many published vocabularies the tags are ordinary text.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.text.calls import CALL_OPEN
from grpo_roc_jax.text.config import (
    CHATML_TAGS,
    DEFAULT_INSTRUCTION,
    DEFAULT_SYSTEM,
    PROTOCOL_TAGS,
    REWARD_TOKENS,
    TextConfig,
)
from grpo_roc_jax.text.conventions import CONVENTIONS, CallConvention
from grpo_roc_jax.text.templates import Glue, TemplateError, check_append_only, load_template, make_glue
from grpo_roc_jax.text.tokenizer import KNOWN_EOS, Tokenizer
from grpo_roc_jax.types import Problem, ToolCall

log = logging.getLogger(__name__)
ANSWER_CLOSE = "</answer>"
WITHHELD = "[output withheld: it imitates the marks of this dialogue]"
STOP_REACH = 32
"""Ids that a stop text can stretch over, with room to spare: no stop text has so many bytes."""
OTHER_TOOLS = 256
"""Sets of tools, of conversations that bring their own, whose prompts are kept ready."""
LLAMA_TAGS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class ParsedTurn:
    """What one sampled turn says."""

    text: str
    """Decoded, without the end token that closed it."""
    calls: tuple[ToolCall, ...]
    """To be answered, in order; malformed ones carry their fault."""
    ended_by: Literal["tool_call", "answer", "eos", "none"]
    """`tool_call`: calls want an answer. `answer`: an answer block closes after the last call. `eos`: neither, and
    the policy closed the turn. `none`: neither, cut short by a limit."""
    ignored_calls: int = 0
    """Complete calls beyond the limit of a turn, or before an answer in the same turn; neither run nor answered."""
    closed: bool = False
    """The sampled ids end with the end-of-turn token, so the observation must not add one."""


@dataclass(frozen=True)
class Trace:
    """A demonstration: a problem, what the assistant writes, what the tools answer."""

    problem: Problem
    turns: tuple[str, ...]
    """Assistant texts, each a thought, `</reason>`, and a call in Hermes form or the answer; rewritten by
    `ChatFormat.written` for a template with other marks."""
    observations: tuple[tuple[str, ...], ...] = ()
    """Observations after each turn but the last; one text per call."""
    kind: str = ""
    """How the demonstrator behaved; counted in reports."""
    tools: str = ""
    """JSON schemas of the tools that this conversation has, as text; empty for those of the run."""

    def __post_init__(self) -> None:
        if not self.turns or len(self.observations) != len(self.turns) - 1:
            raise ValueError(
                f"trace of {self.problem.uid!r}: {len(self.turns)} turns and {len(self.observations)} observations; "
                "at least one turn and an observation after each but the last are wanted"
            )


@dataclass(frozen=True)
class _Template:
    """How a message opens and ends; tags in the texts become special ids where the tokenizer has them."""

    header: str
    end: str
    after_end: str

    def open(self, role: str) -> str:
        return self.header.format(role=role)


_CHATML = _Template("<|im_start|>{role}\n", "<|im_end|>", "\n")
_LLAMA3 = _Template("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "")


class ChatFormat:
    """Prompt, turns and observations of one tokenizer under one `TextConfig`; immutable after `make_chat`."""

    def __init__(self, config: TextConfig, tokenizer: Tokenizer, glue: Glue, convention: CallConvention):
        self.tokenizer = tokenizer
        self.config = config
        self.glue = glue
        self._convention = convention
        tags = {*PROTOCOL_TAGS, *CHATML_TAGS, *LLAMA_TAGS, *REWARD_TOKENS}
        tags |= {text for i in tokenizer.special_ids if (text := tokenizer.decode([i])).strip()}
        by_length = sorted(tags, key=lambda tag: (-len(tag), tag))
        self._tag = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        self._forgery = _forgery_pattern(by_length)
        self._reward_token = re.compile("(" + "|".join(map(re.escape, REWARD_TOKENS)) + ")")
        end = tokenizer.special(glue.end)
        self.end_id = tokenizer.eos_id if end is None else end
        """Ends a turn."""
        others = (tokenizer.special(text) for text in convention.end_tokens)
        self._closing_ids = frozenset({self.end_id, *(i for i in others if i is not None)})
        self._end_ids = self._closing_ids | {tokenizer.eos_id}
        one_call = config.max_calls_per_turn == 1 and convention.stop_text
        stop_tags = [ANSWER_CLOSE] + ([convention.stop_text] if one_call else [])
        self.stop_ids = self._end_ids | {i for tag in stop_tags if (i := tokenizer.special(tag)) is not None}
        """Ids that end a turn when sampled."""
        self.stop_texts = tuple(tag for tag in stop_tags if tokenizer.special(tag) is None)
        """Texts that end a turn and are no single token; see `find_stop`."""
        instruction = DEFAULT_INSTRUCTION if config.instruction == "default" else config.instruction
        self.instruction = instruction + "\n\n" if instruction else ""
        """Stands before the problem, with the empty line that parts them."""
        self._prompt_open = self._glued(glue.prompt_open + self.instruction)
        self._prompt_close = self._glued(glue.prompt_close)
        self._user_open = self._glued(glue.user_open)
        self._observation_open = self._glued(glue.observation_open)
        self._observation_between = self._glued(glue.observation_between)
        self._observation_close = self._glued(glue.observation_close)
        self._other_tools: dict[str, ChatFormat] = {}

    def _glued(self, text: str) -> list[int]:
        """`_own`, where the text that ends a turn is the end id even in a vocabulary that lacks it."""
        first, *rest = text.split(self.glue.end)
        return self._own(first) + [i for part in rest for i in (self.end_id, *self._own(part))]

    def _own(self, text: str) -> list[int]:
        """Ids of text that is ours: tags become special ids where the tokenizer has them."""
        ids: list[int] = []
        plain = ""
        for part in self._tag.split(text):
            token = self.tokenizer.special(part) if part else None
            if token is None:
                plain += part
                continue
            ids += self.tokenizer.encode(plain) if plain else []
            ids.append(token)
            plain = ""
        return ids + (self.tokenizer.encode(plain) if plain else [])

    def prompt_ids(self, problem: Problem, suffix: str = "") -> list[int]:
        """System message if any, the user message (instruction, problem, `suffix`), and the opened assistant turn.

        Args:
            problem: Its prompt is plain text: no tag in it becomes a special id.
            suffix: At the end of the user message: a hint, which is plain text too, or a reward token, which is not.
        """
        ids = [*self._prompt_open, *self.tokenizer.encode(problem.prompt)]
        for part in self._reward_token.split(suffix) if suffix else ():
            ids += self._own(part) if part in REWARD_TOKENS else self.tokenizer.encode(part)
        return ids + self._prompt_close

    def turn_ids(self, text: str) -> list[int]:
        """Ids that a policy would have sampled to write `text`: up to the first stop, else closed by the end token."""
        ends = [at + len(stop) for stop in self.stop_texts if (at := text.find(stop)) >= 0]
        ids = self._own(text[: min(ends)] if ends else text)
        for i, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[: i + 1]
        return ids if ends else [*ids, self.end_id]

    def question_ids(self, text: str, *, closed: bool = False) -> list[int]:
        """What follows a last turn when the user says something more; `text` is plain text."""
        ids = [] if closed else [self.end_id]
        return [*ids, *self._user_open, *self.tokenizer.encode(text), *self._prompt_close]

    def observation_ids(self, observations: Sequence[str], *, closed: bool = False) -> list[int]:
        """Closes the assistant turn, gives the observations as the template does, opens the next turn.

        Of the built-in templates each observation is a `<tool_response>` of one user turn.

        Each is cut to `observation_tokens` tokens, head and tail kept around a visible marker. Tags inside an
        observation are escaped (`<` becomes `&lt;`), so that it forges nothing, as ids or as text.

        Args:
            observations: One text per call.
            closed: The turn already ended with the end-of-turn token.
        """
        ids = [] if closed else [self.end_id]
        for i, observation in enumerate(observations):
            ids += self._observation_between if i else self._observation_open
            ids += self._plain_observation(observation)
        return ids + self._observation_close

    def _plain_observation(self, observation: str) -> list[int]:
        limit = self.config.observation_tokens
        if self.glue.json_observations:
            observation = json.dumps(observation, ensure_ascii=False)[1:-1]
        encode, text = self.tokenizer.encode, self.escape(observation)
        # Far more characters than the limit can hold: only the two ends are worth tokenising.
        reach = 64 * limit
        parts = (text,) if len(text) <= 2 * reach else (text[:reach], text[-reach:])
        first, last = encode(parts[0]), encode(parts[-1])
        if len(parts) == 2 or len(first) > limit:
            room = max(2, limit - len(encode(_omission(len(text)))))
            head, tail = first[: room - room // 2], last[len(last) - room // 2 :]
            kept = len(self.tokenizer.decode(head)) + len(self.tokenizer.decode(tail))
            first = head + encode(_omission(len(text) - kept))[: limit - room] + tail
        return self._checked(first)

    def _checked(self, ids: list[int]) -> list[int]:
        """`ids` where they forge nothing; else escaped once more, as a normaliser can make tags; else withheld."""
        if not self._forges(ids):
            return ids
        ids = self.tokenizer.encode(self.escape(self.tokenizer.decode(ids)))[: self.config.observation_tokens]
        if self._forges(ids):
            ids = self.tokenizer.encode(WITHHELD)[: self.config.observation_tokens]
        assert not self._forges(ids), "the tokenizer makes tags out of ordinary words"
        return ids

    def _forges(self, ids: list[int]) -> bool:
        special = not self.tokenizer.special_ids.isdisjoint(ids)
        return special or self._forgery.search(self.tokenizer.decode(ids)) is not None

    def escape(self, text: str) -> str:
        """`text` with the `<` of whatever reads like a tag or a special token written as `&lt;`."""
        return self._forgery.sub(lambda match: _escaped(match.group()), text)

    def find_stop(self, new_ids: Iterable[int], before: Sequence[int] = ()) -> int | None:
        """How many of `new_ids` to keep, 1 at least, when one of `stop_texts` ends among them; None without one.

        Args:
            new_ids: Ids drawn since the last look.
            before: Ids of the turn drawn earlier; without them a stop text that straddles two looks is missed. The
                last `STOP_REACH` are enough.
        """
        new_ids = [int(i) for i in new_ids]
        before = [int(i) for i in before[-STOP_REACH:]]
        if not self._has_stop(before + new_ids):
            return None
        low, high = 0, len(new_ids)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_stop(before + new_ids[:middle]) else (middle, high)
        return high

    def _has_stop(self, ids: Sequence[int]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(stop in text for stop in self.stop_texts)

    def parse_turn(self, ids: Iterable[int]) -> ParsedTurn:
        """The calls of a sampled turn and how it ended; never raises, time linear in its length."""
        ids = [int(i) for i in ids]
        closed = bool(ids) and ids[-1] in self._closing_ids
        over = bool(ids) and ids[-1] in self._end_ids
        text = self.tokenizer.decode(ids[:-1] if over else ids)
        found = self._convention.find_calls(text, over=over)
        limit = self.config.max_calls_per_turn
        calls, ignored = tuple(found[:limit]), max(0, len(found) - limit)
        stop = self._convention.stop_text
        last_call = text.rfind(stop) if stop else len(text) if found else -1
        if text.rfind(ANSWER_CLOSE) > last_call:
            return ParsedTurn(text, (), "answer", len(found), closed)
        # A turn that a token limit cut keeps its complete calls for the record; the loop ends before running them.
        ended_by = "tool_call" if calls else "eos" if over else "none"
        return ParsedTurn(text, calls, ended_by, ignored, closed)

    def _with_tools(self, tools: str) -> "ChatFormat":
        if tools not in self._other_tools:
            if len(self._other_tools) >= OTHER_TOOLS:
                self._other_tools.clear()
            self._other_tools[tools] = make_chat(self.config, self.tokenizer, json.loads(tools))
        return self._other_tools[tools]

    def written(self, text: str) -> str:
        """A turn of a `Trace` as the policy writes it under this template: its marks of thinking, its form of calls."""
        if not self.glue.prompt_close.endswith("<reason>"):
            thought, mark, rest = text.partition("</reason>")
            thought, rest = (thought.strip(), rest.lstrip("\n")) if mark else ("", text)
            text = f"{self.glue.thought_open}{thought}{self.glue.thought_close}{rest}" if thought else rest
        if self._convention is CONVENTIONS["hermes"]:
            return text
        calls = CONVENTIONS["hermes"].find_calls(text, over=True)
        return self._convention.write_calls(text[: text.find(CALL_OPEN)].rstrip("\n"), calls) if calls else text

    def trace_row(self, trace: Trace, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32[T], policy_mask bool[T]) of a demonstration, id by id what a rollout would hold.

        Args:
            trace: With tools of its own, these are listed in place of the run's (under `tools_section`).
            suffix: At the end of the user message, as of `prompt_ids`.

        Raises:
            ValueError: A turn makes more calls than a turn may.
        """
        most = max(map(len, trace.observations), default=0)
        if most > self.config.max_calls_per_turn:
            raise ValueError(
                f"trace of {trace.problem.uid!r}: a turn makes {most} calls, text.max_calls_per_turn = "
                f"{self.config.max_calls_per_turn}; raise it, or leave such conversations out"
            )
        chat = self._with_tools(trace.tools) if trace.tools and self.config.tools_section else self
        tokens = chat.prompt_ids(trace.problem, suffix)
        mask = [False] * len(tokens)
        for i, text in enumerate(trace.turns):
            turn = self.turn_ids(self.written(text))
            tokens += turn
            mask += [True] * len(turn)
            if i < len(trace.observations):
                glue = self.observation_ids(trace.observations[i], closed=turn[-1] == self.end_id)
                tokens += glue
                mask += [False] * len(glue)
        return np.asarray(tokens, np.int32), np.asarray(mask, bool)


def make_chat(config: TextConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> ChatFormat:
    """The chat format of a tokenizer.

    Args:
        config: Prompt and observation settings.
        tokenizer: From `load_tokenizer`.
        tools: JSON schemas (`{"type": "function", "function": {...}}`) for the system message when `tools_section`.

    Raises:
        ValueError: The template asked for has no tokens in this vocabulary or cannot be used, or a tools section
            lacks tools.
    """
    if config.tools_section and not tools:
        raise ValueError("text.tools_section is on but no tool was given; turn it off or register a tool")
    tools = tools if config.tools_section else ()
    if config.template == "model":
        return ChatFormat(config, tokenizer, *_published_glue(config, tokenizer, tools))
    convention = CONVENTIONS["hermes" if config.calls == "auto" else config.calls]
    return ChatFormat(config, tokenizer, _built_in_glue(config, _choose_template(config, tokenizer), tools), convention)


def _system_text(config: TextConfig) -> str:
    return DEFAULT_SYSTEM if config.system == "default" else config.system


def _built_in_glue(config: TextConfig, template: _Template, tools: Sequence[Mapping[str, Any]]) -> Glue:
    system = "\n\n".join(text for text in (_system_text(config), _tools_text(tools) if tools else "") if text)
    close = template.end + template.after_end
    generate = f"{close}{template.open('assistant')}<reason>"
    return Glue(
        prompt_open=(template.open("system") + system + close if system else "") + template.open("user"),
        prompt_close=generate,
        end=template.end,
        user_open=template.after_end + template.open("user"),
        observation_open=template.after_end + template.open("user") + "<tool_response>\n",
        observation_between="\n</tool_response>\n<tool_response>\n",
        observation_close="\n</tool_response>" + generate,
    )


def _published_glue(
    config: TextConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]
) -> tuple[Glue, CallConvention]:
    folder = Path(config.tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    template = load_template(folder, with_tools=bool(tools), file=config.template_file)
    convention = CONVENTIONS[template.convention if config.calls == "auto" else config.calls]
    said: dict[str, Any] = {"system": _system_text(config), "tools": tools}
    ends = [text for text in dict.fromkeys([*KNOWN_EOS, tokenizer.decode([tokenizer.eos_id])]) if text]
    glue = make_glue(template, convention, **said, ends=ends)
    difference = check_append_only(template, convention, glue, **said)
    if difference and config.history == "refuse":
        raise TemplateError(
            f"{template.origin} rewrites what has been said, {difference}; set text.history to append to go on with "
            "what was sampled, or give a template that only appends in text.template_file"
        )
    if difference:
        log.warning(
            "%s rewrites what has been said, %s; going on with what was sampled (text.history = append)",
            template.origin,
            difference,
        )
    return glue, convention


def _choose_template(config: TextConfig, tokenizer: Tokenizer) -> _Template:
    llama = all(tokenizer.special(tag) is not None for tag in LLAMA_TAGS)
    chatml = all(tokenizer.special(tag) is not None for tag in CHATML_TAGS)
    if config.template == "llama3" and not llama:
        raise ValueError(f"text.template = 'llama3' but the tokenizer lacks {LLAMA_TAGS}; take 'auto' or 'chatml'")
    if config.template == "llama3" or (config.template == "auto" and llama and not chatml):
        return _LLAMA3
    return _CHATML


def _omission(characters: int) -> str:
    return f"\n[... {characters} characters omitted ...]\n"


def _forgery_pattern(tags: Iterable[str]) -> re.Pattern[str]:
    """Matches what could pass for a tag: protocol tags in any case and spacing, `<|name|>`, and exact specials."""
    names = sorted({tag.strip("</>") for tag in PROTOCOL_TAGS})
    loose = rf"<\s{{0,4}}/?\s{{0,4}}(?:{'|'.join(names)})\b"
    bars = r"<\s{0,4}\|"
    exact = "|".join(re.escape(tag) for tag in tags)
    return re.compile(f"{loose}|{bars}|{exact}", re.IGNORECASE)


def _escaped(match: str) -> str:
    """The match made harmless; specials that do not start with `<` get a zero-width break after their first letter."""
    return "&lt;" + match[1:] if match.startswith("<") else match[0] + "\u200b" + match[1:]


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    return (
        "# Tools\n\nYou may call these functions. Their signatures:\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>\n'
        "Its output comes back inside <tool_response> </tool_response>."
    )

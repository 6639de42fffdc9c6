"""The dialogue as token ids: encodes prompts and observations, parses the tool calls of sampled turns.

The ids of a conversation only grow: prompt, sampled turn, observation, sampled turn, ... Nothing is rendered twice,
so no template can rewrite history and sampled ids are never re-encoded. Each turn of the policy is opened with
`<reason>` already written (arXiv:2508.20722, Fig. 3, and the published template).

Text from outside (problems, observations) is encoded as plain text. Observations are escaped as well (`text.escape`).
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.text.calls import CALL_OPEN, THOUGHTS, Tools, functions_of
from grpo_roc_jax.text.config import DEFAULT_INSTRUCTION, REWARD_TOKENS, TextConfig
from grpo_roc_jax.text.conventions import CONVENTIONS, CallConvention
from grpo_roc_jax.text.dialogue_text import choose_glue
from grpo_roc_jax.text.escape import ObservationEncoder, dialogue_tags
from grpo_roc_jax.text.forms import plain_name
from grpo_roc_jax.text.templates import PROBE_IDS, PROBE_NAMES, Glue
from grpo_roc_jax.text.tokenizer import Tokenizer, published_ends
from grpo_roc_jax.text.turns import StopTest, TurnParts, read_turn
from grpo_roc_jax.types import Problem, ToolCall

ANSWER_CLOSE = "</answer>"
STOP_REACH = 32
"""Most ids that a stop text can span; no stop text has more bytes."""
OTHER_TOOLS = 256
"""Most chat formats that are cached for conversations with their own tools."""
Pieces = list[int | str]
"""Special ids and plain text. Adjacent texts are encoded as one, as the tokenizer would encode the whole dialogue."""


@dataclass(frozen=True)
class ParsedTurn:
    """The content of one sampled turn."""

    text: str
    """Decoded text, without the end token that closed it."""
    calls: tuple[ToolCall, ...]
    """Calls to answer, in order; malformed ones have a fault. Calls beyond the limit of a turn, before an answer in the
    same turn, or inside a thought are left out."""
    ended_by: Literal["tool_call", "answer", "eos", "none"]
    """`tool_call`: there are calls to answer. `answer`: an answer block closes after the last call. `eos`: neither, and
    the policy closed the turn. `none`: neither, and a limit cut the turn."""
    closed: bool = False
    """Whether the sampled ids end with the token that ends such a turn, so that the next text must not add one."""


@dataclass(frozen=True)
class Trace:
    """A demonstration: a problem, the turns of the assistant, the outputs of the tools."""

    problem: Problem
    turns: tuple[str, ...]
    """Assistant texts, each a thought, `</reason>`, and a call in Hermes form or the answer. `ChatFormat.written`
    rewrites them for a template with other marks."""
    observations: tuple[tuple[str, ...], ...] = ()
    """Observations after each turn but the last; one text per call."""
    kind: str = ""
    """How the demonstrator behaved; counted in reports."""
    tools: str = ""
    """JSON schemas of the tools of this conversation, as text; empty for the tools of the run."""
    replies: tuple[str, ...] = ()
    """Messages of a user after each turn but the last, empty where outputs of tools follow; none at all: all empty."""

    def __post_init__(self) -> None:
        if not self.turns or len(self.observations) != len(self.turns) - 1:
            raise ValueError(
                f"trace of {self.problem.uid!r}: {len(self.turns)} turns and {len(self.observations)} observations; "
                "must have at least one turn, and observations after each turn but the last"
            )

    @property
    def most_calls(self) -> int:
        """The largest number of calls in a turn."""
        return max(map(len, self.observations), default=0)


class UnfitTrace(ValueError):
    """A demonstration that a chat format cannot write.

    Args:
        problem: What does not fit, and what to change.
        calls: The value of `max_calls_per_turn` under which it fits; 0 if another setting refuses it.
    """

    def __init__(self, problem: str, calls: int = 0):
        super().__init__(problem)
        self.calls = calls


class ChatFormat:
    """Prompt, turns and observations of one tokenizer under one `TextConfig`; immutable after `make_chat`."""

    def __init__(
        self, config: TextConfig, tokenizer: Tokenizer, glue: Glue, convention: CallConvention, tools: Tools = ()
    ):
        self.tokenizer = tokenizer
        self.config = config
        self.glue = glue
        self.convention = convention
        self._tools = tools
        by_length = dialogue_tags(tokenizer)
        self._tag = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        fence = ("```",) if "```" in glue.observation_open else ()
        self._observations = ObservationEncoder(
            tokenizer,
            (*by_length, *convention.marks, *fence),
            config.observation_tokens,
            marks=glue.marks,
            as_json=glue.json_observations,
        )
        self._reward_token = re.compile("(" + "|".join(map(re.escape, REWARD_TOKENS)) + ")")
        end = tokenizer.special(glue.end)
        self.end_id = tokenizer.eos_id if end is None else end
        """Id that ends a turn."""
        end = tokenizer.special(glue.call_end or glue.end)
        self.call_end_id = self.end_id if end is None else end
        """Id that ends a turn of calls."""
        others = {i for text in convention.end_tokens if (i := tokenizer.special(text)) is not None}
        self._closing_ids = frozenset({self.end_id, *others})
        self._call_closing_ids = frozenset({self.call_end_id, *(others if self.call_end_id == self.end_id else ())})
        published = published_ends(config.tokenizer) & frozenset(range(tokenizer.vocab_size))
        self._end_ids = self._closing_ids | self._call_closing_ids | {tokenizer.eos_id} | published
        one_call = config.max_calls_per_turn == 1 and convention.stop_text
        stop_tags = [ANSWER_CLOSE] + ([convention.stop_text] if one_call else [])
        self._tag_ids = frozenset(i for tag in stop_tags if (i := tokenizer.special(tag)) is not None) - self._end_ids
        self.stop_ids = self._end_ids | self._tag_ids
        """Ids that end a turn when sampled; see `goes_on`."""
        ends = [re.escape(text) for i in sorted(self._end_ids) if (text := tokenizer.decode([i])).strip()]
        self._end_text = re.compile("|".join(ends) or r"(?!)")
        self.stop_texts = tuple(tag for tag in stop_tags if tokenizer.special(tag) is None)
        """Texts that end a turn and are not a single token; see `find_stop`."""
        opened = [_opens(text) for text in (glue.prompt_close, glue.observation_close)]
        # The built-in templates open a thought for every model, also for models that do not know its mark.
        strict = all(opened) and not glue.prompt_close.endswith("<reason>")
        self._thoughts = {"opened": any(opened), "strict": strict}
        self._stop_tags = tuple(stop_tags)
        self._stop = StopTest(convention, ANSWER_CLOSE, tools=tools, **self._thoughts)
        instruction = DEFAULT_INSTRUCTION if config.instruction == "default" else config.instruction
        instruction = instruction.lstrip() if glue.user_trims[0] else instruction
        self.instruction = instruction + "\n\n" if instruction else ""
        """Text before the problem, with the empty line that separates them."""
        self._prompt_open = self._glued(glue.prompt_open + self.instruction)
        self._prompt_close = self._glued(glue.prompt_close)
        self._user_open = self._glued(glue.user_open)
        self._observation_open = self._glued(glue.observation_open)
        self._observation_between = self._glued(glue.observation_between)
        self._observation_close = self._glued(glue.observation_close)
        last = self._runs(self._prompt_close)[-1]
        self._before_turn = last[-1:] if isinstance(last, str) else ""
        """The last character before a turn; empty after a special id."""
        self._other_tools: dict[str, ChatFormat | str] = {}

    def _glued(self, text: str) -> Pieces:
        """Like `_trusted`, but the text that ends a turn becomes the end id even if the vocabulary lacks it."""
        first, *rest = text.split(self.glue.end)
        return self._trusted(first) + [piece for part in rest for piece in (self.end_id, *self._trusted(part))]

    def _trusted(self, text: str) -> Pieces:
        """Trusted text: tags become special ids if the tokenizer has them."""
        parts = (part for part in self._tag.split(text) if part)
        return [part if (token := self.tokenizer.special(part)) is None else token for part in parts]

    def _runs(self, pieces: Iterable[int | str]) -> Pieces:
        """Special ids and the text between them, without the white space that they take in."""
        runs: Pieces = []
        for piece in pieces:
            if runs and isinstance(piece, str) and isinstance(runs[-1], str):
                runs[-1] += piece
            else:
                runs.append(piece)
        beside = zip(runs, [None, *runs], [*runs[1:], None], strict=False)
        strips = self.tokenizer.strips
        return [run if isinstance(run, int) else strips.apply(run, before, after) for run, before, after in beside]

    def _ids(self, pieces: Iterable[int | str], *, last: int | None = None) -> list[int]:
        """Ids of special ids and text; `last` is the id before them."""
        runs = self._runs(pieces if last is None else [last, *pieces])
        ids = [
            i for run in runs for i in ([run] if isinstance(run, int) else self.tokenizer.encode(run) if run else [])
        ]
        return ids if last is None else ids[1:]

    def prompt_ids(self, problem: Problem, suffix: str = "") -> list[int]:
        """System message if any, the user message (instruction, problem, `suffix`), and the opened assistant turn.

        Args:
            problem: Its prompt is plain text: no tag in it becomes a special id.
            suffix: Appended to the user message. Plain text (a hint), except that reward tokens become special ids.
        """
        start, end = self.glue.user_trims
        first, *parts = _trimmed(
            [problem.prompt, *self._reward_token.split(suffix)], start and not self.instruction, end
        )
        pieces = [*self._prompt_open, first]
        for part in parts:
            pieces += self._trusted(part) if part in REWARD_TOKENS else [part]
        return self._ids([*pieces, *self._prompt_close])

    def turn_ids(self, text: str) -> list[int]:
        """Ids that a policy samples to write `text`: up to the first stop, or closed by the end token."""
        stop = self._stop.end(text, self._stop_tags)
        pieces = self._turn_pieces(text if stop is None else text[:stop])
        # The text before the turn keeps tokenizers that begin a text with a space from adding one.
        before = self._ids([self._before_turn])
        ids = self._ids([self._before_turn, *pieces])
        ids = ids[len(before) :] if ids[: len(before)] == before else self._ids(pieces)
        for i, token in enumerate(ids):
            if token in self._end_ids:
                return ids[: i + 1]
        if stop is not None:
            return ids
        return [*ids, self.call_end_id if self.call_end_id != self.end_id and self.calls_of(text) else self.end_id]

    def _turn_pieces(self, text: str) -> Pieces:
        """Like `_trusted` for a turn, but a token that would end it is plain text inside the arguments of a call."""
        if not self._end_text.search(text):
            return self._trusted(text)
        pieces: Pieces = []
        at = 0
        for span in self._parts(text).spans:
            for end in self._end_text.finditer(text, span.start, span.end):
                if span.state == "closed" and end.end() < span.end:
                    pieces += [*self._trusted(text[at : end.start()]), end.group()]
                    at = end.end()
        return [*pieces, *self._trusted(text[at:])]

    def calls_of(self, text: str) -> list[ToolCall]:
        """The calls of a complete turn, including those beyond the limit."""
        return [call for span in self._parts(text).spans for call in span.calls]

    def before_calls(self, text: str) -> str:
        """A turn, or the beginning of one, up to its first call."""
        spans = self._parts(text).spans
        return text[: spans[0].start] if spans else text

    def split(self, text: str) -> tuple[str, str] | None:
        """(thought, text after it) of a turn, if the template writes these as separate messages; else None."""
        return self.convention.split(text)

    def unnamed_tools(self, problems: Iterable[str] = ()) -> str:
        """What to set if neither the text around a problem nor one of `problems` names a tool; empty if there is none,
        or one is named. It matters for a model that no demonstrations have taught to call."""
        texts = [self.glue.prompt_open + self.instruction + self.glue.prompt_close, *problems]
        if not self.tool_names or any(name in text for name in self.tool_names for text in texts):
            return ""
        fix = "set text.tools_section, or describe"
        if self.config.tools_section:
            fix = "the chat template ignores tools: describe"
        return (
            f"no prompt names a tool ({', '.join(sorted(self.tool_names))}), so a model that was not trained with them "
            f"cannot know of them; {fix} them in text.system"
        )

    @property
    def opens_thought(self) -> bool:
        """Whether the text before a turn opens a thought."""
        return self._thoughts["opened"]

    def reopened_ids(self) -> list[int]:
        """Ids that open a further turn of the policy after one that has ended."""
        text = self.glue.prompt_close
        for end in (self.glue.end, *self.convention.past_ends):
            if end in text:
                return self._ids(self._glued(text.partition(end)[2]), last=self.end_id)
        return self._ids(self._glued(text)) if re.search("assistant|model|ASSISTANT", text) else []

    @property
    def prompt_close_ids(self) -> list[int]:
        """Ids from the end of a user message to the opened turn of the policy."""
        return self._ids(self._prompt_close)

    def _parts(self, text: str) -> TurnParts:
        return read_turn(text, self.convention, tools=self._tools, **self._thoughts)

    def question_ids(self, text: str, *, closed: bool = False) -> list[int]:
        """Ids that follow a last turn when the user writes again; `text` is plain text."""
        pieces = [*self._user_open, *_trimmed([text], *self.glue.user_trims), *self._prompt_close]
        return self._ids(pieces, last=self.end_id) if closed else self._ids([self.end_id, *pieces])

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Where the calls of a turn begin."""
        return self.convention.openings

    def pieces(self, text: str) -> Pieces:
        """Trusted text in parts: a tag that is a special token as its id, other text as it is."""
        return self._trusted(text)

    def raw_ids(self, text: str) -> list[int]:
        """Ids of trusted text with nothing around it; tags in it become special ids."""
        return self._ids(self._trusted(text))

    def observation_ids(
        self, observations: Sequence[str], *, closed: bool = False, calls: Sequence[ToolCall] = ()
    ) -> list[int]:
        """Closes the assistant turn, adds the observations as the template writes them, opens the next turn.

        In the built-in templates each observation is a `<tool_response>` inside one user turn.

        Args:
            observations: One text per call; each is escaped and cut, see `shown`.
            closed: The turn already ended with the end-of-turn token.
            calls: The calls answered, for templates that repeat the id of a call.
        """
        return self.shown_ids([self.shown(text) for text in observations], closed=closed, calls=calls)

    def shown(self, observation: str) -> str:
        """An observation as the policy sees it.

        It is cut to `observation_tokens` tokens: head and tail stay, with a visible marker between them. Tags inside it
        are escaped (`<` becomes `&lt;`), so it cannot imitate a mark of the dialogue, as ids or as text.
        """
        return self._observations.shown(observation)

    def shown_ids(self, shown: Sequence[str], *, closed: bool, calls: Sequence[ToolCall]) -> list[int]:
        """`observation_ids` for texts that `shown` returned."""
        answered = [calls[i] if i < len(calls) else None for i in range(len(shown))]
        ids = [self.convention.reply_id(call, i) for i, call in enumerate(answered)]
        names = [plain_name(call.name) if call is not None and call.name else "tool" for call in answered]
        pieces: Pieces = []
        for i, text in enumerate(shown):
            text = _trimmed([text], *self.glue.observation_trims)[0]
            glue = self._observation_between if i else self._observation_open
            first = max(0, i - 1)
            pieces += [*_with_ids(glue, ids[first:], names[first:]), text]
        pieces += _with_ids(self._observation_close, ids[-1:], names[-1:])
        return self._ids(pieces, last=self.call_end_id) if closed else self._ids([self.call_end_id, *pieces])

    def closes_calls(self, token: int) -> bool:
        """Whether a turn of calls that ends with this id needs no further end token."""
        return token in self._call_closing_ids

    def find_stop(self, new_ids: Iterable[int], before: Sequence[int] = ()) -> int | None:
        """How many of `new_ids` to keep, at least 1, if a turn is over at one of `stop_texts` that ends among them;
        None if the turn goes on. A stop text inside a thought, or inside the arguments of a call, does not count.

        Args:
            new_ids: Ids drawn since the last call.
            before: Ids of the turn drawn earlier. Without a stop text among the last `STOP_REACH` of them and the new
                ones, the others are not read.
        """
        new_ids = [int(i) for i in new_ids]
        near = [int(i) for i in before[-STOP_REACH:]] + new_ids
        decode = self.tokenizer.decode
        if not any(stop in decode(near) for stop in self.stop_texts):
            return None
        old = [int(i) for i in before]
        text = decode(old + new_ids)
        end = self._stop.end(text, self.stop_texts, beyond=len(decode(old).rstrip("\ufffd")))
        if end is None:
            return None
        return 1 + bisect_left(
            range(1, len(new_ids)), True, key=lambda n: decode(old + new_ids[:n])[:end] == text[:end]
        )

    def goes_on(self, ids: Sequence[int]) -> bool:
        """Whether a turn goes on although it ends with one of `stop_ids`, because that tag is inside a thought or
        inside the arguments of a call. `ids` are those of the turn."""
        if not len(ids) or int(ids[-1]) not in self._tag_ids:
            return False
        text = self.tokenizer.decode([int(i) for i in ids])
        return self._stop.end(text, self._stop_tags, beyond=len(text) - 1) is None

    def parse_turn(self, ids: Iterable[int]) -> ParsedTurn:
        """The calls of a sampled turn and how it ended. Never raises; takes time linear in the length of the turn."""
        ids = [int(i) for i in ids]
        over = bool(ids) and ids[-1] in self._end_ids
        text = self.tokenizer.decode(ids[:-1] if over else ids)
        parts = self._parts(text)
        all_calls = [call for span in parts.spans if over or span.ended for call in span.calls]
        calls = tuple(all_calls[: self.config.max_calls_per_turn])
        last_call = max((span.end for span in parts.spans if span.ended), default=0)
        if all_calls and not self.convention.stop_text:  # the end of the turn ends its calls, whatever follows them
            last_call = len(text)
        # An opening mark and the text after it are text too if no call follows.
        plain = [*parts.plain, *((span.start, span.end) for span in parts.spans if span.state == "broken")]
        answer = max((text.rfind(ANSWER_CLOSE, *part) for part in plain), default=-1)
        answered = answer >= last_call
        closing = self._call_closing_ids if calls and not answered else self._closing_ids
        closed = bool(ids) and ids[-1] in closing
        if answered:
            return ParsedTurn(text, (), "answer", closed)
        # The complete calls of a turn that a token limit cut are recorded; the rollout ends without running them.
        ended_by = "tool_call" if calls else "eos" if over else "none"
        return ParsedTurn(text, calls, ended_by, closed)

    def _with_tools(self, tools: str) -> "ChatFormat":
        if tools not in self._other_tools:
            if len(self._other_tools) >= OTHER_TOOLS:
                self._other_tools.clear()
            try:
                self._other_tools[tools] = make_chat(self.config, self.tokenizer, json.loads(tools))
            except ValueError as error:
                self._other_tools[tools] = str(error)
        chat = self._other_tools[tools]
        if isinstance(chat, str):
            raise ValueError(chat)
        return chat

    def of_trace(self, trace: Trace) -> "ChatFormat":
        """The chat format with the tools of a demonstration.

        Raises:
            UnfitTrace: A turn has more calls than `max_calls_per_turn`, or a tool of its own cannot be called.
        """
        if trace.most_calls > self.config.max_calls_per_turn:
            raise UnfitTrace(
                f"trace of {trace.problem.uid!r}: a turn makes {trace.most_calls} calls, text.max_calls_per_turn = "
                f"{self.config.max_calls_per_turn}; raise it",
                trace.most_calls,
            )
        try:
            return self._with_tools(trace.tools) if trace.tools and self.config.tools_section else self
        except ValueError as error:
            raise UnfitTrace(f"trace of {trace.problem.uid!r}: {error}") from error

    @property
    def tool_names(self) -> frozenset[str]:
        """Names of the tools that the policy may call."""
        return frozenset(functions_of(self._tools))

    def called(self, trace: Trace) -> list[str]:
        """Names of the tools that a demonstration calls, in order; without those of calls that cannot be read."""
        calls = [call for text in trace.turns for call in CONVENTIONS["hermes"].find_calls(text, over=True)]
        return [call.name for call in calls if call.name and not call.fault]

    def written(self, text: str) -> str:
        """A turn of a `Trace` in the form of this template: its marks around thoughts, its form of calls."""
        thought, mark, rest = text.partition("</reason>")
        before, rest = (thought + mark, rest) if mark else ("", text)
        if not self.glue.prompt_close.endswith("<reason>"):
            thought, rest = (thought.strip(), rest.lstrip("\n")) if mark else ("", text)
            before = (
                f"{self.glue.thought_open}{thought}{self.glue.thought_close}" if thought or self.opens_thought else ""
            )
        hermes = CONVENTIONS["hermes"]
        if self.convention is hermes:
            return before + rest
        calls = hermes.find_calls(rest, over=True, tools=self._tools)
        before_call = rest.partition(CALL_OPEN)[0]
        write = self.convention.write_calls
        if self.convention.thought is not None:  # thoughts and calls are separate messages
            return before + (write(before_call, calls, self._tools) if calls else self.convention.write_text(rest))
        return write((before + before_call).rstrip("\n"), calls, self._tools) if calls else before + rest

    def call_opening(self, name: str = "") -> str:
        """The beginning of a turn that calls a tool at once, up to the first choice of the policy.

        Args:
            name: Name of the tool; if empty, the policy chooses it.
        """
        calls = [(name, {}), (name, {"xARGUMENTx": "x"})] if name else [("b", {}), ("c", {})]
        turns = [CONVENTIONS["hermes"].write_calls("</reason>", [ToolCall(*call, "")]) for call in calls]
        first, second = map(self.written, turns)
        return first[: next(i for i, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1)]

    def trace_row(self, trace: Trace, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32[T], policy_mask bool[T]) of a demonstration, with the ids that a rollout would have.

        Args:
            trace: If it has tools of its own, they are listed in place of the run's (under `tools_section`).
            suffix: Appended to the user message, as in `prompt_ids`.

        Raises:
            UnfitTrace: See `of_trace`.
        """
        chat = self.of_trace(trace)
        tokens = chat.prompt_ids(trace.problem, suffix)
        mask = [False] * len(tokens)
        for i, text in enumerate(trace.turns):
            turn = chat.turn_ids(chat.written(text))
            tokens += turn
            mask += [True] * len(turn)
            if i < len(trace.observations):
                reply = trace.replies[i] if trace.replies else ""
                closed = turn[-1] in ({chat.end_id} if reply else chat._call_closing_ids)
                calls = () if reply else chat.parse_turn(turn).calls
                glue = (
                    chat.question_ids(chat.shown(reply), closed=closed)
                    if reply
                    else chat.observation_ids(trace.observations[i], closed=closed, calls=calls)
                )
                tokens += glue
                mask += [False] * len(glue)
        return np.asarray(tokens, np.int32), np.asarray(mask, bool)


def _trimmed(parts: Sequence[str], start: bool, end: bool) -> list[str]:
    """The parts of a message without white space at its start and its end, as far as its template removes it."""
    trimmed = list(parts)
    for removes, strip, indices in (
        (start, str.lstrip, range(len(trimmed))),
        (end, str.rstrip, reversed(range(len(trimmed)))),
    ):
        for i in indices if removes else ():
            trimmed[i] = strip(trimmed[i])
            if trimmed[i]:
                break
    return trimmed


def _opens(text: str) -> bool:
    """Whether text before a turn opens a thought."""
    return text.rstrip().endswith(tuple(opening for opening, _ in THOUGHTS))


def _with_ids(pieces: Pieces, ids: Sequence[str], names: Sequence[str]) -> Pieces:
    """The text around an observation with the ids and names of its calls in place of their placeholders."""
    for probe, value in (*zip(PROBE_IDS, ids, strict=False), *zip(PROBE_NAMES, names, strict=False)):
        pieces = [piece.replace(probe, value) if isinstance(piece, str) else piece for piece in pieces]
    return pieces


def make_chat(config: TextConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> ChatFormat:
    """The chat format of a tokenizer.

    Args:
        config: Prompt and observation settings.
        tokenizer: From `load_tokenizer`.
        tools: JSON schemas (`{"type": "function", "function": {...}}`) for the system message when `tools_section`.

    Raises:
        ValueError: The vocabulary lacks the tokens of the template, the template cannot be used, `tools_section` is on
            without a tool, or the form of calls cannot write the name of a tool.
    """
    if config.tools_section and not tools:
        raise ValueError("text.tools_section is on but no tool was given; turn it off or register a tool")
    glue, convention = choose_glue(config, tokenizer, tools)
    for name, function in functions_of(tools).items():
        written = convention.write_calls("", [ToolCall(name, {}, "")], [function])
        if [call.name for call in convention.find_calls(written, over=True, tools=[function])] != [name]:
            form = next(form for form, other in CONVENTIONS.items() if other is convention)
            raise ValueError(
                f"the tool {name!r:.120} cannot be called in the form {form}, which reads {written.strip()!r:.200} as "
                "another call or as none; rename the tool, or set text.calls to another form"
            )
    return ChatFormat(config, tokenizer, glue, convention, tools)

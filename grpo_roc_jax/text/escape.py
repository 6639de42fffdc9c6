"""Makes outside text safe, so that it cannot imitate the marks of the dialogue: escapes it, cuts it to a token budget,
and checks its ids.

In many published vocabularies the protocol tags are ordinary text, so keeping special ids out of an observation is not
enough: its characters must not spell a tag either. Schemas of tools stand inside the trusted text of a prompt, although
servers, data sets and requests write them, so they are escaped too.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_roc_jax.text.config import CHATML_TAGS, LLAMA_TAGS, PROTOCOL_TAGS, REWARD_TOKENS
from grpo_roc_jax.text.tokenizer import Tokenizer

WITHHELD = "[output withheld: it imitates the marks of this dialogue]"


def dialogue_tags(tokenizer: Tokenizer) -> list[str]:
    """Texts that are marks of a dialogue under this tokenizer, its special tokens included; the longest first."""
    tags = {*PROTOCOL_TAGS, *CHATML_TAGS, *LLAMA_TAGS, *REWARD_TOKENS}
    tags |= {text for i in tokenizer.special_ids if (text := tokenizer.decode([i])).strip()}
    return sorted(tags, key=lambda tag: (-len(tag), tag))


def plain_tools(
    tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, marks: Iterable[str]
) -> list[Mapping[str, Any]]:
    """Schemas of tools whose texts (descriptions, names of parameters, values) imitate no mark of the dialogue.

    Args:
        tools: As the template lists them.
        tokenizer: Its special tokens are marks.
        marks: Beginnings of the template's marks; see `ObservationEncoder`.

    Raises:
        ValueError: The name of a tool imitates one: escaped, the policy could not call it.
    """
    pattern = _forgery_pattern(dialogue_tags(tokenizer), marks)

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            folded = unicodedata.normalize("NFKC", value)  # as the normalizer of a tokenizer may read it
            value = value if pattern.search(folded) is None or pattern.search(value) else folded
            return pattern.sub(lambda match: _escaped(match.group()), value)
        if isinstance(value, Mapping):
            return {plain(key): plain(part) for key, part in value.items()}
        return [plain(part) for part in value] if isinstance(value, list | tuple) else value

    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and pattern.search(unicodedata.normalize("NFKC", name)):
            raise ValueError(f"the name of a tool, {name!r:.120}, imitates a mark of the dialogue; rename the tool")
    return [plain(tool) for tool in tools]


class ObservationEncoder:
    """Observations of one tokenizer as the policy reads them, with everything that reads like a tag escaped.

    Args:
        tokenizer: Encodes the text.
        tags: Texts that an observation may not contain, in addition to the variants of the protocol tags.
        max_tokens: Budget of one observation; the middle of a longer one is left out.
        marks: Beginnings of the template's marks, such as `<think` and `[/INST`; no variant of them may occur either.
        as_json: The template writes observations as JSON strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tags: Iterable[str],
        max_tokens: int,
        *,
        marks: Iterable[str] = (),
        as_json: bool = False,
    ):
        self._tokenizer = tokenizer
        self._limit = max_tokens
        self._as_json = as_json
        self._forgery = _forgery_pattern(tags, marks)

    def escape(self, text: str) -> str:
        """`text` with the `<` of whatever reads like a tag or a special token written as `&lt;`."""
        return self._forgery.sub(lambda match: _escaped(match.group()), text)

    def shown(self, observation: str) -> str:
        """One observation as text: at most `max_tokens` tokens, head and tail kept around a visible marker."""
        limit = self._limit
        encode, text = self._tokenizer.encode, self.escape(observation)
        # The limit cannot hold so many characters, so only the two ends are worth tokenizing.
        reach = 64 * limit
        parts = (text,) if len(text) <= 2 * reach else (text[:reach], text[-reach:])
        first = encode(parts[0])
        last = first if len(parts) == 1 else encode(parts[1])
        if len(parts) == 1 and len(first) <= limit:
            quoted = self._quoted(text)
            if not self._as_json or len(encode(quoted)) <= limit:
                return self._checked(quoted)
        room = max(2, min(limit - len(encode(_omission(len(text)))), len(first)))
        cut = self._cut(first, last, room, len(text))
        while room and (excess := (size := len(encode(cut))) - limit) > 0:
            room -= max(1, excess * room // size)
            cut = self._cut(first, last, room, len(text))
        return self._checked(cut)

    def _quoted(self, text: str) -> str:
        """A text as the template has it."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._as_json else text

    def _cut(self, first: list[int], last: list[int], room: int, characters: int) -> str:
        """`room` tokens from the two ends of a text with so many characters, as the template has them; partial
        characters are dropped."""
        decode = self._tokenizer.decode
        head = decode(first[: room - room // 2]).rstrip("\ufffd")
        tail = decode(last[len(last) - room // 2 :]).lstrip("\ufffd")
        omitted = self._tokenizer.encode(self._quoted(_omission(characters - len(head) - len(tail))))
        marker = self._whole(decode(omitted[: self._limit - room]))
        return self._quoted(head) + marker + self._quoted(tail)

    def _whole(self, text: str) -> str:
        """The beginning of a text in JSON, without an escape that is cut at its end; any other text."""
        return _WHOLE.match(text).group() if self._as_json else text

    def _checked(self, text: str) -> str:
        """`text` if its ids contain no mark. Otherwise it is escaped once more, since the tokenizer's normalizer can
        make tags out of other characters; if that does not help, the text is withheld."""
        encode, decode = self._tokenizer.encode, self._tokenizer.decode
        if not self._forges(ids := encode(text)):
            return text
        text = self._whole(decode(encode(self.escape(decode(ids)))[: self._limit]))
        if self._forges(encode(text)):
            text = decode(encode(WITHHELD)[: self._limit])
        assert not self._forges(encode(text)), "the tokenizer makes tags out of ordinary words"
        return text

    def _forges(self, ids: list[int]) -> bool:
        special = not self._tokenizer.special_ids.isdisjoint(ids)
        return special or self._forgery.search(self._tokenizer.decode(ids)) is not None


_WHOLE = re.compile(r"(?:[^\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+", re.DOTALL)


def _omission(characters: int) -> str:
    return f"\n[... {characters} characters omitted ...]\n"


def _forgery_pattern(tags: Iterable[str], marks: Iterable[str]) -> re.Pattern[str]:
    """Matches what could pass for a tag: protocol tags and marks in any case and spacing, `<|name|>`, exact tags."""
    # A tag that is a word is one only as a word: `name` in `rename` is not.
    exact = (rf"(?<!\w){re.escape(tag)}(?!\w)" if re.fullmatch(r"\w+", tag) else re.escape(tag) for tag in tags)
    patterns = [r"<\s{0,4}\|", *exact]
    # A mark counts with its end only: `<function=` is one of Qwen3-Coder, `<function f at 0x7f>` an ordinary output.
    for group, opening, closing in (
        (PROTOCOL_TAGS, "<", r"\b"),
        (marks, "<", r"\s{0,4}[>=]"),
        (marks, r"\[", r"\s{0,4}\]"),
    ):
        names = {mark.strip("</[>") for mark in group if mark[0] == opening[-1]}
        if names:
            any_name = "|".join(sorted(map(re.escape, names)))
            patterns.append(rf"{opening}\s{{0,4}}/?\s{{0,4}}(?:{any_name}){closing}")
    return re.compile("|".join(patterns), re.IGNORECASE)


def _escaped(match: str) -> str:
    """The match made harmless. Special tokens that do not start with `<` get a zero-width space after their first
    letter."""
    return "&lt;" + match[1:] if match.startswith("<") else match[0] + "\u200b" + match[1:]

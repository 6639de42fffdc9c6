"""Plain text that must not imitate the marks of the dialogue: escaped, cut to a token budget, and checked as ids.

In many published vocabularies the protocol tags are ordinary text, so keeping special ids out of an observation is not
enough: its characters must not spell a tag either.
"""

import json
import re
from collections.abc import Iterable

from grpo_roc_jax.text.config import PROTOCOL_TAGS
from grpo_roc_jax.text.tokenizer import Tokenizer

WITHHELD = "[output withheld: it imitates the marks of this dialogue]"


class ObservationEncoder:
    """Observations of one tokenizer as ids, with everything that reads like a tag escaped.

    Args:
        tokenizer: Encodes the text.
        tags: Texts that an observation may not hold, besides the variants of the protocol tags.
        max_tokens: Budget of one observation; the middle of a longer one is left out.
        as_json: The template writes observations as JSON strings.
    """

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str], max_tokens: int, *, as_json: bool = False):
        self._tokenizer = tokenizer
        self._limit = max_tokens
        self._as_json = as_json
        self._forgery = _forgery_pattern(tags)

    def escape(self, text: str) -> str:
        """`text` with the `<` of whatever reads like a tag or a special token written as `&lt;`."""
        return self._forgery.sub(lambda match: _escaped(match.group()), text)

    def encode(self, observation: str) -> list[int]:
        """Ids of one observation: at most `max_tokens`, head and tail kept around a visible marker."""
        limit = self._limit
        if self._as_json:
            observation = json.dumps(observation, ensure_ascii=False)[1:-1]
        encode, text = self._tokenizer.encode, self.escape(observation)
        # The limit cannot hold so many characters, so only the two ends are worth tokenizing.
        reach = 64 * limit
        parts = (text,) if len(text) <= 2 * reach else (text[:reach], text[-reach:])
        first, last = encode(parts[0]), encode(parts[-1])
        if len(parts) == 2 or len(first) > limit:
            room = max(2, limit - len(encode(_omission(len(text)))))
            head, tail = first[: room - room // 2], last[len(last) - room // 2 :]
            kept = len(self._tokenizer.decode(head)) + len(self._tokenizer.decode(tail))
            first = head + encode(_omission(len(text) - kept))[: limit - room] + tail
        return self._checked(first)

    def _checked(self, ids: list[int]) -> list[int]:
        """`ids` if they forge nothing. Else they are escaped once more, as the tokenizer's normalizer can make tags out
        of other characters; if that does not help, the text is withheld."""
        if not self._forges(ids):
            return ids
        ids = self._tokenizer.encode(self.escape(self._tokenizer.decode(ids)))[: self._limit]
        if self._forges(ids):
            ids = self._tokenizer.encode(WITHHELD)[: self._limit]
        assert not self._forges(ids), "the tokenizer makes tags out of ordinary words"
        return ids

    def _forges(self, ids: list[int]) -> bool:
        special = not self._tokenizer.special_ids.isdisjoint(ids)
        return special or self._forgery.search(self._tokenizer.decode(ids)) is not None


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

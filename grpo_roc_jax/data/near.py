"""Near-duplicates: problems of two sets that differ in case, spaces, punctuation or a few words."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

WORDS = 4
"""Number of consecutive words that are compared together."""
ALIKE = 0.7
"""Two texts are near-duplicates if they share at least this fraction of their word runs."""
TOKEN = re.compile(r"\w+|[-+*/^=<>%]")
"""Operators are tokens, since short problems may differ in nothing else; other punctuation is ignored."""


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """The runs of `WORDS` consecutive words of a text, ignoring case; a shorter text is a single run."""
    words = TOKEN.findall(text.casefold())
    if len(words) <= WORDS:
        return frozenset([tuple(words)])
    return frozenset(zip(*(words[i:] for i in range(WORDS)), strict=False))


def near_duplicates(texts: Iterable[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """(text, the most similar of the others) for each text that has a near-duplicate among them."""
    runs = [shingles(other) for other in others]
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, text_runs in enumerate(runs):
        for run in text_runs:
            places[run].append(number)
    known, pairs = places.keys(), []
    for text in texts:
        text_runs = shingles(text)
        shared = Counter(number for run in text_runs & known for number in places[run])
        shares = {number: count / (len(text_runs) + len(runs[number]) - count) for number, count in shared.items()}
        best = max(shares, key=shares.__getitem__, default=None)
        if best is not None and shares[best] >= ALIKE:
            pairs.append((text, others[best]))
    return pairs


def describe_near(source: str, pairs: Sequence[tuple[str, str]], shown: int = 3) -> list[str]:
    """Lines that count and name near-duplicates; empty if there are none."""
    if not pairs:
        return []
    lines = [f"  {text[:60]!r} is like the held-out {other[:60]!r}" for text, other in pairs[:shown]]
    more = [f"  and {len(pairs) - shown} more"] if len(pairs) > shown else []
    rows = (
        "1 row is a near-duplicate of a held-out one"
        if len(pairs) == 1
        else (f"{len(pairs)} rows are near-duplicates of held-out ones")
    )
    return ["\n".join([f"{source}: {rows}; they train, so look whether they should:", *lines, *more])]

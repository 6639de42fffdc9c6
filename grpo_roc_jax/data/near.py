"""Near-duplicates: problems of two sets that differ in case, spaces, punctuation or a few words."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

WORDS = 4
"""Consecutive words that are compared at a time."""
ALIKE = 0.7
"""Share of the word runs of two texts that both have, from which on they are near-duplicates."""
TOKEN = re.compile(r"\w+|[-+*/^=<>%]")
"""Operators count, since they are all that tells short problems apart; other punctuation does not."""


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """The runs of `WORDS` consecutive words of a text without regard to case; the whole of a shorter text."""
    words = TOKEN.findall(text.casefold())
    if len(words) <= WORDS:
        return frozenset([tuple(words)])
    return frozenset(zip(*(words[i:] for i in range(WORDS)), strict=False))


def near_duplicates(texts: Iterable[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """(text, the most similar of the others) for each text that has a near-duplicate among them."""
    runs = [shingles(other) for other in others]
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, own in enumerate(runs):
        for run in own:
            places[run].append(place)
    known, found = places.keys(), []
    for text in texts:
        own = shingles(text)
        shared = Counter(place for run in own & known for place in places[run])
        shares = {place: count / (len(own) + len(runs[place]) - count) for place, count in shared.items()}
        best = max(shares, key=shares.__getitem__, default=None)
        if best is not None and shares[best] >= ALIKE:
            found.append((text, others[best]))
    return found


def describe_near(source: str, pairs: Sequence[tuple[str, str]], shown: int = 3) -> list[str]:
    """Lines that count and name near-duplicates; none without any."""
    if not pairs:
        return []
    lines = [f"  {one[:60]!r} is like the held-out {other[:60]!r}" for one, other in pairs[:shown]]
    more = [f"  and {len(pairs) - shown} more"] if len(pairs) > shown else []
    rows = (
        "1 row is a near-duplicate of a held-out one"
        if len(pairs) == 1
        else (f"{len(pairs)} rows are near-duplicates of held-out ones")
    )
    return ["\n".join([f"{source}: {rows}; they train, so look whether they should:", *lines, *more])]

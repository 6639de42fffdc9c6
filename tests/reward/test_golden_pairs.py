"""Pairs by pattern: no wrong answer may pass, at most one right answer in fifty may fail. `test_corpus.py` has those
decided by hand."""

from fractions import Fraction

import pytest

from grpo_roc_jax.reward.verify import Verifier

MAX_FALSE_NEGATIVES = 0.02


def pairs() -> list[tuple[str, str, bool]]:
    """(answer, reference, whether they agree), by construction."""
    found: list[tuple[str, str, bool]] = []
    for n in (2, 3, 8, 10, 15, 26):
        found += [
            (f"{n}", f"{n}", True),
            (f"{n}.0", f"{n}", True),
            (f"{1000 * n:,}", f"{1000 * n}", True),
            (f"-{n}", f"{n}", False),
            (f"{n}0", f"{n}", False),
            (f"{n}.5", f"{n}", False),
            (rf"\frac{{{3 * n}}}{{{6 * n}}}", "0.5", True),
            (rf"\frac{{{n}}}{{{n + 1}}}", rf"\frac{{{n + 1}}}{{{n}}}", False),
            (rf"\sqrt{{{n * n * 2}}}", rf"{n}\sqrt{{2}}", True),
            (rf"\sqrt{{{n * n * 2 + 1}}}", rf"{n}\sqrt{{2}}", False),
            (rf"x^2+{n}x", rf"x(x+{n})", True),
            (rf"x^2+{n}x", rf"x(x-{n})", False),
            (rf"(x+{n})^2", rf"x^2+{2 * n}x+{n * n}", True),
            (rf"(x+{n})^2", rf"x^2+{n}x+{n * n}", False),
            (rf"\left({n}, {n + 1}\right)", f"({n},{n + 1})", True),
            (f"({n + 1},{n})", f"({n},{n + 1})", False),
            (rf"\{{{n}, {n + 2}\}}", rf"\{{{n + 2}, {n}\}}", True),
            (f"{n}, {n + 1}", f"{n}", False),
            (rf"{n}\pi", rf"\pi \cdot {n}", True),
            (rf"{n}\pi", f"{n}", False),
        ]
    return found


def test_false_positives_and_negatives():
    golden = pairs()
    assert len(golden) == 120
    pool = Verifier(workers=1)
    verdicts = pool.compare([(answer, gold) for answer, gold, _ in golden])
    pool.close()
    false_positives = [p for p, v in zip(golden, verdicts, strict=True) if v == "correct" and not p[2]]
    false_negatives = [(p, v) for p, v in zip(golden, verdicts, strict=True) if v != "correct" and p[2]]
    assert false_positives == []
    assert len(false_negatives) <= MAX_FALSE_NEGATIVES * sum(agree for *_, agree in golden), false_negatives
    assert not {"timeout", "crash"} & set(verdicts)


@pytest.mark.parametrize("denominator", [3, 7, 12])
def test_rounded_decimals_are_no_fractions(denominator):
    """A truncated decimal is another number; comparisons of integers and fractions are exact."""
    exact = Fraction(1, denominator)
    pool = Verifier()
    assert pool.compare([(f"{float(exact):.3f}", f"1/{denominator}")]) == ["wrong"]
    assert pool.started == 0

"""The gold answers of the problem sets beside the checkout: each equals its usual spellings, and no other answer."""

import itertools
import json
from pathlib import Path

import pytest

from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.reward.verify import Verifier

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SETS = ("gsm8k_train", "gsm8k_test", "aime24", "amc23")


@pytest.fixture(scope="module")
def golds() -> dict[int, set[str]]:
    """Value -> the gold answers with this value, as the files write them and as problems hold them."""
    missing = [name for name in SETS if not (SHARED / f"{name}.jsonl").is_file()]
    if missing:
        pytest.skip(f"{', '.join(missing)} are not beside the checkout ({SHARED})")
    by_value: dict[int, set[str]] = {}
    for name in SETS:
        path = SHARED / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        written = [str(row["answer"]).rsplit("####", 1)[-1].strip() for row in rows]
        for text, problem in zip(written, load_problems(path)[0], strict=True):
            by_value.setdefault(int(float(text.replace(",", ""))), set()).update((text, problem.answer))
    assert len(by_value) > 900
    return by_value


def spellings(n: int) -> list[str]:
    """An integer as models write it, the most usual forms first."""
    grouped, sign, digits = f"{n:,}", "-" if n < 0 else "", str(abs(n))
    forms = [str(n), f"${n}$", f"{n}.0", grouped, rf"{grouped}\text{{ meters}}"]
    forms += [f"{n}.", f"{n}.00", f" {n} ", f"{sign}0{digits}", f"{sign}${digits}", rf"{sign}\${digits}", rf"\$ {n}"]
    forms += [rf"\text{{{n}}}", rf"\mathbf{{{n}}}", f"{n}/1", rf"\frac{{{3 * n}}}{{3}}", f"{n} dollars", f"{n}%"]
    forms += [f"{grouped}.00", grouped.replace(",", "{,}"), grouped.replace(",", r"\,"), f"{n / 1000!r}e3", rf"{n}\%"]
    return [*forms, f"−{digits}" if n < 0 else f"+{n}"]


def test_every_gold_answer_equals_its_usual_spellings(golds):
    verifier, answers = Verifier(), []
    for index, (n, texts) in enumerate(golds.items()):
        forms = spellings(n)[: None if index % 10 == 0 else 5]
        answers += [(text, gold) for gold in texts for text in (gold, *forms)]
    boxed = [(find_answer([rf"<answer>\boxed{{{text}}}</answer>"]).answer, gold) for text, gold in answers]
    verdicts = zip(boxed, verifier.compare(boxed), strict=True)
    assert [pair for pair, verdict in verdicts if verdict != "correct"] == []
    assert len(boxed) > 6000 and verifier.started == 0


def test_no_gold_answer_equals_another(golds):
    """All pairs of a sample; of the others, those that are next in value, and those whose digits are close."""
    verifier, values = Verifier(), sorted(golds)
    pairs = set(itertools.permutations(values[:: len(values) // 40], 2)) | set(itertools.pairwise(values))
    pairs |= {(m, n) for n in values for m in (-n, 10 * n, int(str(abs(n))[::-1])) if m != n}
    texts = [(text, gold) for m, n in pairs for gold in golds[n] for text in golds.get(m, {f"{m:,}"})]
    verdicts = zip(texts, verifier.compare(texts), strict=True)
    assert [pair for pair, verdict in verdicts if verdict != "wrong"] == []
    assert len(texts) > 4000 and verifier.started == 0

"""Pairs by kind with the verdict that a teacher would give, the rows of docs/rewards.md, and gold answers of data sets.

`corpus.jsonl` was written while the comparison was. `unseen_corpus.jsonl` was written afterwards and compared once
before anything was changed: docs/rewards.md has both figures. `pairs.jsonl` and `held_out_pairs.jsonl` are in styles of
six problem sets; the second was written before any of its pairs was compared. `answer_pairs.jsonl`, beside the tree, is
of others.
"""

import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest

from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.reward.notation import decide
from grpo_roc_jax.reward.verify import Verifier

HERE = Path(__file__).parent
SHARED = HERE.resolve().parents[2] / "shared" / "data"
SETS = ("gsm8k_train", "gsm8k_test", "aime24", "amc23")
PAGE = (HERE.parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
NAMES = ("corpus", "unseen_corpus", "pairs", "further_pairs", "fresh_pairs", "written_pairs", "held_out_pairs")
FILES = [*(HERE / f"{name}.jsonl" for name in NAMES), SHARED / "answer_pairs.jsonl"]


@cache
def load(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def pools():
    pools = {strict: Verifier(workers=2, strict=strict) for strict in (False, True)}
    yield pools
    for pool in pools.values():
        pool.close()


def results(pool, path):
    """(the pairs of a file, each with whether it was accepted; recall)."""
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside the checkout ({path})")
    pairs = load(path)
    statuses = pool.compare([(pair["answer"], pair["gold"]) for pair in pairs])
    assert not {"timeout", "crash"} & set(statuses)
    accepted = [status == "correct" for status in statuses]
    both = sum(yes and pair["equal"] for yes, pair in zip(accepted, pairs, strict=True))
    precision, recall = both / sum(accepted), both / sum(pair["equal"] for pair in pairs)
    print(f"{path.name} strict={pool.strict}: {len(pairs)} pairs, precision {precision:.3f}, recall {recall:.3f}")
    return list(zip(pairs, accepted, strict=True)), recall


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pairs(pools, path):
    """By default all are right; `strict` accepts nothing wrong, which math-verify alone does."""
    verdicts, _ = results(pools[False], path)
    assert [pair for pair, accepted in verdicts if accepted != pair["equal"]] == []
    verdicts, recall = results(pools[True], path)
    assert [pair for pair, accepted in verdicts if accepted and not pair["equal"]] == []
    assert recall >= 0.7 or path.parent == SHARED


def test_every_row_of_the_page_holds(pools):
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| (yes|no) \| (yes|no) \|$", PAGE, re.MULTILINE)
    lines = PAGE.split("| answer | reference |")[1].splitlines()
    assert len(rows) == sum(line.startswith("| `") for line in lines) >= 30, "the table is read whole"
    for strict, column in ((False, 2), (True, 3)):
        pairs = zip(rows, pools[strict].compare([row[:2] for row in rows]), strict=True)
        assert [row for row, verdict in pairs if (verdict == "correct") != (row[column] == "yes")] == []


def test_equality_of_forms_is_symmetric():
    """Which of two numbers, sets, intervals or times is the reference makes no difference; decimal commas and
    differences are read in answers only, and a base may be missing in answers only."""
    for pair in load(FILES[0]) + load(FILES[1]):
        there, back = (decide(*texts) for texts in ((pair["answer"], pair["gold"]), (pair["gold"], pair["answer"])))
        if pair["kind"] not in {"separators", "date", "approx", "base"} and None not in (there, back):
            assert there == back, pair


# ---- gold answers of the problem sets beside the checkout ----------------------------------------------------------


@pytest.fixture(scope="module")
def golds() -> dict[int, set[str]]:
    """Value -> the gold answers with this value, as the files write them and as problems hold them."""
    missing = [name for name in SETS if not (SHARED / f"{name}.jsonl").is_file()]
    if missing:
        pytest.skip(f"{', '.join(missing)} are not beside the checkout ({SHARED})")
    by_value: dict[int, set[str]] = {}
    for path in (SHARED / f"{name}.jsonl" for name in SETS):
        written = [str(row["answer"]).rsplit("####", 1)[-1].strip() for row in load(path)]
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


def test_every_gold_answer_equals_its_usual_spellings_and_no_other(golds):
    """Of others all pairs of a sample, those that are next in value, and those whose digits are close."""
    answers, values = [], sorted(golds)
    for index, (n, texts) in enumerate(golds.items()):
        forms = spellings(n)[: None if index % 10 == 0 else 5]
        answers += [(text, gold) for gold in texts for text in (gold, *forms)]
    boxed = [(find_answer([rf"<answer>\boxed{{{text}}}</answer>"]).answer, gold) for text, gold in answers]
    pairs = set(itertools.permutations(values[:: len(values) // 40], 2)) | set(itertools.pairwise(values))
    pairs |= {(m, n) for n in values for m in (-n, 10 * n, int(str(abs(n))[::-1])) if m != n}
    others = [(text, gold) for m, n in pairs for gold in golds[n] for text in golds.get(m, {f"{m:,}"})]
    assert len(boxed) > 6000 and len(others) > 4000
    verifier = Verifier()
    for texts, wanted in ((boxed, "correct"), (others, "wrong")):
        verdicts = zip(texts, verifier.compare(texts), strict=True)
        assert [pair for pair, verdict in verdicts if verdict != wanted] == []
    assert verifier.started == 0

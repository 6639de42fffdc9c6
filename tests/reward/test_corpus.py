"""Pairs by kind with the verdict that a teacher would give, and the rows of docs/rewards.md.

`corpus.jsonl` was written while the comparison was, `unseen_corpus.jsonl` afterwards: docs/rewards.md has both figures.
`pairs.jsonl` and `held_out_pairs.jsonl` are in styles of six problem sets; `answer_pairs.jsonl` is beside the tree.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from grpo_roc_jax.reward.notation import decide
from grpo_roc_jax.reward.verify import Verifier

HERE = Path(__file__).parent
SHARED = HERE.resolve().parents[2] / "shared" / "data"
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
    table = PAGE.split("| answer | reference |")[1]
    assert len(rows) == table.count("\n| `") >= 30, "the table is read whole"
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

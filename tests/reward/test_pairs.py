"""Pairs of answer and reference in the styles of six problem sets, with verdicts decided by hand.

`pairs.jsonl` was there while the comparison was written. `held_out_pairs.jsonl` was written before any of its pairs was
compared; docs/rewards.md listed what it missed, which is read right since then. `test_corpus.py` has pairs by kind.
"""

import json
from pathlib import Path

import pytest

from grpo_roc_jax.reward.verify import Verifier


def load(name):
    return [json.loads(line) for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()]


PAIRS, HELD_OUT = load("pairs.jsonl"), load("held_out_pairs.jsonl")


@pytest.fixture(scope="module")
def pool():
    pool = Verifier(workers=1)
    yield pool
    pool.close()


def compared(pool, pairs):
    """(accepted but wrong, missed); prints precision and recall by set."""
    verdicts = pool.compare([(pair["answer"], pair["gold"]) for pair in pairs])
    assert not {"timeout", "crash"} & set(verdicts)
    accepted = [verdict == "correct" for verdict in verdicts]
    false = [(pair["answer"], pair["gold"]) for pair, yes in zip(pairs, accepted, strict=True) if yes > pair["equal"]]
    missed = [(pair["answer"], pair["gold"]) for pair, yes in zip(pairs, accepted, strict=True) if yes < pair["equal"]]
    for name in [*dict.fromkeys(pair["set"] for pair in pairs), ""]:
        rows = [(yes, pair["equal"]) for yes, pair in zip(accepted, pairs, strict=True) if name in ("", pair["set"])]
        both = sum(yes and equal for yes, equal in rows)
        precision, recall = both / sum(yes for yes, _ in rows), both / sum(equal for _, equal in rows)
        print(f"{name or 'all':14} {len(rows):4} pairs  precision {precision:.4f}  recall {recall:.4f}")
    print("accepted but wrong:", false, "\nmissed:", missed)
    return false, missed


def test_precision_and_recall(pool):
    assert len(PAIRS) >= 500 and len({(pair["answer"], pair["gold"]) for pair in PAIRS}) == len(PAIRS)
    false, missed = compared(pool, PAIRS)
    assert false == []
    assert missed == []


def test_precision_and_recall_on_held_out_pairs(pool):
    """Words around a number and functions that math-verify does not evaluate among them."""
    new = {(pair["answer"], pair["gold"]) for pair in HELD_OUT}
    assert len(new) == len(HELD_OUT) >= 150 and new.isdisjoint({(pair["answer"], pair["gold"]) for pair in PAIRS})
    false, missed = compared(pool, HELD_OUT)
    assert false == []
    assert missed == []

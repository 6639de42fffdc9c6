"""Problems that are held out are distinct, and near-duplicates of them among the training rows are named."""

import json
from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.near import describe_near, near_duplicates
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.record.accuracy import bootstrap
from grpo_roc_jax.worlds.worlds import FAMILIES

HELD = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?"


@pytest.mark.parametrize(
    ("text", "near"),
    [
        (HELD.lower().replace(",", " ").replace("?", " ?"), True),
        (HELD.replace("\n", " ") + "  ", True),
        (HELD.replace("Natalia", "Maria"), True),
        (HELD.replace("clips", "pencils"), False),
        ("How many clips did Natalia sell in April and in May?", False),
        ("3 + 4 = ?", True),
        ("3 - 4 = ?", False),
        ("3+4=", True),
        ("3 + 5 = ?", False),
    ],
)
def test_texts_that_differ_a_little_are_near(text, near):
    pairs = near_duplicates([text, "something else entirely"], ["2 + 2 = ?", HELD, "3 + 4 = ?"])
    assert [duplicate for duplicate, _ in pairs] == [text] * near


def test_near_duplicates_are_counted_and_named(tmp_path):
    def write(name, *questions):
        """Rows that are problems and demonstrations."""
        path, answer = tmp_path / name, {"role": "assistant", "content": "1"}
        rows = [{"question": q, "answer": "1", "messages": [{"role": "user", "content": q}, answer]} for q in questions]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    held_out = write("held.jsonl", HELD, "6 * 7 = ?")
    rows = write("rows.jsonl", HELD, HELD.upper(), "What is 12 plus 5?", "6 * 7 =")
    config = DataConfig(sources=(rows,), eval_sources=(held_out,), eval_problems=2)
    for stream in (make_problem_stream(config, problems=1, seed=0), make_trace_stream(config, traces=1, seed=0)):
        (same,) = [note for note in stream.notes if "also held out" in note]
        assert "1 rows are also held out; dropped" in same
        (near,) = [note for note in stream.notes if "near-duplicates" in note]
        assert near.startswith(f"{rows}: 2 rows are near-duplicates of held-out ones") and "NATALIA SOLD" in near
    assert describe_near("x", [("a", "b")] * 5)[0].endswith("and 2 more") and describe_near("x", []) == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_held_out_problems_are_distinct(family):
    source = f"world:{family}:1"
    notes: list[str] = []
    problems = eval_problems(DataConfig(sources=(source,), eval_problems=192), notes)
    assert max(Counter(problem.prompt for problem in problems).values()) == 1
    assert len(problems) == 192 or f"{len(problems)} distinct held-out problems of 192" in notes[0]


def test_copies_of_a_problem_make_no_interval_narrower():
    rng = np.random.default_rng(0)
    values, uids = (rng.random(40) < 0.6).astype(float), [f"q{i}" for i in range(40)]
    plain = bootstrap(values, uids=uids)
    assert plain == bootstrap(values), "as without names where all are distinct"
    again = bootstrap(np.tile(values, 5), uids=uids * 5)
    alone = bootstrap(np.tile(values, 5))
    assert again[1] - again[0] == pytest.approx(plain[1] - plain[0], rel=0.1)
    assert alone[1] - alone[0] < 0.6 * (plain[1] - plain[0]), "what it was"
    values[3] = np.nan
    assert np.isfinite(bootstrap(np.tile(values, 2), uids=uids * 2)).all()

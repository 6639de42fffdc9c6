"""Extraction of the final answer."""

import time

import pytest

from grpo_roc_jax.reward.answer import find_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} \boxed{2", "1"),  # an unclosed box does not count
        (r"{\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{}", ""),
        ("no box", None),
        ("}}}{", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_last_boxed_is_linear():
    """Half a million unclosed boxes are read once; a search that restarts at each would take hours."""
    start = time.process_time()
    assert last_boxed(r"\boxed{" * 500_000) is None
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("turns", "answer", "answers", "well_formed"),
    [
        ([r"<answer>\boxed{4}</answer>"], "4", 1, True),
        (["call", r"so <answer>\boxed{4}</answer>"], "4", 1, True),
        ([r"<answer>\boxed{4}</answer>", "call"], None, 1, True),  # the answer must be in the last turn
        ([r"<answer>\boxed{4}</answer><answer>\boxed{5}</answer>"], "5", 2, True),  # the last one counts
        ([r"<answer>\boxed{4}"], None, 0, False),
        ([r"\boxed{4}</answer>"], None, 0, False),
        ([r"<answer><answer>\boxed{4}</answer>"], "4", 1, False),
        ([r"<answer>\boxed{4}</answer></answer>"], "4", 1, False),
        (["<answer>4</answer>"], None, 1, True),  # strict: needs a box
        ([r"\boxed{4}"], None, 0, True),
        (["plain"], None, 0, True),
        ([r"<answer>\boxed{ }</answer>"], None, 1, True),
        ([], None, 0, True),
    ],
)
def test_find_answer_strict(turns, answer, answers, well_formed):
    result = find_answer(turns)
    assert (result.answer, result.answers, result.well_formed) == (answer, answers, well_formed)


def test_the_last_block_counts_in_lenient_reading_too():
    """`last_sentences.jsonl` has what else lenient reading takes."""
    assert find_answer([r"\boxed{3} <answer>\boxed{4}</answer>"], lenient=True).answer == "4"
    assert find_answer(["<answer>4</answer>"], lenient=True).answer == "4"
    assert find_answer([r"<final>\boxed{1}</final>"], tag="final").answer == "1"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is:\n\n- 5", "5"),
        ("**Final answer:**\n* $x = 5$", "x = 5"),
        ("The answer is:\n• 5", "5"),
        ("The answer is:\n-5", "-5"),
        ("The answer is: - 5", "- 5"),
        ("The answer is:\n- 5\n- 6", None),
    ],
)
def test_a_bullet_is_no_sign_and_several_are_no_answer(text, answer):
    assert find_answer([text], lenient=True).answer == answer

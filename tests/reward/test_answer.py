"""Extraction of the final answer, and the sentences that replies end with, beside the rules of TRL and verl.

`last_sentences.jsonl` has the end of a reply, and its answer or null where there is none to take. The other rules were
read in TRL 1.16.0 (`accuracy_reward`) and verl 0.9.1 (`gsm8k` strict, `math_reward`), and are written anew here.
"""

import json
import logging
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from grpo_roc_jax.reward.answer import find_answer, last_boxed, without_thoughts
from grpo_roc_jax.reward.notation import decide


def test_last_boxed():
    for text, content in [
        *((r"\boxed{42}", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}")),
        *((r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed {7}", "7"), (r"\fbox{3}", "3")),
        (r"\boxed{1} \boxed{2", "1"),  # an unclosed box does not count
        *((r"{\boxed{a{b}c}", "a{b}c"), (r"\boxed{}", ""), ("no box", None), ("}}}{", None)),
    ]:
        assert last_boxed(text) == content, text


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
        ([r"<think><answer>\boxed{5}</answer></think>"], None, 1, True),  # a thought is no answer
        ([r"<answer>\boxed{5}</answer></think>"], None, 1, True),
        ([r"<think><answer>\boxed{5}</answer></think><answer>\boxed{6}</answer>"], "6", 2, True),
    ],
)
def test_find_answer(turns, answer, answers, well_formed):
    result = find_answer(turns)
    assert (result.answer, result.answers, result.well_formed) == (answer, answers, well_formed)
    if any("think" in turn for turn in turns):
        assert find_answer(turns, lenient=True) == result
    renamed = [turn.replace("answer>", "final>") for turn in turns]
    assert find_answer(renamed, tag="final") == result


def test_a_bullet_is_no_sign_several_are_no_answer_and_the_last_block_counts():
    for text, answer in [
        *(("The answer is:\n\n- 5", "5"), ("**Final answer:**\n* $x = 5$", "x = 5"), ("The answer is:\n• 5", "5")),
        *(("The answer is:\n-5", "-5"), ("The answer is: - 5", "- 5"), ("The answer is:\n- 5\n- 6", None)),
        *((r"\boxed{3} <answer>\boxed{4}</answer>", "4"), ("<answer>4</answer>", "4")),
    ]:
        assert find_answer([text], lenient=True).answer == answer, text


# ---- last sentences ------------------------------------------------------------------------------------------------

LINES = Path(__file__).with_name("last_sentences.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]


def test_lenient_takes_the_answer_and_nothing_else_and_strict_takes_boxes_in_blocks_only():
    """What is taken is graded like the answer alone, where a policy ends in a sentence and a reference is the value."""
    wrong = []
    for row in ROWS:
        answer, strict = (find_answer([row["text"]], lenient=lenient).answer for lenient in (True, False))
        value = re.sub(r"\\?\$| (?:apples|hours|cm)\b", "", row["answer"] or "")
        boxed = strict is None or rf"<answer>\boxed{{{strict}}}</answer>" in row["text"]
        if answer != row["answer"] or not boxed or (answer and decide(answer, value) is False):
            wrong.append((row, answer, strict))
    assert wrong == []


def trl(text):
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return parse(text, [config], extraction_mode="first_match", parsing_timeout=None)


def verl_gsm8k(text):
    lines = re.findall(r"#### (-?[0-9.,]+)", text[-300:])
    return lines[-1].replace(",", "") if lines else None


RULES = {
    "here": lambda text: find_answer([text], lenient=True).answer,
    "TRL": trl,
    "verl ####": verl_gsm8k,
    "verl box": last_boxed,
}


def outcome(name, row):
    """right, nothing, or wrong: whether the rule takes the answer, nothing, or something else."""
    answer = RULES[name](row["text"])
    if not answer:
        return "right" if row["answer"] is None else "nothing"
    if row["answer"] is None:
        return "wrong"
    if name == "TRL":
        from math_verify import parse, verify

        gold = parse(rf"\boxed{{{row['answer']}}}", parsing_timeout=None)
        return "right" if verify(gold, answer, timeout_seconds=None) else "wrong"
    return "right" if decide(answer, row["answer"]) is not False else "wrong"


def test_the_table_of_the_page_is_true():
    """Right answers of each rule by kind, and wrong ones in brackets."""
    logging.disable(logging.CRITICAL)
    counts = {name: Counter((row["kind"], outcome(name, row)) for row in ROWS) for name in RULES}
    logging.disable(logging.NOTSET)
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for kind, total in [*Counter(row["kind"] for row in ROWS).items(), ("all", len(ROWS))]:
        cells = []
        for count in counts.values():
            right, wrong = (
                sum(n for (k, what), n in count.items() if kind in (k, "all") and what == wanted)
                for wanted in ("right", "wrong")
            )
            cells.append(f"{right} ({wrong})" if wrong else f"{right}")
        assert f"| {kind} | {total} | {' | '.join(cells)} |" in page


def test_closed_thoughts_are_removed():
    for text, rest in [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the prompt opened it
        *(("<think>a</think>b<think>c</think>d", "bd"), ("<think>a<think>b</think>c</think>d", "d")),
        *(("<reason>a</reason>b", "b"), ("[THINK]a[/THINK]b", "b"), ("◁think▷a◁/think▷b", "b")),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
        *(("<|START_THINKING|>a<|END_THINKING|>b", "b"), ("a<think>b", "a<think>b"), ("a", "a")),
    ]:
        assert without_thoughts(text) == rest, text
    assert without_thoughts("a<think>b", unclosed=True) == "a"
    assert without_thoughts("<thought>b</thought>", tag="thought") == "<thought>b</thought>"

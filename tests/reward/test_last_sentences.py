"""The sentences that replies end with: what lenient extraction takes, beside the rules of TRL and verl.

`last_sentences.jsonl` has the end of a reply, and its answer or null where there is none to take. The other rules were
read in TRL 1.16.0 (`accuracy_reward`) and verl 0.9.1 (`gsm8k` strict, `math_reward`), and are written anew here.
"""

import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest

from grpo_roc_jax.reward.answer import find_answer, last_boxed, without_thoughts
from grpo_roc_jax.reward.notation import decide

FILE = Path(__file__).with_name("last_sentences.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def test_lenient_takes_the_answer_and_nothing_else():
    pairs = [(row, find_answer([row["text"]], lenient=True).answer) for row in ROWS]
    assert [(row, answer) for row, answer in pairs if answer != row["answer"]] == []


def test_what_is_taken_is_graded_like_the_answer_alone():
    """A policy that ends in one sentence and a reference that is the bare value agree."""

    def agrees(row):
        answer = find_answer([row["text"]], lenient=True).answer
        return decide(answer, re.sub(r"\\?\$| (?:apples|hours|cm)\b", "", row["answer"])) is not False

    assert [row for row in ROWS if row["answer"] and not agrees(row)] == []


def test_strict_takes_boxes_in_blocks_only():
    for row in ROWS:
        answer = find_answer([row["text"]]).answer
        assert answer is None or rf"<answer>\boxed{{{answer}}}</answer>" in row["text"]


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


def table():
    """The lines of the table in docs/rewards.md: right answers of each rule by kind, and wrong ones in brackets."""
    logging.disable(logging.CRITICAL)
    counts = {name: Counter((row["kind"], outcome(name, row)) for row in ROWS) for name in RULES}
    logging.disable(logging.NOTSET)
    lines = []
    for kind, total in [*Counter(row["kind"] for row in ROWS).items(), ("all", len(ROWS))]:
        cells = []
        for name in RULES:
            right, wrong = (
                sum(n for (k, what), n in counts[name].items() if kind in (k, "all") and what == wanted)
                for wanted in ("right", "wrong")
            )
            cells.append(f"{right} ({wrong})" if wrong else f"{right}")
        lines.append(f"| {kind} | {total} | {' | '.join(cells)} |")
    return lines


def test_the_table_of_the_page_is_true():
    assert sum(row["answer"] is not None for row in ROWS) >= 60 and sum(row["answer"] is None for row in ROWS) >= 40
    missing = [line for line in table() if line not in PAGE.read_text(encoding="utf-8")]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the prompt opened it
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<reason>a</reason>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("◁think▷a◁/think▷b", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
        ("<|START_THINKING|>a<|END_THINKING|>b", "b"),
        ("a<think>b", "a<think>b"),
        ("a", "a"),
    ],
)
def test_closed_thoughts_are_removed(text, rest):
    assert without_thoughts(text) == rest


def test_an_open_thought_ends_nowhere():
    assert without_thoughts("a<think>b", unclosed=True) == "a"
    assert without_thoughts("<thought>b</thought>", tag="thought") == "<thought>b</thought>"


@pytest.mark.parametrize("lenient", [False, True])
def test_a_block_in_a_thought_is_no_answer(lenient):
    block = r"<answer>\boxed{5}</answer>"
    assert find_answer([f"<think>{block}</think>"], lenient=lenient).answer is None
    assert find_answer([f"{block}</think>"], lenient=lenient).answer is None
    result = find_answer([rf"<think>{block}</think><answer>\boxed{{6}}</answer>"], lenient=lenient)
    assert (result.answer, result.answers) == ("6", 2)

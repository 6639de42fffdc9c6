"""Extraction of the final answer, normal forms, exact numbers, units, and the comparisons that need no algebra."""

import json
import re
import time
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_roc_jax.reward.answer import find_answer, last_boxed, without_thoughts
from grpo_roc_jax.reward.notation import decide, for_algebra, normalize, read_number
from grpo_roc_jax.reward.verify import Verifier
from grpo_roc_jax.reward.words import measure
from tests.helpers.linear import assert_linear

SENTENCES = Path(__file__).with_name("last_sentences.jsonl")
"""The end of a reply, and its answer or null where there is none to take."""
NASTY = [
    "9", "9 ", "9,", "9,999", "$", "1.", "1e", "e1", "_{", "{", "}", "(", "sqrt(", "np.", "np.sqrt(", "pi", "\\",
    "\\text{", "\\text{a}", "\\frac", "\\frac1", "\\left", "\\le", "1\\, ", "m ", "m/", "min ", "%", "^\\circ", "** ",
    "10^{", "\\boxed{", "answer is ", "answer\n", "<answer>", "</answer>", "é", "(1,", "x=", "x<1 or ", "\\pm ", "[1,",
    "\\{1,", "a^{", "1/2,", "5 km ", "A. ",
]  # fmt: skip
CONVERTED = [
    *((r"5\ \text{km}", r"5000\ \text{m}", True), (r"5\ \text{km}", r"5\ \text{m}", False)),
    *((r"\frac{1}{2}\text{ hour}", "30 min", True), ("1 L", r"1000\text{ cm}^3", True), ("1 ft", "12 in", True)),
    *((r"72\text{ km/h}", r"20\text{ m/s}", True), ("60 mph", "60 km/h", False), ("5 kg", "5 km", False)),
    *((r"5\text{ N}", r"5\ \mathrm{kg\,m/s^2}", True), (r"\$0.25", "25 cents", True), ("$42", "€42", False)),
    *((r"100^\circ C", r"100^\circ F", False), (r"\frac{\pi}{6}\text{ rad}", r"30^\circ", True)),
    *((r"30^\circ", r"\frac{\pi}{3}", False), (r"2\sqrt{2}\text{ km}", r"2000\sqrt{2}\text{ m}", True)),
    *(("5'6''", "5.5 ft", True), ("5 ft 14 in", "74 in", False)),  # nobody writes so many inches
    *((r"2\text{ hours and }30\text{ minutes}", "2h 30m", True), ("30 min 2 hours", "150 min", False)),
    *(("12 dollars and 50 cents", r"\$12.50", True), (r"30^\circ 15'", r"30.25^\circ", True)),
    *((r"4\text{ m north}", "400 cm north", True), (r"5\,\mu\text{F}", r"5\times10^{-6}\text{ F}", True)),
    (r"8.3\ \mathrm{J/(mol\cdot K)}", r"8.3\ \mathrm{J\,mol^{-1}\,K^{-1}}", True),
]
READ_OVER = [
    *(("8_8", "8", False), ("12_{n}", "12", False), ("8_8", "8_{8}", True), (r"\log_2 8", "3", True)),
    *(("P(1+r)^T", "P(1+r)", False), ("3^{T}-1", "2", False), ("A^T", "A", False), ("v^T w", "vw", False)),
    *((r"\{x^2 : x>2\}", r"(2,\infty)", False), (r"\{x\in\mathbb{Z}: -2\le x\le 3\}", "[-2,3]", False)),
    *((r"\{(x,y): x>0\}", r"(0,\infty)", False), (r"\{2x\mid x=5\}", r"\{5\}", False)),
    *((r"\{y : x>2\}", r"(2,\infty)", False), (r"\{2k: k\in\mathbb{Z}\}", r"\{3k: k\in\mathbb{Z}\}", False)),
    *((r"p \land q", r"p \lor q", False), ("x>1 and y>2", "x>1 or y>2", False), (r"A \land B", "AB", False)),
    *((r"x^n+x^{n-1}+\cdots+1", "x^n+x^{n-1}+1", False), (r"2+4+\ldots+100", "106", False)),
    *((r"42\ldots", "42", False), ("q", r"p \Rightarrow q", False), ("P(1+r)^T", "P(r+1)^{T}", True)),
    *((r"\{x\in\mathbb{R} : x>2\}", r"(2,\infty)", True), (r"\{x \mid x=5\}", r"\{5\}", True)),
    *(("x=1 or x=2", "1,2", True), ("x=1 and y=2", "x=1, y=2", True), (r"2x=4 \Rightarrow x=2", "2", True)),
    *((r"x_1+\dots+x_n", r"x_1+\ldots+x_n", True), ("x<1 or x>3", r"(-\infty,1)\cup(3,\infty)", True)),
    *((r"\{x | x>2\}", "x>2", True), (r"x\in(2,3)", "(2,3)", True), (r"\therefore x=2", "2", True)),
]
"""Signs that change what is meant, which the library, or a reading by parts, goes over."""
DROPPED = [
    *(("a=b=c", "a=d=c", False), ("a=b=c", "c=a=b", True), ("x=y=2", "2", True), ("x=y=1, z=2", "x=1, z=2", False)),
    *(("x=y=1, z=2", "(1,1,2)", True), (r"a_1=a_2=\dots=a_n", r"a_1=\cdots=a_n", True)),
    *((r"\frac{x-1}{2}=\frac{y}{3}=z", r"\frac{x-1}{2}=z", False), (r"\frac{x-1}{2}=\frac{y}{3}=z", "z", False)),
    (r"\frac{x-1}{2}=\frac{y}{3}=z", r"\frac{1-x}{-2}=\frac{y}{3}=z", True),
    *((r"A=\pi r^2=25\pi", r"A=25\pi", True), (r"P=\frac{2}{4}=\frac12", r"P=\frac{3}{6}=0.5", True)),
    *((r"\frac{du}{dt}", r"\frac{dv}{dt}", False), (r"-\frac{d\Phi}{dt}", r"\frac{d\Phi}{dt}", False)),
    *((r"\frac{dE}{dt}", "0", False), (r"\frac{dy}{dx}+2y=x", r"\frac{dy}{dx}=x-2y", True)),
    *((r"\frac{d}{dx}x^2", "2x", True), (r"\sum_{i=1}^n x_i", r"\sum_{k=1}^n x_i", False)),
    *((r"\sum_{i=1}^n a_i", r"\sum_{j=1}^n a_j", True), (r"\sum_{i=1}^n\sum_{j=1}^n a_{ij}", r"n^2a_{ij}", False)),
    *((r"\vec a\times\vec b", r"\vec a\cdot\vec b", False), (r"\vec a\times\vec b", r"-\vec b\times\vec a", True)),
    (r"\vec a\times(\vec b\times\vec c)", r"(\vec a\times\vec b)\times\vec c", False),
    *((r"\nabla\times F", r"\nabla\cdot F", False), (r"A\times B", r"B\times A", False), (r"I\times R", "IR", True)),
    *((r"f^{-1}(x)", r"\frac{1}{f(x)}", False), ("x^{-1}(x+1)", r"\frac{x+1}{x}", True), ("3(4)", "7", False)),
    *((r"5-(2)(\frac{1}{2})", "4", True), ("-x=4", "4", False), ("e^x=2", "2", False), ("x+y=4", "4", True)),
    *((r"\pm1\pm\sqrt2", r"1+\sqrt2,1-\sqrt2,-1+\sqrt2,-1-\sqrt2", True), ("5!=120", r"5\ne120", False)),
    (r"(1\pm\sqrt2,3\pm\sqrt2)", r"(1+\sqrt2,3+\sqrt2),(1-\sqrt2,3-\sqrt2)", True),
    *(("x_1!=5", r"x_1\ne5", True), ("5<7", "3<4", False), (r"{10\choose 3}\cdot2", "240", True)),
    *(("x_1=1, x_2=2", "x_1=2, x_2=1", False), (r"\begin{aligned}x&=1\\y&=2\end{aligned}", "x=1,y=2", True)),
    *((r"\begin{aligned}y&=(x+1)^2\\&=x^2+2x+1\end{aligned}", "x^2+2x+1", True), ("one and a half", "1.5", True)),
    *((r"5\text{ out of }6", "5", False), ("I only", "I", True)),
]
"""What the library or a reading by parts drops: sides of chains, derivatives, indices, the order of vectors."""
NOT_SEVEN = [
    *(r"\not=7", r"\not\approx 7", "=/=7", "7 excluding", "7 doubled", r"\text{reject } 7", r"7 \text{ (extraneous)}"),
    *(r"7\text{ is excluded}", r"7\text{ onwards}", r"7\text{ infinitely often}", r"\text{everything besides }7"),
    *(r"\text{any integer starting from }7", r"\text{divisible by }7", r"\text{the product of }7"),
    *(r"\text{ends in }7", r"\text{sum of first }7\text{ terms}", r"\text{circle of radius }7"),
]
STRUCK = [
    *((answer, "7", False) for answer in NOT_SEVEN),
    *((r"x\not=7", "x=7", False), (r"x\not=7", r"x\ne 7", True), (r"x\not<7", r"x\ge 7", True)),
    *((r"x\not\ge 7", "x<7", True), (r"x\not<7", "x<7", False), ("~~17~~", "17", False), ("17 ~~16~~", "17", False)),
    *(("~~17~~ 18", "17", False), (r"17~~\text{cm}", "17~cm", True), ("１２", "12", True), ("－7．5", "-7.5", True)),
    *(("５％", "5%", True), ("（１，２）", "(1,2)", True)),
]


def test_last_boxed():
    for text, content in [
        *((r"\boxed{42}", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}")),
        *((r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed {7}", "7"), (r"\fbox{3}", "3")),
        (r"\boxed{1} \boxed{2", "1"),  # an unclosed box does not count
        *((r"{\boxed{a{b}c}", "a{b}c"), (r"\boxed{}", ""), ("no box", None), ("}}}{", None)),
    ]:
        assert last_boxed(text) == content, text
    start = time.process_time()
    assert last_boxed(r"\boxed{" * 500_000) is None
    assert time.process_time() - start < 10, "half a million unclosed boxes are read once"


def test_find_answer():
    for turns, answer, answers, well_formed in [
        (["call", r"so <answer>\boxed{4}</answer>"], "4", 1, True),
        ([r"<answer>\boxed{4}</answer>", "call"], None, 1, True),  # the answer must be in the last turn
        ([r"<answer>\boxed{4}</answer><answer>\boxed{5}</answer>"], "5", 2, True),  # the last one counts
        *(([r"<answer>\boxed{4}"], None, 0, False), ([r"\boxed{4}</answer>"], None, 0, False)),
        ([r"<answer><answer>\boxed{4}</answer>"], "4", 1, False),
        ([r"<answer>\boxed{4}</answer></answer>"], "4", 1, False),
        (["<answer>4</answer>"], None, 1, True),  # strict: needs a box
        *(([r"\boxed{4}"], None, 0, True), ([r"<answer>\boxed{ }</answer>"], None, 1, True), ([], None, 0, True)),
        ([r"<think><answer>\boxed{5}</answer></think>"], None, 1, True),  # a thought is no answer
        ([r"<think><answer>\boxed{5}</answer></think><answer>\boxed{6}</answer>"], "6", 2, True),
    ]:
        result = find_answer(turns)
        assert (result.answer, result.answers, result.well_formed) == (answer, answers, well_formed)
        if any("think" in turn for turn in turns):
            assert find_answer(turns, lenient=True) == result
        renamed = [turn.replace("answer>", "final>") for turn in turns]
        assert find_answer(renamed, tag="final") == result
    for text, answer in [  # a bullet is no sign, several are no answer
        *(("The answer is:\n\n- 5", "5"), ("**Final answer:**\n* $x = 5$", "x = 5"), ("The answer is:\n• 5", "5")),
        *(("The answer is:\n-5", "-5"), ("The answer is: - 5", "- 5"), ("The answer is:\n- 5\n- 6", None)),
        *((r"\boxed{3} <answer>\boxed{4}</answer>", "4"), ("<answer>4</answer>", "4")),
    ]:
        assert find_answer([text], lenient=True).answer == answer, text


def test_lenient_takes_the_answer_and_nothing_else_and_strict_takes_boxes_in_blocks_only():
    """What is taken is graded like the answer alone, where a policy ends in a sentence and a reference is the value."""
    wrong = []
    for row in map(json.loads, SENTENCES.read_text(encoding="utf-8").splitlines()):
        answer, strict = (find_answer([row["text"]], lenient=lenient).answer for lenient in (True, False))
        value = re.sub(r"\\?\$| (?:apples|hours|cm)\b", "", row["answer"] or "")
        boxed = strict is None or rf"<answer>\boxed{{{strict}}}</answer>" in row["text"]
        if answer != row["answer"] or not boxed or (answer and decide(answer, value) is False):
            wrong.append((row, answer, strict))
    assert wrong == []


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


def test_numbers_are_read_and_huge_ones_compared_without_expanding_them():
    for text, value in [
        *(("42", 42), ("+042", 42), ("-0", 0), ("42.00", 42), ("4.2", Fraction(21, 5)), (".5", Fraction(1, 2))),
        *(("1e-05", Fraction(1, 100_000)), ("1.5e3", 1500), ("1.5E+3", 1500), (r"4.5 \times 10^{33}", 45 * 10**32)),
        *((r"4.5\cdot10^{-2}", Fraction(45, 1000)), ("4.5*10**2", 450), ("1.5 x 10^3", 1500), ("10^{5}", 100_000)),
        *(("-10^5", -100_000), ("-1./3", Fraction(-1, 3)), (r"\tfrac{-1.5}{3}", Fraction(-1, 2))),
        *((r"\dfrac12", Fraction(1, 2)), ("1 1/2", Fraction(3, 2)), (r"-2\frac{1}{2}", Fraction(-5, 2))),
        *(("11/2", Fraction(11, 2)), ("1,234,567.5", Fraction(2_469_135, 2)), (r"12\,000", 12_000), ("e-3", None)),
        *(("e3", None), ("3 e - 2", None), ("2e", None), ("0x1e3", None), ("1/0", None), (".", None), ("x", None)),
        *(("", None), ("٤٢", None)),
    ]:
        assert read_number(normalize(text)) == value, text
    for answer, gold, agree in [
        *(("1e999999999999", "10e999999999998", True), ("1e999999999999", "1e999999999998", False)),
        *(("-1e999999999999", "1e999999999999", False), ("1e999999999999", "1/3", False)),
        *(("1e-999999999999", "0", False), ("1" + "0" * 100_000, "1e100000", True)),
    ]:
        assert decide(answer, gold) is agree
    assert read_number(r"10^{" + "9" * 30 + "}") is None
    assert read_number("1/" + "4".zfill(3998)) == Fraction(1, 4) and read_number("1/" + "4".zfill(3999)) is None


def test_decide_and_for_algebra():
    """Beside the pairs of the corpora and of docs/rewards.md; None is left to the library: expressions, without what
    forms decide."""
    for answer, gold, agree in [
        *(("42", "42.0", True), ("1{,}234", "1234", True)),
        ("1,2", "12", False),  # a list and not a thousands separator
        ("1,234 567", "1234567", False),  # two signs between the groups
        ("1234,567", "1234567", False),  # a group that is too long
        *(("12.5,678", "12.5678", False), ("$18$", "18", True), ("18.", "18", True), ("−3", "-3", True)),
        *((r"\frac{6}{4}", "1.5", True), ("1/3", r"\dfrac{2}{6}", True), ("-1/3", "1/3", False)),
        *(("1/0", "1", None), ("9" * 6000, "9" * 6000, True), ("9" * 6000, "9" * 5999, False)),
        *((r"x^2 + 1", "1 + x^2", None), (r"\left( 1, 2 \right)", "(1,2)", True), ("12 apples", "12", True)),
        *(("1 1/2", r"1\frac{1}{2}", True), ("e-3", "1e-3", None)),
        ("A", "a", None),  # two variables
        *((r"\dfrac{x}{2}", r"\tfrac{x}{2}", True), ("x_{12}", "x_12", True), ("x_1 2", "x_12", None)),
        *((r"x\leq 3", r"x \le 3", True), ("math.sqrt(3)/np.pi", r"\sqrt{3}/\pi", True), ("3-2", "x=1", False)),
        *((r"50\%", "1/2", True), ("50%", "5", False), ("100 km/h", "100", True)),
        (r"\{x | x=1 \text{ or } x>3\}", r"\{1\}", None),  # not the set of its equations alone
        *((r"\{x \mid x=1 \text{ or } x=2\}", r"\{1,2\}", True), ("5=x", "x=5", True), (r"\frac12=x", "0.5", True)),
        *(("5=y", "x=5", False), ("5=x", "-5", False), ("np.log(2)", r"\ln(2)", True)),
        (r"\begin{cases}1, & x>0\\0, & \text{else}\end{cases}", r"\begin{cases}1 & x>0\\0 & x<1\end{cases}", True),
        ("2024-12", "2012", False),  # a month
        ("5/6/2024", "6 May 2024", False),  # or the 5th of June
        *(("3:45", "3:45 pm", True), (r"7\text{ rejected items}", "7", True), (r"\text{radius }7", "7", True)),
    ]:
        assert decide(answer, gold) is agree, answer
    assert decide("2 cm", r"2.0\text{ cm}", strict=True) is True and normalize("sqrt(x") == r"\sqrt{x}"
    assert for_algebra(r"2\pi N", r"2\pi") is True
    assert for_algebra(r"2\pi N", r"3\pi V") == ("same", r"2\pi", r"3\pi")
    assert for_algebra(r"1.5\pi\%", "x", strict=True) == ("same", r"\frac{\frac{15}{10}\pi}{100}", "x")
    assert for_algebra(r"(1, x+x)", "(1, 2x)") == ("same", "x+x", "2x")
    assert for_algebra(r"(2, x+x)", "(1, 2x)") is False
    assert for_algebra(r"\{1, x+x\}", r"\{2x, 1\}") == ("same", "x+x", "2x")
    assert for_algebra("M+m", "2m") == ("same", "q+m", "2m")  # the library takes M for m
    assert for_algebra(r"1+0.\overline{3}", r"x") == ("same", r"1+\frac{1}{3}", "x")
    assert for_algebra(r"12_3+1_3", r"x") == ("same", "5+1", "x")


@pytest.mark.parametrize("text", NASTY)
def test_reading_is_linear(text):
    """No pattern that reads a policy's text backtracks over it, nor the reading of forms."""

    def read(repeated):
        for piece in (repeated, f"7{repeated}x", rf"\boxed{{1}}{repeated}<answer>"):
            find_answer([piece], lenient=True)
            if decide(piece, "1/3") is None:
                for_algebra(piece, "1/3", strict=True)

    def form(repeated):
        for _ in range(3):
            decide(repeated, "\\{1,2\\}"), decide("7", repeated)

    assert_linear(read, text, 500 * len(text))
    assert_linear(form, text, 350, slack_s=0.05)


def test_two_units_are_converted_or_have_nothing_in_common():
    """By definition of the units. By default the same quantity is accepted too; `strict` takes no other one."""
    assert measure("h^-1·km") == (Fraction(5, 18), (("m", 1), ("s", -1))) and measure("apple") is None
    assert measure("mL") == measure("cm^3") == (Fraction(1, 10**6), (("m", 3),))
    pairs = [pair for a, b, _ in CONVERTED for pair in ((a, b), (b, a))]
    expected = [equal for *_, equal in CONVERTED for _ in range(2)]
    with closing(Verifier(workers=1, strict=True)) as pool:
        assert [verdict == "correct" for verdict in pool.compare(pairs)] == expected
    with closing(Verifier(workers=1)) as pool:
        assert set(pool.compare([pair for pair, equal in zip(pairs, expected, strict=True) if equal])) == {"correct"}


@pytest.mark.parametrize("pairs", [READ_OVER, DROPPED, STRUCK], ids=["read over", "dropped", "struck"])
@pytest.mark.parametrize("strict", [False, True])
def test_signs_that_change_what_is_meant(pairs, strict):
    """By default and in `strict`, with algebra where the forms do not decide."""
    with closing(Verifier(workers=1, strict=strict)) as pool:
        verdicts = pool.compare([pair[:2] for pair in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if (verdict == "correct") != pair[2]] == []

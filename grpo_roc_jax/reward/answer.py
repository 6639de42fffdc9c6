r"""Finds the final answer in the policy's own text.

The input is text decoded from policy tokens only, so a tool that prints an answer block changes nothing. Thoughts are
removed first: what a policy tries out while it thinks is no answer. Every pattern takes linear time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_roc_jax.checks import expect
from grpo_roc_jax.types import Trajectory

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NAMES = "think|thinking|thought|thoughts|reason|reasoning|seed:think"
_THOUGHT = re.compile(
    rf"(?P<open><(?:{_NAMES})>|\[THINK\]|<\|begin_of_thought\|>|<\|START_THINKING\|>|◁think▷|<\|channel>thought"
    r"|<\|channel\|>(?:analysis|commentary)<\|message\|>)"
    rf"|(?P<close></(?:{_NAMES})>|\[/THINK\]|<\|end_of_thought\|>|<\|END_THINKING\|>|◁/think▷|<channel\|>"
    r"|<\|channel\|>final<\|message\|>)"
)
"""Marks of thoughts of the model families: Qwen, DeepSeek, GLM, this project (`<reason>`), Seed, Magistral, Sky-T1,
Command A, Kimi, Gemma, gpt-oss."""


@dataclass(frozen=True)
class FoundAnswer:
    """The final answer, and the counts of the tags around it."""

    answer: str | None
    answers: int
    """Number of complete answer blocks over all turns."""
    well_formed: bool
    """Whether opening tags, closing tags and complete blocks are equal in number."""


def final_answer(trajectory: Trajectory, *, tag: str = "answer", lenient: bool = False) -> str | None:
    """The answer that a trajectory gives, as the built-in reward reads it; None without one.

    Args:
        trajectory: Whose turns have their texts, as those of a sampler or of a trace have.
        tag: See `find_answer`.
        lenient: See `find_answer`.
    """
    expect(trajectory, Trajectory, "trajectory", "a Trajectory; the answer in texts is find_answer([text]).answer")
    return find_answer([turn.text for turn in trajectory.turns], tag=tag, lenient=lenient).answer


def find_answer(turn_texts: Sequence[str], *, tag: str = "answer", lenient: bool = False) -> FoundAnswer:
    r"""The last `\boxed{}` of the last complete answer block in the last turn, with the tag counts of all turns.

    The last answer counts; the number of answers only affects rewards for format. A block in a closed thought is no
    answer.

    Args:
        turn_texts: Text that the policy wrote, one per turn, without observations.
        tag: Name of the tag around the answer.
        lenient: Also accepts, in this order, a block without a box, a box without a block, and the last sentence that
            says what the answer is (`The answer is 42.`, `**Final Answer:** 42`, `#### 42`).
    """
    opens = closes = pairs = 0
    for text in turn_texts:
        blocks, o, c = _blocks(text, tag)
        opens, closes, pairs = opens + o, closes + c, pairs + len(blocks)
    answer = None
    if turn_texts:
        blocks, *_ = _blocks(without_thoughts(turn_texts[-1], tag=tag), tag)
        answer = last_boxed(blocks[-1]) if blocks else None
        if lenient and answer is None:
            answer = _lenient_answer(turn_texts[-1], blocks, tag)
    answer = answer.strip() if answer else None
    return FoundAnswer(answer or None, pairs, opens == closes == pairs)


def _blocks(text: str, tag: str) -> tuple[list[str], int, int]:
    """(complete blocks, opening tags, closing tags); a block is an opening tag directly followed by a closing one."""
    blocks: list[str] = []
    opens = closes = 0
    start = -1
    for match in re.finditer(rf"<(/?){tag}>", text):
        if match.group(1):
            closes += 1
            if start >= 0:
                blocks.append(text[start : match.start()])
            start = -1
        else:
            opens += 1
            start = match.end()
    return blocks, opens, closes


def without_thoughts(text: str, *, tag: str = "answer", unclosed: bool = False) -> str:
    """A turn without its closed thoughts, the first of which the prompt may have opened.

    Args:
        tag: Name of the tag around the answer, which is no thought whatever it is called.
        unclosed: Leave out what follows a thought that is never closed, too.
    """
    parts: list[str] = []
    start, opened = 0, -1
    for match in _THOUGHT.finditer(text):
        if match.group().strip("</>") == tag:
            continue
        if match.group("close"):
            # A closing mark without an opening one ends a thought that began in the prompt, or goes on with one
            start, opened = match.end(), -1
        elif opened < 0:
            parts.append(text[start : match.start()])
            start = opened = match.start()
    if opened < 0 or not unclosed:
        parts.append(text[start:])
    return "".join(parts)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{}` or `\fbox{}` with balanced braces, in linear time; None without one."""
    stack: list[int] = []  # start of the content for a box, -1 for a plain brace
    best = (-1, -1)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            stack.append(-1)
        elif token == "}":
            start = stack.pop() if stack else -1
            if start > best[0]:
                best = (start, match.start())
        elif token[-1] == "{" and len(token) > 2:
            stack.append(match.end())
    return text[best[0] : best[1]] if best[0] >= 0 else None


# ---- last sentences ------------------------------------------------------------------------------------------------

LAST_CHARS = 600
"""What may follow a sentence that says the answer; only the last sentences of a text count."""
LONGEST_ANSWER = 400
"""Characters of an answer in a sentence."""
_NEAR = {"result": 80, "results": 80, "solution": 80, "solutions": 80}
"""The same for words that speak of parts of a problem as well."""
_CANDIDATES = 8
"""Sentences about the answer that are looked at, from the last one."""

_MARKUP = r"(?:\*\*|__|\*|`)"
_ABOUT = (
    r"(?:\s(?:to|for|of|in|as)\s[^.:?!=\n]{1,60}?|\s\([^()\n]{1,40}\)|,\s(?:after|when|in)\s[^,.:?!=\n]{1,40},"
    r"|\shere|,?\s(?:then|therefore|thus|hence),?)?"
)
_ADVERB = r"(?:therefore|thus|then|hence|simply|just|exactly|indeed|now|clearly|obviously|precisely)"
_VERB = (
    r"(?:is|are|was|equals|must\sbe|should\sbe|would\sbe|will\sbe|comes\s(?:out\s)?to)\b"
    rf"(?:,?\s{{1,4}}{_ADVERB}\b,?(?=\s{{1,4}}[-+−*`$(\\\[{{]{{0,4}}[0-9A-Za-z]))?\s{{0,4}}[:=]?"
)
_SENTENCE = re.compile(
    rf"(?:\b|(?<=_))(?P<what>answers?|ans\b\.?|results?|solutions?|correct\s(?:option|choice))"
    rf"{_MARKUP}?{_ABOUT}\s{{0,4}}{_MARKUP}?\s{{0,4}}"
    rf"(?P<says>(?<![A-Za-z]){_VERB}|[:=→](?!=)|(?<=\.)\s"
    rf"|(?<=final\sanswer\s)of\s(?=[-+−*$\\(]{{0,4}}[0-9]))\s{{0,4}}{_MARKUP}?[ \t]{{0,8}}",
    re.IGNORECASE,
)
_HEADING = re.compile(
    rf"^[#\s>*_]{{0,12}}(?:the\s)?(?:final\s)?answers?\s{{0,4}}{_MARKUP}{{0,2}}:?{_MARKUP}{{0,2}}[ \t]{{0,8}}$",
    re.IGNORECASE | re.MULTILINE,
)
_HASHES = re.compile(
    r"^[ \t]{0,4}####[ \t]{0,4}(?P<value>[-+−]?[ ]?(?:\\?[$£€₹¥]|\\\()?[ ]?[-+−]?"
    r"(?:[0-9]|\.[0-9]|\\(?:[dt]?frac|sqrt|pi))[^\n]{0,120})$",
    re.MULTILINE,
)
_NUMBERED = re.compile(r"[0-9]{1,3}[.):]\s{1,8}[A-Za-z*]")
"""A heading such as `#### 2. Add`, which is no answer."""
_REVERSED = re.compile(
    r"(?<![^\s(*])(?P<value>\$[^$\n]{1,60}\$|\\\([^\n]{1,60}?\\\)|[-+]?\\?[$£€]?[0-9][\w.,/^%+*-]{0,40}(?:\s[a-z]{1,12})?"
    r"|\([A-J]\)|[A-J])(?:\*\*)?\s(?:is|must\sbe)\s(?:the|our|my)\s(?:final\s|correct\s)?answer\b"
)
_BEFORE = re.compile(
    r"\b(?:(?:if|suppose|supposing|assume|assuming|whether|unless|until|imagine)(?:\s[\w']+){0,3}?"
    r"|(?:(?<!no\s)doubt|deny|wrong|false|untrue|incorrect|impossible)\sthat|(?:might|may|could)\s(?:think|say|guess|expect)(?:\sthat)?"
    r"|previous|old|wrong|incorrect|partial|intermediate|no|first|initial|not|his|her|their"
    r"|[a-z]{1,20}['’]s)\s(?:the\s)?(?:final\s)?$",
    re.IGNORECASE,
)
"""What stands before `answer` where a sentence does not say what it is."""
_NO_VALUE = re.compile(
    r"(?:not|never|neither|no longer|unknown|unclear|uncertain|unsure|undecided|unavailable|missing|impossible to|"
    r"beyond|outside|to be|left (?:to|as)|yet to|still|as follows|given (?:by|in|above|below)|found (?:by|in|from)|"
    r"obtained|something|somewhere|one of|among|in (?:the|a|this|that|terms)|on the|at the|that (?:we|it|there|the|i)|"
    r"what|which|whatever|based|needed|required|supposed|expected|likely|probably not|going to|coming|sorry|hard to|"
    r"difficult to|i (?:do|can|am|have)|to [a-z]+|simply the|somehow|maybe not)\b|[a-z]+n['’]t\b",
    re.IGNORECASE,
)
"""A beginning that is no answer: a denial, a refusal, or the beginning of a remark."""
_REMARK = re.compile(
    r"(?:completely |clearly |indeed |now |therefore |then )?(?:correct|right|wrong|incorrect|clear|obvious|simple|"
    r"easy|hard|difficult|trivial|below|above|here|shown|done|ready|good|fine|verified|confirmed|boxed)",
    re.IGNORECASE,
)
"""A remark about the answer after `is`."""
_RETRACTED = re.compile(
    r"\b(?:wait|hold on|scratch that|correction|oops|no, (?:that|this|it)|i made (?:a|an) (?:mistake|error)|"
    r"(?:that|this|it)(?:['’]s| is| was| seems| looks) (?:wrong|incorrect|not (?:right|correct))|"
    r"let me (?:redo|reconsider|recompute|recalculate|rethink|try again|start over)|"
    r"(?:that|this) (?:can['’]t|cannot) be)\b",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r",?\s(?:since|because|given\sthat|i\.e\.|meaning\sthat|assuming|provided\sthat|where\swe|which|obtained\sby)\b"
    r"|,\s(?:as|so|but|where|and\s(?:so|thus|this|that)|thus|hence|therefore|meaning|obtained|rounded|not)\b"
    r"|\sas\s(?:required|desired|requested|expected|needed|stated|claimed|shown)\b|\s[—–]\s|\s-\s(?=[A-Za-z]{3})"
    r"|\s\((?:see|as|since|because|rounded|approximately|from|i\.e\.|which)\b",
    re.IGNORECASE,
)
_CONDITION = re.compile(r"\s(?:if|unless)\s", re.IGNORECASE)
"""`42 if x were 3` is no answer."""
_END = re.compile(r"[.!](?=[\s*_`)\"'<]|$)|\n|<(?=[/|]?[A-Za-z|][^<>\n]{0,40}>)|[?。！？]")
_FORMULA = re.compile(
    r"\$\$(.{1,600}?)\$\$|\\\[(.{1,600}?)\\\]|\\\((.{1,300}?)\\\)|\$(?!\s)([^$\n]{1,300}?)(?<![\s\\])\$(?![0-9])",
    re.DOTALL,
)
_ALONE = re.compile(
    r"(?:\*\*|`)?(?:\$+\s?([^$\n]{1,120}?)\s?\$+|\\[(\[]\s?([^\n]{1,120}?)\s?\\[)\]]"
    r"|([-+−]?\\?[$£€]?[0-9][0-9.,/]{0,40}(?:\s?%|\s[a-z]{1,12})?|\(?[A-J]\)?))\.?(?:\*\*|`)?"
)
_TAGS = re.compile(r"</?(?:b|i|u|p|em|strong|span|br)\s?/?>", re.IGNORECASE)
_BRACKETED = re.compile(r"\[(/?)(?:final )?answer\](?!\()", re.IGNORECASE)
"""[ANSWER]42[/ANSWER]"""
_IN_TEXT = re.compile(r"\\text(?:bf|it|rm|sf)?\{([^{}\n]{0,40}\banswer\b[^{}\n]{0,20})\}", re.IGNORECASE)
r"""\text{The answer is } 42"""
_PICTURES = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff\ufe0f]+")
_GAP = re.compile(r"\s{1,40}")
_BULLET, _NEXT_BULLET = re.compile(r"[-*+•]\s{1,8}"), re.compile(r"\s{0,40}[-*+•]\s")


def _lenient_answer(text: str, blocks: list[str], tag: str) -> str | None:
    """An answer without a box in a block; the last turn's text comes with its thoughts."""
    if blocks:
        return _stated(blocks[-1]) or blocks[-1]
    text = _TAGS.sub("", without_thoughts(text, tag=tag, unclosed=True))
    text = _BRACKETED.sub(lambda match: "\n" if match[1] else "\nAnswer: ", _IN_TEXT.sub(r"\1", text))
    return last_boxed(text) or _stated(text) or _alone(text)


def _stated(text: str) -> str | None:
    """What the last sentence about the answer says, or the last line of `####`."""
    matches = [(match.end(), match) for pattern in (_SENTENCE, _HEADING, _REVERSED) for match in pattern.finditer(text)]
    matches += [
        (match.start("value"), match) for match in _HASHES.finditer(text) if not _NUMBERED.match(match["value"])
    ]
    for start, match in sorted(matches, key=lambda pair: pair[0])[: -1 - _CANDIDATES : -1]:
        before = text[max(0, match.start() - 60) : match.start()].rpartition("\n")[2]
        if match.re is _SENTENCE and _BEFORE.search(before):
            continue
        if match.re is _REVERSED:
            question = re.match(r"[^.!?\n]{0,80}\?", text[start : start + 99]) or _BEFORE.search(f"{before} ")
            value, end = (
                (None if question else match["value"].strip("$").removeprefix("\\(").removesuffix("\\)")),
                start,
            )
        else:
            value, end = _value(text, start)
        if value is None or _RETRACTED.search(text[end : end + 2000]):
            return None
        if match.re is _SENTENCE and match["says"][:1].isalpha() and _REMARK.fullmatch(value):
            return None
        at_line_start = not re.search(r"\w", before)
        far = len(text) - end > (_NEAR.get(match["what"].lower(), LAST_CHARS) if match.re is _SENTENCE else LAST_CHARS)
        return None if far and not at_line_start else value
    return None


def _alone(text: str) -> str | None:
    """A whole reply that is a number, a formula, or the letter of a choice."""
    match = _ALONE.fullmatch(text.strip()) if len(text) < 200 else None
    return next((part for part in match.groups() if part), None) if match else None


def _value(text: str, start: int) -> tuple[str | None, int]:
    """(the answer from a position on, where its sentence ends).

    It ends with its sentence or clause, and stands in the next line if the rest of this one is empty, after a bullet or
    without one. None for a question, a denial, a remark about the answer, or several bullets.
    """
    if gap := _GAP.match(text, start):
        start = gap.end()
    line = text[text.rfind("\n", 0, start) + 1 : start].strip()
    bullet = _BULLET.match(text, start) if not line else None
    start = bullet.end() if bullet else start
    formula = _FORMULA.match(text, start)
    end = _END.search(text, formula.end() if formula else start)
    after = end.end() if end else len(text)
    if end is not None and end.group() in ("?", "？"):
        return None, after
    if (bullet or line == "*") and _NEXT_BULLET.match(text, after):
        return None, after  # a list
    value = text[start : end.start() if end else len(text)][:LONGEST_ANSWER]
    body, rest = (text[start : formula.end()], value[formula.end() - start :]) if formula else ("", value)
    if _CONDITION.search(rest):
        return None, after
    clause = _CLAUSE.search(rest)
    rest = rest[: clause.start()] if clause else rest
    if formula:
        inside = next(part for part in formula.groups() if part is not None).strip()
        unit = rest.strip(" *_`,;:.")
        body = f"{inside} {unit}".strip() if len(unit) < 60 else inside
    value = body or _PICTURES.sub("", rest).strip().strip('*`"“”:;, ').strip()
    if not formula and value.endswith("$") and "$" not in value.rstrip("$"):
        value = value.rstrip("$ ")  # of a formula that began before the sentence
    if len(value) > 2 and value[0] == value[-1] == "'":
        value = value[1:-1]
    if not value or value == r"\boxed{}" or _NO_VALUE.match(re.sub(r"[*_`]", "", value)):
        return None, after
    return value, after

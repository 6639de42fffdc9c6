r"""LaTeX, Markdown and plain text of an answer -> tokens without layout.

Nothing is cut from an answer before it has been read here. Spacing commands go first, then markup (`\boldsymbol`,
`\color`, `**`), so that `12\ \mathrm{cm}`, `**12** cm` and `12~cm` have
the same tokens. Linear in the length of the text.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from grpo_roc_jax.reward.words import names

# ---- characters ----------------------------------------------------------------------------------------------------

_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρσςτυφχψωϵϑϕϱΓΔΘΛΞΠΣΥΦΨΩ",
        names(
            """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma sigma tau upsilon phi chi psi
    omega epsilon theta phi rho Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
    """
        ),
        strict=True,
    )
)
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "•": r"\cdot ", "∗": "*", "÷": r"\div ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "≃": r"\approx ", "≅": r"\cong ", "≡": r"\equiv ", "∼": r"\sim ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset ", "√": r"\sqrt ", "±": r"\pm ", "∓": r"\mp ",
    "º": "°", "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"', "…": r"\ldots ", "⋯": r"\ldots ",
    "∠": r"\angle ", "△": r"\triangle ", "→": r"\to ", "⇒": r"\Rightarrow ", "∧": r"\land ", "∨": r"\lor ",
    "¬": r"\neg ", "∖": r"\setminus ", "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ",
    "∣": "|", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∂": r"\partial ", "ℏ": r"\hbar ", "µ": "μ", "％": "%", "，": ",",
    "；": ";", "：": ":", "（": "(", "）": ")", "＝": "=", "\u200b": "", "\ufeff": "", "\u200e": "", "\u2060": "",
}  # fmt: skip
_VULGAR = {
    "½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅖": "25", "⅗": "35", "⅘": "45", "⅙": "16",
    "⅚": "56", "⅛": "18", "⅜": "38", "⅝": "58", "⅞": "78",
}  # fmt: skip
_CHARACTERS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _GREEK.items() if sign != "μ"}
    | _SIGNS
    | {sign: rf"\frac{{{ratio[0]}}}{{{ratio[1]}}}" for sign, ratio in _VULGAR.items()}
)
_RAISED, _LOWERED = ("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n"), ("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SCRIPTS = re.compile(f"[{_RAISED[0]}]+|[{_LOWERED[0]}]+|(?:[0-9]\u0305)+")


def _script(match: re.Match) -> str:
    text = match.group()
    if text[-1] == "\u0305":
        return rf"\overline{{{text.replace(text[-1], '')}}}"
    mark, signs = ("^", _RAISED) if text[0] in _RAISED[0] else ("_", _LOWERED)
    return f"{mark}{{{text.translate(str.maketrans(*signs))}}}"


_OPENED = {
    **{name: rf"\{name}(" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "ln", "log")},
    **{short: rf"\{name}(" for name in ("arcsin", "arccos", "arctan") for short in (name, "a" + name[3:])},
    "sqrt": r"\sqrt{", "exp": "e^{", r"\exp": "e^{", "log10": r"\log_{10}(", "log2": r"\log_{2}(",
}  # fmt: skip
"""Python's functions -> what they open in LaTeX."""
_MODULE = r"(?:np|numpy|math|sympy|sp)\."
_NAMES = "|".join(sorted((name for name in _OPENED if name[0] != "\\"), key=len, reverse=True))
_CALL = re.compile(rf"(?<![A-Za-z\\])({_MODULE})?({_NAMES})\(|(\\exp)\s?(?:\\left)?\(|[()]")
_PI = re.compile(rf"(?<![A-Za-z\\])(?:{_MODULE})?pi(?![A-Za-z])")
_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt([0-9]++)")
_EXPONENT = re.compile(r"(?<![\w.\\])(?<!\^\{)([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![\w.^])")
_CLOCK_HALF = re.compile(r"(?<![A-Za-z])([apAP])\.\s?([mM])(?:\.|(?![A-Za-z]))")
_TAGS = re.compile(r"</?(?:b|i|u|strong|em|sub|sup|span|p|br|code|center)\s?/?>|`+", re.IGNORECASE)


def _from_python(text: str) -> str:
    """The text with calls of Python's functions written in LaTeX; unchanged if parentheses do not match."""
    parts, closing, last = [], [], 0
    for match in _CALL.finditer(text):
        token, name = match.group(), match.group(2) or match.group(3)
        if token == ")":
            if not closing:
                return text
            new = closing.pop()
        else:
            new = _OPENED[name] if name else "("
            if name == "log" and match.group(1):
                new = r"\ln("
            closing.append("}" if new[-1] == "{" else ")")
        parts += [text[last : match.start()], new]
        last = match.end()
    return text if closing else "".join([*parts, text[last:]])


# ---- tokens --------------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    r"""A number (digits, with dots between or before them), a name (letters), a `\command`, or a sign."""

    text: str
    gap: bool = False
    """A space came before it."""
    roman: bool = False
    r"""It is words, from `\text{}` or `\mathrm{}`, and not a product of variables."""

    @property
    def is_number(self) -> bool:
        return self.text[-1].isdecimal() and self.text.isascii()

    @property
    def is_name(self) -> bool:
        return self.text[0].isalpha()


_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<field>\\mathbb\s?(?:[A-Z]|\{\s?[A-Z]\s?\}))|\\(?P<env>(?:begin|end)\s?\{[A-Za-z]+\*?\})|\\(?P<command>[A-Za-z]+)\*?|\\(?P<escaped>.)"
    r"|(?P<number>[0-9]+(?:\.[0-9]+)*|\.[0-9]+(?:\.[0-9]+)*)|(?P<name>[^\W\d_]+)|(?P<sign><=|>=|!=|==|->|\*\*|\+/-|.)",
    re.DOTALL,
)
SPACES = {*",;:!> \n", "quad", "qquad", "thinspace", "medspace", "thickspace", "enspace", "space"}
SPACES |= {"hfill", "nobreakspace"}
_LAYOUT = set(names(
    """
    left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm displaystyle textstyle
    scriptstyle scriptscriptstyle limits nolimits nonumber notag noindent centering mathstrut strut allowbreak tiny
    small normalsize large Large LARGE huge Huge bf it sl sc bfseries itshape itdefault boldmath relax protect
    ensuremath mathop mathrel mathbin mathord mathopen mathclose hbox
    """
)) - {"hbox"}  # fmt: skip
_WORDS = set(names(
    """
    text textrm textbf textit textsf texttt textnormal textup textsc textmd emph mbox hbox mathrm operatorname mathsf
    mathtt
    """
))  # fmt: skip
_MARKUP = set(
    names(
        """
    boldsymbol mathbf bm pmb mathit mathnormal underline uline boxed fbox framebox ensuremath
    """
    )
)
_COLOURED = {"color": 1, "textcolor": 1, "colorbox": 1, "fcolorbox": 2, "href": 1, "raisebox": 1}
_ARGUMENT_DROPPED = {"hspace", "vspace", "label", "tag", "phantom", "hphantom", "vphantom", "kern", "ref"}
_DELIMITERS = {"left", "right", "middle"}
_SYNONYMS = {
    "leq": "le", "geq": "ge", "leqslant": "le", "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "dfrac": "frac",
    "tfrac": "frac", "cfrac": "frac", "sfrac": "frac", "nicefrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "rightarrow": "to", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]",
    "lvert": "|", "rvert": "|", "vert": "|", "lparen": "(", "rparen": ")", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "dotsb": "ldots", "textdegree": "degree", "deg": "degree", "varepsilon": "epsilon",
    "varphi": "phi", "vartheta": "theta", "varrho": "rho", "simeq": "approx", "thickapprox": "approx",
    "approxeq": "approx", "doteq": "approx", "thicksim": "sim", "wedge": "land", "vee": "lor", "pounds": "£",
    "textsterling": "£", "euro": "€", "texteuro": "€", "yen": "¥", "textyen": "¥", "textdollar": "$", "rupee": "₹",
    "cent": "¢", "textcent": "¢", "ast": "*", "star": "*", "backslash": "setminus", "colon": ":", "prime": "'",
    "overbar": "overline", "lcub": "{", "rcub": "}", "inf": "infty", "N": "mathbbN", "Q": "mathbbQ", "R": "mathbbR",
    "Z": "mathbbZ", "reals": "mathbbR", "mathds": "mathbb", "iff": "Leftrightarrow",
}  # fmt: skip
_FUNCTIONS = set(
    names(
        """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp gcd max min det
    """
    )
)
_BARE = {name: name for name in _FUNCTIONS - {"max", "min", "det", "sec"}}
_BARE |= {name: name for name in _GREEK.values() if len(name) > 2} | {"infinity": "infty", "pi": "pi", "sqrt": "sqrt"}
"""Names of plain text that stand for commands; `5 min` and `5 sec` are times."""
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, "^": 1, "_": 1}
_ARGUMENTS |= {
    rf"\{name}": 1
    for name in names(
        """
    overline bar dot ddot vec hat widehat tilde overrightarrow
    """
    )
}
ENVIRONMENT = re.compile(r"\\(?:begin|end)\{([A-Za-z]+)\}")


_DOLLAR = re.compile(r"(?<!\\)\$")
_PRICE = re.compile(r"(?<!\\)\$(?=\s*[0-9.])")


_SKIPS = re.compile(r"\\(?:kern|mkern|hskip|mskip)\s{0,4}-?[0-9.]{1,9}\s?(?:pt|em|ex|mu|cm|mm|in|px)\b")


def tokenize(text: str) -> list[Token]:
    """The tokens of a text, without spacing, markup and delimiters of formulas."""
    text = _SKIPS.sub(r"\\ ", _SCRIPTS.sub(_script, text).translate(_CHARACTERS))
    if len(_DOLLAR.findall(text)) == 1:  # delimiters of a formula come in pairs
        text = _PRICE.sub(r"\\$", text)
    text = _from_python(_CLOCK_HALF.sub(r"\1\2", _TAGS.sub("", text)))
    text = _EXPONENT.sub(r"\1\\times10^{\2}", _ROOT.sub(r"\\sqrt{\1}", _PI.sub(r"\\pi ", text)))
    return _braced(_Cleaner(text).tokens)


class _Cleaner:
    """One pass over a text: emits tokens, and drops what is layout."""

    def __init__(self, text: str) -> None:
        self.tokens: list[Token] = []
        self.gap = self.roman = self.bold = False
        self.groups: list[tuple[str, bool, bool]] = []
        """Of each open group: what to emit at its end ("" for markup), whether text was roman before it, and in it."""
        self.awaited: list[str] = []
        r"""What the next groups are, the last one first: of words, markup, or an argument to drop."""
        self.dropping = 0
        """Depth of groups inside a dropped argument."""
        self.delimiter = False
        for match in _TOKEN.finditer(text):
            self._read(match.lastgroup or "", match.group(match.lastgroup or 0), match)

    def emit(self, text: str, *, roman: bool | None = None) -> None:
        self.tokens.append(Token(text, self.gap, self.roman if roman is None else roman))
        self.gap = False

    def _read(self, kind: str, text: str, match: re.Match) -> None:
        if self.dropping:
            self.dropping += {"{": 1, "}": -1}.get(text, 0) if kind == "sign" else 0
            return
        delimiter, self.delimiter = self.delimiter, False
        if kind == "space" or (kind in ("command", "escaped") and text in SPACES):
            self.gap, self.delimiter = True, delimiter
        elif kind == "sign" and text in "{}":
            self._group(text)
        elif delimiter and text == ".":
            pass
        elif kind == "command":
            self._command(text)
        elif kind == "field":
            self.emit(rf"\mathbb{{{text.rstrip('} ')[-1]}}}", roman=False)
        elif kind == "env":
            self._environment(text)
        elif kind == "escaped":
            self._escaped(text)
        elif kind == "name":
            self._name(text)
        elif kind == "sign":
            self._sign(text, match)
        else:
            self.emit(text)
        if kind not in ("space", "command", "env") and not (kind == "sign" and text in "{}"):
            self.awaited.clear()

    def _group(self, text: str) -> None:
        if text == "}":
            end, self.roman, _ = self.groups.pop() if self.groups else ("", False, False)
            if end:
                self.emit(end, roman=False)
            return
        purpose = self.awaited.pop() if self.awaited else ""
        if purpose == "drop":
            self.dropping = 1
            return
        roman = self.roman or purpose == "words"
        self.groups.append(("" if purpose else "}", self.roman, roman))
        self.roman = roman
        if not purpose:
            self.emit("{", roman=False)

    def _command(self, name: str) -> None:
        self.awaited.clear()
        self.delimiter = name in _DELIMITERS
        if name in ("rm", "sf", "tt"):
            self.roman = True
        elif name in _WORDS:
            self.awaited = ["words"]
        elif name in _MARKUP:
            self.awaited = ["markup"]
        elif name in _COLOURED:
            self.awaited = ["markup", *["drop"] * _COLOURED[name]]
        elif name in _ARGUMENT_DROPPED:
            self.awaited, self.gap = ["drop"], True
        elif name not in _LAYOUT:
            name = _SYNONYMS.get(name, name)
            if name.startswith("mathbb") and name != "mathbb":
                self.emit(rf"\mathbb{{{name[-1]}}}", roman=False)
            else:
                self.emit("\\" + name if name[0].isalpha() or name in "{}" else name, roman=False)

    def _environment(self, text: str) -> None:
        command, _, name = text.rstrip("}").replace("*", "").partition("{")
        if name.endswith("matrix") or name in ("cases", "array"):
            self.emit(rf"\{command.strip()}{{{name}}}", roman=False)
            self.awaited = ["drop"] if (command.strip(), name) == ("begin", "array") else []

    def _escaped(self, sign: str) -> None:
        if sign == "$":
            self.emit(r"\$")
        elif sign in "%&#_'":
            self.emit(sign)
        elif sign not in '()[]"':
            self.emit("\\" + sign)

    def _name(self, text: str) -> None:
        command = _BARE.get(text) or _BARE.get(text.lower() if text.lower() == "infinity" else text)
        if command and not (self.roman and command not in _FUNCTIONS | {"pi", "infty"}):
            self.emit("\\" + command, roman=False)
        else:
            self.emit(text)

    def _sign(self, text: str, match: re.Match) -> None:
        if text == "~":
            self.gap = True
        elif text == "$":
            self.roman = not self.roman and bool(self.groups) and self.groups[-1][2]
        elif text in ("**", "__"):
            before = self.tokens[-1].text[-1] if self.tokens else ""
            after = match.string[match.end() : match.end() + 1]
            operand = before.isalnum() or (before != "" and before in ")}")
            apart = self.gap and self.tokens[-1].text[0] != "\\" if self.tokens else False
            if text == "**" and not self.bold and operand and after and apart == (after == " "):
                self.emit("^")  # Python's power, with spaces on both sides or on none
            else:
                self.bold = not self.bold
        elif text != '"':
            self.emit(
                {"<=": r"\le", ">=": r"\ge", "!=": r"\ne", "==": "=", "->": r"\to", "+/-": r"\pm"}.get(text, text)
            )


def _braced(tokens: Sequence[Token]) -> list[Token]:
    r"""Braces around every argument: `\frac12`, `x^10`, `2^(1/2)` and `\sqrt3` as they are meant; `^\circ` as °."""
    texts = [token.text for token in tokens] + ["", "", ""]
    out: list[Token] = []
    opened: list[tuple[str, int, str]] = []
    """For each open group: its end, and the arguments that its command still needs after it."""
    needed, command, signed = 0, "", False

    def wrap(token: Token) -> None:
        out.extend((Token("{"), token._replace(gap=False), Token("}")))

    skip = 0
    for index, token in enumerate(tokens):
        text = token.text
        if skip:
            skip -= 1
            continue
        if text == "^" and texts[index + 1] == r"\circ":
            out.append(Token("°"))
            skip = 1
        elif text == "^" and texts[index + 1 : index + 4] == ["{", r"\circ", "}"]:
            out.append(Token("°"))
            skip = 3
        elif text in ("\\degree", "\\circ") and not needed:
            out.append(Token("°"))
        elif text == r"\over" and opened and opened[-1][0] == "dropped":
            out[opened[-1][1]] = Token(r"\frac{")
            opened[-1] = ("}", 0, "")
            out.append(Token("}{"))
        elif (
            text == "{"
            and not needed
            and not (index and texts[index - 1][:1] == "\\" and texts[index - 1][-1:].isalpha())
        ):
            opened.append(("dropped", len(out), ""))
            out.append(Token(""))
        elif needed and text == "[" and command == r"\sqrt":
            out.append(token)
            opened.append(("]", needed, command))
            needed = 0
        elif needed and (text == "{" or (text == "(" and command in ("^", "_", r"\sqrt"))):
            out.append(Token("{", token.gap))
            opened.append(("}" if text == "{" else "converted", needed - 1, command))
            needed = 0
        elif needed and text in "+-" and command == "^" and not signed:
            out.extend((Token("{"), token))
            opened.append(("", needed - 1, command))
            needed, signed = 1, True
            continue
        elif needed and text in _ARGUMENTS and text not in "^_":
            out.extend((Token("{"), token))
            opened.append(("", needed - 1, command))
            needed, command = _ARGUMENTS[text], text
            continue
        elif needed and (token.is_number or token.is_name or (text[0] == "\\" and text[1:2].isalpha())):
            size = (
                1
                if (token.is_name and not token.roman) or (command in (r"\frac", r"\binom") and "." not in text)
                else len(text)
            )
            size = len(text) if text[0] == "\\" else size
            if signed:
                out.append(token)
            else:
                wrap(token._replace(text=text[:size]))
            needed -= 1
            rest = text[size:]
            if rest and needed:
                wrap(token._replace(text=rest[:1]))
                needed, rest = needed - 1, rest[1:]
            if rest:
                out.append(Token(rest, False, token.roman))
        else:
            needed = 0
            if text in _ARGUMENTS:
                out.append(token)
                needed, command = _ARGUMENTS[text], text
                continue
            if (
                text in ("x", "X")
                and texts[index + 1] == "10"
                and texts[index + 2] == "^"
                and index
                and tokens[index - 1].is_number
            ):
                token = Token(r"\times")
            if text in "([{":
                opened.append(({"(": ")", "[": "]", "{": "}"}[text], 0, ""))
            elif text in ")]}":
                while opened and opened[-1][0] in ("", ")", "]") and opened[-1][0] != text and text == "}":
                    opened.pop()
                if opened and opened[-1][0] in (text, {")": "converted", "}": "dropped"}.get(text, text)):
                    end, needed, command = opened.pop()
                    needed = 0 if end == "dropped" else needed
                    token = Token({"converted": "}", "dropped": ""}.get(end, text), token.gap)
            out.append(token)
        signed = False
        while not needed and opened and opened[-1][0] == "":
            out.append(Token("}"))
            _, needed, command = opened.pop()
    out.extend(Token("}") for end, *_ in opened if end in ("", "converted"))
    return [token for token in out if token.text]


# ---- brackets ------------------------------------------------------------------------------------------------------

OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"}
CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"}


def depths(tokens: Sequence[Token]) -> list[int]:
    """For each token the number of brackets and environments around it; brackets themselves count as outside."""
    levels, depth = [], 0
    for token in tokens:
        closes = token.text in CLOSING or token.text.startswith(r"\end{")
        depth = max(0, depth - closes)
        levels.append(depth)
        depth += token.text in OPENING or token.text.startswith(r"\begin{")
    return levels


def split(tokens: Sequence[Token], marks: Sequence[int]) -> list[list[Token]]:
    """The parts between the tokens at these positions."""
    bounds = [-1, *marks, len(tokens)]
    return [list(tokens[start + 1 : end]) for start, end in pairwise(bounds)]


def enclosed(tokens: Sequence[Token]) -> bool:
    """Whether the first token opens a bracket that the last one closes."""
    if len(tokens) < 2 or tokens[0].text not in OPENING or tokens[-1].text not in CLOSING:
        return False
    return 0 not in depths(tokens)[1:-1]


# ---- text ----------------------------------------------------------------------------------------------------------


def render(tokens: Sequence[Token]) -> str:
    """The tokens as LaTeX without spaces but those that keep numbers, words and commands apart."""
    parts: list[str] = []
    before = ""
    for token in tokens:
        text = token.text
        if token.roman and token.is_name and len(text) > 1:
            text = rf"\operatorname{{{text}}}" if text in ("lcm", "sgn", "tr", "rank") else rf"\text{{{text}}}"
        elif (before[:1] == "\\" and before[-1:].isalpha() and text[0].isalpha() and not before.endswith("}")) or (
            token.gap and before and before[-1].isdecimal() and text[0].isdecimal()
        ):
            parts.append(" ")
        parts.append(text)
        before = text
    return "".join(parts)

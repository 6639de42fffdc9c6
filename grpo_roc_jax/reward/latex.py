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
    "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∂": r"\partial ", "ℏ": r"\hbar ", "µ": "μ",
    "\u200b": "", "\ufeff": "", "\u200e": "", "\u2060": "",
}  # fmt: skip
_VULGAR = {
    "½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅖": "25", "⅗": "35", "⅘": "45", "⅙": "16",
    "⅚": "56", "⅛": "18", "⅜": "38", "⅝": "58", "⅞": "78",
}  # fmt: skip
_WIDE = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
"""Full-width forms of ASCII, as Chinese and Japanese texts have them."""
_CHARACTERS = str.maketrans(
    _WIDE
    | {sign: rf"\{name} " for sign, name in _GREEK.items() if sign != "μ"}
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
    r"|(?P<number>[0-9]+(?:\.[0-9]+)*|\.[0-9]+(?:\.[0-9]+)*)|(?P<name>[^\W\d_]+)|(?P<sign><=|>=|!=|=/=|==|->|\*\*|\+/-|.)",
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
_ALIGNED = {"aligned", "align", "alignedat", "alignat", "split", "gathered", "gather"}
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


_STRUCK = re.compile(r"(?<![^\s(*])~~(?=[^\s~])([^~\n]{1,200}?)(?<=[^\s~])~~(?![^\s).,;:*])")
"""Markdown that is struck out, and no two spaces of LaTeX between operands: `~~17~~`."""


def tokenize(text: str) -> list[Token]:
    """The tokens of a text, without spacing, markup and delimiters of formulas."""
    text = _SKIPS.sub(r"\\ ", _SCRIPTS.sub(_script, text).translate(_CHARACTERS))
    if len(_DOLLAR.findall(text)) == 1:  # delimiters of a formula come in pairs
        text = _PRICE.sub(r"\\$", text)
    text = _STRUCK.sub(r"\\cancel{\1}", text)
    text = _from_python(_CLOCK_HALF.sub(r"\1\2", _TAGS.sub("", text)))
    text = _EXPONENT.sub(r"\1\\times10^{\2}", _ROOT.sub(r"\\sqrt{\1}", _PI.sub(r"\\pi ", text)))
    return _braced(_Cleaner(text).tokens)


_ASCII = {
    "<=": r"\le", ">=": r"\ge", "!=": r"\ne", "=/=": r"\ne", "==": "=", "->": r"\to", "+/-": r"\pm",
}  # fmt: skip
_DENIED = {
    "=": r"\ne", r"\in": r"\notin", "<": r"\ge", ">": r"\le", r"\le": ">", r"\ge": "<", r"\ne": "=", r"\notin": r"\in",
}  # fmt: skip
"""Relations with a stroke through them, as they are read without one."""


def _denied(relation: str) -> str:
    r"""The relation after `\not`; of another sign its name after `not`, which no rule reads as equal to anything."""
    return _DENIED.get(relation, r"\operatorname{not" + "".join(filter(str.isalpha, relation)) + "}")


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
        self.aligned = 0
        """Open environments whose `&` only aligns lines."""
        for match in _TOKEN.finditer(text):
            self._read(match.lastgroup or "", match.group(match.lastgroup or 0), match)

    def emit(self, text: str, *, roman: bool | None = None) -> None:
        if self.tokens and self.tokens[-1].text == r"\not":
            text, roman = _denied(text), False
            self.gap = self.tokens.pop().gap
        if self.aligned > 0 and text == "=" and self.tokens and self.tokens[-1].text == r"\\":
            self.tokens.pop()  # an equation goes on in the next line
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
        elif name in ("imath", "jmath"):
            self.emit(name[0])
        elif name in ("underline", "uline") and self._in_decimals():
            self.emit(r"\overline", roman=False)  # the line under 0.\underline{6} marks the digits that repeat
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

    def _in_decimals(self) -> bool:
        """Whether the text so far ends with a number and its decimal point, or with decimals."""
        last = self.tokens[-1] if self.tokens and not self.gap else Token(" ")
        return "." in last.text and (last.is_number or (last.text == "." and self.tokens[-2:-1] != []))

    def _after_number(self) -> bool:
        """Whether the text so far ends with a number that is no subscript."""
        before = [token.text for token in self.tokens[-2:]]
        return bool(before) and not self.gap and self.tokens[-1].is_number and before[0] != "_"

    def _environment(self, text: str) -> None:
        command, _, name = text.rstrip("}").replace("*", "").partition("{")
        if name in _ALIGNED:
            self.aligned += 1 if command.strip() == "begin" else -1
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
        elif text == "&" and self.aligned > 0:
            pass
        elif text == "!=" and self._after_number():
            self.emit("!")  # 5!=120
            self.emit("=")
        elif text != '"':
            self.emit(_ASCII.get(text, text))


class _Bracer:
    r"""One pass over tokens: braces around arguments, ° for `^\circ`, `\frac` for `\over`, `\binom` for `\choose`."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.texts = [token.text for token in tokens] + ["", "", ""]
        self.out: list[Token] = []
        self.opened: list[tuple[str, int, str]] = []
        """Of each open group: what ends it, how many arguments its command needs after it, and that command. The end
        is "" for an operand without brackets, `dropped` for braces that are layout, `converted` for parentheses."""
        self.needed, self.command = 0, ""
        """Arguments that the last command still needs, and that command."""
        self.signed = False
        """The last token was the sign of an exponent."""
        index = 0
        while index < len(tokens):
            index += self._degrees(index) or self._read(index)
        self.out.extend(Token("}") for end, *_ in self.opened if end in ("", "converted"))

    def _degrees(self, index: int) -> int:
        """The number of tokens of a degree sign, which becomes °; 0 for anything else."""
        texts = self.texts[index : index + 4]
        if texts[:2] == ["^", r"\circ"]:
            size = 2
        elif texts == ["^", "{", r"\circ", "}"]:
            size = 4
        elif texts[0] in (r"\degree", r"\circ") and not self.needed:
            size = 1
        else:
            return 0
        self.out.append(Token("°"))
        self._close_operands()
        return size

    def _read(self, index: int) -> int:
        """Reads one token; returns 1."""
        if not self._awaits_operand(self.tokens[index]):
            if not (self._over(index) or self._opens(index) or self._argument(self.tokens[index])):
                self._other(index)
            self._close_operands()
        return 1

    def _awaits_operand(self, token: Token) -> bool:
        """A command with arguments, or the sign of an exponent: the operand follows."""
        if self.needed and self.command == "^" and token.text in "+-" and not self.signed:
            self._open_operand(token)
            self.needed, self.signed = 1, True
            return True
        if token.text not in _ARGUMENTS:
            return False
        if self.needed and token.text not in "^_":
            self._open_operand(token)
        else:
            self.out.append(token)
        self.needed, self.command, self.signed = _ARGUMENTS[token.text], token.text, False
        return True

    def _open_operand(self, token: Token) -> None:
        self.out.extend((Token("{"), token))
        self.opened.append(("", self.needed - 1, self.command))

    def _close_operands(self) -> None:
        """Ends the operands without brackets whose commands have all their arguments."""
        self.signed = False
        while not self.needed and self.opened and self.opened[-1][0] == "":
            self.out.append(Token("}"))
            _, self.needed, self.command = self.opened.pop()

    def _over(self, index: int) -> bool:
        r"""`{a \over b}` as `\frac{a}{b}`, `{n \choose k}` and `n \choose k` as `\binom{n}{k}`."""
        command = {r"\over": r"\frac", r"\choose": r"\binom"}.get(self.texts[index])
        alone = command == r"\binom" and not self.opened and all(token.text not in "=,;" for token in self.out)
        if command is None or not (alone or (self.opened and self.opened[-1][0] == "dropped")):
            return False
        start = 0 if alone else self.opened.pop()[1]
        self.out[start : start + (not alone)] = [Token(command), Token("{")]
        self.opened.append(("converted" if alone else "}", 0, ""))
        self.out.extend((Token("}"), Token("{")))
        return True

    def _opens(self, index: int) -> bool:
        """A bracket that opens an argument, or braces that are layout."""
        token, text = self.tokens[index], self.texts[index]
        if text == "{" and not self.needed:
            before = self.texts[index - 1] if index else ""
            if before[:1] == "\\" and before[-1:].isalpha():
                return False
            self.opened.append(("dropped", len(self.out), ""))
            self.out.append(Token(""))
        elif self.needed and text == "[" and self.command == r"\sqrt":
            self.opened.append(("]", self.needed, self.command))
            self.out.append(token)
        elif self.needed and (text == "{" or (text == "(" and self.command in ("^", "_", r"\sqrt"))):
            self.opened.append(("}" if text == "{" else "converted", self.needed - 1, self.command))
            self.out.append(Token("{", token.gap))
        else:
            return False
        self.needed = 0
        return True

    def _argument(self, token: Token) -> bool:
        r"""An argument without braces: a digit of `\frac12`, a number, a letter, or a command such as `\pi`."""
        text = token.text
        command = text[0] == "\\" and text[1:2].isalpha()
        if not self.needed or not (token.is_number or token.is_name or command):
            return False
        letter = token.is_name and not token.roman
        digit = self.command in (r"\frac", r"\binom") and "." not in text
        size = 1 if text[0] != "\\" and (letter or digit) else len(text)
        if self.signed:
            self.out.append(token)
        else:
            self._wrap(token, text[:size])
        self.needed -= 1
        rest = text[size:]
        if rest and self.needed:
            self._wrap(token, rest[:1])
            self.needed, rest = self.needed - 1, rest[1:]
        if rest:
            self.out.append(Token(rest, False, token.roman))
        return True

    def _wrap(self, token: Token, text: str) -> None:
        self.out.extend((Token("{"), token._replace(text=text, gap=False), Token("}")))

    def _other(self, index: int) -> None:
        """A token that is no argument; brackets are kept in pairs."""
        token, text = self.tokens[index], self.texts[index]
        self.needed = 0
        times_ten = self.texts[index + 1 : index + 3] == ["10", "^"] and index > 0 and self.tokens[index - 1].is_number
        if text in ("x", "X") and times_ten:
            token = Token(r"\times")
        if text in "([{":
            self.opened.append(({"(": ")", "[": "]", "{": "}"}[text], 0, ""))
        elif text in ")]}":
            token = self._closed(token)
        self.out.append(token)

    def _closed(self, token: Token) -> Token:
        """The token for a closing bracket: of the kind that was opened, or empty for braces that are layout."""
        text, opened = token.text, self.opened
        while text == "}" and opened and opened[-1][0] in ("", ")", "]"):
            opened.pop()
        if not opened or opened[-1][0] not in (text, {")": "converted", "}": "dropped"}.get(text, text)):
            return token
        end, self.needed, self.command = opened.pop()
        if end == "dropped":
            self.needed = 0
        return Token({"converted": "}", "dropped": ""}.get(end, text), token.gap)


def _braced(tokens: Sequence[Token]) -> list[Token]:
    r"""Braces around every argument: `\frac12`, `x^10`, `2^(1/2)` and `\sqrt3` as they are meant; `^\circ` as °."""
    return [token for token in _Bracer(tokens).out if token.text]


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

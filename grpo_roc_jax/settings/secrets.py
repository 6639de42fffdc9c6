"""Keeps secrets that were typed into a setting or a command out of the files, logs and services of a run.

A secret is recognized by its context: the user information of an address, a part of its query, the value of an option
or of a variable whose name suggests it, a header, an argument of a command that takes a secret there, or a token with
the prefix of a known service. Other settings stay
unchanged. `token_variable` and similar settings keep secrets out of the configuration altogether. Everything that
modules of this package log passes through here, whatever displays it.
"""

import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
_NAME = (
    r"(?:(?:api|auth|access|private|secret)[-_]?key|(?:api|auth|access)[-_]?token|key|token|secret|password|passwd"
    r"|passphrase|pass|pwd|pw|credentials?|auth|sig|signature)"
)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"',;]+)"
_OPTION = rf"--?(?!(?:[\w.]*\.)?(?:bos|eos|pad|unk)[-_]token)(?:[\w.]+[-_.])*{_NAME}"
_VARIABLE = (
    r"(?:[A-Z][A-Z0-9]*_)*(?:[A-Z0-9]{0,20}(?:APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)|SSHPASS|API_?KEY|KEY|PASS|PWD"
    r"|CREDENTIALS?|AUTH)"
)
_SETTING = (
    r"(?!(?:bos|eos|pad|unk|mask|sep|cls|image|stop)_token)(?:[a-z]+_){0,3}"
    r"(?:password|passwd|secret|api[-_]?key|access[-_]?key|private_key|(?<=_)token)"
)
_CAMEL = r"[A-Za-z]{0,40}?(?:Token|Secret|Password|(?:Account|Access|Api|API)Key)"
_LONG = r"(?=[\"']?[^\s\"'<]*[0-9])(?=[\"']?[^\s\"',;<]{8})"
"""Before a value of eight characters or more, one of them a digit."""
_SCHEME = r"(?:bearer|basic|token|digest|apikey)"
_ARGUMENT = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"',;|&<>-][^\s\"';|&<>]*)"
"""A word of a command that is neither an option nor a sign of the shell."""
_WITHIN = r"(?:[^|;&\n]{0,200}?\s)??"
"""Further words of the same command."""
_LOGIN = r"(?:docker|podman|nerdctl|buildah|skopeo|oras|crane|helm|az|oc|cf|swanlab)\s+(?:[\w-]+\s+){0,2}?login"
_MYSQL = r"(?:mysql\w{0,12}|mycli|mariadb(?:-\w{1,12})?)"
_RANDOM = (
    r"(?=[A-Za-z0-9+=~-]{10,}(?![^\s\"';|&]))(?=\S*[A-Za-z])"
    r"(?:(?=\S*\d[A-Za-z+=~-]+\d)|(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z]))[A-Za-z0-9+=~-]+"
)
"""A word that looks drawn at random: ten letters and digits or more, in several runs of digits or in both cases."""
_COMMANDS = tuple(
    (re.compile(pattern), r"\1" + HIDDEN)
    for pattern in (
        rf"((?<![\w.-]){_LOGIN}\s{_WITHIN}-[pk](?:=|\s*+)(?!=))(?!<){_ARGUMENT}",
        rf"((?<![\w.-]){_MYSQL}\s{_WITHIN}-p)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])sshpass\s+(?:-[evP]\S*\s+)*+-p\s*)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])7z[ar]?\s{_WITHIN}-p)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])(?:un)?zip\s{_WITHIN}-P\s*)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])mongo(?:sh|dump|restore)?\s{_WITHIN}-p\s+)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])redis-cli\s{_WITHIN}-a\s+)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])ldap\w+\s{_WITHIN}-w\s*)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])(?:twine\s+upload|cqlsh)\s{_WITHIN}-p\s+)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])(?:sqlcmd|bcp|mosquitto_(?:pub|sub))\s{_WITHIN}-P\s*)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])openssl\s{_WITHIN}-pass(?:in|out)?\s+pass:)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])curl\s{_WITHIN}(?:-b|--cookie)[=\s]\s*[\"']?[\w.-]{{1,60}}=)(?!<)[^\s\"';]+",
        r"((?<![\w-])(?:-u|--user|--proxy-user)(?:=|\s+)[\"']?(?!\d+:\d+\b)[\w.@-]{1,60}:)(?!<)[^\s\"']+",
        r"((?<![\w.-])(?:wandb|vault|trackio)\s+login\s+"
        rf"(?:--?(?:host|method|path)[=\s]\s*\S+\s+|--?[\w-]+(?:=\S+)?\s+)*+)(?!<){_ARGUMENT}",
        rf"((?<![\w.-])ngrok\s+(?:config\s+add-)?authtoken\s+)(?!<){_ARGUMENT}",
        rf"((?:\b|_)(?:secret_access_key|_authToken)[\s=]\s*)(?!<){_ARGUMENT}",
        rf"((?<![\w-])-k(?:=|\s+)[\"']?){_RANDOM}",
    )
)
"""Secrets that a command takes without a name: `mysql -pX`, `docker login -p X`, `wandb login X`. Of `-k X`, which is
often no secret, only words that look random."""
_RULES = tuple(
    (re.compile(pattern, flags), r"\1" + HIDDEN)
    for pattern, flags in (
        (r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#\"'<>]+(?=@)", 0),
        (rf"([?&;](?:[\w.-]+[-_.])?{_NAME}=)[^&\s#\"'<>]+", re.IGNORECASE),
        (rf"((?<![\w-]){_OPTION}(?:=|\s+))(?![-<]){_VALUE}", re.IGNORECASE),
        (rf"(\b{_VARIABLE}=)(?!<){_VALUE}", 0),
        (rf"([\"']{_NAME}[\"']\s*:\s*)(?!\"<){_VALUE}", re.IGNORECASE),
        (
            rf"(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:{_SCHEME}\s+(?:token=)?)?)(?!<|{_SCHEME}\b)[^\s\"']+",
            re.IGNORECASE,
        ),
        (rf"(\b(?:[\w]+-)*(?:api-key|token|auth|secret)\s*:\s*)(?!<|{_SCHEME}\b){_VALUE}", re.IGNORECASE),
        (r"(\b(?:set-)?cookie\s*:\s*[^=\s\"']{1,60}=)[^\s\"';]+", re.IGNORECASE),
        (rf"((?<![\w-]){_SETTING}\s?[:=]\s?){_LONG}{_VALUE}", re.IGNORECASE),
        (rf"((?<![\w-])[\"']{_SETTING}[\"']\s*:\s*){_LONG}{_VALUE}", re.IGNORECASE),
        (rf"((?<![\w-])(?:{_CAMEL}|pwd(?==[^/~.$]))=){_LONG}{_VALUE}", 0),
        (
            r"(\bhooks\.slack\.com/\w{1,20}/|\bapi\.telegram\.org/bot|\bdiscord(?:app)?\.com/api/webhooks/\d+/)"
            r"(?!<)[^\s\"']*[A-Za-z0-9_-]",
            0,
        ),
        (r"(\bBearer\s+)(?=\S*\d)[A-Za-z0-9._~+/=-]{12,}", re.IGNORECASE),
        (r"\b(eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}", 0),
        (r"\b(npm_|pypi-|dapi|SG\.|ya29\.)(?=\S{0,30}\d)[A-Za-z0-9][A-Za-z0-9._-]{30,}", 0),
        (r"\b(hf_)(?=[A-Za-z0-9]*\d)[A-Za-z0-9]{12,}", 0),
        (
            r"\b(sk-|sk_live_|rk_live_|gh[pousr]_|github_pat_|glpat-|xox[abep]-|AKIA|AIza|nvapi-|tml-)"
            r"(?=[\w-]*\d)[A-Za-z0-9_-]{12,}",
            0,
        ),
    )
)
"""Patterns and their replacements, in the order in which they are applied."""
MOST_WORDS = 16
"""Words of a command that are looked at before one of them."""
_WORD = re.compile(_OPTION, re.IGNORECASE)
"""A word whose value is the next word."""


def hidden(text: str) -> str:
    """The text with `<hidden>` in place of what looks like a typed secret."""
    if not isinstance(text, str) or len(text) < 4:
        return text
    for pattern, instead in (*_RULES, *_COMMANDS):
        text = pattern.sub(instead, text)
    return text


def without_secrets(value: Any) -> Any:
    """Nested settings, or the words of a command, with their secrets hidden."""
    if isinstance(value, str):
        return hidden(value)
    if isinstance(value, Mapping):
        return {name: without_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        before, words = "", []
        for item in value:
            option = isinstance(before, str) and isinstance(item, str) and _WORD.fullmatch(before)
            if option and not item.startswith("-"):
                words.append(HIDDEN)
            else:
                words.append(_in_command(words[-MOST_WORDS:], without_secrets(item)))
            before = item
        return words if isinstance(value, list) else tuple(words)
    return value


def _in_command(before: list, item: Any) -> Any:
    """A word of a command that comes apart, hidden if the words before it say that it is a secret."""
    if not isinstance(item, str) or not before or any(not isinstance(word, str) for word in before):
        return item
    start = " ".join(before) + " "
    for pattern, instead in _COMMANDS:
        changed = pattern.sub(instead, start + item)
        if changed.startswith(start):
            item = changed.removeprefix(start)
    return item


def hides_something(value: Any) -> bool:
    """Whether a setting was read back from a file in which a part of it is hidden."""
    if isinstance(value, str):
        return HIDDEN in value
    if isinstance(value, Mapping):
        return any(map(hides_something, value.values()))
    return isinstance(value, list | tuple) and any(map(hides_something, value))


_make_record = logging.getLogRecordFactory()


def _record(*arguments: Any, **more: Any) -> logging.LogRecord:
    """Makes a log record. Records of this package hide secrets in their message and in the text of their exception."""
    record = _make_record(*arguments, **more)
    # `logging.makeLogRecord`, by which handlers of queues and sockets read records, first makes one without a name.
    if str(record.name).partition(".")[0] == __package__.partition(".")[0]:
        try:
            record.msg, record.args = hidden(record.getMessage()), None
        except Exception:  # a message that does not fit its arguments is reported where it is shown
            return record
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = hidden("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    return record


logging.setLogRecordFactory(_record)

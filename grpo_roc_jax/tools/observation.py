"""What the policy sees of a result: short, deterministic, without timings, process ids or paths.

Verdicts come from `ToolResult.kind`, never from the text. A program can print the end markers of a chat template, and
more text than a context holds; `text.chat_format.ChatFormat.observation_ids`, which tokenizes the text, escapes it and
applies the token budget.
"""

import re

from grpo_roc_jax.sandbox.result import INFRA_KINDS
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.types import ToolResult

TERMINAL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SURROGATES = re.compile(r"[\ud800-\udfff]")
ADDRESSES = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")
"""Addresses as in the default repr of objects; they differ from run to run."""
LIBRARY_PATHS = re.compile(r'(?:(?<=File ")|^)/[^"\n:]*?/lib/python3\.\d+/(?:site-packages/)?', re.M)
OWN_FRAMES = re.compile(
    r'^(?:  File "<string>", line \d+, in <module>\n(?:    .*\n)?)?(?:  File "<sandbox>", .*\n)+', re.M
)
"""Frames of the executor, in which a program runs, in stacks that it prints."""
OWN_WARNINGS = re.compile(r"^<sandbox>:\d+:", re.M)
"""Place of a warning that is above the program, for which an interpreter prints `sys:1:`."""
SCRATCH_NAME = re.compile(r"grpo-tools-\w{8}/w\d+-\d+-[0-9a-f]{1,32}")
UNBROKEN = re.compile(r"[^\s\"':]+")
"""Text that a path in an observation may consist of. The paths of the interpreter and the scratch directory differ
between hosts and runs."""
SOURCE_CHARS = 160
"""Length to which the quoted source line of an error is cut."""

INFRA_TEXT = {
    "sandbox_error": "the tool could not run this call; the call itself is not at fault",
    "queue_timeout": "the tool was too busy to run this call; the call itself is not at fault",
    "transport_error": "the tool could not be reached; the call itself is not at fault",
}
RSTAR2_REASONS = {"timeout": "worker_timeout", "queue_timeout": "queue_timeout", "bad_arguments": "invalid_input"}


def observe(result: ToolResult, code: str, config: ToolsConfig) -> str:
    """The observation text of a result, before any token budget; quotes the line of an error from `code`."""
    text = _rstar2(result, code, config) if config.observation == "rstar2" else _plain(result, code, config)
    if not any(mark in text for mark in ("/", "at 0x", "<sandbox>")) and text.replace("\n", "").isprintable():
        return text  # most outputs end here; nothing below can match
    text = OWN_WARNINGS.sub("sys:1:", OWN_FRAMES.sub("", LIBRARY_PATHS.sub("", sanitize(text))))
    if SCRATCH_NAME.search(text):
        text = UNBROKEN.sub(_hide_scratch, text)
    return ADDRESSES.sub("at 0x0", text) if config.hide_addresses else text


def sanitize(text: str) -> str:
    """Text without control characters except newline and tab, and with lone surrogates written as escapes."""
    text = CONTROL.sub("", TERMINAL_CODES.sub("", text.replace("\r\n", "\n")))
    return SURROGATES.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _hide_scratch(unbroken: re.Match[str]) -> str:
    """Replace scratch directories, from the first slash on. Time is linear in the text, which the policy can choose."""
    text, pieces, done = unbroken.group(), [], 0
    for match in SCRATCH_NAME.finditer(text):
        start = text.find("/", done, match.start())
        if start >= 0:
            pieces += [text[done:start], "/scratch"]
            done = match.end()
    return "".join([*pieces, text[done:]])


def _plain(result: ToolResult, code: str, config: ToolsConfig) -> str:
    blocks = [_stdout(result)]
    if result.stderr:
        blocks.append("[stderr]\n" + result.stderr)
    if result.kind != "ok":
        blocks.append(f"[{result.kind}] {_what(result, config)}{_where(result, code)}")
    if result.session_id and (result.exit_code is not None or result.signal is not None):
        rolled_back = "it was rolled back to the state before this cell"
        lost = "it was restarted empty; define again what is needed"
        blocks.append(f"[session] {rolled_back if result.rolled_back else lost}")
    text = "\n".join(block.rstrip("\n") for block in blocks if block)
    return text if text.strip() else "[no output]"


def _stdout(result: ToolResult) -> str:
    if not result.echo:
        return result.stdout
    gap = "\n" if result.stdout and not result.stdout.endswith("\n") else ""
    return result.stdout + gap + result.echo


def _what(result: ToolResult, config: ToolsConfig) -> str:
    """The error in words, made from typed fields and configured limits only."""
    if result.kind in INFRA_KINDS:
        return INFRA_TEXT[result.kind]
    if result.kind == "timeout":
        cpu = result.limit_hit == "cpu"
        return f"stopped after {config.cpu_s:g} s of CPU time" if cpu else f"stopped after {config.wall_s:g} s"
    if result.kind == "output_limit":
        return f"stopped after {config.output_kill_mb} MiB of output"
    if result.kind == "crash":
        return f"the process was ended by signal {result.signal}"
    if result.error_type and result.error_message:
        return f"{result.error_type}: {result.error_message}"
    return result.error_type or result.error_message or "failed"


def _where(result: ToolResult, code: str) -> str:
    line = _source_line(result, code)
    return "" if result.error_line is None else f" (line {result.error_line}{line and ': ' + line})"


def _source_line(result: ToolResult, code: str) -> str:
    if result.error_line is None or len(code) > 1 << 20:
        return ""
    lines = re.split(r"\r\n|\r|\n", code)  # as Python numbers them; `splitlines` splits elsewhere too
    line = lines[result.error_line - 1].strip() if 0 < result.error_line <= len(lines) else ""
    return line if len(line) <= SOURCE_CHARS else line[:SOURCE_CHARS] + "..."


def _rstar2(result: ToolResult, code: str, config: ToolsConfig) -> str:
    """The wording of rStar2-Agent's tools without the execution time, which differs between runs."""
    stdout, stderr = _stdout(result), result.stderr
    if result.kind == "ok":
        lines = ["Tool call success"]
    else:
        lines = ["Tool call failure", f"reason: {RSTAR2_REASONS.get(result.kind, '')}"]
        if result.kind == "timeout":
            stderr += "Suicide from timeout."
        else:
            at_line = f" at line {result.error_line}" if result.error_line is not None else ""
            quoted = _source_line(result, code)
            kind = result.error_type or result.kind
            detail = result.error_message or _what(result, config)
            stderr += f"{kind}{at_line}: {detail}" + (f"\n  {quoted}" if quoted else "")
    if stdout:
        lines.append(f"stdout: {stdout}")
    if stderr:
        lines.append(f"stderr: {stderr}")
    return "\n".join(lines)

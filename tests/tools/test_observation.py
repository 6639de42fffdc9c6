"""What the policy sees: deterministic, clean, and the same from run to run."""

import importlib
import pkgutil
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_roc_jax import sandbox, tools
from grpo_roc_jax.tools import ToolsConfig, malformed_result, observe, sanitize
from grpo_roc_jax.tools.observation import SOURCE_CHARS
from grpo_roc_jax.types import ToolResult
from tests.helpers.linear import assert_linear

PLAIN, PEERS = ToolsConfig(), ToolsConfig(observation="rstar2")
FAILED = ToolResult("exception", error_type="E", error_message="m", error_line=1)
FRAMES = '  File "<string>", line 5, in <module>\n  File "<sandbox>", line 8, in main\n  File "<program>", line 1, in f'
SHOWN = '  File "<program>", line 1, in f\nsys:1: UserWarning: x'
STDERR = (
    'Traceback:\n  File "/home/me/venv/lib/python3.11/site-packages/numpy/core.py", line 3, in f\n'
    "/usr/lib/python3.12/warnings.py:5: UserWarning: x\nno file '/tmp/grpo-tools-ab12_xyz/w3-417-2f00deadbeef/a.txt'"
)


@pytest.mark.parametrize(
    ("result", "code", "text"),
    [
        (ToolResult("ok", stdout="3\n"), "", "3"),
        (ToolResult("ok", stdout="a", echo="7"), "", "a\n7"),
        (ToolResult("ok"), "", "[no output]"),
        (ToolResult("ok", stdout="a\n", stderr="b\n"), "", "a\n[stderr]\nb"),
        (
            ToolResult("exception", error_type="ValueError", error_message="bad", error_line=2),
            "x = 1\nf(x)\n",
            "[exception] ValueError: bad (line 2: f(x))",
        ),
        (ToolResult("timeout", limit_hit="wall", stdout="so far"), "", "so far\n[timeout] stopped after 5 s"),
        (ToolResult("timeout", limit_hit="cpu"), "", "[timeout] stopped after 5 s of CPU time"),
        (ToolResult("crash", signal=11), "", "[crash] the process was ended by signal 11"),
        (
            ToolResult("memory_limit", error_type="MemoryError", error_line=1),
            "[0]*9",
            "[memory_limit] MemoryError (line 1: [0]*9)",
        ),
        (
            ToolResult("timeout", limit_hit="wall", session_id="s", signal=9, rolled_back=True),
            "",
            "[timeout] stopped after 5 s\n[session] it was rolled back to the state before this cell",
        ),
        (FAILED, "x" * SOURCE_CHARS, f"[exception] E: m (line 1: {'x' * SOURCE_CHARS})"),
        (FAILED, "x" * SOURCE_CHARS + "y", f"[exception] E: m (line 1: {'x' * SOURCE_CHARS}...)"),
        (ToolResult("ok", stdout="<o at 0x7f12ab34cd56> 0x7f12ab34cd56"), "", "<o at 0x0> 0x7f12ab34cd56"),
        (ToolResult("ok", stderr=f"Stack:\n{FRAMES}\n<sandbox>:9: UserWarning: x"), "", f"[stderr]\nStack:\n{SHOWN}"),
        (
            ToolResult("ok", stderr=STDERR),
            "",
            '[stderr]\nTraceback:\n  File "numpy/core.py", line 3, in f\n'
            "warnings.py:5: UserWarning: x\nno file '/scratch/a.txt'",
        ),
    ],
)
def test_plain_wording(result: ToolResult, code: str, text: str) -> None:
    assert observe(result, code, PLAIN) == text


def test_addresses_may_be_shown() -> None:
    shown = observe(ToolResult("ok", stdout="<object object at 0x7f12ab34cd56>"), "", ToolsConfig(hide_addresses=False))
    assert "at 0x7f12ab34cd56" in shown


def test_no_timing_enters_the_text() -> None:
    slow = ToolResult("timeout", limit_hit="wall", wall_ms=5123.4, cpu_ms=777, queue_ms=9, worker_id=3, max_rss_kb=999)
    fast = ToolResult("timeout", limit_hit="wall", wall_ms=5001.0)
    assert observe(slow, "", PLAIN) == observe(fast, "", PLAIN)


def test_wording_of_the_official_release() -> None:
    assert observe(ToolResult("ok", stdout="3\n"), "", PEERS) == "Tool call success\nstdout: 3\n"
    failed = ToolResult("exception", error_type="NameError", error_message="name 'x' is not defined", error_line=1)
    assert observe(failed, "x", PEERS) == (
        "Tool call failure\nreason: \nstderr: NameError at line 1: name 'x' is not defined\n  x"
    )
    late = observe(ToolResult("timeout", limit_hit="wall"), "", PEERS)
    assert late == "Tool call failure\nreason: worker_timeout\nstderr: Suicide from timeout."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/grpo-tools-", "/grpo-tools-"),
        ("grpo-tools-ab12_xyz/w3-417-2f00deadbeef /x", "grpo-tools-ab12_xyz/w3-417-2f00deadbeef /x"),
        ("=/a/grpo-tools-ab12_xyz/w3-417-2f00deadbeef/b/grpo-tools-ab12_xyz/w3-417-3/c:/d", "=/scratch/scratch/c:/d"),
        ("/a b/grpo-tools-ab12_xyz/w3-417-2x", "/a b/scratchx"),
    ],
)
def test_scratch_directories_are_hidden_from_the_first_slash_on(text: str, shown: str) -> None:
    assert observe(ToolResult("ok", stdout=text), "", PLAIN) == shown


@pytest.mark.parametrize("mark", ["\u2028", "\x0c", "\x1c", "\x85", "\r\n", "\r"])
def test_the_quoted_line_is_the_one_that_python_counts(mark: str) -> None:
    code = f"x = 'a{mark}b'\ny = 1\n1/0" if mark not in ("\r\n", "\r") else f"x = 1{mark}y = 1{mark}1/0"
    failed = ToolResult("exception", error_type="E", error_message="m", error_line=3)
    assert "(line 3: 1/0)" in observe(failed, code, PLAIN)


UNITS = (
    "/", "/a", "a", "0", " ", "\t", "_", "__a", ";", ":", ": ", "\\\n", "\n", "\n/", '"', "grpo-tools-",
    "/grpo-tools-ab12_xyz/w1", "/grpo-tools-ab12_xyz/w1-2-3", "/lib/python3.1", 'File "/', 'File "/lib/python3.',
    "\x1b[", "\x1b[0", "\x1b[ ", "\x1b]", "at 0x", "at 0xabcdef", "from ", "from a", "from a ", "import ", "import a,",
    "exec", "\r\n", "\x00", "\ud800",
)  # fmt: skip
"""Texts that programs may repeat to make a pattern try many matches."""


def patterns() -> dict[str, re.Pattern]:
    """Every pattern of the modules of `tools` and `sandbox`."""
    by_name = {}
    folders = ((package, info) for package in (tools, sandbox) for info in pkgutil.iter_modules(package.__path__))
    for package, info in folders:
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        members = {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
        by_name |= {f"{info.name}.{name}": value for name, value in members.items()}
    return by_name


def assert_linear_in_units(action: Callable[[str], object]) -> None:
    for unit in UNITS:
        for lead in ("", "/", "x"):
            assert_linear(action, unit, 2_000, lead=lead)


def test_patterns_take_linear_time() -> None:
    by_name = patterns()
    assert {"observation.LIBRARY_PATHS", "_calls.INEXACT"} <= set(by_name)
    for pattern in by_name.values():
        if isinstance(pattern.pattern, bytes):
            assert_linear_in_units(lambda text, p=pattern: p.findall(text.encode("utf-8", "surrogatepass")))
        else:
            assert_linear_in_units(pattern.findall)


@pytest.mark.parametrize("config", [PLAIN, PEERS], ids=["plain", "rstar2"])
def test_observing_takes_linear_time(config: ToolsConfig) -> None:
    assert_linear_in_units(lambda text: observe(ToolResult("exception", stdout=text, error_message=text), text, config))


def test_malformed_call_is_readable_and_counts() -> None:
    result = malformed_result("Expecting ',' delimiter")
    assert result.counts_as_error
    assert result.observation == "[malformed_call] MalformedCall: Expecting ',' delimiter"


@given(st.text(st.characters(codec=None), max_size=200))
def test_sanitized_text_can_be_encoded_and_shows_no_control_characters(text: str) -> None:
    clean = sanitize(text)
    clean.encode("utf-8")
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in clean)


def test_terminal_codes_vanish() -> None:
    assert sanitize("\x1b[31mred\x1b[0m\x07 \x00done\r\n") == "red done\n"

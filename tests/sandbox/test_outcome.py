"""The taxonomy as a table: from what was observed to the kind. What the policy causes is no infrastructure failure."""

import json
import signal

import pytest

from grpo_roc_jax.sandbox._calls import NOTE_CHARS, ProgramOutcome, decide, parse_record
from grpo_roc_jax.sandbox._messages import CallDone
from grpo_roc_jax.sandbox.result import INFRA_KINDS
from grpo_roc_jax.tools import ToolsConfig
from grpo_roc_jax.tools.executor import settings_of

LIMITS = settings_of(ToolsConfig()).limits
EXIT_0, EXIT_1, EXIT_3 = 0, 1 << 8, 3 << 8
NONCE = b"0123456789abcdef0123456789abcdef"
MIB = 1 << 20


def done(status: int = EXIT_0, why: str = "", fault: str = "", cpu: float = 0.01) -> CallDone:
    return CallDone(1, status, why, fault, rss=1, wall=0.1, cpu=cpu)


def report(kind: str = "ok", **more: object) -> dict:
    return {"kind": kind, "error_type": "", "error_message": "", "traceback": "", "echo": "", **more}


TABLE = [
    # done, record, sizes, kind, further fields
    (done(), report(), (0, 0, 0), "ok", {"exit_code": 0}),
    (done(), report("exception", error_type="ValueError"), (0, 0, 0), "exception", {"error_type": "ValueError"}),
    (done(), report("syntax_error"), (0, 0, 0), "syntax_error", {}),
    (done(), report("memory_limit"), (0, 0, 0), "memory_limit", {"limit_hit": "memory"}),
    (done(), report("output_limit"), (0, 0, 0), "output_limit", {"limit_hit": "output"}),
    (done(EXIT_0), None, (9, 0, 0), "exception", {"error_type": "EarlyExit", "exit_code": 0}),
    (done(EXIT_3), None, (0, 0, 0), "exception", {"exit_code": 3}),
    (done(98 << 8), None, (0, 0, 0), "exception", {"exit_code": 98}),
    (done(EXIT_1), report(), (0, 0, 0), "exception", {"suspicious": True}),
    (done(signal.SIGSEGV), None, (0, 0, 0), "crash", {"signal": 11}),
    (done(signal.SIGABRT), report(), (0, 0, 0), "crash", {"suspicious": True}),
    (done(signal.SIGKILL), None, (0, 0, 0), "crash", {"signal": 9}),
    (done(signal.SIGKILL, cpu=6.0), None, (0, 0, 0), "timeout", {"limit_hit": "cpu"}),
    (done(signal.SIGXCPU, cpu=5.0), None, (0, 0, 0), "timeout", {"limit_hit": "cpu"}),
    (done(signal.SIGKILL, "wall"), None, (0, 0, 0), "timeout", {"limit_hit": "wall"}),
    (done(signal.SIGKILL, "wall"), report(), (0, 0, 0), "timeout", {}),
    (done(signal.SIGKILL, "cpu"), None, (0, 0, 0), "timeout", {"limit_hit": "cpu"}),
    (done(signal.SIGKILL, "output"), None, (0, 0, 0), "output_limit", {}),
    (done(), report(), (9 * MIB, 0, 0), "output_limit", {}),
    (done(), report("exception"), (0, 9 * MIB, 0), "output_limit", {}),
    (done(), None, (0, 0, 9 * MIB), "output_limit", {}),
    (done(signal.SIGKILL, "scratch"), None, (0, 0, 0), "exception", {"limit_hit": "scratch"}),
    (done(signal.SIGKILL, "protocol"), None, (0, 0, 0), "exception", {"error_type": "ProtocolViolation"}),
    (done(signal.SIGKILL, "threads"), None, (0, 0, 0), "exception", {"limit_hit": "threads"}),
]


@pytest.mark.parametrize(("report", "record", "sizes", "kind", "fields"), TABLE)
def test_kinds(report: CallDone, record: dict | None, sizes: tuple, kind: str, fields: dict) -> None:
    outcome = decide(report, None if record is None else ProgramOutcome(**record), sizes, LIMITS)
    assert outcome.kind == kind
    assert kind not in INFRA_KINDS
    assert {name: getattr(outcome, name) for name in fields} == fields


def test_only_a_failed_lock_down_is_an_infrastructure_failure() -> None:
    assert decide(done(fault="seccomp: EINVAL"), None, (0, 0, 0), LIMITS).kind == "sandbox_error"


def record_bytes(text: bytes, nonce: bytes = NONCE) -> bytes:
    return NONCE + nonce + b"%08d" % len(text) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        NONCE,
        record_bytes(b"not json"),
        record_bytes(b"[]"),
        record_bytes(b'{"kind":"ok"}'),
        record_bytes(json.dumps(report("sandbox_error")).encode()),
        record_bytes(json.dumps(report("ok", echo=5)).encode()),
        record_bytes(json.dumps(report()).encode(), nonce=b"f" * 32),
        NONCE + NONCE + b"99999999" + b"{",
        record_bytes(b"[" * 100_000),
    ],
)
def test_records_that_are_not_believed(data: bytes) -> None:
    assert parse_record(data, NONCE, 64) is None


def test_every_text_of_a_record_is_cut() -> None:
    texts = dict.fromkeys(("error_type", "error_message", "traceback", "echo"), "x" * 100_000)
    record = parse_record(record_bytes(json.dumps(report("exception") | texts).encode()), NONCE, keep=1000)
    lengths = [len(getattr(record, name)) for name in texts]
    assert lengths == [200, 500, 8000, 1000 + NOTE_CHARS]
    assert record.truncated


def test_a_good_record_is_read_and_its_fields_are_forced_into_type() -> None:
    record = parse_record(record_bytes(json.dumps(report("exception", error_line="x", denied=1)).encode()), NONCE, 64)
    outcome = decide(done(), record, (0, 0, 0), LIMITS)
    assert outcome.policy_denied is True
    assert outcome.error_line is None

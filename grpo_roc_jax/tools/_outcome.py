"""From what was observed of a child to the typed result: the taxonomy as one pure function. Standard library only.

Facts from outside the process (limits we enforced, exit status) outrank what the process said about itself. Nothing
reads the program's output.
"""

import json
import os
import signal

NONCE_BYTES = 32
SAID = ("ok", "exception", "syntax_error", "memory_limit", "output_limit")
"""Kinds that a child may claim about its own program; none of them is a fault of ours."""


def parse_record(data: bytes, nonce: bytes) -> dict | None:
    """The child's report out of its memory file; None if there is none that is well formed."""
    if data[:NONCE_BYTES] != nonce or data[NONCE_BYTES : 2 * NONCE_BYTES] != nonce:
        return None
    size = data[2 * NONCE_BYTES : 2 * NONCE_BYTES + 8]
    if not size.isdigit():
        return None
    try:
        record = json.loads(data[2 * NONCE_BYTES + 8 : 2 * NONCE_BYTES + 8 + int(size)])
    except (ValueError, RecursionError):
        return None
    texts = ("kind", "error_type", "error_message", "traceback", "echo")
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in texts):
        return None
    return record if record["kind"] in SAID else None


def decide(done: dict, record: dict | None, sizes: tuple[int, int, int], limits: dict) -> dict:
    """Fields of the result that say how the call ended.

    Args:
        done: The worker's report: wait status, the limit it enforced, lock-down fault, times.
        record: The child's report about its program, if it came to make one.
        sizes: Bytes of stdout, of stderr and on the record's descriptor.
        limits: Fields of `ToolsConfig`.
    """
    if done["fault"]:
        return {"kind": "sandbox_error", "error_type": "LockDown", "error_message": done["fault"][:500]}
    status = done["status"]
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if ended_by is not None or done.get("alive") else os.waitstatus_to_exitcode(status)
    ending = {"exit_code": code, "signal": ended_by}
    if done["why"] in ("wall", "cpu", "starved"):
        return ending | {"kind": "timeout", "limit_hit": "cpu" if done["why"] == "cpu" else "wall"}
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and done["cpu"] >= limits["cpu_s"]):
        return ending | {"kind": "timeout", "limit_hit": "cpu"}
    if done["why"] == "output" or max(sizes) > limits["output_kill_mb"] << 20:
        return ending | {"kind": "output_limit", "limit_hit": "output"}
    if done["why"] == "scratch":
        text = f"No space left: the directory may hold {limits['scratch_mb']} MiB, {limits['scratch_files']} files"
        return ending | _failed("OSError", text) | {"limit_hit": "scratch"}
    if done["why"] == "threads":
        return ending | _failed("RuntimeError", f"more than {limits['threads']} threads") | {"limit_hit": "threads"}
    if ended_by is not None:
        return ending | {"kind": "crash", "suspicious": record is not None}
    if record is None:
        return ending | _failed("EarlyExit", f"the process ended by itself with exit code {code}")
    if code not in (0, None):
        return ending | _failed("EarlyExit", f"the process ended with exit code {code}") | {"suspicious": True}
    return ending | _told(record)


def _failed(kind: str, text: str) -> dict:
    return {"kind": "exception", "error_type": kind, "error_message": text}


def _told(record: dict) -> dict:
    """What the child said, with every field forced into its type and length."""
    fields = {
        "kind": record["kind"],
        "error_type": record["error_type"][:200],
        "error_message": record["error_message"][:500],
        "traceback": record["traceback"][:8000],
        "echo": record["echo"],
        "policy_denied": bool(record.get("denied")),
        "limit_hit": {"memory_limit": "memory", "output_limit": "output"}.get(record["kind"], ""),
    }
    for name, key in (("error_line", "error_line"), ("exit_code", "exit_code")):
        if type(record.get(key)) is int and 0 <= record[key] < 1 << 31:
            fields[name] = record[key]
    if record.get("truncated"):
        fields["truncated"] = True
    return fields

"""Runs inside a verification process: reads one JSON line per comparison, writes one JSON line per verdict.

It is started by path, so it imports only the standard library and math-verify. Its clock is its own CPU time: a soft
timer turns a slow comparison into the verdict `timeout`. One second later the kernel ends the process, which also works
while an uninterruptible C routine runs.
"""

import json
import os
import resource
import signal
import sys


class OutOfTime(BaseException):
    """Not an Exception, so that broad handlers inside the libraries do not catch it."""


def _expired(signum, frame):
    raise OutOfTime


def _start_clock(timeout_s: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + timeout_s) + 2, hard))
    signal.setitimer(signal.ITIMER_PROF, timeout_s)


def _judge(request: dict, parse, verify) -> str:
    gold = parse("\\boxed{" + request["gold"] + "}", parsing_timeout=None, fallback_mode="no_fallback")
    if request["answer"] is None:
        return "parsed" if gold else "unparseable"
    answer = parse("\\boxed{" + request["answer"] + "}", parsing_timeout=None, fallback_mode="no_fallback")
    if not gold or not answer:
        return "unparseable"
    return "correct" if verify(gold, answer, timeout_seconds=None) else "wrong"


def main() -> None:
    timeout_s, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    # What the libraries print must not reach the channel of verdicts.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    verify(parse("\\boxed{1}", parsing_timeout=None), parse("\\boxed{1}", parsing_timeout=None), timeout_seconds=None)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _expired)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel.write('"ready"\n')
    for line in sys.stdin:
        request = json.loads(line)
        try:
            try:
                _start_clock(timeout_s)
                verdict = _judge(request, parse, verify)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except OutOfTime:
            verdict = "timeout"
        except MemoryError:
            verdict = "crash"
        except Exception:
            verdict = "unparseable"
        channel.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main()

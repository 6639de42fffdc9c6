"""Time that grows as the length of a text does, and not as its square."""

import time


def assert_linear(action, unit: str, characters: int, *, lead: str = "", slack_s: float = 0.02) -> None:
    """Eight times the text (`lead`, then `unit` repeated) must take about eight times as long; 64 times as long if the
    time is quadratic. `slack_s` is for times that are too short to be measured."""

    def cpu_seconds(size: int) -> float:
        """Of this thread, so that other work on the machine does not count."""
        text, started = lead + unit * max(1, size // len(unit)), time.thread_time()
        action(text)
        return time.thread_time() - started

    quick = any(cpu_seconds(8 * characters) < 24 * cpu_seconds(characters) + slack_s for _ in range(3))
    assert quick, f"{lead}{unit!r}, repeated"

"""A phase is never silent for long, and the first step does not count for the rate."""

from grpo_roc_jax.run.supervised import Progress, describe_seconds


def lines(steps, first_s, each_s):
    progress = Progress("stage", steps, started=100.0)
    times = [100.0 + first_s + each_s * n for n in range(steps)]
    return {step: line for step, now in enumerate(times, 1) if (line := progress.line(step, now))}


def test_quick_steps_say_their_first_ones_and_then_one_line_in_half_a_minute():
    said = lines(200, first_s=20.0, each_s=1.0)
    assert list(said) == [1, 2, 5, 10, 40, 70, 100, 130, 160, 190, 200]
    assert said[1] == "stage: step 1 of 200 after 20.0 s, compilation included"
    assert said[10] == "stage: step 10 of 200, 1.00 s a step, 3 min left"
    assert said[200] == "stage: step 200 of 200, 1.00 s a step"


def test_slow_steps_say_something_each_time():
    assert list(lines(13, first_s=60.0, each_s=45.0)) == list(range(1, 14))


def test_durations_in_words():
    assert [describe_seconds(s) for s in (4.4, 89, 120, 5000, 20000)] == ["4 s", "89 s", "2 min", "83 min", "5.6 h"]

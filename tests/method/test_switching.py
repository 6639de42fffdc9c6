"""When a stage ends, by hand-computed series of metrics."""

from dataclasses import replace

import pytest

from grpo_roc_jax.method.switching import Plateau, Solved, Stage, StageProgress, Steady


@pytest.mark.parametrize(
    ("condition", "values", "met"),
    [
        (Solved(share=0.7, window=3), [0.9, 0.9], False),  # too few steps
        (Solved(share=0.7, window=3), [0.0, 0.5, 0.7, 0.9], True),  # mean of the last three: 0.7
        (Solved(share=0.7, window=3), [0.9, 0.5, 0.7, 0.8], False),  # 0.667
        (Steady(window=2, tolerance=0.02, least=0.05), [0.11, 0.09, 0.10, 0.12], True),  # 0.10, then 0.11
        (Steady(window=2, tolerance=0.02, least=0.05), [0.05, 0.07, 0.10, 0.12], False),  # 0.06, then 0.11
        (Steady(window=2, tolerance=0.02, least=0.05), [0.0, 0.0, 0.0, 0.0], False),  # below `least`
        (Steady(window=2, tolerance=0.02, least=0.0), [0.0, 0.0, 0.0, 0.0], True),
        (Steady(window=2), [0.1, 0.1, 0.1], False),
        (Plateau(evaluations=2, gain=0.01), [0.50, 0.51, 0.505], True),  # 0.51 is no gain above 0.50 + 0.01
        (Plateau(evaluations=2, gain=0.01), [0.50, 0.505, 0.52], False),
        (Plateau(evaluations=2, gain=0.01), [0.50, 0.40], False),  # nothing before the last two
        (Plateau(evaluations=1, gain=0.0), [0.4, 0.6, 0.5], True),
    ],
)
def test_conditions(condition, values, met):
    assert condition.met(values) is met


def test_what_conditions_read():
    step = {"rollout/truncated": 0.25, "rollout/reward": 0.5, "roc/solved_by_all": 3.0, "roc/groups": 8.0}
    evaluation = {"eval/aime/avg@4": 0.1, "eval/all/avg@4": 0.75, "eval/all/pass@4": 1.0}
    assert (Steady().value(step), Steady(metric="rollout/reward").value(step)) == (0.25, 0.5)
    assert (Solved().value(step), Solved().value({"roc/solved_by_all": 0.0, "roc/groups": 0.0})) == (0.375, None)
    assert (Plateau().value(evaluation), Plateau().value(step), Steady().value(evaluation)) == (0.75, None, None)


SHORT = Stage(name="short", steps=4, until=(Solved(share=0.5, window=2), Plateau(evaluations=1)))
STAGES = (SHORT, Stage(name="long", steps=2))


def series(*shares):
    return [{"roc/solved_by_all": share, "roc/groups": 1.0} for share in shares]


def test_a_stage_ends_after_its_steps_or_once_all_its_conditions_hold():
    progress = StageProgress(0, began=10, values=((), ()))
    assert [progress.following(STAGES, step) for step in (10, 13, 14, 20)] == [0, 0, 1, 1]
    for metrics in (*series(0.5, 0.9), {"eval/all/avg@1": 0.5}):
        progress = progress.observed(SHORT, metrics)
    assert progress.values == ((0.5, 0.9), (0.5,))
    assert progress.following(STAGES, 12) == 0  # one of two conditions holds
    assert progress.observed(SHORT, {"eval/all/avg@1": 0.5}).following(STAGES, 12) == 1
    assert progress.observed(SHORT, {"eval/all/avg@1": 0.6}).following(STAGES, 12) == 0
    assert progress.observed(SHORT, {"eval/all/avg@1": float("nan")}) == progress


def test_other_conditions_begin_anew():
    """A run with `--force` may give its stage others than its checkpoint has values for; which they were is not known
    in checkpoints of earlier versions."""
    progress = StageProgress(0, began=10)
    for metrics in (*series(0.9, 0.9), {"eval/all/avg@1": 0.5}, {"eval/all/avg@1": 0.5}):
        progress = progress.observed(SHORT, metrics)
    assert progress.following(STAGES, 12) == 1 and StageProgress.from_json(progress.to_json()) == progress
    solved, plateau = SHORT.until
    for until, values in (
        ((plateau, solved), ((0.5, 0.5), (0.9, 0.9))),
        ((Solved(share=0.6, window=2), plateau), ((), (0.5, 0.5))),
        ((Steady(window=1), Steady(window=1, metric="rollout/reward")), ((), ())),
        ((solved,), ((0.9, 0.9),)),
        ((), ()),
    ):
        assert progress.read_by(replace(SHORT, until=until)) == values
    for values in ((), ((0.9, 0.9),), ((0.9, 0.9), (0.5,), (1.0,))):
        progress = StageProgress(0, began=10, values=values)
        assert [progress.following(STAGES, step) for step in (12, 14)] == [0, 1]
        assert progress.observed(SHORT, series(0.5)[0]).values == ((0.5,), ())


def test_the_first_stage_comes_before_any_progress_and_none_after_the_last():
    assert StageProgress().following(STAGES, 0) == 0
    assert [StageProgress(1, began=4).following(STAGES, step) for step in (5, 6)] == [1, 2]
    saved = StageProgress(0, 3, ((0.1, 0.30000000000000004), ()))
    assert StageProgress.from_json(saved.to_json()) == saved and StageProgress.from_json(None) == StageProgress()

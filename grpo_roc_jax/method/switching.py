"""Stages of a run: what each changes, and when the next one begins (`run.stages` runs them)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.settings.options import AtLeast1, Axis, Count, NotNegative, PositiveShare, Share, kind, settings


class Until(Axis, axis="stages.until"):
    """What ends a stage before its last step."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The value that the condition reads from the metrics of a step or an evaluation; None if they do not contain
        it."""
        raise NotImplementedError

    def met(self, values: Sequence[float]) -> bool:
        """Whether the condition holds after these values, oldest first."""
        raise NotImplementedError


@kind("steady")
class Steady(Until):
    """A metric no longer changes: its means over the last `window` steps and the `window` steps before differ by at
    most `tolerance`, and the last one is at least `least`."""

    metric: str = "rollout/truncated"
    """Name of the metric. The default is the share of rollouts that a limit cut; the first published stage ended when
    it stayed near 10% (arXiv:2508.20722, sec. 4.3)."""
    window: AtLeast1 = 20
    """Steps in each of the two means."""
    tolerance: NotNegative = 0.01
    """Largest difference of the means."""
    least: float = 0.05
    """Least mean of the last steps, so that a share that is still 0 is not taken for a steady one."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        return metrics.get(self.metric)

    def met(self, values: Sequence[float]) -> bool:
        if len(values) < 2 * self.window:
            return False
        last, before = np.mean(values[-self.window :]), np.mean(values[-2 * self.window : -self.window])
        return bool(abs(last - before) <= self.tolerance and last >= self.least)


@kind("plateau")
class Plateau(Until):
    """Held-out accuracy no longer rises: none of the last `evaluations` is above the best one before by more than
    `gain`. Needs `eval.every`."""

    evaluations: AtLeast1 = 3
    """Evaluations without a gain."""
    gain: NotNegative = 0.005
    """Least gain that counts."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        return next((value for name, value in metrics.items() if name.startswith("eval/all/avg@")), None)

    def met(self, values: Sequence[float]) -> bool:
        last, before = values[-self.evaluations :], values[: -self.evaluations]
        return bool(before) and max(last) <= max(before) + self.gain


@kind("solved")
class Solved(Until):
    """Most problems are solved by all of their rollouts: their mean share over `window` steps is at least `share`."""

    share: PositiveShare = 0.7
    """The second published stage ended above 70% (arXiv:2508.20722, sec. 4.3)."""
    window: AtLeast1 = 5
    """Steps in the mean."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        groups = metrics.get("roc/groups")
        solved = metrics.get("roc/solved_by_all", metrics.get("roc/all_correct"))  # rows of older versions lack it
        return None if not groups or solved is None else solved / groups

    def met(self, values: Sequence[float]) -> bool:
        return len(values) >= self.window and bool(np.mean(values[-self.window :]) >= self.share)


@settings
class ProblemChoice:
    """Which training problems a stage keeps: those that its first policy solves in a share of rollouts between two
    bounds. Problems that it solves always or never give groups without a learning signal."""

    rollouts: AtLeast1 = 8
    """Rollouts of each problem; shares are multiples of 1 / rollouts."""
    problems: Count = 0
    """Training problems that are tried, drawn by `seed`; the others leave the stage. 0 tries all of them."""
    lowest: Share = 0.05
    """Smallest share that is kept. The default leaves out what is never solved; 0 keeps it, as published
    (arXiv:2508.20722, sec. 4.3)."""
    highest: Share = 0.95
    """Largest share that is kept. The default leaves out what is always solved, as published."""

    def __post_init__(self) -> None:
        if self.lowest > self.highest:
            raise ValueError(f"lowest = {self.lowest} lies above highest = {self.highest}; swap them")

    def keeps(self, solved: int, judged: int) -> bool:
        """Whether a problem stays. One without a rollout that could be judged does."""
        return not judged or self.lowest <= solved / judged <= self.highest


@settings
class Stage:
    """A part of a run with settings of its own."""

    name: str
    """Name, shown when the stage begins."""
    steps: AtLeast1
    """Most training steps of the stage."""
    until: tuple[Until, ...] = ()
    """Conditions that end it earlier, once all of them hold."""
    restart: tuple[Literal["optimizer", "reference"], ...] = ()
    """What begins again with the stage: `optimizer` clears its moments and warms up again, `reference` copies the
    policy into the reference of a KL term."""
    choose: ProblemChoice | None = None
    """Rolls training problems out when the stage begins, and keeps those that the policy solves sometimes. Without it
    every problem stays."""
    set: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the stage that override those of the run, in sections as in a file."""


@dataclass(frozen=True)
class StageProgress:
    """Position of a run among its stages; part of its checkpoints."""

    index: int = -1
    """-1 before the first stage."""
    began: int = 0
    """Training steps before the stage."""
    values: tuple[tuple[float, ...], ...] = ()
    """The values that each condition of `until` has read since the stage began."""
    conditions: tuple[str, ...] = ()
    """Those conditions with their settings; empty before the first reading, and in checkpoints of earlier versions."""

    def read_by(self, stage: Stage) -> tuple[tuple[float, ...], ...]:
        """`values` for the conditions of its stage; none for one that a resumed run has changed or added."""
        if not self.conditions:
            return self.values if len(self.values) == len(stage.until) else ((),) * len(stage.until)
        known = dict(zip(self.conditions, self.values, strict=True))
        return tuple(known.get(repr(condition), ()) for condition in stage.until)

    def observed(self, stage: Stage, metrics: Mapping[str, float]) -> "StageProgress":
        """The progress with the values that the conditions of its stage read from the metrics of a step or an
        evaluation."""
        readings = [condition.value(metrics) for condition in stage.until]
        pairs = zip(self.read_by(stage), readings, strict=True)
        more = tuple(values if new is None or not np.isfinite(new) else (*values, float(new)) for values, new in pairs)
        return replace(self, values=more, conditions=tuple(map(repr, stage.until)))

    def following(self, stages: Sequence[Stage], step: int) -> int:
        """Index of the stage of the next step after `step` steps: this one, or the next one if this one is complete."""
        if not 0 <= self.index < len(stages):
            return self.index + 1
        stage = stages[self.index]
        met = [condition.met(values) for condition, values in zip(stage.until, self.read_by(stage), strict=True)]
        return self.index + (step - self.began >= stage.steps or (bool(met) and all(met)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"values": list(map(list, self.values)), "conditions": list(self.conditions)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any] | None) -> "StageProgress":
        """Inverse of `to_json`; the progress before the first stage if `saved` is None."""
        if not saved:
            return cls()
        return cls(
            saved["index"], saved["began"], tuple(map(tuple, saved["values"])), tuple(saved.get("conditions", ()))
        )

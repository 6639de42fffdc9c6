"""Alarms: signs in the metrics that a run collapses or diverges, noted as events or ending the run."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

from grpo_roc_jax.config import WatchConfig
from grpo_roc_jax.record.events import Events
from grpo_roc_jax.run.watch import DIVERGED_STATUS, Stopped
from grpo_roc_jax.types import Metrics

RULES = (
    ("reward_spread", "rollout/reward_std", "below"),
    ("tool_calls", "rollout/tool_calls", "times"),
    ("entropy_low", "loss/entropy", "below"),
    ("entropy_high", "loss/entropy", "above"),
    ("truncated", "rollout/truncated", "above"),
    ("grad_norm", "update/grad_norm", "times"),
    ("logprob_gap", "loss/logprob_gap_mean", "above"),
    ("sample_size", "loss/effective_sample_size", "below"),
    ("answers", "rollout/answers", "above"),
)
"""Alarm (a setting of `watch`), its metric, and on which side of the threshold it is raised; `times` is above so many
times the median of the last steps."""
LEAST_HISTORY = 5
"""Steps before a jump can be seen."""
LARGE_GAP = 1.0
"""Nats between the log-probabilities of a token in sampling and in training that no rounding of float32 explains."""


class GapCheck:
    """Notes a step whose sampler and trainer disagree about a token by more than rounding can; in every run, with and
    without a section `watch`. An event is raised once until the gap is back."""

    def __init__(self, events: Events, *, exact: bool):
        """`exact`: whether the two compute the same numbers but for their rounding in float32."""
        self._events, self._exact, self._large = events, exact, False

    def look(self, step: int, metrics: Metrics) -> bool:
        """Whether this step raises the event."""
        value = metrics.get("loss/logprob_gap_max", math.nan)
        before, self._large = self._large, self._exact and value > LARGE_GAP
        if not self._large or before:
            return False
        text = (
            f"loss/logprob_gap_max {value:.4g} nats in float32: a token has another log-probability in training than "
            "when it was sampled; the tokens or the weights are not those of the sampler"
        )
        more = {"metric": "loss/logprob_gap_max", "value": value, "threshold": LARGE_GAP, "action": "note"}
        self._events.note(step, "logprob_gap_max", text, **more)
        return True


class Alarms:
    """Looks at the metrics of each step in turn.

    A level has to be crossed in `watch.steps` steps in a row, a jump in one; an alarm is raised once until its metric
    is back.
    """

    def __init__(self, config: WatchConfig, events: Events | None = None):
        self._config, self._events = config, events or Events(None)
        self._past: deque[Metrics] = deque(maxlen=config.history)
        self._crossed: Counter[str] = Counter()

    @property
    def longest(self) -> int:
        """Steps before a resume that matter."""
        return self._config.history + self._config.steps

    def recall(self, rows: Sequence[Metrics]) -> None:
        """Takes the steps before a resume, whose rows these are, without raising anything."""
        for row in rows:
            if "time/step_s" in row:
                list(self._raised(row))

    def look(self, step: int, metrics: Metrics) -> list[str]:
        """The names of the alarms that this step raises.

        Raises:
            Stopped: One of them is among `watch.stop`.
        """
        raised, last = [], ""
        for name, metric, value, threshold in self._raised(metrics):
            action = "stop" if name in self._config.stop else "note"
            text = f"{metric} {value:.4g} is {'below' if value < threshold else 'above'} {threshold:.4g}"
            self._events.note(step, name, text, metric=metric, value=value, threshold=threshold, action=action)
            raised.append(name)
            last = f"alarm {name}: {text}; watch.stop lists it" if action == "stop" else last
        if last:
            raise Stopped(DIVERGED_STATUS, last)
        return raised

    def _raised(self, metrics: Metrics) -> Iterator[tuple[str, str, float, float]]:
        """(alarm, metric, value, threshold) of each alarm that a step raises."""
        for name, metric, side in RULES:
            value, threshold = metrics.get(metric, math.nan), getattr(self._config, name)
            if side == "times":
                before = [row[metric] for row in self._past if math.isfinite(row.get(metric, math.nan))]
                median = float(np.median(before)) if len(before) >= LEAST_HISTORY else math.inf
                threshold *= median if median > 0 else math.inf
            crossed = value < threshold if side == "below" else value > threshold
            self._crossed[name] = self._crossed[name] + 1 if crossed else 0
            if self._crossed[name] == (1 if side == "times" else self._config.steps):
                yield name, metric, value, threshold
        self._past.append(metrics)

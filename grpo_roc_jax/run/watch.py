"""Why a run ends early, with an exit status for each reason, and the watch that counts bad steps in a row."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from grpo_roc_jax.config import LimitsConfig
from grpo_roc_jax.rollout.records import FailureCount
from grpo_roc_jax.types import Metrics

CONFIG_STATUS, NO_SIGNAL_STATUS, DIVERGED_STATUS, INFRASTRUCTURE_STATUS = 2, 3, 4, 5


class Stopped(Exception):
    """The run ends early for a reason that has an exit status of its own."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Watch:
    """Counts bad steps in a row and ends a run that makes no progress."""

    def __init__(self, limits: LimitsConfig):
        self._limits = limits
        self._empty = self._skipped = self._broken = 0
        self._passed = False
        """Some rollout did not fail."""
        self._named = ""
        """The commonest failure of an environment or agent in the last step that had one, for messages."""
        self._kinds: set[str] = set()

    def recall(self, rows: Sequence[Metrics]) -> None:
        """Counts the steps before a resume, whose rows these are."""
        for row in rows:
            lost = row.get("rollout/stop_failed", 0.0) + row.get("rollout/stop_infrastructure", 0.0)
            self._passed = self._passed or lost < 1
            if "time/step_s" in row:
                with suppress(Stopped, KeyError):  # versions add metrics
                    self.look(row)

    def new_failures(self, failures: Mapping[str, FailureCount]) -> list[str]:
        """The texts of failures of kinds that no earlier step of this process had."""
        new = failures.keys() - self._kinds
        self._kinds |= new
        return [failures[kind].text for kind in sorted(new)]

    def look_at_failures(self, failures: Mapping[str, FailureCount], rollouts: int) -> None:
        """Takes the failures of environments and agents of each step in turn, by kind, and the number of its rollouts.

        Raises:
            Stopped: All rollouts of the step ended by one failure. One that the policy caused ends a run in which no
                rollout has gone better so far.
        """
        before, self._passed = self._passed, self._passed or sum(one.count for one in failures.values()) < rollouts
        if not failures:
            return
        worst = max(failures.values(), key=lambda one: one.count)
        self._named = f"; {worst.count} of {rollouts} rollouts of the last such step: {worst.text}"
        alike = worst.count >= rollouts > 0
        if alike and (not worst.by_policy or (worst.same and not before)):
            remedy = "mend it" + (", or show the policy what it must say" if worst.by_policy else "")
            raise Stopped(
                INFRASTRUCTURE_STATUS,
                f"infrastructure: all {rollouts} rollouts of a step ended alike: {worst.text}; {remedy}. The log and "
                "the first such trajectory have the traceback",
            )

    def look(self, metrics: Metrics) -> None:
        """Raises `Stopped` when a limit is reached; takes the metrics of each step in turn."""
        limits = self._limits
        lost = metrics.get("verdict/infrastructure", 0.0) + metrics.get("verdict/not_scored", 0.0)
        self._broken = self._broken + 1 if lost > limits.infrastructure_share else 0
        empty = "loss/value" not in metrics or metrics["update/signal"] == 0
        if not self._broken:  # a step without its trajectories says nothing about the problems
            self._empty = self._empty + 1 if empty else 0
        self._skipped = self._skipped + 1 if metrics.get("update/skipped", 0.0) and "loss/value" in metrics else 0
        if self._empty >= limits.empty_steps:
            raise Stopped(
                NO_SIGNAL_STATUS,
                f"no learning signal: {self._empty} steps in a row without a group of unequal rewards (in the last: "
                f"{metrics['roc/all_correct']:.0f} all correct, {metrics['roc/all_wrong']:.0f} all wrong); "
                f"change the difficulty of data.sources, or raise group.dynamic_sampling_rounds{self._named}",
            )
        if self._skipped >= limits.skipped_updates:
            raise Stopped(
                DIVERGED_STATUS,
                f"diverged: {self._skipped} updates in a row were not finite and left the policy as it was; "
                "lower optim.lr, or resume from an earlier checkpoint",
            )
        if self._broken >= limits.infrastructure_steps:
            raise Stopped(
                INFRASTRUCTURE_STATUS,
                f"infrastructure: more than {limits.infrastructure_share:.0%} of the trajectories were lost in each of "
                f"{self._broken} steps, {lost:.0%} in the last ({metrics.get('verdict/not_scored', 0.0):.0%} that a "
                f"reward function did not score); see the warnings, tools/ metrics and the trajectory log{self._named}",
            )

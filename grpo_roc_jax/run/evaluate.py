"""Evaluation of a policy on held-out problems, with the engine, executor and verifier of training: in one call, in
parts that are saved once they are scored, and as counts of how often each problem is solved.

The random numbers of a rollout depend on the index of its problem and not on the part, so the division into parts does
not change results, and an interrupted evaluation or count continues with the remaining problems.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.method.planning import PromptEnd
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.record.accuracy import eval_metrics, summarize
from grpo_roc_jax.record.metrics import JsonlWriter, parsed_row
from grpo_roc_jax.record.run_dir import write_whole
from grpo_roc_jax.record.trace import TraceWriter, eval_records, read_trace
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.run.sample import GroupSampler, ScoredRollouts, sample_groups
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import PLAIN, Group, Metrics, Problem, RolloutRequest, Trajectory, Verdict


def evaluate_policy(
    config: Config,
    sampling: GroupSampler,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int = 0,
    temperature: float | None = None,
    weights: SamplerParams | None = None,
) -> tuple[float, Metrics, ScoredRollouts]:
    """Evaluates a policy; returns (avg@samples over all problems, metrics by source, the scored rollouts).

    Args:
        config: Configuration of the run.
        sampling: Group sampler, from `open_policy`.
        problems: Problems held out from training.
        samples: Rollouts for each problem.
        step: Training step; evaluation draws from random streams of its own.
        temperature: Replaces `sampling.temperature`; 0 is greedy.
        weights: From `engine.publish`; by default those that the sampler already has.
    """
    problems = list(problems)
    condition, suffix = prompt_end(config, step)
    extras = {"temperature": temperature, "condition": condition, "suffix": suffix}
    weights = sampling.sampler.weights if weights is None else weights
    sampled = sample_groups(sampling, weights, problems, samples, RunOptions(step, "evaluate"), **extras)
    table = summarize(sampled.groups, samples, sampled.removed)
    return table["all"][f"avg@{samples}"], eval_metrics(table), sampled


def prompt_end(config: Config, step: int) -> PromptEnd:
    """(condition, end of the prompt) of evaluation after `step` steps: as the condition of the rollouts says,
    or else that of the demonstrations, with the token budget."""
    condition, text = config.plan.condition.evaluation() or config.sft.condition.evaluation() or (PLAIN, "")
    return condition, text + prompt_suffix(config.shaping, step)


def check_before_training(
    config: Config, policy: PolicyModel, sampling: GroupSampler, problems: Sequence[Problem], trained: Any
) -> list[str]:
    """Lines on held-out success under the prompts that `plan.condition` compares; none where it compares none.

    Args:
        config: Configuration of the run.
        policy: The model on its mesh.
        sampling: Group sampler of the run.
        problems: The held-out problems of the run, whose prompts have room for these ends.
        trained: Parameters of the training state after the supervised stage.

    Raises:
        ConfigError: The condition refuses a policy of such success.
    """
    prompt_ends = config.plan.condition.compared()
    if not prompt_ends or not config.steps:
        return []
    weights, rates = sampling.sampler.engine.publish(policy.full(trained), 0), []
    for condition, text in prompt_ends:
        extras = {"condition": condition, "suffix": text}
        options = RunOptions(0, "evaluate")
        sampled = sample_groups(sampling, weights, problems, config.eval.samples, options, **extras)
        correct = [group.correct for group in sampled.groups if group.size]
        rates.append(float(np.mean(np.concatenate(correct))) if correct else 0.0)
    try:
        return config.plan.condition.check_compared(rates)
    except ValueError as error:
        raise ConfigError(str(error)) from error


FILLS = 4
"""How many times the rollouts of a part fill the slots of the engine."""

Counts = dict[str, tuple[int, int]]
"""uid -> (correct rollouts, rollouts that could be scored)."""


def count_solved(
    path: Path,
    sampling: GroupSampler,
    publish: Callable[[], SamplerParams],
    problems: Sequence[Problem],
    samples: int,
    step: int,
    *,
    fills: int = FILLS,
) -> Counts:
    """Counts how often each problem is solved. Counts already in the file `path` are reused, and new ones are appended
    to it.

    Args:
        path: JSON lines with `step` (index of a problem in the list), `uid`, `solved`, `judged`, `rollouts` and
            `policy_step`. Rows of other numbers of rollouts or of another policy are not used.
        sampling: Group sampler of the run.
        publish: Returns the weights to sample with; called only if there are problems left.
        problems: In the same order in each call.
        samples: Rollouts of each problem.
        step: Training steps of the policy.
        fills: How many times the rollouts of a part fill the slots of the engine.
    """
    once = sampling.processes.once
    made = {"rollouts": samples, "policy_step": step}
    counts = once(lambda: read_counts(path, made))
    left = [(index, problem) for index, problem in enumerate(problems) if problem.uid not in counts]
    if not left:
        return counts
    weights, file = publish(), JsonlWriter(path)
    once(lambda: file.cut(left[0][0] - 1))
    size = part_size(sampling, samples, fills)
    with phase("problems", steps=len(left), unit="problem") as counting:
        for first in range(0, len(left), size):
            part = left[first : first + size]
            requests = [RolloutRequest(problem, index, samples) for index, problem in part]
            groups = sampling.sample_requests(weights, requests, RunOptions(step, "evaluate")).groups
            rows = [{"uid": g.problem.uid, "solved": int(g.correct.sum()), "judged": g.size} | made for g in groups]
            counts |= {row["uid"]: (row["solved"], row["judged"]) for row in rows}
            places = [index for index, _ in part]
            once(lambda places=places, rows=rows: list(map(file.write, places, rows)))
            counting.step(first + len(part))
    return counts


def part_size(sampling: GroupSampler, samples: int, fills: int) -> int:
    """Number of problems that are rolled out together."""
    return max(1, fills * sampling.rollout.slots // samples)


def read_counts(path: Path, made: Mapping[str, int] = MappingProxyType({})) -> Counts:
    """Reads the counts in a file, skipping damaged rows and those that differ from `made` in what they say of it; empty
    if there is no file."""
    lines = path.read_bytes().splitlines(True) if path.exists() else ()
    rows = [row for row in filter(None, map(parsed_row, lines)) if made == {k: row.get(k, v) for k, v in made.items()}]
    return {row["uid"]: (row["solved"], row["judged"]) for row in rows}


PARTS = "parts"
"""Folder of the parts; removed when all of them are scored."""
REQUEST_FILE = "asked.json"
"""File with everything that the results in a folder depend on."""


class Parts:
    """The scored parts of an evaluation in a folder.

    Args:
        folder: Folder of the evaluation.
        request: Everything that the results depend on. Parts of an interrupted evaluation are reused if it had the
            same.
        fills: How many times the rollouts of a part fill the slots of the engine.

    Raises:
        ConfigError: The folder holds parts of another evaluation.
    """

    def __init__(self, folder: Path, request: Any, *, fills: int = FILLS) -> None:
        self.target, self.folder, self.fills = folder, folder / PARTS, fills
        text, path = json.dumps(request, default=str), folder / REQUEST_FILE
        self._known = path.is_file()
        if self._known and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{folder} holds an evaluation of another policy or with other settings; use those, or another --keep"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._known:
            write_whole(path, text)
        self._writer = TraceWriter(self.folder)

    def finished(self, step: int, problems: Sequence[Problem], samples: int) -> ScoredRollouts | None:
        """The rollouts of an evaluation that was completed in this folder; None if there is none."""
        return self.read(step, problems, samples, self.target) if self._known else None

    def read(
        self, number: int, problems: Sequence[Problem], samples: int, folder: Path | None = None
    ) -> ScoredRollouts | None:
        """The rollouts of a part; None if it is not saved."""
        records = list(read_trace(folder or self.folder, number, kind="eval"))
        if len(records) != samples * len(problems):
            return None
        each: list[list[tuple[Trajectory, Verdict]]] = [[] for _ in problems]
        for record in records:
            if record.group >= 0:
                each[record.group].append((record.trajectory, record.verdict))
        pairs = (tuple(zip(*rollouts, strict=True)) or ((), ()) for rollouts in each)
        groups = tuple(Group(problem, *pair) for problem, pair in zip(problems, pairs, strict=True))
        return ScoredRollouts(groups, tuple((r.problem, r.trajectory) for r in records if r.group < 0))

    def write(self, number: int, rollouts: ScoredRollouts) -> None:
        """Saves the rollouts of a part."""
        self._writer.write(number, eval_records(number, rollouts.groups, rollouts.removed), kind="eval")

    def remove(self) -> None:
        """Removes the folder of the parts."""
        shutil.rmtree(self.folder)


def sample_parts(
    sampling: GroupSampler,
    weights: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    options: RunOptions,
    parts: Parts,
    **extras: Any,
) -> ScoredRollouts:
    """Like `sample_groups`, one part after the other. Parts that `parts` has saved are read instead."""
    size = part_size(sampling, samples, parts.fills)
    spans = [problems[first : first + size] for first in range(0, len(problems), size)]
    each = [parts.read(number, some, samples) for number, some in enumerate(spans)]
    left, done = sum(len(some) for some, saved in zip(spans, each, strict=True) if saved is None), 0
    with phase("evaluation", steps=left, unit="problem") as evaluation:
        for number, some in enumerate(spans):
            if each[number] is None:
                first = number * size
                requests = [RolloutRequest(problem, first + i, samples, **extras) for i, problem in enumerate(some)]
                each[number] = sampling.sample_requests(weights, requests, options)
                parts.write(number, each[number])
                done += len(some)
                evaluation.step(done)
    groups, removed = (tuple(chain(*(getattr(rollouts, name) for rollouts in each))) for name in ("groups", "removed"))
    return ScoredRollouts(groups, removed)

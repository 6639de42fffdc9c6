"""Runs with stages. Each stage is a session of its own with the settings of the stage; it continues from the newest
checkpoint in the same directory. Everything that a session builds therefore fits its stage, and an interrupted run
continues as if it had not been interrupted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_roc_jax.data.pipeline import Notes, training_problems
from grpo_roc_jax.learner.update import start_train_state
from grpo_roc_jax.method import compose
from grpo_roc_jax.method.state import visited
from grpo_roc_jax.method.switching import ProblemChoice, StageProgress
from grpo_roc_jax.record.run_dir import Start
from grpo_roc_jax.run.components import prompt_length
from grpo_roc_jax.run.evaluate import count_solved
from grpo_roc_jax.run.policy import at_rest
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.session import Claim, TrainingSession
from grpo_roc_jax.run.start import problem_stream, reference_copy
from grpo_roc_jax.run.watch import NO_SIGNAL_STATUS, Stopped
from grpo_roc_jax.settings.cli import config_errors
from grpo_roc_jax.types import Metrics, Problem

COUNTS_FILE = "difficulty_{}.jsonl"
"""File of the counts of a stage with `choose`, by its number from 1."""
OTHER_DATA = "the data are other ones than those of the checkpoint: they begin at their start"


def first_stage(claim: Claim) -> Claim:
    """The claim with the settings of the stage of the next step; unchanged without stages."""
    return at_stage(claim, min(claim.start.stage, len(claim.stages) - 1)) if claim.stages else claim


def at_stage(claim: Claim, index: int) -> Claim:
    """The claim with the settings of one stage."""
    return replace(claim, config=replace(claim.all_stages.staged()[index], steps=claim.all_stages.steps), stage=index)


def next_claim(claim: Claim, run: RunState) -> Claim | None:
    """The claim of the next stage; None where the run ends."""
    following = run.progress.following(claim.stages, run.step)
    if following >= len(claim.stages) or run.step >= claim.config.steps:
        return None
    return at_stage(replace(claim, start=Start("resume", run.step, began=run.step), progress=run.progress), following)


def stage_over(session: TrainingSession, run: RunState) -> bool:
    """Whether the next step belongs to another stage than that of the session."""
    claim = session.claim
    return bool(claim.stages) and run.progress.following(claim.stages, run.step) != claim.stage


def steps_left(session: TrainingSession, run: RunState) -> int:
    """Most steps that the session still does."""
    claim, left = session.claim, session.config.steps - run.step
    if claim.stages and run.progress.index == claim.stage:
        left = min(left, run.progress.began + claim.stages[claim.stage].steps - run.step)
    return max(left, 0)


def observe(session: TrainingSession, run: RunState, metrics: Metrics) -> Metrics:
    """Shows the metrics of a step or an evaluation to the conditions of the stage. Returns the number of the stage,
    from 1, as a metric."""
    claim = session.claim
    if not claim.stages:
        return {}
    if run.progress.index == claim.stage and run.step > run.progress.began:
        run.progress = run.progress.observed(claim.stages[claim.stage], metrics)
    return {"stage": claim.stage + 1.0}


@config_errors()
def enter_stage(session: TrainingSession, run: RunState, data: Mapping[str, Any] | None) -> None:
    """Begins the stage of the session, or continues it. A plain run stays as it is.

    Waiting groups and cut rollouts belong to the stage before and are dropped. The position in the data is kept if both
    stages have the same data. A run that ends before the first step of the stage (`grpo-roc sft`) does not begin it:
    problems are chosen when the run continues.

    Args:
        session: Session of the stage.
        run: State as restored, except for the position in the data.
        data: Position in the data; None for a fresh run.
    """
    claim = session.claim
    if not claim.stages:
        return
    if data is None and claim.processes.first:  # counts of a run that was here before
        for counts in session.run_dir.glob(COUNTS_FILE.format("*")):
            counts.unlink()
    if claim.progress is not None and run.step == claim.start.step:
        run.progress = claim.progress
    begins = run.progress.index != claim.stage and run.step < session.config.steps and not stage_over(session, run)
    if begins:
        begin_stage(session, run)
    if claim.stages[claim.stage].choose and run.progress.index == claim.stage:
        choose_problems(session, run, begins)
    try:
        if data is not None:
            run.stream.set_state(data)
    except ValueError:  # the stage before had other data
        if not begins and run.progress.index == claim.stage:
            if not claim.start.forced:
                raise
            session.writer.say(OTHER_DATA)
    session.checkpointer.latest = run.bundle()


def begin_stage(session: TrainingSession, run: RunState) -> None:
    """Sets the state for the first step of a stage; `restart` says which parts of it are reset."""
    claim, config, policy = session.claim, session.config, session.policy
    stage = claim.stages[claim.stage]
    run.progress = StageProgress(claim.stage, run.step, ((),) * len(stage.until))
    dropped = len(run.buffer.discard(lambda group: True)) + len(run.partial)
    run.partial = ()
    memory = dict(compose.initial_state(config).memory) | dict(run.method.memory)
    run.method = replace(run.method, memory=memory)
    if "optimizer" in stage.restart:
        state = start_train_state(run.train.params, policy.model, config.optim, policy.mesh, config.lora, donate=True)
        run.train = at_rest(config, state)
    if "reference" in stage.restart:
        run.reference = reference_copy(config, run)
    left = f"; {dropped} groups of the stage before are dropped" if dropped else ""
    text = f"{stage.name} begins, {claim.stage + 1} of {len(claim.stages)}{left}"
    session.events.note(run.step + 1, "stage", text)


def choose_problems(session: TrainingSession, run: RunState, begins: bool) -> None:
    """Keeps the training problems that the policy at the start of the stage solves as often as `choose` says.

    The counts are written to `difficulty_N.jsonl` of the run directory as they come, so that an interrupted run
    continues with the remaining problems. When the stage begins they also enter the table of problems.

    Raises:
        Stopped: No problem is kept.
    """
    claim, config, sampler = session.claim, session.config, session.sampling.sampler
    choice, chat = claim.stages[claim.stage].choose, sampler.chat
    path = session.run_dir / COUNTS_FILE.format(claim.stage + 1)
    length, longest = prompt_length(config, chat), config.rollout.max_prompt_tokens
    sources = training_problems(config.data, config.seed, Notes(), length, longest)
    problems = [problem for _, rows in sources for problem in rows]
    begun = run.progress.began
    counts = count_solved(
        path,
        session.sampling,
        lambda: sampler.engine.publish(session.policy.full(run.train.params), begun),
        drawn(problems, choice.problems, config.seed),
        choice.rollouts,
        begun,
    )
    uids, text = solved_sometimes(counts, choice, claim.stages[claim.stage].name)
    if gone := [source for source, rows in sources if uids.isdisjoint(problem.uid for problem in rows)]:
        text += f"; none of {', '.join(gone)}"
    run.stream = problem_stream(config, chat, {problem.uid for problem in problems} - uids)
    if begins:
        known = [uid for uid, (_, judged) in counts.items() if judged]
        won, judged = (np.array([counts[uid][i] for uid in known], np.float64) for i in (0, 1))
        run.method = visited(run.method, known, won, judged, config.method.tracker_decay)
        session.events.note(run.step + 1, "chosen", text)


def solved_sometimes(counts: Mapping[str, tuple[int, int]], choice: ProblemChoice, stage: str) -> tuple[set[str], str]:
    """(uids of the problems that stay, a line on them), from `uid -> (solved, judged)`.

    Raises:
        Stopped: No problem stays.
    """
    uids = {uid for uid, (solved, judged) in counts.items() if choice.keeps(solved, judged)}
    tried = f"of {len(counts)} problems that the policy tried {choice.rollouts} times"
    band = f"a share in [{choice.lowest:g}, {choice.highest:g}]"
    if not uids:
        shares = [solved / judged for solved, judged in counts.values() if judged]
        raise Stopped(
            NO_SIGNAL_STATUS,
            f"stage {stage}: none {tried} is solved in {band}; the policy solves {np.mean(shares):.0%} of their "
            "rollouts: widen stages.choose.lowest and highest, try more problems, or choose other data",
        )
    return uids, f"{len(uids)} {tried} are solved in {band} and stay"


def drawn(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """`count` of the problems in their order, the same for every process and continuation; all of them for 0."""
    if not 0 < count < len(problems):
        return list(problems)
    chosen = np.random.default_rng([seed, 0xC05E]).permutation(len(problems))[:count]
    return [problems[index] for index in sorted(chosen)]

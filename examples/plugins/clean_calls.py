"""CLEANER's repair of failed calls in place (arXiv:2601.15141): what trains shows the call that worked instead.

`--method.edit_groups examples.plugins.clean_calls:purify --surrogate.old_logprobs scored`: the repaired text was
sampled after other tokens, so its old log-probabilities come from a scoring pass.
"""

import dataclasses
from difflib import SequenceMatcher

import numpy as np

from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Group, Trajectory, Turn, Verdict

CALL = "<tool_call>"
CALL_ID = load_tokenizer(TextConfig()).special(CALL)


def purify(group: Group) -> Group:
    """The group with every success repaired as far as its own later calls allow."""
    pairs = zip(group.trajectories, group.verdicts, strict=True)
    pairs = [repaired(t, v) if v.status == "correct" else (t, v) for t, v in pairs]
    return Group(group.problem, tuple(t for t, _ in pairs), tuple(v for _, v in pairs))


def repaired(trajectory: Trajectory, verdict: Verdict, alike: float = 0.5) -> tuple[Trajectory, Verdict]:
    """The trajectory with failed calls replaced by the retry of the next turn, latest first.

    Between calls that resemble each other (share of equal characters) the first reasoning stays, else it goes too.
    """
    for k in reversed(range(len(trajectory.turns) - 1)):
        failed, retry = trajectory.turns[k : k + 2]
        if failing(failed) and retry.results and not failing(retry):
            texts = ["\n".join(call.raw for call in turn.calls) for turn in (failed, retry)]
            keeps = SequenceMatcher(None, *texts, autojunk=False).ratio() >= alike
            trajectory = spliced(trajectory, k, keeps_thought=keeps)
            calls, errors = verdict.tool_calls - len(failed.results), verdict.tool_errors - len(failed.results)
            verdict = dataclasses.replace(verdict, tool_calls=calls, tool_errors=errors, turns=verdict.turns - 1)
    return trajectory, verdict


def failing(turn: Turn) -> bool:
    return bool(turn.results) and all(result.counts_as_error for result in turn.results)


def spliced(trajectory: Trajectory, k: int, *, keeps_thought: bool) -> Trajectory:
    """Turn k + 1 in the place of turn k, or after its thought; the failure's observation goes either way."""
    failed, retry = trajectory.turns[k : k + 2]
    at = [np.flatnonzero(trajectory.tokens[turn.start : turn.end] == CALL_ID)[:1] for turn in (failed, retry)]
    low, high, text = failed.start, retry.start, retry.text
    if keeps_thought and all(map(len, at)):
        low, high = low + int(at[0][0]), high + int(at[1][0])
        text = failed.text.partition(CALL)[0] + CALL + retry.text.partition(CALL)[2]
    names, back = ("tokens", "policy_mask", "logprobs", "versions"), high - low
    left = {name: np.delete(getattr(trajectory, name), slice(low, high)) for name in names}
    later = [dataclasses.replace(t, start=t.start - back, end=t.end - back) for t in trajectory.turns[k + 1 :]]
    later[0] = dataclasses.replace(later[0], start=failed.start, text=text)
    return dataclasses.replace(trajectory, **left, turns=(*trajectory.turns[:k], *later))

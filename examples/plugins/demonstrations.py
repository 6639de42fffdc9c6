"""A demonstration in each group, in place of a failure: the off-policy row that TempSamp-R1 anchors (arXiv:2509.18056).

`configs/methods/soft_reward.yaml --method.edit_groups examples.plugins.demonstrations:inject --surrogate.old_logprobs
scored`: the policy did not sample it, so its old log-probabilities come from a scoring pass. Worlds make their own
demonstrations.
"""

import numpy as np

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.data.demonstrations import demonstrate
from grpo_roc_jax.method.family.tempsamp_r1 import DEMONSTRATION
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Condition, Group, Trajectory, Turn, Verdict

CHAT = make_chat(TextConfig(), load_tokenizer(TextConfig()))
CLEAN = DemonstrationConfig(guess=0.0, wrong=0.0, repair=0.0, clean=1.0)


def inject(group: Group) -> Group:
    """The group with its last failure replaced; one without a failure is returned unchanged."""
    failures = np.flatnonzero(~group.correct)
    if not len(failures):
        return group
    place = int(failures[-1])
    trajectories, verdicts = list(group.trajectories), list(group.verdicts)
    trajectories[place] = demonstration(group, trajectories[place])
    verdicts[place] = Verdict(1.0, "correct", group.problem.answer, 1, 0, 1, True, len(trajectories[place].turns))
    return Group(group.problem, tuple(trajectories), tuple(verdicts))


def demonstration(group: Group, instead: Trajectory) -> Trajectory:
    """The world's own trace after the prompt of the trajectory it replaces."""
    trace = demonstrate(group.problem, CLEAN, 0)
    tokens, mask = CHAT.trace_row(trace)
    begin, start = len(CHAT.prompt_ids(group.problem)), instead.prompt_length
    tokens = np.concatenate([instead.tokens[:start], tokens[begin:]]).astype(np.int32)
    mask = np.concatenate([np.zeros(start, bool), mask[begin:]])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    spans = zip(edges[::2].tolist(), edges[1::2].tolist(), trace.turns, strict=True)
    turns = tuple(Turn(low, high, text) for low, high, text in spans)
    versions = np.where(mask, 0, -1).astype(np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    condition = Condition(DEMONSTRATION)
    return Trajectory(tokens, mask, zeros, versions, start, turns, "answer", instead.sample, condition=condition)

"""The accounts of a step close, and each kind of loss is noticed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.run.buffer import RolloutBuffer
from grpo_roc_jax.run.sample import AccountsOpen, ScoredRollouts, StepSamples, check_accounts
from grpo_roc_jax.train import main
from tests.helpers.samples import make_group
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture


def step():
    """Two groups of three, of which one is kept; one rollout was removed."""
    groups = (make_group(1, 3), make_group(2, 3))
    removed = ((groups[0].problem, groups[0].trajectories[0]),)
    wave = ScoredRollouts(groups, removed, {"correct": 6, "infrastructure": 1}, stats=RolloutStats(rollouts=7))
    selections = tuple(SimpleNamespace(reasons=("",) * 3, kept=kept) for kept in (True, False))
    buffer = RolloutBuffer()
    buffer.add(groups[:1])
    rows = [SimpleNamespace(length=t.length) for t in groups[0].trajectories]
    placement = SimpleNamespace(length=[row.length for row in rows])
    batches = [SimpleNamespace(rows=rows, placement=placement)] * 2  # two passes
    return StepSamples(groups, selections, (wave,)), buffer.take(1), batches, (4, 4, 0), (5, 5, 0)


def lost_removed(samples, *rest):
    return replace(samples, waves=(replace(samples.waves[0], removed=()),)), *rest


def lost_tokens(samples, trained, batches, *counts):
    short = SimpleNamespace(rows=batches[0].rows, placement=SimpleNamespace(length=[1, 1, 1]))
    return samples, trained, [short], *counts


LOSSES = {
    "rollouts .*: 7 and 6": lost_removed,
    "trajectories of the groups .*: 3 and 6": lambda s, *rest: (replace(s, groups=s.groups[:1]), *rest),
    "added to the buffer: 1 and 2": lambda *all: (*all[:4], (6, 6, 0)),
    "those that wait now .*: 1 and 0": lambda *all: (*all[:4], (5, 4, 0)),
    "trajectories taken = rows: 6 and 3": lambda s, g, b, *counts: (s, [*g, *g], b[:1], *counts),
    "tokens of the rows = packed: .* and 3": lost_tokens,
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_is_lost_is_noticed(message):
    check_accounts(*step())
    with pytest.raises(AccountsOpen, match=message):
        check_accounts(*LOSSES[message](*step()))


@pytest.mark.slow
def test_a_group_that_gets_lost_ends_the_run_with_the_state_saved(tmp_path):
    with injected("selected=drop@2"), pytest.raises(AccountsOpen, match="added to the buffer: 2 and 1") as seen:
        main([*TINY, "--resume=auto", "--data.eval_problems=0", f"--run_dir={tmp_path}"])
    assert "the state after step 1 is saved" in seen.value.__notes__[0]

"""A demonstration beside rollouts: where it comes from, and how it is scored."""

from dataclasses import replace

import pytest

from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.run.demonstrate import with_demonstration
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.worlds.worlds import world_problem
from tests.helpers.method_groups import make_group


@pytest.mark.parametrize("solution", [None, "count them"])
def test_a_demonstration_joins_the_group(solution):
    """The world's own way to the answer, or the data's, scored like a rollout; none that is too long."""
    problem = world_problem("products", 1, 0, 3)
    if solution is not None:
        problem = replace(problem, extra={"solution": solution})
    chat = make_chat(TextConfig(), load_tokenizer(TextConfig()))
    scorer = make_scorer(RewardConfig())
    group = replace(make_group([1, 0]), problem=problem)
    shown = with_demonstration(scorer, chat, 256, group)
    scorer.close()
    last = shown.trajectories[2]
    assert shown.correct.tolist() == [True, False, True]
    assert str(last.condition) == "demonstration" and last.prompt_length == len(chat.prompt_ids(problem))
    assert [chat.parse_turn(last.tokens[t.start : t.end]).text for t in last.turns] == [t.text for t in last.turns]
    assert all(last.policy_mask[t.start : t.end].all() for t in last.turns)
    assert with_demonstration(scorer, chat, 16, group) is group
    unknown = replace(group, problem=replace(problem, extra={}))
    assert with_demonstration(scorer, chat, 256, unknown) is unknown

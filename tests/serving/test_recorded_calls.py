"""Calls of a program as rows: each sampled token once; branches are rows of their own."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.record.codec import token_arrays, trajectory_from_json, trajectory_to_json
from grpo_roc_jax.serving.recorded_calls import RecordedCall, conversations_of, trajectory_of
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers import reference


def call(prompt, ids, version=4):
    ids = np.asarray(ids, np.int32)
    return RecordedCall(
        np.asarray(prompt, np.int32), ids, -ids.astype(np.float32), np.full(len(ids), version, np.int32)
    )


def trajectory(calls, longest=100):
    chat = make_chat(TextConfig(), load_tokenizer(TextConfig()))
    request = RolloutRequest(Problem("p", "?", "1", "t"), 3, first_sample=2, temperature=0.7)
    return trajectory_of(conversations_of(calls), chat, request, "eos", longest)


def test_a_conversation_with_a_branch_and_a_sub_agent_by_hand():
    calls = [
        call([1, 2], [10, 11]),
        call([1, 2, 10, 11, 3], [12]),  # goes on
        call([7, 8], [13, 14]),  # another agent
        call([1, 2, 10, 11, 4], [15], version=5),  # a branch after the first turn
        call([7, 8, 13, 14, 9], [16]),
    ]
    row, dropped = trajectory(calls)
    assert dropped == 0 and row.parts == (6, 6, 6) and row.prompt_length == 2
    assert row.tokens.tolist() == [1, 2, 10, 11, 3, 12, 7, 8, 13, 14, 9, 16, 1, 2, 10, 11, 4, 15]
    assert row.tokens[row.policy_mask].tolist() == [10, 11, 12, 13, 14, 16, 15]  # 10 and 11 once
    assert row.logprobs[row.policy_mask].tolist() == [-10, -11, -12, -13, -14, -16, -15]
    assert not row.logprobs[~row.policy_mask].any() and set(row.versions[~row.policy_mask]) == {-1}
    assert [(turn.start, turn.end) for turn in row.turns] == [(2, 4), (5, 6), (8, 10), (11, 12), (17, 18)]
    assert row.versions[-1] == 5 and (row.sample, row.temperature) == (2, 0.7)
    shorter, dropped = trajectory(calls, longest=13)
    assert dropped == 1 and shorter.tokens.tolist() == row.tokens[:12].tolist()
    saved = trajectory_from_json(trajectory_to_json(row), token_arrays(row))
    assert saved.parts == row.parts and saved.turns == row.turns
    assert trajectory(calls[:2])[0].parts == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(0, 99),
)
def test_every_call_is_in_one_row_with_its_whole_context(plan, seed):
    """Calls that go on from an earlier one, from nothing, or twice from the same."""
    rng, calls = np.random.default_rng(seed), []
    for parent, gap, n in plan:
        before = [0] if parent >= len(calls) else [*calls[parent].prompt, *calls[parent].ids]
        calls.append(call([*before, *rng.integers(1, 4, gap)], 100 + 10 * len(calls) + np.arange(n)))
    rows = conversations_of(calls)
    sampled = sorted(int(i) for row in rows for i in row.tokens[row.mask])
    assert sampled == sorted(int(i) for request in calls for i in request.ids)
    for request in calls:
        ids = [*request.prompt, *request.ids]
        assert any(
            row.tokens[: len(ids)].tolist() == ids and row.mask[len(request.prompt) : len(ids)].all() for row in rows
        )


def test_parts_of_a_row_are_packed_as_contexts_of_their_own():
    """The layout of three parts is that of three rows, and the row stays whole for what is computed of it."""
    lengths, config = (5, 3, 4), BatchConfig(row_length=16, rows=1)
    (row,) = reference.random_rows([sum(lengths)], vocab=50)
    row.policy_mask[[0, 5, 8]] = False  # the first token of each part
    batch, placement = pack([dataclasses.replace(row, parts=lengths)], config, 1)
    assert batch.segment_ids[0, 0].tolist() == [1] * 5 + [2] * 3 + [3] * 4 + [0] * 4
    assert batch.positions[0, 0, :12].tolist() == [*range(5), *range(3), *range(4)]
    assert placement.length.tolist() == [12]
    second = pack([dataclasses.replace(row, parts=lengths), row], BatchConfig(row_length=32, rows=1), 1)[0]
    assert second.segment_ids[0, 0, 11:14].tolist() == [3, 4, 4]
    with pytest.raises(ValueError):
        pack([dataclasses.replace(row, parts=(5, 3))], config, 1)

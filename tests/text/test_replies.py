"""Results of tools go to the calls that they answer."""

import pytest

from grpo_roc_jax.text.replies import UnmatchedReply, in_order_of_calls

AB = [("a", "f"), ("b", "g")]


@pytest.mark.parametrize(
    ("calls", "replies", "order"),
    [
        (AB, [("a", ""), ("b", "")], [0, 1]),
        (AB, [("b", ""), ("a", "")], [1, 0]),
        ([(None, "f"), (None, "g")], [(None, ""), (None, "")], [0, 1]),
        ([(None, "f"), (None, "g")], [(None, "g"), (None, "f")], [1, 0]),
        ([(None, "f"), (None, "f")], [(None, "f"), (None, "f")], [0, 1]),
        ([(None, "f"), (None, "f"), (None, "g")], [(None, "g"), (None, "f"), (None, "f")], [1, 2, 0]),
        ([(None, "f")], [(None, "h")], [0]),
        ([(None, "f")], [(None, ""), (None, "")], [0, 1]),
        ([], [(None, ""), (None, "")], [0, 1]),
        ([("a", "f")], [(None, "")], [0]),
    ],
)
def test_results_in_the_order_of_their_calls(calls, replies, order):
    assert in_order_of_calls(calls, replies) == order


@pytest.mark.parametrize(
    ("calls", "replies", "strict", "message", "reply"),
    [
        (AB, [("a", ""), ("c", "")], False, r"'c' is of no call before it \('a', 'b'\)", 1),
        (AB, [("a", ""), ("a", "")], False, "a second result for tool_call_id 'a'", 1),
        (AB, [("a", "")], False, "no result for the calls 'b'", None),
        (AB, [("a", ""), (None, "")], False, "beside others that have one", 1),
        (AB, [(None, ""), (None, "")], False, "without tool_call_id; must name the call", 0),
        ([("a", "f")], [(None, "")], True, "without tool_call_id", 0),
        ([("a", "f"), ("a", "g")], [("a", "")], False, "two calls of one message have the id 'a'", None),
        ([(None, "f")], [("a", "")], False, "'a' is of no call before it .none has an id", 0),
        ([("a", "f"), (None, "g")], [("a", "")], False, "a call without an id", None),
        ([(None, "f"), (None, "g")], [(None, "")], False, "2 calls and 1 results", None),
        ([(None, "f"), (None, "g")], [(None, "")] * 3, False, "2 calls and 3 results", None),
        ([(None, "f"), (None, "g")], [(None, "g"), (None, "h")], False, "results of g, h after calls of f, g", None),
        ([(None, "f"), (None, "g")], [(None, "g"), (None, "g")], False, "must be of the same tools", None),
        ([], [("a", "")], True, "answers no call", 0),
    ],
)
def test_what_matches_no_call_is_refused(calls, replies, strict, message, reply):
    with pytest.raises(UnmatchedReply, match=message) as error:
        in_order_of_calls(calls, replies, strict=strict)
    assert error.value.reply == reply

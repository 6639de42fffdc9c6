"""Parts of the endpoint alone: text that grows, when an idle loop begins a chunk, calls of a program as rows."""

import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.serving.recorded_calls import RecordedCall, conversations_of
from grpo_roc_jax.serving.replies import GrowingText
from grpo_roc_jax.serving.sampling_loop import SampleJob, SamplingLoop
from grpo_roc_jax.text.tokenizer import JsonTokenizer
from tests.helpers import reference
from tests.helpers.serving import scripted


def tokenizer_of(pieces, decoder, **options):
    made = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(pieces)}, [], **options))
    made.decoder = decoder
    made.add_special_tokens(["<eos>"])
    if "byte_fallback" not in options:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return JsonTokenizer(json.loads(made.to_str()), eos_token="<eos>")


# A vocabulary of few pieces, as of Gemma: its decoder replaces all bytes in a row until they are whole.
FEW = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "\u2581"]
FALLBACK = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
TOKENIZERS = {
    "bytes as last resort": tokenizer_of(FEW, FALLBACK, byte_fallback=True),
    "bytes as characters": tokenizer_of(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())], decoders.ByteLevel()),
}
PARTS = ["a", "b", "é", "你", "😀", "ab" * 15, "世" * 20, "😀" * 15]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(st.sampled_from(PARTS), max_size=12), together=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_text_grows_to_the_whole_and_nothing_is_taken_back(name, texts, together):
    tokenizer, text = TOKENIZERS[name], "".join(texts)
    ids, growing = tokenizer.encode(text), GrowingText()
    for start in range(0, len(ids), together):
        before = growing.text
        growing.add(ids[start : start + together], tokenizer)
        assert growing.text.startswith(before) and text.startswith(growing.text)
    assert growing.text == text and not growing.unfinished


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_that_are_no_character_are_sent_when_the_next_one_is_known(name):
    tokenizer, growing = TOKENIZERS[name], GrowingText()
    ids = [*tokenizer.encode("a"), tokenizer.encode("你")[0], *tokenizer.encode("b")]
    for token in ids:
        growing.add([token], tokenizer)
    assert growing.text == tokenizer.decode(ids) == "a\ufffdb"


# ---- the loop ------------------------------------------------------------------------------------------------------


class Chunks:
    """An engine that notes how many jobs it holds when each chunk begins."""

    def __init__(self):
        self.config, self.stats, self.held, self.begun = SimpleNamespace(max_prompt_tokens=9), RolloutStats(), 0, []

    def submit(self, sampler, requests, rows, options):
        self.held += 1
        return range(self.held, self.held + 1)

    def advance(self, timeout_s):
        self.begun.append(self.held)
        return []


@pytest.mark.parametrize(("chunk_s", "gather_s", "first"), [(4.0, 0.3, 4), (5.0, 0.0, 4), (0.0, 3.0, 1), (0.1, 0.0, 1)])
def test_jobs_that_come_together_begin_together(chunk_s, gather_s, first):
    """As long as a chunk takes, which is what those that came too late would wait; an unknown time is 0."""
    loop = SamplingLoop(Chunks(), None, lambda report: None, gather_s=gather_s)
    loop.chunk_s = chunk_s
    jobs = [SampleJob(np.arange(3, dtype=np.int32), 5, print) for _ in range(5)]
    loop.submit(jobs[0])
    # Where nothing is waited for, the others come a second later: a busy machine does not bring them in time.
    later = threading.Timer(0.05 if first > 1 else 1.0, lambda: [loop.submit(job) for job in jobs[1:4]])
    later.start()
    loop.turn(1.0)
    later.join()
    loop.submit(jobs[4])
    loop.turn(0.0)  # rows are in flight: nothing is waited for
    assert loop.engine.begun == [first, 5]


def test_why_earlier_turns_may_be_missing_is_said_and_their_tokens_are_counted():
    def reason(delta, shards):
        programs = SimpleNamespace(model=SimpleNamespace(delta=delta), shards=shards)
        return SamplingLoop(SimpleNamespace(programs=programs), None, print).forgets

    assert "recurrent layers" in reason(object(), 1) and "one of the" not in reason(object(), 4)
    assert "another of the 4 row shards" in reason(None, 4) and not reason(None, 1)
    messages = [{"role": "user", "content": "two and three?"}]
    with scripted("five", "yes") as server:
        first = server.chat(messages, return_token_ids=True)
        assert "missed_tokens_total 0" in server.ask("/metrics")[1]
        answer = first["choices"][0]["message"]["content"]
        server.chat([*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "sure?"}])
        known = len(first["prompt_token_ids"]) + len(first["choices"][0]["token_ids"])
        assert re.search(r"missed_tokens_total (\d+)", server.ask("/metrics")[1])[1] == str(known)


# ---- calls as rows: each sampled token once; branches are rows of their own ----------------------------------------


def call(prompt, ids):
    prompt, ids = (np.asarray(part, np.int32) for part in (prompt, ids))
    return RecordedCall(prompt, ids, -ids.astype(np.float32), np.full(len(ids), 4, np.int32))


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
        ids, begin = [*request.prompt, *request.ids], len(request.prompt)
        assert any(row.tokens[: len(ids)].tolist() == ids and row.mask[begin : len(ids)].all() for row in rows)


def test_parts_of_a_row_are_packed_as_contexts_of_their_own():
    """The layout of three parts is that of three rows, and the row stays whole for what is computed of it."""
    lengths, config = (5, 3, 4), BatchConfig(row_length=16, rows=1)
    (row,) = reference.random_rows([sum(lengths)], vocab=50)
    row.policy_mask[[0, 5, 8]] = False  # the first token of each part
    batch, placement = pack([replace(row, parts=lengths)], config, 1)
    assert batch.segment_ids[0, 0].tolist() == [1] * 5 + [2] * 3 + [3] * 4 + [0] * 4
    assert batch.positions[0, 0, :12].tolist() == [*range(5), *range(3), *range(4)]
    assert placement.length.tolist() == [12]
    second = pack([replace(row, parts=lengths), row], BatchConfig(row_length=32, rows=1), 1)[0]
    assert second.segment_ids[0, 0, 11:14].tolist() == [3, 4, 4]
    with pytest.raises(ValueError):
        pack([replace(row, parts=(5, 3))], config, 1)

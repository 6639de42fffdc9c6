"""Streams: resuming equals not stopping, weights are kept, held-out problems never train."""

import dataclasses
import functools
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.generated import TRACE_START
from grpo_roc_jax.data.near import describe_near, near_duplicates
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.record.accuracy import bootstrap
from grpo_roc_jax.text.chat_format import UnfitTrace
from grpo_roc_jax.worlds.worlds import is_held_out

problem_stream = functools.partial(make_problem_stream, problems=4, seed=0)
trace_stream = functools.partial(make_trace_stream, traces=4, seed=0)
HELD = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(*texts):
    """Messages of a user and the assistant."""
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]


def questions(path, prompts):
    return write_rows(path, [{"question": prompt, "answer": str(i)} for i, prompt in enumerate(prompts)])


def write(path, count, start=0):
    return questions(path, [f"q{i}" for i in range(start, start + count)])


def talks(path, questions, lengths=None):
    """Conversations of so many letters."""
    pairs = zip(questions, lengths or range(1, len(questions) + 1), strict=True)
    return write_rows(path, [{"messages": said(question, "x" * n)} for question, n in pairs])


def take(stream, batches):
    return list(itertools.islice(stream, batches))


def items(stream, batches):
    return list(itertools.chain(*take(stream, batches)))


def prompts_of(stream, batches):
    return [getattr(item, "problem", item).prompt for item in items(stream, batches)]


@pytest.fixture
def mixed(tmp_path):
    sources = ("world:products:1", write(tmp_path / "a.jsonl", 10), write(tmp_path / "b.jsonl", 7, 100))
    return DataConfig(sources=sources, weights=(0.5, 0.3, 0.2), eval_problems=0)


@pytest.mark.parametrize("make", [problem_stream, trace_stream])
def test_resumed_equals_not_stopped(mixed, make):
    config = DataConfig() if make is trace_stream else mixed
    stream = make(config)
    start, batches = stream.get_state(), take(stream, 12)
    assert len(json.dumps(stream.get_state())) < 100
    stream.set_state(start)
    assert take(stream, 3) == batches[:3], "going back in the same stream"
    for stop in (0, 1, 5, 11):
        first, resumed = make(config), make(config)
        head = take(first, stop)
        resumed.set_state(json.loads(json.dumps(first.get_state())))
        assert head + take(resumed, 12 - stop) == batches


def test_a_state_of_other_data_or_of_another_order_is_refused(mixed, tmp_path):
    state = problem_stream(mixed).get_state()
    others = [problem_stream(mixed, seed=1), problem_stream(mixed, problems=2), problem_stream(DataConfig())]
    write(tmp_path / "a.jsonl", 11)
    for other in (*others, problem_stream(mixed)):
        with pytest.raises(ValueError, match="belongs to other data"):
            other.set_state(state)
    config = dataclasses.replace(mixed, trace_sources=(talks(tmp_path / "t.jsonl", "abcdefgh"),))
    for make in (problem_stream, trace_stream):
        with pytest.raises(ValueError, match=r"data\.shuffle"):
            make(dataclasses.replace(config, shuffle=False)).set_state(make(config).get_state())


def test_every_row_once_an_epoch_in_a_new_order_of_each_file_or_in_that_of_the_file(tmp_path):
    """Of several files the first has the order that it has alone."""
    files = [questions(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(12)]) for name in "ab"]
    alone, both = (problem_stream(DataConfig(sources=sources, eval_problems=0)) for sources in (files[:1], files))
    prompts = prompts_of(both, 12)
    assert prompts[::2] == prompts_of(alone, 6)
    assert sorted(prompts[1:24:2]) == sorted(f"b{i}" for i in range(12))
    assert [prompt[1:] for prompt in prompts[::2]] != [prompt[1:] for prompt in prompts[1::2]]
    config = DataConfig(sources=(write(tmp_path / "a.jsonl", 24),), eval_problems=0)
    stream = problem_stream(config)
    epochs = [prompts_of(stream, 6) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 24 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and prompts_of(problem_stream(config, seed=1), 6) != epochs[0]
    in_order = dataclasses.replace(config, shuffle=False)
    assert prompts_of(problem_stream(in_order), 12) == [f"q{i}" for i in range(24)] * 2


def test_weights_are_kept_worlds_never_repeat_an_index_and_stages_share_none(mixed):
    sources = Counter(problem.source for problem in items(problem_stream(mixed), 100))
    assert sources == {"world:products:1": 200, "a": 120, "b": 80}
    problems, traces = (items(make(DataConfig()), 60) for make in (problem_stream, trace_stream))
    uids = {problem.uid for problem in problems}
    assert len(uids) == len(problems) and uids.isdisjoint(trace.problem.uid for trace in traces)
    assert all(int(trace.problem.uid.split(":")[-1]) >= TRACE_START for trace in traces)
    left_out = {problem.uid for problem in load_problems(mixed.sources[1])[0]}  # a stage may choose none of a source's
    batch = next(problem_stream(mixed, problems=70, left_out=left_out))
    assert Counter(problem.source for problem in batch) == {"world:products:1": 50, "b": 20}


@pytest.mark.parametrize(
    ("make", "key"), [(problem_stream, "sources"), (trace_stream, "trace_sources"), (trace_stream, "sources")]
)
def test_rows_that_are_held_out_never_train(tmp_path, make, key):
    texts = [f"q{i}" for i in range(12)]
    train = (questions if make is problem_stream else talks)(tmp_path / "train.jsonl", texts)
    test = write(tmp_path / "test.jsonl", 5)
    config = DataConfig(**{key: (train,)}, eval_sources=(f"test={test}",), eval_problems=5)
    stream = make(config)
    assert len(eval_problems(config)) == 5
    assert sorted(prompts_of(stream, 7)) == sorted(texts[5:] * 4)
    assert any("5 rows are also held out; dropped" in note for note in stream.notes)
    write(tmp_path / "test.jsonl", 12)
    with pytest.raises(ValueError, match=r"train\.jsonl: no \w+ is left to train on(.|\n)*12 rows are also held out"):
        make(config)


@pytest.mark.parametrize(("make", "world_problems"), [(problem_stream, 0), (problem_stream, 40), (trace_stream, 0)])
def test_worlds_draw_others_in_place_of_what_is_held_out(tmp_path, make, world_problems):
    plain = DataConfig(sources=("world:products:1",), world_problems=world_problems)
    drawn = prompts_of(make(plain), 12)
    held_out = sorted(set(drawn))[::2]
    test = questions(tmp_path / "test.jsonl", held_out)
    config = dataclasses.replace(plain, eval_sources=(test, "world:products:1"))
    trained = prompts_of(make(config), 12)
    assert set(held_out).isdisjoint(trained)
    assert all(new == old for old, new in zip(drawn, trained, strict=True) if old not in held_out)
    questions(tmp_path / "test.jsonl", [f"{a}*{b}=?" for a in range(100) for b in range(10)])
    with pytest.raises(ValueError, match=r"world:products:1: 1000 problems .* in the files of data\.eval_sources"):
        make(config)


def test_held_out_problems_are_those_of_the_worlds_or_a_sample_of_a_file_under_the_name_before_it(tmp_path):
    problems = eval_problems(DataConfig(eval_problems=64))
    assert len(problems) == 64 and all(is_held_out(problem.prompt) for problem in problems)
    counts = Counter(problem.source for problem in problems)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert problems == eval_problems(DataConfig(eval_problems=64))
    assert problems != eval_problems(DataConfig(eval_problems=64, eval_seed=1))
    notes: list[str] = []
    problems = eval_problems(DataConfig(sources=("world:square_sum:1",), eval_problems=192), notes)
    assert len({problem.prompt for problem in problems}) == 21 and "21 distinct held-out problems of 192" in notes[0]
    path = write(tmp_path / "t.jsonl", 50)
    assert len({p.uid for p in eval_problems(DataConfig(eval_sources=(path,), eval_problems=20))}) == 20
    named = DataConfig(eval_sources=(f"sums={path}", "easy-1=world:gcd:1"), eval_problems=4)
    assert [p.source for p in eval_problems(named)] == ["sums"] * 2 + ["easy-1"] * 2
    with pytest.raises(ValueError, match=r"nothing is held out.*data.eval_sources"):
        eval_problems(DataConfig(sources=(path,)))


def test_messages_and_worlds_mix_by_shares(tmp_path):
    def kinds_of(**settings):
        return Counter(trace.kind for trace in items(trace_stream(DataConfig(**settings)), 10))

    sources = ("world:gcd:1", talks(tmp_path / "sft.jsonl", ["hi"]))
    assert kinds_of(trace_sources=sources)["messages"] == 20
    assert kinds_of(trace_sources=sources, trace_weights=(1.0, 3.0))["messages"] == 30
    assert kinds_of(demonstrations=DemonstrationConfig(guess=0, repair=0, clean=1, wrong=0)) == {"clean": 40}


def test_impossible_settings_are_refused():
    for change, message in (
        *(({"sources": ()}, "data.sources is empty"), ({"weights": (1.0,)}, "1 entries for 3 data.sources")),
        ({"sources": ("a.jsonl",), "eval_sources": ("a.jsonl",)}, "hold one out"),
        *(({"trace_weights": (1.0,)}, "1 entries for 0"), ({"trace_sources": ("world:cubes:1",)}, "family 'cubes'")),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**change)


def test_traces_that_do_not_fit_are_left_out_and_counted(tmp_path):

    def letters(trace):
        return len(trace.turns[0].removeprefix("</reason>"))

    path = talks(tmp_path / "talk.jsonl", "abcde", [20, 80, 30, 90, 40])
    config = DataConfig(sources=(path,), eval_problems=0)
    fitting_stream = functools.partial(trace_stream, row_length=letters, max_row_tokens=60)
    stream = fitting_stream(config)
    assert {letters(trace) for trace in items(stream, 4)} == {20, 30, 40}
    assert (stream.left_out, stream.longest) == (2, 40)
    assert any("batch.row_length = 60: 2 of 5 do not fit and are left out, 3 are left" in note for note in stream.notes)
    assert any("talk:2: conversation of 80 tokens, at most 60 fit" in note for note in stream.notes)
    fails = dataclasses.replace(config, bad_rows="fail")
    with pytest.raises(ValueError, match=r"2 of 5 do not fit; raise it, or set data\.bad_rows to drop"):
        fitting_stream(fails)
    with pytest.raises(ValueError, match=r"batch\.row_length = 5: 5 of 5 do not fit; raise it, as nothing is cut"):
        fitting_stream(config, max_row_tokens=5)

    def calls(trace):
        if letters(trace) > 20:
            raise UnfitTrace("too many calls", calls={30: 2, 40: 3}.get(letters(trace), 0))
        return 1

    stream, keeps = fitting_stream(config, row_length=calls), "text.max_calls_per_turn 3 keeps 2 of these"
    assert set(prompts_of(stream, 2)) == {"a"} and any("too many calls" in note for note in stream.notes)
    assert f"{path}: 4 of 5 conversations do not fit and are left out, 1 are left; {keeps}" in stream.notes
    with pytest.raises(ValueError, match=f"4 of 5 conversations do not fit; {keeps}; set data.bad_rows to drop"):
        fitting_stream(fails, row_length=calls)


def test_over_long_prompts_are_dropped_and_listed_or_stop_the_run_where_that_is_asked(tmp_path):
    path = questions(tmp_path / "a.jsonl", ["x" * n for n in (5, 50, 6)])
    config = DataConfig(sources=(path,), eval_problems=0)
    limited = functools.partial(problem_stream, problems=2, prompt_length=lambda problem: len(problem.prompt))
    stream = limited(config, max_prompt_tokens=6)
    assert {len(prompt) for prompt in prompts_of(stream, 4)} == {5, 6} and stream.left_out == 1
    assert any("prompt of 50 tokens, at most 6 fit" in note for note in stream.notes)
    with pytest.raises(ValueError, match="no problem is left to train on"):
        limited(config, max_prompt_tokens=4)
    with pytest.raises(ValueError, match=r"prompt of 50 tokens(.|\n)*raise rollout\.max_prompt_tokens, or set data"):
        limited(dataclasses.replace(config, bad_rows="fail"), max_prompt_tokens=6)


def test_other_demonstrations_of_a_world_take_the_place_of_those_that_do_not_fit():
    """The same ones after a pause, and each number in its place where it fits."""
    config = DataConfig(sources=("world:products:1",))

    def length(trace):
        return sum(map(len, trace.turns))

    plain = items(trace_stream(config), 12)
    most = sorted(map(length, plain))[len(plain) // 2]
    fitting_stream = functools.partial(trace_stream, row_length=length, max_row_tokens=most)
    stream = fitting_stream(config)
    fitting = items(stream, 12)
    assert all(length(trace) <= most for trace in fitting) and stream.longest == most
    pairs = [(original, other) for original, other in zip(plain, fitting, strict=True) if length(original) <= most]
    assert all(original == other for original, other in pairs) and len(plain) > len(pairs) >= len(plain) // 2
    assert stream.left_out >= len(plain) - len(pairs)
    resumed = fitting_stream(config)
    resumed.set_state({**resumed.get_state(), "next_index": 7})
    assert next(resumed) == fitting[28:32]

    def unfit(trace):
        raise UnfitTrace(f"the demonstration makes {len(trace.turns)} calls")

    with pytest.raises(ValueError, match=r"50 demonstrations do not fit, the last one: .*makes \d calls"):
        next(fitting_stream(config, row_length=unfit))
    with pytest.raises(ValueError, match=r"world:products:1: .*: demonstration of \d+ tokens, .* set data\.bad_rows"):
        next(fitting_stream(dataclasses.replace(config, bad_rows="fail"), max_row_tokens=1))


def test_near_duplicates_are_counted_and_named(tmp_path):
    for text, near in [
        *((HELD.lower().replace(",", " ").replace("?", " ?"), True), (HELD.replace("Natalia", "Maria"), True)),
        *((HELD.replace("clips", "pencils"), False), ("3 + 4 = ?", True), ("3 - 4 = ?", False), ("3+4=", True)),
    ]:
        pairs = near_duplicates([text, "something else entirely"], ["2 + 2 = ?", HELD, "3 + 4 = ?"])
        assert [duplicate for duplicate, _ in pairs] == [text] * near, text

    texts = (HELD, "6 * 7 = ?"), (HELD, HELD.upper(), "What is 12 plus 5?", "6 * 7 =")
    both = ([{"question": q, "answer": "1", "messages": said(q, "1")} for q in some] for some in texts)
    held_out, rows = (write_rows(tmp_path / f"{len(some)}.jsonl", some) for some in both)
    config = DataConfig(sources=(rows,), eval_sources=(held_out,), eval_problems=2)
    for stream in (problem_stream(config, problems=1), trace_stream(config, traces=1)):
        (near,) = [note for note in stream.notes if "near-duplicates" in note]
        assert near.startswith(f"{rows}: 2 rows are near-duplicates of held-out ones") and "NATALIA SOLD" in near
    assert describe_near("x", [("a", "b")] * 5)[0].endswith("and 2 more")


def test_copies_of_a_problem_make_no_interval_narrower():
    values, uids = (np.random.default_rng(0).random(40) < 0.6).astype(float), [f"q{i}" for i in range(40)]
    plain, again = bootstrap(values, uids=uids), bootstrap(np.tile(values, 5), uids=uids * 5)
    assert plain == bootstrap(values), "as without names where all are distinct"
    assert again[1] - again[0] == pytest.approx(plain[1] - plain[0], rel=0.1)

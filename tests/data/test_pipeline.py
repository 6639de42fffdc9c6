"""Streams: resuming equals not stopping, weights are kept, held-out problems never train."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.generated import TRACE_START
from grpo_roc_jax.data.near import describe_near, near_duplicates
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.record.accuracy import bootstrap
from grpo_roc_jax.text.chat_format import UnfitTrace, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.worlds.worlds import is_held_out


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


def prompts_of(batches):
    return [getattr(item, "problem", item).prompt for item in itertools.chain(*batches)]


@pytest.fixture
def mixed(tmp_path):
    return DataConfig(
        sources=("world:products:1", write(tmp_path / "a.jsonl", 10), write(tmp_path / "b.jsonl", 7, 100)),
        weights=(0.5, 0.3, 0.2),
        eval_problems=0,
    )


def problem_stream(config, seed=0, problems=4):
    return make_problem_stream(config, problems=problems, seed=seed)


def trace_stream(config, seed=0):
    return make_trace_stream(config, traces=4, seed=seed)


@pytest.mark.parametrize("make", [problem_stream, trace_stream])
def test_resumed_equals_not_stopped(mixed, make):
    config = DataConfig() if make is trace_stream else mixed
    stream = make(config)
    start = stream.get_state()
    batches = take(stream, 12)
    assert len(json.dumps(stream.get_state())) < 100
    stream.set_state(start)
    assert take(stream, 3) == batches[:3], "going back in the same stream"
    for stop in (0, 1, 5, 11):
        first = make(config)
        head = take(first, stop)
        state = json.loads(json.dumps(first.get_state()))
        resumed = make(config)
        resumed.set_state(state)
        assert head + take(resumed, 12 - stop) == batches


@pytest.mark.parametrize("make", [problem_stream, trace_stream])
def test_a_state_of_other_data_or_of_another_order_is_refused(mixed, make, tmp_path):
    state = problem_stream(mixed).get_state()
    others = [problem_stream(mixed, seed=1), problem_stream(mixed, problems=2), problem_stream(DataConfig())]
    write(tmp_path / "a.jsonl", 11)
    for other in (*others, problem_stream(mixed)):
        with pytest.raises(ValueError, match="belongs to other data"):
            other.set_state(state)
    config = dataclasses.replace(mixed, trace_sources=(talks(tmp_path / "t.jsonl", "abcdefgh"),))
    in_order = dataclasses.replace(config, shuffle=False)
    for one, other in ((config, in_order), (in_order, config)):
        with pytest.raises(ValueError, match=r"data\.shuffle"):
            make(other).set_state(make(one).get_state())
    make(DataConfig(shuffle=False)).set_state(make(DataConfig()).get_state())


EARLIER = [
    (problem_stream, "sources", questions, "6ecfc3cd2b62ea95", "838784ab0e53b4eb"),
    (trace_stream, "trace_sources", talks, "b9ea04ec93ba6e9f", "a4252f05d659f587"),
]
"""With fingerprints of one and of both files of the test, as versions with one order for all files saved them."""


@pytest.mark.parametrize(("make", "key", "rows", "of_one", "of_two"), EARLIER)
def test_each_of_several_files_has_an_order_of_its_own(tmp_path, make, key, rows, of_one, of_two):
    """The first has the one that it has alone. Positions with one order for all, of earlier versions, are refused."""
    files = [rows(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(12)]) for name in "ab"]
    alone, both = (DataConfig(**{key: sources}, eval_problems=0) for sources in (files[:1], files))
    prompts = prompts_of(take(make(both), 12))
    first, second = prompts[::2], prompts[1::2]
    assert first == prompts_of(take(make(alone), 6))
    for epoch in (slice(0, 12), slice(12, 24)):
        assert sorted(second[epoch]) == sorted(prompt.replace("a", "b") for prompt in first[epoch])
        assert [prompt[1:] for prompt in second[epoch]] != [prompt[1:] for prompt in first[epoch]]
    world = DataConfig(**{key: ["world:gcd:1", *files[:1]]}, eval_problems=0)
    assert prompts_of(take(make(world), 12))[1::2] == first, "a world has no order, so this is the first file"
    make(alone).set_state({"next_index": 3, "fingerprint": of_one})
    with pytest.raises(ValueError, match="earlier versions shuffled all sources but the first in another order"):
        make(both).set_state({"next_index": 3, "fingerprint": of_two})


def test_every_row_once_an_epoch_in_a_new_order_or_in_that_of_the_file(tmp_path):
    config = DataConfig(sources=(write(tmp_path / "a.jsonl", 24),), eval_problems=0)
    run, in_order = take(problem_stream(config), 18), dataclasses.replace(config, shuffle=False)
    epochs = [prompts_of(run[i : i + 6]) for i in (0, 6, 12)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 24 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert take(problem_stream(config, seed=1), 6) != take(problem_stream(config, seed=0), 6)
    assert prompts_of(take(problem_stream(in_order), 12)) == [f"q{i}" for i in range(24)] * 2


def test_weights_are_kept_worlds_never_repeat_an_index_and_stages_share_none(mixed):
    sources = Counter(problem.source for problem in itertools.chain(*take(problem_stream(mixed), 100)))
    assert sources == {"world:products:1": 200, "a": 120, "b": 80}
    problems = list(itertools.chain(*take(problem_stream(DataConfig()), 60)))
    traces = list(itertools.chain(*take(trace_stream(DataConfig()), 60)))
    uids = {problem.uid for problem in problems}
    assert len(uids) == len(problems) and uids.isdisjoint(trace.problem.uid for trace in traces)
    assert all(int(trace.problem.uid.split(":")[-1]) >= TRACE_START for trace in traces)


def test_a_source_whose_problems_all_leave_has_no_share(tmp_path):
    """A stage may choose none of them; the others keep their shares."""
    files = [write(tmp_path / f"{name}.jsonl", 4, start) for name, start in (("a", 0), ("b", 4), ("c", 8))]
    config = DataConfig(sources=files, weights=(1, 5, 3), eval_problems=0)
    uids = [{problem.uid for problem in load_problems(path)[0]} for path in files]
    batch = take(make_problem_stream(config, problems=40, seed=0, left_out=uids[1]), 1)[0]
    assert Counter(problem.uid in uids[0] for problem in batch) == {True: 10, False: 30}
    assert uids[1].isdisjoint(problem.uid for problem in batch)
    with pytest.raises(ValueError, match="no problem is left to train on"):
        make_problem_stream(config, problems=2, seed=0, left_out=set.union(*uids))


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
    assert sorted(prompts_of(take(stream, 7))) == sorted(texts[5:] * 4)
    assert any("5 rows are also held out; dropped" in note for note in stream.notes)
    write(tmp_path / "test.jsonl", 12)
    with pytest.raises(ValueError, match=r"train\.jsonl: no \w+ is left to train on(.|\n)*12 rows are also held out"):
        make(config)


@pytest.mark.parametrize(("make", "world_problems"), [(problem_stream, 0), (problem_stream, 40), (trace_stream, 0)])
def test_worlds_draw_others_in_place_of_what_is_held_out(tmp_path, make, world_problems):
    plain = DataConfig(sources=("world:products:1",), world_problems=world_problems)
    drawn = prompts_of(take(make(plain), 12))
    held_out = sorted(set(drawn))[::2]
    test = questions(tmp_path / "test.jsonl", held_out)
    config = dataclasses.replace(plain, eval_sources=(test, "world:products:1"))
    trained = prompts_of(take(make(config), 12))
    assert set(held_out).isdisjoint(trained)
    assert all(new == old for old, new in zip(drawn, trained, strict=True) if old not in held_out)
    questions(tmp_path / "test.jsonl", [f"{a}*{b}=?" for a in range(100) for b in range(10)])
    with pytest.raises(ValueError, match=r"world:products:1: 1000 problems .* in the files of data\.eval_sources"):
        make(config)
    own = dataclasses.replace(plain, eval_sources=plain.sources)
    assert prompts_of(take(make(own), 12)) == drawn, "a world keeps what it holds out apart"


FEW = {"gcd": 192, "square_sum": 21}
"""Family -> its distinct held-out problems, of 192."""


def test_held_out_problems_are_those_of_the_held_out_side_of_the_worlds():
    problems = eval_problems(DataConfig(eval_problems=64))
    assert len(problems) == 64 and all(is_held_out(problem.prompt) for problem in problems)
    counts = Counter(problem.source for problem in problems)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert problems == eval_problems(DataConfig(eval_problems=64))
    assert problems != eval_problems(DataConfig(eval_problems=64, eval_seed=1))
    for family, count in FEW.items():
        notes: list[str] = []
        problems = eval_problems(DataConfig(sources=(f"world:{family}:1",), eval_problems=192), notes)
        assert len({problem.prompt for problem in problems}) == len(problems) == count
        assert count == 192 or f"{count} distinct held-out problems of 192" in notes[0]


def test_held_out_problems_are_a_sample_of_a_file_under_the_name_before_it(tmp_path):
    path = write(tmp_path / "t.jsonl", 50)
    config = DataConfig(eval_sources=(path,), eval_problems=20)
    assert len({problem.uid for problem in eval_problems(config)}) == 20
    everything = dataclasses.replace(config, eval_problems=500)
    assert [problem.prompt for problem in eval_problems(everything)] == [f"q{i}" for i in range(50)]
    named = DataConfig(eval_sources=(f"sums={path}", "easy-1=world:gcd:1"), eval_problems=4)
    assert [p.source for p in eval_problems(named)] == ["sums"] * 2 + ["easy-1"] * 2
    plain = dataclasses.replace(named, eval_sources=(path, "world:gcd:1"))
    assert [p.uid for p in eval_problems(plain)] == [p.uid for p in eval_problems(named)]
    with pytest.raises(ValueError, match="hold one out"):
        DataConfig(sources=(path,), eval_sources=(f"sums={path}",))
    with pytest.raises(ValueError, match=r"nothing is held out.*data.eval_sources"):
        eval_problems(DataConfig(sources=(path,)))
    assert eval_problems(DataConfig(sources=(path,), eval_problems=0)) == []


def kinds_of(config, **settings):
    return Counter(trace.kind for trace in itertools.chain(*take(trace_stream(config, **settings), 10)))


def test_messages_and_worlds_mix_by_shares_and_seeds(tmp_path):
    path = write_rows(tmp_path / "sft.jsonl", [{"messages": said("hi", "hello")}])
    config = DataConfig(trace_sources=("world:gcd:1", path))
    assert kinds_of(config)["messages"] == 20 and kinds_of(config).total() == 40
    assert kinds_of(dataclasses.replace(config, trace_weights=(1.0, 3.0)))["messages"] == 30
    clean = DemonstrationConfig(guess=0, repair=0, clean=1, wrong=0)
    assert kinds_of(DataConfig(demonstrations=clean)) == {"clean": 40}
    assert take(trace_stream(DataConfig(), seed=0), 2) != take(trace_stream(DataConfig(), seed=1), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ()}, "data.sources is empty"),
        ({"weights": (1.0,)}, "1 entries for 3 data.sources"),
        ({"weights": (1.0, 0.0, 1.0)}, "greater than 0"),
        ({"eval_problems": -1}, "greater than or equal to 0"),
        ({"sources": ("a.jsonl",), "eval_sources": ("a.jsonl",)}, "hold one out"),
        *(({name: ("world:cubes:1",)}, "unknown world family 'cubes'") for name in ("sources", "trace_sources")),
        ({"trace_sources": ("a.jsonl",), "trace_weights": (1.0, 2.0)}, "2 entries for 1 data.trace_sources"),
        ({"trace_weights": (1.0,)}, "1 entries for 0 data.trace_sources"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def letters(trace):
    return len(trace.turns[0].removeprefix("</reason>"))


def fitting_stream(config, most, length=letters, traces=4):
    return make_trace_stream(config, traces=traces, seed=0, row_length=length, max_row_tokens=most)


def test_traces_that_do_not_fit_are_left_out_and_counted(tmp_path):
    path = talks(tmp_path / "talk.jsonl", "abcde", [20, 80, 30, 90, 40])
    config = DataConfig(sources=(path,), eval_problems=0)
    stream = fitting_stream(config, 60)
    assert {letters(trace) for batch in take(stream, 4) for trace in batch} == {20, 30, 40}
    assert (stream.left_out, stream.longest) == (2, 40)
    assert any("batch.row_length = 60: 2 of 5 do not fit and are left out, 3 are left" in note for note in stream.notes)
    assert any("talk:2: conversation of 80 tokens, at most 60 fit" in note for note in stream.notes)
    assert fitting_stream(config, 1000).left_out == 0
    fails = dataclasses.replace(config, bad_rows="fail")
    with pytest.raises(ValueError, match=r"2 of 5 do not fit; raise it, or set data\.bad_rows to drop"):
        fitting_stream(fails, 60)
    for choice in (config, fails):
        with pytest.raises(ValueError, match=r"batch\.row_length = 5: 5 of 5 do not fit; raise it, as nothing is cut"):
            fitting_stream(choice, 5)
    assert fitting_stream(fails, 1000).left_out == 0


def calling(path, *calls):
    """Conversations with a turn of so many calls of a tool."""
    rows = []
    for tool, number in calls:
        call = {"type": "function", "function": {"name": tool, "arguments": {"x": 1}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call | {"id": f"c{i}"} for i in range(number)]}
        outputs = [{"role": "tool", "tool_call_id": f"c{i}", "content": "1"} for i in range(number)]
        question, answer = said(f"{tool} {number}", "ok")
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        tools = [{"type": "function", "function": {"name": tool, "description": "d", "parameters": schema}}]
        rows.append({"messages": [question, turn, *outputs, answer], "tools": tools})
    return write_rows(path, rows)


def test_traces_that_the_settings_cannot_write_are_left_out_and_counted(tmp_path):
    """More calls in a turn than may be, and a tool whose name the form of calls cannot write."""
    path = calling(tmp_path / "talk.jsonl", ("look", 1), ("look", 2), ("look", 3), ("look-up", 1))
    config = DataConfig(sources=(path,), eval_problems=0)
    tool = load_traces(path)[0][0].tools

    def stream(config, calls=1):
        text = TextConfig(calls="gemma", tools_section=True, max_calls_per_turn=calls)
        chat = make_chat(text, load_tokenizer(text), json.loads(tool))
        return fitting_stream(config, 4000, lambda trace: len(chat.trace_row(trace)[0]))

    found = stream(config)
    assert {prompt for prompt in prompts_of(take(found, 2))} == {"look 1"} and found.left_out == 3
    keeps = "text.max_calls_per_turn 3 keeps 2 of these"
    assert f"{path}: 3 of 4 conversations do not fit and are left out, 1 are left; {keeps}" in found.notes
    assert any("talk:2': a turn makes 2 calls, text.max_calls_per_turn = 1; raise it" in note for note in found.notes)
    assert any("talk:4': the tool 'look-up' cannot be called in the form gemma" in note for note in found.notes)
    assert stream(config, 3).left_out == 1
    fails = dataclasses.replace(config, bad_rows="fail")
    with pytest.raises(ValueError, match=f"3 of 4 conversations do not fit; {keeps}; set data.bad_rows to drop"):
        stream(fails)
    calling(tmp_path / "talk.jsonl", ("look", 2))
    with pytest.raises(ValueError, match=r"1 of 1 conversations do not fit; text\.max_calls_per_turn 2 keeps 1 of"):
        stream(config)


def test_over_long_prompts_are_dropped_and_listed_or_stop_the_run_where_that_is_asked(tmp_path):
    path = questions(tmp_path / "a.jsonl", ["x" * n for n in (5, 50, 6)])
    settings = {"problems": 2, "seed": 0, "prompt_length": lambda problem: len(problem.prompt)}
    config = DataConfig(sources=(path,), eval_problems=0)
    stream = make_problem_stream(config, **settings, max_prompt_tokens=6)
    assert {len(problem.prompt) for problem in itertools.chain(*take(stream, 4))} == {5, 6} and stream.left_out == 1
    assert any("prompt of 50 tokens, at most 6 fit" in note for note in stream.notes)
    assert any("1 over-long prompts dropped, 2 problems left" in note for note in stream.notes)
    with pytest.raises(ValueError, match="no problem is left to train on"):
        make_problem_stream(config, **settings, max_prompt_tokens=4)
    fails = dataclasses.replace(config, bad_rows="fail")
    message = r"prompt of 50 tokens(.|\n)*raise rollout\.max_prompt_tokens, or set data\.bad"
    with pytest.raises(ValueError, match=message):
        make_problem_stream(fails, **settings, max_prompt_tokens=6)
    assert make_problem_stream(fails, **settings, max_prompt_tokens=50).left_out == 0


def test_other_demonstrations_of_a_world_take_the_place_of_those_that_do_not_fit():
    """The same ones after a pause, and each number in its place where it fits."""
    config = DataConfig(sources=("world:products:1",))

    def length(trace):
        return sum(map(len, trace.turns))

    plain = [trace for batch in take(trace_stream(config), 12) for trace in batch]
    most = sorted(map(length, plain))[len(plain) // 2]
    stream = fitting_stream(config, most, length)
    fitting = [trace for batch in take(stream, 12) for trace in batch]
    assert all(length(trace) <= most for trace in fitting) and stream.longest == most
    pairs = [(original, other) for original, other in zip(plain, fitting, strict=True) if length(original) <= most]
    assert all(original == other for original, other in pairs) and len(plain) > len(pairs) >= len(plain) // 2
    assert stream.left_out >= len(plain) - len(pairs)
    resumed = fitting_stream(config, most, length)
    resumed.set_state({**fitting_stream(config, most, length).get_state(), "next_index": 7})
    assert next(resumed) == fitting[28:32]
    message = r"50 demonstrations do not fit, the last one: .* of \d+ tokens, batch\.row_length = 1; raise it"
    with pytest.raises(ValueError, match=message):
        next(fitting_stream(config, 1, length))
    drawn = itertools.count()

    def second(trace):
        if not next(drawn):
            raise UnfitTrace("too many calls")
        return 1

    stream = fitting_stream(config, 1, second)
    assert next(stream) and stream.left_out == 1
    with pytest.raises(ValueError, match=r"world:products:1: .*: demonstration of \d+ tokens, .* set data\.bad_rows"):
        next(fitting_stream(dataclasses.replace(config, bad_rows="fail"), 1, length))


# ---- near-duplicates of held-out problems --------------------------------------------------------------------------

HELD = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many in all?"


def test_texts_that_differ_a_little_are_near():
    for text, near in [
        *((HELD.lower().replace(",", " ").replace("?", " ?"), True), (HELD.replace("\n", " ") + "  ", True)),
        *((HELD.replace("Natalia", "Maria"), True), (HELD.replace("clips", "pencils"), False)),
        *(("How many clips did Natalia sell in April and in May?", False), ("3 + 4 = ?", True), ("3 - 4 = ?", False)),
        *(("3+4=", True), ("3 + 5 = ?", False)),
    ]:
        pairs = near_duplicates([text, "something else entirely"], ["2 + 2 = ?", HELD, "3 + 4 = ?"])
        assert [duplicate for duplicate, _ in pairs] == [text] * near, text


def test_near_duplicates_are_counted_and_named(tmp_path):
    def both(name, *questions):
        """Rows that are problems and demonstrations."""
        rows = [{"question": q, "answer": "1", "messages": said(q, "1")} for q in questions]
        return write_rows(tmp_path / name, rows)

    held_out = both("held.jsonl", HELD, "6 * 7 = ?")
    rows = both("rows.jsonl", HELD, HELD.upper(), "What is 12 plus 5?", "6 * 7 =")
    config = DataConfig(sources=(rows,), eval_sources=(held_out,), eval_problems=2)
    for stream in (problem_stream(config, problems=1), make_trace_stream(config, traces=1, seed=0)):
        (near,) = [note for note in stream.notes if "near-duplicates" in note]
        assert near.startswith(f"{rows}: 2 rows are near-duplicates of held-out ones") and "NATALIA SOLD" in near
    assert describe_near("x", [("a", "b")] * 5)[0].endswith("and 2 more") and describe_near("x", []) == []


def test_copies_of_a_problem_make_no_interval_narrower():
    rng = np.random.default_rng(0)
    values, uids = (rng.random(40) < 0.6).astype(float), [f"q{i}" for i in range(40)]
    plain = bootstrap(values, uids=uids)
    assert plain == bootstrap(values), "as without names where all are distinct"
    again = bootstrap(np.tile(values, 5), uids=uids * 5)
    alone = bootstrap(np.tile(values, 5))
    assert again[1] - again[0] == pytest.approx(plain[1] - plain[0], rel=0.1)
    assert alone[1] - alone[0] < 0.6 * (plain[1] - plain[0]), "what it was"
    values[3] = np.nan
    assert np.isfinite(bootstrap(np.tile(values, 2), uids=uids * 2)).all()

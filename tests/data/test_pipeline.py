"""Streams: resuming equals not stopping, weights are kept, held-out problems never train."""

import dataclasses
import itertools
import json
from collections import Counter

import pytest

from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.generated import TRACE_START
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.text.chat_format import UnfitTrace, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.worlds.worlds import is_held_out


def questions(path, prompts):
    rows = [{"question": prompt, "answer": str(i)} for i, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write(path, count, start=0):
    return questions(path, [f"q{i}" for i in range(start, start + count)])


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


def test_a_state_of_other_data_is_refused(mixed, tmp_path):
    state = problem_stream(mixed).get_state()
    for other in (problem_stream(mixed, seed=1), problem_stream(mixed, problems=2), problem_stream(DataConfig())):
        with pytest.raises(ValueError, match="belongs to other data"):
            other.set_state(state)
    write(tmp_path / "a.jsonl", 11)
    with pytest.raises(ValueError, match="belongs to other data"):
        problem_stream(mixed).set_state(state)


@pytest.mark.parametrize("make", [problem_stream, trace_stream])
def test_a_state_of_another_order_is_refused(make, tmp_path):
    sources = (write(tmp_path / "a.jsonl", 10),)
    config = DataConfig(sources=sources, trace_sources=(talks(tmp_path / "t.jsonl", "abcdefgh"),), eval_problems=0)
    in_order = dataclasses.replace(config, shuffle=False)
    for one, other in ((config, in_order), (in_order, config)):
        with pytest.raises(ValueError, match=r"data\.shuffle"):
            make(other).set_state(make(one).get_state())
    state = make(DataConfig()).get_state()
    make(DataConfig(shuffle=False)).set_state(state)


EARLIER = {
    problem_stream: ("6ecfc3cd2b62ea95", "838784ab0e53b4eb"),
    trace_stream: ("b9ea04ec93ba6e9f", "a4252f05d659f587"),
}
"""Fingerprints of one and of both files of the next test, as versions with one order for all files saved them."""


@pytest.mark.parametrize(("make", "key"), [(problem_stream, "sources"), (trace_stream, "trace_sources")])
def test_each_of_several_files_has_an_order_of_its_own(tmp_path, make, key):
    """The first has the one that it has alone. Positions with one order for all, of earlier versions, are refused."""
    files = [
        (questions if make is problem_stream else talks)(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(12)])
        for name in "ab"
    ]
    alone, both = (DataConfig(**{key: sources}, eval_problems=0) for sources in (files[:1], files))
    prompts = prompts_of(take(make(both), 12))
    first, second = prompts[::2], prompts[1::2]
    assert first == prompts_of(take(make(alone), 6))
    for epoch in (slice(0, 12), slice(12, 24)):
        assert sorted(second[epoch]) == sorted(prompt.replace("a", "b") for prompt in first[epoch])
        assert [prompt[1:] for prompt in second[epoch]] != [prompt[1:] for prompt in first[epoch]]
    of_one, of_two = EARLIER[make]
    world = DataConfig(**{key: ["world:gcd:1", *files[:1]]}, eval_problems=0)
    assert prompts_of(take(make(world), 12))[1::2] == first, "a world has no order, so this is the first file"
    make(alone).set_state({"next_index": 3, "fingerprint": of_one})
    with pytest.raises(ValueError, match="earlier versions shuffled all sources but the first in another order"):
        make(both).set_state({"next_index": 3, "fingerprint": of_two})


def test_weights_are_kept(mixed):
    sources = Counter(problem.source for problem in itertools.chain(*take(problem_stream(mixed), 100)))
    assert sources == {"world:products:1": 200, "a": 120, "b": 80}


def test_every_row_once_an_epoch_in_a_new_order(tmp_path):
    config = DataConfig(sources=(write(tmp_path / "a.jsonl", 24),), eval_problems=0)
    run = take(problem_stream(config), 18)
    epochs = [
        [problem.prompt for problem in itertools.chain(*batches)] for batches in (run[i : i + 6] for i in (0, 6, 12))
    ]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 24 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert take(problem_stream(config, seed=1), 6) != take(problem_stream(config, seed=0), 6)


def test_shuffle_off_keeps_the_order_of_the_file(tmp_path):
    config = DataConfig(sources=(write(tmp_path / "a.jsonl", 8),), shuffle=False, eval_problems=0)
    prompts = [problem.prompt for problem in itertools.chain(*take(problem_stream(config), 4))]
    assert prompts == [f"q{i}" for i in range(8)] * 2


def test_worlds_never_repeat_an_index_and_stages_share_none():
    problems = list(itertools.chain(*take(problem_stream(DataConfig()), 60)))
    traces = list(itertools.chain(*take(trace_stream(DataConfig()), 60)))
    uids = {problem.uid for problem in problems}
    assert len(uids) == len(problems)
    assert uids.isdisjoint(trace.problem.uid for trace in traces)
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
    assert any("5 rows are also held out" in note for note in stream.notes)
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


class TestEvalProblems:
    def test_held_out_side_of_the_training_worlds(self):
        problems = eval_problems(DataConfig(eval_problems=64))
        assert len(problems) == 64
        assert all(is_held_out(problem.prompt) for problem in problems)
        counts = Counter(problem.source for problem in problems)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert problems == eval_problems(DataConfig(eval_problems=64))
        assert problems != eval_problems(DataConfig(eval_problems=64, eval_seed=1))

    def test_a_sample_of_a_file(self, tmp_path):
        config = DataConfig(eval_sources=(write(tmp_path / "t.jsonl", 50),), eval_problems=20)
        problems = eval_problems(config)
        assert len({problem.uid for problem in problems}) == 20
        everything = DataConfig(eval_sources=config.eval_sources, eval_problems=500)
        assert [problem.prompt for problem in eval_problems(everything)] == [f"q{i}" for i in range(50)]

    def test_a_name_before_a_source_is_that_of_its_problems(self, tmp_path):
        path = write(tmp_path / "a.jsonl", 3)
        config = DataConfig(eval_sources=(f"sums={path}", "easy-1=world:gcd:1"), eval_problems=4)
        assert [p.source for p in eval_problems(config)] == ["sums"] * 2 + ["easy-1"] * 2
        plain = dataclasses.replace(config, eval_sources=(path, "world:gcd:1"))
        assert [p.uid for p in eval_problems(plain)] == [p.uid for p in eval_problems(config)]
        with pytest.raises(ValueError, match="hold one out"):
            DataConfig(sources=(path,), eval_sources=(f"sums={path}",))

    def test_files_alone_have_no_held_out_problems(self, tmp_path):
        path = write(tmp_path / "a.jsonl", 5)
        with pytest.raises(ValueError, match=r"nothing is held out.*data.eval_sources"):
            eval_problems(DataConfig(sources=(path,)))
        assert eval_problems(DataConfig(sources=(path,), eval_problems=0)) == []


class TestTraces:
    def test_messages_and_worlds_mix(self, tmp_path):
        row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
        (tmp_path / "sft.jsonl").write_text(json.dumps(row) + "\n")
        config = DataConfig(trace_sources=("world:gcd:1", str(tmp_path / "sft.jsonl")))
        kinds = Counter(trace.kind for trace in itertools.chain(*take(trace_stream(config), 10)))
        assert kinds["messages"] == 20
        assert sum(kinds.values()) == 40
        weighted = dataclasses.replace(config, trace_weights=(1.0, 3.0))
        assert Counter(t.kind for t in itertools.chain(*take(trace_stream(weighted), 10)))["messages"] == 30

    def test_shares_and_seeds_reach_the_stream(self):
        config = DataConfig(demonstrations=DemonstrationConfig(guess=0, repair=0, clean=1, wrong=0))
        assert {trace.kind for trace in itertools.chain(*take(trace_stream(config), 10))} == {"clean"}
        assert take(trace_stream(DataConfig(), seed=0), 2) != take(trace_stream(DataConfig(), seed=1), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ()}, "data.sources is empty"),
        ({"weights": (1.0,)}, "1 entries for 3 data.sources"),
        ({"weights": (1.0, 0.0, 1.0)}, "greater than 0"),
        ({"eval_problems": -1}, "greater than or equal to 0"),
        ({"sources": ("a.jsonl",), "eval_sources": ("a.jsonl",)}, "hold one out"),
        ({"sources": ("world:cubes:1",)}, "unknown world family 'cubes'"),
        ({"trace_sources": ("world:gcd",)}, "FAMILY:LEVEL"),
        ({"trace_sources": ("a.jsonl",), "trace_weights": (1.0, 2.0)}, "2 entries for 1 data.trace_sources"),
        ({"trace_weights": (1.0,)}, "1 entries for 0 data.trace_sources"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def talks(path, questions, lengths=None):
    """Conversations of so many letters."""
    rows = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "x" * n}]
        for question, n in zip(questions, lengths or range(1, len(questions) + 1), strict=True)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return str(path)


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
        messages = [
            {"role": "user", "content": f"{tool} {number}"},
            turn,
            *outputs,
            {"role": "assistant", "content": "ok"},
        ]
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        tools = [{"type": "function", "function": {"name": tool, "description": "d", "parameters": schema}}]
        rows.append({"messages": messages, "tools": tools})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


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
    with pytest.raises(
        ValueError, match=r"1 of 1 conversations do not fit; text\.max_calls_per_turn 2 keeps 1 of these\n"
    ):
        stream(config)


def test_over_long_prompts_are_dropped_and_listed_or_stop_the_run_where_that_is_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"question": "x" * n, "answer": "1"}) + "\n" for n in (5, 50, 6)))
    settings = {"problems": 2, "seed": 0, "prompt_length": lambda problem: len(problem.prompt)}
    config = DataConfig(sources=(str(path),), eval_problems=0)
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
    with pytest.raises(
        ValueError,
        match=r"50 demonstrations do not fit, the last one: .* of \d+ tokens, batch\.row_length = 1; raise it",
    ):
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

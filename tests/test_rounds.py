"""The planner in the loop: which rows fit, what a round leaves out, what the update is made for."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.cli import ConfigError, load_config
from grpo_roc_jax.config import Config
from grpo_roc_jax.method.registry import FOLDER
from grpo_roc_jax.method.waves import RolloutRequest
from grpo_roc_jax.rounds import draw_problems, fits, left_out, plain_where_too_long, thought_length
from grpo_roc_jax.sample import opening_ids
from grpo_roc_jax.step import Batch, checked_rows, most_rows, parts_of, split_rows, take_update, temperature_of
from grpo_roc_jax.text.chat import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.train import main
from grpo_roc_jax.types import Group, Problem, Turn
from tests.samples import make_group

TOKENIZER = load_tokenizer(TextConfig(tokenizer="bytes"))
CHAT = make_chat(TextConfig(tokenizer="bytes"), TOKENIZER)
PROBLEM = Problem("p", "1+1=?", "2", "t")


def method(name, *words):
    return load_config(Config, [str(FOLDER / f"{name}.yaml"), *words], prog="test")


def stages(prompt=60, response=20):
    sections = SimpleNamespace(rollout=SimpleNamespace(max_prompt_tokens=prompt, max_response_tokens=response))
    return SimpleNamespace(config=sections, chat=CHAT, tokenizer=TOKENIZER)


def test_opening_ids_hold_the_tags_and_no_end():
    ids = opening_ids(CHAT, "so</reason><answer>")
    assert ids[-1] == TOKENIZER.special("<answer>")
    assert CHAT.end_id not in ids
    assert opening_ids(CHAT, "") == ()


def test_what_does_not_fit_is_left_out_and_a_first_wave_goes_plain():
    plain = len(CHAT.prompt_ids(PROBLEM))
    tight = stages(prompt=plain + 4)
    assert fits(tight, [PROBLEM], RolloutRequest(0, 1, "hint:1", "four"))
    long = RolloutRequest(0, 1, "hint:1", "fives")
    assert not fits(tight, [PROBLEM], long)
    assert plain_where_too_long(tight, [PROBLEM], [long]) == [RolloutRequest(0, 1)]
    token = RolloutRequest(0, 1, "high_reward", "fives")
    assert plain_where_too_long(tight, [PROBLEM], [token]) == [token], "a reward token is never dropped"


def test_a_cut_leaves_room_for_a_token():
    request = lambda n: RolloutRequest(0, 1, "cut", prefix=tuple(range(n)), prefix_text="stop")  # noqa: E731
    assert fits(stages(response=20), [PROBLEM], request(15))
    assert not fits(stages(response=20), [PROBLEM], request(16))


def test_left_out_is_what_the_groups_do_not_hold():
    first, second = make_group(0, 4), make_group(1, 3)
    waves = [SimpleNamespace(groups=(first,)), SimpleNamespace(groups=(second,))]
    merged = replace(first, trajectories=(*first.trajectories[:3], second.trajectories[1]))
    out = left_out(waves, [merged])
    assert [[t.sample for t in g.trajectories] for g in out] == [[3], [0, 2]]
    assert [len(g.verdicts) for g in out] == [1, 2]
    assert left_out(waves, [first, second]) == []


@pytest.mark.parametrize("text", ["think</reason><tool_call>", "think", "</reason>x", ""])
def test_thought_length(text):
    ids = np.asarray(CHAT._own(text), np.int32)
    group: Group = make_group(0, 1)
    tokens = np.concatenate([[1, 2], ids]).astype(np.int32)
    turns = (Turn(2, len(tokens), text),)
    trajectory = replace(group.trajectories[0], tokens=tokens, turns=turns)
    assert thought_length(trajectory, TOKENIZER) == len(text.partition("</reason>")[0])


def test_draw_problems_takes_one_batch_or_chooses_among_several():
    batches = iter([[replace(PROBLEM, uid=f"{b}{i}") for i in range(4)] for b in range(9)])
    state = SimpleNamespace(table=SimpleNamespace(get=lambda uids: {k: np.ones(len(uids)) for k in ("alpha", "beta")}))
    rng = np.random.default_rng(0)
    config = method("grpo", "--group.problems=4")
    assert [p.uid for p in draw_problems(config, batches, state, rng)] == ["00", "01", "02", "03"]
    config = method("spo", "--group.problems=4", "--plan.pool=3", "--batch.updates=1")
    chosen = draw_problems(config, batches, state, rng)
    assert len({p.uid for p in chosen}) == 4
    assert len(list(batches)) == 5


def test_most_rows_bounds_every_plan():
    assert most_rows(method("grpo", "--group.problems=8", "--group.size=4", "--batch.updates=3")) == 3 * 4
    assert most_rows(method("knapsack", "--group.problems=8", "--group.size=4")) == 32
    one_of_two = method("knapsack", "--group.problems=8", "--group.size=4", "--batch.updates=8")
    assert most_rows(one_of_two) == 32 - 7 * 2, "seven problems keep two rollouts each"
    assert most_rows(method("expo", "--group.problems=8", "--group.size=4", "--plan.replace=2")) == 32 + 16
    assert most_rows(method("roc_inverse", "--group.problems=2", "--group.size=4")) == 8


def test_a_batch_made_anew_sees_the_steps_before_it():
    """Coefficients of score-based objectives are those of the policy that their own step changes."""
    seen, run = [], SimpleNamespace(train=0)
    update = lambda trained, packed: (trained + 1, {"loss/value": np.float32(trained)})  # noqa: E731
    programs = SimpleNamespace(update_steps={1.0: update}, offload=False)

    def batch(packed, again=None):
        return Batch([], packed, SimpleNamespace(fill=1.0), 1.0, signal=0.5, again=again)

    batches = [batch("first"), batch("stale", lambda: seen.append(run.train) or batch("anew"))]
    metrics = take_update(run, programs, batches)
    assert seen == [1]
    assert [b.packed for b in batches] == ["first", "anew"]
    assert (run.train, metrics["loss/value"], metrics["update/signal"]) == (2, 0.5, 0.5)


def test_parts_are_runs_of_whole_groups():
    groups = [make_group(i, n) for i, n in enumerate((2, 3, 1, 2))]
    parts = parts_of(groups, 3)
    assert [[g.size for g in part] for part in parts] == [[2], [3], [1, 2]]
    assert [len(rows) for rows in split_rows(list(range(8)), groups, 3)] == [2, 3, 3]
    empty = replace(groups[0], trajectories=(), verdicts=())
    assert parts_of([empty, *groups[1:]], 4) == [[groups[1]], [groups[2]], [groups[3]]]


def test_rows_of_own_parts_are_checked():
    row = SimpleNamespace(length=3, weights=np.ones(3), advantages=np.ones(3))
    assert checked_rows((row,), [row]) == [row]
    with pytest.raises(ValueError, match="returned 0 rows; 1 of the same lengths"):
        checked_rows([], [row])
    with pytest.raises(ValueError, match="not finite"):
        checked_rows([SimpleNamespace(length=3, weights=np.full(3, np.nan), advantages=np.ones(3))], [row])


def test_the_update_trains_at_the_temperature_of_the_rollouts():
    config = method("microcoder")
    assert [temperature_of(config, SimpleNamespace(temperature_stage=s)) for s in (0, 2)] == [0.9, 1.1]
    assert temperature_of(method("grpo"), SimpleNamespace(temperature_stage=0)) == 1.0


def test_a_part_that_is_not_there_is_refused_before_anything_runs(capsys):
    assert main(["methods/grpo.yaml", "--plan.edit=nowhere:nothing", "--dry-run"]) == 2
    assert "plan.edit = 'nowhere:nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("s_grpo", ["--group.size=4"], "set group.size 9"),
        ("xrpo", ["--plan.pilot=16"], "leaves nothing to allocate"),
        ("grpo_roc", ["--resample.conditions=low_last"], "nothing to tell apart"),
        ("rc_grpo", ["--data.eval_problems=0"], "measured on held-out problems"),
        ("spo", ["--plan.pool=1"], "nothing to choose from"),
        ("microcoder", ["--plan.temperatures", "1.1", "0.9"], "rising numbers"),
    ],
)
def test_plans_that_contradict_other_sections_are_refused(name, words, said, capsys):
    with pytest.raises((ConfigError, SystemExit)) as stop:
        method(name, *words)
    assert said in " ".join((str(stop.value) + capsys.readouterr().err).replace("│", " ").split())

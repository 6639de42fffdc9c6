"""Distillation on the student's own tokens: vectors, what a teacher is shown, and which model may be one."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax import text
from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner.group_learner import GroupLearner, rows_shown_more
from grpo_roc_jax.method.compose import Scores, needs_reference, train_rows
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.run.learning import check_vocabulary, find_teacher, load_teacher
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import OWN_SPECIALS, ByteTokenizer, load_tokenizer
from grpo_roc_jax.train import main
from tests.helpers.method_groups import make_group, method, saying, trajectories

OLD, NOW = np.float32([-1, -0.5, -2]), np.float32([-0.8, -1.5, -2])
PATH = {"kind": "teacher", "path": "x"}


def advantages(group, teacher, step=PATH, **sections):
    config = method(group.size, advantage={"kind": "none", "adjust": [step]}, **sections)
    rows = train_rows([group], config, AlgoState(), scores=Scores(teacher=teacher))
    return [row.advantages[row.policy_mask] for row in rows]


def logprobs_of(trajectory, values):
    """Log-probabilities of a trajectory with noise off the mask."""
    out = np.full(trajectory.length, 5.0, np.float32)
    out[trajectory.policy_mask] = values
    return out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [0.2, -1, 0]), ({"discount": 0.5}, [-0.3, -1, 0]), ({"coef": 2.0}, [0.4, -2, 0])],
)
def test_the_specifications_vector(settings, expected):
    """A_t = log p_teacher - log p, and discounted sums of it."""
    group = make_group([1], lengths=[3], observation=[2], logprobs=[OLD])
    values = advantages(group, [logprobs_of(group.trajectories[0], NOW)], PATH | settings)
    np.testing.assert_allclose(values[0], expected, atol=1e-6)


def test_it_adds_to_the_advantage_of_the_reward():
    group = make_group([1, 0], lengths=[3, 3], logprobs=[OLD, OLD])
    teacher = [logprobs_of(group.trajectories[0], NOW), None]
    config = method(2, advantage={"scale": "none", "adjust": [PATH]})
    rows = train_rows([group], config, AlgoState(), scores=Scores(teacher=teacher))
    np.testing.assert_allclose(rows[0].advantages[rows[0].policy_mask], [0.7, -0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(rows[1].advantages[rows[1].policy_mask], [-0.5] * 3)  # nothing was shown for it


def test_passes_and_teachers_that_are_missing_or_too_many():
    group = make_group([1, 0])
    with pytest.raises(ValueError, match=r"advantage.adjust teacher needs .* pass Scores\(teacher=...\)"):
        advantages(group, None)
    with pytest.raises(ValueError, match=r"scores\.teacher has 1 arrays for 2 trajectories"):
        advantages(group, [None])
    with pytest.raises(ConfigError, match="a method has one teacher"):
        read_config("--advantage.adjust=teacher,self_teacher")
    assert not any(advantages(group, None, PATH | {"coef": 0.0})[0])
    moving = {"kind": "self_teacher", "weights": "reference"}
    assert needs_reference(method(advantage={"adjust": [moving]}))
    assert not needs_reference(method(advantage={"adjust": ["self_teacher"]}))


def shown(group, index, **settings):
    step = method(advantage={"adjust": [{"kind": "self_teacher", **settings}]}).advantage.adjust[0]
    return step.suffix(group, index)


def test_what_the_teacher_is_shown():
    group = saying(make_group([0, 1, 1]), "way 0", "way 1", "way 2")
    group = replace(group, problem=replace(group.problem, extra={"solution": "think", "null": None}))
    assert shown(group, 0) == "\nSolution: 1"
    assert shown(group, 0, column="solution", intro="See: ") == "\nSee: think"
    assert shown(group, 0, column="nothing") == shown(group, 0, column="null") == ""
    assert [shown(group, i, shows="success") for i in range(3)] == [f"\nSolution: way {i}" for i in (1, 2, 1)]
    single = make_group([1, 0, 0])
    assert [bool(shown(single, i, shows="success")) for i in range(3)] == [False, True, True]


class Reading(GroupLearner):
    """Scores a token with its value under the given factor, and remembers the rows."""

    seen = ()

    def score(self, params, groups, temperature):
        rows = trajectories(groups)
        object.__setattr__(self, "seen", [t.tokens.tolist() for t in rows])
        return Scores([params * t.tokens.astype(np.float32) for t in rows])


def reading(step, limit=9):
    """A learner whose prompts are 99, then one id per letter of the suffix."""
    config = read_config(f"--advantage.adjust=[{step}]", f"--rollout.max_prompt_tokens={limit}")
    return Reading(config, None, lambda problem, suffix: [99, *map(ord, suffix)])


def test_the_response_is_scored_after_the_teachers_prompt():
    """Index t of the result is about token t of the row that trains, whatever the teacher's prompt was."""
    groups = [make_group([1, 0], lengths=[2, 3], observation=[1, 0]), make_group([0], lengths=[1])]
    run = SimpleNamespace(train=SimpleNamespace(params=2.0), reference=3.0, method=AlgoState())
    learner = reading("{kind: self_teacher, intro: ab}")
    teacher = learner.with_teacher(Scores(), groups, run).teacher
    rows = trajectories(groups)
    assert learner.seen == [[99, 10, *b"ab1", *t.tokens[t.prompt_length :]] for t in rows]
    for t, values in zip(rows, teacher, strict=True):
        np.testing.assert_array_equal(values, np.where(np.arange(t.length) < t.prompt_length, 0, 2 * t.tokens))
    moving = "{kind: self_teacher, weights: reference, shows: success, intro: ''}"
    teacher = reading(moving, 64).with_teacher(Scores(), groups, run).teacher
    assert [values is None for values in teacher] == [True, False, True]
    assert teacher[1][-1] == 3 * rows[1].tokens[-1]
    short = reading("{kind: self_teacher, intro: ab}", 4)
    assert short.with_teacher(Scores(), groups, run).teacher == [None] * 3, "prompts are never cut"


def test_the_teachers_prompt_has_what_the_environment_of_its_row_appended():
    """A row of several conversations keeps the lengths of the others; one that becomes too long for the update is left
    out."""
    group, part = make_group([1, 0], lengths=[2, 3]), SelfTeacher(intro="ab")
    first, second = group.trajectories
    rows = replace(first, opening=" 7 doors.", parts=(3, 1)), replace(second, opening="!")
    group = replace(group, trajectories=rows)
    for longest, left in ((16, [True, True]), (15, [False, True]), (8, [False, False])):
        shown = rows_shown_more(part, [group], lambda problem, end: [*map(ord, problem.prompt + end)], 14, longest)
        assert [row is not None for row in shown] == left
        for row, prompt in zip(shown, ("? 7 doors.\nab1", "?!\nab1"), strict=True):
            assert row is None or "".join(map(chr, row.tokens[: row.prompt_length])) == prompt
        assert shown[0] is None or (shown[0].parts, shown[0].length) == ((15, 1), 16)


def test_vocabularies():
    tokenizer = ByteTokenizer()
    check_vocabulary(tokenizer, ByteTokenizer())
    check_vocabulary(tokenizer, ByteTokenizer((*OWN_SPECIALS, "<more>")))
    with pytest.raises(ValueError, match=r"it has 2\d\d ids, .* share the vocabulary"):
        check_vocabulary(tokenizer, ByteTokenizer(OWN_SPECIALS[:-1]))
    with pytest.raises(ValueError, match=r"id 256 is '<\|im_end\|>' there and '<.pad.>' in this run"):
        check_vocabulary(tokenizer, ByteTokenizer((OWN_SPECIALS[1], OWN_SPECIALS[0], *OWN_SPECIALS[2:])))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published model of another size than the student, and its parameters."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shape = ModelConfig(d_model=24, layers=2, heads=2, kv_heads=1, head_dim=12, d_ff=32, max_positions=256)
    model = resolve_model(replace(shape, qk_norm=True), load_tokenizer(TextConfig()))
    params = jax.jit(partial(init_params, config=model))(jax.random.key(7))
    export_model(params, model, folder, dtype="float32")
    shutil.copy(Path(text.__file__).parent / "toy.model", folder / "tokenizer.model")
    return folder, model, params


def words(path):
    return [f"--advantage.adjust=[{{kind: teacher, path: {path!s}}}]", "--model.d_model=16", "--model.layers=1"]


def test_a_published_model_of_another_size_is_loaded(published):
    """As it scores: in the compute dtype, layers apart. `tests/test_methods_run.py` trains under a larger teacher."""
    folder, model, params = published
    config = read_config(*words(folder))
    tokenizer = load_tokenizer(config.text)
    assert find_teacher(config, tokenizer)[1].d_model == 24
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    student = resolve_model(config.model, tokenizer)
    teacher = load_teacher(config, PolicyModel(student, mesh), tokenizer)
    expected = jax.jit(partial(unstack, config=model))(params)
    jax.tree.map(np.testing.assert_array_equal, teacher.params, expected)


def test_a_teacher_that_cannot_be(tmp_path, published, capsys):
    folder, _, _ = published
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("text: {tokenizer: bytes}\n")
    for path, message in [
        (tmp_path / "nothing", "cannot be the teacher: .* no such directory"),
        (tmp_path / "run", "cannot be the teacher: .* share the vocabulary"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_teacher(read_config(*words(path)), load_tokenizer(TextConfig()))
    with pytest.raises(ConfigError, match="made for texts of 256 tokens"):
        long = ["--rollout.max_response_tokens=300", "--batch.row_length=400"]
        find_teacher(read_config(*words(folder), *long), load_tokenizer(TextConfig()))
    assert main([*words(tmp_path / "run"), "--dry-run"]) == 2
    assert "share the vocabulary" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="path = ''; must be a run"):
        find_teacher(read_config("--advantage.adjust=teacher"), load_tokenizer(TextConfig()))
    assert find_teacher(read_config("--advantage.adjust=self_teacher"), load_tokenizer(TextConfig())) is None

"""One table of other projects' settings: its right side exists, its messages say what it says, and the page has it."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_roc_jax import __main__ as commands
from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.hints import other_names as hints
from grpo_roc_jax.hints.other_names import METHOD, OTHER_NAMES, other_name, recipe_of
from grpo_roc_jax.settings.cli import CONFIG_DIR, ConfigError
from grpo_roc_jax.settings.layers import known_keys
from grpo_roc_jax.settings.options import Axis, fields_of
from tests.helpers.kind_cases import axes

KNOWN = tuple(known_keys(Config))
OF_KIND = re.compile(r"of ([a-z_.]+) ([a-z0-9_]+)")


AXES = {axis.axis: axis for axis in axes(Axis)}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming_from.md"


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config("toy.yaml", *words)
    return str(caught.value)


@pytest.mark.parametrize("row", OTHER_NAMES, ids=lambda row: f"{row.project}: {row.theirs}")
def test_a_setting_of_another_project_leads_to_the_one_here(row):
    assert row.ours in ("", METHOD, *KNOWN)
    assert other_name(row.theirs).ours == row.ours, "the first row of a name speaks for all projects"
    if row.theirs in KNOWN:
        return
    message, first = refusal(f"--{row.theirs}", "7"), other_name(row.theirs)
    expected = {"": "has no counterpart", METHOD: "a method is a recipe here"}.get(first.ours, f"'{first.ours}'")
    assert expected in message
    assert row.note in first.note or first is not row


@pytest.mark.parametrize("row", [row for row in OTHER_NAMES if OF_KIND.fullmatch(row.note)], ids=lambda row: row.theirs)
def test_a_note_names_the_kind_that_has_the_setting(row):
    axis, kind = OF_KIND.fullmatch(row.note).groups()
    assert row.ours.rpartition(".")[2] in fields_of(AXES[axis].kinds[kind]) or row.ours == axis


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning-rate 1e-4", "did you mean 'optim.lr'?"),
        ("--rollout.n 8", "did you mean 'group.size' ("),
        ("--sampling.temp 1", "did you mean 'sampling.temperature'?"),
        ("--loss_type dr_grpo", "dr_grpo is a recipe: `grpo-roc train methods/dr_grpo.yaml`"),
        ("--loss_type sigmoid", "a method is a recipe here: configs/methods/NAME.yaml"),
        ("--advantage dapo", "dapo is a recipe: `grpo-roc train methods/dapo.yaml`"),
        ("--use_vllm true", "has no counterpart: the engine is part of the run"),
        ("--optim.zebra 3", "--help lists the sections"),
        ("--weight_decai 0", "did you mean 'optim.weight_decay'?"),
        ("--optim.learnig_rate 1", "did you mean 'optim.lr'?"),
        ("--reward.function answer", "did you mean 'reward.functions'?"),
        ("--logging_steps 1", "TRL's logging_steps has no counterpart: every step is logged"),
        ("--optimizer adamw", "; optimizer has no counterpart: the optimizer is AdamW"),
        ("--surrogate.kl low_var_kl", "did you mean 'k3'?"),
        ("--weights.normalizer seq-mean-token-mean", "did you mean 'sequence_mean'?"),
        ("--advantage pass_at_k --advantage.kk 4", "did you mean 'k'?"),
        ("--lora.ranc 4", "did you mean 'rank' of kind low_rank?"),
        ("--model Qwen/Qwen3-0.6B", "is a section; set one of its fields, such as model.path"),
        ("--hlep", "did you mean '--help'?"),
        ("actor_rollout_ref.rollout.n=5", "did you mean 'group.size' ("),
        ("actor_rollout_ref.rollout.enforce_eager=False", "rollout.* has no counterpart: the engine is part"),
        ("env_kwargs.max_steps=8", "did you mean 'environment' ("),
        ("--orchestrator.train.sampling.max_completion_tokens 128", "did you mean 'rollout.max_response_tokens' ("),
        ("--vllm_server_port 8000", "TRL's vllm_* has no counterpart"),
        ("--trainer.algorithm.clip_cov.clip_ratio 0.1", "a method is a recipe here: methods/clip_cov.yaml"),
        ("--surrogate.beta 0.1", "clip_low, clip_high; did you mean 'surrogate.kl.coef' ("),
        ("--surrogate.kl.kl_loss_coef 0.1", "it has no settings; did you mean 'surrogate.kl.coef' ("),
        ("--advantage.scale_rewards false", "it has adjust, baseline, scale; did you mean 'advantage.scale'?"),
        ("--environment.env_class gsm8k", "did you mean 'environment' (file.py:Class)?"),
        ("--response_tokens 64", "did you mean 'rollout.max_response_tokens'?"),
        ("--sft.learning_rate 1e-4", "did you mean 'sft.lr'?"),
        ("--eval.problems 4", "did you mean 'data.eval_problems'?"),
        ("--foo.bar.lr 1e-6", "did you mean 'optim.lr'?"),
        ("--surrogate ppo", "did you mean 'clip'?"),
        ("--lora true", "did you mean 'low_rank'?"),
        ("--optim.lr.peak 1", "optim.lr = {peak: '1'} (command line): must be a number"),
    ],
)
def test_what_a_newcomer_types(words, message):
    answer = refusal(*words.split())
    assert message in answer
    assert answer.count("did you mean") <= 1 and "'drpo'?" not in answer


RESEMBLING = """
max_samples tool temp data.eval generator.sampling_params.stop actor_rollout_ref.actor.shuffle
orchestrator.filters.type orchestrator.log.level trainer.model.ac.freq trainer.model.moe.dispatch.type bench
reward_clip_range ema_beta data.sampler.class_path rollout.abc_tokens checkpoint.save_contents actor.k hello
dataloader_num_workers monitors.prime.name trainer.model.ep roles.user.alpha
"""
"""Names of other projects without a counterpart, each of which resembles a setting here that means something else."""


def test_a_name_without_a_counterpart_suggests_nothing():
    for key in RESEMBLING.split():
        message = refusal(f"--{key}", "7")
        assert "did you mean" not in message and "--help lists the sections" in message, key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor_rollout_ref.rollout.n: 4", r"line 2\); did you mean 'group.size'"),
        ("lora: true", r"line 2\): .*did you mean 'low_rank'\?"),
        ("log: {wandb: false}", r"line 2\): .*did you mean 'off'\?"),
    ],
)
def test_names_and_choices_in_a_file_are_refused_with_their_line(text, message, tmp_path):
    (tmp_path / "rl.toml").write_text("max_steps = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is TOML; settings are written in YAML"):
        read_config(str(tmp_path / "rl.toml"))
    (tmp_path / "theirs.yaml").write_text(f"base: toy.yaml\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"theirs\.yaml, {message}"):
        read_config(str(tmp_path / "theirs.yaml"))


def test_every_recipe_is_told_by_its_name_and_every_other_name_is_one():
    for path in (CONFIG_DIR / "methods").glob("*.yaml"):
        assert recipe_of(path.stem) == recipe_of(path.stem.upper().replace("_", "-")) == f"methods/{path.name}"
    assert all(map(recipe_of, hints.METHOD_NAMES))
    assert not recipe_of("../toy") and not recipe_of("") and not recipe_of(None) and not recipe_of(["dapo"])


@settings(deadline=None)
@given(st.text("abcdefghijklmnopqrstuvwxyz_.", min_size=1, max_size=30))
def test_a_suggestion_is_near_or_absent(key):
    """The name stands in another section, section and name are spelt nearly alike, or only separators differ."""
    near = hints.nearest(key, KNOWN)
    tail, other = key.rpartition(".")[2], near.rpartition(".")[2]
    letters = near.replace(".", "").replace("_", "") == key.replace(".", "").replace("_", "")
    assert not near or (near in KNOWN and (tail == other or letters or hints.close_to(tail, [other]) == other))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("banana.yaml", r"no configuration file .* lists the recipes$"),
        ("configs/like_it.yaml", r"no configuration file .* lists the recipes$"),
        ("dapo.yaml", "nearest: configs/methods/dapo.yaml"),
        ("gsm8", "nearest: configs/data/gsm8k.yaml"),
        ("@ rl.toml", "is named without @"),
    ],
)
def test_a_file_that_is_not_there_suggests_what_is_near(words, message):
    with pytest.raises(ConfigError, match=message):
        read_config(*words.split())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("nonsense", "there is no nonsense\nsections: name, run_dir, "),
        ("optm", "there is no optm; did you mean 'optim'?"),
        ("optim.zebra", "there is no optim.zebra\noptim: lr, warmup_steps, "),
        ("learning_rate", "there is no learning_rate; did you mean 'optim.lr'?"),
        ("dapo", "there is no dapo; dapo is a recipe: `grpo-roc train methods/dapo.yaml`"),
    ],
)
def test_help_about_what_is_not_there_lists_what_is(query, message, capsys):
    with pytest.raises(SystemExit):
        read_config("--help", query)
    assert message in capsys.readouterr().out


def test_commands_of_other_projects(capsys):
    assert set(hints.COMMAND_NAMES.values()) <= commands.COMMANDS.keys()
    assert not hints.COMMAND_NAMES.keys() & commands.COMMANDS.keys()
    meanings = {"vllm-serve": "serve", "grpo": "train", "fit": "train", "play": "chat", "vf-tui": "view", "zebra": ""}
    for typed, command in meanings.items():
        meant = command and f"did you mean {command!r}?"
        assert commands.main([typed]) == commands.UNKNOWN_COMMAND
        printed = capsys.readouterr().err
        assert meant in printed and (meant or "did you mean" not in printed)


def test_the_page_shows_what_a_misspelt_setting_answers():
    """The example answer on the page is the answer."""
    page = PAGE.read_text(encoding="utf-8")
    assert json.dumps(refusal("--optim.learning_rate", "1e-4"))[1:-1] in page

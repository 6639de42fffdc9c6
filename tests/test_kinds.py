"""A setting exists only where its kind is chosen: elsewhere it is refused with the kind that has it."""

import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.settings.cli import ConfigError, find_config, flatten


def test_the_toy_has_few_settings():
    assert len(dict(flatten(read_config()))) <= 200


@pytest.mark.parametrize(
    ("word", "kinds"),
    [
        ("lora.rank=8", "kind low_rank"),
        ("model.rope_scaling.factor=8", "kind linear, llama3, proportional, yarn"),
        ("model.experts.count=8", "kind mixture"),
        ("model.windows.sizes=8", "kind sliding"),
        ("distributed.coordinator=host:1", "kind address"),
        ("reward.truncated.reward=-1", "kind fixed"),
        ("rollout.step_limit.seconds=5", "kind drop, partial"),
        ("rollout.step_limit.lag=1", "kind stream"),
        ("tools.executor.url=http://host:1", "kind code_judge, sandbox_fusion"),
        ("resample.positive_select.epsilon=0.1", "kind inverse"),
        ("plan.condition.evaluate=low", "kind reward_tokens"),
        ("log.wandb.project=mine", "kind offline, online, trackio"),
    ],
)
def test_a_setting_of_another_kind_is_refused(word, kinds):
    name, _, value = word.partition("=")
    with pytest.raises(ConfigError, match=f"^{name} = {value} .*: is a setting of {kinds}; kind"):
        read_config(word)


def test_a_schedule_without_an_end_has_none():
    with pytest.raises(ConfigError, match=r"optim\.schedule\.total_steps .* is a setting of kind cosine, linear"):
        read_config("--optim.schedule=constant", "--optim.schedule.total_steps=9")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout.step_limit=drop",), r"rollout\.step_limit\.seconds has no default"),
        (("model.experts=mixture", "model.experts.count=2", "model.experts.per_token=3"), "per_token = 3; must be at"),
        (("model.windows=sliding", "model.windows.sizes=[]"), "must have at least one entry"),
        (("model.windows=sliding", "model.windows.sizes=1,2,3,4,5"), r"sizes has 5 entries; .* model\.layers = 3"),
        (("model.head_dim=7",), r"model\.head_dim = 7 .*must be a multiple of 2"),
        (("distributed=address", "distributed.processes=2", "distributed.process=2"), "process = 2; must be below"),
        (("optim.schedule=cosine", "optim.schedule.total_steps=3"), "set optim.schedule.total_steps to the optimizer"),
        (("tools.executor=code_judge", "tools.memory_mb=99"), r"tools\.memory_mb = 99 has no effect .* code_judge"),
        (
            ("tools.executor=sandbox_fusion", "tools.memory_mb=99", "tools.workers=3", "tools.cpus=0"),
            r"leave out tools\.workers, tools\.cpus, or set tools\.executor to local or ray",
        ),
    ],
)
def test_impossible_settings_of_a_kind_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        read_config(*words)


def test_a_path_that_stands_for_a_kind_goes_with_the_settings_of_that_kind():
    tokenizer = read_config("text.tokenizer=some/folder", "text.tokenizer.eos_token=<end>").text.tokenizer
    assert (tokenizer.kind, tokenizer.path, tokenizer.eos_token) == ("file", "some/folder", "<end>")
    config = read_config("reward.functions=answer,mine:brevity", "reward.functions.function.weight=0.5")
    assert [part.weight for part in config.reward.functions] == [1.0, 0.5]
    config = read_config("--reward.functions", "mine:brevity", "{kind: format, weight: 0.25}")
    assert [part.name for part in config.reward.functions] == ["mine:brevity", "format"]
    assert config.reward.functions[1].weight == 0.25


def test_ray_reads_the_settings_of_the_pool():
    assert read_config("tools.executor=ray", "tools.workers=3").tools.workers == 3


def test_a_shipped_file_is_found_under_its_path_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("configs/toy.yaml") == find_config("toy.yaml") == find_config("configs/toy")

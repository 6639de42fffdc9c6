"""Talking to a model: a published one and a run, asked once and in a dialogue, calls and results shown as they come."""

import json
import re
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from rich.console import Console

import grpo_roc_jax as g
from grpo_roc_jax.commands import export
from grpo_roc_jax.commands.chat import ChatConfig, Dialogue, converse, main, to_json
from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import Finish, Observe, TurnEnd
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import read_published, resolve_config
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import LowRank, init_adapter, save_adapter
from grpo_roc_jax.model.sharding import make_mesh
from grpo_roc_jax.run import components as components_module
from grpo_roc_jax.run.load import open_policy, serving_settings, settings_for
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml
from grpo_roc_jax.types import ToolResult, Trajectory, Turn
from tests.helpers.small_model import publish
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

SHORT = ["--tools.workers=2", "--tools.preload=[]", "--rollout.max_response_tokens=24"]
CALL = '{"name": "python_code_with_standard_io", "arguments": {"code": "print(6*7)"}}'
CALLING = f"I compute.</reason><tool_call>\n{CALL}\n</tool_call>"
ANSWER = "</reason><answer>\\boxed{42}</answer>"


pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("chat") / "model")


class Scripted:
    """An engine whose policy says given texts; tools, parsing and observations are the real ones."""

    def __init__(self, sampler, texts):
        self.chat, self.seed, self.config = sampler.chat, sampler.engine.seed, sampler.engine.config
        self.texts = list(texts)

    def run(self, sampler, requests, environment, options):
        assert options.purpose == "chat", "a conversation has no step that could end"
        prompt = requests[0].prompt.tolist()
        tokens, decision = list(prompt), None
        while not isinstance(decision, Finish):
            turn = self.chat.turn_ids(self.texts.pop(0))
            decision = environment.turn_ended(0, TurnEnd(0, len(tokens), np.asarray(turn), np.zeros(len(turn)), "stop"))
            tokens += turn
            while not isinstance(decision, Finish | Observe):
                decision = next((decision for _, decision in environment.poll(1.0)), None)
            if isinstance(decision, Observe):
                tokens += decision.ids.tolist()
        zeros = np.zeros(len(tokens))
        bare = Trajectory(np.asarray(tokens), zeros, zeros, zeros, len(prompt), (), decision.stop, 0)
        return [environment.completed(0, bare)], None


def test_calls_and_results_are_shown_as_they_come(published):
    seen = []
    with open_policy(str(published), SHORT) as (_, sampling):
        sampling.sampler.engine = Scripted(sampling.sampler, [CALLING, ANSWER, "</reason>Yes."])
        dialogue = Dialogue(sampling.sampler, seen.append)
        trajectory = dialogue.ask("What is 6 x 7?")
        assert [type(event) for event in seen] == [Turn, ToolResult, Turn]
        assert seen[1].ok and "42" in seen[1].observation
        shown = json.loads(json.dumps(to_json("What is 6 x 7?", trajectory)))
        assert (shown["answer"], shown["stop"]) == ("42", "answer")
        assert shown["turns"][0]["calls"][0]["arguments"] == {"code": "print(6*7)"}
        assert shown["turns"][0]["results"][0]["kind"] == "ok"
        before = trajectory.tokens.tolist()
        tokens = dialogue.ask("Sure?").tokens.tolist()
        assert tokens[: len(before)] == before  # what was said stays, id by id
        text = sampling.sampler.chat.tokenizer.decode(tokens[len(before) :])
        assert text.startswith("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<reason>")


def test_one_question_to_a_published_model_with_unknown_keys_as_json_and_to_none(published, tmp_path, capsys):
    assert ChatConfig("model").temperature == 0.0, "answers are greedy"
    folder = shutil.copytree(published, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"odd_key": 3}))
    words = [str(folder), "--prompt", "What is 2 + 2?", "--json", *SHORT]
    assert main(words) == 2
    assert "not supported: odd_key = 3" in capsys.readouterr().err
    assert main([*words, "--model.ignore_keys", "odd_key"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["prompt"] == "What is 2 + 2?" and 0 < shown["tokens"] <= 24
    expected = "no such directory; must be a run, one of its checkpoints, the directory of a model, a hub id ORG/NAME"
    for name in (str(tmp_path / "nothing"), "runs/nothing", "nothing"):
        assert main([name, "--prompt", "x"]) == 2
        assert f"{name}: {expected}" in capsys.readouterr().err


@pytest.mark.parametrize("texts", [(), (CALLING, CALLING, ANSWER)])
def test_an_interrupt_stops_an_answer_and_not_the_dialogue(published, texts):
    """Of the policy itself, and beside a call that runs. The next answer is that of a new dialogue."""
    console, lines, errors = Console(record=True, width=100), iter(["Hello", "What is 6 x 7?", ""]), [KeyboardInterrupt]

    def interrupt_once(event):
        if errors:
            raise errors.pop()

    with open_policy(str(published), SHORT) as (_, sampling):
        engine, dialogue = sampling.sampler.engine, Dialogue(sampling.sampler, interrupt_once)
        if texts:
            sampling.sampler.engine = Scripted(sampling.sampler, texts)
        converse(dialogue, console, lambda: next(lines))
        ((question, answer),) = dialogue.exchanges
        sampling.sampler.engine = Scripted(sampling.sampler, texts[1:]) if texts else engine
        expected = Dialogue(sampling.sampler).ask(question)
        assert question == "What is 6 x 7?" and answer == expected.tokens[expected.prompt_length :].tolist()
    assert console.export_text().count("(stopped)") == 1


def test_ten_questions_are_answered_where_the_prompt_has_room_for_three(published):
    console = Console(record=True, width=100)
    with open_policy(str(published), [*SHORT, "--rollout.max_prompt_tokens=200"]) as (_, sampling):
        sampling.sampler.engine = Scripted(sampling.sampler, [ANSWER] * 12)
        tokenizer, dialogue = sampling.sampler.chat.tokenizer, Dialogue(sampling.sampler)
        first = tokenizer.decode(dialogue.ask("question 0?").tokens)
        remembered = []
        for number in range(1, 10):
            trajectory = dialogue.ask(f"question {number}?")
            assert trajectory.prompt_length <= 200 and trajectory.stop == "answer"
            text = tokenizer.decode(trajectory.tokens)
            assert text.startswith(first.split("question 0?")[0]) and text.count(ANSWER) == len(dialogue.exchanges)
            remembered.append([int(part[0]) for part in text.split("question ")[1:]])
        assert remembered[0] == [0, 1] and remembered[-1][-1] == 9
        assert all(numbers == list(range(numbers[0], numbers[-1] + 1)) for numbers in remembered)
        assert 0 < remembered[-1][0] < 9, "the oldest are left out, the newest stay"
        lines = iter(["question 10?", "/new", "question 11?", "Still there? " * 800, ""])
        converse(dialogue, console, lambda: next(lines))
        assert dialogue.questions == 12 and not dialogue.exchanges, "those of before the last one had no room"
    text = " ".join(console.export_text().split())
    assert "answered without the 1 oldest questions" in text
    assert re.search(r"the question has \d+ tokens, rollout\.max_prompt_tokens = 200; raise it", text)


def test_a_run_is_talked_to_in_its_own_way(tmp_path, capsys):
    g.train_policy(g.read_config(*TINY, f"--run_dir={tmp_path / 'run'}", "--steps=1"))
    assert main([str(tmp_path / "run"), "--prompt", "1 + 1?", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 16


@pytest.mark.parametrize("word", ["rollout.kv_start=8192", "rollout.kv_tokens=512", "sharding.sequence=16"])
def test_what_fits_the_rows_and_devices_of_a_run_prevents_no_dialogue(tmp_path, word):
    """Each of them fits the run, but not one row on each of eight devices."""
    config = read_config("configs/toy.yaml", "--batch.row_length=256", f"--{word}")
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    (tmp_path / "checkpoints").mkdir()
    opened = settings_for(str(tmp_path), [], "test")
    opened.rollout.check_shards(make_mesh(opened.sharding).size)
    assert opened.rollout.slots == jax.device_count() == 8


@pytest.mark.slow
def test_an_adapter_answers_as_the_model_that_it_is_merged_into(published, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(components_module, "make_engine", make_engine)  # programs of an adapter take its matrices too
    lora, folder = LowRank(rank=2, alpha=64.0), tmp_path / "adapter"
    folder.mkdir()
    model = resolve_config(ModelConfig(path=str(published)))
    noise = partial(np.random.default_rng(0).normal, scale=0.5)
    pairs = jax.tree.map(lambda leaf: noise(size=leaf.shape).astype("f"), init_adapter(jax.random.key(0), lora, model))
    save_adapter(pairs, lora, model, find_family(read_published(published)), folder, str(published))
    assert export.main([str(folder), str(tmp_path / "merged")]) == 0

    def answer(source, *more):
        capsys.readouterr()
        assert main([str(source), "--prompt", "What is 2 + 2?", "--json", *SHORT, *more]) == 0
        return json.loads(capsys.readouterr().out)["turns"]

    assert answer(folder) == answer(tmp_path / "merged") != answer(published)
    described = folder / "adapter_config.json"
    described.write_text(described.read_text().replace(str(published), "some/where/else"))
    assert main([str(folder), "--prompt", "x", *SHORT]) == 2
    assert "name its directory: --model.path DIR" in capsys.readouterr().err
    assert answer(folder, f"--model.path={published}") == answer(tmp_path / "merged")


@pytest.mark.parametrize("read", [settings_for, serving_settings])
def test_the_model_of_an_adapter_is_named_by_its_path(tmp_path, read):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    shape |= {"intermediate_size": 16, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512}
    pairs = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    for folder, name, content in ((base, "config", shape), (adapter, "adapter_config", pairs)):
        folder.mkdir()
        (folder / f"{name}.json").write_text(json.dumps(content | {"base_model_name_or_path": str(base)}))
    for words in ([], [f"--model={{path: {base}}}"], [f"--model.path={base}"]):
        assert read(str(adapter), words, "test").model.path == str(base)
    for word in ("--model", f"--model={base}", f"model={base}"):
        with pytest.raises(ConfigError, match=r"model = .* is a section; set one of its fields, such as model\.path"):
            read(str(adapter), [word], "test")

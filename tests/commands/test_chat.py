"""Talking to a model: a published one and a run, asked once and in a dialogue, calls and results shown as they come."""

import json
import re
from itertools import chain, repeat
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

import grpo_roc_jax as g
from grpo_roc_jax.commands.chat import Dialogue, converse, main, to_json
from grpo_roc_jax.engine.protocol import Finish, Observe, TurnEnd
from grpo_roc_jax.run.load import open_policy, serving_settings, settings_for
from grpo_roc_jax.settings.cli import ConfigError
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
        bare = g.Trajectory(np.asarray(tokens), zeros, zeros, zeros, len(prompt), (), decision.stop, 0)
        return [environment.completed(0, bare)], None


def test_calls_and_results_are_shown_as_they_come(published):
    seen = []
    with open_policy(str(published), SHORT) as (_, sampling):
        sampling.sampler.engine = Scripted(sampling.sampler, [CALLING, ANSWER, "</reason>Yes."])
        dialogue = Dialogue(sampling.sampler, seen.append)
        trajectory = dialogue.ask("What is 6 x 7?")
        assert [type(event).__name__ for event in seen] == ["Turn", "ToolResult", "Turn"]
        shown = json.loads(json.dumps(to_json("What is 6 x 7?", trajectory)))
        assert (shown["answer"], shown["turns"][0]["results"][0]["kind"]) == ("42", "ok")
        before = trajectory.tokens.tolist()
        tokens = dialogue.ask("Sure?").tokens.tolist()
        assert tokens[: len(before)] == before  # what was said stays, id by id
        text = sampling.sampler.chat.tokenizer.decode(tokens[len(before) :])
        assert text.startswith("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<reason>")


def test_an_interrupt_stops_an_answer_and_not_the_dialogue(published):
    """Beside a call that runs. The next answer is that of a new dialogue."""
    console, lines = Console(record=True, width=100), iter(["Hello", "What is 6 x 7?", ""])
    interrupt_once = mock.Mock(side_effect=chain([KeyboardInterrupt], repeat(None)))
    with open_policy(str(published), SHORT) as (_, sampling):
        dialogue = Dialogue(sampling.sampler, interrupt_once)
        sampling.sampler.engine = Scripted(sampling.sampler, [CALLING, CALLING, ANSWER])
        converse(dialogue, console, lines.__next__)
        ((question, answer),) = dialogue.exchanges
        sampling.sampler.engine = Scripted(sampling.sampler, [CALLING, ANSWER])
        expected = Dialogue(sampling.sampler).ask(question)
        assert question == "What is 6 x 7?" and answer == expected.tokens[expected.prompt_length :].tolist()
    assert console.export_text().count("(stopped)") == 1


def test_ten_questions_are_answered_where_the_prompt_has_room_for_three(published):
    console = Console(record=True, width=100)
    with open_policy(str(published), [*SHORT, "--rollout.max_prompt_tokens=200"]) as (_, sampling):
        sampling.sampler.engine = Scripted(sampling.sampler, [ANSWER] * 12)
        tokenizer, dialogue = sampling.sampler.chat.tokenizer, Dialogue(sampling.sampler)
        remembered = []
        for number in range(10):
            trajectory = dialogue.ask(f"question {number}?")
            assert trajectory.prompt_length <= 200 and trajectory.stop == "answer"
            text = tokenizer.decode(trajectory.tokens)
            remembered.append([int(part[0]) for part in text.split("question ")[1:]])
        assert remembered[1] == [0, 1] and 0 < remembered[-1][0] < 9, "the oldest are left out, the newest stay"
        assert all(numbers == list(range(numbers[0], i + 1)) for i, numbers in enumerate(remembered))
        lines = iter(["question 10?", "/new", "question 11?", "Still there? " * 800, ""])
        converse(dialogue, console, lines.__next__)
        assert dialogue.questions == 12 and not dialogue.exchanges, "those of before the last one had no room"
    text = " ".join(console.export_text().split())
    assert "answered without the 1 oldest questions" in text
    assert re.search(r"the question has \d+ tokens, rollout\.max_prompt_tokens = 200; raise it", text)


def test_a_run_is_talked_to_in_its_own_way(tmp_path, capsys):
    g.train_policy(g.read_config(*TINY, f"--run_dir={tmp_path / 'run'}", "--steps=1"))
    assert main([str(tmp_path / "run"), "--prompt", "1 + 1?", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["tokens"] <= 16
    assert main(["runs/nothing", "--prompt", "x"]) == 2
    assert "runs/nothing: no such directory; must be a run, one of its checkpoints" in capsys.readouterr().err


def test_the_model_of_an_adapter_is_named_by_its_path(tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    shape |= {"intermediate_size": 16, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512}
    base, adapter = tmp_path / "base", tmp_path
    pairs = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    base.mkdir()
    (base / "config.json").write_text(json.dumps(shape))
    (adapter / "adapter_config.json").write_text(json.dumps(pairs | {"base_model_name_or_path": str(base)}))
    for read, words in ((settings_for, []), (serving_settings, [f"--model={{path: {base}}}"])):
        assert read(str(adapter), words, "test").model.path == str(base)
        with pytest.raises(ConfigError, match=r"model = .* is a section; set one of its fields, such as model\.path"):
            read(str(adapter), [f"--model={base}"], "test")

"""What a run takes from its files: the date that its chat template renders, and the ids that its model has."""

import datetime
import json
import shutil
from dataclasses import replace

import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.published import write_config
from grpo_roc_jax.record.run_dir import describe_run
from grpo_roc_jax.run import session as run_session
from grpo_roc_jax.run.components import read_text_and_shape, resolve_text, run_date, with_date
from grpo_roc_jax.run.session import claimed, open_session
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem
from tests.helpers.knobs_host import tokenizer_folder


def words(template, *more):
    return (f"text.tokenizer={tokenizer_folder(template)}", "text.template=model", *more)


class Opened(Exception):
    """The run has its directory; holds its configuration."""


def test_a_resumed_run_renders_the_date_on_which_it_began(tmp_path, monkeypatch):
    def parts(config, **_):
        raise Opened(config)

    monkeypatch.setattr(run_session, "make_parts", parts)
    config = read_config(*words("llama3", f"run_dir={tmp_path / 'run'}", "resume=auto"))

    def session():
        with claimed(config) as claim, pytest.raises(Opened) as seen, open_session(claim, None):
            pass
        return seen.value.args[0]

    begun = session()
    describe_run(tmp_path / "run", begun)
    first = begun.text.template.date
    assert datetime.date.today() - datetime.date.fromisoformat(first) <= datetime.timedelta(days=1)
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace(first, "2020-01-02"))
    for _ in range(2):
        resumed = session()
        assert resumed == with_date(config, "2020-01-02")
    text = resolve_text(resumed)
    chat = make_chat(text, load_tokenizer(text))
    assert "Today Date: 02 Jan 2020" in chat.tokenizer.decode(chat.prompt_ids(Problem("p", "1+1?", "2", "s")))


def test_only_a_template_that_asks_for_the_date_gets_one(tmp_path):
    assert run_date(read_config(), tmp_path) == ""
    assert run_date(read_config(*words("chatml_tools")), tmp_path) == ""
    assert run_date(read_config(*words("chatml_tools", "text.template.file=nothing")), tmp_path) == ""
    assert run_date(read_config(*words("llama3", "text.template.date=2019-05-06")), tmp_path) == "2019-05-06"
    assert with_date(read_config(), "") == read_config()


def test_a_published_model_may_have_fewer_rows_than_its_tokenizer_has_added_tokens(tmp_path):
    folder = shutil.copytree(tokenizer_folder("chatml_tools"), tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text())
    last = spec["added_tokens"][-1]
    spec["added_tokens"].append(last | {"id": last["id"] + 1, "content": "<image_soft_token>"})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "config.json").write_text(json.dumps(write_config(ModelConfig(vocab_size=last["id"] + 1))))

    def read(text, **model):
        config = replace(read_config(), text=TextConfig(tokenizer=str(text)), model=ModelConfig(**model))
        return read_text_and_shape(config)[1:]

    tokenizer, model = read("model", path=str(folder))
    assert tokenizer.vocab_size == model.vocab_size == last["id"] + 1
    tokenizer, model = read(folder)
    assert tokenizer.vocab_size == model.vocab_size == last["id"] + 2
    with pytest.raises(
        ValueError, match=f"vocab_size = 9; must be 0 or at least {last['id'] + 2}, the tokenizer's ids"
    ):
        read(folder, vocab_size=9)

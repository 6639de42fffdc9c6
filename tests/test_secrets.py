"""Secrets that were typed reach no file, log or service of a run; other settings stay as they were typed."""

import io
import json
import logging
import os
import shlex
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax.numpy as jnp
import pytest

import grpo_roc_jax as g
from grpo_roc_jax import train
from grpo_roc_jax.record import checkpoint, events, loggers, metrics, run_dir
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.settings.secrets import HIDDEN, hidden, hides_something, without_secrets

SECRET = "h4nter2Sesame99"
TYPED = [
    f"http://user:{SECRET}@host/mcp",
    f"https://host/v1?a=b&X-Amz-Signature={SECRET}",
    f"python a.py --key={SECRET} --n 3",
    f"curl -H 'Authorization: Bearer {SECRET}' x",
    f"X-API-Key: {SECRET}",
    f"Cookie: session={SECRET}",
    f"curl -u bob:{SECRET} h",
    f"db_password={SECRET}",
    f"sk-{SECRET}abcdef",
    f"agent -k='{SECRET}'",
    f"mysql -u root -p{SECRET} db",
    f"docker login -p={SECRET}",
    f"sshpass -p {SECRET} ssh -p 2222 host",
    f"mongosh -u me -p {SECRET} host",
    f"redis-cli -h db -a {SECRET} ping",
    f"wandb login --relogin {SECRET}",
    f"aws configure set aws_secret_access_key {SECRET}",
    f"PGPASSWORD={SECRET} psql -h db",
    f"openssl enc -in a -passin pass:{SECRET}",
    f"sqlcmd -S db -U sa -P {SECRET}",
    f"{{'client_secret': '{SECRET}', 'n': 1}}",
    f"githubToken={SECRET}",
    f"https://api.telegram.org/bot12:{SECRET}/send",
    f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}",
]
PLAIN = [
    "--text.tokenizer.eos_token=<|im_end|>",
    "Basic arithmetic is a key skill: token by token, a secret of 12 passwords.",
    "python agent.py --question {prompt} --keys 3 --tokens=9 --monkey 4",
    "docker login -u me --password-stdin ghcr.io",
    "mysql -u root -P 3306 db",
    "--run_dir=runs/hf_dataset_name_long --name hf_transformers",
    "{'primary_key': 'column_12345', 'pad_token': '<pad12345>'}",
]


@pytest.mark.parametrize("text", TYPED)
def test_what_was_typed_is_hidden_and_the_rest_stays(text):
    redacted = hidden(text)
    assert SECRET not in redacted and HIDDEN in redacted and hidden(redacted) == redacted
    assert hidden(f"x {text} y").startswith("x ") and hides_something({"a": [redacted]})


def test_words_of_a_command_that_come_apart_and_other_settings_which_stay():
    words = ["a.py", "--api-key", SECRET, "--token", "--n", "3", "-H", f"Authorization: Bearer {SECRET}"]
    redacted = without_secrets(words)
    assert redacted[:6] == ["a.py", "--api-key", HIDDEN, "--token", "--n", "3"] and SECRET not in str(redacted)
    for command in ("docker login -u me -p", "wandb login --relogin", "sshpass -p", "redis-cli -a", "agent -k"):
        assert without_secrets([*command.split(), SECRET, "x"]) == [*command.split(), HIDDEN, "x"], command
    assert without_secrets(["mysql", "-u", "me", f"-p{SECRET}", "db"]) == ["mysql", "-u", "me", f"-p{HIDDEN}", "db"]
    assert without_secrets(["curl", "-u", f"me:{SECRET}", "h"]) == ["curl", "-u", f"me:{HIDDEN}", "h"]
    for plain in PLAIN:
        assert hidden(plain) == plain and not hides_something(plain), plain
        assert without_secrets(plain.split()) == plain.split(), plain
    assert without_secrets((f"env A_KEY={SECRET}", 3, None)) == (f"env A_KEY={HIDDEN}", 3, None)
    assert without_secrets({"a": {"b": [f"http://{SECRET}@h"]}}) == {"a": {"b": [f"http://{HIDDEN}@h"]}}


def test_no_module_logs_them(caplog):
    """Whatever a module of the package logs: message, arguments, exception; other packages log as they do."""
    address = f"http://user:{SECRET}@host/x"
    log = logging.getLogger("grpo_roc_jax.a_module.of_the_package")
    handler = logging.StreamHandler(shown := io.StringIO())
    log.addHandler(handler)
    log.warning("no answer from %s after %d s", address, 3)
    log.warning(f"no answer from {address}, 100%")
    try:
        raise OSError(f"refused by {address}")
    except OSError as error:
        log.exception("failed: %s", error)
    log.removeHandler(handler)
    logging.getLogger("other.grpo_roc_jax").warning("mine: %s", address)
    assert logging.makeLogRecord({"name": "other", "msg": "%d rows", "args": (3,)}).getMessage() == "3 rows"
    ours = shown.getvalue() + "".join(r.getMessage() for r in caplog.records[:2])
    assert SECRET not in ours and ours.count(HIDDEN) >= 4
    assert "after 3 s" in ours and "100%" in ours and "Traceback" in ours and "OSError: refused by" in ours
    assert SECRET in caplog.records[-1].getMessage()


def test_no_writer_of_a_run_writes_them_and_messages_hide_them(tmp_path):
    with pytest.raises(g.ConfigError) as caught:
        g.read_config("toy.yaml", f"--steps=http://u:{SECRET}@h", "--seed=x")
    assert SECRET not in str(caught.value) and HIDDEN in str(caught.value)
    shown, display = [], metrics.MetricsWriter()
    display.say = lambda text, event=False: shown.append(text)
    say = metrics.Writer([display]).say
    events.Events(tmp_path, say).note(1, "infrastructure", f"no answer from http://user:{SECRET}@host/x")
    for text in ((tmp_path / "events.jsonl").read_text(), *shown):
        assert HIDDEN in text and SECRET not in text and "no answer from http://" in text
    assert len(shown) == 1


def secret_words(folder):
    """A run with a secret in every setting that takes an address or a command."""
    program = f"{sys.executable} -c pass --key={SECRET} -k {SECRET} mysql -p{SECRET} docker login -p {SECRET}"
    agent = f"--environment={{kind: agent, command: {shlex.quote(program)}}}"
    words = ["--reward.functions=environment", "--watch={}", f"--watch.notice_url=http://u:{SECRET}@h"]
    return ["toy.yaml", f"--run_dir={folder}", agent, *words]


def test_files_hide_them_and_the_run_resumes_with_what_is_typed_again(tmp_path, monkeypatch):
    words = secret_words(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo-roc", "train", *words, "wandb", "login", SECRET, "--api-key", SECRET])
    config = load_config(train.Config, words, prog="x")
    assert SECRET in config.environment.command
    run_dir.describe_run(tmp_path, config)
    for name in ("config.yaml", "environment.json"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert SECRET not in text and HIDDEN in text
    assert json.loads(text)["command"][-1] == HIDDEN
    with checkpoint.Checkpointer(tmp_path / "checkpoints", checkpoint.CheckpointConfig()) as saved:
        saved.save(1, checkpoint.Bundle({"state": jnp.zeros(1), "reference": ()}))
    assert run_dir.decide(tmp_path, config).kind == "resume", "nothing has changed"
    again = load_config(train.Config, [str(tmp_path / "config.yaml")], prog="x")
    with pytest.raises(g.ConfigError, match=r"environment\.command.*a secret was hidden.*give the whole value again"):
        g.make_parts(again).__enter__()


def test_services_get_none(tmp_path, monkeypatch):
    given = []

    def init(**settings):
        given.append((settings, os.environ.get("WANDB_X_DISABLE_META")))
        return Mock()

    words = secret_words(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["grpo-roc", "train", *words])
    monkeypatch.delenv("WANDB_X_DISABLE_META", raising=False)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    config = load_config(train.Config, [*words, "--log.wandb=trackio"], prog="x")
    for writer in (loggers.TrackioWriter, loggers.WandbWriter):
        writer(tmp_path, config)
    assert SECRET not in str(given) and all(HIDDEN in str(settings["config"]) for settings, _ in given)
    assert given[1][1] == "true", "it would note the words of the command"

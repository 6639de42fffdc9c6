"""Secrets that were typed reach no file, log or service of a run; other settings stay as they were typed."""

import io
import json
import logging
import os
import shlex
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import yaml

import grpo_roc_jax as g
from grpo_roc_jax import train
from grpo_roc_jax.record import loggers
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.events import Events
from grpo_roc_jax.record.metrics import MetricsWriter, Writer
from grpo_roc_jax.record.run_dir import decide, describe_run
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS, dump_yaml, load_config
from grpo_roc_jax.settings.options import as_mapping
from grpo_roc_jax.settings.secrets import HIDDEN, hidden, hides_something, without_secrets
from tests.test_readme import TINY

SECRET = "h4nter2Sesame99"
TYPED = [
    f"http://user:{SECRET}@host/mcp",
    f"https://host/v1?token={SECRET}&x=1",
    f"https://host/v1?a=b&X-Amz-Signature={SECRET}",
    f"python a.py --key={SECRET} --n 3",
    f"curl --password {SECRET} x",
    f"curl -H 'Authorization: Bearer {SECRET}' x",
    f"Authorization: token {SECRET}",
    f"X-API-Key: {SECRET}",
    f"curl --header 'X-Auth-Token: {SECRET}' h",
    f"Cookie: session={SECRET}",
    f"curl -u bob:{SECRET} h",
    f"curl --user 'bob:{SECRET}' h",
    f"api_key: {SECRET}",
    f"db_password={SECRET}",
    f"my_token = {SECRET}",
    f"tml-{SECRET}abcdef",
    f"sk-{SECRET}abcdef",
    f"hf_{SECRET}abcdef",
    f"python agent.py -k {SECRET} --n 3",
    f"agent -k='{SECRET}'",
    f"mysql -u root -p{SECRET} db",
    f"mysqldump -h db -p'{SECRET}' x",
    f"mariadb-dump -uroot -p{SECRET}",
    f"docker login -p={SECRET}",
    f"podman login registry.example -u me -p {SECRET}",
    f"helm registry login -u me -p {SECRET} host",
    f"az acr login -n x -p {SECRET}",
    f"sshpass -p {SECRET} ssh -p 2222 host",
    f"7z x a.7z -p{SECRET}",
    f"unzip -P {SECRET} a.zip",
    f"mongosh -u me -p {SECRET} host",
    f"redis-cli -h db -a {SECRET} ping",
    f"ldapsearch -x -w {SECRET}",
    f"wandb login --relogin {SECRET}",
    f"wandb login --host https://w.example {SECRET}",
    f"vault login {SECRET}",
    f"ngrok config add-authtoken {SECRET}",
    f"huggingface-cli login --token {SECRET}",
    f"tailscale up --authkey={SECRET}",
    f"aws configure set aws_secret_access_key {SECRET}",
    f"npm config set //registry.example/:_authToken {SECRET}",
    f"PGPASSWORD={SECRET} psql -h db",
    f"SSHPASS={SECRET} sshpass -e ssh host",
    f"MYSQL_PWD={SECRET} mysql",
    f"openssl enc -in a -passin pass:{SECRET}",
    f"curl -b 'session={SECRET}' h",
    f"twine upload -u me -p {SECRET} dist/a",
    f"sqlcmd -S db -U sa -P {SECRET}",
    f"mosquitto_pub -u me -P {SECRET} -t x",
    f"BORG_PASSPHRASE={SECRET} borg create",
    f"{{'client_secret': '{SECRET}', 'n': 1}}",
    f"githubToken={SECRET}",
    f"AccountName=a;AccountKey={SECRET};x",
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"https://api.telegram.org/bot12:{SECRET}/send",
    f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}",
    f"npm_{SECRET}{SECRET}{SECRET}",
    f"pypi-{SECRET}{SECRET}{SECRET}",
    f"xoxe-{SECRET}",
    f"sk_live_{SECRET}",
]
PLAIN = [
    "gs://bucket/runs/a",
    "--text.tokenizer.eos_token=<|im_end|>",
    "enable_thinking=false",
    "stop_token=endofturn12",
    "math=pkg.envs:Math",
    "Basic arithmetic is a key skill: token by token, a secret of 12 passwords.",
    "python agent.py --question {prompt} --keys 3 --tokens=9 --monkey 4",
    "--rollout.max_turn_tokens=9 --environment.token_variable=MY_TOKEN",
    "python serve.py -p 8080 -k 5 --k 3",
    "ssh -p 2222 host -k",
    "docker login ghcr.io && docker run -p 8080:80 image",
    "docker login -u me --password-stdin ghcr.io",
    "mkdir -p runs/2024 && pytest -k test_train_2_of_3",
    "pytest -k 'not slow' -p no:cacheprovider",
    "curl -k https://host:8443/a1b2",
    "mysql -u root -P 3306 db",
    "wandb login && python train.py",
    "python train.py --wandb login -k 128",
    "sort -k 2,3 -n file | head -k5",
    "--run_dir=runs/hf_dataset_name_long --name hf_transformers",
    "sk-learn-pipelines and task-sk-something-long",
    "docker run -u 1000:1000 image",
    "pwd=/home/user1234 OLDPWD=x",
    "{'primary_key': 'column_12345', 'pad_token': '<pad12345>'}",
    "maxTokens=12345678 sortKey=column_12345 isTokenized=true",
    "openssl version -a",
]


@pytest.mark.parametrize("text", TYPED)
def test_what_was_typed_is_hidden_and_the_rest_stays(text):
    redacted = hidden(text)
    assert SECRET not in redacted and HIDDEN in redacted and hidden(redacted) == redacted
    assert hidden(f"x {text} y").startswith("x ") and hides_something({"a": [redacted]})


@pytest.mark.parametrize("text", PLAIN)
def test_other_settings_stay_as_they_are(text):
    assert hidden(text) == text and not hides_something(text)


def test_words_of_a_command_that_come_apart():
    words = ["a.py", "--api-key", SECRET, "--token", "--n", "3", "-H", f"Authorization: Bearer {SECRET}"]
    redacted = without_secrets(words)
    assert redacted[:6] == ["a.py", "--api-key", HIDDEN, "--token", "--n", "3"] and SECRET not in str(redacted)
    for command in ("docker login -u me -p", "wandb login --relogin", "sshpass -p", "redis-cli -a", "agent -k"):
        assert without_secrets([*command.split(), SECRET, "x"]) == [*command.split(), HIDDEN, "x"], command
    assert without_secrets(["mysql", "-u", "me", f"-p{SECRET}", "db"]) == ["mysql", "-u", "me", f"-p{HIDDEN}", "db"]
    assert without_secrets(["curl", "-u", f"me:{SECRET}", "h"]) == ["curl", "-u", f"me:{HIDDEN}", "h"]
    for plain in PLAIN:
        assert without_secrets(plain.split()) == plain.split()
    assert without_secrets((f"env A_KEY={SECRET}", 3, None)) == (f"env A_KEY={HIDDEN}", 3, None)
    assert without_secrets({"a": {"b": [f"http://{SECRET}@h"]}}) == {"a": {"b": [f"http://{HIDDEN}@h"]}}


def test_no_module_logs_them(caplog):
    """Whatever a module of the package logs: message, arguments, exception; other packages log as they do."""
    address = f"http://user:{SECRET}@host/x"
    log = logging.getLogger("grpo_roc_jax.a_module.of_the_package")
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    log.addHandler(handler)
    try:
        log.warning("no answer from %s after %d s", address, 3)
        log.warning(f"no answer from {address}, 100%")
        try:
            raise OSError(f"refused by {address}")
        except OSError as error:
            log.exception("failed: %s", error)
    finally:
        log.removeHandler(handler)
    logging.getLogger("other.grpo_roc_jax").warning("mine: %s", address)
    assert logging.makeLogRecord({"name": "other", "msg": "%d rows", "args": (3,)}).getMessage() == "3 rows"
    ours = shown.getvalue() + "".join(r.getMessage() for r in caplog.records[:2])
    assert SECRET not in ours and ours.count(HIDDEN) >= 4
    assert "after 3 s" in ours and "100%" in ours and "Traceback" in ours and "OSError: refused by" in ours
    assert SECRET in caplog.records[-1].getMessage()


def test_no_writer_of_a_run_writes_them(tmp_path):
    address = f"http://user:{SECRET}@host/x"
    shown, display = [], MetricsWriter()
    display.say = lambda text, event=False: shown.append(text)
    Events(tmp_path, Writer([display]).say).note(1, "infrastructure", f"no answer from {address}")
    written = (tmp_path / "events.jsonl").read_text()
    assert HIDDEN in written and SECRET not in written and "no answer from http://" in written
    assert len(shown) == 1 and SECRET not in shown[0] and HIDDEN in shown[0]


def test_no_recipe_is_changed_by_it():
    for path in sorted([*CONFIG_DIR.rglob("*.yaml"), *CONTRIB_METHODS.glob("*.yaml")]):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert without_secrets(content) == content, path
    config = g.read_config("toy.yaml")
    assert yaml.safe_load(dump_yaml(config)) == yaml.safe_load(yaml.safe_dump(as_mapping(config)))


def secret_words(folder):
    """A run with a secret in every setting that takes an address or a command."""
    program = f"{sys.executable} -c pass --key={SECRET} -k {SECRET} mysql -p{SECRET} docker login -p {SECRET}"
    return [
        "toy.yaml", *TINY, f"--run_dir={folder}", f"--environment={{kind: agent, command: {shlex.quote(program)}}}",
        "--reward.functions=environment", "--watch={}", f"--watch.notice_url=http://u:{SECRET}@127.0.0.1:9/x?token={SECRET}",
        "--sft.steps=0", "--environment.on_failure=drop",
    ]  # fmt: skip


@pytest.mark.slow
def test_no_file_of_a_run_has_them(tmp_path, monkeypatch, capfd):
    """The run ends after its first step, since its program asks nothing; whatever it wrote or said is searched."""
    words = secret_words(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["grpo-roc", "train", *words])
    assert train.main(words) == 5
    captured = capfd.readouterr()
    assert SECRET not in captured.out + captured.err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.json", "events.jsonl"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert HIDDEN in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")


def test_files_hide_them_and_the_run_resumes_with_what_is_typed_again(tmp_path, monkeypatch):
    words = secret_words(tmp_path / "run")
    typed = ["wandb", "login", SECRET, "-k", SECRET, "--api-key", SECRET]
    monkeypatch.setattr(sys, "argv", ["grpo-roc", "train", *words, *typed])
    config = load_config(train.Config, words, prog="x")
    assert SECRET in config.environment.command
    (tmp_path / "run").mkdir()
    describe_run(tmp_path / "run", config)
    for name in ("config.yaml", "environment.json"):
        text = (tmp_path / "run" / name).read_text(encoding="utf-8")
        assert SECRET not in text and HIDDEN in text
    assert json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))["command"][-1] == HIDDEN
    with Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(1, Bundle({"state": jnp.zeros(1), "reference": ()}))
    assert decide(tmp_path / "run", config).kind == "resume", "nothing has changed"
    again = load_config(train.Config, [str(tmp_path / "run" / "config.yaml")], prog="x")
    with pytest.raises(g.ConfigError, match=r"environment\.command.*a secret was hidden.*give the whole value again"):
        make_parts(again).__enter__()


def test_services_get_none(tmp_path, monkeypatch):
    given = {}

    def init(**settings):
        given.update(settings, meta=os.environ.get("WANDB_X_DISABLE_META"))
        return SimpleNamespace(define_metric=lambda *words, **more: None, log=print, finish=print)

    words = secret_words(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["grpo-roc", "train", *words])
    monkeypatch.delenv("WANDB_X_DISABLE_META", raising=False)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    config = load_config(train.Config, [*words, "--log.wandb=trackio"], prog="x")
    loggers.TrackioWriter(tmp_path, config)
    assert SECRET not in str(given) and HIDDEN in str(given["config"])
    given.clear()
    loggers.WandbWriter(tmp_path, config)
    assert SECRET not in str(given) and given["meta"] == "true", "it would note the words of the command"


def test_messages_hide_them():
    with pytest.raises(g.ConfigError) as caught:
        g.read_config("toy.yaml", f"--steps=http://u:{SECRET}@h", "--seed=x")
    assert SECRET not in str(caught.value) and HIDDEN in str(caught.value)

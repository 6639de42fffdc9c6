"""README, docs and the one-page example: their code runs on a tiny configuration, and their commands parse."""

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import tyro

import grpo_roc_jax as g
from grpo_roc_jax import __main__ as commands
from grpo_roc_jax.commands import chat, cut_traces, difficulty, evaluate, export, plan, plot, serve, serve_tinker, view
from grpo_roc_jax.data import gsm8k_traces
from grpo_roc_jax.settings.callables import import_file
from grpo_roc_jax.settings.cli import ConfigError
from tests.test_train import shared_programs as shared_programs  # a fixture

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").rglob("*.yaml"))]
PAGES += sorted((ROOT / "examples").rglob("*.py"))
TINY = """
--steps=2 --sft.steps=1 --sft.traces=2 --group.problems=2 --group.size=2 --resample.min_positive=0
--resample.min_negative=0 --resample.drop=none --model.d_model=16 --model.layers=1 --model.heads=2 --model.kv_heads=1
--model.head_dim=8 --model.d_ff=16 --rollout.slots=8 --rollout.max_prompt_tokens=24 --rollout.max_response_tokens=16
 --rollout.append_lengths=16 --batch.row_length=120 --batch.rows=2 --tools.workers=1
--data.eval_problems=0 --sharding.data=-1 --tools.preload=[]
""".split()  # noqa: SIM905 (a command line reads better as one)


@pytest.fixture
def tiny(monkeypatch):
    """`read_config` with the settings of `TINY` over those that the code asks for."""
    read = g.read_config
    monkeypatch.setattr(g, "read_config", lambda *words: read(*words, *TINY))


def python_block(containing: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if containing in block]
    return code


@pytest.mark.usefixtures("one_device")
def test_the_loop_of_the_readme_takes_two_steps(tiny, capsys):
    names = {}
    exec(python_block("g.make_parts"), names)
    assert names["run"].step == int(names["run"].train.step) == 2
    assert len(names["rows"]) == 4 and names["metrics"]["update/fill"] > 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2"]


@pytest.mark.usefixtures("one_device")
def test_the_one_page_example_takes_steps(capsys):
    import_file(str(ROOT / "examples" / "grpo_roc_in_one_page.py")).main(["toy.yaml", *TINY])
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1", "2"] and all("kept 4 " in line for line in steps)


def test_the_reward_function_of_the_readme_is_called(tiny, monkeypatch):
    names, called = {}, {}
    monkeypatch.setattr(g, "train_policy", lambda config, **given: called.update(config=config, **given))
    exec(python_block("brevity"), names)
    assert [part.weight for part in called["config"].reward.functions] == [1.0, 0.1]
    assert called["config"].reward.names[1] in called["functions"]


def by_tyro(section: type, words: list[str], *, overrides: bool = False) -> None:
    parsed = tyro.cli(section, args=words, return_unknown_args=overrides)
    if overrides:
        g.read_config(*parsed[1])


def parse_plan(words: list[str]) -> None:
    _, rest = plan.arguments().parse_known_args(words)
    g.read_config(*rest)


def parse_train(words: list[str]) -> None:
    words = [word for word in words if word not in ("--dry-run", "full", "--preflight")]
    answer = pytest.raises(ConfigError, match=r"did you mean 'optim\.lr'")  # which `docs/coming_from.md` shows
    with answer if "--optim.learning_rate" in words else contextlib.nullcontext():
        g.read_config(*words)


PARSERS = dict.fromkeys(("new", "doctor", "probe", "run-tools", "serve-tools", "check-reward"), list)  # are not parsed
PARSERS |= dict.fromkeys(("train", "sft"), parse_train) | {"plan": parse_plan}
PARSERS |= dict.fromkeys(("check-data", "replay"), lambda words: g.read_config(*words[1:]))
ALONE = {"export": export.ExportConfig, "view": view.ViewConfig, "plot": plot.PlotConfig}
ALONE |= {"cut-traces": cut_traces.CutTraces, "data.gsm8k_traces": gsm8k_traces.TracesConfig}
LAYERED = {"evaluate": evaluate.EvaluateConfig, "difficulty": difficulty.DifficultyConfig, "chat": chat.ChatConfig}
LAYERED |= {"serve": serve.ServeConfig, "serve --tinker": serve_tinker.ServeTinkerConfig}
PARSERS |= {name: partial(by_tyro, config) for name, config in ALONE.items()}
PARSERS |= {name: partial(by_tyro, config, overrides=True) for name, config in LAYERED.items()}
"""Command, or module with a command line of its own -> what reads the words after it; raises or exits where they are
wrong."""
PLACEHOLDERS = {"NAME": "grpo", "RUN": "runs/a", "TARGET": "exported"}


def command_lines(path: Path) -> list[str]:
    """Commands of a page, without what a shell does around them: variables, loops, pipes, comments.

    Sessions are left out: `test_pages_run.py` runs them.
    """
    text = re.sub(r"^```console\n.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\n# *", " \n" if path.suffix == ".md" else "\n", text.replace("\\\n", " "))
    lines = re.findall(r"(?:python -m grpo_roc_jax[ .]|(?<![\w/])grpo-roc )[^\n`]*", text)
    return [re.split(r" #| [&|]|;|\)(?=\W*$)|, ", line)[0].strip() for line in lines if "COMMAND" not in line]


LINES = [(path, line) for path in PAGES for line in command_lines(path)]


@pytest.mark.parametrize(("path", "line"), LINES, ids=[f"{path.name}: {line[:60]}" for path, line in LINES])
def test_a_command_of_the_pages_parses(path, line, tmp_path, monkeypatch):
    for name in re.findall(r"(?<![\w/])\w+\.(?:jsonl|parquet|yaml)", line):  # files of the user's
        if not any((ROOT / "configs").rglob(name)):
            (tmp_path / name).write_text("steps: 1\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    line = re.sub("|".join(PLACEHOLDERS), lambda match: PLACEHOLDERS[match[0]], re.sub(r"\$\w+", "0", line))
    words = shlex.split(line)
    if words == ["grpo-roc"]:
        return
    if words[0] == "grpo-roc" or words[:3] == ["python", "-m", "grpo_roc_jax"]:
        command, *rest = words[1 if words[0] == "grpo-roc" else 3 :]
        module = commands.module_of(command)
    else:
        module = command = words[2].removeprefix("grpo_roc_jax.")
        rest = words[3:]
    assert importlib.util.find_spec(f"grpo_roc_jax.{module}")
    if "--tinker" in rest:
        command, rest = "serve --tinker", [word for word in rest if word != "--tinker"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            PARSERS[command](rest)
    except SystemExit as ended:
        assert ended.code == 0 and "--help" in rest

"""What cannot work is said before it runs, with the setting and its value; recipes have nothing to be said of them."""

import json
import re

import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.planner.prospects import hindrances, settings_against_learning
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS
from grpo_roc_jax.text.exported import exported_template
from grpo_roc_jax.train import main

TOY = CONFIG_DIR.parent / "grpo_roc_jax" / "text" / "toy.model"

RECIPES = [
    path.relative_to(CONFIG_DIR).as_posix()
    for path in sorted(CONFIG_DIR.rglob("*.yaml"))
    if path.parent.name not in ("data", "environments")
]
RECIPES += [f"methods/{path.name}" for path in sorted(CONTRIB_METHODS.glob("*.yaml"))]


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_speaks_against_a_recipe(name):
    for stage in read_config(name).staged():
        assert settings_against_learning(stage) == []


ALONE = "--group.size 1 --advantage.baseline none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--reward.functions.answer.weight 0", "every reward function has weight 0 (answer)"),
        (f"--resample none {ALONE}", "one rollout a problem with resample.drop = equal"),
        (ALONE, "group.size = 1 with advantage.scale = std: a group of one has no"),
        ("--advantage pass_at_k --advantage.k 16", "group.size = 16 with resample roc and advantage {kind: pass_at_k"),
        (
            f"--resample max_variance {ALONE} --advantage.scale none",
            "with resample max_variance and advantage {kind: g",
        ),
        ("--sampling.top_k 1", "sampling.top_k = 1"),
        ("--sampling.top_p 0.001", "sampling.top_p = 0.001: all rollouts of a problem are the same"),
        ("--sampling.min_p 1", "sampling.min_p = 1: all rollouts of a problem are the same"),
        ("--sampling.temperature 0.001", "sampling.temperature = 0.001: all rollouts of a problem are the same"),
        ("--advantage none", "advantage none without advantage.adjust: every advantage is 0"),
        ("--tools.enabled jupyter_code", "call python_code_with_standard_io, but the run has jupyter_code"),
        ("--tools.enabled=[]", "but the run has no tool: such calls always fail"),
        ("--reward.answer_tag result", "none of 32 demonstrations ends in an answer that can be read with"),
        ("--sft.steps 0", "sft.steps = 0: a policy with random weights"),
        ("--rollout.max_prompt_tokens 15", "of which 32 of 32 exceed rollout.max_prompt_tokens = 15; raise it to"),
        ("--rollout.max_response_tokens 60", "exceed rollout.max_response_tokens = 60"),
        ("--rollout.max_turns 2", "turns after the prompt, of which"),
        ("--rollout.max_turn_tokens 8", "exceed rollout.max_turn_tokens = 8"),
        ("--rollout.max_turns 1 --text.tools_section true", "rollout.max_turns = 1 with text.tools_section: the"),
    ],
)
def test_a_dry_run_ends_with_what_cannot_work(words, message, capsys):
    given = ["--data.sources=world:gcd:1", "--data.eval_problems=0", *words.split()]
    assert main(["toy.yaml", "--dry-run", *given]) == 0
    out = capsys.readouterr().out
    against = against_in(out)
    assert any(message in line for line in against) and out.splitlines()[-1] in against, out
    settings = read_config("toy.yaml", *words.split())
    of_data = any(words in message for words in ("exceed", "turns after", "the run has", "none of 32"))
    assert (message in " ".join(settings_against_learning(settings))) != of_data


def against_in(out):
    return [line for line in out.splitlines() if line.startswith("problem: ")]


@pytest.mark.parametrize(
    ("word", "begins", "ends"),
    [
        ("--rollout.max_response_tokens=30", "demonstrations of 7 to 136 tokens after the prompt", "raise it to 136"),
        ("--rollout.max_prompt_tokens=15", "prompts of 17 to 36 ", "of 192 exceed rollout.max_prompt_tokens = 15; "),
        ("--tools.enabled=[]", "demonstrations call python_code_with_standard_io, but the run has no", "tools.enabled"),
    ],
)
def test_sources_with_the_same_fault_share_a_line(word, begins, ends, capsys):
    """So that the lines that matter stay few, however many sources a run has."""
    assert main(["world.yaml", "--dry-run", "--data.eval_problems=0", word]) == 0
    (line,) = against_in(capsys.readouterr().out)
    assert line.startswith("problem: world:") and f" more: {begins}" in line and ends in line, line


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def messages(words: int, question: str = "q") -> dict:
    talk = [("user", question), ("assistant", "word " * words)]
    return {"messages": [{"role": role, "content": content} for role, content in talk]}


def test_rows_of_files_are_counted_exactly(tmp_path, capsys):
    """Lengths are those of the row after its prompt, the turns of others included; one that just fits is none."""
    rows = [*(messages(2, f"q{i}") for i in range(3)), messages(300), messages(1, "z")]
    words = ["toy.yaml", "--dry-run", f"--data.trace_sources={write(tmp_path / 'talks.jsonl', rows)}"]
    words += ["--batch.row_length=2000", "--rollout.max_turns=2"]
    assert main(words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "demonstrations of" in line]
    longest = int(line.split(" to ")[1].split()[0])
    assert "1 of 5 exceed rollout.max_response_tokens = 120" in line and f"raise it to {longest}" in line
    for most, expected in ((longest, False), (longest - 1, True)):
        assert main([*words, f"--rollout.max_response_tokens={most}"]) == 0
        assert ("demonstrations of" in capsys.readouterr().out) == expected
    rows = [{"prompt": "please say " + "why " * n, "answer": "6"} for n in (20, 30)]
    file = write(tmp_path / "problems.jsonl", rows)
    words = ["toy.yaml", "--dry-run", "--sft.steps=0", f"--data.sources={file}", "--data.eval_problems=0"]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "rollout.max_prompt_tokens = 24" in printed
    enough = int(printed.split("raise it to ")[1].split()[0])
    assert main([*words, f"--rollout.max_prompt_tokens={enough}", "--batch.row_length=400"]) == 0
    assert "over-long" not in capsys.readouterr().out
    assert main([*words, f"--rollout.max_prompt_tokens={enough - 1}", "--batch.row_length=400"]) == 0
    first = against_in(capsys.readouterr().out)[0]
    assert first.startswith(f"problem: {file}: prompts of") and "1 over-long prompts dropped" in first
    rows = [{"prompt": f"{i} + 1", "answer": "It follows from the lemma that this holds. " * 6} for i in range(3)]
    file = write(tmp_path / "proofs.jsonl", rows)
    words = ["toy.yaml", "--dry-run", f"--data.sources={file}", "--data.trace_sources=world:gcd:1"]
    for functions, against in (("answer", True), ("format", False)):
        assert main([*words, "--data.eval_problems=0", "--reward.functions", functions]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert (f"problem: {file}: 3 rows have a reference" in last) == against, last


@pytest.mark.parametrize(
    ("functions", "pay", "against"),
    [
        ("own", lambda problem, rows: [0.5] * len(rows), True),
        ("own", lambda problem, rows: [[0.5] * len(row.turns) for row in rows], False),  # by turn: of other lengths
        ("own", lambda problem, rows: [len(row.turns) for row in rows], False),
        ("own", lambda problem, rows: 1 / 0, False),  # another message says so
        ("own answer", lambda problem, rows: [0.5] * len(rows), False),  # the answer is paid, too
        # Without weight the answer does not make rewards differ, whatever it is.
        ("own answer --reward.functions.answer.weight 0", lambda problem, rows: [0.5] * len(rows), True),
    ],
)
def test_functions_that_pay_alike_are_named(functions, pay, against, parts_of_a_run):
    config = read_config("toy.yaml", "--reward.functions", *functions.split())
    with given({"own": pay}):
        lines = [line for line in hindrances(config, *parts_of_a_run(config)) if "own" in line]
    assert bool(lines) == against
    assert not lines or ("finished and a cut trajectory get the same" in lines[0] and "(own 0.5)" in lines[0])


def test_a_model_exported_from_a_run_needs_no_request_and_conversations_may_have_their_own_tools(
    tmp_path, parts_of_a_run
):
    (tmp_path / "tokenizer.model").write_bytes(TOY.read_bytes())
    config = read_config("toy.yaml", "--sft.steps=0", f"--text.tokenizer={tmp_path}", "--data.sources=world:gcd:1")
    chat = parts_of_a_run(config)[0]
    for template, against in (("{{ messages }}", True), (exported_template(chat), False)):
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        assert any("neither text.system" in line for line in hindrances(config, chat)) == against
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    schema = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    asked, calling = {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    cold, last = {"role": "tool", "content": "cold"}, {"role": "assistant", "content": r"<answer>\boxed{cold}</answer>"}
    talk = [asked, calling, cold, last]
    for row, against in (
        ({"messages": talk, "tools": [schema]}, False),
        ({"messages": talk}, True),
        # counted where it is read, if no row can have it
        ({"messages": [asked, calling | {"tool_calls": [call] * 2}, cold, cold, last]}, True),
    ):
        config = read_config("toy.yaml", f"--data.trace_sources={write(tmp_path / 'talk.jsonl', [row])}")
        lines = hindrances(config, parts_of_a_run(config)[0])
        assert any("demonstrations call weather, but the run has" in line for line in lines) == against, lines


@pytest.mark.parametrize(
    ("words", "prompt", "expected"),
    [
        ("", "6 * 7?", ["no prompt names a tool (jupyter_code, ", "neither text.system nor text.instruction asks"]),
        ("--text.instruction default", "Call jupyter_code: 6 * 7?", []),
        ("--reward.extraction lenient --tools.enabled=[]", "6 * 7?", []),
        ("--text.instruction default --text.tools_section true", "6 * 7?", []),
        ("--tools.enabled=[]", r"6 * 7? Write <answer>\boxed{n}</answer>.", []),
        ("--tools.enabled=[]", r"6 * 7? End with \boxed{n}.", ["nor text.instruction asks for <answer>"]),
        (
            "--tools.enabled=[] --text.instruction default --reward.answer_tag result",
            "6 * 7?",
            [r"asks for <result>\boxed{...}</result>"],
        ),
        ("--sft.steps 4 --data.trace_sources world:gcd:1", "6 * 7?", []),
    ],
)
def test_what_nothing_asks_of_a_published_model(words, prompt, expected, tmp_path, parts_of_a_run):
    """The toy's tokenizer by its path, as a published one is given."""
    file = write(tmp_path / "own.jsonl", [{"prompt": prompt, "answer": "42"}])
    sizes = "--rollout.max_prompt_tokens 900 --rollout.max_response_tokens 200 --batch.row_length 1100"
    given = f"--sft.steps 0 --text.tokenizer {TOY} --data.sources {file} {sizes} {words}"
    config = read_config("toy.yaml", *given.split())
    lines = hindrances(config, parts_of_a_run(config)[0])
    lines = [line for line in lines if not line.startswith("model.path is empty")]
    assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True)), lines


@pytest.fixture
def parts_of_a_run():
    """(chat format, scorer) of a configuration."""
    scorers = []

    def make(config):
        scorers.append(make_scorer(config.reward))
        return check_components(config, make_registry(config))[1], scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--environment verifers", "is not a class; .* or choose one of the kinds agent, .*, verifiers"),
        ("--data.sources openai/gsm8k", "openai/gsm8k: no such file; a data set of the hub is hub:OWNER/NAME@REVISION"),
        ("--data.sources docs", "docs is a directory; name a .jsonl, .json or .parquet file"),
        ("--tools.enabled false", r"built in are \[.*\], and \[\] leaves all of them out"),
    ],
)
def test_names_alone_are_refused_with_what_to_write(words, message, capsys, monkeypatch):
    monkeypatch.chdir(CONFIG_DIR.parent)
    assert main(["toy.yaml", "--dry-run", *words.split()]) == 2
    assert re.search(message, capsys.readouterr().err)

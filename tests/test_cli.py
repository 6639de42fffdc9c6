"""Files and command line are one grammar; every refusal names the setting, where it was written and what to change.
One table of other projects' settings: its right side exists, its messages say what it says, and the page has it."""

import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Le

from grpo_roc_jax import __main__ as commands
from grpo_roc_jax.config import Config, WatchConfig, read_config
from grpo_roc_jax.hints.other_names import METHOD, OTHER_NAMES, other_name, recipe_of
from grpo_roc_jax.method.roc import NoSelection, ResampleOnCorrect
from grpo_roc_jax.method.shaping import Overlong, ToolErrors
from grpo_roc_jax.method.surrogate import CappedClip
from grpo_roc_jax.settings import cli
from grpo_roc_jax.settings.cli import find_config
from grpo_roc_jax.settings.helping import WIDTH
from grpo_roc_jax.settings.layers import known_keys
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, Positive, fields_of, settings


@settings
class Section:
    """A section."""

    clip_high: NotNegative = 0.28
    names: tuple[str, ...] = ("a",)
    text: str = ""
    select: Literal["sort", "uniform"] = "sort"
    ddof: Literal[0, 1] = 1
    enabled: bool = False
    count: AtLeast1 = 1
    rate: Positive = 1.0
    most: Annotated[int, Le(9)] = 1

    def __post_init__(self) -> None:
        if self.count > 10 * self.rate:
            raise ValueError(f"loss.count = {self.count} is above 10 * loss.rate = {10 * self.rate}; lower it")


@settings
class Sample:
    """A configuration."""

    seed: int = 0
    loss: Section = field(default_factory=Section)


def load(*argv: str, of: type = Sample):
    return cli.load_config(of, argv, prog="test")


def run(*argv: str) -> Config:
    return load(*argv, of=Config)


def refusal(*argv: str, of: type = Sample) -> str:
    with pytest.raises(cli.ConfigError) as error:
        load(*argv, of=of)
    return str(error.value)


def write(folder: Path, **files: str) -> str:
    """Writes YAML files; the path of the last one."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return str(folder / f"{name}.yaml")


def test_files_and_overrides_in_layers_and_a_base_first(tmp_path):
    file = write(tmp_path, one="seed: 3\nloss: {clip_high: 0.5, names: [x, y], enabled: true, text: '--a b'}\n")
    config = load(file, "--loss.clip_high", "0.25", "--loss.clip_high", "0.75")
    assert config == Sample(3, Section(0.75, ("x", "y"), "--a b", "sort", enabled=True))
    below = {"base": "seed: 1\nloss: {clip_high: 0.5, names: []}\n", "middle": "base: base.yaml\nseed: 2\n"}
    assert load(write(tmp_path, **below, over="base: middle.yaml\nloss: {clip_high: 0.6}\n")) == Sample(
        2, Section(0.6, ())
    )
    assert load(file, write(tmp_path, later="seed: 7\n")).seed == 7, "a file given later lies over the first"


def test_dump_reads_back_equal(tmp_path):
    config = Sample(5, Section(1e-7, ("p", "q: r", "on", "1"), "two\nlines, 'quoted' #", "uniform", 0, True, 3, 2.5))
    assert load(write(tmp_path, resolved=cli.dump_yaml(config))) == config
    words = "--shaping overlong tool_errors --advantage.baseline leave_one_out --surrogate.kl k3 --resample none "
    words += "--surrogate.old_logprobs scored --weights.factors truncated_is --plan.condition reward_tokens"
    config = run(*words.split(), "--group.size", "9", "--text.system", "so:\n{}")
    assert run(write(tmp_path, resolved=cli.dump_yaml(config))) == config


def test_switches_and_lists_as_a_person_would_type_them():
    for words in ("--loss.enabled=True", "--loss.enabled true", "--loss.enabled", "loss.enabled=true"):
        assert load(*words.split(), "--seed", "3") == Sample(3, Section(enabled=True))
        assert not load(*words.split(), "--loss.enabled", "false").loss.enabled
    for words in ("--loss.names x,y", "--loss.names x y", "--loss.names [x, y]", "loss.names=[x,y]"):
        assert load(*words.split(), "--seed", "3") == Sample(3, Section(names=("x", "y")))
    assert load("--loss.names", "").loss.names == load("--loss.names", "[]").loss.names == ()


def test_words_without_dashes_and_values_with_an_equals_sign(tmp_path, monkeypatch):
    assert load(write(tmp_path, one="seed: 2\n"), "loss.text=a=b") == Sample(2, Section(text="a=b"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    write(tmp_path / "lr=1", one="seed: 2\n")
    assert load("lr=1/one.yaml").seed == 2
    assert find_config("configs/toy.yaml") == find_config("toy.yaml") == find_config("configs/toy")
    assert load("--loss.names", "n=a", "m=b", "--seed", "3").loss.names == ("n=a", "m=b")
    assert run("--data.eval_sources", "n=one.jsonl", "steps=3").data.eval_sources == ("n=one.jsonl",)
    assert "unknown key 'nosuch'" in refusal("nosuch=3")
    assert load("--loss", "{clip_high: 0.5, text: a}", "--loss.text", "b").loss == Section(0.5, text="b")


def test_values_that_look_like_something_else(tmp_path):
    for text, expected in {
        "text: 2024-05-01": Section(text="2024-05-01"),
        "names: [2024-05-01, =, 1:30]": Section(names=("2024-05-01", "=", "1:30")),
        "ddof: '0'": Section(ddof=0),
    }.items():
        assert load(write(tmp_path, it=f"loss: {{{text}}}\n")).loss == load(f"--loss={{{text}}}").loss == expected
    words = ["--loss.text", "[not a list", "--loss.clip_high", "1e-3", "--loss.ddof", "0", "--seed", "-1"]
    assert load(*words) == Sample(-1, Section(1e-3, text="[not a list", ddof=0))
    config = read_config(Path("toy.yaml"), "--steps", 5, "--optim.lr", 1e-3)
    assert (config.steps, config.optim.lr) == (5, 1e-3)
    with pytest.raises(TypeError, match="read_config got"):
        read_config(["toy.yaml"])


def test_the_later_counts_and_another_kind_starts_from_its_own_defaults(tmp_path):
    assert run("--watch.steps=4", "--watch=null", "--watch.history=9").watch == WatchConfig(history=9)
    assert run("--watch.steps=4", "--watch={history: 9}").watch == WatchConfig(steps=4, history=9)
    file = write(tmp_path, one="resample: {kind: roc, drop: none, oversample: 3}\nsurrogate: {clip_low: 0.1}\n")
    assert run(file, "--resample", "none").resample == NoSelection()
    assert run(file, "--resample", "roc").resample == ResampleOnCorrect(drop="none", oversample=3), "of the same kind"
    over = write(tmp_path, two="base: one.yaml\nsurrogate: {kind: capped_clip, dual: 3}\n")
    assert run(over).surrogate == CappedClip(dual=3.0)


def test_lists_of_kinds(tmp_path):
    for words, expected in (
        ("--shaping.overlong.limit 5000 --shaping overlong,tool_errors", (Overlong(limit=5000), ToolErrors())),
        ("--shaping.kind overlong --shaping.limit 5000", (Overlong(limit=5000),)),
        ("--shaping []", ()),
    ):
        assert run(*words.split()).shaping == expected
    file = write(tmp_path, one="shaping: [tool_errors, {kind: overlong, buffer: 64}]\n")
    over = write(tmp_path, two="base: one.yaml\nshaping: {overlong: {limit: 5000}}\n")
    for words in ((file, "--shaping.overlong.limit=5000"), (over,)):
        assert run(*words).shaping == (ToolErrors(), Overlong(limit=5000, buffer=64))
    assert run(file, "--shaping", "overlong").shaping == (Overlong(),), "a list replaces a list"
    config = run("text.tokenizer=some/folder", "--reward.functions", "mine:brevity", "{kind: format, weight: 0.25}")
    assert (config.text.tokenizer.kind, config.text.tokenizer.path) == ("file", "some/folder")
    assert [(part.name, part.weight) for part in config.reward.functions] == [("mine:brevity", 1.0), ("format", 0.25)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss.count 0", "loss.count = 0 (command line): must be at least 1"),
        ("--loss.most 10", "loss.most = 10 (command line): must be at most 9"),
        ("--loss.rate fast", "loss.rate = fast (command line): must be a number"),
        ("--loss.select so", "loss.select = so (command line): must be 'sort' or 'uniform'; did you mean 'sort'?"),
        ("--loss.count 11", "loss.count = 11 is above 10 * loss.rate = 10.0; lower it (command line)"),
        ("--loss.rate --seed 3", "--loss.rate has no value; write --loss.rate VALUE"),
        ("--loss 3", "loss = 3 (command line): is a section; set one of its fields, such as loss.clip_high"),
        ("--clip_high 0.2", "unknown key 'clip_high' (command line); did you mean 'loss.clip_high'?"),
    ],
)
def test_what_a_refusal_says(words, message):
    assert refusal(*words.split()) == message


def test_refusals_of_whole_words_and_files(tmp_path):
    assert refusal("-x", "4") == "'-x' on the command line has no name; write --section.field -x"
    assert "seed = 3 4 (command line): must be one value, got 2" in refusal("seed=3", "4")
    assert "or --loss.names=VALUE where it begins like a setting" in refusal("--loss.names", "seed=x")
    assert "line 2: `<<` is not read" in refusal(write(tmp_path, one="loss: &a {text: x}\n<<: *a\n"))
    (tmp_path / "it.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as YAML" in refusal(str(tmp_path / "it.yaml"))
    file = write(tmp_path, own="base: toy.yaml\ndata:\n  sources:\n")
    assert "own.yaml, line 3) has no value; write data.sources: [" in refusal(file, of=Config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--advantage gropu", "advantage = gropu (command line): unknown kind 'gropu'; must be one of "),
        ("--advantage.baseline medium", "unknown kind 'medium'; must be one of leave_one_out, length_weighted, mean, "),
        ("--surrogate.dual 3", "surrogate.dual = 3 (command line): is a setting of kind capped_clip; kind clip has kl"),
        ("--shaping kl --shaping.overlong.limit 9", "holds kl; list it first, with --shaping kl,overlong"),
        ("--shaping overlong --shaping.overlong.limit 64", "shaping overlong: buffer = 4096 is longer than limit = 64"),
        ("rollout.step_limit=drop", "rollout.step_limit.seconds has no default"),
        ("model.experts=mixture model.experts.count=2 model.experts.per_token=3", "per_token = 3; must be at"),
        ("model.windows=sliding model.windows.sizes=1,2,3,4,5", "sizes has 5 entries; "),
        ("distributed=address distributed.processes=2 distributed.process=2", "process = 2; must be below"),
        ("tools.executor=sandbox_fusion tools.memory_mb=99 tools.cpus=0", "or set tools.executor to local or ray"),
    ],
)
def test_what_a_refusal_of_a_kind_says(words, message):
    assert message in refusal(*words.split(), of=Config)


@pytest.mark.parametrize(
    ("of", "text", "message"),
    [
        (Sample, "seed: 1\nloss:\n  count: 0\n", "loss.count = 0 (it.yaml, line 3): must be at least 1"),
        (Sample, "seed: true\n", "seed = true (it.yaml, line 1): must be a value other than true and false"),
        (Sample, "loss:\n  names: [a, 3]\n", "loss.names.1 = 3 (it.yaml, line 2): must be a text"),
        (Sample, "loss:\n  count: 1\n  count: 1\n", "it.yaml, line 3: loss.count is given twice; keep one of them"),
        (Sample, "base: it.yaml\n", "it.yaml, line 1: base: it.yaml leads back to it.yaml"),
        (Config, "advantage:\n  scale:\n    kind: stdd\n", "scale = stdd (it.yaml, line 3): unknown kind 'stdd'"),
        (Config, "advantage:\n  adjust:\n  - {exponent: 3}\n", "adjust.0 = {exponent: 3} (it.yaml, line 3): must be"),
        (Config, "shaping: {overlong: {limit: 3}}\n", "list it with its settings: shaping: [{kind: overlong, ...}]"),
        (Config, "data: {sources: {a: 1}}\n", "data.sources.a (it.yaml, line 1): data.sources is a list, which is "),
    ],
)
def test_mistakes_in_a_file_name_file_and_line(of, text, message, tmp_path):
    file = write(tmp_path, it=text)
    assert message in refusal(file, of=of)
    if "base:" not in text:
        assert message in refusal(write(tmp_path, over="base: it.yaml\nseed: 3\n"), of=of), "also in a base"


def said_by_help(capsys, *words: str, of: type = Config) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        load(*words, of=of)
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_help_fits_a_screen(capsys):
    lines = said_by_help(capsys, "--help")
    assert len(lines) <= 45 and max(map(len, lines)) <= WIDTH == 110
    text, alone = "\n".join(lines), "name seed steps run_dir resume"
    assert all(f"\n  {name} " in text for name in fields_of(Config) if name not in alone)
    for section in [*fields_of(Config), "advantage.baseline", "plan.second", "surrogate.kl"]:
        lines = said_by_help(capsys, "--help", section)
        assert max(map(len, lines)) <= WIDTH and "there is no" not in lines[0], section


def test_help_of_a_choice_shows_each_kind_with_its_settings_and_narrows_down(capsys):
    text = "\n".join(said_by_help(capsys, "--help", "advantage"))
    for kind_name, chosen in Config().advantage.kinds.items():
        assert f"\nkind {kind_name}: " in text
        assert all(f"  --advantage.{name} " in text for name in fields_of(chosen))
    assert "--advantage.k (default: 2)\n      k of pass@k." in text
    assert "Adjustments, in the order in which they are applied." in text.partition("kind pass_at_k")[2], "inherited"
    problems = said_by_help(capsys, "--help", "group.problems")
    assert problems == ["--group.problems (default: 8)", "      Problems per training step."]
    assert "\nkind overlong: A penalty that grows" in "\n".join(said_by_help(capsys, "--help", "shaping.overlong"))
    assert said_by_help(capsys, "-h", of=Sample)[-1] == "  (top level)    seed"
    assert said_by_help(capsys, "--help", "group.sise") == ["there is no group.sise; did you mean 'group.size'?"]


def test_files_that_fail_name_their_line(tmp_path, capsys):
    path = tmp_path / "mine.py"
    for text, message in (("a = 1\nb = a / 0\n", "line 2: ZeroDivisionError: "), ("def f(:\n", "SyntaxError: ")):
        path.write_text(text)
        for _ in range(2):  # a second attempt fails as well
            error = refusal("--method.files", str(path), of=Config)
            assert error.startswith(f"method.files: {path}") and message in error
    for name, message in (("absent.py", "there is no file"), ("absent_module", "nor an importable module")):
        assert message in refusal("--method.files", name, of=Config)
    path.write_text(
        "from grpo_roc_jax.method.shaping import Overlong\nfrom grpo_roc_jax.settings.options import kind\n"
        "@kind('own_kind')\nclass Mine(Overlong):\n    'Mine.'\n"
    )
    config = run(write(tmp_path, it=f"method: {{files: {path}}}\nshaping: [own_kind]\n"))
    assert config.shaping[0].kind == "own_kind" and run(write(tmp_path, dump=cli.dump_yaml(config))) == config
    assert "kind own_kind: Mine." in said_by_help(capsys, "--method.files", str(path), "--help", "shaping")


def answer(*words: str) -> str:
    return refusal("toy.yaml", *words, of=Config)


KNOWN = tuple(known_keys(Config))


@pytest.mark.parametrize("row", OTHER_NAMES, ids=lambda row: f"{row.project}: {row.theirs}")
def test_a_setting_of_another_project_leads_to_the_one_here(row):
    assert row.ours in ("", METHOD, *KNOWN)
    assert other_name(row.theirs).ours == row.ours, "the first row of a name speaks for all projects"
    if row.theirs in KNOWN:
        return
    message, first = answer(f"--{row.theirs}", "7"), other_name(row.theirs)
    expected = {"": "has no counterpart", METHOD: "a method is a recipe here"}.get(first.ours, f"'{first.ours}'")
    assert expected in message and (row.note in first.note or first is not row)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss_type dr_grpo", "dr_grpo is a recipe: `grpo-roc train methods/dr_grpo.yaml`"),
        ("--use_vllm true", "has no counterpart: the engine is part of the run"),
        ("--optim.learnig_rate 1", "did you mean 'optim.lr'?"),
        ("--logging_steps 1", "TRL's logging_steps has no counterpart: every step is logged"),
        ("--surrogate.kl low_var_kl", "did you mean 'k3'?"),
        ("--hlep", "did you mean '--help'?"),
        ("--trainer.algorithm.clip_cov.clip_ratio 0.1", "a method is a recipe here: methods/clip_cov.yaml"),
        ("--surrogate.kl.kl_loss_coef 0.1", "it has no settings; did you mean 'surrogate.kl.coef' ("),
        ("--optim.lr.peak 1", "optim.lr = {peak: '1'} (command line): must be a number"),
    ],
)
def test_what_a_newcomer_types(words, message):
    said = answer(*words.split())
    assert message in said and said.count("did you mean") <= 1 and "'drpo'?" not in said
    for key in ("max_samples", "generator.sampling_params.stop", "actor_rollout_ref.actor.shuffle", "actor.k"):
        said = answer(f"--{key}", "7")  # resembles a setting here, which means something else
        assert "did you mean" not in said and "--help lists the sections" in said, key


def test_what_is_not_there_suggests_what_is_near(capsys, tmp_path):
    (tmp_path / "rl.toml").touch()
    for words, message in (
        ("banana.yaml", "lists the recipes"),
        ("dapo.yaml", "nearest: configs/methods/dapo.yaml"),
        (f"{tmp_path}/rl.toml", "is TOML; settings are written in YAML"),
    ):
        assert message in refusal(words, of=Config)
    for query, message in (
        ("optim.zebra", "there is no optim.zebra\noptim: lr, warmup_steps, "),
        ("dapo", "there is no dapo; dapo is a recipe: `grpo-roc train methods/dapo.yaml`"),
    ):
        assert message in "\n".join(said_by_help(capsys, "--help", query))
    assert recipe_of("DAPO") == "methods/dapo.yaml" and not recipe_of("../toy")
    assert commands.main(["vllm-serve"]) == commands.UNKNOWN_COMMAND
    assert "did you mean 'serve'?" in capsys.readouterr().err
    page = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert json.dumps(answer("--optim.learning_rate", "1e-4"))[1:-1] in page

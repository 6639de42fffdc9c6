"""Files and command line are one grammar; every refusal names the setting, where it was written and what to change."""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Le

from grpo_roc_jax.config import Config, WatchConfig, read_config
from grpo_roc_jax.method.advantage import PassAtK, Scale
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.method.roc import NoSelection, ResampleOnCorrect
from grpo_roc_jax.method.shaping import Overlong, ToolErrors
from grpo_roc_jax.method.surrogate import CappedClip
from grpo_roc_jax.settings import cli
from grpo_roc_jax.settings.cli import find_config
from grpo_roc_jax.settings.helping import WIDTH
from grpo_roc_jax.settings.options import AtLeast1, InnerShare, NotNegative, Positive, fields_of, kind, settings
from grpo_roc_jax.text.config import TextConfig


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
    share: InnerShare = 0.5
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


# ---- layers --------------------------------------------------------------------------------------------------------


def test_file_then_overrides_left_to_right(tmp_path):
    file = write(tmp_path, one="seed: 3\nloss: {clip_high: 0.5, names: [x, y], enabled: true, text: '--a b'}\n")
    config = load(file, "--loss.clip_high", "0.25", "--loss.clip_high", "0.75")
    assert config == Sample(3, Section(0.75, ("x", "y"), "--a b", "sort", enabled=True))


def test_base_is_read_first(tmp_path):
    file = write(
        tmp_path,
        base="seed: 1\nloss: {clip_high: 0.5, names: []}\n",
        middle="base: base.yaml\nseed: 2\n",
        over="base: middle.yaml\nloss: {clip_high: 0.6}\n",
    )
    assert load(file) == Sample(2, Section(0.6, ()))
    assert load(file, write(tmp_path, later="seed: 7\n")).seed == 7, "a file given later lies over the first"


def test_dump_reads_back_equal(tmp_path):
    config = Sample(5, Section(1e-7, ("p", "q: r", "on", "1"), "two\nlines, 'quoted' #", "uniform", 0, True, 3, 2.5))
    assert load(write(tmp_path, resolved=cli.dump_yaml(config))) == config


def test_dump_of_kinds_reads_back_equal(tmp_path):
    words = "--shaping overlong tool_errors --advantage.baseline leave_one_out --surrogate.kl k3 --resample none "
    words += "--surrogate.old_logprobs scored --weights.factors truncated_is --plan.condition reward_tokens"
    config = run(*words.split(), "--group.size", "9", "--text.system", "so:\n{}")
    assert run(write(tmp_path, resolved=cli.dump_yaml(config))) == config


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["--loss.enabled=true", "--loss.enabled true", "--loss.enabled=True", "--loss.enabled", "loss.enabled=true"],
)
def test_switches(words):
    assert load(*words.split()).loss.enabled
    assert load(*words.split(), "--seed", "3") == Sample(3, Section(enabled=True))
    assert not load(*words.split(), "--loss.enabled", "false").loss.enabled


@pytest.mark.parametrize(
    "words",
    [
        ["--loss.names", "x,y"],
        ["--loss.names", "x, y"],
        ["--loss.names=x,y"],
        ["--loss.names", "x", "y"],
        ["--loss.names", "x,", "y"],
        ["--loss.names", "[x, y]"],
        ["--loss.names", "[x,", "y]"],
        ["--loss.names=[x, y]"],
        ["loss.names=[x,y]"],
    ],
)
def test_lists_as_a_person_would_type_them(words):
    assert load(*words, "--seed", "3") == Sample(3, Section(names=("x", "y")))
    assert load("--loss.names", "x").loss.names == load("--loss.names", "[x]").loss.names == ("x",)
    assert load("--loss.names", "").loss.names == load("--loss.names", "[]").loss.names == ()


def test_words_without_dashes(tmp_path):
    assert load("seed=3", "loss.clip_high=0.5") == Sample(3, Section(0.5))
    assert load("--seed", "3", "loss.clip_high=0.5") == Sample(3, Section(0.5))
    assert load(write(tmp_path, one="seed: 2\n"), "loss.text=a=b") == Sample(2, Section(text="a=b"))
    assert load("--loss.clip-high", "0.5").loss.clip_high == 0.5


def test_files_and_values_with_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    file = write(tmp_path / "lr=1", one="seed: 2\n")
    assert load(file, "seed=3").seed == 3 and load("lr=1/one.yaml").seed == 2
    assert load("--loss.text", "lr=1/run", "seed=3") == Sample(3, Section(text="lr=1/run"))
    assert load("--loss.names", "n=a", "m=b", "--seed", "3").loss.names == ("n=a", "m=b")
    assert run("--data.eval_sources", "n=one.jsonl", "steps=3").data.eval_sources == ("n=one.jsonl",)
    assert "unknown key 'nosuch'" in refusal("nosuch=3")
    assert "the name of the configuration file is empty" in refusal("", "--seed", "3")


def test_a_section_as_a_mapping(tmp_path):
    assert load("--loss", "{clip_high: 0.5, text: a}", "--loss.text", "b").loss == Section(0.5, text="b")
    assert load("--loss.text", "b", "--loss={clip_high: 0.5}").loss == Section(0.5, text="b")
    mine = tmp_path / "mine.py"
    mine.write_text("raise ImportError('read')")
    assert refusal("--method", f"{{files: [{mine}]}}", of=Config).startswith("method.files: ")


def test_values_that_look_like_something_else(tmp_path):
    for text, expected in {
        "text: 2024-05-01": Section(text="2024-05-01"),
        "text: 2024-99-99 1:00:00": Section(text="2024-99-99 1:00:00"),
        "names: [2024-05-01, =, 1:30]": Section(names=("2024-05-01", "=", "1:30")),
        "ddof: '0'": Section(ddof=0),
    }.items():
        assert load(write(tmp_path, it=f"loss: {{{text}}}\n")).loss == load(f"--loss={{{text}}}").loss == expected
    words = ["--loss.text", "[not a list", "--loss.clip_high", "1e-3", "--loss.ddof", "0", "--seed", "-1"]
    assert load(*words) == Sample(-1, Section(1e-3, text="[not a list", ddof=0))
    assert load("--loss.text", "true").loss.text == "true"
    assert load(write(tmp_path, it="# nothing\n")) == Sample()
    config = read_config(Path("toy.yaml"), "--steps", 5, "--optim.lr", 1e-3)
    assert (config.steps, config.optim.lr) == (5, 1e-3)
    assert TextConfig(tokenizer=Path("a")) == TextConfig(tokenizer="a")
    for word in (None, ["toy.yaml"], {}):
        with pytest.raises(TypeError, match="read_config got"):
            read_config(word)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--watch.steps=4", "--watch=null"], None),
        (["--watch=null", "--watch.steps=4"], WatchConfig(steps=4)),
        (["--watch.steps=4", "--watch=null", "--watch.history=9"], WatchConfig(history=9)),
        (["--watch.steps=4", "--watch={history: 9}"], WatchConfig(steps=4, history=9)),
    ],
)
def test_of_a_section_and_its_settings_the_later_counts(words, expected):
    assert run(*words).watch == expected


def test_another_kind_starts_from_its_own_defaults(tmp_path):
    file = write(tmp_path, one="resample: {kind: roc, drop: none, oversample: 3}\nsurrogate: {clip_low: 0.1}\n")
    over = write(tmp_path, two="base: one.yaml\nsurrogate: {kind: capped_clip, dual: 3}\n")
    assert run(file).resample == ResampleOnCorrect(drop="none", oversample=3)
    assert run(file, "--resample", "none").resample == NoSelection()
    assert run(file, "--resample", "roc").resample == run(file).resample, "the same kind keeps what was set"
    assert run(over).surrogate == CappedClip(dual=3.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--shaping overlong", (Overlong(),)),
        ("--shaping overlong tool_errors", (Overlong(), ToolErrors())),
        ("--shaping [overlong, tool_errors]", (Overlong(), ToolErrors())),
        ("--shaping {kind: overlong, limit: 5000}", (Overlong(limit=5000),)),
        ("--shaping overlong tool_errors --shaping.overlong.limit 5000", (Overlong(limit=5000), ToolErrors())),
        ("--shaping.overlong.limit 5000 --shaping overlong,tool_errors", (Overlong(limit=5000), ToolErrors())),
        ("--shaping.kind overlong --shaping.limit 5000", (Overlong(limit=5000),)),
        ("--shaping {kind: overlong, buffer: 64} --shaping.overlong.limit 5000", (Overlong(limit=5000, buffer=64),)),
        ("--shaping {kind: overlong, buffer: 64} --shaping.limit 5000", (Overlong(limit=5000, buffer=64),)),
        ("--shaping overlong --shaping tool_errors", (ToolErrors(),)),
        ("--shaping []", ()),
    ],
)
def test_lists_of_kinds(words, expected):
    assert run(*words.split()).shaping == expected


def test_one_of_a_list_changed_by_name(tmp_path):
    file = write(tmp_path, one="shaping: [tool_errors, {kind: overlong, buffer: 64}]\n")
    expected = (ToolErrors(), Overlong(limit=5000, buffer=64))
    assert run(file, "--shaping.overlong.limit", "5000").shaping == expected
    over = write(tmp_path, two="base: one.yaml\nshaping: {overlong: {limit: 5000}}\n")
    assert run(over).shaping == expected
    assert run(file, "--shaping", "overlong").shaping == (Overlong(),), "a list replaces a list"
    assert run(write(tmp_path, one="shaping: {kind: overlong, limit: 5000}\n")).shaping == (Overlong(limit=5000),)
    assert run(write(tmp_path, one="shaping: overlong\n")).shaping == (Overlong(),)


# ---- refusals ------------------------------------------------------------------------------------------------------

A_SECTION = "(command line): is a section; set one of its fields, such as loss.clip_high"
LIKE_A_SETTING = "or --loss.names=VALUE where it begins like a setting, as name=a.jsonl does"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss.count 0", "loss.count = 0 (command line): must be at least 1"),
        ("--loss.clip_high -1", "loss.clip_high = -1 (command line): must be at least 0"),
        ("--loss.rate 0", "loss.rate = 0 (command line): must be above 0"),
        ("--loss.share 1", "loss.share = 1 (command line): must be below 1"),
        ("--loss.most 10", "loss.most = 10 (command line): must be at most 9"),
        ("--seed 0.5", "seed = 0.5 (command line): must be a whole number"),
        ("--loss.rate fast", "loss.rate = fast (command line): must be a number"),
        ("--loss.enabled 3", "loss.enabled = 3 (command line): must be true or false"),
        (
            "--loss.select sorts",
            "loss.select = sorts (command line): must be 'sort' or 'uniform'; did you mean 'sort'?",
        ),
        ("--loss.ddof 2", "loss.ddof = 2 (command line): must be 0 or 1"),
        ("--loss.count 11", "loss.count = 11 is above 10 * loss.rate = 10.0; lower it (command line)"),
        ("--seed", "--seed has no value; write --seed VALUE"),
        ("--loss.rate --seed 3", "--loss.rate has no value; write --loss.rate VALUE"),
        ("--loss.names", f"--loss.names has no value; write --loss.names VALUE, {LIKE_A_SETTING}"),
        ("--loss.names seed=x", f"--loss.names has no value; write --loss.names VALUE, {LIKE_A_SETTING}"),
        (
            "--loss.text two words",
            "loss.text = two words (command line): must be one value, got 2; put quotes around a text with spaces",
        ),
        ("--loss 3", f"loss = 3 {A_SECTION}"),
        ("--loss 3 --loss.count 2", f"loss = 3 {A_SECTION}"),
        ("--loss.count 2 --loss 3", f"loss = 3 {A_SECTION}"),
        ("--loss.names a=b loss=x", f"loss = x {A_SECTION}"),
        ("--los.select sort", "unknown key 'los.select' (command line); did you mean 'loss.select'?"),
        ("--clip_high 0.2", "unknown key 'clip_high' (command line); did you mean 'loss.clip_high'?"),
        ("--zzz 0.2", "unknown key 'zzz' (command line); --help lists the sections"),
    ],
)
def test_what_a_refusal_says(words, message):
    assert refusal(*words.split()) == message


def test_a_list_without_a_value_is_named_where_it_was_written(tmp_path):
    for text, name in (("data:\n  sources:\n", "data.sources"), ("method: {files: null}\n", "method.files")):
        (tmp_path / "own.yaml").write_text("base: toy.yaml\n" + text)
        with pytest.raises(cli.ConfigError, match=rf"{name} \(.*own.yaml, line \d\) has no value; write {name}: \["):
            read_config(tmp_path / "own.yaml")


def test_refusals_of_whole_words_and_files(tmp_path):
    assert refusal("-x", "4") == "'-x' on the command line has no name; write --section.field -x"
    assert "seed = 3 4 (command line): must be one value, got 2" in refusal("seed=3", "4")
    assert "line 2: `<<` is not read" in refusal(write(tmp_path, one="loss: &a {text: x}\n<<: *a\n"))
    assert "no configuration file 'absent.yaml'" in refusal("absent.yaml")
    assert "nearest: configs/toy.yaml" in refusal("toi.yaml")
    (tmp_path / "it.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as YAML" in refusal(str(tmp_path / "it.yaml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--advantage gropu", "advantage = gropu (command line): unknown kind 'gropu'; must be one of "),
        ("--advantage gropu", "; did you mean 'group'?"),
        ("--advantage.baseline medium", "unknown kind 'medium'; must be one of leave_one_out, length_weighted, mean, "),
        ("--advantage group pass_at_k", "advantage = [group, pass_at_k] (command line): must be one of"),
        (
            "--surrogate.dual 3",
            "surrogate.dual = 3 (command line): is a setting of kind capped_clip; kind clip has kl, old_logprobs, ",
        ),
        ("--surrogate.kl.coef 0.2", "is a setting of kind corrected, k1, k2, k3; kind none has no settings"),
        ("--surrogate sapo --surrogate.slope 2", "surrogate.slope = 2 (command line): kind sapo has no such setting"),
        ("--advantage pass_at_k --advantage.k 0", "advantage.k = 0 (command line): must be at least 1"),
        ("--shaping overlong --shaping.overlong.buffer 0", "shaping.0.buffer = 0 (command line): must be at least 1"),
        ("--shaping kl --shaping.overlong.limit 9", "holds kl; list it first, with --shaping kl,overlong"),
        ("--shaping.overlong.limit 9", "shaping.overlong (command line): shaping holds nothing; list it first, "),
        ("--shaping [overlong", "cannot be read as YAML"),
        ("--method.files", "--method.files has no value; write --method.files VALUE"),
        ("--shaping {limit: 3}", "must be one of"),
        ("--loss.clip_high 0.3", "unknown key 'loss.clip_high' (command line); did you mean 'surrogate.clip_high'?"),
        ("--shaping overlong --shaping.overlong.limit 64", "shaping overlong: buffer = 4096 is longer than limit = 64"),
    ],
)
def test_what_a_refusal_of_a_kind_says(words, message):
    assert message in refusal(*words.split(), of=Config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nloss:\n  count: 0\n", "loss.count = 0 (it.yaml, line 3): must be at least 1"),
        ("loss: {clip_hihg: 1}\n", "'loss.clip_hihg' (it.yaml, line 1); did you mean 'loss.clip_high'?"),
        ("\nloss: 3\n", "loss = 3 (it.yaml, line 2): is a section; set one of its fields"),
        ("seed: true\n", "seed = true (it.yaml, line 1): must be a value other than true and false"),
        ("loss:\n  names: [a, 3]\n", "loss.names.1 = 3 (it.yaml, line 2): must be a text"),
        ("loss:\n  count: 50\n", "loss.count = 50 is above 10 * loss.rate = 10.0; lower it (it.yaml, line 2)"),
        ("seed: 1\nseed: 2\n", "it.yaml, line 2: seed is given twice; keep one of them"),
        ("loss:\n  count: 1\n  count: 1\n", "it.yaml, line 3: loss.count is given twice; keep one of them"),
        ("seed: [1\n", "line 2"),
        ("- 1\n", "it.yaml: must be a mapping of sections, got a list"),
        ("base: absent.yaml\n", "it.yaml, line 1: base: no configuration file 'absent.yaml'"),
        ("base: it.yaml\n", "it.yaml, line 1: base: it.yaml leads back to it.yaml"),
    ],
)
def test_mistakes_in_a_file_name_file_and_line(text, message, tmp_path):
    file = write(tmp_path, it=text)
    assert message in refusal(file)
    if "base:" not in text:
        assert message in refusal(write(tmp_path, over="base: it.yaml\nloss: {clip_high: 0.5}\n")), "also in a base"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("advantage:\n  kind: pass_at_k\n  k: 0\n", "advantage.k = 0 (it.yaml, line 3): must be at least 1"),
        ("advantage:\n  scale:\n    kind: stdd\n", "advantage.scale = stdd (it.yaml, line 3): unknown kind 'stdd'"),
        (
            "shaping:\n- kl\n- {kind: kl, limit: 3}\n",
            "shaping.1.limit = 3 (it.yaml, line 3): is a setting of kind overl",
        ),
        ("shaping:\n- kind: overlong\n  buffer: true\n", "shaping.0.buffer = true (it.yaml, line 3): must be a value"),
        ("advantage:\n  adjust:\n  - {exponent: 3}\n", "advantage.adjust.0 = {exponent: 3} (it.yaml, line 3): must be"),
        ("surrogate: null\n", "surrogate = null (it.yaml, line 1): must be one of"),
        ("shaping: {overlong: {limit: 3}}\n", "list it with its settings: shaping: [{kind: overlong, ...}]"),
        ("shaping: true\n", "shaping = true (it.yaml, line 1): must be a value other than true and false"),
        ("optim.lr: 1\n", "unknown key 'optim.lr' (it.yaml, line 1); write it as optim: {lr: ...}"),
        ("data: {sources: {a: 1}}\n", "data.sources.a (it.yaml, line 1): data.sources is a list, which is given as a"),
    ],
)
def test_mistakes_in_kinds_name_file_and_line(text, message, tmp_path):
    file = write(tmp_path, it=text)
    assert message in refusal(file, of=Config)
    assert message in refusal(write(tmp_path, over="base: it.yaml\nseed: 3\n"), of=Config), "also in a base"


def test_a_setting_of_a_listed_item_is_said_with_its_name(tmp_path):
    file = write(tmp_path, one="shaping: [overlong]\nweights: {factors: [truncated_is]}\n")
    for name, message in (
        ("shaping.limit", "shaping is a list; write shaping.overlong.limit"),
        ("weights.factors.high", "weights.factors is a list; write weights.factors.truncated_is."),
        ("shaping.overlong.buffer", "shaping.0.buffer = 0 (command line): must be at least 1"),
    ):
        assert message in refusal(file, f"--{name}", "0", of=Config)


# ---- help ----------------------------------------------------------------------------------------------------------


def said_by_help(capsys, *words: str, of: type = Config) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        load(*words, of=of)
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_help_fits_a_screen(capsys):
    lines = said_by_help(capsys, "--help")
    assert len(lines) <= 45
    assert max(map(len, lines)) <= WIDTH == 110
    text = "\n".join(lines)
    assert all(f"\n  {name} " in text for name in fields_of(Config) if name not in "name seed steps run_dir resume")
    assert "kind: none, roc, max_variance, uniform" in text


def test_help_of_each_section(capsys):
    for section in [*fields_of(Config), "advantage.baseline", "plan.second", "surrogate.kl"]:
        lines = said_by_help(capsys, "--help", section)
        assert max(map(len, lines)) <= WIDTH and "there is no" not in lines[0], section


def test_help_of_a_choice_shows_each_kind_with_its_settings(capsys):
    text = "\n".join(said_by_help(capsys, "--help", "advantage"))
    for kind_name, chosen in Config().advantage.kinds.items():
        assert f"\nkind {kind_name}: " in text
        for name in fields_of(chosen):
            assert f"  --advantage.{name} " in text
    assert "--advantage.k (default: 2)\n      k of pass@k." in text
    scales = ", ".join(Scale.kinds)
    assert {"std", "batch_std", "none"} <= set(Scale.kinds)
    assert f"--advantage.scale {{{scales}}} (default: {{kind: std, ddof: 1," in text
    assert "--advantage.of {group} (default: {kind: group," in text, "a field of one kind offers that kind"
    inherited = text.partition("kind pass_at_k")[2]
    assert "Adjustments, in the order in which they are applied." in inherited


def test_help_narrows_down(capsys):
    lines = said_by_help(capsys, "--help", "shaping.overlong")
    assert [line for line in lines if line.startswith("kind")] == [
        "kind overlong: A penalty that grows from 0 to 1 over the last tokens before a limit (DAPO, arXiv:2503.14476,"
    ]
    problems = said_by_help(capsys, "--help", "group.problems")
    assert problems == ["--group.problems (default: 8)", "      Problems per training step."]
    assert said_by_help(capsys, "--help", "advantage.k")[0] == "--advantage.k (default: 2)"
    assert said_by_help(capsys, "-h", of=Sample)[-1] == "  (top level)    seed"
    assert said_by_help(capsys, "--help", "group.sise") == ["there is no group.sise; did you mean 'group.size'?"]


def test_a_kind_needs_an_axis():
    for base in (Part, object):
        with pytest.raises(TypeError, match="Alone: kind 'alone' has no axis; derive it from one"):
            kind("alone")(type("Alone", (base,), {"__doc__": "Derived from nothing."}))


def test_values_made_in_python_are_checked_too():
    config = Config(advantage=PassAtK(k=3))
    assert replace(config, advantage="group").advantage.kind == "group"
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        PassAtK(k=0)
    with pytest.raises(ValueError, match="unknown kind"):
        replace(config, advantage="gropu")
    with pytest.raises(AttributeError, match="cannot assign"):
        config.advantage.k = 4


FILE = '''
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import kind

@kind("{name}")
class Mine(Shaping):
    """Mine."""

    by: float = 2.0
    """Factor."""

    def group(self, rewards, found):
        return rewards * self.by
'''


def method_file(folder: Path, name: str, text: str = FILE) -> str:
    path = folder / "mine.py"
    folder.mkdir(exist_ok=True)
    path.write_text(text.replace("{name}", name))
    return str(path)


def test_files_of_the_highest_layer_that_names_any_are_imported(tmp_path, capsys):
    """As for every list; so what is dumped names all that reading it back needs."""
    first, second = method_file(tmp_path / "a", "one_kind"), method_file(tmp_path / "b", "two_kind")
    base = write(tmp_path, it=f"method: {{files: {first}}}\nshaping: [one_kind]\n")
    config = run(base)
    assert config.method.files == (first,)
    assert run(write(tmp_path, dump=cli.dump_yaml(config))) == config
    other = run(base, "--method.files", f"['{second}']", "--shaping", "two_kind")
    assert (other.method.files, other.shaping[0].kind) == ((second,), "two_kind")
    assert run("--method.files", first, second, "--shaping", "one_kind,two_kind").method.files == (first, second)
    assert "kind two_kind: Mine." in said_by_help(capsys, "--method.files", second, "--help", "shaping")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_it\n", "line 1: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("a = 1\nb = a / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        (FILE.replace("{name}", "overlong"), "ValueError: kind 'overlong' exists already: "),
    ],
)
def test_files_that_fail_name_their_line(text, message, tmp_path):
    path = method_file(tmp_path, "", text)
    for _ in range(2):  # a second attempt fails as well
        error = refusal("--method.files", path, of=Config)
        assert error.startswith(f"method.files: {path}")
        assert message in error
    assert "there is no file" in refusal("--method.files", "absent.py", of=Config)
    assert "nor an importable module" in refusal("--method.files", "absent_module", of=Config)


# ---- settings of a kind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "kinds"),
    [
        ("lora.rank=8", "kind low_rank"),
        ("model.rope_scaling.factor=8", "kind linear, llama3, proportional, yarn"),
        ("distributed.coordinator=host:1", "kind address"),
        ("reward.truncated.reward=-1", "kind fixed"),
        ("rollout.step_limit.seconds=5", "kind drop, partial"),
        ("rollout.step_limit.lag=1", "kind stream"),
        ("tools.executor.url=http://host:1", "kind code_judge, sandbox_fusion"),
        ("resample.positive_select.epsilon=0.1", "kind inverse"),
        ("log.wandb.project=mine", "kind offline, online, trackio"),
    ],
)
def test_a_setting_of_another_kind_is_refused(word, kinds):
    name, _, value = word.partition("=")
    with pytest.raises(cli.ConfigError, match=f"^{name} = {value} .*: is a setting of {kinds}; kind"):
        read_config(word)


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
    with pytest.raises(cli.ConfigError, match=message):
        read_config(*words)


def test_a_path_that_stands_for_a_kind_goes_with_the_settings_of_that_kind():
    tokenizer = read_config("text.tokenizer=some/folder", "text.tokenizer.eos_token=<end>").text.tokenizer
    assert (tokenizer.kind, tokenizer.path, tokenizer.eos_token) == ("file", "some/folder", "<end>")
    config = read_config("reward.functions=answer,mine:brevity", "reward.functions.function.weight=0.5")
    assert [part.weight for part in config.reward.functions] == [1.0, 0.5]
    config = read_config("--reward.functions", "mine:brevity", "{kind: format, weight: 0.25}")
    assert [part.name for part in config.reward.functions] == ["mine:brevity", "format"]
    assert config.reward.functions[1].weight == 0.25


def test_a_shipped_file_is_found_under_its_path_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("configs/toy.yaml") == find_config("toy.yaml") == find_config("configs/toy")

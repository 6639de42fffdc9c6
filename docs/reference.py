"""Writes the generated pages: `python docs/reference.py` makes docs/configuration.md and docs/api.md, and the table of
docs/coming_from.md.

The settings come from the classes that hold them, the Python names from their docstrings, so neither page is edited.
"""

import dataclasses
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docstring_parser

import grpo_roc_jax
from grpo_roc_jax.config import Config
from grpo_roc_jax.hints.other_names import METHOD, OTHER_NAMES
from grpo_roc_jax.planner.estimate import estimate
from grpo_roc_jax.planner.plan import Deployment, deployment_of
from grpo_roc_jax.planner.roofline import step_times
from grpo_roc_jax.planner.topology import FRACTION, MOST_OF_A_GPU, parse_topology
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.settings.helping import axis_of, section_of
from grpo_roc_jax.settings.layers import is_section
from grpo_roc_jax.settings.options import as_text, default_of, described, fields_of, type_of

DOCS = Path(__file__).resolve().parent
Seen = dict[type, str]
"""Choice -> where its kinds are listed; each choice is listed once."""


def cell(text: str) -> str:
    """Text for a cell of a table: one line, and nothing in it that Markdown or HTML would read."""
    parts = " ".join(text.split()).replace("|", "∣").split("`")
    return "`".join(part if k % 2 else part.replace("<", "&lt;").replace("*", "\\*") for k, part in enumerate(parts))


# ---- configuration -------------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every setting, section by section."""
    about = described(Config)
    sections = [
        name for name in fields_of(Config) if section_of(type_of(Config, name)) or axis_of(type_of(Config, name))
    ]
    plain, seen = [name for name in fields_of(Config) if name not in sections], {}
    lines = [
        "# Configuration",
        "",
        "`python docs/reference.py` generates this page; `grpo-roc train --help SECTION` prints it in a terminal.",
        "A setting is given in YAML or as `--section.field value`. Where a setting chooses a *kind*, the kind has",
        "settings of its own, which follow: `--advantage pass_at_k --advantage.k 4`.",
        "",
        "## Top level",
        "",
        *table(Config, plain, ""),
    ]
    for name in sections:
        found = section_of(type_of(Config, name)) or type_of(Config, name)
        lines += ["", f"## `{name}`", "", cell((axis_of(found) or found).__doc__ or about.get(name, ""))]
        lines += axis(found, name, seen) if axis_of(found) else section(found, name, seen)
    return "\n".join(lines) + "\n"


def table(cls: type, names: list[str], prefix: str) -> Iterator[str]:
    """A row for each setting: name, default, values it may have, meaning."""
    about, hints = described(cls), fields_of(cls)
    yield from ("| setting | default | meaning |", "|---|---|---|")
    for name in names:
        found, default = type_of(cls, name), default_of(hints[name])
        literals = typing.get_args(found) if typing.get_origin(found) is typing.Literal else ()
        choices = f" One of {', '.join(f'`{one}`' for one in literals)}." if literals else ""
        shown = "required" if default is dataclasses.MISSING else f"`{cell(as_text(default))}`"
        yield f"| `{prefix}{name}` | {'empty' if shown == '``' else shown} | {cell(about.get(name, ''))}{choices} |"


def section(cls: type, prefix: str, seen: Seen, names: Iterable[str] | None = None) -> Iterator[str]:
    """The settings of a section or a kind; sections and choices inside it follow its table."""
    names = list(fields_of(cls) if names is None else names)
    if names:
        yield from ("", *table(cls, names, f"{prefix}."))
    for name in names:
        found, place = type_of(cls, name), f"{prefix}.{name}"
        if axis_of(found) and axis_of(found) not in seen:
            yield from ("", f"### Kinds of `{place}`", *axis(found, place, seen))
        elif axis_of(found):
            yield from ("", f"`{place}` has the kinds of `{seen[axis_of(found)]}`.")
        elif is_section(found):
            yield from ("", f"### `{place}`", "", cell(found.__doc__ or ""), *section(found, place, seen))


def axis(found: Any, prefix: str, seen: Seen) -> Iterator[str]:
    """The kinds of a choice that the package itself defines: the settings of all, then those of each."""
    seen[axis_of(found)] = prefix
    kinds = {name: cls for name, cls in axis_of(found).choices().items() if cls.__module__.startswith("grpo_roc_jax.")}
    first, *others = kinds.values()
    shared = [name for name in fields_of(first) if others and all(alike(first, other, name) for other in others)]
    if shared:
        yield from ("", "Settings of every kind:", *section(first, prefix, seen, shared))
    for name, cls in kinds.items():
        own = [field for field in fields_of(cls) if field not in shared]
        yield from ("", f"**`{prefix}: {name}`** {cell(cls.__doc__ or '')}", *section(cls, prefix, seen, own))


def alike(one: type, other: type, name: str) -> bool:
    """Whether two kinds have a setting of this name with the same default and meaning."""
    if name not in fields_of(other) or described(one).get(name) != described(other).get(name):
        return False
    return as_text(default_of(fields_of(one)[name])) == as_text(default_of(fields_of(other)[name]))


# ---- Python --------------------------------------------------------------------------------------------------------


ALONE = r"""
## Parts alone

Each part is made and used without the others. The loop in [the README](../README.md#a-loop-of-your-own) puts them
together.

### The executor

Runs programs in isolated processes. `Executor(settings)` takes an `ExecutorSettings`: the limits of a program, how many
processes run, and which libraries are loaded ahead. `run` takes a list of `Program`s, each a name and its source as
text, and returns a `ToolResult` for each, in order. [The sandbox](sandbox.md) says what else it does.

```python run
from grpo_roc_jax.sandbox import Executor, ExecutorSettings, Program, ProgramLimits

settings = ExecutorSettings(limits=ProgramLimits(wall_s=2.0, memory_mb=256), preload=())
with Executor(settings) as executor:
    right, wrong = executor.run([Program("a", "print(6 * 7)"), Program("b", "1 / 0")])
assert right.stdout == "42\n" and wrong.error_type == "ZeroDivisionError"
```

### Rewards

`make_scorer` takes a `RewardConfig`, which names the reward functions and how answers are compared, and returns a
`Scorer`. Its `score_all` takes a list of `Problem`s and, for each, a list of `Trajectory`s; the result has one
`Group` for each problem, with a `Verdict` for every trajectory. `final_answer` takes a trajectory and returns its
answer as text, or None.

```python run
import numpy as np
import grpo_roc_jax as g

text, ids = "</reason><answer>\\boxed{144}</answer>", np.arange(4)
row = g.Trajectory(ids, ids > 0, 0.0 * ids, ids, 1, (g.Turn(1, 4, text),), "answer", sample=0)
problem = g.Problem("p", "gcd(720,432)=?", "144", "example")
scorer = g.make_scorer(g.RewardConfig())
(group,) = scorer.score_all([problem], [[row]]).groups
assert g.final_answer(row) == "144" and group.rewards.tolist() == [1.0]
scorer.close()
```

### Advantages

`train_rows` takes a list of `Group`s, the sections of a configuration that make up a method, and the method's state.
It returns a `TrainRow` for every trajectory: float32 arrays of its length with the advantage and the weight of each
token. Here the rewards 1 and 0 are divided by their standard deviation after their mean is subtracted. A method that
reads log-probabilities of the policy about to be updated gets them as
`scores=g.Scores(*learner.score(g.scoring_rows(groups)))`.

```python run
import numpy as np
import grpo_roc_jax as g

config, ids = g.read_config("toy.yaml"), np.array([7, 8, 9], np.int32)
rows = [g.Trajectory(ids, ids > 7, 0.0 * ids, ids, 1, (), "answer", sample) for sample in range(2)]
verdicts = [g.Verdict(reward, "correct", "144", 1, 0, 1, True, 1) for reward in (1.0, 0.0)]
group = g.Group(g.Problem("p", "?", "144", "example"), tuple(rows), tuple(verdicts))
right, wrong = g.train_rows([group], config, g.initial_state(config))
np.testing.assert_allclose(right.advantages[1:], 0.7071, atol=1e-4)
np.testing.assert_allclose(wrong.advantages[1:], -0.7071, atol=1e-4)
```

### The sampler

`Sampler` takes the shape of a policy (`ModelConfig`), its parameters (a pytree of arrays), a tokenizer, and the tools
that the policy may call (a `Registry`; the Python tool by default). `roll_out` takes `RolloutRequest`s and returns a
list of `Trajectory`s for each of them, with statistics. `publish` takes new parameters and the number of their
version.

```python run
import jax
import grpo_roc_jax as g

tokenizer = g.load_tokenizer(g.TextConfig())
model = g.ModelConfig(vocab_size=tokenizer.vocab_size, d_model=32, layers=1, heads=2, kv_heads=1, head_dim=16, d_ff=32)
params = g.init_params(jax.random.key(0), model)
rollout, limits = g.RolloutConfig(slots=4, max_response_tokens=16), g.ToolsConfig(workers=1, preload=())
with g.Sampler(model, params, tokenizer, rollout=rollout, limits=limits) as sampler:
    problem = g.Problem("p", "gcd(720,432)=?", "144", "example")
    (rows,), stats = sampler.roll_out([g.RolloutRequest(problem, place=0, count=4)])
assert len(rows) == 4 and stats.sampled_tokens > 0
```

### The learner

`Learner` takes the shape of a policy, the loss of a token (`Surrogate`, of which `Clip` is one), the settings of
AdamW (`OptimConfig`), a mesh of devices (None for the first one), and the parameters to begin with. `update` takes
`TrainRow`s, takes one optimizer step, and returns its metrics as a mapping of names to floats. `score` returns a list
of log-probabilities and one of entropies, each a float32 array for every row. `params` are the parameters for the
sampler. The next `update` deletes their arrays; what shall stay is copied before:
`jax.tree.map(jnp.copy, learner.params)`.

```python run
import jax
import numpy as np
import grpo_roc_jax as g

model = g.ModelConfig(vocab_size=32, d_model=32, layers=1, heads=2, kv_heads=1, head_dim=16, d_ff=32)
params, optim = g.init_params(jax.random.key(0), model), g.OptimConfig(lr=0.01, warmup_steps=0)
learner = g.Learner(model, g.Clip(), optim, None, params, batch=g.BatchConfig(row_length=16, rows=2), rows=4)
ids, ones = np.array([3, 4, 5], np.int32), np.ones(3, np.float32)
row = g.TrainRow(ids, ids > 3, 0 * ones, ones, ones / 2, 0 * ids, 0 * ones)  # advantage 1, weight 1/2 a token
before, _ = learner.score([row])
metrics = learner.update([row])
after, _ = learner.score([row])
assert metrics["update/grad_norm"] > 0 and after[0].sum() > before[0].sum()
```
""".strip().splitlines()
"""The part of the page on Python that is written by hand; its blocks are run by tests/test_docs.py."""


def api() -> str:
    """The public names with their signatures and docstrings."""
    lines = [
        "# Python",
        "",
        "`python docs/reference.py` generates this page from the docstrings of the names in `__init__.py`.",
        "`import grpo_roc_jax as g` loads nothing heavy; a name is loaded when it is first used.",
        "",
        *ALONE,
    ]
    for name in grpo_roc_jax.__all__[1:]:
        home, _, own = grpo_roc_jax._HOMES[name].partition(":")
        thing = getattr(importlib.import_module(f"grpo_roc_jax.{home}"), own or name)
        lines += [
            "",
            f"## `g.{name}`",
            "",
            *entry(thing, name),
            f"*Defined in `grpo_roc_jax/{home.replace('.', '/')}.py`.*",
        ]
    return "\n".join(lines) + "\n"


def entry(thing: Any, name: str) -> Iterator[str]:
    """Signature, docstring, and the fields and methods of a class."""
    is_class, whole = inspect.isclass(thing), inspect.getdoc(thing) or ""
    parsed = docstring_parser.parse_from_object(thing) if is_class else docstring_parser.parse(whole)
    written = is_class and not dataclasses.is_dataclass(thing)
    made = inspect.getdoc(vars(thing)["__init__"]) if written and "__init__" in vars(thing) else None
    if made:  # a class whose arguments its `__init__` describes
        parsed = docstring_parser.parse(made)
    if not is_class or made:
        parameters = parameters_of(thing)
        line = f"{name}({', '.join(parameters)})"
        several = [f"{name}(", *(f"    {one}," for one in parameters), ")"]
        yield from ("```python", *([line] if len(line) <= 120 else several), "```", "")
    for block in re.split(r"\n\s*\n(?:Args|Raises|Returns):", whole)[0].split("\n\n"):
        yield from (block if block.startswith("    ") else cell(block), "")
    methods = inspect.getmembers(thing, inspect.isfunction) if is_class else ()
    about = {one.arg_name: one.description or "" for one in parsed.params}
    fields = [one.name for one in dataclasses.fields(thing)] if is_class and dataclasses.is_dataclass(thing) else about
    rows = [(field, about.get(field, "")) for field in fields]
    for method, function in methods:
        if not method.startswith("_") and method in vars(thing):
            rows.append((f"{method}()", re.split(r"\n\s*\n", inspect.getdoc(function) or "")[0]))
    if rows:
        yield from ("| name | meaning |", "|---|---|", *(f"| `{row}` | {cell(text)} |" for row, text in rows), "")
    if parsed.returns and parsed.returns.description:
        yield from (f"Returns {cell(parsed.returns.description)}", "")
    for one in parsed.raises:
        yield from (f"Raises `{one.type_name}`: {cell(one.description or '')}", "")


def parameters_of(thing: Any) -> list[str]:
    """The parameters of a call as they are written, with a `*` before those that are passed by name."""
    given = list(inspect.signature(thing).parameters.values())
    written, kinds = [as_written(one) for one in given], [one.kind for one in given]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        written.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return written


def as_written(parameter: inspect.Parameter) -> str:
    """A parameter with its default, if that can be written."""
    shown = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    default = parameter.default
    if default is parameter.empty:
        return shown
    text = json.dumps(default) if isinstance(default, str) else repr(default)
    return f"{shown}={text}" if isinstance(default, str | int | float | bool | None) else f"{shown}=..."


TABLE = "<!-- generated table -->", "<!-- end of generated table -->"


def coming_from() -> str:
    """The page for users of other projects, with its table made anew."""
    before, after = TABLE
    head, _, rest = (DOCS / "coming_from.md").read_text(encoding="utf-8").partition(before)
    lines = []
    for project in dict.fromkeys(row.project for row in OTHER_NAMES):
        lines += ["", f"### {project}", "", f"| {project} | here | note |", "|---|---|---|"]
        for row in (row for row in OTHER_NAMES if row.project == project):
            ours = {"": "-", METHOD: "a [recipe](methods.md)"}.get(row.ours, f"`{row.ours}`")
            lines.append(f"| `{row.theirs}` | {ours} | {cell(row.note)} |")
    return "\n".join([head + before, *lines, "", after]) + rest.partition(after)[2]


TRAINED = {
    "all weights": (),
    "all weights, `optim.offload`": ("--optim.offload", "true"),
    "adapter": ("--lora.kind", "low_rank", "--lora.rank", "16"),
    "adapter, `lora.base_bits 4`": ("--lora.kind", "low_rank", "--lora.rank", "16", "--lora.base_bits", "4"),
}
"""What is trained -> settings."""
DEVICES = ("t4:1", "l4:1", "4090:1", "a100:1", "h100:8", "v5e:1x1", "v5e:2x4/8", "v6e:1x1", "v5p:2x2x1")
SIZES = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM3-3B", "Qwen/Qwen3-4B")
SIZES += ("google/gemma-4-E2B-it", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-14B")
SMALLEST = "--rollout.max_prompt_tokens 512 --rollout.max_response_tokens 1024 --batch.row_length 1536"
SMALLEST += " --update.remat full"


TIMES = "<!-- generated times -->", "<!-- end of generated times -->"


def memory() -> str:
    """The page on memory, with its tables of what fits and of times made anew."""
    text = (DOCS / "memory.md").read_text(encoding="utf-8")
    rows = [
        (f"{model.partition('/')[2]} | {trained}", [memory_cell(model, words, device) for device in DEVICES])
        for model in SIZES
        for trained, words in TRAINED.items()
    ]
    text = with_table(text, TABLE, "model | trained", rows)
    rows = [(model.partition("/")[2], [seconds_cell(model, device) for device in DEVICES]) for model in SIZES]
    return with_table(text, TIMES, "model", rows)


def with_table(page: str, marks: tuple[str, str], title: str, rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The page with a table of devices between two marks."""
    before, after = marks
    head, _, rest = page.partition(before)
    lines = ["", f"| {title} | {' | '.join(f'`{name}`' for name in DEVICES)} |"]
    lines.append("|---" * (title.count("|") + 1) + "|" + "---|" * len(DEVICES))
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join([head + before, *lines, "", after]) + rest.partition(after)[2]


def deployed(model: str, words: Sequence[str], device: str, slots: int) -> Deployment:
    """A run of the smallest rows on a device, with parameters over as many devices as divide the model."""
    topology = parse_topology(device, {FRACTION: str(MOST_OF_A_GPU)})
    given = ["configs/qwen3_0_6b_gsm8k.yaml", "--model.path", model, *SMALLEST.split(), *words]
    given += ["--sharding.fsdp", str(topology.chips), "--batch.rows", str(topology.chips)]
    given += ["--rollout.slots", str(slots * topology.chips)]
    config = load_config(Config, given, prog="reference")
    return deployment_of(config, topology, "", True, 0.0)


def memory_cell(model: str, words: Sequence[str], device: str) -> str:
    """GB of the largest program, in bold where it fits."""
    deployment = deployed(model, words, device, 8)
    largest = max(estimate(deployment), key=lambda needs: needs.total)
    size = f"{largest.total / 1e9:.1f}"
    return f"**{size}**" if largest.fits(deployment.topology.chip) else size


def seconds_cell(model: str, device: str) -> str:
    """Seconds that a step with an adapter takes at least, and nothing where it does not fit."""
    deployment = deployed(model, TRAINED["adapter"], device, 32)
    programs, chip = estimate(deployment), deployment.topology.chip
    times = step_times(programs, deployment.work, chip)
    fits = times is not None and all(needs.fits(chip) for needs in programs)
    return f"{times.total:.0f}" if fits else "-"


PAGES = {"configuration.md": configuration, "api.md": api, "coming_from.md": coming_from, "memory.md": memory}
"""Name of every generated page -> what writes its content."""


if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write(), encoding="utf-8")

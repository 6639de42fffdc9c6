"""What settings of other projects are called here: one table, for messages and for the page docs/coming_from.md.

Its rows are in `other_names.csv`; this module imports nothing of the package. `tests/test_cli.py` checks every name
on their right side against the configuration.
"""

import csv
import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
CONFIG_DIR = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""Where the recipes are: inside the package when installed from a wheel, next to it in a checkout. Bare names such as
`toy.yaml` are looked up here too."""
CONTRIB_METHODS = _PACKAGE / "contrib" / "methods"
"""Recipes of methods that the core does not name. They are read, and named, as if they were in `methods/` of
`CONFIG_DIR`."""
CLOSE = 0.66
"""Least similarity (`difflib`) of a suggestion: `toi` and `toy` have 0.67, `learning_rate` and `final_ratio` 0.58. A
wrong suggestion costs more than none."""
CLOSE_ELSEWHERE = 0.8
"""The same for a name of another section than the key was written in: `foo` and `floor` have 0.75."""
CLOSE_ALONE = 0.75
"""The same for a key without a section: `hlep` and `help` have 0.75, `hello` and `tell` 0.67."""
SHORT = 4
"""Letters of a short word. One wrong letter makes another word of it (`tool` and `pool` have 0.75), so that it must be
closer; and at least so many letters make a beginning that stands for a whole name."""
MISSPELT = 0.9
"""The same for settings of other projects: `learnig_rate` and `learning_rate` have 0.96."""
# fmt: off
GENERIC = frozenset([
    "address", "alpha", "batch", "buffer", "by", "cache", "clean", "column", "command", "count", "data", "decay",
    "draw", "drop", "enable", "enabled", "eps", "epsilon", "epochs", "every", "factor", "file", "files", "filter",
    "floor", "form", "format", "function", "functions", "gamma", "groups", "high", "host", "id", "interval", "items",
    "keep", "length", "level", "limit", "log", "low", "masks", "max", "min", "mode", "model", "n", "name", "path",
    "penalty", "pool", "port", "problems", "process", "processes", "project", "rank", "ratio", "replace", "retries",
    "rules", "samples", "scale", "seconds", "settings", "shape", "share", "shuffle", "size", "source", "sources",
    "start", "state", "step", "steps", "stop", "strategy", "target", "targets", "tasks", "teacher", "threads",
    "threshold", "timeout", "type", "url", "value", "weight", "weights", "workers",
])
# fmt: on
"""Last parts of keys that mean nothing without their section: `renderer.name` is not `name`."""
METHOD = "a recipe"
"""Marks a setting of another project that chooses a method."""
ELSEWHERE = "elsewhere"
"""Stands for a project where a name is common in scripts of several."""
FLAGS = ("help", "dry-run", "preflight", "profile", "force")
"""Words of the command line that are no settings."""


@dataclass(frozen=True)
class OtherName:
    """A setting of another project."""

    project: str
    theirs: str
    ours: str
    """A setting of this project, `METHOD`, or empty if nothing corresponds."""
    note: str = ""
    """What differs, for readers of the page and of a message."""


def _read(file: Path) -> tuple[OtherName, ...]:
    with file.open(encoding="utf-8", newline="") as rows:
        return tuple(OtherName(**row) for row in csv.DictReader(rows))


OTHER_NAMES = _read(Path(__file__).with_suffix(".csv"))
"""The rows of `other_names.csv`: from TRL 1.16 (`GRPOConfig`), verl 0.9, google-tunix 0.1.7, prime-rl, OpenRLHF, SkyRL,
NeMo-RL and Unsloth in November 2026; last, names that are common in scripts of transformers, vLLM and others."""
OTHER_KINDS = {
    "low_var_kl": ("k3",),
    "kl": ("k3",),
    "mse": ("k2",),
    "seq_mean_token_mean": ("sequence_mean",),
    "seq_mean_token_sum": ("sequence_sum",),
    "constant_with_warmup": ("constant",),
    "ppo": ("clip",),
    "lora": ("low_rank",),
    "qlora": ("low_rank",),
    "async": ("stream",),
    "random": ("uniform",),
    "qwen": ("hermes", "chatml"),
    "qwen3_coder": ("xml",),
    "jinja": ("model",),
    "fp16": ("float16",),
    "half": ("float16",),
    "true": ("low_rank", "online", "std", "full", "auto"),
    "false": ("none", "off", "never"),
    "none": ("off", "never"),
    "no": ("none", "off", "never"),
    "yes": ("low_rank", "online", "std", "full", "auto"),
}
"""A choice in another project -> what it may be called here; the first that the setting has is meant."""

METHOD_NAMES = {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_passk": "pass_at_k",
    "pass_k": "pass_at_k",
    "drgrpo": "dr_grpo",
    "reinforce++": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "agentic_grpo": "grpo",
    "gspo_token": "gspo",
    "roc": "grpo_roc",
    "grporoc": "grpo_roc",
    "rstar2": "grpo_roc",
    "rstar2_agent": "grpo_roc",
    "dr.grpo": "dr_grpo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "geo_mean": "gmpo",
    "on_policy_distillation": "opd",
    "gkd": "opd",
}
"""Name of a method in another project -> its recipe."""
COMMAND_NAMES = {"rl": "train", "grpo": "train", "run": "train", "inference": "serve", "vllm_serve": "serve"}
COMMAND_NAMES |= {"eval": "evaluate", "generate": "chat", "init": "new", "env": "doctor", "convert": "export"}
COMMAND_NAMES |= {"fit": "train", "resume": "train", "main_ppo": "train", "vf_eval": "evaluate", "vf_tui": "view"}
COMMAND_NAMES |= {
    "play": "chat",
    "ask": "chat",
    "tensorboard": "view",
    "logs": "view",
    "dashboard": "view",
    "ui": "view",
}
COMMAND_NAMES |= {"merge": "export", "model_merger": "export", "curves": "plot", "score": "check-reward"}
"""Command of another project -> the one here."""


def other_name(key: str) -> OtherName | None:
    """The setting of another project that matches a key, written in full, with a section before it, or
    without its own.

    Of several names that the key may stand for, the longest is meant; of several that end in the key, the shortest.
    """
    matches = [row for row in OTHER_NAMES if _stands_for(row.theirs, key)]
    if matches:
        return max(matches, key=lambda row: len(row.theirs))
    tails = [row for row in OTHER_NAMES if row.theirs.endswith(f".{key}")]
    return min(tails, key=lambda row: len(row.theirs), default=None)


def _stands_for(theirs: str, key: str) -> bool:
    """Whether a row's name is that of a key, after any sections; `section.*` is every key of a section."""
    if theirs.endswith("*"):
        return f".{theirs[:-1]}" in f".{key}"
    return key == theirs or key.endswith(f".{theirs}")


def _misspelt(key: str) -> OtherName | None:
    """The setting of another project whose last part is spelt nearly like that of `key`."""
    tail = key.rpartition(".")[2]
    if tail in GENERIC:
        return None
    ratio, row = max(
        ((_alike(row.theirs.rpartition(".")[2], tail), row) for row in OTHER_NAMES), key=lambda pair: pair[0]
    )
    return row if ratio >= MISSPELT else None


def recipe_of(name: object) -> str:
    """The recipe of a method, `methods/NAME.yaml`; empty if there is none of that name."""
    plain = str(name).strip().lower().replace("-", "_").replace(" ", "_").removesuffix(".yaml")
    plain = METHOD_NAMES.get(plain, plain)
    folders = (CONFIG_DIR / "methods", CONTRIB_METHODS)
    exists = plain.isidentifier() and any((folder / f"{plain}.yaml").is_file() for folder in folders)
    return f"methods/{plain}.yaml" if exists else ""


def near_choice(name: object, choices: Collection[str]) -> str:
    """The choice that was most likely meant: what another project's is called here, else the nearest spelling; empty if
    neither exists."""
    meant = OTHER_KINDS.get(str(name).lower().replace("-", "_"))
    if meant is None:
        return close_to(str(name), choices)
    return next((choice for choice in meant if choice in choices), "")


def use_recipe(name: object) -> str:
    """Advice to take the recipe of a method; empty if there is none."""
    recipe = recipe_of(name)
    return f"{name} is a recipe: `grpo-roc train {recipe}`, or copy its few settings" if recipe else ""


def advice(key: str, value: object, known: Collection[str]) -> str:
    """What to write instead of an unknown key: the counterpart of another project's setting, else the nearest key;
    empty if there is neither.

    Args:
        key: The key as it was written, `section.field`.
        value: Its value; the name of a method leads to its recipe.
        known: Every setting.
    """
    near = nearest(key, list(known))
    if text := counterpart(key, value, known, misspelt=not near):
        return text
    if near:
        return f"did you mean '{near}'?"
    flags = [flag for flag in FLAGS if _alike(flag, key.replace("_", "-")) >= CLOSE_ALONE]
    return f"did you mean '--{flags[0]}'?" if flags else use_recipe(value)


def counterpart(key: str, value: object, known: Collection[str], misspelt: bool = False) -> str:
    """What another project's setting is called here, as a part of a message; empty if no project has it.

    Args:
        key: The key as it was written.
        value: Its value; the name of a method leads to its recipe.
        known: Every setting.
        misspelt: Whether a name of another project may be misspelt.
    """
    row = other_name(key) or (_misspelt(key) if misspelt else None)
    if row is None or (row.ours not in known and row.ours and row.ours != METHOD):
        return ""
    note = f" ({row.note})" if row.note else ""
    beside = f"{key.rpartition('.')[0]}.{row.ours.rpartition('.')[2]}"
    if (
        row.ours and beside in known and beside != row.ours
    ):  # the section that was written has one of this name: `sft.lr`
        return f"did you mean '{beside}'?"
    if row.ours == METHOD:
        return use_recipe(value) or f"a method is a recipe here: {row.note or 'configs/methods/NAME.yaml'}"
    if not row.ours:
        theirs = row.theirs if row.project == ELSEWHERE else f"{row.project}'s {row.theirs}"
        return f"{theirs} has no counterpart: {row.note}"
    return f"did you mean '{row.ours}'{note}?"


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that was most likely meant by `key`; empty if none is close.

    A similar spelling in the section that was written comes first, then the beginning of one name there
    (`sampling.temp`), a name elsewhere that begins with the section (`eval.problems`, `data.eval_problems`), the right
    name in another section, the key without its separators (`groupsize`), and a very similar spelling elsewhere.
    """
    section, _, tail = key.rpartition(".")
    vague = section and tail in GENERIC
    ours = not section or section.partition(".")[0] in {name.partition(".")[0] for name in known}
    near = [name.rpartition(".")[2] for name in known if section and name.rpartition(".")[0] == section]
    if close := close_to(tail, [name for name in near if _same_words(name, tail) or _same_words(tail, name)]):
        return f"{section}.{close}"
    begun = [other for other in dict.fromkeys(near) if len(tail) >= SHORT and other.startswith(tail)]
    if len(begun) == 1:
        return f"{section}.{begun[0]}"
    if at := [name for name in known if section and name.endswith(f".{section.rpartition('.')[2]}_{tail}")]:
        return at[0]
    same = [name for name in known if name.rpartition(".")[2] == tail]
    if tail in GENERIC:  # without a section either, it does not mean a setting deep in another one
        same = [name for name in same if name.count(".") <= 1]
    if same and ((len(same) == 1 and ours) or len(tail) >= SHORT) and not vague:
        return min(same, key=lambda name: (name.count("."), known.index(name)))
    if joined := [name for name in known if _joined(name) == _joined(key)]:
        return joined[0]
    alike = {
        name: _alike(name.rpartition(".")[2], tail) for name in known if _same_words(tail, name.rpartition(".")[2])
    }
    here = [name for name in alike if section and _alike(name.rpartition(".")[0], section) >= CLOSE <= alike[name]]
    least = 1.0 if not ours else CLOSE_ELSEWHERE if section or len(tail) <= SHORT else CLOSE_ALONE
    far = tail in GENERIC or (len(tail) < SHORT and not ours)
    elsewhere = [name for name in alike if alike[name] >= least and not far]
    return max(here or elsewhere, key=lambda name: (alike[name], _alike(name, key), -name.count(".")), default="")


def _same_words(typed: str, name: str) -> bool:
    """Whether `typed` is `name` with its words misspelt, or with some of several words left out.

    A further word changes the meaning (`max_samples` is not `samples`), and so does another one (`eos_tokens` is not
    `kv_tokens`), however similar the letters.
    """
    left, right = typed.replace("-", "_").split("_"), name.split("_")
    if len(left) == len(right):
        return all(_alike(a, b) >= CLOSE for a, b in zip(left, right, strict=True))
    return (len(left) > 1 and set(left) < set(right)) or _joined(typed) == _joined(name)


def _joined(name: str) -> str:
    return name.replace(".", "").replace("_", "").replace("-", "").lower()


def _alike(left: str, right: str) -> float:
    return 1.0 if left == right else difflib.SequenceMatcher(None, left, right).ratio()


def close_to(name: str, names: Collection[str], cutoff: float = CLOSE) -> str:
    """The name with the most similar spelling; empty if none is close."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return near[0] if near else ""

"""Runs the arms of a study over worlds and seeds, and compares them: `python -m benchmarks.study NAME`.

A study of `benchmarks.studies` is a value: its question, arms, worlds and seeds. Each run is a process of
`python -m grpo_roc_jax.train` with a run directory of its own. All arms of a world and seed start from one cold start,
unless an arm changes its settings. Measures are taken from all sampled rollouts, before any selection.

    python -m benchmarks.study roc --worlds toy --jobs 2       # a second call continues; finished runs are skipped
    python -m benchmarks.study roc --worlds toy --report       # table and figure of the raw rows, nothing runs
    python -m benchmarks.study methods --arms grpo gspo --seeds 1   # recipes of configs/methods

Raw rows are kept in `benchmarks/results/study_NAME.jsonl.gz`, one run a line (`zcat` shows them). The table (`.md`) and
the figure (`.png`) of each world are made from them alone, and lie beside them.
"""

import argparse
import gzip
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy import stats

from benchmarks.studies import ERRORS, REWARD, STUDIES, TINY, Claim, Study, Words
from grpo_roc_jax.commands.plot import PANELS, PlotConfig, draw
from grpo_roc_jax.config import Config
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.run_dir import SUMMARY_FILE, environment, write_whole
from grpo_roc_jax.run.watch import DIVERGED_STATUS, NO_SIGNAL_STATUS
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.view.curves import USED, RunData, by_label, curve

ROOT = Path(__file__).resolve().parent.parent
ENOUGH_SEEDS = 8
"""Seeds from which on a claim can count as shown: with fewer no exact test over the signs reaches 5% after a correction
for several claims (five seeds of one sign come up by chance in 6% of the cases)."""
WINDOW = 5
"""Steps that a measure of training rollouts is averaged over, up to the end or the budget."""
TOOL_FREE = "rollout/tool_free_correct"
KEPT = {panel.metric for panel in PANELS} | {panel.dashed for panel in PANELS}
KEPT |= {metric for study in STUDIES.values() for _, metric, _ in study.measures}
KEPT |= {*USED.values(), "step", "rollout/tool_calls", "eval/all/tool_error_in_correct", TOOL_FREE}
KEPT_STARTS = ("eval/all/avg@", "eval/all/pass@")
PANELS_SHOWN = ("rollout/reward", ERRORS, "eval", "rollout/length")
RUN_WORDS = ("--log.console=off", "--log.traces=0", "--resume=auto")
STOPPED = {NO_SIGNAL_STATUS: "no learning signal", DIVERGED_STATUS: "diverged"}
"""Exit status -> why a run ended early because of what it trained. Such a run is a result and gets a row."""


@dataclass(frozen=True)
class Job:
    """One run: its place in the study, its settings, and its directories."""

    world: str
    arm: str
    seed: int
    words: Words
    """Files, then settings, without directories."""
    cold_words: Words
    """The same of its cold start; empty if the run begins without one."""
    folder: Path

    @property
    def key(self) -> tuple[str, str, int]:
        return self.world, self.arm, self.seed

    @property
    def run_dir(self) -> Path:
        return self.folder / self.world / self.arm / f"{self.seed}_{digest(self.words)}"

    @property
    def cold_dir(self) -> Path:
        return self.folder / self.world / "cold" / digest(self.cold_words)


def digest(words: Words) -> str:
    """Distinguishes settings, so that studies can share a folder."""
    return hashlib.blake2b(" ".join(words).encode(), digest_size=6).hexdigest()


def jobs_of(study: Study, folder: Path, *, tiny: bool = False) -> list[Job]:
    """The runs of a study, one seed after the other, so that what is finished early is balanced."""
    jobs = []
    for seed in study.seed_numbers:
        for arm, words in study.arms.items():  # worlds take turns, so that runs at once wait for no common cold start
            for world, base in study.worlds.items():
                common, specific = (*base, *study.words, *(TINY if tiny else ())), (*words, f"--seed={seed}")
                cold_words = cold_settings(common, specific) if study.cold else ()
                jobs.append(Job(world, arm, seed, ordered(common, specific), cold_words, folder))
    return jobs


def cold_settings(common: Words, specific: Words) -> Words:
    """The settings of an arm's cold start: those of the world, and those of the arm for data and supervised stage."""
    files = [word for word in specific if word.endswith(".yaml")]
    if files:
        with_files, without = (load_config(Config, ordered(common, some), prog="study") for some in (files, ()))
        files = files if (with_files.sft, with_files.data) != (without.sft, without.data) else []
    flags = [word for word in specific if word.startswith(("--sft.", "--data.", "--seed="))]
    return ordered(common, files, flags, ["--eval.samples=1"])


def ordered(*parts: Sequence[str]) -> Words:
    """All words, the files first."""
    words = [word for part in parts for word in part]
    return tuple(sorted(words, key=lambda word: not word.endswith(".yaml")))


class Runner:
    """Carries out jobs as processes; two jobs with one cold start wait for each other there."""

    def __init__(self) -> None:
        self._locks: dict[Path, threading.Lock] = {}
        self._guard = threading.Lock()

    def __call__(self, job: Job) -> dict[str, Any] | None:
        """The raw row of a job, continued where it was interrupted; None if the run failed."""
        status, log = None, log_of(job.run_dir)
        if not (job.run_dir / SUMMARY_FILE).exists():
            words = [*job.words, *RUN_WORDS, f"--run_dir={job.run_dir}"]
            model = self.cold_start(job) if job.cold_words else None
            if model is not None and not model.exists():
                log = log_of(job.cold_dir)
            else:
                words += [f"--model.path={model}", "--sft.steps=0"] if model else []
                status = execute(["train", *words], job.run_dir)
        finished = (job.run_dir / SUMMARY_FILE).exists()
        why = "" if finished else STOPPED.get(status, "")
        how = "done" if finished else f"stopped, {why}" if why else f"failed, see {log}"
        print(f"{' '.join(map(str, job.key))}: {how}", flush=True)
        return raw_row(job, why) if finished or why else None

    def cold_start(self, job: Job) -> Path:
        """The policy after the supervised stage, exported; its directory is missing if that failed."""
        cold, model = job.cold_dir, job.cold_dir / "model"
        with self._guard:
            lock = self._locks.setdefault(cold, threading.Lock())
        with lock:
            if not model.exists():
                ended = execute(["sft", *job.cold_words, *RUN_WORDS, f"--run_dir={cold}"], cold)
                if ended == 0:
                    execute(["export", str(cold), str(model), "--dtype=float32"], cold)
        return model


def execute(words: Sequence[str], run_dir: Path) -> int:
    """The exit status of a command of the package; what it prints is added to a file beside the run directory."""
    log = log_of(run_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "grpo_roc_jax", *words]
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode


def log_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def raw_row(job: Job, stopped: str = "") -> dict[str, Any]:
    """A run that ended as a line: what it was, why it stopped early, and its measures by step as columns."""
    summary = environment() if stopped else json.loads((job.run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    rows = read_metrics(job.run_dir)
    names = sorted({name for row in rows for name in row if name in KEPT or name.startswith(KEPT_STARTS)})
    columns = {name: [rounded(row.get(name)) for row in rows] for name in names}
    about = {name: summary.get(name) for name in ("commit", "device", "python", "versions", "seconds")}
    about |= {"stopped": stopped} if stopped else {}
    return {"world": job.world, "arm": job.arm, "seed": job.seed, "words": list(job.words), **about, "columns": columns}


def rounded(value: float | None) -> float | None:
    """The value with six digits; None for a step that has none."""
    return None if value is None or math.isnan(value) else float(f"{value:.6g}")


def read_rows(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Key of a job -> its raw row. Rows that an older version left uncompressed beside the file are read too."""
    plain = path.with_suffix("")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines() if path.exists() else []
    lines = plain.read_text(encoding="utf-8").splitlines() + lines if plain.exists() else lines
    return {(row["world"], row["arm"], row["seed"]): row for row in map(json.loads, lines)}


def taken_over(jobs: Sequence[Job], folder: Path) -> dict[Job, dict[str, Any]]:
    """Rows of other studies that trained with the same settings, under the names of these jobs."""
    trained = {
        tuple(row["words"]): row for path in sorted(folder.glob("study_*.jsonl.gz")) for row in read_rows(path).values()
    }
    about = {job: {"world": job.world, "arm": job.arm, "seed": job.seed} for job in jobs if job.words in trained}
    return {job: trained[job.words] | names for job, names in about.items()}


def save(path: Path, rows: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(rows[key]) + "\n" for key in sorted(rows))
    draft = path.with_name(f".{path.name}")
    draft.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same rows make the same file
    os.replace(draft, path)


def run_data(row: dict[str, Any]) -> RunData:
    """A raw row as figures read runs. A step without a call in a correct rollout has no share of failing ones."""
    names, columns = list(row["columns"]), row["columns"].values()
    rows = [
        {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for values in zip(*columns, strict=True)
    ]
    for metrics in rows:
        if metrics.get(TOOL_FREE) == 1 or metrics.get(REWARD) == 0:
            metrics.pop(ERRORS, None)
    settings = {"stopped": row["stopped"]} if "stopped" in row else {}
    return RunData(Path(f"{row['world']}/{row['arm']}/{row['seed']}"), rows, settings, row["arm"])


def value_at(run: RunData, metric: str, axis: str, budget: float) -> float:
    """Mean of a metric over the last steps within the budget; evaluations are interpolated at it. NaN if there is none.

    The last evaluation within the budget would not do: an arm that uses 1% more than the smallest total would be judged
    by an evaluation many steps earlier. The axis `first` gives the first value alone.
    """
    series = curve([run], metric, x="step" if axis == "first" else axis)
    reached = np.array([]) if series is None else series.mean[series.x <= budget]
    if not len(reached):
        return float("nan")
    if axis == "first":
        return float(reached[0])
    if metric.startswith("eval"):
        return float(np.interp(budget, series.x, series.mean))
    return float(np.mean(reached[-WINDOW:]))


def measured(study: Study, runs: dict[str, RunData]) -> dict[str, np.ndarray]:
    """Arm -> the measures of one seed. The budgets of its axes are the smallest totals among the arms that did not stop
    early."""
    budgets = {"step": float("inf"), "first": float("inf")}
    complete = [run for run in runs.values() if not run.settings.get("stopped")] or list(runs.values())
    for axis in USED:
        budgets[axis] = min(total(run, axis) for run in complete)
    return {
        arm: np.array([value_at(run, metric, axis, budgets[axis]) for _, metric, axis in study.measures])
        for arm, run in runs.items()
    }


def total(run: RunData, axis: str) -> float:
    """What a run has used in all, added up in the order of the steps as its curves do, so that equal means equal."""
    return float(np.cumsum([0.0, *(row.get(USED[axis], 0.0) for row in run.rows)])[-1])


def report(
    study: Study, rows: dict[tuple[str, str, int], dict[str, Any]], world: str, whole: Study | None = None
) -> str:
    """The table of a world over the seeds that every arm has finished, and the differences to the first arm. `whole` is
    the study with all of its arms and seeds, where `study` has a part of them."""
    seeds = [s for s in study.seed_numbers if all((world, arm, s) in rows for arm in study.arms)]
    if not seeds:
        return f"{world}: no seed is finished in every arm"
    by_seed = [measured(study, {arm: run_data(rows[world, arm, seed]) for arm in study.arms}) for seed in seeds]
    values = {arm: np.stack([measures[arm] for measures in by_seed]) for arm in study.arms}
    used = {arm: usage([run_data(rows[world, arm, seed]) for seed in seeds]) for arm in study.arms}
    first = next(iter(study.arms))
    titles = [title for title, _, _ in study.measures]
    head = ["arm", *titles, "thousand tokens sampled", "seconds"]
    lines = [
        f"World {world}, seeds {', '.join(map(str, seeds))}: mean ± standard deviation [95% interval of the mean]",
        "",
    ]
    lines += table(head, [[arm, *map(cell, values[arm].T), *used[arm]] for arm in study.arms])
    lines += [
        "",
        f"difference to `{first}`, paired by seed, with its 95% interval and the seeds that have its sign",
        "",
    ]
    others = [arm for arm in study.arms if arm != first]
    lines += table(["arm", *titles], [[arm, *map(difference, (values[arm] - values[first]).T)] for arm in others])
    return "\n".join([*lines, "", *verdicts(study, rows, world, whole or study), *remarks(study, rows, world)])


def gains(claim: Claim, study: Study, rows: dict[tuple[str, str, int], dict[str, Any]], world: str) -> np.ndarray:
    """For each seed that all arms have finished, how far the claim holds: above 0 it does. Empty if the study has not
    both arms of the claim."""
    if not {claim.arm, claim.other} <= set(study.arms):
        return np.array([])
    title, _, number = claim.measure.partition("#")
    column = [i for i, (name, _, _) in enumerate(study.measures) if name == title][int(number or 1) - 1]
    arms = (claim.arm, claim.other)
    seeds = [seed for seed in study.seed_numbers if all((world, arm, seed) in rows for arm in study.arms)]
    differences = []
    for seed in seeds:
        values = measured(study, {arm: run_data(rows[world, arm, seed]) for arm in study.arms})
        arm, other = (values[name][column] for name in arms)
        differences.append((other - arm if claim.below else arm - other) - claim.margin)
    return np.array([value for value in differences if not np.isnan(value)])


def verdict(values: np.ndarray, corrected: float) -> str:
    """What a study says of a claim, from `gains` and the corrected p value."""
    low, high = interval(values) if len(values) > 1 else (float("-inf"), float("inf"))
    if high < 0:
        return "refuted"
    if low > 0 and corrected < 0.05 and len(values) >= ENOUGH_SEEDS:
        return "shown"
    few = f", {len(values)} seeds of {ENOUGH_SEEDS}" if len(values) < ENOUGH_SEEDS and low > 0 else ""
    return f"undecided{few}"


def verdicts(study: Study, rows: dict[tuple[str, str, int], dict[str, Any]], world: str, whole: Study) -> list[str]:
    """A table of the claims of a study in one world. The correction is over all claims of the whole study in all of its
    worlds, so that no choice of arms, worlds or seeds makes it smaller; those that were not measured have p = 1."""
    shown = {claim: gains(claim, study, rows, world) for claim in study.claims}
    shown = {(claim, world): values for claim, values in shown.items() if len(values) > 1}
    pairs = [(claim, name) for name in whole.worlds for claim in whole.claims]
    values = [shown[pair] if pair in shown else gains(pair[0], whole, rows, pair[1]) for pair in pairs]
    ps = [sign_flip(some) if len(some) > 1 else 1.0 for some in values]
    cells = [
        [claim.text, difference(some), f"{p:.3f}", f"{q:.3f}", verdict(some, q)]
        for (claim, name), some, p, q in zip(pairs, values, ps, holm(ps), strict=True)
        if (claim, name) in shown
    ]
    if not cells:
        return []
    lines = [
        "",
        f"Claims: gain paired by seed [95% interval], exact p over signs, the same corrected for the {len(pairs)} "
        "claims of the study (Holm), verdict. Above 0 the claim holds.",
        "",
    ]
    return [*lines, *table(["claim", "gain", "p", "corrected", "verdict"], cells), ""]


def remarks(study: Study, rows: dict[tuple[str, str, int], dict[str, Any]], world: str) -> list[str]:
    """What a reader of the table must know: runs that are missing or stopped early, and the commits."""
    keys = [(world, arm, seed) for seed in study.seed_numbers for arm in study.arms]
    there = [rows[key] for key in keys if key in rows]
    missing = [f"{arm} {seed}" for _, arm, seed in keys if (world, arm, seed) not in rows]
    ended = [f"{row['arm']} {row['seed']} ({row['stopped']})" for row in there if row.get("stopped")]
    commits = sorted({(row.get("commit") or "unknown")[:10] for row in there})
    lines = [f"not finished, so their seeds are left out: {', '.join(missing)}"] if missing else []
    lines += [f"stopped early, with the values that they reached: {', '.join(ended)}"] if ended else []
    return [*lines, *outcomes(study, there), f"commits: {', '.join(commits)}"]


def outcomes(study: Study, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line with the runs of each arm that have the outcome of the study."""
    if study.outcome is None:
        return []
    counts = {arm: [0, 0] for arm in study.arms}
    for row in rows:
        first, last = (value_at(run_data(row), study.outcome.metric, at, float("inf")) for at in ("first", "step"))
        counts[row["arm"]][0] += study.outcome.holds(first, last)
        counts[row["arm"]][1] += 1
    return [f"{study.outcome.name}: " + ", ".join(f"{arm} {count} of {runs}" for arm, (count, runs) in counts.items())]


def usage(runs: Sequence[RunData]) -> tuple[str, str]:
    """Mean thousands of sampled tokens, and mean seconds in training steps."""
    tokens, seconds = (float(np.mean([total(run, axis) for run in runs])) for axis in ("tokens", "seconds"))
    return f"{tokens / 1e3:.0f}", f"{seconds:.0f}"


def cell(values: np.ndarray) -> str:
    """Mean, spread and 95% interval of the mean over seeds; the mean alone of one seed."""
    values = values[~np.isnan(values)]
    if not len(values):
        return "-"
    top = abs(values).max()
    form = ".1f" if top > 3 else ".3f" if top >= 1e-3 or top == 0 else ".1e"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    low, high = interval(values)
    return f"{values.mean():{form}} ± {values.std(ddof=1):{form}} [{low:{form}}, {high:{form}}]"


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% interval of the mean by Student's t with n - 1 degrees of freedom.

    Percentile bootstraps of five values cover their mean in 83% of the cases only, and of three in 74%.
    """
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def sign_flip(values: np.ndarray) -> float:
    """Two-sided p of the mean under every change of signs (exact; paired differences whose sign is chance)."""
    signs = 1.0 - 2.0 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
    means = np.abs(signs @ values)
    return float(np.mean(means >= abs(values.sum()) * (1 - 1e-9)))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm, 1979): at most 5% of true null hypotheses are rejected anywhere."""
    order = np.argsort(ps, kind="stable")
    corrected = np.maximum.accumulate([min(1.0, (len(ps) - rank) * ps[index]) for rank, index in enumerate(order)])
    adjusted = np.empty(len(ps))
    adjusted[order] = corrected
    return adjusted.tolist()


def difference(values: np.ndarray) -> str:
    """A cell with the number of seeds in which the difference has the sign of its mean."""
    values = values[~np.isnan(values)]
    return (
        f"{cell(values)} {int((values * values.mean() > 0).sum())}/{len(values)}" if len(values) > 1 else cell(values)
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def figure(study: Study, rows: dict[tuple[str, str, int], dict[str, Any]], world: str, path: Path) -> None:
    """Curves of a world over steps, sampled tokens and seconds, a row of panels each. An axis of which the seeds of an
    arm share no range is left out."""
    runs = [run_data(row) for (at, arm, _), row in sorted(rows.items()) if at == world and arm in study.arms]
    panels = [panel for panel in PANELS if panel.metric in PANELS_SHOWN]
    config = PlotConfig((world,), smooth=3, title=f"{study.question} ({world})")
    path.parent.mkdir(parents=True, exist_ok=True)
    over = [x for x in ("step", "tokens", "seconds") if shares_range(runs, x)]
    draw(runs, config, panels, over).savefig(path, dpi=80)
    with Image.open(path) as image:
        image.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)  # a quarter of the bytes


def shares_range(runs: Sequence[RunData], x: str) -> bool:
    """Whether the runs of every arm overlap on an axis, so that they can be averaged."""
    try:
        for members in by_label(runs).values():
            for metric in PANELS_SHOWN:
                curve(members, metric, x=x)
    except ValueError:
        return False
    return True


def chosen(study: Study, arguments: argparse.Namespace) -> tuple[Study, list[str]]:
    """The study with the arms and seeds of the command line, and the names of the worlds there.

    Raises:
        SystemExit: An arm or world does not exist.
    """
    picked: dict[str, Any] = {} if arguments.seeds is None else {"seeds": arguments.seeds}
    for name in ("arms", "worlds"):
        known, requested = getattr(study, name), getattr(arguments, name)
        unknown = sorted({*requested} - {*known})
        if unknown:
            sys.exit(f"--{name} {' '.join(unknown)}: not in this study; choose from {', '.join(known)}")
        picked[name] = {key: known[key] for key in requested or known}
    worlds = list(picked.pop("worlds"))
    return replace(study, **picked), worlds


def core_shares(jobs: int) -> list[set[int]]:
    """The processor cores of each of the runs at once. Runs that share all cores wait for each other's threads."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    size = len(cores) // jobs
    return [set(cores[at * size : (at + 1) * size]) if size else set(cores) for at in range(jobs)]


def stay_on(cores: set[int]) -> None:
    """Keeps the calling thread, and the processes that it starts, on these cores; no cores leave it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def main(argv: Sequence[str] | None = None, study: Study | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(STUDIES) if study is None else None)
    parser.add_argument("--arms", nargs="+", default=[], help="all by default; differences are to the first one")
    parser.add_argument("--worlds", nargs="+", default=[], help="all by default")
    parser.add_argument("--seeds", type=int, default=None, help="how many; those of the study by default")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything works")
    parser.add_argument("--folder", default="runs/studies", help="run directories; cold starts are shared there")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results"), help="folder of raw rows and figures")
    parser.add_argument("--report", action="store_true", help="only show the table and draw the figures")
    arguments = parser.parse_args(argv)
    whole = study or STUDIES[arguments.name]
    study, worlds = chosen(whole, arguments)
    path = Path(arguments.out) / f"study_{arguments.name}.jsonl.gz"
    rows, jobs = read_rows(path), jobs_of(study, Path(arguments.folder).resolve(), tiny=arguments.tiny)
    jobs = [job for job in jobs if job.world in worlds]
    for job in jobs:
        if job.key in rows and rows[job.key]["words"] != list(job.words):
            sys.exit(f"{path}: {' '.join(map(str, job.key))} was run with other settings; name another --out")
    if not study.timed:
        rows |= {job.key: row for job, row in taken_over(jobs, path.parent).items() if job.key not in rows}
    if rows:
        save(path, rows)
    missing = [] if arguments.report else [job for job in jobs if job.key not in rows]
    shares = core_shares(arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs, initializer=lambda: stay_on(shares.pop())) as pool:
        for row in pool.map(Runner(), missing):
            if row is not None:
                rows = read_rows(path) | rows | {(row["world"], row["arm"], row["seed"]): row}  # others write it too
                save(path, rows)
    print(f"\n{study.question}\n")
    for world in worlds:
        text = report(study, rows, world, whole)
        print(text, end="\n\n")
        if any(key[0] == world for key in rows):
            named = path.with_name(f"study_{arguments.name}_{world}.md")
            write_whole(named, f"# {study.question}\n\n{text}\n")
            figure(study, rows, world, named.with_suffix(".png"))
    return int(not arguments.report and any(job.key not in rows for job in jobs))


if __name__ == "__main__":
    sys.exit(main())

"""Study `real`, its arms, measures and claims, on a published model on an accelerator, and the cost before any run.

    python -m benchmarks.study_published --model Qwen/Qwen2.5-0.5B-Instruct  # the cost alone
    python -m benchmarks.study_published --model Qwen/Qwen2.5-0.5B-Instruct --start --arms roc grpo --seeds 3
    python -m benchmarks.study_published --model meta-llama/Llama-3.2-1B-Instruct --recipe qwen3_0_6b_gsm8k data/math

The recipe is that of GSM8K. Further files over it bring other data, such as MATH, and `--set` adds settings to every
run: `--set data.sources=[world:chain:2] data.eval_sources=[] data.trace_sources=[]` trains on generated problems.

Every arm starts from the same supervised stage, or from the model if `sft.steps` is 0. The cost is the lower bound of
`plan` by formulas: real steps take longer, and supervised steps, evaluations and compilation are not in it. Further
words are those of `benchmarks.study`.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.studies import COMMON, FIRST_ERRORS, GRPO, STUDIES, TRUNCATED, Study, Words
from benchmarks.study import chosen, ordered
from benchmarks.study import main as run_study
from grpo_roc_jax.config import Config
from grpo_roc_jax.planner.plan import deployment_of, describe, needs_of
from grpo_roc_jax.planner.topology import parse_topology
from grpo_roc_jax.settings.cli import load_config


def published(model: str, recipe: Sequence[str], words: Words) -> Study:
    """The arms on the recipe's problems; the group of `grpo_2g` is twice the recipe's."""
    files = [name if name.endswith(".yaml") else f"{name}.yaml" for name in recipe]
    base = (*files, f"--model.path={model}", *words)
    config = load_config(Config, base, prog="study_published")
    real = STUDIES["real"]
    arms = {**real.arms, "grpo_2g": (*GRPO, f"--group.size={2 * config.group.size}")}
    name = model.rstrip("/").rpartition("/")[2]
    question = f"Does resampling on correct lower failing calls of {name}, and what does it cost?"
    measures = (FIRST_ERRORS, *COMMON, TRUNCATED)
    cold, words = config.sft.steps > 0, ("--eval.samples=4",)
    return Study(question, arms, {name: base}, 3, words, measures, cold, claims=real.claims)


def cost_lines(study: Study, topology: str, shape: str, response: float) -> list[str]:
    """The least accelerator hours of each arm and of all of them, over all seeds."""
    pod, lines, total = parse_topology(topology), [], 0.0
    for arm, arm_words in study.arms.items():
        words = ordered(next(iter(study.worlds.values())), study.words, arm_words)
        config = load_config(Config, words, prog="study_published")
        deployment = deployment_of(config, pod, shape, True, response)
        report = describe(deployment, needs_of(deployment, (), print), ())
        hours = report["step_s"]["total"] * config.steps * pod.chips / 3600
        total += hours * study.seeds
        fits = "" if report["fits"] else ", which do not fit its memory"
        lines.append(f"{arm}: {hours:.3f} accelerator hours for {config.steps} steps on {topology}{fits}")
    return [*lines, f"all arms with {study.seeds} seeds: at least {total:.1f} accelerator hours"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="directory or hub id of a published model")
    parser.add_argument("--recipe", nargs="+", default=["qwen3_0_6b_gsm8k"], help="files of settings, later ones win")
    parser.add_argument("--topology", default="h200:1", help="what the cost is estimated for, as in plan")
    parser.add_argument("--model_shape", default="", help="as in plan, for a model that is not on this machine")
    parser.add_argument("--mean_response", type=float, default=0.0, help="tokens; default: half of the longest")
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.FIELD=VALUE", help="settings of every run")
    parser.add_argument("--arms", nargs="+", default=[], help="all by default; differences are to the first one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", action="store_true", help="train; without it only the cost is shown")
    options, rest = parser.parse_known_args(argv)
    full = published(options.model, options.recipe, tuple(f"--{word}" for word in options.set))
    study, _ = chosen(full, argparse.Namespace(arms=options.arms, worlds=[], seeds=options.seeds))
    print("\n".join(cost_lines(study, options.topology, options.model_shape, options.mean_response)), flush=True)
    return run_study([f"real_{next(iter(study.worlds))}", *rest], study) if options.start else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plan a run for a pod that is not attached: `grpo-roc plan CONFIG.yaml --topology v5p:4x4x4` (see `planner.plan`)."""

import argparse
import json
import sys
from collections.abc import Sequence

import jax

from grpo_roc_jax.config import DEFAULT_CONFIG, Config
from grpo_roc_jax.planner.plan import chosen_stages, plan
from grpo_roc_jax.planner.topology import TopologyError
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.settings.cli import ConfigError, load_config

FITS, DOES_NOT_FIT, BAD_CONFIG = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 fits, 1 does not fit, 2 the configuration cannot run."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words:
        arguments().print_help()
        return FITS
    options, rest = arguments().parse_known_args(words)
    jax.config.update("jax_platforms", "cpu")  # nothing runs, so leave the devices of this machine free
    jax.config.update("jax_enable_compilation_cache", False)  # programs for other devices cannot be read back
    try:
        out = output_file("--out", options.out) if options.out else None
        config = load_config(Config, rest, prog="grpo-roc plan", default_file=DEFAULT_CONFIG)
        reports = [plan(stage_report, options) for stage_report in chosen_stages(config, options.stage)]
    except (ConfigError, TopologyError, ValueError) as error:
        print(f"configuration: {error}", file=sys.stderr)
        return BAD_CONFIG
    report = reports[0]
    if len(reports) > 1:
        lines = [line for stage_report in reports for line in stage_report["lines"]]
        report = {
            "plan": config.name,
            "fits": all(stage_report["fits"] for stage_report in reports),
            "stages": reports,
            "lines": lines,
        }
    print(json.dumps(report) if options.json else "\n".join(report["lines"]))
    if out:
        try:
            write_output("--out", out, json.dumps(report, indent=1) + "\n")
        except ValueError as error:
            print(error, file=sys.stderr)
            return BAD_CONFIG
    return FITS if report["fits"] else DOES_NOT_FIT


def arguments() -> argparse.ArgumentParser:
    """Options of this command; everything else belongs to the configuration."""
    parser = argparse.ArgumentParser(
        prog="grpo-roc plan",
        usage="%(prog)s CONFIG.yaml --topology h100:8 (or t4:1, v5e:2x2, v5p:4x4x4) [options] [--section.field value]",
        description="Plan a run for a pod that is not attached; exit status 0: fits, 1: does not, 2: cannot run.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--topology", required=True, help="v5p:4x4x4, v5e:1x1, v5e:2x4/8, v6e:8x8:2, h200:8, ...")
    parser.add_argument("--model_shape", default="", help="hub id of a known model, or the path of a config.json")
    parser.add_argument("--stage", default="", help="name of one stage of the run; default: all, one after the other")
    parser.add_argument("--arithmetic", action="store_true", help="by formulas instead of the compiler")
    parser.add_argument("--mean_response", type=float, default=0.0, help="tokens; default: half of the longest")
    parser.add_argument("--programs", default="", help="kinds to plan, separated by commas; default: all")
    parser.add_argument("--suggest", action="store_true", help="the fastest mesh, slots, rows and remat that fit")
    parser.add_argument("--simulate", action="store_true", help="steps with rows of unequal length, from these costs")
    parser.add_argument("--traces", default="", help="a run whose rows --simulate takes; default: log-normal lengths")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--out", default="", help="also write the JSON here")
    return parser

"""Settings of the data stage: sources, their mixture, held-out problems, demonstrations."""

import re
from dataclasses import field
from pathlib import Path
from typing import Literal

from grpo_roc_jax.data.generated import generator_of
from grpo_roc_jax.settings.options import Count, NotNegative, Positive, Seed, settings


@settings
class DemonstrationConfig:
    """Shares of the kinds of demonstration; they are scaled to add up to 1.

    The defaults leave a small policy with four answers of ten right and four calls of ten failing (343 200 parameters,
    250 supervised steps of 32 traces of the default worlds): room for the reward and for resampling.
    """

    guess: NotNegative = 0.35
    """Answers without a call, mostly wrong."""
    repair: NotNegative = 0.35
    """A failing call, its error message, then the call that works."""
    clean: NotNegative = 0.25
    """One call that works."""
    wrong: NotNegative = 0.05
    """One call that runs but computes something else, and an answer that trusts it."""

    def __post_init__(self) -> None:
        if not self.guess + self.repair + self.clean + self.wrong:
            raise ValueError("data.demonstrations: guess, repair, clean and wrong are all 0; one must be above 0")

    @property
    def shares(self) -> dict[str, float]:
        """Kind -> probability."""
        kinds = {name: getattr(self, name) for name in ("guess", "repair", "clean", "wrong")}
        total = sum(kinds.values())
        return {name: share / total for name, share in kinds.items()}


def split_name(source: str) -> tuple[str, str]:
    """(name, source) of `NAME=SOURCE`; the name is empty if there is none, as in the path of a file with `=` in it."""
    name, equals, path = source.partition("=")
    named = equals and re.fullmatch(r"[\w-]+", name) and not Path(source).expanduser().exists()
    return (name, path) if named else ("", source)


@settings
class DataConfig:
    """The sources of problems."""

    sources: tuple[str, ...] = ("world:products:1", "world:gcd:1", "world:powmod:1")
    """Training sources: `world:FAMILY:LEVEL` (generated), paths of .jsonl, .json or .parquet files,
    `hub:OWNER/NAME@REVISION:CONFIG:SPLIT` (the last two may be left out), `verifiers:TASKSET`, with settings as
    `verifiers:TASKSET?NAME=VALUE&NAME=VALUE`, or `harbor:DIR`, task directories of Harbor."""
    weights: tuple[Positive, ...] = ()
    """Share of each source in a batch, in the order of `sources`; empty: equal shares."""
    world_problems: Count = 0
    """Training problems of each world, visited again and again in new orders like the rows of a file. Methods with a
    memory of each problem (trackers, hint levels, success rates) need it. 0 never shows a problem twice."""
    eval_sources: tuple[str, ...] = ()
    """Held-out sources, `NAME=` before one names it in metrics. No problem or demonstration with the prompt of a row of
    a held-out file is trained on. Empty: the held-out side of the training worlds (a file has none; name one here)."""
    eval_problems: Count = 64
    """Held-out problems in all, spread evenly over the sources."""
    eval_seed: Seed = 0
    """Chooses the held-out problems; apart from the run's seed, so that runs are compared on the same problems."""
    shuffle: bool = True
    """Visit the rows of a file in a new random order each epoch; off keeps the order of the file."""
    prompt_column: str = ""
    """Column of the question, dots for nested ones; empty detects it among the names in common use."""
    answer_column: str = ""
    """Column of the reference answer, dots for nested ones; empty detects it."""
    bad_rows: Literal["drop", "fail"] = "drop"
    """What a row does that cannot be used, a problem whose prompt exceeds `rollout.max_prompt_tokens`, and a
    demonstration that exceeds `batch.row_length`, since nothing is cut: `drop` leaves it out, named and counted, `fail`
    stops the run. A source of which nothing is left stops it as well."""
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    """Kinds of the demonstrations that supervised fine-tuning learns from."""
    trace_sources: tuple[str, ...] = ()
    """Sources of supervised fine-tuning: worlds (demonstrated), or .jsonl, .json or .parquet files with `messages` (and
    `tools`); empty: `sources`."""
    trace_weights: tuple[Positive, ...] | None = None
    """Share of each of `trace_sources` in a batch, in their order; left out: equal shares."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; name a world such as world:products:1, or a file")
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"data.weights has {len(self.weights)} entries for {len(self.sources)} data.sources; "
                "give one each, or none for equal shares"
            )
        if self.trace_weights is not None and len(self.trace_weights) != len(self.trace_sources):
            raise ValueError(
                f"data.trace_weights has {len(self.trace_weights)} entries for {len(self.trace_sources)} "
                "data.trace_sources; give one each, or none for equal shares"
            )
        held_out = [split_name(source)[1] for source in self.eval_sources]
        both = {source for source in self.sources if generator_of(source) is None} & set(held_out)
        if both:
            raise ValueError(f"{', '.join(sorted(both))}: both in data.sources and data.eval_sources; hold one out")
        for source in (*self.sources, *held_out, *self.trace_sources):
            if generator := generator_of(source):
                generator.check(source)

"""Roofline model: whether programs fit into memory, and lower bounds on their times.

The time of a program is at least the longest of: its FLOPs over the peak, its memory traffic over the memory rate, and
the bytes it sends over the link rate. The programs of a step run one after the other. Nothing here is measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from grpo_roc_jax.planner.topology import Chip

GB = 1e9


@dataclass(frozen=True)
class Needs:
    """What one program needs on one device."""

    name: str
    arguments: float = 0.0
    """Bytes of its arguments."""
    results: float = 0.0
    aliased: float = 0.0
    """Bytes of results that reuse the memory of donated arguments."""
    temporaries: float = 0.0
    resident: float = 0.0
    """Bytes held on the device meanwhile, but not passed to the program."""
    flops: float = 0.0
    traffic: float = 0.0
    """Bytes to and from memory."""
    fixed_flops: float = 0.0
    """The part of `flops` that is the same however long the rows are."""
    fixed_traffic: float = 0.0
    collectives: dict[str, dict[str, float]] = field(default_factory=dict)
    """Kind -> runs, bytes of results, bytes that the device sends; `between`, where there are several slices, those of
    them that leave its slice; `links`, where it is known, the part of the chip's links that they take."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Runs of custom kernels by target; `flops` does not include their work."""
    largest_gather: float = 0.0
    """Bytes of the largest result of an all-gather."""
    gathered_from: str = ""
    compile_s: float = 0.0
    refused: str = ""
    """The compiler's message if the program does not fit; the other figures are then missing."""

    @property
    def total(self) -> float:
        """Bytes on the device while the program runs."""
        return self.resident + self.arguments + self.results - self.aliased + self.temporaries

    @property
    def moved(self) -> float:
        return sum(entry["moved"] for entry in self.collectives.values())

    @property
    def between(self) -> float:
        """Bytes that the device sends to other slices."""
        return sum(entry.get("between", 0.0) for entry in self.collectives.values())

    def times(self, chip: Chip) -> dict[str, float]:
        """Seconds of compute, memory traffic and communication within and between slices, each at its peak rate."""
        times = {
            "compute": self.flops / chip.flops,
            "memory": self.traffic / chip.memory_rate,
            "links": sum(
                (entry["moved"] - entry.get("between", 0.0)) / entry.get("links", 1.0)
                for entry in self.collectives.values()
            )
            / chip.link_rate,
        }
        return times | ({"network": self.between / chip.network_rate} if self.between else {})

    def seconds(self, chip: Chip) -> float:
        return max(self.times(chip).values())

    def seconds_at(self, chip: Chip, share: float, rows: float = 1.0) -> float:
        """A bound for rows that hold `share` of the tokens that the program was compiled for, and for `rows` of the
        rows. What does not depend on the tokens is fixed, and of that the FLOPs, which are those of each row, depend on
        the rows; communication is taken to depend on both."""
        share *= rows
        fixed = min(self.flops, self.fixed_flops)
        flops = share * (self.flops - fixed) + rows * fixed
        repeated = min(self.traffic, self.fixed_traffic)
        traffic = share * (self.traffic - repeated) + repeated
        times = replace(self, flops=flops, traffic=traffic).times(chip)
        links = max(times["links"], times.get("network", 0.0))
        return max(times["compute"], times["memory"], share * links)

    def fits(self, chip: Chip) -> bool:
        """Whether a tenth of the memory stays free, for what formulas leave out and for gaps between arrays."""
        return not self.refused and self.total <= chip.room_bytes


@dataclass(frozen=True)
class Work:
    """The amount of work in a training step."""

    problems: int
    sampled: int
    """Sampled trajectories of all problems."""
    kept: int
    """Trajectories that are trained on."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response."""
    samplers: int
    """Processes, or teams of them, that sample apart."""
    slots: int
    """Slots of one sampler."""
    chunk: int
    """Tokens that one run of the decode program draws for each row."""
    append_rows: int
    """Rows that one append writes, over all devices of a sampler."""
    micro_rows: int
    row_length: int
    fill: float
    """Share of a packed row that holds tokens."""
    updates: int
    """Optimizer steps, those of all epochs."""
    epochs: int = 1
    shards: int = 1
    """Parts that a sampler splits its slots into."""
    append_length: int = 0
    """Padded tokens of a row in the append that prompts are counted with; 0: as long as the mean prompt."""
    columns: int = 0
    """Columns of a row in the cache as the programs were compiled; 0: those of the mean row."""
    copies: int = 1
    """Blocks of a shard that one run of `copy` copies."""
    longest: float = 0.0
    """Tokens of the longest response; at least the mean."""
    ahead: int = 0
    """Further steps whose rollouts may be under way too."""

    @property
    def rollouts(self) -> float:
        """Rows that a sampler may have at a time."""
        return self.sampled / self.samplers * (1 + self.ahead)

    @property
    def decode_steps(self) -> float:
        """Decode steps of a sampler: all tokens over all slots, and no less than the longest response takes, unless
        rows of other steps fill its end."""
        longest = self.response if self.ahead else max(self.response, self.longest)
        return max(self.sampled / self.samplers * self.response / self.slots, longest)

    @property
    def live(self) -> float:
        """Mean number of rows of a decode step: at most the slots, and at most the rollouts of a sampler."""
        return self.sampled / self.samplers * self.response / self.decode_steps

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all optimizer steps in a training step."""
        tokens = self.kept * (self.prompt + self.response)
        once = math.ceil(tokens / (self.micro_rows * self.row_length * self.fill))
        return max(self.updates, self.epochs * once)

    @property
    def tokens(self) -> float:
        """Tokens sampled in a step."""
        return self.sampled * self.response


@dataclass(frozen=True)
class StepTimes:
    """Lower bounds on the parts of a training step, in seconds."""

    weight_sync: float
    prompts: float
    copies: float
    """Copies of the blocks of prompts that are not full, for the rows of their group."""
    decode: float
    update: float

    @property
    def total(self) -> float:
        return self.weight_sync + self.prompts + self.copies + self.decode + self.update


def step_times(programs: Sequence[Needs], work: Work, chip: Chip) -> StepTimes | None:
    """The bounds of a step; None if a program is missing or did not compile.

    `update` is one optimizer step over all its micro-batches, `decode` one chunk of every slot. Programs are compiled
    for the longest prompt, all slots and the largest cache, but rows are fewer and shorter: an append of prompts
    computes at least the mean prompt, and a decode step computes the rows that are live on average (`Work.live`) and
    reads what such a row holds on average while it is drawn, prompt + response/2. A program that is absent costs
    nothing.
    """
    by_kind: dict[str, Needs] = {}
    for needs in programs:  # the last of a kind counts: decoding of all rows, append to empty rows
        by_kind[kind_of(needs.name)] = needs
    if any(name not in by_kind or by_kind[name].refused for name in ("weight_sync", "append", "decode", "update")):
        return None
    appends = math.ceil(work.problems / work.samplers / work.append_rows)
    written = work.prompt / work.append_length if work.append_length else 1.0
    # A prompt that is longer takes several appends, each with its read of the weights.
    prompts = appends * max(1.0, written) * by_kind["append"].seconds_at(chip, min(1.0, written))
    share_read = min(1.0, (work.prompt + work.response / 2) / work.columns) if work.columns else 1.0
    return StepTimes(
        weight_sync=weight_sync_seconds(programs, chip),
        prompts=prompts,
        copies=_copies(by_kind, work, chip),
        decode=work.decode_steps / work.chunk * by_kind["decode"].seconds_at(chip, share_read, work.live / work.slots),
        update=work.updates * by_kind["update"].seconds(chip),
    )


def kind_of(program: str) -> str:
    """The name of a program up to the first slash."""
    return program.partition("/")[0]


def weight_sync_seconds(programs: Sequence[Needs], chip: Chip) -> float:
    """Seconds of a weight sync, in which `weight_sync/N` runs N times."""
    parts = [needs for needs in programs if kind_of(needs.name) == "weight_sync"]
    return sum(int(needs.name.partition("/")[2] or 1) * needs.seconds(chip) for needs in parts)


def _copies(by_kind: dict[str, Needs], work: Work, chip: Chip) -> float:
    """Seconds of `copy` in a step: every row but the first of a group copies the last block of its prompt."""
    if "copy" not in by_kind:
        return 0.0
    rows = (work.sampled - work.problems) / work.samplers / work.shards
    return math.ceil(rows / work.copies) * by_kind["copy"].seconds(chip)


def program_lines(programs: Sequence[Needs], chip: Chip) -> list[str]:
    """A table of memory, work and time with one program per line, followed by the collectives."""
    lines = [
        f"{'GB a chip':32}{'held':>8}{'args':>8}{'results':>8}{'aliased':>8}{'temps':>8}{'total':>8}"
        f"{'TFLOP':>13}{'traffic':>14}{'sent':>12}{'bound, ms':>13}"
    ]
    for needs in programs:
        if needs.refused:
            lines.append(f"{needs.name:32}{needs.resident / GB:8.2f}  refused by the compiler: {needs.refused}")
            continue
        sizes = (needs.resident, needs.arguments, needs.results, needs.aliased, needs.temporaries, needs.total)
        times = needs.times(chip)
        bound = max(times, key=lambda name: times[name])
        lines.append(
            f"{needs.name:32}"
            + "".join(f"{size / GB:8.2f}" for size in sizes)
            + f"{needs.flops / 1e12:13,.3f}{needs.traffic / GB:14,.2f}{needs.moved / GB:12,.2f}"
            + f"{1e3 * times[bound]:13,.2f} {bound}{'' if needs.fits(chip) else '  DOES NOT FIT'}"
        )
    for needs in programs:
        for kind, entry in sorted(needs.collectives.items()):
            lines.append(
                f"  {needs.name}: {kind} x {entry['runs']:.0f}, {entry['bytes'] / GB:.3f} GB, "
                f"{entry['moved'] / GB:.3f} GB leave a chip"
                + (f", {entry['between'] / GB:.3f} of them for other slices" if "between" in entry else "")
                + (f", over {entry['links']:.0%} of its links" if entry.get("links", 1.0) < 0.995 else "")
            )
        if needs.kernels:
            kernels = ", ".join(f"{name} x {runs:.0f}" for name, runs in sorted(needs.kernels.items()))
            lines.append(f"  {needs.name}: kernels whose FLOPs are not counted: {kernels}")
    return lines


def step_lines(times: StepTimes, work: Work, chips: int) -> list[str]:
    """The bounds of a step as text, with their assumptions."""
    return [
        f"step of at least {times.total:.1f} s: weight sync {times.weight_sync:.2f}, prompts {times.prompts:.2f}, "
        f"copies of the cache {times.copies:.2f}, decoding {times.decode:.1f}, update {times.update:.1f}; at most "
        f"{work.tokens / times.total:,.0f} sampled tokens/s, {work.tokens / times.total / chips:,.1f} a chip",
        f"assumed: every program at the peak of its bottleneck, no overlap between programs, no waiting for tools; "
        f"{work.sampled} trajectories of {work.prompt:.0f} + {work.response:.0f} tokens, the longest of "
        f"{max(work.longest, work.response):.0f}, on {work.samplers} x {work.slots} slots, {work.live:.0f} of them "
        f"busy on average and read as far as they are written "
        f"({work.chunk} tokens a decode run); {work.micro_batches} micro-batches "
        f"of {work.micro_rows} x {work.row_length} tokens filled to {work.fill:.0%}",
    ]

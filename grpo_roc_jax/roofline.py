"""From what programs need to whether they fit, and to times that no run can beat.

A program's time is at least the longest of its FLOPs over the peak, its bytes over the memory's rate, and what it sends
over the rate of its links; programs of a step follow each other. Nothing here has been measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_roc_jax.topology import Chip

GB = 1e9


@dataclass(frozen=True)
class Needs:
    """What one program needs on one device."""

    name: str
    arguments: float = 0.0
    """Bytes of what it is called with."""
    results: float = 0.0
    aliased: float = 0.0
    """Bytes of results that lie where donated arguments lay."""
    temporaries: float = 0.0
    beside: float = 0.0
    """Bytes that the run keeps meanwhile without giving them to this program."""
    flops: float = 0.0
    traffic: float = 0.0
    """Bytes to and from memory."""
    collectives: dict[str, dict[str, float]] = field(default_factory=dict)
    """Kind -> runs, bytes of results, bytes that leave the device."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Runs of custom kernels by target; their work is not in `flops`."""
    largest_gather: float = 0.0
    """Bytes of the largest result of an all-gather."""
    gathered_from: str = ""
    compile_s: float = 0.0
    refused: str = ""
    """What the compiler said when it found no room; the other figures are then missing."""

    @property
    def total(self) -> float:
        """Bytes on the device while it runs."""
        return self.beside + self.arguments + self.results - self.aliased + self.temporaries

    @property
    def moved(self) -> float:
        return sum(entry["moved"] for entry in self.collectives.values())

    def times(self, chip: Chip) -> dict[str, float]:
        """Seconds by what they are spent on, each at its peak."""
        return {
            "compute": self.flops / chip.flops,
            "memory": self.traffic / chip.memory_rate,
            "links": self.moved / chip.link_rate,
        }

    def seconds(self, chip: Chip) -> float:
        return max(self.times(chip).values())

    def fits(self, chip: Chip) -> bool:
        return not self.refused and self.total <= chip.memory_bytes


@dataclass(frozen=True)
class Work:
    """How much a training step asks for."""

    problems: int
    sampled: int
    """Trajectories of all problems."""
    kept: int
    """Of them trained on."""
    prompt: float
    """Tokens of a prompt, mean."""
    response: float
    """Tokens of a response, mean."""
    processes: int
    slots: int
    """Of one process."""
    chunk: int
    """Tokens of a row that one run of the decode program draws."""
    append_rows: int
    """Rows that one append writes, over the devices of a process."""
    micro_rows: int
    row_length: int
    fill: float
    """Share of a packed row that holds tokens."""
    updates: int

    @property
    def decode_steps(self) -> float:
        """Steps of a process: all slots busy, and at least one response long."""
        return max(self.sampled / self.processes * self.response / self.slots, self.response)

    @property
    def micro_batches(self) -> int:
        """Of all optimiser steps of a training step."""
        tokens = self.kept * (self.prompt + self.response)
        return max(self.updates, math.ceil(tokens / (self.micro_rows * self.row_length * self.fill)))

    @property
    def tokens(self) -> float:
        """Sampled in a step."""
        return self.sampled * self.response


@dataclass(frozen=True)
class StepTimes:
    """Lower bounds of a training step, seconds."""

    hand_over: float
    prompts: float
    decode: float
    update: float

    @property
    def total(self) -> float:
        return self.hand_over + self.prompts + self.decode + self.update


def step_times(programs: Sequence[Needs], work: Work, chip: Chip) -> StepTimes | None:
    """The bounds of a step; None where a program is missing or did not compile.

    `update` is the program over all micro-batches of one optimiser step, `decode` a chunk of every slot.
    """
    found: dict[str, Needs] = {}
    for needs in programs:  # decoding all rows and the append into empty ones come last of their kind
        found[needs.name.split("/")[0]] = needs
    if any(name not in found or found[name].refused for name in ("hand_over", "append", "decode", "update")):
        return None
    appends = math.ceil(work.problems / work.processes / work.append_rows)
    return StepTimes(
        hand_over=found["hand_over"].seconds(chip),
        prompts=appends * found["append"].seconds(chip),
        decode=work.decode_steps / work.chunk * found["decode"].seconds(chip),
        update=work.updates * found["update"].seconds(chip),
    )


def program_lines(programs: Sequence[Needs], chip: Chip) -> list[str]:
    """A table of memory, work and time, one program a line, and their collectives behind it."""
    lines = [
        f"{'GB a chip':32}{'beside':>8}{'args':>8}{'results':>8}{'aliased':>8}{'temps':>8}{'total':>8}"
        f"{'TFLOP':>13}{'traffic':>14}{'sent':>12}{'bound, ms':>13}"
    ]
    for needs in programs:
        if needs.refused:
            lines.append(f"{needs.name:32}{needs.beside / GB:8.2f}  refused by the compiler: {needs.refused}")
            continue
        sizes = (needs.beside, needs.arguments, needs.results, needs.aliased, needs.temporaries, needs.total)
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
            )
        if needs.kernels:
            said = ", ".join(f"{name} x {runs:.0f}" for name, runs in sorted(needs.kernels.items()))
            lines.append(f"  {needs.name}: kernels whose FLOPs are not counted: {said}")
    return lines


def step_lines(times: StepTimes, work: Work, chips: int) -> list[str]:
    """The bounds of a step in words, with what they assume."""
    return [
        f"step of at least {times.total:.1f} s: hand-over {times.hand_over:.2f}, prompts {times.prompts:.2f}, decoding "
        f"{times.decode:.1f}, update {times.update:.1f}; at most {work.tokens / times.total:,.0f} sampled tokens/s, "
        f"{work.tokens / times.total / chips:,.1f} a chip",
        f"assumed: every program at the peak of what bounds it, nothing overlapped between programs, no waiting for "
        f"tools; {work.sampled} trajectories of {work.prompt:.0f} + {work.response:.0f} tokens on {work.processes} "
        f"processes x {work.slots} slots, all of them busy at the largest cache ({work.chunk} tokens a decode run); "
        f"{work.micro_batches} micro-batches "
        f"of {work.micro_rows} x {work.row_length} tokens filled to {work.fill:.0%}",
    ]

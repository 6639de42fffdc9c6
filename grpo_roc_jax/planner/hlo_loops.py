"""Collectives that can hang: those in a loop, or a branch, that devices of their group need not leave together.

A value of a compiled program is described by the devices on which it is surely the same: one class number per device.
Arguments are the same where their sharding puts the same part, results of collectives where the groups receive the
same, everything else where all its operands are. A device that has left a loop takes no part in the collectives of the
next iteration, and the others wait for it forever.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.planner.hlo import HloModule, Instruction, device_groups
from grpo_roc_jax.planner.hlo_cost import KINDS

Classes = tuple[int, ...]
"""For each device, the number of the first device with the same value."""
Value = Any
"""`Classes`, or a list of values for a tuple."""

_APART = ("partition-id", "replica-id", "infeed", "recv", "rng")
_SAME_TUPLE = ("copy", "opt-barrier", "optimization-barrier")


def check_loops(module: HloModule, shardings: Sequence[jax.sharding.Sharding], name: str = "this program") -> None:
    """Checks that no collective is in a loop or branch whose condition differs between the devices of its group.

    Args:
        module: The compiled program.
        shardings: Of its arguments, the leaves of `jax.stages.Compiled.input_shardings`.
        name: For the message.

    Raises:
        ValueError: naming the computation, the collectives and what to change.
    """
    if problem := hanging(module, shardings):
        raise ValueError(
            f"{name} can hang, since the devices of a group need not reach these collectives equally often: "
            f"{'; '.join(problem)}. Gather the values before the loop, keep the exchange among devices that leave it "
            "together, or make its condition equal on all of them (an `any` over the mesh axis)"
        )


def hanging(module: HloModule, shardings: Sequence[jax.sharding.Sharding]) -> list[str]:
    """The collectives that `check_loops` refuses, as text."""
    search = _Search(module)
    parameters = sum(line.opcode == "parameter" for line in module.computations[module.entry].values())
    known = len(shardings) == parameters
    arguments = [placed(sharding, module.devices) for sharding in shardings] if known else [search.apart] * parameters
    search.call(module.entry, arguments, search.same)
    return list(search.found)


def placed(sharding: jax.sharding.Sharding, devices: int) -> Classes:
    """The classes of an argument. Unless it has a mesh of all devices or is replicated, it may differ everywhere."""
    if sharding.is_fully_replicated:
        return (0,) * devices
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size != devices:
        return tuple(range(devices))
    mesh, axes = sharding.mesh, [axis for part in sharding.spec if part for axis in np.atleast_1d(part)]
    places = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_names), -1)
    return _numbered(tuple(zip(*(places[mesh.axis_names.index(axis)].tolist() for axis in axes), strict=True)))


@lru_cache(maxsize=4096)
def _numbered(keys: tuple) -> Classes:
    first: dict[Any, int] = {}
    return tuple(first.setdefault(key, device) for device, key in enumerate(keys))


@lru_cache(maxsize=4096)
def _both(first: Classes, second: Classes) -> Classes:
    return first if first == second else _numbered(tuple(zip(first, second, strict=True)))


def _all(value: Value, start: Classes) -> Classes:
    """The classes in which every part of a value is the same."""
    if isinstance(value, tuple):
        return _both(start, value)
    for part in value:
        start = _all(part, start)
    return start


def _merged(first: Value, second: Value) -> Value:
    """Classes in which both are the same, part by part in a tuple."""
    if isinstance(first, list):
        others = second if isinstance(second, list) else [second] * len(first)
        return [_merged(a, b) for a, b in zip(first, others, strict=True)]
    return _all(second, first)


class _Search:
    """A walk through a program that follows every value."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.same, self.apart = (0,) * module.devices, tuple(range(module.devices))
        self.found: dict[str, None] = {}

    def call(self, name: str, arguments: list[Value], together: Classes) -> Value:
        """The result of a computation; `together` are the devices that reach it equally often."""
        values: dict[str, Value] = {}
        result: Value = self.same
        for line in self.module.computations[name].values():
            if line.opcode == "parameter":
                values[line.name] = arguments[int(line.operands[0])]
            else:
                operands = [values[operand] for operand in line.operands if operand in values]
                values[line.name] = self.result(line, operands, together, name)
            if line.root:
                result = values[line.name]
        return result

    def result(self, line: Instruction, operands: list[Value], together: Classes, inside: str) -> Value:
        if line.opcode in _APART:
            return self.apart
        if line.opcode == "tuple":
            return operands
        if line.opcode == "get-tuple-element":
            argument = operands[0]
            return argument[int(line.attribute("index"))] if isinstance(argument, list) else argument
        if line.opcode in _SAME_TUPLE and len(operands) == 1:
            return operands[0]
        if line.opcode == "while":
            return self.loop(line, operands[0], together)
        if line.opcode == "conditional":
            return self.branches(line, operands, together)
        if line.opcode.removesuffix("-start") in KINDS:
            return self.exchanged(line, _all(operands, self.same), together, inside)
        called = [name for name in line.called() if name in self.module.computations]
        if called and line.opcode in ("fusion", "call", "async-start"):
            return self.call(called[0], operands, together)
        return _all(operands, self.same)

    def loop(self, line: Instruction, state: Value, together: Classes) -> Value:
        condition, body = (line.attribute(key).lstrip("%") for key in ("condition", "body"))
        while True:
            going = _all(self.call(condition, [state], together), together)
            self.call(condition, [state], going)  # for the collectives of the condition itself
            after = _merged(state, self.call(body, [state], going))
            if after == state:
                return state if going == together else _merged(state, going)
            state = after

    def branches(self, line: Instruction, operands: list[Value], together: Classes) -> Value:
        classes = _all(operands[0], together)
        results = [self.call(name, [part], classes) for name, part in zip(line.called(), operands[1:], strict=True)]
        merged = results[0]
        for result in results[1:]:
            merged = _merged(merged, result)
        return merged if classes == together else _merged(merged, classes)

    def exchanged(self, line: Instruction, value: Classes, together: Classes, inside: str) -> Classes:
        """The result of a collective, which is reported if not all of a group take part."""
        kind = line.opcode.removesuffix("-start")
        everyone = [list(range(self.module.devices))]
        groups = device_groups(line.rest) or everyone
        # All devices take part in a permute, whatever its pairs are.
        waiting = everyone if kind == "collective-permute" else groups
        if any(len({together[device] for device in group}) > 1 for group in waiting):
            source = re.search(r'op_name="([^"]*)"', line.rest)
            self.found[f"{kind} %{line.name} in %{inside}" + (f" ({source[1]})" if source else "")] = None
        keys: list[Any] = [-1] * self.module.devices
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line.rest)
            for source, target in re.findall(r"(\d+),(\d+)", pairs[1] if pairs else ""):
                keys[int(target)] = value[int(source)]
        else:
            for group in groups:
                received = tuple(value[device] for device in group)
                for at, device in enumerate(group):
                    keys[device] = received if kind in ("all-reduce", "all-gather") else (at, received)
        return _numbered(tuple(keys))

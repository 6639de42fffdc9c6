"""Which links a collective uses, and the figures of devices that a page states."""

import re
from pathlib import Path

import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.planner.estimate import abstract_mesh
from grpo_roc_jax.planner.hlo_cost import Collective, Cost
from grpo_roc_jax.planner.links import Torus, axis_shares, torus_of
from grpo_roc_jax.planner.topology import CHIPS, GIB, parse_topology
from grpo_roc_jax.settings.cli import load_config


def mesh_on(topology, **axes):
    sizes = {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1} | axes
    words = ["toy.yaml", *(f"--sharding.{name}={size}" for name, size in sizes.items())]
    return abstract_mesh(load_config(Config, words, prog="test"), topology)


@pytest.mark.parametrize(
    ("name", "axes", "expected"),
    [
        # All chips of a slice send over all of its links.
        ("v5p:4x4x4", {"fsdp": 64}, {"": 1.0, "tensor": 1.0}),
        # A host of 2 x 2 chips has one link of a chip along each of two sides, of six in the slice; the hosts lie 1.25
        # links apart, and use all three sides.
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, {"": 1 / 1.25, "tensor": 2 / 6}),
        # v6e:8x8 has lines: 2 x 7/8 links along each side.
        ("v6e:8x8", {"fsdp": 16, "tensor": 4}, {"": 1 / 2, "tensor": 2 / 3.5}),
        ("v5e:2x2", {"fsdp": 4}, {"": 1.0}),
        ("v5e:2x2", {"fsdp": 2, "tensor": 2}, {"": 0.5, "tensor": 0.5}),
        # Two devices are one chip; between slices there is the network, so `data` uses no link.
        ("v7x:2x2x1", {"tensor": 2, "fsdp": 4}, {"tensor": 1.0, "": 1.0}),
        ("v5p:2x2x1:2", {"data": 2, "fsdp": 4}, {"data": 1.0, "": 1.0}),
        # A switch and a bus have no sides.
        ("h200:8", {"fsdp": 4, "tensor": 2}, {"": 1.0, "tensor": 1.0}),
    ],
)
def test_a_collective_uses_the_links_along_the_sides_of_its_devices(name, axes, expected):
    topology = parse_topology(name, {})
    shares = axis_shares(mesh_on(topology, **axes), topology)
    assert {axis: shares[axis] for axis in expected} == pytest.approx(expected)


def test_a_ring_of_scattered_chips_shares_links():
    places = tuple((x, 0, 0) for x in range(4))
    torus = Torus(places, (0, 0, 0, 0), ring_side=4)
    assert torus.share([0, 1, 2, 3]) == 1.0
    assert torus.share([0, 1]) == pytest.approx(0.5), "one link of two"
    assert torus.share([0, 2]) == pytest.approx(0.5), "each step takes two links of the ring"


def test_collectives_of_a_kind_are_joined_by_their_times():
    gather = Collective("all-gather", 4e9, 4, 1.0, 0, "")
    cost = Cost(collectives=[gather, Collective("all-gather", 4e9, 4, 1.0, 0, "", links=0.5)])
    entry = cost.by_kind()["all-gather"]
    assert entry["moved"] == pytest.approx(6e9) and entry["links"] == pytest.approx(2 / 3)
    assert "links" not in Cost(collectives=[gather]).by_kind()["all-gather"]


def test_machines_that_are_no_blocks_have_no_torus():
    assert torus_of(mesh_on(parse_topology("v5e:1x1", {})), parse_topology("v5e:1x1", {})) is None


def test_the_page_states_the_figures_of_the_devices():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", Path("docs/plan.md").read_text(encoding="utf-8"), re.M)
    stated = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows if name in CHIPS}
    assert set(stated) == set(CHIPS)
    for name, chip in CHIPS.items():
        memory = chip.memory_bytes / GIB
        size = f"{memory:.0f} GiB" if memory == round(memory) else f"{chip.memory_bytes / 1e9:g} GB"
        network = f"{chip.network_rate / 1e9:g}" if chip.tpu else "-"
        figures = [size, f"{chip.flops / 1e12:g}", f"{chip.memory_rate / 1e9:g}", f"{chip.link_rate / 1e9:g}", network]
        assert stated[name][:-1] == [*figures, chip.source], name
        assert stated[name][-1] in ("read", "unverified")

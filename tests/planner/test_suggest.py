"""Pods by name, and what a plan advises: settings that fit, the fastest of a search, the devices that are here."""

import json
import re
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

from grpo_roc_jax.commands import plan as plan_command
from grpo_roc_jax.config import Config
from grpo_roc_jax.model.sharding import AXES, make_mesh
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.estimate import abstract_mesh, estimate
from grpo_roc_jax.planner.hlo_cost import Collective, Cost
from grpo_roc_jax.planner.links import Torus, axis_shares, torus_of
from grpo_roc_jax.planner.roofline import Needs, step_times
from grpo_roc_jax.planner.suggest import advice, deploy, room_lines, slot_lines, suggest
from grpo_roc_jax.planner.topology import CHIPS, GIB, TopologyError, has_compiler, parse_topology, topology_devices
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.policy import memory_parts
from grpo_roc_jax.settings.cli import load_config
from tests.helpers.planning import deployment
from tests.helpers.planning import platform_kept as platform_kept  # a fixture

QWEN3, LORA_7B = "configs/qwen3_0_6b_gsm8k.yaml", "configs/qwen2_5_7b_lora.yaml"


@pytest.mark.parametrize(
    ("words", "topology", "total_gb", "sent_gb"),
    [
        # 15.23 GB of frozen weights, 0.97 of the adapter with its moments, and the activations of 6 rows.
        ((LORA_7B, "--rollout.slots", "16", "--batch.rows", "6"), "l4:1", 22.8, 0.0),
        ((LORA_7B, "--batch.rows", "8"), "4090:8", 18.3, 0.323),
        ((QWEN3, "--model.path", "HuggingFaceTB/SmolLM3-3B"), "v5p:2x2x1", None, 12.3),  # all weights
    ],
)
def test_frozen_weights_are_counted_in_the_update_and_gradients_are_sent_once(words, topology, total_gb, sent_gb):
    run = deployment(*words, topology=topology)
    update, chip = estimate(run)[-1], run.topology.chip
    sent = update.collectives.get("all-reduce over data", {"bytes": 0.0, "runs": 0.0})
    assert sent["runs"] == (run.topology.chips > 1)
    assert sent["bytes"] / 1e9 == pytest.approx(sent_gb, rel=0.01)
    if total_gb:
        assert update.total / 1e9 == pytest.approx(total_gb, abs=0.1) and not update.fits(chip)
        assert chip.usable_bytes == 18e9
        run = deployment(LORA_7B, topology="l4:1", environ={"XLA_CLIENT_MEM_FRACTION": "0.9"})
        assert all(needs.fits(run.topology.chip) for needs in estimate(run)), "the card that the recipe names"


@pytest.mark.parametrize("topology", ["v6e:4x4", "v5e:2x2"])
def test_slots_that_no_rollout_fills_cost_nothing_and_are_named(topology):
    runs = [deployment(QWEN3, f"--rollout.slots={slots}", topology=topology) for slots in (64, 256, 440)]
    bounds = [step_times(estimate(run), run.work, run.topology.chip).decode for run in runs]
    rollouts = runs[0].work.sampled / runs[0].work.samplers
    beyond = [bound for run, bound in zip(runs, bounds, strict=True) if run.work.slots >= rollouts]
    assert all(bound == pytest.approx(beyond[0]) for bound in beyond)
    assert sorted(bounds, reverse=True) == pytest.approx(bounds), "more slots take no longer"
    for run in runs:
        assert run.work.live <= min(run.work.slots, rollouts)
        lines = slot_lines(run.config, run.work)
        assert bool(lines) is (run.work.slots > rollouts)
        assert all(f"set rollout.slots {rollouts:.0f}" in line for line in lines)


def test_decoding_takes_as_many_steps_as_the_longest_response():
    work = deployment("toy.yaml", "--rollout.slots", "4096").work
    assert work.decode_steps == work.longest == 2 * work.response
    few = deployment("toy.yaml", "--rollout.slots", "4").work
    assert few.decode_steps == few.sampled * few.response / 4 > few.longest and few.live == 4


@pytest.mark.parametrize(
    ("words", "topology"),
    [
        ((LORA_7B, "--batch.rows", "6"), "l4:1"),
        ((QWEN3, "--rollout.slots", "4096"), "v5e:1x1"),
        ((QWEN3, "--batch.rows", "256"), "v5e:2x2"),
        ((QWEN3,), "t4:1"),
        ((QWEN3, "--rollout.kv_tokens", "200000"), "v5e:1x1"),
    ],
)
def test_what_is_advised_fits(words, topology):
    """The last line is a command line: with these words the plan fits. None of these needs another policy."""
    run = deployment(*words, topology=topology)
    *before, last = advice(run, estimate(run))
    assert not {"--lora.kind", "--rollout.low_precision.cache"} & set(last.split())
    assert before and last.startswith("together, by arithmetic, it fits: ")
    advised = last.removeprefix("together, by arithmetic, it fits: ").split()
    environ = dict(word.split("=") for word in advised if word.startswith("XLA"))
    advised = [word for word in advised if not word.startswith("XLA")]
    again = deployment(*words, *advised, topology=topology, environ=environ)
    assert all(needs.fits(again.topology.chip) for needs in estimate(again))


def test_advice_goes_on_to_adapters_takes_compiled_programs_as_they_are_and_ends_where_nothing_helps():
    for model, card, end in (
        ("Qwen/Qwen3-14B", "a100:1", "--lora.kind low_rank"),
        ("Qwen/Qwen3-30B-A3B", "t4:1", "more chips, or chips with more memory"),
    ):
        run = deployment(QWEN3, "--model.path", model, topology=card)
        assert end in advice(run, estimate(run))[-1]
    run = deployment(QWEN3, "--batch.rows", "64", topology="v5e:2x2")
    *others, update = estimate(run)
    compiled = Needs("update", arguments=max(run.topology.chip.room_bytes + 1.0, update.total + 1e9))
    lines = advice(run, [*others, compiled])
    assert lines[0].startswith("update: ") and "fits" in lines[-1]
    refused = advice(run, [*others, Needs("update", refused="no room")])
    assert refused[0].startswith("update: refused by the compiler") and len(refused) > 1


def test_the_suggested_fit_and_none_of_the_same_mesh_is_faster():
    run = deployment(QWEN3, topology="v6e:2x2")
    best = suggest(run)
    assert len(best) == 3 and all(fit.fits for fit in best)
    assert [fit.seconds for fit in best] == pytest.approx(sorted(fit.seconds for fit in best), rel=0.01)
    assert len({tuple(fit.deployment.mesh.shape.values()) for fit in best}) == 3
    first = best[0]
    for change in ({"batch.rows": 64}, {"rollout.slots": 8}, {"update.remat": "none"}, {"update.remat": "full"}):
        other = deploy(run, first.settings | change)
        programs = estimate(other)
        if all(needs.fits(other.topology.chip) for needs in programs):
            assert step_times(programs, other.work, other.topology.chip).total >= 0.99 * first.seconds
    plain = step_times(estimate(run), run.work, run.topology.chip).total
    assert first.seconds <= plain, "the recipe is one of what was searched"


@pytest.mark.usefixtures("platform_kept")
def test_suggestions_are_yaml_over_the_recipe(tmp_path, capsys):
    words = ["configs/rstar2_qwen3_14b.yaml", "--stage", "8k", "--topology", "h200:8", "--arithmetic", "--suggest"]
    words += ["--sharding.sequence", "2"]
    assert plan_command.main(words) == plan_command.FITS  # whatever the mesh of the recipe
    _, first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("1. step of at least") and "bound by" in first
    yaml = [line[2:] for line in rest[: next(i for i, line in enumerate(rest) if line.startswith("2."))]]
    path = tmp_path / "over.yaml"
    path.write_text("\n".join(yaml) + "\n")
    config = load_config(Config, [QWEN3, str(path), "--sharding.sequence", "2"], prog="test")
    assert config.sharding.shape(8) and config.rollout.slots
    words = ["toy.yaml", "--topology", "v5e:4", "--arithmetic", "--suggest", "--json"]
    assert plan_command.main(words) == plan_command.FITS
    assert json.loads(capsys.readouterr().out)["suggested"][0]["settings"]["sharding.data"]


def test_a_run_says_what_does_not_fit_the_device():
    config = load_config(Config, ["toy.yaml", "--rollout.slots", "64"], prog="test")
    _, _, model, mesh, _ = check_components(config, make_registry(config))
    assert room_lines(config, model, mesh, 0.0) == [] == room_lines(config, model, mesh, 1e12)
    topology = parse_topology(f"v5e:{mesh.size}")
    run = planning.Deployment(config, model, mesh, topology, planning.work_of(config, mesh, topology, 0.0))
    by_name = {needs.name: needs for needs in estimate(run)}
    first, second, *_, last = room_lines(config, model, mesh, 0.9 * by_name["decode"].total)
    assert first.startswith("this device has too little memory") and second.split(":")[0] in by_name
    assert "fits" in last or "still too much" in last


def mesh_on(name, **axes):
    words = (f"--sharding.{axis}={axes.get(axis, 1)}" for axis in AXES)
    return abstract_mesh(load_config(Config, ["toy.yaml", *words], prog="test"), parse_topology(name))


@pytest.mark.parametrize(
    ("name", "rate", "chips", "processes", "bounds"),
    [
        ("v5p:4x4x4", 600e9, 64, 16, (2, 2, 1)),  # three rings
        ("v5p:2x2x1", 200e9, 4, 1, (2, 2, 1)),  # a neighbor along two sides: 2 of 6 links of 100 GB/s
        ("v5p:4x4x8", 600e9, 128, 32, (2, 2, 1)),
        ("v5p:4x4x4:2", 600e9, 128, 32, (2, 2, 1)),
        ("v5e:1x1", 200e9, 1, 1, (1, 1, 1)),  # nothing to send to
        ("v5e:2x2", 100e9, 4, 1, (2, 2, 1)),  # 2 of 4 links of 50 GB/s
        ("v5e:2x4", 125e9, 8, 2, (2, 2, 1)),
        ("v5e:2x4/8", 125e9, 8, 1, (2, 4, 1)),  # 1 + (1 + 2 + 2 + 1) / 4 of them
        ("v6e:8x8", 350e9, 64, 16, (2, 2, 1)),  # lines of eight: 2 (2 * 7 / 8) of 4 links of 100 GB/s
        ("v5e:16x16", 200e9, 256, 64, (2, 2, 1)),
        ("v7x:2x2x1", 100e9, 8, 1, (2, 2, 1)),
        ("b200:16", 900e9, 16, 2, None),
        ("H100:4", 450e9, 4, 1, None),
    ],
)
def test_pods_have_machines_slices_and_links(name, rate, chips, processes, bounds):
    pod = parse_topology(name)
    assert (pod.name, pod.chips, pod.processes) == (name.lower(), chips, processes)
    assert pod.chip.link_rate == pytest.approx(rate) and (bounds is None or pod.host_bounds() == bounds)


def test_pods_that_cannot_be_are_refused_memory_of_gpus_and_links_of_scattered_chips():
    names = "v5e:2x4/3 v5e:2x4/0 h200:8:2 v5e:3x2/4:0 v5p v9:2x2 v5e:2x v5e:0x2 h200:eight v5e:2x2x2 t4:2x2x2"
    for name in names.split():
        with pytest.raises(TopologyError, match=r"must be|slices are those of TPUs|at most 2 sides|a number of GPUs"):
            parse_topology(name)
    chip = parse_topology("h200:8", {}).chip
    assert chip.usable_bytes == 0.75 * 141e9 and parse_topology("v5e:2x2", {}).chip.usable_bytes == 16e9
    needs = Needs("update", arguments=110e9)
    assert not needs.fits(chip)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert needs.fits(parse_topology("h200:8", {name: "0.9"}).chip)
    for given in ("90", "90%", "0"):
        with pytest.raises(TopologyError, match=rf"XLA_CLIENT_MEM_FRACTION={given}; must be a number above 0"):
            parse_topology("h100:8", {"XLA_CLIENT_MEM_FRACTION": given})
    torus = Torus(tuple((x, 0, 0) for x in range(4)), (0, 0, 0, 0), ring_side=4)
    assert torus.share([0, 1, 2, 3]) == 1.0
    assert torus.share([0, 1]) == pytest.approx(0.5), "one link of two"
    assert torus.share([0, 2]) == pytest.approx(0.5), "each step takes two links of the ring"
    assert torus_of(mesh_on("v5e:1x1"), parse_topology("v5e:1x1")) is None
    gather = Collective("all-gather", 4e9, 4, 1.0, 0, "")
    entry = Cost(collectives=[gather, replace(gather, links=0.5)]).by_kind()["all-gather"]
    assert entry["moved"] == pytest.approx(6e9) and entry["links"] == pytest.approx(2 / 3)
    assert "links" not in Cost(collectives=[gather]).by_kind()["all-gather"]


def test_gpus_are_described_to_their_compiler_and_one_that_is_missing_is_named(monkeypatch):
    """Without it GPUs are planned by arithmetic, and TPUs are refused."""
    name, request, devices = "jax.experimental.topologies.get_topology_desc", {}, [object()] * 16
    monkeypatch.setattr(name, lambda **given: request.update(given) or SimpleNamespace(devices=devices))
    assert topology_devices(parse_topology("h200:16")) == devices
    assert (request["platform"], request["topology"]) == ("cuda", "1x2x8"), "two machines of eight"
    fields = dict(re.findall(r"(\w+): (\d+)", request["target_config"]))
    described = (fields["major"], fields["core_count"], fields["memory_bandwidth"])
    assert described == ("9", "132", str(4800 * 10**9))

    def missing(**given):
        raise RuntimeError(f"unknown platform {given['platform']}")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert has_compiler(parse_topology("v5e:2x2")) and not has_compiler(parse_topology("h200:8"))
    monkeypatch.setattr(name, missing)
    for pod, extra in (("h200:8", r"jax\[cuda"), ("v5e:2x2", r"jax\[tpu")):
        with pytest.raises(TopologyError, match=rf"unknown platform .*pip install '{extra}.*--arithmetic"):
            topology_devices(parse_topology(pod))


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
    shares = axis_shares(mesh_on(name, **axes), parse_topology(name))
    assert {axis: shares[axis] for axis in expected} == pytest.approx(expected)


def test_slices_are_blocks_along_data_between_which_only_sums_of_gradients_cross():
    """A run on several machines counts the memory of a device as its plan does."""
    words = ["configs/qwen3_0_6b_gsm8k.yaml", "--sharding.fsdp", "4"]
    one_slice, two_slices = deployment(*words, topology="v5e:2x4"), deployment(*words, topology="v5e:2x2:2")
    assert dict(one_slice.mesh.shape) == dict(two_slices.mesh.shape) and isinstance(two_slices.mesh, AbstractMesh)
    single, double = (estimate(run)[-1] for run in (one_slice, two_slices))
    assert single.between == 0.0 and double.moved == single.moved
    gradients = double.collectives["all-reduce over data"]
    # Two slices with one part of `data` each: all of it crosses, in both directions of the ring.
    assert double.between == gradients["moved"] == gradients["bytes"]
    assert double.times(two_slices.topology.chip)["network"] == pytest.approx(double.between / 3.125e9)
    with pytest.raises(ValueError, match=r"sharding.data = 1 over 2 slices"):
        deployment(*words[:-1], "8", topology="v5e:2x2:2")
    names = "id process_index slice_index platform device_kind coords"
    chip = make_dataclass("Chip", names.split(), frozen=True)
    chips = [chip(i, i // 4, i // 4, "tpu", "elsewhere", (i % 2, i // 2 % 2, 0)) for i in range(8)]
    run, split = (deployment("toy.yaml", f"--sharding.fsdp={n}", topology="v5e:2x2:2") for n in (1, 4))
    mesh = make_mesh(run.config.sharding, chips)
    assert memory_parts(run.config, run.model, mesh) == run.memory_parts()
    ordered = make_mesh(split.config.sharding, chips).devices
    assert [{d.slice_index for d in block.flat} for block in ordered] == [{0}, {1}]


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

"""What a plan advises: settings that are tried until they fit, the fastest of a search, the devices that are here."""

import json

import pytest
from jax.sharding import AbstractMesh

from grpo_roc_jax.commands import plan as plan_command
from grpo_roc_jax.config import Config
from grpo_roc_jax.model.sharding import make_mesh
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.estimate import active_parameters, estimate, update_flops
from grpo_roc_jax.planner.roofline import Needs, step_times
from grpo_roc_jax.planner.suggest import advice, deploy, room_lines, slot_lines, suggest
from grpo_roc_jax.planner.topology import TopologyError, parse_topology
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.policy import memory_parts
from grpo_roc_jax.settings.cli import load_config
from tests.helpers.planning import deployment
from tests.helpers.planning import platform_kept as platform_kept  # a fixture


@pytest.mark.parametrize(
    ("words", "topology", "total_gb", "usable_gb"),
    [
        # 15.23 GB of frozen weights, 0.97 of the adapter with its moments, and the activations of 6 rows.
        (["--rollout.slots", "16", "--batch.rows", "6"], "l4:1", 22.8, 18.0),
        (["--batch.rows", "8"], "4090:8", 18.3, 18.0),
    ],
)
def test_the_frozen_weights_of_an_adapter_are_counted_in_the_update(words, topology, total_gb, usable_gb):
    run = deployment("configs/qwen2_5_7b_lora.yaml", *words, topology=topology)
    update = estimate(run)[-1]
    assert update.total / 1e9 == pytest.approx(total_gb, abs=0.1) and not update.fits(run.topology.chip)
    assert run.topology.chip.usable_bytes == usable_gb * 1e9
    sent = update.collectives.get("all-reduce over data", {"bytes": 0.0, "runs": 0.0})
    assert sent["runs"] == (run.topology.chips > 1)
    assert sent["bytes"] / 1e9 == pytest.approx(0.323 if sent["runs"] else 0.0, abs=0.001)


def test_the_recipe_of_a_7b_adapter_fits_the_card_that_it_names():
    run = deployment("configs/qwen2_5_7b_lora.yaml", topology="l4:1", environ={"XLA_CLIENT_MEM_FRACTION": "0.9"})
    assert all(needs.fits(run.topology.chip) for needs in estimate(run))


def test_the_gradients_of_all_weights_are_sent_once():
    words = ["configs/qwen3_0_6b_gsm8k.yaml", "--model.path", "HuggingFaceTB/SmolLM3-3B"]
    sent = estimate(deployment(*words, topology="v5p:2x2x1"))[-1].collectives["all-reduce over data"]
    assert sent["runs"] == 1 and sent["bytes"] / 1e9 == pytest.approx(12.3, abs=0.1)


def test_an_adapter_takes_the_products_of_all_weights_but_those_of_their_gradients():
    full, adapter = deployment("toy.yaml"), deployment("toy.yaml", "--lora.kind", "low_rank", "--lora.rank", "1")
    given = {"tokens": 1.0, "length": 0.0}
    gradients = 2 * active_parameters(full.model)
    for remat in ("none", "full"):
        runs = (deploy(run, {"update.remat": remat}) for run in (full, adapter))
        all_of, less = (update_flops(run.config, run.model, **given) for run in runs)
        assert 0.8 < (all_of - less) / gradients < 1
    assert all_of < 4 * gradients, "the last product of a layer is not recomputed, nor are stored logits"


# ---- the bound of a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["v6e:4x4", "v5e:2x2"])
def test_slots_that_no_rollout_fills_cost_nothing_and_are_named(topology):
    runs = [
        deployment("configs/qwen3_0_6b_gsm8k.yaml", "--rollout.slots", str(slots), topology=topology)
        for slots in (64, 256, 440)
    ]
    bounds = [step_times(estimate(run), run.work, run.topology.chip).decode for run in runs]
    rollouts = runs[0].work.sampled / runs[0].work.samplers
    assert all(run.work.live <= min(run.work.slots, rollouts) for run in runs)
    beyond = [bound for run, bound in zip(runs, bounds, strict=True) if run.work.slots >= rollouts]
    assert all(bound == pytest.approx(beyond[0]) for bound in beyond)
    assert sorted(bounds, reverse=True) == pytest.approx(bounds), "more slots take no longer"
    for run in runs:
        lines = slot_lines(run.config, run.work)
        assert bool(lines) is (run.work.slots > rollouts)
        assert all(f"set rollout.slots {rollouts:.0f}" in line for line in lines)


def test_decoding_takes_as_many_steps_as_the_longest_response():
    work = deployment("toy.yaml", "--rollout.slots", "4096").work
    assert work.decode_steps == work.longest == 2 * work.response
    few = deployment("toy.yaml", "--rollout.slots", "4").work
    assert few.decode_steps == few.sampled * few.response / 4 > few.longest and few.live == 4


# ---- what makes it fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "topology"),
    [
        (["configs/qwen2_5_7b_lora.yaml", "--batch.rows", "6"], "l4:1"),
        (["configs/qwen3_0_6b_gsm8k.yaml", "--rollout.slots", "4096"], "v5e:1x1"),
        (["configs/qwen3_0_6b_gsm8k.yaml", "--batch.rows", "256"], "v5e:2x2"),
        (["configs/qwen3_0_6b_gsm8k.yaml"], "t4:1"),
        (["configs/qwen3_0_6b_gsm8k.yaml", "--rollout.kv_tokens", "200000"], "v5e:1x1"),
    ],
)
def test_what_is_advised_fits(words, topology):
    """The last line is a command line: with these words the plan fits. None of these needs another policy."""
    run = deployment(*words, topology=topology)
    lines = advice(run, estimate(run))
    *before, last = lines
    assert not {"--lora.kind", "--rollout.low_precision.cache"} & set(last.split())
    assert before and last.startswith("together, by arithmetic, it fits: ")
    advised = last.removeprefix("together, by arithmetic, it fits: ").split()
    environ = dict(word.split("=") for word in advised if word.startswith("XLA"))
    advised = [word for word in advised if not word.startswith("XLA")]
    again = deployment(*words, *advised, topology=topology, environ=environ)
    assert all(needs.fits(again.topology.chip) for needs in estimate(again))


def test_advice_goes_on_to_adapters_and_ends_where_nothing_helps():
    run = deployment("configs/qwen3_0_6b_gsm8k.yaml", "--model.path", "Qwen/Qwen3-14B", topology="a100:1")
    lines = advice(run, estimate(run))
    assert "--lora.kind low_rank" in lines[-1]
    run = deployment("configs/qwen3_0_6b_gsm8k.yaml", "--model.path", "Qwen/Qwen3-235B-A22B", topology="t4:1")
    assert "more chips, or chips with more memory" in advice(run, estimate(run))[-1]


def test_a_compiled_program_is_as_much_larger_than_its_estimate_with_other_settings():
    run = deployment("configs/qwen3_0_6b_gsm8k.yaml", "--batch.rows", "64", topology="v5e:2x2")
    *others, update = estimate(run)
    room, more = run.topology.chip.room_bytes, 1e9
    compiled = Needs("update", arguments=max(room + 1.0, update.total + more))
    lines = advice(run, [*others, compiled])
    assert lines[0].startswith("update: ") and "fits" in lines[-1]
    refused = advice(run, [*others, Needs("update", refused="no room")])
    assert refused[0].startswith("update: refused by the compiler") and len(refused) > 1


# ---- what is fastest -----------------------------------------------------------------------------------------------


def test_the_suggested_fit_and_none_of_the_same_mesh_is_faster(capsys):
    run = deployment("configs/qwen3_0_6b_gsm8k.yaml", topology="v6e:2x2")
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
    recipe = ["configs/qwen3_0_6b_gsm8k.yaml", str(path), "--sharding.sequence", "2"]
    config = load_config(Config, recipe, prog="test")
    assert config.sharding.shape(8) and config.rollout.slots


# ---- the devices that are here -------------------------------------------------------------------------------------


def test_a_run_says_what_does_not_fit_the_device():
    config = load_config(Config, ["toy.yaml", "--rollout.slots", "64"], prog="test")
    _, _, model, mesh, _ = check_components(config, make_registry(config))
    assert room_lines(config, model, mesh, 0.0) == [] == room_lines(config, model, mesh, 1e12)
    topology = parse_topology(f"v5e:{mesh.size}")
    run = planning.Deployment(config, model, mesh, topology, planning.work_of(config, mesh, topology, 0.0))
    decode = next(needs for needs in estimate(run) if needs.name == "decode")
    lines = room_lines(config, model, mesh, 0.9 * decode.total)
    assert lines[0].startswith("this device has too little memory") and lines[1].split(":")[0] in {
        needs.name for needs in estimate(run)
    }
    assert "fits" in lines[-1] or "still too much" in lines[-1]


# ---- pods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chips", "processes", "bounds"),
    [
        ("v5e:1x1", 1, 1, (1, 1, 1)),
        ("v5e:2x2", 4, 1, (2, 2, 1)),
        ("v5p:4x4x4", 64, 16, (2, 2, 1)),
        ("v5e:2x4", 8, 2, (2, 2, 1)),
        ("v5e:2x4/8", 8, 1, (2, 4, 1)),
        ("v5p:4x4x4:2", 128, 32, (2, 2, 1)),
        ("v7x:2x2x1", 8, 1, (2, 2, 1)),
        ("b200:16", 16, 2, None),
        ("h100:4", 4, 1, None),
    ],
)
def test_pods_have_machines_and_slices(name, chips, processes, bounds):
    pod = parse_topology(name)
    assert (pod.name, pod.chips, pod.processes) == (name, chips, processes)
    assert bounds is None or pod.host_bounds() == bounds


@pytest.mark.parametrize(
    "name", ["v5e:2x4/3", "v5e:2x4/0", "h200:8:2", "v5e:3x2/4:0", "v5p", "v9:2x2", "v5e:2x", "v5e:0x2", "h200:eight"]
)
def test_pods_that_cannot_be_are_refused(name):
    with pytest.raises(TopologyError, match=r"must be|slices are those of TPUs"):
        parse_topology(name)


@pytest.mark.parametrize(("name", "form"), [("v5e:2x2x2", "at most 2 sides"), ("t4:2x2x2", "a number of GPUs")])
def test_pods_have_the_sides_of_their_kind(name, form):
    with pytest.raises(TopologyError, match=form):
        parse_topology(name)
    assert parse_topology("v5p:2x2x2").chips == 8


def test_only_sums_of_gradients_cross_the_network_between_slices():
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
        deployment("configs/qwen3_0_6b_gsm8k.yaml", "--sharding.fsdp", "8", topology="v5e:2x2:2")


class ChipElsewhere:
    """A chip of two slices with one process each."""

    def __init__(self, index):
        self.id, self.process_index, self.slice_index = index, index // 4, index // 4
        self.platform, self.device_kind, self.coords = "tpu", "elsewhere", (index % 2, index // 2 % 2, 0)


def test_each_process_has_a_cache_of_its_own():
    """A run on several machines counts the memory of a device as its plan does."""
    run = deployment("toy.yaml", topology="v5e:2x2:2")
    mesh = make_mesh(run.config.sharding, [ChipElsewhere(i) for i in range(8)])
    assert memory_parts(run.config, run.model, mesh) == run.memory_parts()


def test_slices_are_blocks_along_data():
    devices = [ChipElsewhere(i) for i in range(8)]
    config = load_config(Config, ["toy.yaml", "--sharding.fsdp", "4"], prog="test")
    ordered = make_mesh(config.sharding, devices).devices
    assert [{d.slice_index for d in block.flat} for block in ordered] == [{0}, {1}]
    with pytest.raises(ValueError, match="over 2 slices"):
        make_mesh(load_config(Config, ["toy.yaml", "--sharding.fsdp", "8"], prog="test").sharding, devices)


@pytest.mark.usefixtures("platform_kept")
def test_reports_of_suggestions_are_json(capsys):
    assert plan_command.main(["toy.yaml", "--topology", "v5e:4", "--arithmetic", "--suggest", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["suggested"]) >= 1 and report["suggested"][0]["settings"]["sharding.data"]

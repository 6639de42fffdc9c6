"""`--preflight` compiles and counts what a run compiles and starts nothing; compiled programs are kept."""

import re

import jax
import pytest

from grpo_roc_jax import train
from grpo_roc_jax.engine.programs import ProgramCost
from grpo_roc_jax.planner.preflight import MIB, host_parts
from grpo_roc_jax.pod.program_cache import USUAL_MIN_S, keep_programs
from grpo_roc_jax.record.metrics import CompilationCounter
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.policy import parameter_count
from grpo_roc_jax.settings.cli import dump_yaml
from tests.helpers.planning import SETTINGS
from tests.helpers.planning import platform_kept as platform_kept  # a fixture
from tests.test_train import config_in


def test_preflight_is_a_word_of_the_command_line_and_prints_a_table(monkeypatch, capsys):
    costs = [ProgramCost("decode/64", 1.5, 2 * MIB, MIB, 5 * MIB), ProgramCost("update/1", 2.25, MIB, 0, 3 * MIB)]
    monkeypatch.setattr(train, "preflight", lambda config: costs if config.seed == 7 else [])
    assert train.main(["toy.yaml", "--preflight", "--seed=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["decode/64", "1.50", "2.00", "5.00"],
        ["update/1", "2.25", "1.00", "3.00"],
    ]
    assert lines[3].startswith("2 programs compiled in 3.8 s; the largest, decode/64, takes 5.0")
    assert lines[4].startswith("memory of the host at most, MiB: trajectories of a step 0.7,")


def test_the_memory_of_the_host_by_hand(tmp_path):
    config = config_in(tmp_path, "--group.dynamic_sampling_rounds=1", "--optim.offload=True", "--tools.memory_mb=100")
    _, _, model, mesh, _ = check_components(config_in(tmp_path), make_registry(config))
    parts = host_parts(config, model, mesh)
    count = parameter_count(model)
    assert parts["trajectories of a step"] == 2 * 2 * 8 * 40 * 21, "rounds x problems x twice the group x row x bytes"
    assert (parts["checkpoint"], parts["moments"]) == (12 * count, 8 * count)
    assert (parts["programs of the policy"], parts["sessions"]) == (2 * 100 * MIB, 512 * 100 * MIB)
    assert parts["packed batch"] % (8 * 40 * 36) == 0 and "verifiers" not in parts


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--surrogate.kl=k3 --surrogate.kl.coef=0.01 --optim.offload=True",
        "--rollout.step_limit=stream --rollout.step_limit.lag=1",  # micro-batches take turns with decoding
    ],
)
def test_preflight_names_and_counts_every_program(tmp_path, capsys, one_device, words):
    (tmp_path / "tiny.yaml").write_text(dump_yaml(config_in(tmp_path / "run", *words.split())))
    assert train.main([str(tmp_path / "tiny.yaml"), "--preflight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("program"))
    rows, last = [line.split() for line in lines[header + 1 : -2]], lines[-2]
    names = [name for name, *_ in rows]
    kinds = {"allocate", "slots", "append", "copy", "decode", "update"} | ({"score"} if words else set())
    assert {name.split("/")[0] for name in names} == kinds and len(set(names)) == len(names)
    parts = ["update/begin", "update/add", "update/finish"] if "stream" in words else ["update"]
    assert [name for name in names if name.startswith("update")] == parts
    assert last.startswith(f"{len(rows)} programs compiled in ")
    assert all(float(seconds) > 0 for _, seconds, *_ in rows)
    assert all(float(total) > 0 for name, *_, total in rows if name.startswith("decode"))
    assert re.search(r"the largest, \S+, takes [\d.]+ MiB", last)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("platform_kept")
def test_programs_are_kept_in_the_home_directory_unless_jax_has_another_setting(tmp_path):
    def kept(*values, home=tmp_path):
        for name, value in zip(SETTINGS, values, strict=True):
            jax.config.update(name, value)
        folder = keep_programs({"XDG_CACHE_HOME": str(home)})
        return folder, jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs

    folder, used, least_s = kept(None, USUAL_MIN_S, True)
    assert folder.parent == tmp_path / "grpo_roc_jax" / "programs" and folder.is_dir()
    assert (used, least_s) == (str(folder), 0.0)
    folder, _, least_s = kept("elsewhere", 3.0, True)
    assert (str(folder), least_s) == ("elsewhere", 3.0)
    assert kept(None, USUAL_MIN_S, False)[:2] == (None, None)
    (tmp_path / "file").touch()
    assert kept(None, USUAL_MIN_S, True, home=tmp_path / "file")[0] is None


def test_what_comes_from_the_cache_is_counted():
    """The suite keeps its programs too (conftest.py); these two are one program for JAX's cache."""
    with CompilationCounter() as counted:
        for _ in range(2):
            unusual = jax.jit(lambda x: x * 77.125 - 3.5)
            unusual.lower(jax.ShapeDtypeStruct((3, 5), "float32")).compile()
    assert counted.count == 2 and counted.hits in (1, 2)  # two where an earlier session has kept it
    assert counted.metrics()["compile/cache_hits"] == counted.hits

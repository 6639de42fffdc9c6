"""`--preflight` compiles and counts what a run compiles and starts nothing; compiled programs are kept. What cannot
work is said before it runs, with the setting and its value; recipes have nothing to be said of them."""

from contextlib import closing

import jax
import pytest

import grpo_roc_jax as g
from grpo_roc_jax import train
from grpo_roc_jax.engine.programs import ProgramCost
from grpo_roc_jax.planner.preflight import MIB, host_parts
from grpo_roc_jax.planner.prospects import hindrances, settings_against_learning
from grpo_roc_jax.pod.program_cache import USUAL_MIN_S, keep_programs
from grpo_roc_jax.run import components, policy
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS, dump_yaml
from tests.helpers import knobs, planning
from tests.helpers.planning import platform_kept as platform_kept  # a fixture
from tests.test_train import config_in


def test_preflight_is_a_word_of_the_command_line_and_prints_a_table(monkeypatch, capsys):
    costs = [ProgramCost("decode/64", 1.5, 2 * MIB, MIB, 5 * MIB), ProgramCost("update/1", 2.25, MIB, 0, 3 * MIB)]
    monkeypatch.setattr(train, "preflight", lambda config: costs if config.seed == 7 else [])
    assert train.main(["toy.yaml", "--preflight", "--seed=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(" ".join(lines[1:3]).split()) == "decode/64 1.50 2.00 5.00 update/1 2.25 1.00 3.00"
    assert lines[3].startswith("2 programs compiled in 3.8 s; the largest, decode/64, takes 5.0")
    assert lines[4].startswith("memory of the host at most, MiB: trajectories of a step 0.7,")


def test_the_memory_of_the_host_by_hand(tmp_path):
    config = config_in(tmp_path, "--group.dynamic_sampling_rounds=1", "--optim.offload=True", "--tools.memory_mb=100")
    _, _, model, mesh, _ = components.check_components(config_in(tmp_path), components.make_registry(config))
    parts = host_parts(config, model, mesh)
    count = policy.parameter_count(model)
    assert parts["trajectories of a step"] == 2 * 2 * 8 * 40 * 21, "rounds x problems x twice the group x row x bytes"
    assert (parts["checkpoint"], parts["moments"]) == (12 * count, 8 * count)
    assert (parts["programs of the policy"], parts["sessions"]) == (2 * 100 * MIB, 512 * 100 * MIB)
    assert parts["packed batch"] % (8 * 40 * 36) == 0 and "verifiers" not in parts


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--rollout.step_limit=stream --rollout.step_limit.lag=1"])
def test_preflight_names_and_counts_every_program(tmp_path, capsys, one_device, words):
    """With a lag micro-batches take turns with decoding."""
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
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("platform_kept")
def test_programs_are_kept_in_the_home_directory_unless_jax_has_another_setting(tmp_path):
    def kept(*values):
        for name, value in zip(planning.SETTINGS, values, strict=True):
            jax.config.update(name, value)
        folder = keep_programs({"XDG_CACHE_HOME": str(tmp_path)})
        return folder, jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs

    folder, used, least_s = kept(None, USUAL_MIN_S, True)
    assert folder.parent == tmp_path / "grpo_roc_jax" / "programs" and folder.is_dir()
    assert (used, least_s) == (str(folder), 0.0)
    folder, _, least_s = kept("elsewhere", 3.0, True)
    assert (str(folder), least_s) == ("elsewhere", 3.0)


PATHS = [path for path in sorted(CONFIG_DIR.rglob("*.yaml")) if path.parent.name not in ("data", "environments")]
RECIPES = [path.relative_to(CONFIG_DIR).as_posix() for path in PATHS]
RECIPES += [f"methods/{path.name}" for path in sorted(CONTRIB_METHODS.glob("*.yaml"))]


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_speaks_against_a_recipe(name):
    for stage in g.read_config(name).staged():
        assert settings_against_learning(stage) == []


ALONE = "--group.size 1 --advantage.baseline none"


def test_a_dry_run_ends_with_what_cannot_work(capsys):
    for words, message in (
        ("--reward.functions.answer.weight 0", "every reward function has weight 0 (answer)"),
        (f"--resample none {ALONE}", "one rollout a problem with resample.drop = equal"),
        ("--advantage pass_at_k --advantage.k 16", "group.size = 16 with resample roc and advantage {kind: pass_at_k"),
        ("--sampling.temperature 0.001", "sampling.temperature = 0.001: all rollouts of a problem are the same"),
        ("--advantage none", "advantage none without advantage.adjust: every advantage is 0"),
        ("--tools.enabled jupyter_code", "call python_code_with_standard_io, but the run has jupyter_code"),
        ("--reward.answer_tag result", "none of 32 demonstrations ends in an answer that can be read with"),
        ("--sft.steps 0", "sft.steps = 0: a policy with random weights"),
        ("--rollout.max_prompt_tokens 15", "of which 32 of 32 exceed rollout.max_prompt_tokens = 15; raise it to"),
        ("--rollout.max_turns 2", "turns after the prompt, of which"),
    ):
        given = ["--data.sources=world:gcd:1", "--data.eval_problems=0", *words.split()]
        assert train.main(["toy.yaml", "--dry-run", *given]) == 0
        out = capsys.readouterr().out
        against = [line for line in out.splitlines() if line.startswith("problem: ")]
        assert any(message in line for line in against) and out.splitlines()[-1] in against, out
        of_data = any(part in message for part in ("exceed", "turns after", "the run has", "none of 32"))
        of_settings = " ".join(settings_against_learning(g.read_config("toy.yaml", *words.split())))
        assert (message in of_settings) != of_data, words


def test_rows_of_files_are_counted_exactly(tmp_path, capsys):
    """Lengths are those of the row after its prompt, the turns of others included; one that just fits is none."""
    talks = [[("user", f"q{i}"), ("assistant", "word " * words)] for i, words in enumerate((2, 2, 2, 300, 1))]
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in talks]
    knobs.write_lines(tmp_path / "talks.jsonl", rows)
    words = ["toy.yaml", "--dry-run", "--batch.row_length=2000", "--rollout.max_turns=2"]
    words.append(f"--data.trace_sources={tmp_path}/talks.jsonl")
    assert train.main(words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "demonstrations of" in line]
    longest = int(line.split(" to ")[1].split()[0])
    assert "1 of 5 exceed rollout.max_response_tokens = 120" in line and f"raise it to {longest}" in line
    for most, expected in ((longest, False), (longest - 1, True)):
        assert train.main([*words, f"--rollout.max_response_tokens={most}"]) == 0
        assert ("demonstrations of" in capsys.readouterr().out) == expected
    rows = [{"prompt": f"{i} + 1", "answer": "It follows from the lemma that this holds. " * 6} for i in range(3)]
    knobs.write_lines(file := tmp_path / "proofs.jsonl", rows)
    words = ["toy.yaml", "--dry-run", f"--data.sources={file}", "--data.trace_sources=world:gcd:1"]
    assert train.main([*words, "--data.eval_problems=0"]) == 0
    assert f"problem: {file}: 3 rows have a reference" in capsys.readouterr().out.splitlines()[-1]


def test_functions_that_pay_alike_are_named():
    """Without weight the answer does not make rewards differ, whatever it is."""
    unweighted = "own answer --reward.functions.answer.weight 0"
    for functions, against in (("own", True), ("own answer", False), (unweighted, True)):
        config = g.read_config("toy.yaml", "--reward.functions", *functions.split())
        with given({"own": lambda problem, rows: [0.5] * len(rows)}), closing(g.make_scorer(config.reward)) as scorer:
            chat = components.check_components(config, components.make_registry(config))[1]
            lines = [line for line in hindrances(config, chat, scorer) if "(own 0.5)" in line]
        assert ["finished and a cut trajectory get the same" in line for line in lines] == [True] * against

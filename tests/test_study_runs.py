"""Runs of a study that are interrupted, fail, or stop early; and numbers that must not flatter an arm."""

import json
import math
from dataclasses import replace

import jax
import pytest

from benchmarks import study, study_published
from benchmarks.studies import STUDIES
from grpo_roc_jax.commands.export import TextFiles, export_model, published_text
from grpo_roc_jax.data import gsm8k_traces
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from tests.helpers.reference import random_params
from tests.test_study import row
from tests.text.test_templates import make_directory

FEW = replace(STUDIES["roc"], arms={"roc": (), "grpo": ()}, worlds={"w": ()}, seeds=2)
WORDS = ["roc", "--worlds", "toy", "--arms", "roc", "grpo", "--seeds", "1"]
METRICS = (
    {"step": 0, "eval/all/avg@4": 0.25},
    {"step": 1, "rollout/sampled_tokens": 10.0, "time/step_s": 1.0, "rollout/reward": 0.5, study.ERRORS: 0.5},
)


class Processes:
    """Stands in for `execute`: notes what is run, writes what a run leaves, and ends as it was asked to. With "killed"
    the study ends there, and nothing else runs."""

    def __init__(self, monkeypatch, ends=()):
        self.ran, self.ends, self.alive = [], dict(ends), True
        monkeypatch.setattr(study, "execute", self)

    def __call__(self, words, run_dir):
        if not self.alive:
            raise KeyboardInterrupt
        name = words[0]
        arm = run_dir.parent.name if name == "train" else name
        self.ran.append(arm)
        status = self.ends.pop(arm, 0)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in METRICS))
        if status == "killed":
            self.alive = False
            raise KeyboardInterrupt
        if name == "export" and status == 0:
            (run_dir / "model").mkdir()
        if name == "train" and status == 0:
            about = {"commit": "abc", "device": "cpu", "python": "3", "versions": {}, "seconds": 1.0}
            (run_dir / "summary.json").write_text(json.dumps(about))
        return status


def run(tmp_path, *more):
    return study.main([*WORDS, "--folder", str(tmp_path / "runs"), "--out", str(tmp_path), *more])


@pytest.fixture(autouse=True)
def without_figures(monkeypatch, request):
    if "slow" not in request.keywords:
        monkeypatch.setattr(study, "figure", lambda *_: None)


@pytest.mark.parametrize(
    ("killed", "before", "after"),
    [
        ("sft", ["sft"], ["sft", "export", "roc", "grpo"]),
        ("export", ["sft", "export"], ["sft", "export", "roc", "grpo"]),
        ("roc", ["sft", "export", "roc"], ["roc", "grpo"]),
        ("grpo", ["sft", "export", "roc", "grpo"], ["grpo"]),
    ],
)
def test_a_study_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch, killed, before, after):
    first = Processes(monkeypatch, {killed: "killed"})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert first.ran == before
    processes = Processes(monkeypatch)
    assert run(tmp_path) == 0
    assert processes.ran == after
    assert len(study.read_rows(tmp_path / "study_roc.jsonl.gz")) == 2
    assert run(tmp_path) == 0 and processes.ran == after, "nothing runs twice"


def test_a_run_that_fails_is_named_and_tried_again(tmp_path, monkeypatch, capsys):
    Processes(monkeypatch, {"grpo": 1})
    assert run(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "toy grpo 0: failed, see" in printed and "no seed is finished in every arm" in printed
    again = Processes(monkeypatch)
    assert run(tmp_path) == 0 and again.ran == ["grpo"]


def test_a_cold_start_that_fails_is_what_the_message_names(tmp_path, monkeypatch, capsys):
    Processes(monkeypatch, {"sft": 2})
    assert run(tmp_path, "--arms", "roc") == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "failed, see" in line]
    assert "/cold/" in line


def test_a_run_that_diverges_is_a_result(tmp_path, monkeypatch, capsys):
    """Left out, it would take its seed out of the table of all arms, and the others would look stable."""
    Processes(monkeypatch, {"grpo": study.DIVERGED_STATUS})
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "toy grpo 0: stopped, diverged" in printed
    assert "stopped early, with the values that they reached: grpo 0 (diverged)" in printed
    assert study.read_rows(tmp_path / "study_roc.jsonl.gz")["toy", "grpo", 0]["stopped"] == "diverged"
    assert run(tmp_path) == 0 and study.execute.ran.count("grpo") == 1, "it is not tried again"


def test_studies_that_share_a_file_keep_each_others_rows(tmp_path, monkeypatch):
    path = tmp_path / "study_roc.jsonl.gz"

    class Beside(Processes):
        def __call__(self, words, run_dir):
            if words[0].endswith("train"):
                study.save(path, {("hard", "roc", 0): row("roc", 0, [0.1], 1.0, world="hard")})
            return super().__call__(words, run_dir)

    Beside(monkeypatch)
    run(tmp_path, "--arms", "roc")
    assert {key[0] for key in study.read_rows(path)} == {"hard", "toy"}


def test_a_run_that_another_study_has_made_is_taken_over(tmp_path, monkeypatch):
    """`sort` of the study of the selection is `roc` of this one, setting by setting."""
    Processes(monkeypatch)
    run(tmp_path, "--arms", "roc")
    words = ["selection", "--worlds", "toy", "--arms", "sort", "inverse", "--seeds", "1"]
    again = Processes(monkeypatch)
    assert study.main([*words, "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    assert again.ran == ["inverse"]
    mine, theirs = (study.read_rows(tmp_path / f"study_{name}.jsonl.gz") for name in ("selection", "roc"))
    assert mine["toy", "sort", 0] == theirs["toy", "roc", 0] | {"arm": "sort"}
    timed = Processes(monkeypatch)
    words = ["lag", "--arms", "own", "--seeds", "1", "--folder", str(tmp_path / "timed"), "--out", str(tmp_path)]
    assert study.main(words) == 0 and timed.ran[-1] == "own", "seconds of other studies are those of a busy machine"


def test_an_arm_that_stopped_early_does_not_cut_the_budget_of_the_others():
    """`b` uses 1,000 tokens in ten steps, `a` 300 in three and then diverges."""
    errors = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    rows = {"b": row("b", 0, errors, 100.0), "a": row("a", 0, errors[:3], 100.0) | {"stopped": "diverged"}}
    table = study.measured(STUDIES["roc"], {arm: study.run_data(record) for arm, record in rows.items()})
    at = [title for title, metric, _ in STUDIES["roc"].measures].index("at equal tokens")
    assert table["b"][at] == pytest.approx(0.3)  # the last five of all ten
    assert table["a"][at] == pytest.approx(0.9)  # all three


@pytest.mark.parametrize("sums", [sum, math.fsum])
def test_an_arm_is_not_cut_by_rounding_of_its_own_budget(monkeypatch, sums):
    """Python 3.12 adds floats with compensation: 0.1 + 0.2 + 0.3 is 0.6 there, and 0.6000000000000001 step by step."""
    monkeypatch.setattr(study, "sum", sums, raising=False)
    record = row("a", 0, [0.9, 0.9, 0.0], 1.0)
    record["columns"]["time/step_s"] = [None, 0.1, 0.2, 0.3]
    table = study.measured(STUDIES["roc"], {"a": study.run_data(record)})
    at = [title for title, _, _ in STUDIES["roc"].measures].index("at equal seconds")
    assert table["a"][at] == pytest.approx(0.6)


def test_equal_tokens_by_hand():
    """`a` samples 100 tokens a step, `b` 300: at 600 tokens `a` has taken six steps and `b` two. The measure is the
    mean of steps 2 to 6 of `a` and of 1 and 2 of `b`. Evaluated after steps 0, 3 and 6, `a` has 1.0. `b` has 0.5 after
    no token and 0.75 after 900, so two thirds of the way at 600."""
    a = row("a", 0, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1], 100.0)
    b = row("b", 0, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0], 300.0)
    table = study.measured(STUDIES["roc"], {name: study.run_data(record) for name, record in (("a", a), ("b", b))})
    columns = [(metric, axis) for _, metric, axis in STUDIES["roc"].measures]
    errors, accuracy = columns.index((study.ERRORS, "tokens")), columns.index(("eval", "tokens"))
    assert table["a"][errors] == pytest.approx((0.5 + 0.4 + 0.3 + 0.2 + 0.1) / 5)
    assert table["b"][errors] == pytest.approx((0.8 + 0.6) / 2)
    assert (table["a"][accuracy], table["b"][accuracy]) == pytest.approx((1.0, 0.5 + 0.25 * 2 / 3))


def test_one_token_more_does_not_cost_an_arm_its_last_evaluation():
    a, b = row("a", 0, [0.5] * 6, 100.0), row("b", 0, [0.5] * 6, 101.0)
    table = study.measured(STUDIES["roc"], {name: study.run_data(record) for name, record in (("a", a), ("b", b))})
    at = [(metric, axis) for _, metric, axis in STUDIES["roc"].measures].index(("eval", "tokens"))
    assert table["a"][at] == 1.0 and table["b"][at] == pytest.approx(1.0, abs=0.01)


def test_steps_without_a_call_in_a_correct_rollout_have_no_share():
    """A policy that solves nothing, or answers without a call, would have the best value, 0."""
    record = row("a", 0, [0.5, 0.0, 0.0, 0.25], 1.0)
    record["columns"] |= {study.TOOL_FREE: [None, 0.0, 1.0, 0.0, 0.5], study.REWARD: [None, 0.5, 0.5, 0.0, 0.5]}
    run_of = study.run_data(record)
    assert [metrics.get(study.ERRORS) for metrics in run_of.rows[1:]] == [0.5, None, None, 0.25]
    assert study.value_at(run_of, study.ERRORS, "step", math.inf) == pytest.approx(0.375)


def test_an_interval_of_two_values_by_hand():
    """Of 0 and 1: 0.5 ± 12.7062 x sqrt(1/2) / sqrt(2), with the 97.5% point of t with one degree of freedom."""
    np = study.np
    np.testing.assert_allclose(study.interval(np.array([0.0, 1.0])), (0.5 - 6.3531, 0.5 + 6.3531), atol=1e-4)
    rows = [row(arm, seed, [value] * 5, 1.0) for seed in (0, 1) for arm, value in (("roc", 0.25), ("grpo", 0.5 + seed))]
    text = study.report(FEW, {(r["world"], r["arm"], r["seed"]): r for r in rows}, "w")
    assert "| grpo | 0.750 ± 0.707 [-5.603, 7.103] 2/2 |" in text
    assert study.difference(np.array([0.5, -0.125, 0.0])).endswith(" 1/3"), "the sign of the mean"


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_intervals_cover_the_mean_and_bootstraps_do_not(seeds):
    from grpo_roc_jax.record.accuracy import bootstrap

    rng = study.np.random.default_rng(0)
    draws = rng.normal(size=(400, seeds))
    covered = [low <= 0 <= high for low, high in map(study.interval, draws)]
    assert 0.92 < sum(covered) / len(covered) < 0.98
    if seeds == 3:
        assert sum(low <= 0 <= high for low, high in map(bootstrap, draws[:200])) < 0.85 * 200


def test_p_over_signs_and_its_correction_by_hand():
    """Of 3, 2, 1 the sums over signs are +-6, +-4, +-2, 0, 0: two of eight reach 6. Holm: 3 x 0.01, 2 x 0.03, 1 x 0.04,
    none below the one before."""
    np = study.np
    assert study.sign_flip(np.array([3.0, 2.0, 1.0])) == 2 / 8
    assert study.sign_flip(np.array([3.0, -2.0, 1.0])) == 6 / 8  # |2| or more: +-6, +-4, +-2
    np.testing.assert_allclose(study.holm([0.04, 0.01, 0.03]), [0.06, 0.03, 0.06])


def test_five_seeds_of_one_sign_show_nothing_and_eight_do():
    few, enough = (study.np.linspace(0.9, 1.1, n) for n in (5, 8))
    assert study.sign_flip(few) == 2 / 32
    assert study.verdict(few, 0.0) == "undecided, 5 seeds of 8"
    assert study.verdict(enough, study.sign_flip(enough)) == "shown"
    assert study.verdict(enough, 0.2) == "undecided" and study.verdict(-enough, 1.0) == "refuted"


def test_runs_are_counted_for_the_outcome_that_decides_a_study():
    """Locked: the mean of the last five steps above half of the first value. 0.4 of 0.8 is not."""
    few = replace(STUDIES["phase"], arms={"roc": (), "grpo": ()}, worlds={"w": ()}, seeds=2)
    rows = [row("grpo", 0, [0.8, *[0.41] * 5], 1.0), row("grpo", 1, [0.8, *[0.4] * 5], 1.0)]
    rows += [row("roc", seed, [0.5, *[0.1] * 5], 1.0) for seed in (0, 1)]
    lines = study.report(few, {(r["world"], r["arm"], r["seed"]): r for r in rows}, "w").splitlines()
    assert "locked: roc 0 of 2, grpo 1 of 2" in lines


TINY_MODELS = {"llama3": {"tie_embeddings": False}, "chatml_tools": {"qkv_bias": True}}
"""Template -> what makes the shape one of Llama or of Qwen2.5."""


def publish_tiny(folder, template):
    """A model directory with random weights, a tokenizer of bytes, and the chat template of a family."""
    (folder / "text").mkdir(parents=True)
    text = make_directory(folder / "text", template)
    tokenizer = load_tokenizer(TextConfig(tokenizer=str(text)))
    shape = {"d_model": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "d_ff": 16, "max_positions": 4096}
    model = resolve_model(ModelConfig(**shape, **TINY_MODELS[template]), tokenizer)
    params = jax.device_put(random_params(model))
    export_model(params, model, folder / "model", dtype="float32", text=TextFiles(published_text(text)))
    return folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize("template", ["llama3"])
def test_a_published_model_goes_through_the_study(tmp_path, capsys, template):
    """The cost, the cold start, an export, two arms and the table; with three problems of GSM8K's form."""
    model = publish_tiny(tmp_path, template)
    rows = [{"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(6)]
    for name, part in (("train", rows[:3]), ("test", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    assert gsm8k_traces.main([str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "traces.jsonl")]) == 0
    tiny = ["steps=1", "group.problems=2", "group.size=2", "sft.steps=1", "sft.traces=2", "tools.workers=1"]
    tiny += [f"data.{name}=[{tmp_path / file}.jsonl]" for name, file in
             (("sources", "train"), ("eval_sources", "test"), ("trace_sources", "traces"))]  # fmt: skip
    tiny += ["rollout.slots=8", "rollout.max_prompt_tokens=2048", "rollout.max_response_tokens=32", "eval.every=0"]
    tiny += ["rollout.append_lengths=[64,512]", "batch.row_length=3072", "batch.rows=1", "data.eval_problems=2"]
    words = ["--model", str(model), "--topology", "h200:1", "--set", *tiny, "--start", "--arms", "grpo", "roc"]
    words += ["--seeds", "1", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert study_published.main(words) == 0
    printed = capsys.readouterr().out
    assert (
        "all arms with 1 seeds: at least" in printed
        and "uniform: " not in printed
        and printed.index("accelerator hours") < printed.index(": done")
    )
    assert printed.count(": done") == 2 and "difference to `grpo`, paired by seed" in printed
    study_of_model = study_published.published(str(model), ["qwen3_0_6b_gsm8k"], ())
    assert study_of_model.claims == STUDIES["real"].claims and list(study_of_model.arms) == list(STUDIES["real"].arms)
    records = study.read_rows(tmp_path / "study_real_model.jsonl.gz")
    sampled = {arm: record["columns"]["rollout/sampled"][-1] for (_, arm, _), record in records.items()}
    assert sampled == {"grpo": 4.0, "roc": 8.0}

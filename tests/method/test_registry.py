"""Every method file: a complete header, settings that parse, and the invariants of the family on its composition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_groups import make_group

from grpo_roc_jax.cli import load_config
from grpo_roc_jax.config import Config
from grpo_roc_jax.loss import batch_loss
from grpo_roc_jax.method.config import needs_scores
from grpo_roc_jax.method.methods import next_state, resample_group, subset, train_rows
from grpo_roc_jax.method.registry import FOLDER, load_methods, method_table, read_method, with_table
from grpo_roc_jax.method.state import AlgoState, init_state
from grpo_roc_jax.method.surrogate import make_surrogate
from grpo_roc_jax.pack import BatchConfig, TrainBatch, pack, unpack, worst_case_micro_batches

METHODS = load_methods()
CORE = """
grpo dr_grpo dapo gspo cispo rloo reinforce_pp reinforce_pp_baseline grpo_roc rc_grpo pods gdpo mo_grpo
multi_objective lambda_grpo bnpo ngrpo mc_grpo san spo disco drpo rebel reg_grpo grpo_lambda tempo knapsack xrpo
scaf_grpo sage guide_grpo igrpo expo unlikeliness posterior_grpo c_grpo soft_reward surrogate_signals train_long
microcoder pairing constraints s_grpo
"""


def load(name):
    """The run configuration of a method; its sections are what the method reads."""
    return load_config(Config, [str(METHODS[name].path)], prog="test")


def test_core_methods_are_there():
    assert set(CORE.split()) <= set(METHODS)


def test_table():
    table = method_table(METHODS)
    assert table.count("\n") == len(METHODS) + 2
    assert "[GRPO-RoC](../configs/methods/grpo_roc.yaml)" in table


DOCUMENT = FOLDER.parents[1] / "docs" / "methods.md"


def test_the_documents_table_is_the_generated_one():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_table(text, method_table(METHODS)) == text, f"python -m grpo_roc_jax.method.registry {DOCUMENT}"
    with pytest.raises(ValueError, match="lacks the lines"):
        with_table("no marks", "")


def code_block(language):
    """The one block of that language under the worked example."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Adding a method")[2]
    return text.partition(f"```{language}\n")[2].partition("```")[0]


def test_the_worked_example_works(tmp_path, monkeypatch):
    """One file and one configuration, as the document prints them."""
    (tmp_path / "my_methods.py").write_text(code_block("python"))
    (tmp_path / "ranks.yaml").write_text(code_block("yaml"))
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(Config, [str(tmp_path / "ranks.yaml")], prog="test")
    assert read_method(tmp_path / "ranks.yaml").formula == "A = z(rank of R)"
    group = make_group([1, 0, 0.5, 0], calls=[1, 1, 1, 1])
    rows = rows_of([group], config)
    expected = np.array([1.5, -1, 0.5, -1]) / np.sqrt((1.5**2 + 1 + 0.25 + 1) / 3)
    found = [row.advantages[row.policy_mask][0] for row in rows]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_headers():
    roc = METHODS["grpo_roc"]
    assert (roc.paper, roc.axes, roc.state) == ("arXiv:2508.20722", "d", "")
    assert all(m.title and m.formula for m in METHODS.values())


def test_broken_headers_are_named(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# Title, arXiv:1\nname: x\n")
    with pytest.raises(ValueError, match="lacks axes, formula, state"):
        read_method(file)
    file.write_text("# Title\n# axes: q\n# formula: f\n# state: none\n")
    with pytest.raises(ValueError, match="unknown axes"):
        read_method(file)


def groups(config, seed=0, count=3):
    """Random mixed groups with everything a composition may read."""
    generator = np.random.default_rng(seed)
    n = config.resample.sampled(config.group.size)
    out = []
    for g in range(count):
        rewards = generator.integers(0, 2, n).astype(float)
        if n > 1:
            rewards[:2] = (0, 1)
        channels = {"answer": rewards, "format": generator.integers(0, 2, n).astype(float)}
        channels["clean_tools"] = generator.integers(0, 2, n).astype(float)
        out.append(
            make_group(
                rewards,
                uid=f"p{g}",
                lengths=generator.integers(1, 9, n),
                calls=generator.integers(0, 4, n),
                logprobs=-generator.random(n).astype(np.float32),
                observation=generator.integers(0, 4, n),
                channels={k: v for k, v in channels.items() if k in config.reward.functions}
                if len(config.reward.functions) > 1
                else None,
            )
        )
    return out


def rows_of(some, config, state=None):
    trajectories = [t for g in some for t in g.trajectories]
    scores = [t.logprobs for t in trajectories] if needs_scores(config.advantage, config.loss) else None
    reference = [t.logprobs for t in trajectories] if config.loss.kl_coef else None
    return train_rows(
        some,
        config,
        state or init_state(len(config.advantage.constraints)),
        rng=np.random.default_rng(0),
        scores=scores,
        reference=reference,
        entropies=[np.arange(t.length, dtype=np.float32) for t in trajectories],
    )


def products(rows):
    """advantage x weight of each token: on policy this is the gradient of the loss, for every surrogate."""
    return [row.advantages * row.weights for row in rows]


@pytest.mark.parametrize("name", METHODS)
def test_composition(name):
    """The invariants of the family's interface section, on the line from sampled groups to rows."""
    config = load(name)
    state = init_state(len(config.advantage.constraints))
    sampled = groups(config)
    generator = np.random.default_rng(1)
    kept = []
    for group in sampled:
        selection = resample_group(group, config, state, generator)
        assert selection.kept
        assert len(selection.indices) == min(config.group.size, group.size)
        kept.append(subset(group, selection))
    rows = rows_of(kept, config)
    base = products(rows)
    assert any(p.any() for p in base), "no trajectory has a gradient"
    for row, trajectory in zip(rows, [t for g in kept for t in g.trajectories], strict=True):
        assert np.isfinite(row.advantages).all()
        assert np.isfinite(row.weights).all()
        assert (row.weights >= 0).all()
        assert not row.weights[~trajectory.policy_mask].any(), "an observation or prompt token has weight"
    # The order of groups changes nothing.
    moved = products(rows_of(kept[::-1], config))
    sizes = [g.size for g in kept]
    back = [moved[sum(sizes[g + 1 :]) : sum(sizes[g:])] for g in range(len(sizes))]
    if not config.advantage.truncation_mask:
        for before, after in zip(base, [p for part in back for p in part], strict=True):
            np.testing.assert_allclose(before, after, atol=1e-6)
    after = next_state(sampled, kept, config, state)
    assert after.step == 1
    again = AlgoState.from_tree(after.to_tree())
    np.testing.assert_array_equal(again.table.values, after.table.values)


BY_DESIGN = {"ngrpo", "spo", "unlikeliness", "s_grpo"}
"""Methods with a gradient on such groups by design: a virtual best reward, a baseline outside the group, ranks among
successes, pay by the order of exits."""


@pytest.mark.parametrize("name", sorted(set(METHODS) - BY_DESIGN))
def test_equal_rewards_have_no_gradient(name):
    config = load(name)
    n = config.group.size
    for reward in (0.0, 1.0):
        some = [
            make_group(
                [reward] * n,
                uid=str(g),
                channels={f: [reward] * n for f in config.reward.functions}
                if len(config.reward.functions) > 1
                else None,
            )
            for g in range(2)
        ]
        for product in products(rows_of(some, config)):
            np.testing.assert_allclose(product, 0, atol=1e-7)


LEAVES = [field for field in dataclasses.fields(TrainBatch) if field.name != "count"]


def packed_gradients(rows, config, row_length, per_micro):
    """d loss / d log-probability of each token through packing and the loss of the update, micro-batches summed."""
    placed = BatchConfig(row_length=row_length, rows=per_micro)
    batch, placement = pack(rows, placed, worst_case_micro_batches(len(rows), row_length, placed))
    surrogate = make_surrogate(config.loss)
    generator = np.random.default_rng(5)
    drift = [generator.normal(0, 0.1, row.length).astype(np.float32) for row in rows]
    moved = [dataclasses.replace(r, logprobs_old=r.logprobs_old + d) for r, d in zip(rows, drift, strict=True)]
    now = pack(moved, placed, batch.tokens.shape[0])[0].logprobs_old

    @jax.jit
    def slope(part, logprobs):
        return jax.grad(lambda values: batch_loss(values, jnp.zeros_like(values), part, config.loss, surrogate)[0])(
            logprobs
        )

    gradients = np.zeros(batch.tokens.shape, np.float32)
    for m in range(int(batch.count)):
        part = TrainBatch(**{f.name: getattr(batch, f.name)[m] for f in LEAVES}, count=batch.count)
        gradients[m] = slope(part, now[m])
    return unpack(gradients, placement)


LOSSES = ["grpo_roc", *(name for name in METHODS if "\nloss:" in METHODS[name].path.read_text())]


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_and_packing_change_nothing(name):
    """One long row of everything equals one trajectory a row in micro-batches of three."""
    config = load(name)
    config = dataclasses.replace(config, group=dataclasses.replace(config.group, size=min(config.group.size, 5)))
    rows = rows_of(
        [subset(g, resample_group(g, config, AlgoState(), np.random.default_rng(1))) for g in groups(config)], config
    )
    together = packed_gradients(rows, config, 256, 1)
    apart = packed_gradients(rows, config, 16, 3)
    assert any(np.asarray(g).any() for g in together)
    for row, left, right in zip(rows, together, apart, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
        assert not np.asarray(left)[~row.policy_mask].any()

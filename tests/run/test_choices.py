"""What the update keeps and how many rows a call takes, where the settings leave it open."""

import dataclasses
import json

import jax
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.loss import USUAL_CHUNK
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run.choices import (
    FILE,
    about,
    best_rows,
    left_open,
    named_update,
    row_counts,
    rows_of_a_step,
    timed_rows,
    update_bytes,
    with_choices,
)
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.run.session import choose_open
from grpo_roc_jax.settings.cli import load_config

MESH = make_mesh(ShardingConfig(), jax.devices()[:1])


def settings(*words):
    config = load_config(Config, ["toy", *words], prog="test")
    return config, dataclasses.replace(config.model, vocab_size=40_000, d_model=512)


def test_more_room_is_never_used_to_compute_more_and_what_is_chosen_fits():
    config, model = settings()
    order = [(remat, chunk) for remat in ("none", "attention", "full") for chunk in (40_000, USUAL_CHUNK)]
    seen = []
    for room in (x * 1e6 for x in range(2000, 0, -10)):
        chosen = named_update(config, model, MESH, room)
        index = order.index((chosen.remat, chosen.vocab_chunk))
        fits = update_bytes(dataclasses.replace(config, update=chosen), model, MESH) <= room
        assert fits or index == len(order) - 1
        for remat, chunk in order[:index]:
            tried = dataclasses.replace(config.update, remat=remat, vocab_chunk=chunk)
            assert update_bytes(dataclasses.replace(config, update=tried), model, MESH) > room
        seen.append(index)
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == len(order) - 1 and len(set(seen)) > 3
    narrow = named_update(config, dataclasses.replace(model, d_model=128), MESH, 1e12)
    assert (narrow.remat, narrow.vocab_chunk) == ("attention", 40_000)
    unknown = named_update(config, model, MESH, 0.0)
    assert (unknown.remat, unknown.vocab_chunk) == ("attention", USUAL_CHUNK)


def test_what_is_set_is_never_chosen():
    config, model = settings("--update.remat=full", "--update.vocab_chunk=7", "--update.attention=reference")
    assert left_open(config) == set()
    for room in (1e12, 1.0, 0.0):
        assert named_update(config, model, MESH, room) == config.update


def test_rows_are_chosen_for_the_rows_of_a_step():
    # 4 rows in one call of 4: 1.0; in calls of 1: 4 x 0.3; in a call of 16, of which 12 are padding: 3.0.
    seconds = {1: 0.3, 4: 1.0, 16: 3.0}
    assert best_rows(seconds, 4) == 4
    assert best_rows(seconds, 1) == 1  # a call of 4 would take as long as with four rows
    assert best_rows(seconds, 64) == 16
    assert best_rows({1: 0.25, 4: 1.0}, 4) == 1  # the smaller of equals
    config, model = settings("--batch.rows=0", "--batch.row_length=384")
    tokens = 64 * config.rollout.max_row_tokens / 2
    assert rows_of_a_step(config, 64) == -(-tokens // (0.9 * 384))
    assert row_counts(config, model, MESH, 1e12, 5) == (1, 4)  # 16 rows are more than 4,096 tokens
    assert row_counts(config, model, MESH, 1e12, 1) == (1,)
    assert row_counts(config, model, MESH, 1.0, 5) == (1,)  # nothing fits: the fewest


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_run_that_goes_on_takes_what_it_took_before(tmp_path, spoilt):
    config, model = settings()
    config = with_choices(config, {"update.attention": "blocked"})
    policy, alone = PolicyModel(model, MESH), Processes()
    first, lines = choose_open(config, policy, alone, tmp_path, free=lambda mesh: 1e12)
    assert (first.update.remat, first.update.vocab_chunk, first.update.attention) == ("none", 40_000, "blocked")
    assert any("remat none, logits kept" in line for line in lines) and not left_open(first)
    assert json.loads((tmp_path / FILE).read_text())[about(config, MESH)]["update.remat"] == "none"
    full = {"free": lambda mesh: 1.0}  # other programs took the memory
    if spoilt:
        (tmp_path / FILE).write_text("[")
        assert choose_open(config, policy, alone, tmp_path, **full)[0].update.remat == "full"
    else:
        assert choose_open(config, policy, alone, tmp_path, **full) == (first, [])
    # Rows of another length, as in the next stage of a run, are another question; both answers stay.
    longer = with_choices(config, {"batch.row_length": 512})
    assert choose_open(longer, policy, alone, tmp_path, **full)[0].update.remat == "full"
    assert set(json.loads((tmp_path / FILE).read_text())) == {about(config, MESH), about(longer, MESH)}


PATTERNS = {"extras": SomeExtras(rotary_layers=(True, False)), "windows": SlidingWindows((8, 8, 0))}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"windows": SlidingWindows((8, 8, 0), local_theta=1e4)}, marks=pytest.mark.slow),
        PATTERNS,
        {"windows": GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=8, every=2)},
        pytest.param({"experts": Mixture(4, 2)}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("axes", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_the_timed_layers_exist_for_every_kind_of_model_and_mesh(options, axes):
    """The programs are traced and not run; that they were asked for in ascending order is what `best_rows` needs."""
    names = []

    def traced(candidates):
        for name, call in candidates.items():
            names.append(name)
            grads = jax.eval_shape(call.func, *call.args)
            assert all(leaf.shape[0] for leaf in jax.tree.leaves(grads))
        return "8", dict.fromkeys(candidates, 1.0)

    config, _ = settings("--batch.rows=0")
    model = ModelConfig(d_model=32, layers=12, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=64, **options)
    mesh = make_mesh(ShardingConfig(*axes), jax.devices()[: axes[0] * axes[1] * axes[2]])
    seconds = timed_rows((8, 32), config, model, lambda rows: config.update, mesh, measure=traced)
    assert seconds == {8: 1.0, 32: 1.0}
    assert names == ["8", "32"]

"""What a run takes from its files, and what it chooses where the settings leave it open: what the update keeps, and how
many rows a call takes."""

import datetime
import json
import shutil
from dataclasses import replace

import jax
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.learner.loss import USUAL_CHUNK
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.published import write_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.record.run_dir import describe_run
from grpo_roc_jax.run import choices
from grpo_roc_jax.run import session as run_session
from grpo_roc_jax.run.components import read_text_and_shape, resolve_text, run_date, with_date
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.text.chat_format import make_chat
from tests.helpers.knobs_host import tokenizer_folder


def words(template, *more):
    return (f"text.tokenizer={tokenizer_folder(template)}", "text.template=model", *more)


class Opened(Exception):
    """The run has its directory; holds its configuration."""


def test_a_resumed_run_renders_the_date_on_which_it_began(tmp_path, monkeypatch):
    def parts(config, **_):
        raise Opened(config)

    monkeypatch.setattr(run_session, "make_parts", parts)
    config = g.read_config(*words("llama3", f"run_dir={tmp_path / 'run'}", "resume=auto"))

    def session():
        with run_session.claimed(config) as claim, pytest.raises(Opened) as seen, run_session.open_session(claim, None):
            pass
        return seen.value.args[0]

    begun = session()
    describe_run(tmp_path / "run", begun)
    first = begun.text.template.date
    assert datetime.date.today() - datetime.date.fromisoformat(first) <= datetime.timedelta(days=1)
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace(first, "2020-01-02"))
    for _ in range(2):
        resumed = session()
        assert resumed == with_date(config, "2020-01-02")
    text = resolve_text(resumed)
    chat = make_chat(text, g.load_tokenizer(text))
    assert "Today Date: 02 Jan 2020" in chat.tokenizer.decode(chat.prompt_ids(g.Problem("p", "1+1?", "2", "s")))


def test_only_a_template_that_asks_for_the_date_gets_one(tmp_path):
    for given in ((), words("chatml_tools"), words("chatml_tools", "text.template.file=nothing")):
        assert run_date(g.read_config(*given), tmp_path) == ""
    dated = g.read_config(*words("llama3", "text.template.date=2019-05-06"))
    assert run_date(dated, tmp_path) == "2019-05-06" and with_date(g.read_config(), "") == g.read_config()


def test_a_published_model_may_have_fewer_rows_than_its_tokenizer_has_added_tokens(tmp_path):
    folder = shutil.copytree(tokenizer_folder("chatml_tools"), tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text())
    last = spec["added_tokens"][-1]
    spec["added_tokens"].append(last | {"id": last["id"] + 1, "content": "<image_soft_token>"})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "config.json").write_text(json.dumps(write_config(ModelConfig(vocab_size=last["id"] + 1))))

    def sizes(text, **model):
        config = replace(g.read_config(), text=g.TextConfig(tokenizer=str(text)), model=ModelConfig(**model))
        return [part.vocab_size - last["id"] for part in read_text_and_shape(config)[1:]]

    assert sizes("model", path=str(folder)) == [1, 1] and sizes(folder) == [2, 2]
    with pytest.raises(ValueError, match=f"vocab_size = 9; must be 0 or at least {last['id'] + 2}, the tokenizer"):
        sizes(folder, vocab_size=9)


MESH = make_mesh(ShardingConfig(), jax.devices()[:1])


def settings(*given):
    config = g.read_config("toy", *given)
    return config, replace(config.model, vocab_size=40_000, d_model=512)


def test_more_room_is_never_used_to_compute_more_and_what_is_chosen_fits():
    config, model = settings()
    order = [(remat, chunk) for remat in ("none", "attention", "full") for chunk in (40_000, USUAL_CHUNK)]
    seen = []

    def bytes_with(update):
        return choices.update_bytes(replace(config, update=update), model, MESH)

    for room in (x * 1e6 for x in range(2000, 0, -10)):
        chosen = choices.named_update(config, model, MESH, room)
        index = order.index((chosen.remat, chosen.vocab_chunk))
        assert bytes_with(chosen) <= room or index == len(order) - 1
        for remat, chunk in order[:index]:
            assert bytes_with(replace(config.update, remat=remat, vocab_chunk=chunk)) > room
        seen.append(index)
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == len(order) - 1 and len(set(seen)) > 3
    narrow = choices.named_update(config, replace(model, d_model=128), MESH, 1e12)
    assert (narrow.remat, narrow.vocab_chunk) == ("attention", 40_000)
    unknown = choices.named_update(config, model, MESH, 0.0)
    assert (unknown.remat, unknown.vocab_chunk) == ("attention", USUAL_CHUNK)
    config, model = settings("--update.remat=full", "--update.vocab_chunk=7", "--update.attention=reference")
    assert choices.left_open(config) == set()
    for room in (1e12, 1.0, 0.0):
        assert choices.named_update(config, model, MESH, room) == config.update, "what is set is never chosen"


def test_rows_are_chosen_for_the_rows_of_a_step():
    # 4 rows in one call of 4: 1.0; in calls of 1: 4 x 0.3; in a call of 16, of which 12 are padding: 3.0.
    seconds = {1: 0.3, 4: 1.0, 16: 3.0}
    assert choices.best_rows(seconds, 4) == 4
    assert choices.best_rows(seconds, 1) == 1  # a call of 4 would take as long as with four rows
    assert choices.best_rows(seconds, 64) == 16
    assert choices.best_rows({1: 0.25, 4: 1.0}, 4) == 1  # the smaller of equals
    config, model = settings("--batch.rows=0", "--batch.row_length=384")
    tokens = 64 * config.rollout.max_row_tokens / 2
    assert choices.rows_of_a_step(config, 64) == -(-tokens // (0.9 * 384))
    assert choices.row_counts(config, model, MESH, 1e12, 5) == (1, 4)  # 16 rows are more than 4,096 tokens
    assert choices.row_counts(config, model, MESH, 1e12, 1) == (1,)
    assert choices.row_counts(config, model, MESH, 1.0, 5) == (1,)  # nothing fits: the fewest


def test_a_run_that_goes_on_takes_what_it_took_before(tmp_path):
    config, model = settings()
    config = choices.with_choices(config, {"update.attention": "blocked"})
    policy, path = PolicyModel(model, MESH), tmp_path / choices.FILE

    def chosen(config, room=1.0):  # other programs took the memory
        return run_session.choose_open(config, policy, Processes(), tmp_path, free=lambda mesh: room)

    first, lines = chosen(config, 1e12)
    assert (first.update.remat, first.update.vocab_chunk, first.update.attention) == ("none", 40_000, "blocked")
    assert any("remat none, logits kept" in line for line in lines) and not choices.left_open(first)
    assert json.loads(path.read_text())[choices.about(config, MESH)]["update.remat"] == "none"
    assert chosen(config) == (first, [])
    # Rows of another length, as in the next stage of a run, are another question; both answers stay.
    longer = choices.with_choices(config, {"batch.row_length": 512})
    assert chosen(longer)[0].update.remat == "full"
    assert set(json.loads(path.read_text())) == {choices.about(config, MESH), choices.about(longer, MESH)}
    path.write_text("[")  # spoilt
    assert chosen(config)[0].update.remat == "full"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"windows": SlidingWindows((8, 8, 0), local_theta=1e4)}, marks=pytest.mark.slow),
        {"extras": SomeExtras(rotary_layers=(True, False)), "windows": SlidingWindows((8, 8, 0))},
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
    seconds = choices.timed_rows((8, 32), config, model, lambda rows: config.update, mesh, measure=traced)
    assert seconds == {8: 1.0, 32: 1.0} and names == ["8", "32"]

"""The Tinker API by plain HTTP: order, retries, snapshots that do not mix, checkpoints, refusals."""

import os
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grpo_roc_jax.serving.server import ServerLimits
from grpo_roc_jax.serving.tinker.journal import Journal, LoggedCall
from grpo_roc_jax.serving.tinker.store import About, CheckpointPath, Store
from tests.helpers.tinker_server import batch, fill, served


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with served(tmp_path_factory.mktemp("store")) as found:
        yield found


def datum(*ids):
    """Text of these ids: each is predicted from those before it."""
    return (ids[:-1], {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)})


ROW = datum(3, 1, 4, 1, 5, 9, 2, 6)


def test_calls_run_by_their_numbers_and_once(client):
    """The same calls in order, and as 3, 2, 1 with each body posted twice."""
    session = client.session()
    first, second = client.model(session, 0), client.model(session, 1)
    other = datum(2, 7, 1, 8, 2, 8)
    client.send(batch(first, 1, [ROW]))
    client.send(batch(first, 2, [other]))
    wanted = client.result(client.step(first, 3))["metrics"]["grad_norm:mean"]
    ids = []
    for _ in range(2):
        ids.append(client.step(second, 3)["request_id"])
        ids += [client.send(batch(second, 2, [other])), client.send(batch(second, 1, [ROW]))]
    assert ids[:3] == ids[3:]
    assert client.result(ids[0])["metrics"]["grad_norm:mean"] == wanted
    status, answer = client.ask("forward_backward", batch(second, 1, [other]), kind="application/x-protobuf")
    assert status == 400 and "another body" in answer["detail"]
    weights = [client.output(client.send(batch(name, 4, [ROW], forward_only=True)))[0] for name in (first, second)]
    np.testing.assert_array_equal(*weights)


def test_forward_adds_no_gradient_and_a_step_without_one_is_refused(client):
    name = client.model(client.session())
    logprobs, metrics = client.output(client.send(batch(name, 1, [ROW], forward_only=True)))
    np.testing.assert_allclose(metrics["loss:sum"], -np.sum(logprobs[0]), rtol=1e-6)
    answer = client.result(client.step(name, 2))
    assert answer["category"] == "user" and "forward_backward" in answer["error"]


def test_a_step_after_a_call_that_failed_is_refused_and_the_next_begins_anew(client):
    name = client.model(client.session())
    client.send(batch(name, 1, [ROW]))
    failed = client.result(client.send(batch(name, 2, [datum(1, 511, 600)])))
    assert failed["category"] == "user" and "600" in failed["error"]
    assert "600" in client.result(client.step(name, 3))["error"]
    client.send(batch(name, 4, [ROW]))
    once = client.result(client.step(name, 5))["metrics"]["grad_norm:mean"]
    alone = client.model(client.session())
    client.send(batch(alone, 1, [ROW]))
    assert client.result(client.step(alone, 2))["metrics"]["grad_norm:mean"] == once


def test_a_forward_that_was_refused_leaves_the_gradients_of_other_calls(client):
    """It has no part in them, whether its data were read or not."""
    name = client.model(client.session())
    client.send(batch(name, 1, [ROW]))
    unread = fill("Request", model_id=name, seq_id=2, loss_fn="cross_entropy", forward_only=True)
    unread.data.add().model_input.add().image = b"x"
    assert client.ask("forward_backward", unread.SerializeToString(), kind="application/x-protobuf")[0] == 400
    assert client.result(client.send(batch(name, 3, [datum(1, 511, 600)], forward_only=True)))["category"] == "user"
    assert client.result(client.step(name, 4))["metrics"]["update_skipped:sum"] == 0


def test_weights_that_are_loaded_end_what_failed_before(client):
    name = client.model(client.session())
    path = client.result(client.post("save_weights", model_id=name, seq_id=1, path="a"))["path"]
    client.send(batch(name, 2, [datum(1, 511, 600)]))
    client.post("load_weights", model_id=name, seq_id=3, path=path, optimizer=True)
    client.send(batch(name, 4, [ROW]))
    assert client.result(client.step(name, 5))["metrics"]["update_skipped:sum"] == 0


@pytest.mark.parametrize("adam", [{"eps": 0.0}, {"weight_decay": 3e38, "learning_rate": 1e3}])
def test_a_step_that_would_leave_no_numbers_is_dropped(client, adam):
    """The gradient of a new adapter is zero in part, and 0 / 0 is none; so is what lies beyond float32."""
    name = client.model(client.session())
    before = client.output(client.send(batch(name, 1, [ROW])))[0][0]
    assert client.result(client.step(name, 2, **adam))["metrics"]["update_skipped:sum"] == 1
    np.testing.assert_array_equal(client.output(client.send(batch(name, 3, [ROW])))[0][0], before)
    assert client.result(client.step(name, 4))["metrics"]["update_skipped:sum"] == 0


def test_data_of_one_call_may_have_other_numbers_of_targets(client):
    name = client.model(client.session())
    targets, weights = np.array([[1, 2, 8], [3, 4, 9]]), np.array([[0.5, 0.5, 0], [1, -1, 0]], np.float32)
    data = [([1, 2], {"target_tokens": targets[:, :k], "weights": weights[:, :k]}) for k in (2, 2, 3, 1)]
    data.insert(2, ROW)
    together, _ = client.output(client.send(batch(name, 1, data)))
    assert [one.shape for one in together] == [(2, 2), (2, 2), (7,), (2, 3), (2, 1)]
    for seq, (row, found) in enumerate(zip(data, together, strict=True), 2):
        np.testing.assert_allclose(client.output(client.send(batch(name, seq, [row])))[0][0], found, atol=1e-5)


def test_one_number_is_one_snapshot(client):
    name = client.model(client.session())
    sampler = sampler_of(client, name, 1, 0)
    drawn = tokens_of(client.sample(sampler, 0, [3, 1, 4]))
    client.send(batch(name, 2, [ROW]))
    client.step(name, 3, learning_rate=0.5)
    body = {"model_id": name, "seq_id": 4, "sampling_session_seq_id": 0}
    status, answer = client.ask("save_weights_for_sampler", body)
    assert status == 400 and "count sampling_session_seq_id up" in answer["detail"]
    again = client.post("save_weights_for_sampler", model_id=name, seq_id=1, sampling_session_seq_id=0)
    assert client.result(again)["sampling_session_id"] == sampler, "the same call"
    assert tokens_of(client.sample(sampler, 1, [3, 1, 4])) == drawn


def sampler_of(client, name, seq, number):
    answer = client.post("save_weights_for_sampler", model_id=name, seq_id=seq, sampling_session_seq_id=number)
    return client.result(answer)["sampling_session_id"]


def tokens_of(response):
    return [np.frombuffer(one.tokens, "<i4").tolist() for one in response.sequences]


def test_models_of_two_ranks_train_interleaved_as_alone_and_snapshots_keep_their_weights(client):
    def train(names):
        found = {}
        for seq in (1, 3):
            for name in names:
                client.send(batch(name, seq, [ROW]))
            for name in names:
                client.step(name, seq + 1, learning_rate=0.05)
        for name in names:
            found[name] = client.output(client.send(batch(name, 5, [ROW], forward_only=True)))[0][0]
        return list(found.values())

    sessions = [client.session() for _ in range(3)]
    together = train([client.model(sessions[0], number, rank) for number, rank in ((0, 4), (1, 8))])
    alone = [train([client.model(one, 0, rank)])[0] for one, rank in zip(sessions[1:], (4, 8), strict=True)]
    np.testing.assert_array_equal(together, alone)
    name = f"{sessions[1]}:train:0"
    before = sampler_of(client, name, 6, 0)
    drawn = client.sample(before, 0, [3, 1, 4])
    client.send(batch(name, 7, [ROW]))
    client.result(client.step(name, 8, learning_rate=0.5))
    after = sampler_of(client, name, 9, 1)
    with ThreadPoolExecutor(4) as pool:  # both in flight at a time
        asks = [pool.submit(client.sample, session, 9, [3, 1, 4]) for session in (before, after)]
        old, new = (ask.result() for ask in asks)
    assert tokens_of(old) == tokens_of(drawn)
    again, first, other = (np.frombuffer(one.sequences[0].logprobs, "<f4") for one in (old, drawn, new))
    np.testing.assert_allclose(again, first, atol=1e-5)  # rows decode in programs of different widths
    assert len(other) != len(first) or abs(other - first).max() > 1e-3


def test_sampled_log_probabilities_are_those_of_training(client):
    name = client.model(client.session())
    client.send(batch(name, 1, [ROW]))
    client.step(name, 2, learning_rate=0.05)
    session, prompt = sampler_of(client, name, 3, 0), [3, 1, 4, 1]
    response = client.sample(session, 0, prompt, prompt_logprobs=True, topk_prompt_logprobs=2)
    text = [*prompt, *tokens_of(response)[0]]
    scored, _ = client.output(client.send(batch(name, 4, [datum(*text)], forward_only=True)))
    drawn = np.frombuffer(response.sequences[0].logprobs, "<f4")
    np.testing.assert_allclose(drawn, scored[0][len(prompt) - 1 :], atol=1e-4)
    known = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(known[0])
    np.testing.assert_allclose(known[1:], scored[0][: len(prompt) - 1], atol=1e-5)
    top = np.frombuffer(response.topk_prompt_logprobs.logprobs, "<f4").reshape(4, 2)
    assert (top[0] == -99999).all() and (top[1:, 0] >= known[1:] - 1e-5).all() and (top[1:, 0] >= top[1:, 1]).all()
    assert [one.stop_reason for one in response.sequences] == [1, 1]


def test_a_stop_token_ends_the_answer_and_belongs_to_it(client):
    session = sampler_of(client, client.model(client.session()), 1, 0)
    drawn = tokens_of(client.sample(session, 0, [3, 1], count=1))[0]
    response = client.sample(session, 1, [3, 1], count=1, params={"stop": [drawn[2]]})
    assert tokens_of(response)[0] == drawn[: drawn.index(drawn[2]) + 1]
    assert response.sequences[0].stop_reason == 0


def test_a_server_that_starts_again_goes_on_from_what_was_saved(tmp_path):
    def go_on(client, name, seq):
        client.send(batch(name, seq, [ROW]))
        norm = client.result(client.step(name, seq + 1, weight_decay=0.1))["metrics"]["grad_norm:mean"]
        return norm, client.output(client.send(batch(name, seq + 2, [ROW], forward_only=True)))[0][0]

    with served(tmp_path) as client:
        name = client.model(client.session())
        client.send(batch(name, 1, [ROW]))
        client.step(name, 2)
        path = client.result(client.post("save_weights", model_id=name, seq_id=3, path="last"))["path"]
        assert path == f"tinker://{name}/weights/last"
        sampled = client.post("save_weights_for_sampler", model_id=name, seq_id=4, path="last")
        sampled = client.result(sampled)["path"]
        wanted = go_on(client, name, 5)
    (tmp_path / ".new-left").mkdir()  # what a killed server leaves
    with served(tmp_path) as client:
        assert client.ask("get_info", {"model_id": name})[0] == 200
        session = client.session()
        loaded = client.post("load_weights", session_id=session, model_seq_id=0, path=path, optimizer=True)
        again = client.result(loaded)["model_id"]
        assert again == f"{session}:train:0"
        assert client.post("get_info", model_id=again)["lora_rank"] == 4
        norm, logprobs = go_on(client, again, 1)
        assert norm == wanted[0]
        np.testing.assert_array_equal(logprobs, wanted[1])
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampled}
        assert tokens_of(client.sample(client.post("create_sampling_session", **body)["sampling_session_id"], 0, [3]))
        listed = client.ask(f"training_runs/{name}/checkpoints", method="GET")[1]["checkpoints"]
        assert [one["checkpoint_id"] for one in listed] == ["weights/last", "sampler_weights/last"]
        route = f"training_runs/{name}/checkpoints/weights/last"
        urls = client.ask(f"{route}/external_weights_urls", method="GET")[1]["urls"]
        status, content = client.ask(urls["state.safetensors"].partition("/api/v1/")[2], method="GET")
        assert status == 200
        assert content == (tmp_path / name / "weights" / "last" / "state.safetensors").read_bytes()
        assert client.ask(route, method="DELETE")[0] == 200
        status, answer = client.ask("weights_info", {"tinker_path": path})
        assert status == 404 and "no checkpoint" in answer["detail"]


def test_a_checkpoint_whose_writing_was_cut_is_not_there(tmp_path, monkeypatch):
    store, checkpoint = Store(tmp_path), CheckpointPath("m", "weights", "one")
    about = About("small", 4, 32.0, ("q_proj",), 0, 0, time.time())
    store.save(checkpoint, about, {"a": np.ones(2, np.float32)}, overwrite=False)

    def cut(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", cut)
        for name in ("one", "two"):
            with pytest.raises(OSError, match="no space"):
                store.save(CheckpointPath("m", "weights", name), about, {"a": np.zeros(2, np.float32)}, overwrite=True)
    assert [str(found) for found, _ in store.checkpoints()] == ["tinker://m/weights/one"]
    np.testing.assert_array_equal(store.load(checkpoint, {"a": _leaf()})["a"], [1, 1])
    assert [path.name for path in Path(tmp_path).iterdir() if path.name.startswith(".new")] == []


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one_or_the_new(tmp_path, monkeypatch):
    store, checkpoint, renamed = Store(tmp_path), CheckpointPath("m", "weights", "one"), os.rename
    about = About("small", 4, 32.0, ("q_proj",), 0, 0, time.time())
    for most, value in ((1, 1), (2, 2)):
        store.save(checkpoint, about, {"a": np.ones(2, np.float32)}, overwrite=True)
        left = [most]

        def killed(*places, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            renamed(*places)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", killed)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            with suppress(KeyboardInterrupt):
                store.save(checkpoint, about, {"a": np.full(2, 2, np.float32)}, overwrite=True)
        store.repair()
        np.testing.assert_array_equal(store.load(checkpoint, {"a": _leaf()})["a"], [value, value])
        assert not list(tmp_path.glob(".old-*"))


def _leaf():
    import jax

    return jax.device_put(np.zeros(2, np.float32), jax.devices()[0])


REFUSED = [
    ("create_model", {"base_model": "other"}, "served here: small"),
    ("create_model", {"base_model": "small", "optimizer_config": {"type": "dimuon"}}, "must be adamw"),
    ("create_model", {"base_model": "small", "lora_config": {"rank": 0}}, "must be 1 to"),
    ("load_weights", {"path": "tinker://../weights/x", "optimizer": False}, "must be letters"),
    ("load_weights", {"path": "nothing", "optimizer": False}, "must be tinker://"),
]


@pytest.mark.parametrize(("path", "body", "remedy"), REFUSED)
def test_what_cannot_be_is_refused_at_once_with_what_to_change(client, path, body, remedy):
    begun = time.perf_counter()
    status, answer = client.ask(path, {"session_id": client.session(), "model_seq_id": 0} | body)
    assert 400 <= status < 500 and status not in (408, 409, 429) and remedy in answer["detail"]
    assert time.perf_counter() - begun < 1


def test_data_that_do_not_fit_fail_with_what_to_change(client):
    name = client.model(client.session())
    cases = [
        (batch(name, 1, [ROW], "stable_reinforce"), "importance_sampling"),
        (batch(name, 2, [datum(*[1] * 200)]), "--context"),
        (batch(name, 3, [ROW], "ppo"), "needs target_tokens, advantages, logprobs"),
        (batch(name, 4, [(ROW[0], {"target_tokens": np.array([1]), "weights": np.ones(1)})]), "must fit"),
    ]
    for body, remedy in cases:
        assert remedy in client.result(client.send(body))["error"]


def test_a_call_that_was_refused_holds_up_no_other(client):
    name = client.model(client.session())
    image = fill("Request", model_id=name, seq_id=1, loss_fn="cross_entropy")
    image.data.add().model_input.add().image = b"png"
    status, answer = client.ask("forward_backward", image.SerializeToString(), kind="application/x-protobuf")
    assert status == 400 and "image" in answer["detail"]
    assert "image" in client.result(client.step(name, 2))["error"]
    assert client.ask("save_weights", {"model_id": name, "seq_id": 3, "path": "../up"})[0] == 400
    client.send(batch(name, 4, [ROW]))
    assert client.result(client.step(name, 5))["metrics"]["update_skipped:sum"] == 0


def test_a_session_that_ended_is_forgotten(client):
    session = client.session()
    name = client.model(session)
    client.post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
    assert client.ask("get_info", {"model_id": name})[0] == 404
    assert client.ask("session_heartbeat", {"session_id": session})[0] == 410


def test_a_future_that_is_not_known_and_json_for_tensors_are_refused(client):
    assert client.ask("retrieve_future", {"request_id": "none@model"})[0] == 404
    assert client.ask("retrieve_future", {"request_id": "none"})[0] == 410  # the client then samples anew
    status, answer = client.ask("forward_backward", {"model_id": "m"})
    assert status == 422 and "protobuf" in answer["detail"]


def test_with_a_token_only_its_holder_is_answered(tmp_path):
    with served(tmp_path, token="tml-secret") as client:
        for headers in ({}, {"X_Api_Key": "tml-other"}, {"Authorization": "Bearer tml"}):
            status, answer = client.ask("create_session", {}, **headers)
            assert status == 401 and "TINKER_API_KEY" in answer["detail"]
        assert client.ask("create_session", {}, X_Api_Key="tml-secret")[0] == 200
        assert client.ask("files/m/weights/n/state.safetensors?key=0", method="GET")[0] == 401


CALLS = 27
"""Each third is a step, so that there are three states in the journal, of which two are kept."""


def calls_of_a_run(client, name, first=1):
    """(number, id) of the calls of a run from a number on; the fifth is refused."""
    for seq in range(first, CALLS + 1):
        if seq == 5:
            assert client.ask("save_weights", {"model_id": name, "seq_id": seq, "path": "../up"})[0] == 400
        elif seq % 3 == 0:
            yield seq, client.step(name, seq, weight_decay=0.1)["request_id"]
        elif seq == 7:
            yield seq, client.post("save_weights", model_id=name, seq_id=seq, path="seven")["request_id"]
        else:
            yield seq, client.send(batch(name, seq, [ROW if seq % 2 else datum(2, 7, 1, 8, 2, 8)]))


@pytest.mark.parametrize("cut", [1, 8, 26, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (4, 7, 13))])
def test_what_was_accepted_survives_a_kill(tmp_path, cut):
    """A copy of the folder right after a call was accepted is what a kill leaves. Another server goes on with the
    same ids, results and weights as without the kill."""
    wanted, folder, copy = {}, tmp_path / "first", tmp_path / "second"
    folder.mkdir()
    with served(folder) as client:
        session = client.session()
        name = client.model(session)
        for seq, request in calls_of_a_run(client, name):
            if seq == cut:
                shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".new-*"))
                accepted = [*wanted, request]
            wanted[request] = client.result(request)
        weights = client.output(client.send(batch(name, CALLS + 1, [ROW], forward_only=True)))[0][0]
    with (copy / name / "journal" / "calls").open("ab") as file:
        file.write(b"0000004f{")  # a call that was being written
    with served(copy) as client:
        client.post("session_heartbeat", session_id=session)
        known = [one for one in accepted if client.ask("retrieve_future", {"request_id": one})[0] != 404]
        assert known == (accepted if cut < 25 else accepted[-14:]) and len(known) > 0
        assert [client.result(request) for request in known] == [wanted[request] for request in known]
        rest = [client.result(request) for _, request in calls_of_a_run(client, name, cut + 1)]
        assert rest == list(wanted.values())[len(accepted) :]
        last = client.output(client.send(batch(name, CALLS + 1, [ROW], forward_only=True)))[0][0]
        np.testing.assert_array_equal(last, weights)


def test_a_call_that_a_full_disk_refused_runs_when_it_is_sent_again(tmp_path):
    with served(tmp_path) as client:
        name = client.model(client.session())
        calls, kept = (tmp_path / name / "journal" / file for file in ("calls", "kept"))
        calls.rename(kept)
        calls.symlink_to("/dev/full")
        status, answer = client.ask("forward_backward", batch(name, 1, [ROW]), kind="application/x-protobuf")
        assert status == 503 and "No space left" in answer["detail"] and "send it again" in answer["detail"]
        kept.replace(calls)
        client.result(client.send(batch(name, 1, [ROW])))
        assert client.result(client.step(name, 2))["metrics"]["update_skipped:sum"] == 0


def test_a_part_of_a_record_does_not_hide_those_after_it(tmp_path):
    journal, call = Journal(Store(tmp_path)), LoggedCall("optim_step", 1, "id", b"body" * 9)
    journal.append("model", call)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "model/journal/calls").stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            journal.append("model", replace(call, seq=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append("model", replace(call, seq=3))
    assert [known.seq for known in journal.calls("model")] == [1, 3]


def test_a_model_that_was_being_made_and_samplers_are_there_again(tmp_path):
    with served(tmp_path) as client:
        session, lora = client.session(), {"rank": 4, "seed": 1}
        made = {"session_id": session, "model_seq_id": 0, "base_model": "small", "lora_config": lora}
        request = client.post("create_model", **made)["request_id"]
        name = client.result(request)["model_id"]
        saved = client.post("save_weights_for_sampler", model_id=name, seq_id=1, path="first")
        base = {"session_id": session, "sampling_session_seq_id": 0, "model_path": client.result(saved)["path"]}
        sampler = client.post("create_sampling_session", **base)["sampling_session_id"]
        drawn = tokens_of(client.sample(sampler, 0, [3, 1]))
    shutil.rmtree(tmp_path / name / "journal" / "1")  # it was accepted, but not made yet
    with served(tmp_path) as client:
        assert client.result(request) == {"model_id": name}
        saved = client.post("save_weights_for_sampler", model_id=name, seq_id=2, sampling_session_seq_id=1)
        mine = client.result(saved)["sampling_session_id"]
        assert tokens_of(client.sample(sampler, 0, [3, 1])) == drawn
    with served(tmp_path) as client:
        assert client.result(saved) == {"sampling_session_id": mine, "type": "save_weights_for_sampler"}
        assert tokens_of(client.sample(mine, 0, [3, 1])) == drawn
        assert client.post("create_model", **made)["request_id"] == request, "the same call, not another model"
        client.post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
    with served(tmp_path) as client:
        assert client.ask("session_heartbeat", {"session_id": session})[0] == 410
        assert client.ask("get_info", {"model_id": name})[0] == 404 and not list(tmp_path.glob("*/journal"))


def test_a_model_that_cannot_be_made_again_says_why(tmp_path):
    """It was being loaded from a checkpoint that is gone at the next start."""
    with served(tmp_path) as client:
        session = client.session()
        name = client.model(session)
        path = client.result(client.post("save_weights", model_id=name, seq_id=1, path="gone"))["path"]
        made = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": True}
        request = client.post("load_weights", **made)
        new = client.result(request)["model_id"]
        call = client.step(new, 1)
        client.result(call)
    shutil.rmtree(tmp_path / new / "journal" / "1")  # it was accepted, but not made yet
    shutil.rmtree(tmp_path / name / "weights" / "gone")
    with served(tmp_path) as client:
        assert "no checkpoint" in client.result(request)["error"]
        assert "no model" in client.result(call)["error"]
        status, answer = client.ask("get_info", {"model_id": new})
        assert status == 404 and "load the last checkpoint" in answer["detail"]
        assert client.ask("load_weights", made)[0] == 404


def test_a_step_is_done_although_its_state_cannot_be_saved(tmp_path, monkeypatch):
    renamed = os.rename

    def full(source, target):
        if Path(target).name == "9":
            raise OSError("No space left on device")
        renamed(source, target)

    with served(tmp_path) as client:
        name = client.model(client.session())
        monkeypatch.setattr(os, "rename", full)  # the fourth step is call 8, the state after it is that before call 9
        for step in range(5):
            client.send(batch(name, 2 * step + 1, [ROW]))
            assert client.result(client.step(name, 2 * step + 2))["metrics"]["update_skipped:sum"] == 0
        states = [int(path.name) for path in (tmp_path / name / "journal").iterdir() if path.is_dir()]
        assert sorted(states) == [1, 11]


def test_a_kill_brings_back_no_checkpoint_and_no_other_weights(tmp_path):
    """What a model has loaded may be deleted or overwritten since, and is the same when it is loaded again; what was
    deleted stays so; a sampler never takes what was written over its checkpoint."""

    def saved(path, seq, name, **fields):
        return client.result(client.post(path, model_id=model, seq_id=seq, path=name, **fields))["path"]

    with served(tmp_path) as client:
        session = client.session()
        model = client.model(session)
        paths = [saved("save_weights", 1 + i, name) for i, name in enumerate(("gone", "changed"))]
        client.send(batch(model, 3, [ROW]))
        client.step(model, 4, learning_rate=0.3)
        sampler_path = saved("save_weights_for_sampler", 5, "same")
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampler_path}
        sampler = client.post("create_sampling_session", **body)["sampling_session_id"]
        for i, path in enumerate(paths):
            client.post("load_weights", model_id=model, seq_id=6 + 3 * i, path=path, optimizer=bool(i))
            client.send(batch(model, 7 + 3 * i, [ROW]))
            client.result(client.step(model, 8 + 3 * i, learning_rate=0.1))
        assert client.ask(f"training_runs/{model}/checkpoints/weights/gone", method="DELETE")[0] == 200
        saved("save_weights", 12, "changed", overwrite=True)
        saved("save_weights_for_sampler", 13, "same")
        last = client.output(client.send(batch(model, 14, [ROW], forward_only=True)))[0][0]
    with served(tmp_path) as client:
        again = client.output(client.send(batch(model, 15, [ROW], forward_only=True)))[0][0]
        np.testing.assert_array_equal(again, last)
        listed = client.ask(f"training_runs/{model}/checkpoints", method="GET")[1]["checkpoints"]
        assert {one["checkpoint_id"] for one in listed} == {"weights/changed", "sampler_weights/same"}
        prompt = {"chunks": [{"tokens": [3], "type": "encoded_text"}]}
        status, answer = client.ask("asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt})
        assert status == 404 and "was written again since" in answer["detail"]


def test_a_kill_long_after_a_snapshot_leaves_it(tmp_path):
    """The calls that made snapshots without a name are not run again after so many steps; those last used are there."""

    def train(seq):
        client.send(batch(model, seq, [ROW]))
        client.result(client.step(model, seq + 1, learning_rate=0.1))

    with served(tmp_path, samplers=2) as client:
        model = client.model(client.session())
        samplers, drawn = [], {}
        for number in range(3):
            samplers.append(sampler_of(client, model, 1 + 3 * number, number))
            drawn[samplers[-1]] = tokens_of(client.sample(samplers[-1], 0, [3, 1, 4]))
            train(2 + 3 * number)
        assert tokens_of(client.sample(samplers[0], 1, [3, 1, 4])) == drawn[samplers[0]]
        for i in range(10):
            train(10 + 2 * i)
    with served(tmp_path, samplers=2) as client:  # nobody asks for them meanwhile
        for i in range(9):
            train(30 + 2 * i)
    with served(tmp_path, samplers=2) as client:
        for name in samplers[::2]:
            assert tokens_of(client.sample(name, 9, [3, 1, 4])) == drawn[name]
        body, status = {"sampling_session_id": samplers[1], "seq_id": 9, "prompt": {"chunks": [{"tokens": [3]}]}}, 503
        while status == 503:  # its model goes on first
            status, _ = client.ask("asample", body)
        assert status == 404, "used before the others, and two are kept"


def test_a_checkpoint_expires_when_it_was_told_to(client):
    name = client.model(client.session())
    saved = client.result(client.post("save_weights", model_id=name, seq_id=1, path="brief", ttl_seconds=0.5))["path"]
    assert client.post("weights_info", tinker_path=saved)["lora_rank"] == 4
    other = client.result(client.post("save_weights", model_id=name, seq_id=2, path="longer"))["path"]
    route = f"training_runs/{name}/checkpoints/weights/longer/ttl"
    assert client.ask(route, {"ttl_seconds": 0.5}, method="PUT")[0] == 200
    time.sleep(0.6)
    for path in (saved, other):
        status, answer = client.ask("weights_info", {"tinker_path": path})
        assert status == 404 and "no checkpoint" in answer["detail"]
    assert client.ask(f"training_runs/{name}/checkpoints", method="GET")[1]["checkpoints"] == []
    again = client.result(client.post("save_weights", model_id=name, seq_id=3, path="brief"))
    assert again["path"] == saved, "the name is free again"


def test_a_server_that_is_busy_says_so_and_when_to_ask_again(tmp_path):
    with served(tmp_path, limits=ServerLimits(waiting=1)) as client:
        name = client.model(client.session())
        saved = client.post("save_weights_for_sampler", model_id=name, seq_id=1, sampling_session_seq_id=0)
        sampler = client.result(saved)["sampling_session_id"]
        prompt = {"chunks": [{"tokens": [3], "type": "encoded_text"}]}
        body = {"sampling_session_id": sampler, "num_samples": 1, "prompt": prompt}
        body["sampling_params"] = {"max_tokens": 60, "temperature": 1.0, "stop": []}
        answers = [client.ask("asample", body | {"seq_id": seq}) for seq in range(3)]
        assert answers[0][0] == 200 and {status for status, _ in answers[1:]} == {429}
        assert "ask again later" in answers[1][1]["detail"]
        assert isinstance(client.result(answers[0][1]), bytes)
        assert client.ask("asample", body | {"seq_id": 1})[0] == 200, "the same call, once there is room"

"""The Tinker API by plain HTTP: order, retries, snapshots that do not mix, checkpoints, refusals, random histories."""

import json
import os
import random
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from grpo_roc_jax.serving.server import ServerLimits
from grpo_roc_jax.serving.tinker.journal import Journal, LoggedCall
from grpo_roc_jax.serving.tinker.store import About, CheckpointPath, Store
from tests.helpers.tinker_server import (
    OTHER,
    ROLLOUT,
    ROW,
    batch,
    classes,
    datum,
    encoded,
    logprobs_of,
    served,
    tokens_of,
)
from tests.helpers.tinker_server import client as client  # a fixture


def test_calls_run_by_their_numbers_and_once(client):
    session = client.session()
    first, second = client.model(session, 0), client.model(session, 1)
    client.send(batch(first, 1, [ROW]))
    expected = client.train(first, 2, OTHER)["grad_norm:mean"]
    ids = []
    for _ in range(2):
        ids.append(client.step(second, 3)["request_id"])
        ids += [client.send(batch(second, 2, [OTHER])), client.send(batch(second, 1, [ROW]))]
    assert ids[:3] == ids[3:]
    assert client.result(ids[0])["metrics"]["grad_norm:mean"] == expected
    assert "another body" in client.refused(400, "forward_backward", batch(second, 1, [OTHER]))
    np.testing.assert_array_equal(client.score(first, 4, ROW), client.score(second, 4, ROW))


def test_what_a_call_that_failed_does_to_the_steps_after_it(client):
    name, bad = client.new(), [datum(1, 511, 600)]
    logprobs, metrics = client.output(client.send(batch(name, 1, [ROW], forward_only=True)))
    np.testing.assert_allclose(metrics["loss:sum"], -np.sum(logprobs[0]), rtol=1e-6)
    answer = client.result(client.step(name, 2))
    assert answer["category"] == "user" and "forward_backward" in answer["error"], "a forward adds no gradient"
    client.send(batch(name, 3, [ROW]))
    failed = client.result(client.send(batch(name, 4, bad)))
    assert failed["category"] == "user" and "600" in failed["error"]
    error = client.result(client.step(name, 5))["error"]
    assert "600" in error and "gradients were dropped" in error
    once = client.train(name, 6, ROW)["grad_norm:mean"]
    assert client.train(client.new(), 1, ROW)["grad_norm:mean"] == once, "the next step begins anew"
    # A forward that was refused has no part in the gradients of others, whether its data were read or not.
    client.send(batch(name, 8, [ROW]))
    unread = classes()["Request"](model_id=name, seq_id=9, loss_fn="cross_entropy", forward_only=True)
    unread.data.add().model_input.add().image = b"x"
    assert client.ask("forward_backward", unread.SerializeToString())[0] == 400
    assert client.result(client.send(batch(name, 10, bad, forward_only=True)))["category"] == "user"
    assert client.result(client.step(name, 11))["metrics"]["update_skipped:sum"] == 0
    path = client.save(name, 12, "a")  # weights that are loaded end what failed before
    client.send(batch(name, 13, bad))
    client.post("load_weights", model_id=name, seq_id=14, path=path, optimizer=True)
    assert client.train(name, 15, ROW)["update_skipped:sum"] == 0


@pytest.mark.parametrize("adam", [{"eps": 0.0}, {"weight_decay": 3e38, "learning_rate": 1e3}])
def test_a_step_that_would_leave_no_numbers_is_dropped(client, adam):
    """The gradient of a new adapter is zero in part, and 0 / 0 is none; so is what lies beyond float32."""
    name = client.new()
    before = client.score(name, 1, ROW)
    assert client.train(name, 2, ROW, **adam)["update_skipped:sum"] == 1
    np.testing.assert_array_equal(client.score(name, 4, ROW), before)
    assert client.train(name, 5, ROW)["update_skipped:sum"] == 0


def test_data_of_one_call_may_have_other_numbers_of_targets(client):
    name = client.new()
    targets, weights = np.array([[1, 2, 8], [3, 4, 9]]), np.array([[0.5, 0.5, 0], [1, -1, 0]], np.float32)
    data = [([1, 2], {"target_tokens": targets[:, :k], "weights": weights[:, :k]}) for k in (2, 2, 3, 1)]
    data.insert(2, ROW)
    together, _ = client.output(client.send(batch(name, 1, data)))
    assert [array.shape for array in together] == [(2, 2), (2, 2), (7,), (2, 3), (2, 1)]
    for seq, (row, logprobs) in enumerate(zip(data, together, strict=True), 2):
        np.testing.assert_allclose(client.output(client.send(batch(name, seq, [row])))[0][0], logprobs, atol=1e-5)


def test_one_number_is_one_sampler(client):
    session = client.session()
    name = client.model(session)
    sampler = client.sampler(name, 1)
    drawn = client.tokens(sampler, 0, [3, 1, 4])
    client.train(name, 2, ROW, learning_rate=0.5)
    ids = {"session_id": session, "sampling_session_seq_id": 1}
    made = client.post("create_sampling_session", **ids, base_model="small")
    path = client.save(name, 4, "x", "save_weights_for_sampler")
    for call, body in (
        ("save_weights_for_sampler", {"model_id": name, "seq_id": 5, "sampling_session_seq_id": 0}),
        ("save_weights_for_sampler", {"model_id": name, "seq_id": 6, "sampling_session_seq_id": 1}),
        ("create_sampling_session", ids | {"sampling_session_seq_id": 0, "base_model": "small"}),
        ("create_sampling_session", ids | {"model_path": path}),
    ):
        assert "count sampling_session_seq_id up" in client.refused(400, call, body)
    assert client.sampler(name, 1) == sampler, "the same call"
    assert client.post("create_sampling_session", **ids, base_model="small") == made
    assert client.tokens(sampler, 1, [3, 1, 4]) == drawn


def test_models_of_two_ranks_train_interleaved_as_alone_and_snapshots_keep_their_weights(client):
    def train(names):
        for seq in (1, 3):
            for name in names:
                client.send(batch(name, seq, [ROW]))
            for name in names:
                client.step(name, seq + 1, learning_rate=0.05)
        return [client.score(name, 5, ROW)[0] for name in names]

    session, sessions = client.session(), [client.session() for _ in range(2)]
    together = train([client.model(session, number, rank) for number, rank in ((0, 4), (1, 8))])
    alone = [train([client.model(one, 0, rank)])[0] for one, rank in zip(sessions, (4, 8), strict=True)]
    np.testing.assert_array_equal(together, alone)
    name = f"{sessions[0]}:train:0"
    before = client.sampler(name, 6, 0)
    drawn = client.sample(before, 0, [3, 1, 4])
    client.train(name, 7, ROW, learning_rate=0.5)
    after = client.sampler(name, 9, 1)
    with ThreadPoolExecutor(4) as pool:  # both in flight at a time
        asks = [pool.submit(client.sample, session, 9, [3, 1, 4]) for session in (before, after)]
        old, new = (ask.result() for ask in asks)
    assert tokens_of(old) == tokens_of(drawn)
    again, first, other = (np.frombuffer(one.sequences[0].logprobs, "<f4") for one in (old, drawn, new))
    np.testing.assert_allclose(again, first, atol=1e-5)  # rows decode in programs of different widths
    assert len(other) != len(first) or abs(other - first).max() > 1e-3


def test_sampled_log_probabilities_are_those_of_training(client):
    name = client.new()
    client.train(name, 1, ROW, learning_rate=0.05)
    session, prompt = client.sampler(name, 3), [3, 1, 4, 1]
    response = client.sample(session, 0, prompt, prompt_logprobs=True, topk_prompt_logprobs=2)
    text = [*prompt, *tokens_of(response)[0]]
    scored = client.score(name, 4, datum(*text))
    drawn = np.frombuffer(response.sequences[0].logprobs, "<f4")
    np.testing.assert_allclose(drawn, scored[0][len(prompt) - 1 :], atol=1e-4)
    known = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(known[0])
    np.testing.assert_allclose(known[1:], scored[0][: len(prompt) - 1], atol=1e-5)
    top = np.frombuffer(response.topk_prompt_logprobs.logprobs, "<f4").reshape(4, 2)
    assert (top[0] == -99999).all() and (top[1:, 0] >= known[1:] - 1e-5).all() and (top[1:, 0] >= top[1:, 1]).all()
    assert [sequence.stop_reason for sequence in response.sequences] == [1, 1]
    drawn = text[len(prompt) :]
    response = client.sample(session, 1, prompt, params={"stop": [drawn[2]]})
    assert tokens_of(response)[0] == drawn[: drawn.index(drawn[2]) + 1], "a stop token belongs to the answer"
    assert response.sequences[0].stop_reason == 0
    cuts = ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6})
    greedy = [client.tokens(session, 2 + seq, prompt, params=cut) for seq, cut in enumerate(cuts)]
    assert greedy[0] == greedy[1] == greedy[2] != [drawn] * 2, "a truncation cuts what is drawn"
    dense = {"data": [1, -1, 4, -1, 1, -1], "shape": [3, 2]}
    fields = {"topk_sample_logprobs": 2, "prompt_alt_tokens_k": 5, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    response = client.sample(session, 5, prompt, target_prompt_logprobs=dense, **fields)
    targets = np.frombuffer(response.target_prompt_logprobs.dense, "<f4").reshape(3, 2)
    np.testing.assert_allclose(targets[:, 0], known[1:], atol=1e-6)
    assert not targets[:, 1].any() and list(response.prompt_alt_tokens.tokens.shape) == [3, 5]
    last = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(last[:2]).all() and not np.isnan(last[2:]).any()
    sampled = response.sequences[0]
    assert (np.frombuffer(sampled.topk.logprobs, "<f4")[::2] >= np.frombuffer(sampled.logprobs, "<f4") - 1e-4).all()
    sparse = {"data": [4, 77], "shape": [3, 600], "sparse_crow_indices": [0, 0, 2, 2], "sparse_col_indices": [0, 599]}
    named = client.sample(session, 6, prompt, target_prompt_logprobs=sparse).target_prompt_logprobs
    assert list(named.shape) == [3, 600] and np.frombuffer(named.sparse.col, "<i8").tolist() == [0, 599]
    np.testing.assert_allclose(np.frombuffer(named.sparse.values, "<f4")[0], known[2], atol=1e-6)


def test_a_sequence_that_fills_the_context_is_scored(client):
    """As recipes score what was sampled: they ask for one more token, for which there is no room."""
    session, prompt = client.sampler(client.new(), 1), [*range(100, 200)]
    sampled = client.sample(session, 0, prompt, count=1, params={"max_tokens": 500})
    text, one = [*prompt, *tokens_of(sampled)[0]], {"max_tokens": 1}
    assert len(text) == ROLLOUT.max_row_tokens
    scored = client.sample(session, 1, text, prompt_logprobs=True, params=one)
    assert tokens_of(scored) == [[], []] and [sequence.stop_reason for sequence in scored.sequences] == [1, 1]
    known, drawn = (np.frombuffer(part, "<f4") for part in (scored.prompt_logprobs, sampled.sequences[0].logprobs))
    np.testing.assert_allclose(known[len(prompt) :], drawn, atol=1e-4)
    body = {"sampling_session_id": session, "seq_id": 2, "prompt": encoded(*text)}
    for fields in ({"sampling_params": one}, {"prompt_logprobs": True, "sampling_params": {"max_tokens": 2}}):
        assert "leaves no room" in client.refused(400, "asample", body | fields)


def test_a_server_that_starts_again_goes_on_from_what_was_saved(tmp_path):
    def go_on(client, name, seq):
        norm = client.train(name, seq, ROW, weight_decay=0.1)["grad_norm:mean"]
        return norm, client.score(name, seq + 2, ROW)[0]

    with served(tmp_path) as client:
        name = client.new()
        client.train(name, 1, ROW)
        path = client.save(name, 3, "last")
        assert path == f"tinker://{name}/weights/last"
        sampled = client.save(name, 4, "last", "save_weights_for_sampler")
        wanted = go_on(client, name, 5)
    (tmp_path / ".new-left").mkdir()  # what a killed server leaves
    with served(tmp_path) as client:
        session = client.session()
        loaded = client.post("load_weights", session_id=session, model_seq_id=0, path=path, optimizer=True)
        again = client.result(loaded)["model_id"]
        assert again == f"{session}:train:0"
        assert client.post("get_info", model_id=again)["lora_rank"] == 4
        np.testing.assert_equal(go_on(client, again, 1), wanted)
        sampler = client.sampler_of(session, model_path=sampled)
        drawn = client.tokens(sampler, 0, [3])
        listed = client.get(f"training_runs/{name}/checkpoints")[1]["checkpoints"]
        assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/last", "sampler_weights/last"]
        route = f"training_runs/{name}/checkpoints/weights/last"
        urls = client.get(f"{route}/external_weights_urls")[1]["urls"]
        content = (tmp_path / name / "weights" / "last" / "state.safetensors").read_bytes()
        assert client.get(urls["state.safetensors"].partition("/api/v1/")[2]) == (200, content)
        for deleted in (route, route.replace("/weights/", "/sampler_weights/")):
            assert [client.get(deleted, "DELETE")[0] for _ in range(2)] == [200, 404]
        assert "no checkpoint" in client.refused(404, "weights_info", {"tinker_path": path})
        assert client.tokens(sampler, 1, [3]) == drawn, "samplers that have it go on, and new ones miss it"
        body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": sampled}
        assert "no checkpoint" in client.refused(404, "create_sampling_session", body)


CHECKPOINT = CheckpointPath("m", "weights", "one")


def stored(store, value, path=CHECKPOINT):
    about = About("small", 4, 32.0, ("q_proj",), 0, 0, time.time())
    store.save(path, about, {"a": np.full(2, value, np.float32)}, overwrite=True)


def value_of(store):
    leaf = jax.device_put(np.zeros(2, np.float32), jax.devices()[0])
    return np.unique(store.load(CHECKPOINT, {"a": leaf})["a"]).tolist()


def test_a_checkpoint_whose_writing_was_cut_is_the_old_one_or_the_new(tmp_path, monkeypatch):
    store, renamed = Store(tmp_path), os.rename
    stored(store, 1)
    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError("no space")))
    for name in ("one", "two"):
        with pytest.raises(OSError, match="no space"):
            stored(store, 0, CheckpointPath("m", "weights", name))
    assert [str(path) for path, _ in store.checkpoints()] == ["tinker://m/weights/one"] and value_of(store) == [1]
    assert not list(tmp_path.glob(".new*"))
    for most, value in ((1, 1), (2, 2)):
        monkeypatch.setattr(os, "rename", renamed)
        stored(store, 1)
        left = iter(range(most))

        def killed(*places, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            renamed(*places)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", killed)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            with suppress(KeyboardInterrupt):
                stored(store, 2)
        store.repair()
        assert value_of(store) == [value] and not list(tmp_path.glob(".old-*"))


def test_data_that_do_not_fit_fail_with_what_to_change(client):
    name = client.new()
    cases = [
        (batch(name, 1, [ROW], "stable_reinforce"), "importance_sampling"),
        (batch(name, 2, [datum(*[1] * 200)]), "--context"),
        (batch(name, 3, [ROW], "ppo"), "needs target_tokens, advantages, logprobs"),
        (batch(name, 4, [(ROW[0], {"target_tokens": np.array([1]), "weights": np.ones(1)})]), "must fit"),
        (batch(name, 5, [(ROW[0], ROW[1] | {"advantages": [np.nan] * 7, "logprobs": [0.0] * 7})], "ppo"), "finite"),
    ]
    for body, remedy in cases:
        assert remedy in client.result(client.send(body))["error"]
    unread = {"advantages": [np.nan] * 7, "logprobs": [0.0] * 3}
    assert isinstance(client.result(client.send(batch(name, 6, [(ROW[0], ROW[1] | unread)]))), bytes)


def test_a_call_that_was_refused_holds_up_no_other(client):
    """The refused numbers are skipped, also those that never came to be read."""
    name = client.new()
    image = classes()["Request"](model_id=name, seq_id=1, loss_fn="cross_entropy")
    image.data.add().model_input.add().image = b"png"
    assert "image" in client.refused(400, "forward_backward", image.SerializeToString())
    assert "image" in client.result(client.step(name, 2))["error"]
    assert client.ask("save_weights", {"model_id": name, "seq_id": 3, "path": "../up"})[0] == 400
    for seq, adam in ((4, {"beta1": 2}), (5, {"eps": -1})):
        assert client.ask("optim_step", {"model_id": name, "seq_id": seq, "adam_params": adam})[0] == 400
    assert client.train(name, 6, ROW)["update_skipped:sum"] == 0
    assert client.ask("retrieve_future", {"request_id": "none@model"})[0] == 404
    assert client.ask("retrieve_future", {"request_id": "none"})[0] == 410  # the client then samples anew
    assert "protobuf" in client.refused(422, "forward_backward", {"model_id": "m"})


def test_with_a_token_only_its_holder_is_answered(tmp_path):
    with served(tmp_path, token="tml-secret") as client:
        for headers in ({}, {"X_Api_Key": "tml-other"}, {"Authorization": "Bearer tml"}):
            assert "TINKER_API_KEY" in client.refused(401, "create_session", {}, **headers)
        assert client.ask("create_session", {}, X_Api_Key="tml-secret")[0] == 200
        assert client.get("files/m/weights/n/state.safetensors?key=0")[0] == 401


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
            yield seq, client.send(batch(name, seq, [ROW if seq % 2 else OTHER]))


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
        weights = client.score(name, CALLS + 1, ROW)
    with (copy / name / "journal" / "calls").open("ab") as file:
        file.write(b"0000004f{")  # a call that was being written
    with served(copy) as client:
        client.post("session_heartbeat", session_id=session)
        known = [future for future in accepted if client.ask("retrieve_future", {"request_id": future})[0] != 404]
        assert known == (accepted if cut < 25 else accepted[-14:]) and len(known) > 0
        assert [client.result(request) for request in known] == [wanted[request] for request in known]
        rest = [client.result(request) for _, request in calls_of_a_run(client, name, cut + 1)]
        assert rest == list(wanted.values())[len(accepted) :]
        np.testing.assert_array_equal(client.score(name, CALLS + 1, ROW), weights)


def test_a_call_that_a_full_disk_refused_runs_when_it_is_sent_again(tmp_path):
    with served(tmp_path) as client:
        name = client.new()
        calls, backup = (tmp_path / name / "journal" / file for file in ("calls", "kept"))
        calls.rename(backup)
        calls.symlink_to("/dev/full")
        status, answer = client.ask("forward_backward", batch(name, 1, [ROW]))
        assert status == 503 and "No space left" in answer["detail"] and "send it again" in answer["detail"]
        backup.replace(calls)
        assert client.train(name, 1, ROW)["update_skipped:sum"] == 0


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
        saved = client.save(name, 1, "first", "save_weights_for_sampler")
        sampler = client.sampler_of(session, model_path=saved)
        drawn = client.tokens(sampler, 0, [3, 1])
    shutil.rmtree(tmp_path / name / "journal" / "1")  # it was accepted, but not made yet
    with served(tmp_path) as client:
        assert client.result(request) == {"model_id": name}
        saved = client.post("save_weights_for_sampler", model_id=name, seq_id=2, sampling_session_seq_id=1)
        mine = client.result(saved)["sampling_session_id"]
        assert client.tokens(sampler, 0, [3, 1]) == drawn
    with served(tmp_path) as client:
        assert client.result(saved) == {"sampling_session_id": mine, "type": "save_weights_for_sampler"}
        assert client.tokens(mine, 0, [3, 1]) == drawn
        assert client.post("create_model", **made)["request_id"] == request, "the same call, not another model"
        client.finish(session)
    with served(tmp_path) as client:
        assert client.ask("session_heartbeat", {"session_id": session})[0] == 410
        assert client.ask("get_info", {"model_id": name})[0] == 404 and not list(tmp_path.glob("*/journal"))


def test_a_model_that_cannot_be_made_again_says_why(tmp_path):
    """It was being loaded from a checkpoint that is gone at the next start."""
    with served(tmp_path) as client:
        session = client.session()
        name = client.model(session)
        path = client.save(name, 1, "gone")
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
        assert "load the last checkpoint" in client.refused(404, "get_info", {"model_id": new})
        assert client.ask("load_weights", made)[0] == 404


def test_a_step_is_done_although_its_state_cannot_be_saved(tmp_path, monkeypatch):
    with served(tmp_path) as client:
        name, renamed = client.new(), os.rename

        def full(source, target):
            if Path(target).name == "9":
                raise OSError("No space left on device")
            renamed(source, target)

        monkeypatch.setattr(os, "rename", full)  # the fourth step is call 8, the state after it is that before call 9
        for step in range(5):
            assert client.train(name, 2 * step + 1, ROW)["update_skipped:sum"] == 0
        states = [int(path.name) for path in (tmp_path / name / "journal").iterdir() if path.is_dir()]
        assert sorted(states) == [1, 11]


def test_a_kill_brings_back_no_checkpoint_and_no_other_weights(tmp_path):
    """What a model has loaded may be deleted or overwritten since, and is the same when it is loaded again; what was
    deleted stays so; a sampler never takes what was written over its checkpoint."""
    with served(tmp_path) as client:
        session = client.session()
        model = client.model(session)
        paths = [client.save(model, 1, "gone"), client.save(model, 2, "changed")]
        client.train(model, 3, ROW, learning_rate=0.3)
        same = client.save(model, 5, "same", "save_weights_for_sampler")
        sampler = client.sampler_of(session, model_path=same)
        for i, path in enumerate(paths):
            client.post("load_weights", model_id=model, seq_id=6 + 3 * i, path=path, optimizer=bool(i))
            client.train(model, 7 + 3 * i, ROW, learning_rate=0.1)
        assert client.get(f"training_runs/{model}/checkpoints/weights/gone", "DELETE")[0] == 200
        client.save(model, 12, "changed", overwrite=True)
        client.save(model, 13, "same", "save_weights_for_sampler")
        last = client.score(model, 14, ROW)
    with served(tmp_path) as client:
        np.testing.assert_array_equal(client.score(model, 15, ROW), last)
        listed = client.get(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
        assert {checkpoint["checkpoint_id"] for checkpoint in listed} == {"weights/changed", "sampler_weights/same"}
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": encoded(3)}
        assert "was written again since" in client.refused(404, "asample", body)


def test_a_kill_long_after_a_snapshot_leaves_it(tmp_path):
    """The calls that made snapshots without a name are not run again after so many steps; those last used are there."""
    with served(tmp_path, {"samplers": 2}) as client:
        model = client.new()
        samplers, drawn = [], {}
        for number in range(3):
            samplers.append(client.sampler(model, 1 + 3 * number, number))
            drawn[samplers[-1]] = client.tokens(samplers[-1], 0, [3, 1, 4])
            client.train(model, 2 + 3 * number, ROW, learning_rate=0.1)
        assert client.tokens(samplers[0], 1, [3, 1, 4]) == drawn[samplers[0]]
        for i in range(10):
            client.train(model, 10 + 2 * i, ROW, learning_rate=0.1)
    with served(tmp_path, {"samplers": 2}) as client:  # nobody asks for them meanwhile
        for i in range(9):
            client.train(model, 30 + 2 * i, ROW, learning_rate=0.1)
    with served(tmp_path, {"samplers": 2}) as client:
        for name in samplers[::2]:
            assert client.tokens(name, 9, [3, 1, 4]) == drawn[name]
        body, status = {"sampling_session_id": samplers[1], "seq_id": 9, "prompt": encoded(3)}, 503
        while status == 503:  # its model goes on first
            status, _ = client.ask("asample", body)
        assert status == 404, "used before the others, and two are kept"


def test_a_checkpoint_expires_when_it_was_told_to(client):
    name = client.new()
    brief = client.save(name, 1, "brief", ttl_seconds=0.5)
    changed = client.save(name, 2, "changed")
    later = client.save(name, 3, "later", ttl_seconds=3600)
    route = f"training_runs/{name}/checkpoints/weights/changed/ttl"
    assert client.ask(route, {"ttl_seconds": 0.5}, method="PUT")[0] == 200
    time.sleep(0.6)
    for path in (brief, changed):
        assert "no checkpoint" in client.refused(404, "weights_info", {"tinker_path": path})
    assert client.post("weights_info", tinker_path=later)["lora_rank"] == 4
    listed = client.get(f"training_runs/{name}/checkpoints")[1]["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/later"]
    assert client.save(name, 4, "brief") == brief, "the name is free again"


def test_a_server_that_is_busy_says_so_and_when_to_ask_again(tmp_path):
    with served(tmp_path, limits=ServerLimits(waiting=1)) as client:
        body = {"sampling_session_id": client.sampler(client.new(), 1), "prompt": encoded(3)}
        body["sampling_params"] = {"max_tokens": 60, "temperature": 1.0, "stop": []}
        answers = [client.ask("asample", body | {"seq_id": seq}) for seq in range(3)]
        assert [status for status, _ in answers] == [200, 429, 429] and "ask again later" in answers[1][1]["detail"]
        assert isinstance(client.result(answers[0][1]), bytes)
        assert client.ask("asample", body | {"seq_id": 1})[0] == 200, "the same call, once there is room"


WEIGHED = (ROW[0], ROW[1] | {"weights": np.array([0, 1, -0.5, 2, 0, 1, 1], np.float32)})
TEXTS = [ROW, OTHER, datum(1, 6, 1, 8, 0, 3, 3, 9, 8), datum(5, 5), WEIGHED]
KINDS = ["train", "train", "train", "step", "step", "forward", "bad", "bad forward", "save", "load", "sampler"]


def history(rng, calls):
    """What a model is asked, in order: (path, fields); NAME in a path of a checkpoint is the name of the model."""
    saved = []
    for what in rng.choices(KINDS, k=calls):
        if what == "step":
            adam = {"learning_rate": rng.choice([0.01, 0.1]), "weight_decay": rng.choice([0, 0.1])}
            yield "optim_step", {"adam_params": adam | {"grad_clip_norm": rng.choice([0, 1.0])}}
        elif what == "save":
            saved.append(rng.choice("abc"))
            yield "save_weights", {"path": saved[-1], "overwrite": True}
        elif what == "load" and saved:
            path = f"tinker://NAME/weights/{rng.choice(saved)}"
            yield "load_weights", {"path": path, "optimizer": rng.random() < 0.5}
        elif what in ("load", "sampler"):
            yield "save_weights_for_sampler", {"path": rng.choice("xy")}
        else:
            data = [datum(1, 600)] if "bad" in what else rng.sample(TEXTS, rng.choice([1, 2, 3]))
            yield "forward_backward", {"data": data, "forward_only": "forward" in what}


def request_of(client, call, name, seq):
    path, fields = call
    if path == "forward_backward":
        return client.send(batch(name, seq, **fields))
    fields = {key: value.replace("NAME", name) if key == "path" else value for key, value in fields.items()}
    return client.post(path, model_id=name, seq_id=seq, **fields)["request_id"]


def plain(client, request, name):
    """A result without the name of its model."""
    result = client.result(request)
    if isinstance(result, bytes):
        output = classes()["Output"].FromString(result)
        return [logprobs.tolist() for logprobs in logprobs_of(output)], dict(output.metrics)
    return json.loads(json.dumps(result).replace(name, "MODEL"))


def alone(client, made, rank):
    name = client.model(client.session(), 0, rank)
    return [plain(client, request_of(client, call, name, seq), name) for seq, call in enumerate(made, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_are_those_of_each_model_alone(tmp_path, seed):
    """Loads and saves are waited for, as the path of a load is looked up when it is asked for."""
    rng = random.Random(seed)
    ranks = [4, 8, 4]
    histories = [[*history(rng, 24)] for _ in ranks]
    folder, copy = tmp_path / "first", tmp_path / "second"
    folder.mkdir()
    with served(folder) as client:
        wanted = [alone(client, made, rank) for made, rank in zip(histories, ranks, strict=True)]
        session = client.session()
        names = [client.model(session, i, rank) for i, rank in enumerate(ranks)]
        ids = [{} for _ in names]
        cuts = [0, 0, 0]
        left = [i for i, made in enumerate(histories) for _ in made]
        rng.shuffle(left)
        while left:  # a few calls of a model at a time, in any order, some twice
            model = left.pop()
            first, made = cuts[model] + 1, histories[model]
            last = min(len(made), first + rng.choice([0, 1, 3]))
            order = list(range(first, last + 1))
            if not any(path in ("load_weights", "save_weights") for path, _ in made[first - 1 : last]):
                rng.shuffle(order)
            for seq in [*order, *rng.sample(order, 1)] if order else ():
                request = request_of(client, made[seq - 1], names[model], seq)
                assert ids[model].setdefault(seq, request) == request
                if made[seq - 1][0] == "save_weights":
                    client.result(request)
            cuts[model] = last
            if copy.exists() or len(left) > 30:
                continue
            for request in [entry for requests in ids for entry in requests.values()]:
                client.result(request)
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".new-*", ".old-*"))
            accepted = [dict(entry) for entry in ids]
        for requests, name, want in zip(ids, names, wanted, strict=True):
            assert [plain(client, requests[seq], name) for seq in sorted(requests)] == want
    with served(copy) as client:  # what a kill has left
        for requests, name, want, made in zip(accepted, names, wanted, histories, strict=True):
            for seq in range(len(requests) + 1, len(made) + 1):
                requests[seq] = request_of(client, made[seq - 1], name, seq)
                client.result(requests[seq])
            known = [seq for seq in requests if client.ask("retrieve_future", {"request_id": requests[seq]})[0] != 404]
            assert len(known) > len(made) // 3
            assert [plain(client, requests[seq], name) for seq in known] == [want[seq - 1] for seq in known]

"""The Tinker API by plain HTTP: order, retries, snapshots that do not mix, checkpoints, refusals."""

import os
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from grpo_roc_jax.serving.tinker.journal import Journal, LoggedCall
from grpo_roc_jax.serving.tinker.store import About, CheckpointPath, Store
from tests.helpers.tinker_server import OTHER, ROLLOUT, ROW, batch, classes, datum, encoded, served, tokens_of
from tests.helpers.tinker_server import client as client  # a fixture

LONG = [*range(3, 40)]
"""A prompt of which blocks are cached."""
floats = partial(np.frombuffer, dtype="<f4")


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
    sampler = client.sampler_of(session, base_model="small")
    assert client.tokens(sampler, 0, LONG) == client.tokens(client.sampler(client.new(), 1), 0, LONG), "as B is zero"
    other = {"model_id": first, "seq_id": 5, "sampling_session_seq_id": 0}
    assert "count sampling_session_seq_id up" in client.refused(400, "save_weights_for_sampler", other)


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
    client.send(batch(name, 8, [ROW]))  # a forward that was refused has no part in the gradients of others
    assert client.result(client.send(batch(name, 9, bad, forward_only=True)))["category"] == "user"
    assert client.result(client.step(name, 10))["metrics"]["update_skipped:sum"] == 0
    path = client.save(name, 11, "a")  # weights that are loaded end what failed before
    client.send(batch(name, 12, bad))
    client.post("load_weights", model_id=name, seq_id=13, path=path, optimizer=True)
    before = client.score(name, 14, ROW)
    # A step that would leave no numbers is dropped: the gradient of an adapter is zero in part, and 0 / 0 is none.
    assert client.train(name, 15, ROW, eps=0.0, learning_rate=1e3, weight_decay=3e38)["update_skipped:sum"] == 1
    np.testing.assert_array_equal(client.score(name, 17, ROW), before)


def test_models_of_two_ranks_train_interleaved_as_alone_and_snapshots_keep_their_weights(client):
    def train(names):
        for seq in (1, 3):
            for name in names:
                client.send(batch(name, seq, [ROW]))
            for name in names:
                client.step(name, seq + 1, learning_rate=0.05)
        return [client.score(name, 5, ROW)[0] for name in names]

    session = client.session()
    together = train([client.model(session, number, rank) for number, rank in ((0, 4), (1, 8))])
    names = [client.model(client.session(), 0, rank) for rank in (4, 8)]
    np.testing.assert_array_equal(together, [train([name])[0] for name in names])
    name = names[0]
    before = client.sampler(name, 6, 0)
    drawn = client.sample(before, 0, LONG)
    client.train(name, 7, ROW, learning_rate=0.5)
    after = client.sampler(name, 9, 1)
    with ThreadPoolExecutor(4) as pool:  # both in flight at a time
        asks = [pool.submit(client.sample, session, 9, LONG) for session in (before, after)]
        old, new = (ask.result() for ask in asks)
    assert tokens_of(old) == tokens_of(drawn)
    again, first, other = (floats(one.sequences[0].logprobs) for one in (old, drawn, new))
    np.testing.assert_allclose(again, first, atol=1e-5)  # rows decode in programs of different widths
    assert len(other) != len(first) or abs(other - first).max() > 1e-3


def test_sampled_log_probabilities_are_those_of_training(client):
    name = client.new()
    client.train(name, 1, ROW, learning_rate=0.05)
    session, prompt = client.sampler(name, 3), [3, 1, 4, 1]
    response = client.sample(session, 0, prompt, prompt_logprobs=True, topk_prompt_logprobs=2)
    text = [*prompt, *tokens_of(response)[0]]
    scored = client.score(name, 4, datum(*text))
    np.testing.assert_allclose(floats(response.sequences[0].logprobs), scored[0][len(prompt) - 1 :], atol=1e-4)
    known = floats(response.prompt_logprobs)
    assert np.isnan(known[0])
    np.testing.assert_allclose(known[1:], scored[0][: len(prompt) - 1], atol=1e-5)
    top = floats(response.topk_prompt_logprobs.logprobs).reshape(4, 2)
    assert (top[0] == -99999).all() and (top[1:, 0] >= known[1:] - 1e-5).all() and (top[1:, 0] >= top[1:, 1]).all()
    drawn = text[len(prompt) :]
    stopped = client.sample(session, 1, prompt, params={"stop": [drawn[2]]})
    assert tokens_of(stopped)[0] == drawn[: drawn.index(drawn[2]) + 1], "a stop token belongs to the answer"
    assert (response.sequences[0].stop_reason, stopped.sequences[0].stop_reason) == (1, 0)
    cuts = ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6})
    greedy = [client.tokens(session, 2 + seq, prompt, params=cut) for seq, cut in enumerate(cuts)]
    assert greedy[0] == greedy[1] == greedy[2] != [drawn] * 2, "a truncation cuts what is drawn"
    dense = {"data": [1, -1, 4, -1, 1, -1], "shape": [3, 2]}
    fields = {"topk_sample_logprobs": 2, "prompt_alt_tokens_k": 5, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    response = client.sample(session, 5, prompt, target_prompt_logprobs=dense, **fields)
    targets = floats(response.target_prompt_logprobs.dense).reshape(3, 2)
    np.testing.assert_allclose(targets[:, 0], known[1:], atol=1e-6)
    assert not targets[:, 1].any() and list(response.prompt_alt_tokens.tokens.shape) == [3, 5]
    assert np.isnan(floats(response.prompt_logprobs)).tolist() == [True, True, False, False]
    sampled = response.sequences[0]
    assert (floats(sampled.topk.logprobs)[::2] >= floats(sampled.logprobs) - 1e-4).all()
    sparse = {"data": [4, 77], "shape": [3, 600], "sparse_crow_indices": [0, 0, 2, 2], "sparse_col_indices": [0, 599]}
    named = client.sample(session, 6, prompt, target_prompt_logprobs=sparse).target_prompt_logprobs
    assert np.frombuffer(named.sparse.col, "<i8").tolist() == [0, 599]
    np.testing.assert_allclose(floats(named.sparse.values)[0], known[2], atol=1e-6)


def test_a_sequence_that_fills_the_context_is_scored(client):
    """As recipes score what was sampled: they ask for one more token, for which there is no room."""
    session, prompt = client.sampler(client.new(), 1), [*range(100, 200)]
    sampled = client.sample(session, 0, prompt, count=1, params={"max_tokens": 500})
    text, one = [*prompt, *tokens_of(sampled)[0]], {"max_tokens": 1}
    assert len(text) == ROLLOUT.max_row_tokens
    scored = client.sample(session, 1, text, prompt_logprobs=True, params=one)
    assert tokens_of(scored) == [[], []] and [sequence.stop_reason for sequence in scored.sequences] == [1, 1]
    known, drawn = floats(scored.prompt_logprobs), floats(sampled.sequences[0].logprobs)
    np.testing.assert_allclose(known[len(prompt) :], drawn, atol=1e-4)
    body = {"sampling_session_id": session, "seq_id": 2, "prompt": encoded(*text), "sampling_params": one}
    assert "leaves no room" in client.refused(400, "asample", body)


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
        assert client.post("get_info", model_id=again)["lora_rank"] == 4
        np.testing.assert_equal(go_on(client, again, 1), wanted)
        drawn = client.tokens(sampler := client.sampler_of(session, model_path=sampled), 0, [3])
        listed = client.get(f"training_runs/{name}/checkpoints")[1]["checkpoints"]
        assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/last", "sampler_weights/last"]
        route = f"training_runs/{name}/checkpoints/weights/last"
        urls = client.get(f"{route}/external_weights_urls")[1]["urls"]
        content = (tmp_path / name / "weights/last/state.safetensors").read_bytes()
        assert client.get(urls["state.safetensors"].partition("/api/v1/")[2]) == (200, content)
        for deleted in (route, route.replace("/weights/", "/sampler_weights/")):
            assert [client.get(deleted, "DELETE")[0] for _ in range(2)] == [200, 404]
        assert "no checkpoint" in client.refused(404, "weights_info", {"tinker_path": path})
        assert client.tokens(sampler, 1, [3]) == drawn, "samplers that have it go on, and new ones miss it"
        body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": sampled}
        assert "no checkpoint" in client.refused(404, "create_sampling_session", body)


def test_a_checkpoint_whose_writing_was_cut_is_the_old_one_or_the_new(tmp_path, monkeypatch):
    store, renamed = Store(tmp_path), os.rename
    leaf = jax.device_put(np.zeros(2, np.float32), jax.devices()[0])

    def write(value, name="one"):
        about = About("small", 4, 32.0, ("q_proj",), 0, 0, time.time())
        leaves = {"a": np.full(2, value, np.float32)}
        store.save(CheckpointPath("m", "weights", name), about, leaves, overwrite=True)

    def read():
        return np.unique(store.load(CheckpointPath("m", "weights", "one"), {"a": leaf})["a"]).tolist()

    write(1)
    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError("no space")))
    for name in ("one", "two"):
        with pytest.raises(OSError, match="no space"):
            write(0, name)
    assert [str(path) for path, _ in store.checkpoints()] == ["tinker://m/weights/one"] and read() == [1]
    assert not list(tmp_path.glob(".new*"))
    for most, value in ((1, 1), (2, 2)):
        monkeypatch.setattr(os, "rename", renamed)
        write(1)
        left = iter(range(most))

        def killed(*places, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            renamed(*places)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", killed)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            with suppress(KeyboardInterrupt):
                write(2)
        store.repair()
        assert read() == [value] and not list(tmp_path.glob(".old-*"))


def test_data_that_do_not_fit_fail_with_what_to_change(client):
    name, short = client.new(), (ROW[0], {"target_tokens": np.array([1]), "weights": np.ones(1)})
    infinite = (ROW[0], ROW[1] | {"advantages": [np.nan] * 7, "logprobs": [0.0] * 7})
    cases = [(ROW, "stable_reinforce", "importance_sampling"), (datum(*[1] * 200), "cross_entropy", "--context")]
    cases += [(ROW, "ppo", "needs target_tokens, advantages, logprobs"), (short, "cross_entropy", "must fit")]
    for number, (row, loss, remedy) in enumerate([*cases, (infinite, "ppo", "finite")], 1):
        assert remedy in client.result(client.send(batch(name, number, [row], loss)))["error"]


def test_a_call_that_was_refused_holds_up_no_other(client):
    """The refused numbers are skipped, also those that never came to be read."""
    name = client.new()
    image = classes()["Request"](model_id=name, seq_id=1, loss_fn="cross_entropy")
    image.data.add().model_input.add().image = b"png"
    assert "image" in client.refused(400, "forward_backward", image.SerializeToString())
    assert "image" in client.result(client.step(name, 2))["error"]
    assert client.ask("save_weights", {"model_id": name, "seq_id": 3, "path": "../up"})[0] == 400
    assert client.ask("optim_step", {"model_id": name, "seq_id": 4, "adam_params": {"beta1": 2}})[0] == 400
    assert client.train(name, 5, ROW)["update_skipped:sum"] == 0
    assert client.ask("retrieve_future", {"request_id": "none@model"})[0] == 404
    assert client.ask("retrieve_future", {"request_id": "none"})[0] == 410  # the client then samples anew
    assert "protobuf" in client.refused(422, "forward_backward", {"model_id": "m"})


def test_with_a_token_only_its_holder_is_answered(tmp_path):
    with served(tmp_path, token="tml-secret") as client:
        for headers in ({}, {"X_Api_Key": "tml-other"}, {"Authorization": "Bearer tml"}):
            assert "TINKER_API_KEY" in client.refused(401, "create_session", {}, **headers)
        assert client.ask("create_session", {}, X_Api_Key="tml-secret")[0] == 200
        assert client.get("files/m/weights/n/state.safetensors?key=0")[0] == 401


def calls_of_a_run(client, name, first=1):
    """(number, id) of the calls of a run from a number on; the fifth is refused, each third is a step."""
    for seq in range(first, 28):
        if seq == 5:
            assert client.ask("save_weights", {"model_id": name, "seq_id": seq, "path": "../up"})[0] == 400
        elif seq % 3 == 0:
            yield seq, client.step(name, seq, weight_decay=0.1)["request_id"]
        elif seq == 7:
            yield seq, client.post("save_weights", model_id=name, seq_id=seq, path="seven")["request_id"]
        else:
            yield seq, client.send(batch(name, seq, [ROW if seq % 2 else OTHER]))


@pytest.mark.parametrize("cut", [1, 8, 26])
def test_what_was_accepted_survives_a_kill(tmp_path, cut):
    """Another server goes on from a copy of the folder, which a kill leaves, with the same ids, results and weights."""
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
        weights = client.score(name, 28, ROW)
    with (copy / name / "journal" / "calls").open("ab") as file:
        file.write(b"0000004f{")  # a call that was being written
    with served(copy) as client:
        client.post("session_heartbeat", session_id=session)
        known = [future for future in accepted if client.ask("retrieve_future", {"request_id": future})[0] != 404]
        assert known == (accepted if cut < 25 else accepted[-14:]) and len(known) > 0
        assert [client.result(request) for request in known] == [wanted[request] for request in known]
        rest = [client.result(request) for _, request in calls_of_a_run(client, name, cut + 1)]
        assert rest == list(wanted.values())[len(accepted) :]
        np.testing.assert_array_equal(client.score(name, 28, ROW), weights)


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
    """Or it says why not: another one was being loaded from a checkpoint that is gone at the next start."""
    with served(tmp_path) as client:
        session, lora = client.session(), {"rank": 4, "seed": 1}
        made = {"session_id": session, "model_seq_id": 0, "base_model": "small", "lora_config": lora}
        request = client.post("create_model", **made)["request_id"]
        name = client.result(request)["model_id"]
        sampler = client.sampler_of(session, model_path=client.save(name, 1, "first", "save_weights_for_sampler"))
        drawn = client.tokens(sampler, 0, [3, 1])
        path = client.save(other := client.model(session, 1), 1, "gone")
        loading = client.post("load_weights", session_id=session, model_seq_id=5, path=path, optimizer=True)
        loaded = client.result(loading)["model_id"]
    for left in (f"{name}/journal/1", f"{loaded}/journal/1", f"{other}/weights/gone"):
        shutil.rmtree(tmp_path / left)  # both were accepted, but not made yet
    with served(tmp_path) as client:
        assert client.result(request) == {"model_id": name}
        assert client.tokens(sampler, 0, [3, 1]) == drawn
        assert client.post("create_model", **made)["request_id"] == request, "the same call, not another model"
        assert "no checkpoint" in client.result(loading)["error"]
        client.post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
    with served(tmp_path) as client:
        assert client.ask("session_heartbeat", {"session_id": session})[0] == 410
        assert client.ask("get_info", {"model_id": name})[0] == 404 and not list(tmp_path.glob("*/journal"))


def test_a_kill_brings_back_no_checkpoint_and_no_other_weights(tmp_path):
    """What a model has loaded may be deleted or overwritten since; a sampler never takes what was written over it."""
    with served(tmp_path) as client:
        session = client.session()
        model = client.model(session)
        paths = [client.save(model, 1, "gone"), client.save(model, 2, "changed")]
        client.train(model, 3, ROW, learning_rate=0.3)
        sampler = client.sampler_of(session, model_path=client.save(model, 5, "same", "save_weights_for_sampler"))
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
        model, samplers, drawn = client.new(), [], []
        for number in range(3):
            samplers.append(client.sampler(model, 1 + 3 * number, number))
            drawn.append(client.tokens(samplers[-1], 0, LONG))
            client.train(model, 2 + 3 * number, ROW, learning_rate=0.1)
        assert client.tokens(samplers[0], 1, LONG) == drawn[0] != drawn[2], "from its own cache"
        for i in range(19):
            client.train(model, 10 + 2 * i, ROW, learning_rate=0.1)
    with served(tmp_path, {"samplers": 2}) as client:
        assert [client.tokens(name, 9, LONG) for name in samplers[::2]] == drawn[::2]
        body, status = {"sampling_session_id": samplers[1], "seq_id": 9, "prompt": encoded(3)}, 503
        while status == 503:  # its model goes on first
            status, _ = client.ask("asample", body)
        assert status == 404, "used before the others, and two are kept"


def test_a_checkpoint_expires_when_it_was_told_to(client):
    name = client.new()
    brief, changed = client.save(name, 1, "brief", ttl_seconds=0.5), client.save(name, 2, "changed")
    client.save(name, 3, "later", ttl_seconds=3600)
    route = f"training_runs/{name}/checkpoints"
    assert client.ask(f"{route}/weights/changed/ttl", {"ttl_seconds": 0.5}, method="PUT")[0] == 200
    time.sleep(0.6)
    for path in (brief, changed):
        assert "no checkpoint" in client.refused(404, "weights_info", {"tinker_path": path})
    listed = client.get(route)[1]["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/later"]
    assert client.save(name, 4, "brief") == brief, "the name is free again"

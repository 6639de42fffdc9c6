"""Random histories of several models, interleaved, out of order, posted twice, cut by a kill: each has the results that
it has alone."""

import json
import random
import shutil

import numpy as np
import pytest

from tests.helpers.tinker_server import OTHER, ROW, batch, classes, datum, logprobs_of, served

TEXTS = [ROW, OTHER, datum(1, 6, 1, 8, 0, 3, 3, 9, 8), datum(5, 5)]
KINDS = ["train", "train", "train", "step", "step", "forward", "bad", "bad forward", "save", "load", "sampler"]


def history(rng, calls):
    """What a model is asked, in order: (path, function of the name of the model, which is NAME in paths of checkpoints,
    and of the number of the call to a body)."""
    made, saved = [], []

    def ask(path, /, **fields):
        def body(name, seq):
            named = {key: value.replace("NAME", name) if key == "path" else value for key, value in fields.items()}
            return {"model_id": name, "seq_id": seq, **named}

        made.append((path, body))

    def pass_data(data, only):
        made.append(("forward_backward", lambda name, seq: batch(name, seq, data, forward_only=only)))

    for _ in range(calls):
        what = rng.choice(KINDS)
        if what in ("train", "forward"):
            data = rng.sample(TEXTS, rng.choice([1, 2, 3]))
            weights = [np.array([rng.choice([0, 1, -0.5, 2]) for _ in ids], np.float32) for ids, _ in data]
            data = [(ids, inputs | {"weights": w}) for (ids, inputs), w in zip(data, weights, strict=True)]
            pass_data(data, what == "forward")
        elif what in ("bad", "bad forward"):
            pass_data([datum(1, 600)], what == "bad forward")
        elif what == "step":
            adam = {"learning_rate": rng.choice([0.01, 0.1]), "weight_decay": rng.choice([0, 0.1])}
            ask("optim_step", adam_params=adam | {"grad_clip_norm": rng.choice([0, 1.0])})
        elif what == "save":
            saved.append(rng.choice("abc"))
            ask("save_weights", path=saved[-1], overwrite=True)
        elif what == "load" and saved:
            ask("load_weights", path=f"tinker://NAME/weights/{rng.choice(saved)}", optimizer=rng.random() < 0.5)
        else:
            ask("save_weights_for_sampler", path=rng.choice("xy"))
    return made


def request_of(client, call, name, seq):
    path, body = call
    status, answer = client.ask(path, body(name, seq))
    assert status == 200, answer
    return answer["request_id"]


def plain(result, name):
    """A result without the name of its model."""
    if isinstance(result, bytes):
        output = classes()["Output"].FromString(result)
        return [logprobs.tolist() for logprobs in logprobs_of(output)], dict(output.metrics)
    return json.loads(json.dumps(result).replace(name, "MODEL"))


def alone(client, made, rank):
    name = client.model(client.session(), 0, rank)
    return [plain(client.result(request_of(client, call, name, seq)), name) for seq, call in enumerate(made, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_are_those_of_each_model_alone(tmp_path, seed):
    """Loads and saves are waited for, as the path of a load is looked up when it is asked for."""
    rng = random.Random(seed)
    ranks = [4, 8, 4]
    histories = [history(rng, 24) for _ in ranks]
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
            assert [plain(client.result(requests[seq]), name) for seq in sorted(requests)] == want
    with served(copy) as client:  # what a kill has left
        for requests, name, want, made in zip(accepted, names, wanted, histories, strict=True):
            for seq in range(len(requests) + 1, len(made) + 1):
                requests[seq] = request_of(client, made[seq - 1], name, seq)
                client.result(requests[seq])
            known = [seq for seq in requests if client.ask("retrieve_future", {"request_id": requests[seq]})[0] != 404]
            assert len(known) > len(made) // 3
            assert [plain(client.result(requests[seq]), name) for seq in known] == [want[seq - 1] for seq in known]

"""`python test_project.py` tries the parts before a run does; `pytest` finds these tests too."""

import json
from pathlib import Path
from types import SimpleNamespace

from rewards import asked
from tools import PRICES, Shop

import grpo_roc_jax as g

HERE = Path(__file__).parent


def test_the_tool_answers_and_refuses():
    assert Shop().price("1234") == PRICES["1234"]
    try:
        Shop().price("#1234")
    except ValueError as error:
        assert "no #1234" in str(error)
    else:
        raise AssertionError("an item that there is not must be refused")


def test_a_call_is_paid():
    turns = [SimpleNamespace(calls=("price",)), SimpleNamespace(calls=())]
    assert asked(None, [SimpleNamespace(turns=turns), SimpleNamespace(turns=turns[1:])]) == [0.1, 0.0]


def test_the_configuration_is_valid_and_nothing_is_held_out_and_trained():
    config = g.read_config(str(HERE / "config.yaml"))
    files = [*config.data.sources, *config.data.eval_sources]
    train, held_out = (
        [json.loads(line)["prompt"] for line in (HERE / name).read_text().splitlines()] for name in files
    )
    assert train and held_out and not set(train) & set(held_out)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed:", name)

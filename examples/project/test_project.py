"""`pytest` tries the parts before a run does."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rewards import asked
from tools import PRICES, Shop

import grpo_roc_jax as g


def test_the_tool_answers_and_refuses():
    assert Shop().price("1234") == PRICES["1234"]
    with pytest.raises(ValueError, match="no #1234"):
        Shop().price("#1234")


def test_a_call_is_paid():
    turns = [SimpleNamespace(calls=("price",)), SimpleNamespace(calls=())]
    assert asked(None, [SimpleNamespace(turns=turns), SimpleNamespace(turns=turns[1:])]) == [0.1, 0.0]


def test_the_configuration_is_valid_and_nothing_is_held_out_and_trained():
    config = g.read_config("config.yaml")
    files = [*config.data.sources, *config.data.eval_sources]
    train, held_out = ([json.loads(line)["prompt"] for line in Path(name).read_text().splitlines()] for name in files)
    assert train and held_out and not set(train) & set(held_out)

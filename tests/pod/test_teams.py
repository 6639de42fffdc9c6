"""Processes that sample as one: `tensor` over the devices of two of them."""

import numpy as np
import pytest

from grpo_roc_jax.record.trace import read_trace
from tests.pod.test_processes import ended, said, start

TENSOR = ("--sharding.fsdp=1", "--sharding.tensor=2")


@pytest.mark.slow
def test_two_processes_that_sample_as_one_give_the_numbers_of_one(tmp_path):
    words = "--steps=2", *TENSOR
    for name, count in (("alone", 1), ("team", 2)):
        assert ended(start(tmp_path / name, count, 2 // count, *words)) == [0] * count, said(tmp_path / name)
    for step in (1, 2):
        ours, theirs = (list(read_trace(tmp_path / name / "run", step)) for name in ("team", "alone"))
        assert len(ours) == len(theirs) == 40
        for one, other in zip(ours, theirs, strict=True):
            assert one.trajectory.tokens.tolist() == other.trajectory.tokens.tolist()
            np.testing.assert_allclose(one.trajectory.logprobs, other.trajectory.logprobs, atol=1e-5)

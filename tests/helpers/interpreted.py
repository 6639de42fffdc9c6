"""Pallas kernels on a CPU."""

from functools import partial
from unittest import mock

import pytest
from jax._src import literals
from jax.experimental import pallas


@pytest.fixture
def interpreted():
    """Kernels run in Pallas' interpreter, which asks the integers that a kernel indexes with for a shape; in the
    releases supported here they lack one."""
    run = partial(pallas.pallas_call, interpret=True)
    with mock.patch.object(pallas, "pallas_call", run), mock.patch.object(literals.TypedInt, "shape", (), create=True):
        yield

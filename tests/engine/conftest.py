"""One policy and some trajectories of it, for all tests of the engine."""

import pytest

from tests.helpers.rollout_fakes import make_requests, run, sharp_params


@pytest.fixture(scope="session")
def params():
    return sharp_params()


@pytest.fixture(scope="session")
def baseline(params):
    """(requests, trajectories, statistics, environment)."""
    requests = make_requests()
    return (requests, *run(params, requests))


@pytest.fixture(scope="session")
def twelve(params):
    """(requests of three groups of four, their trajectories)."""
    requests = make_requests(3, 4)
    return requests, run(params, requests)[0]

"""Environments in real Ray actors: their rollouts are played, and an actor that dies comes back."""

import pytest

from grpo_roc_jax.environments.config import HostActors
from tests.environments.test_episodes import LOOK, Play, opened
from tests.helpers.servers import chat as chat  # a fixture

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the ray extra is not installed")


@pytest.fixture(scope="module")
def episodes():
    ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    with opened("Flaky", host=HostActors(2, cpus=0.5), timeout_s=20.0, retries=2) as made:
        yield made
    ray.shutdown()


def test_rollouts_are_played_and_a_crash_costs_its_own_actor(chat, episodes):
    fine, crash = Play(chat, episodes, how="fine"), Play(chat, episodes, how="step crashes", position=5)
    assert fine.say(LOOK).count("a door") == 1 and crash.say("hm") == "infrastructure"
    crash.end("infrastructure")
    assert fine.say("hm") == "eos" and fine.end()[0].reward == 1.0
    after = Play(chat, episodes, samples=2, how="fine")
    assert [after.say(LOOK, row=row).count("a door") for row in (0, 1)] == [1, 1], "both actors take episodes"
    assert [trajectory.reward for trajectory in after.end()] == [1.0, 1.0]

"""Training on a server of OpenEnv, which is started here. Needs the extra `openenv`.

python examples/environments/openenv_server.py
"""

import sys
import threading

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

import grpo_roc_jax as g


class Say(Action):
    message: str


class Parrot(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None):
        return Observation()

    def step(self, action, timeout_s=None):
        return Observation(reward=float(action.message == "hello"), done=True)


def main(words: list[str]) -> dict:
    """Trains on it; any other server is named by `url`, and one whose tools are called needs no `action`."""
    app = create_fastapi_app(Parrot, Say, Observation, max_concurrent_envs=512)
    threading.Thread(target=uvicorn.run, args=[app], kwargs={"port": 8901, "log_level": "error"}, daemon=True).start()
    settings = "--environment=openenv --environment.url=http://127.0.0.1:8901 --environment.action=message"
    return g.train_policy(g.read_config("toy.yaml", *settings.split(), "--reward.functions=environment", *words))


if __name__ == "__main__":
    main(sys.argv[1:])

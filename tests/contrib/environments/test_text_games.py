"""Text games of Gymnasium and TextArena, played with their own packages."""

import pytest

from grpo_roc_jax.environments.config import EnvironmentClass
from grpo_roc_jax.environments.environment import Environment, Observation, said_in
from grpo_roc_jax.settings.callables import given
from tests.environments.test_episodes import Play, opened
from tests.helpers.servers import chat as chat  # a fixture


def test_a_game_of_gymnasium_answers_turns_and_pays(chat):
    pytest.importorskip("gymnasium", reason="needs the extra gymnasium; .ci/adapters runs this")
    from grpo_roc_jax.contrib.environments.gymnasium_games import TextCorridor

    with given({"game": TextCorridor}), opened(EnvironmentClass(path="game")) as episodes:
        play = Play(chat, episodes, extra={"seed": 4}, max_turns=30, position=4)
        seen = play.requests[0].problem.prompt
        while "here" not in seen:
            seen = play.say("east" if "lamp east" in seen else "west")
        assert play.say("<answer>take</answer>") == "answer" and play.end()[0].reward == 1.0


class NumberGame(Environment):
    """A game of TextArena for one player; what its observation adds is the next message."""

    def reset(self, problem):
        import textarena

        self.game, self.shown = textarena.make("GuessTheNumber-v0"), 0
        self.game.reset(num_players=1, seed=self.seed % (1 << 31))
        return self._news().splitlines()[2]  # the rest would not fit the prompt of these tests

    def step(self, turn):
        done, _ = self.game.step(said_in(turn))
        return Observation(reward=float(self.game.close()[0][0]), done=True) if done else self._news()

    def _news(self):
        _, text = self.game.get_observation()
        news, self.shown = text[self.shown :], len(text)
        return news


def test_a_game_of_textarena_is_an_environment_of_ten_lines(chat):
    pytest.importorskip("textarena", reason="needs textarena; .ci/adapters runs this")
    with given({"game": NumberGame}), opened(EnvironmentClass(path="game")) as episodes:
        play, low, high = Play(chat, episodes, max_turns=30), 1, 20
        assert "between 1 and 20" in play.requests[0].problem.prompt
        while (reply := play.say(f"I say [{(guess := (low + high) // 2)}]")) != "answer":
            assert "You are playing" not in reply, "it is told once"
            low, high = (guess + 1, high) if "higher" in reply else (low, guess - 1)
        assert play.end()[0].reward == 1.0

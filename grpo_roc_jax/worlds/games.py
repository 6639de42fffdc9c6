"""Small environments that ship with the library: a guessing game, a bank with two tools, a user who corrects.

`worlds.players` has their problems and demonstrations; each has a recipe in `configs/`.
"""

import re

from grpo_roc_jax.environments.environment import Environment, Observation
from grpo_roc_jax.types import Problem, Turn

NUMBER = re.compile(r"\d+")


def last_number(text: str) -> str:
    """The last number in a text; empty if there is none."""
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else ""


class GuessingGame(Environment):
    """A game with a secret number: each guess is answered by `up` or `low`, and the right one has reward 1."""

    def reset(self, problem: Problem) -> None:
        self.secret = int(problem.answer)

    def step(self, turn: Turn) -> Observation:
        guess = last_number(turn.text)
        if not guess:
            return Observation("a number")
        if int(guess) == self.secret:
            return Observation(reward=1.0, done=True)
        return Observation("up" if int(guess) < self.secret else "low")


class Bank(Environment):
    """Orders of payment. Each order that is carried out in its turn gives its share of the reward. The last one ends
    the episode, and so does a turn without a call."""

    def reset(self, problem: Problem) -> None:
        self.balances = dict(problem.extra["balances"])
        self.orders = [tuple(order) for order in problem.extra["orders"]]
        self.done, self.earned = 0, 0.0

    def look(self, a: str) -> str:
        """Says what an account holds.

        Args:
            a: Name of the account.
        """
        return f"{a} has {self._balance(a)}"

    def pay(self, a: str, b: str, n: int) -> str:
        """Pays from an account to another one.

        Args:
            a: The account that pays.
            b: The account that is paid.
            n: The amount.
        """
        if not 0 < n <= self._balance(a):
            raise ValueError(f"{a} has {self._balance(a)}")
        self._balance(b)
        self.balances[a] -= n
        self.balances[b] += n
        if self.done < len(self.orders) and (a, b, n) == self.orders[self.done]:
            self.done += 1
            self.earned += 1.0 / len(self.orders)
        return "paid"

    def step(self, turn: Turn) -> Observation:
        earned, self.earned = self.earned, 0.0
        return Observation(reward=earned, done=self.done == len(self.orders))

    def _balance(self, account: str) -> int:
        if account not in self.balances:
            raise ValueError(f"no account {account}")
        return self.balances[account]


class CorrectingUser(Environment):
    """A user who asks for a number, finds that one digit was not what they meant, and says so until it is right."""

    def reset(self, problem: Problem) -> None:
        self.wish = problem.answer

    def step(self, turn: Turn) -> Observation:
        number = last_number(turn.text)
        if number == self.wish:
            return Observation(reward=1.0, done=True)
        if len(number) != len(self.wish):
            return Observation(f"{len(self.wish)} digits")
        digit_index = next(i for i, (a, b) in enumerate(zip(number, self.wish, strict=True)) if a != b)
        return Observation(f"no, digit {digit_index + 1} is {self.wish[digit_index]}")

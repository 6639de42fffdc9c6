"""V_0: the success of a problem is predicted before its first rollout, from the policy's record on other problems, and
decides how many rollouts it gets. Source: arXiv:2602.03584.

As in the paper: the policy enters the prediction as a record of (problem, success) that moves with it, so that nothing
is trained for a new policy; problems that were never seen are predicted too; and the prediction divides the budget at
equal total. Stand-ins: the paper's value model is pretrained on the records of many policies and cannot be shipped, so
the outcomes of similar problems are averaged, and `predictor` names a function of yours that asks such a model. What a
rollout is worth at a predicted success is that of Knapsack RL (arXiv:2509.25849); the paper's rule was not available.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from grpo_roc_jax.contrib.methods.knapsack import Knapsack
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.planning import Wave, unaided
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import AtLeast1, Positive, kind
from grpo_roc_jax.types import Group, Problem


@dataclass(frozen=True)
class RecordEntry:
    """One entry of the policy's record."""

    prompt: str
    success: float
    """Share of its rollouts that succeeded without help."""
    age: float
    """Training steps since."""


Predictor = Callable[[Sequence[Problem], Sequence[RecordEntry]], Sequence[float]]


@kind("predicted")
class Predicted(Knapsack):
    """More rollouts where their expected gain is larger, at equal total, as `knapsack`; the success is predicted from
    the policy's record on other problems (V_0, arXiv:2602.03584)."""

    predictor: str = ""
    """Function of (problems, record) -> probabilities of success; the record's entries have `prompt`, `success` and
    `age`. Empty: the mean success of problems with similar words."""
    remembered: AtLeast1 = 256
    """Newest entries of the record that are kept."""
    half_life: Positive = 20.0
    """Training steps after which an entry counts half, since the policy has changed. Not of `predictor`."""
    sharpness: Positive = 4.0
    """Power of the similarity; large values listen to the most similar problems alone. Not of `predictor`."""
    prior: Positive = 1.0
    """Weight of the policy's mean success relative to that of similar problems. Not used with `predictor`."""

    def rates(self, wave: Wave) -> np.ndarray:
        record = recalled_record(wave.state)
        ask: Predictor | None = resolve("plan.budget.predictor", self.predictor)
        if ask is None:
            prompts = [problem.prompt for problem in wave.problems]
            return predicted(prompts, record, self.half_life, self.sharpness, self.prior)
        rates = np.asarray(ask(wave.problems, record), np.float64)
        if rates.shape != (len(wave.problems),) or not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(
                f"plan.budget.predictor {self.predictor} returned {rates!r:.80}; must be {len(wave.problems)} "
                "probabilities, one for each problem"
            )
        return rates

    def initial_memory(self) -> Mapping[str, np.ndarray]:
        return remembered_record([], 0)

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        shares = [(group, unaided(features(group), method.plan)) for group in sampled if group.size]
        new = [RecordEntry(group.problem.prompt, float(won.mean()), 0.0) for group, won in shares]
        seen = {outcome.prompt for outcome in new}
        record = new + [old for old in recalled_record(state) if old.prompt not in seen]
        return remembered_record(record[: self.remembered], state.step)


def predicted(
    prompts: Sequence[str], record: Sequence[RecordEntry], half_life: float, sharpness: float, prior: float
) -> np.ndarray:
    """float64[P]: (prior m + sum_j k_ij d_j s_j) / (prior + sum_j k_ij d_j) over the entries j of the record.

    s is an entry's success, d = 2^(-age / half_life), k the cosine between the words of two prompts to the power of
    `sharpness`, and m = (1/2 + sum_j d_j s_j) / (1 + sum_j d_j) the policy's mean success. A stand-in for the value
    model of V_0 (arXiv:2602.03584).
    """
    alike = similarities(prompts, [outcome.prompt for outcome in record]) ** sharpness
    success, ages = (np.array([getattr(o, name) for o in record], np.float64) for name in ("success", "age"))
    decay = 2.0 ** (-ages / half_life)
    mean = (0.5 + decay @ success) / (1.0 + decay.sum())
    return (prior * mean + alike @ (decay * success)) / (prior + alike @ decay)


def similarities(prompts: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """float64[P, N]: cosines between the counts of words; numbers of as many digits are one word."""
    counts = [Counter(words(text)) for text in (*prompts, *others)]
    places = {word: i for i, word in enumerate(dict.fromkeys(word for count in counts for word in count))}
    table = np.zeros((len(counts), len(places)))
    for row, count in zip(table, counts, strict=True):
        row[[places[word] for word in count]] = list(count.values())
    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return table[: len(prompts)] @ table[len(prompts) :].T


def words(text: str) -> list[str]:
    """Words and signs in lower case, each digit as 0."""
    return [re.sub(r"\d", "0", word) for word in re.findall(r"[^\W\d_]+|\d+|[^\w\s]", text.lower())]


def remembered_record(record: Sequence[RecordEntry], step: int) -> dict[str, np.ndarray]:
    """The record as arrays for the method's memory; `step` is that of entries of age 0."""
    texts = [outcome.prompt.encode() for outcome in record]
    return {
        "record_text": np.frombuffer(b"".join(texts), np.uint8),
        "record_ends": np.cumsum([0, *map(len, texts)], dtype=np.int64),
        "record_success": np.array([outcome.success for outcome in record], np.float64),
        "record_steps": np.array([step - outcome.age for outcome in record], np.float64),
    }


def recalled_record(state: AlgoState) -> list[RecordEntry]:
    """Inverse of `remembered_record`, newest first, with ages as of the state's step."""
    if "record_ends" not in state.memory:
        return []
    text, ends = state.memory["record_text"].tobytes(), state.memory["record_ends"]
    texts = [text[low:high].decode() for low, high in pairwise(ends.tolist())]
    success, steps = state.memory["record_success"].tolist(), state.memory["record_steps"].tolist()
    return [RecordEntry(t, won, float(state.step - at)) for t, won, at in zip(texts, success, steps, strict=True)]

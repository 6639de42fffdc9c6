"""ARISE: a library of skills, of which one is shown where it fits. Source: arXiv:2603.16060.

Not included: new skills written by the policy, and the reservoir that they come from. The paper chooses by the policy's
likelihood of a skill after the question; `scorer` names such a function, and common words stand in for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_roc_jax.method.features import Features, features
from grpo_roc_jax.method.planning import Conditioning, Wave
from grpo_roc_jax.method.shaping import Shaping, shape_rewards
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import AtLeast1, Positive, Share, kind
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest, condition_kind

SKILL = condition_kind("skill", optional=True)
"""Condition of rollouts under a skill; the level is its number."""

UTILITY = "skill_utility"
"""Name of the skills' utilities in the method's memory."""


@kind("skills")
class Skills(Conditioning):
    """Shows the likeliest of the most useful skills, if it is likely enough (ARISE, arXiv:2603.16060)."""

    library: tuple[str, ...] = ("write a program", "compute by heart")
    """Texts of the skills."""
    scorer: str = ""
    """Function of (problem, skills) -> log-probabilities per token. Empty: by the share of common words."""
    cache: AtLeast1 = 10
    """Skills of the highest utility that are considered."""
    sigma: Positive = 1.0
    """Temperature of the choice."""
    least: Share = 0.35
    """Probability under which no skill is shown."""
    explore: Share = 0.1
    """Share of choices at random."""
    decay: Share = 0.9
    """Memory of a utility: the share kept in a step in which the skill was shown."""
    intro: str = "Skill: "
    """Text before the skill."""

    def __post_init__(self) -> None:
        if not self.library:
            raise ValueError("plan.condition.library is empty; must have at least one skill: name some")

    def check(self, config: Any) -> None:
        if any(part.needs_reference for part in config.shaping):
            raise ValueError(
                "plan.condition skills reads rewards after the update, where the divergence of shaping kl is not "
                "known; use advantage.adjust kl, or another plan.condition"
            )

    def requests(self, index: int, count: int, wave: Wave) -> list[RolloutRequest]:
        problem = wave.problems[index]
        ranked = np.argsort(-self.utilities(wave.state), kind="stable")[: self.cache].tolist()
        scorer: Callable[[Problem, list[str]], Sequence[float]] = resolve("plan.condition.scorer", self.scorer) or words
        scores = np.asarray(scorer(problem, [self.library[i] for i in ranked]), np.float64)
        chosen = choose_skill(scores, self.sigma, wave.rng, least=self.least, explore=self.explore)
        if chosen < 0:
            return [RolloutRequest(problem, index, count)]
        skill, text = Condition(SKILL, ranked[chosen] + 1), self.library[ranked[chosen]]
        return [RolloutRequest(problem, index, count, 0, skill, f"\n{self.intro}{text}")]

    def utilities(self, state: AlgoState) -> np.ndarray:
        """float64[skills]; 1/2 before anything was seen."""
        return state.memory.get(UTILITY, np.full(len(self.library), 0.5))

    def initial_memory(self) -> Mapping[str, np.ndarray]:
        return {UTILITY: np.full(len(self.library), 0.5)}

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        feature_list = [features(group) for group in sampled]
        if not feature_list:  # the deadline of the step cut all groups
            return {}
        rewards, paid = shape_rewards(feature_list, method.shaping, state), self.utilities(state).copy()
        used = np.concatenate([f.levels * (np.array(f.conditions, object) == "skill") for f in feature_list])
        for skill in set(used.tolist()) - {0}:
            mean = float(np.concatenate(rewards)[used == skill].mean())
            paid[skill - 1] = self.decay * paid[skill - 1] + (1 - self.decay) * mean
        return {UTILITY: paid}


@kind("skill_bonus")
class SkillBonus(Shaping):
    """R + bonus for a success that was shown a skill (ARISE, arXiv:2603.16060)."""

    bonus: float = 1.0
    """Reward in addition to that of the task."""

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        return rewards + self.bonus * (features.correct & (np.array(features.conditions, object) == "skill"))


def choose_skill(
    logprobs: np.ndarray, sigma: float, rng: np.random.Generator, *, least: float = 0.35, explore: float = 0.1
) -> int:
    """Index of the skill to show, or -1 for none: the likeliest under softmax(log-probability / sigma), if it is likely
    enough; with probability `explore` a random one."""
    if rng.random() < explore:
        return int(rng.integers(len(logprobs)))
    shares = np.exp((logprobs - logprobs.max()) / sigma)
    shares /= shares.sum()
    return int(shares.argmax()) if shares.max() >= least else -1


def words(problem: Problem, skills: Sequence[str]) -> list[float]:
    """A stand-in for the policy's likelihood: log of (1 + words shared with the problem) / (1 + words)."""
    prompt_words = set(problem.prompt.lower().split())
    sizes = [(len(prompt_words & set(text.lower().split())), len(set(text.split()))) for text in skills]
    return [float(np.log((1 + shared) / (1 + size))) for shared, size in sizes]

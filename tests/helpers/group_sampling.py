"""A sampler of groups around a scripted engine, and a scorer without reward functions."""

from types import SimpleNamespace

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.rollout.sampler import Sampler
from grpo_roc_jax.run import sample
from grpo_roc_jax.types import Group
from tests.helpers.samples import make_verdict


class Scoring:
    """Makes a group of the rollouts of each problem; `fails` says of (uid, sample) whether it cannot be scored."""

    def __init__(self, fails=lambda uid, sample: False):
        self.fails, self.judged = fails, []

    def score_all(self, problems, rollouts):
        rng, groups = np.random.default_rng(0), []
        for problem, some in zip(problems, rollouts, strict=True):
            self.judged.append((problem, list(some)))
            rows = tuple(t for t in some if not self.fails(problem.uid, t.sample))
            groups.append(Group(problem, rows, tuple(make_verdict(rng, t) for t in rows)))
        return SimpleNamespace(groups=tuple(groups), counts={"correct": len(groups)}, faults=())


def sampling_of(engine, scorer=None, processes=None, progress=None):
    config, sampler = Config(), Sampler.of(engine, None, None)
    sampler.weights = "version 0"  # stands for what `publish` returned
    return sample.GroupSampler(
        sampler, scorer or Scoring(), processes or Processes(), config.resample, config.group.size, progress
    )

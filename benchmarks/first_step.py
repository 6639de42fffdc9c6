"""By how much does each method's gradient differ from that of plain GRPO in the first step?

    python -m benchmarks.first_step                    # prints a line for each file of configs/methods
    python -m benchmarks.first_step docs/methods.md    # writes the column of the method table there

All methods see the same fixed rollouts: four problems, up to 34 trajectories each, with tool calls, errors,
truncation, turns without a call, and rewards of 0 and 1 (sums of channels in recipes with several), and the memory
of a fresh run. A method selects, computes its rows and takes the updates of its recipe by the code of a run
(`GroupLearner`); only the model is replaced. Log-probabilities are those recorded for the first update and move by
fixed noise of 0.5 nats until the last one, which is more than in a run, so that caps of 3 or 4 act; a teacher has
that noise with its sign changed. Compared are the gradients of the loss with respect to the log-probabilities of
all sampled tokens, with those of `configs/methods/grpo.yaml` under the same updates and, where the recipe has it,
the mean over tokens instead of that over trajectories:

- the difference is |g - g0| / |g0|, the angle that between g and g0: a factor alone, which AdamW removes, has angle 0;
- `other rollouts` stands where a method samples otherwise, and `passes of its own` where it edits rows by the model,
  which fixed rollouts cannot show.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from docs.methods_table import load_methods, method_table, with_table
from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.learner import Learner, UpdateBatch
from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.learner.pack import BatchConfig, TrainBatch, pack, unpack
from grpo_roc_jax.method.compose import Scores, initial_state, resample_group, subset
from grpo_roc_jax.method.planning import PlanConfig
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.types import PLAIN, Condition, Group, Verdict
from tests.endurance.golden import golden_group

PROBLEMS, ROLLOUTS, NOISE = 4, 34, 0.5
ROW = BatchConfig(row_length=128, rows=PROBLEMS * ROLLOUTS)


@functools.cache
def pool() -> tuple[Group, ...]:
    """The fixed rollouts; even seeds of `golden_group` have plain prompts."""
    return tuple(varied(golden_group(2 * i, ROLLOUTS, ("0", "1", "2", "3"))) for i in range(PROBLEMS))


def varied(group: Group) -> Group:
    """The group with every seventh trajectory truncated and a turn without a call and answer in every ninth."""
    trajectories, verdicts = list(group.trajectories), list(group.verdicts)
    for i, (t, v) in enumerate(group.pairs):
        trajectories[i] = dataclasses.replace(t, stop="answer" if i % 7 else "length")
        if i % 9 == 4:
            silent = tuple(dataclasses.replace(turn, calls=(), results=()) for turn in t.turns)
            trajectories[i] = dataclasses.replace(trajectories[i], turns=silent)
            verdicts[i] = dataclasses.replace(v, answer=None, status="no_answer", reward=0.0)
    return Group(group.problem, tuple(trajectories), tuple(verdicts))


@functools.cache
def places() -> dict[int, slice]:
    """Where each trajectory's tokens are in the vector of all tokens; by identity of the ids, which are shared."""
    out, first = {}, 0
    for trajectory in (t for group in pool() for t in group.trajectories):
        out[id(trajectory.tokens)] = slice(first, first + trajectory.length)
        first += trajectory.length
    return out


def groups_of(config: Config) -> list[Group]:
    """What the method selects of the rollouts that it samples; each is a problem of its own where groups have one."""
    names = config.reward.names if len(config.reward.names) > 1 else ("format", "quality")
    sampled = config.resample.sampled(config.group.size)
    out = []
    for group in [worded(g) if config.plan.condition.kind == "paraphrases" else g for g in pool()]:
        verdicts = tuple(judged(v, config.reward, names) for v in group.verdicts)
        if sampled > 1:
            out.append(Group(group.problem, group.trajectories[:sampled], verdicts[:sampled]))
            continue
        for i, pair in enumerate(zip(group.trajectories[:16], verdicts, strict=False)):
            problem = dataclasses.replace(group.problem, uid=f"{group.problem.uid}/{i}")
            out.append(Group(problem, pair[:1], pair[1:]))
    rng = np.random.default_rng(11)
    selections = [resample_group(group, config, rng) for group in out]
    return [subset(g, s) for g, s in zip(out, selections, strict=True) if s.kept]


def worded(group: Group) -> Group:
    """The group as rollouts of three wordings of its problem, with texts of up to three words."""
    kinds = [Condition("paraphrase", i % 3) if i % 3 else PLAIN for i in range(group.size)]
    texts = [" ".join(map(str, range(i % 4))) for i in range(group.size)]
    turns = [
        tuple(dataclasses.replace(u, text=text) for u in t.turns)
        for t, text in zip(group.trajectories, texts, strict=True)
    ]
    rows = zip(group.trajectories, kinds, turns, strict=True)
    return dataclasses.replace(
        group, trajectories=tuple(dataclasses.replace(t, condition=c, turns=u) for t, c, u in rows)
    )


def judged(verdict: Verdict, config: RewardConfig, names: Sequence[str]) -> Verdict:
    """The verdict with a value for each channel, and their weighted sum where the recipe has several functions."""
    channels = dict(zip(names, verdict.channels.values(), strict=False))
    if len(config.functions) < 2:
        return dataclasses.replace(verdict, channels=channels)
    channels[config.functions[0].name] = verdict.reward
    reward = sum(part.weight * channels[part.name] for part in config.functions)
    return dataclasses.replace(verdict, channels=channels, reward=reward)


@functools.cache
def slope(surrogate):
    """d loss / d log-probabilities of a packed micro-batch."""

    def value(logprobs, part):
        return batch_loss(logprobs, jnp.zeros_like(logprobs), part, surrogate)[0]

    return jax.jit(jax.grad(value))


class FixedPolicy(GroupLearner):
    """A learner whose policy is the recorded log-probabilities plus `params` times fixed noise."""

    def score(self, params, groups, temperature):
        trajectories = [t for group in groups for t in group.trajectories]
        moved = [(t.logprobs + params * noise(t)).astype(np.float32) for t in trajectories]
        return Scores(moved, [np.abs(values) for values in moved])

    def with_teacher(self, scores, groups, run):
        trajectories = [t for group in groups for t in group.trajectories]
        return dataclasses.replace(scores, teacher=[t.logprobs - noise(t) for t in trajectories])

    def _as_trained(self, groups):
        return groups  # no rollout has a hint

    def on_mesh(self, rows, temperature, extra=()):
        return UpdateBatch(list(rows), list(rows), SimpleNamespace(fill=1.0), temperature)


def noise(trajectory) -> np.ndarray:
    """float32[T]: 0 off the mask, drawn from the place of the trajectory."""
    first = places()[id(trajectory.tokens)].start
    drawn = np.random.default_rng([17, first]).normal(0, NOISE, trajectory.length)
    return np.where(trajectory.policy_mask, drawn, 0).astype(np.float32)


def gradients(config: Config) -> list[np.ndarray]:
    """float64[all tokens] for each update of the first step."""
    config = dataclasses.replace(config, method=dataclasses.replace(config.method, edit_rows=""))  # needs a model
    groups = groups_of(config)
    by_tokens = {id(t.tokens): t for group in groups for t in group.trajectories}
    totals = []

    def update(train, rows):
        owners = [by_tokens[id(row.tokens)] for row in rows]
        now = [t.logprobs + train.params * noise(t) for t in owners]
        moved = [dataclasses.replace(row, logprobs_old=n.astype(np.float32)) for row, n in zip(rows, now, strict=True)]
        packed, placement = pack(rows, ROW, 1)
        shifted = pack(moved, ROW, 1)[0].logprobs_old
        leaves = [f.name for f in dataclasses.fields(TrainBatch) if f.name not in ("count", "temperatures")]
        given = {name: getattr(packed, name) for name in leaves}
        part = TrainBatch(**{name: x[0] for name, x in given.items() if x is not None}, count=packed.count)
        total = np.zeros(max(span.stop for span in places().values()))
        with jax.transfer_guard("allow"):
            slopes = np.asarray(slope(config.surrogate)(shifted[0], part))
        for owner, values in zip(owners, unpack(slopes[None], placement), strict=True):
            total[places()[id(owner.tokens)]] += values
        totals.append(total)
        return SimpleNamespace(params=train.params + 1 / max(len(batches) - 1, 1)), {"loss/value": np.float32(0)}

    learner = FixedPolicy(config, Learner(ModelConfig()), None)
    learner.learner.update_step = update
    run = RunState(SimpleNamespace(params=0.0), 0.0, None, initial_state(config))
    batches = learner.batches(groups, (), run)
    learner.update(run, batches)
    return totals


def compared(gradient: np.ndarray, plain: np.ndarray) -> str:
    """`no`, or the relative difference and the angle."""
    size, length = np.linalg.norm(plain), np.linalg.norm(gradient)
    apart = np.linalg.norm(gradient - plain) / size
    if apart < 1e-4:
        return "no"
    angle = np.degrees(np.arccos(np.clip(gradient @ plain / (size * length), -1, 1))) if length else 90.0
    return f"{apart:.2g} ({angle:.0f}°)"


@functools.cache
def plain_gradients(parts: int, epochs: int, normalizer: str) -> list[np.ndarray]:
    """Those of plain GRPO under the updates of a recipe."""
    updates = f"--batch.updates={{kind: several, parts: {parts}, epochs: {epochs}}}"
    words = [str(load_methods()["grpo"].path), updates, f"--weights.normalizer={normalizer}"]
    return gradients(load_config(Config, words, prog="first_step"))


def difference(path: Path) -> str:
    """The cell of a method in the table."""
    config = load_config(Config, [str(path)], prog="first_step")
    updates = config.batch.updates
    normalizer = "token_mean" if config.weights.normalizer.kind == "token_mean" else "sequence_mean"
    plain = plain_gradients(min(updates.parts, PROBLEMS), updates.epochs, normalizer)
    grads = gradients(config)
    text = compared(grads[0], plain[0])
    if len(grads) > 1:
        text += f"; last of {len(grads)} updates {compared(grads[-1], plain[-1])}"
    group = config.group
    other = config.plan != PlanConfig() or group.dynamic_sampling_rounds or config.resample.sampled(group.size) > 17
    return text + ("; other rollouts" if other else "") + ("; passes of its own" if config.method.edit_rows else "")


def main() -> None:
    texts = {name: difference(method.path) for name, method in load_methods().items()}
    if len(sys.argv) > 1:
        document = Path(sys.argv[1])
        document.write_text(with_table(document.read_text(encoding="utf-8"), method_table(texts)), encoding="utf-8")
    for name, text in texts.items():
        print(f"{name:24} {text}")


if __name__ == "__main__":
    main()

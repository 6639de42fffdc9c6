"""What a method makes of fixed groups: requests of every wave, selections, rows, the state, the loss and its gradient.

So a setting shows its effect, and a kind whether it goes by verdicts, by rewards, or by the sign of a reward.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method import compose
from grpo_roc_jax.method.compose import Scores
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, next_wave
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.options import default_of, fields_of, type_of
from grpo_roc_jax.types import Condition
from tests.endurance.golden import golden_group
from tests.helpers.knobs import digest
from tests.helpers.method_groups import make_group, method

LISTS = ("shaping", "advantage.adjust", "weights.masks", "weights.factors")
"""Axes of which a method has a list."""


def axes(cls=Part):
    """The axes of a method, by the classes below one."""
    return [axis for below in cls.__subclasses__() for axis in (below, *axes(below)) if "axis" in vars(axis)]


AXES = {axis.axis: axis for axis in axes()}


def kinds_of(package: str, axes: Mapping[str, type] = AXES) -> list[tuple[str, str]]:
    """(axis, kind) of all kinds that a package defines: `method` or `contrib`."""
    prefix = f"grpo_roc_jax.{package}."
    return [
        (name, kind) for name, axis in axes.items() for kind, c in axis.kinds.items() if c.__module__.startswith(prefix)
    ]


def settings_of(package: str) -> dict[tuple[str, str, str], typing.Any]:
    """(axis, kind, setting) -> default of all settings of these kinds."""
    fields = {(axis, kind): fields_of(AXES[axis].kinds[kind]) for axis, kind in kinds_of(package)}
    return {(*pair, name): default_of(field) for pair, named in fields.items() for name, field in named.items()}


def halved(rewards, features, state):
    return rewards / 2 + 0.1 * np.arange(len(rewards))


def doubled(rewards, features, state):
    return 2 * rewards


VALUES = {
    ("resample", "penalty_source"): "text_compat",
    ("resample", "drop"): "equal",
    ("resample", "positive_select"): "uniform",
    **{("resample", name): 0 for name in ("min_positive", "min_negative")},
    ("advantage", "standardize"): False,
    ("advantage", "eps"): 0.5,
    ("advantage", "weights"): [1.0, 3.0],
    ("advantage", "of"): {"scale": "none"},
    ("advantage", "adjust"): [{"kind": "sign_weights", "positive": 2.0}],
    ("advantage", "none", "adjust"): ["teacher"],
    ("advantage.adjust", "column"): "solution",
    ("advantage.adjust", "weights"): "policy",
    ("shaping", "limit"): 30,
    ("shaping", "buffer"): 35,
    ("surrogate", "level"): "sequence",
    ("advantage.adjust", "state"): "turn",
    ("surrogate", "kl"): "k2",
    **{("surrogate", name): 0.01 for name in ("clip_low", "clip_high")},
    **{("surrogate", name): 1.01 for name in ("dual", "delta", "high")},
    ("surrogate", "low"): 0.9,
    ("surrogate", "share"): 0.5,
    **{("surrogate", "dppo", name): 0.01 for name in ("low", "high")},
}
"""Other values by axis and setting, where the one made from the type would be refused or change nothing."""
CONTEXT = {
    ("advantage", "custom"): {"function": "halved"},
    ("shaping", "custom"): {"function": "halved"},
    ("shaping", "overlong"): {"limit": 40, "buffer": 20},
    ("advantage", "channels"): {"standardize": True},
    **{("resample", kind): {"drop": "none"} for kind in ("none", "max_variance", "uniform")},
    ("resample", "roc"): {"drop": "none", "positive_select": "inverse"},
    ("surrogate", "geometric"): {"level": "turn"},
    ("advantage.adjust", "entropy_bonus"): {"target": 2.0, "start": 4e-3},
    **{("surrogate.kl", kind): {"coef": 0.1, "sync_every": 5} for kind in ("k1", "k2", "k3", "corrected")},
    **{(axis, "kl"): {"sync_every": 5} for axis in ("shaping", "advantage.adjust")},
    ("advantage.adjust", "self_teacher"): {"weights": "reference", "sync_every": 5},
}
"""Settings of a kind that hold throughout, so that the others can matter."""


@dataclasses.dataclass(frozen=True, eq=False)
class KindCases:
    """What kinds need to show their settings; the defaults are those of the core."""

    values: Mapping = dataclasses.field(default_factory=lambda: VALUES)
    context: Mapping = dataclasses.field(default_factory=lambda: CONTEXT)
    functions: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    """Functions that settings name, besides those of the core."""
    conditions: tuple[str, ...] = ("budget:1", "", "", "", "high_reward", "budget:2", "demonstration", "low_reward")
    """Of the eight rollouts of a group."""
    written: str = ""
    """The condition of the first rollout of a group without a success."""

    def changed(self, axis, kind, setting):
        """Another value for a setting: one of the table, or one by its type."""
        for key in ((axis, kind, setting), (axis, setting)):
            if key in self.values:
                return self.values[key]
        cls = AXES[axis].kinds[kind]
        if setting == "function":
            return "doubled"
        default, annotation = default_of(fields_of(cls)[setting]), type_of(cls, setting)
        if typing.get_origin(annotation) is typing.Literal:
            return next(choice for choice in typing.get_args(annotation) if choice != default)
        if isinstance(default, bool):
            return not default
        if isinstance(default, int):
            return default + 1
        if isinstance(default, float):
            return default / 2 if default else 0.5
        if isinstance(default, tuple) and default:
            return [item / 2 for item in default]
        if isinstance(default, Part):
            return next(name for name in sorted(type(default).kinds) if name not in (default.kind, "none"))
        return f"another {default}"

    def made(self, axis, kind, **more):
        """A method with this kind; groups of four, which are sampled eight at a time where the kind allows it."""
        value = {"kind": kind, **self.context.get((axis, kind), {}), **more}
        if axis in LISTS:
            value = [value]
        for name in reversed(axis.split(".")):
            value = {name: value}
        plain = {"scale": "none", "baseline": "none"} if axis == "shaping" else "group"
        return method(4, **({"resample": {"kind": "none", "drop": "none"}, "advantage": plain} | value))

    def group(self, seed):
        return some_group(seed, self.conditions)

    def steps(self, config, groups, state, count):
        """What the method makes of these groups in each step, and the state after it."""
        rng, drift = np.random.default_rng(11), {group.problem.uid: 0.01 for group in groups}
        functions = {"halved": halved, "doubled": doubled, "size": len} | dict(self.functions)
        for _ in range(count):
            with given(functions):
                seen, trained = self.one_step(config, state, rng, groups)
                state = compose.next_state([*groups[:3], failures(groups[3])], trained, config, state, drift)
            yield seen, state

    def observed(self, config):
        """Digests of everything that a method makes of fixed groups: of the loss, and after each of two steps."""
        yield digest(gradient(config.surrogate))
        groups, state = [self.group(i) for i in range(4)], compose.initial_state(config)
        columns = {"successes": [1, 7, 4, 2], "visits": [8] * 4, "level": [1, 2, 0, 3]}
        arrays = {name: np.array(column, np.float64) for name, column in columns.items()}
        state = dataclasses.replace(state, table=state.table.put([group.problem.uid for group in groups], arrays))
        for seen, after in self.steps(config, groups, state, 2):
            yield digest(seen, after.to_tree())

    @functools.cache  # noqa: B019 (one value a file of tests)
    def base(self, axis, kind):
        return list(self.observed(self.made(axis, kind)))

    def changes(self, axis, kind, setting):
        """Whether another value of the setting changes what is observed; nothing is computed after a difference."""
        value = self.changed(axis, kind, setting)
        changed = self.observed(self.made(axis, kind, **{setting: value}))
        return any(new != other for new, other in zip(changed, self.base(axis, kind), strict=True))

    def one_step(self, config, state, rng, groups):
        """(what a method makes of these groups in one step, what selection kept of them)."""
        plan, problems = config.plan, [group.problem for group in groups]
        seen = [choose_problems(problems, 2, plan, state, rng), prompt_suffix(config.shaping, state.step)]
        seen += [plan.temperature.all, plan.second.supervised_weight(state.step), plan.second.extra_rows]
        seen += [teacher_inputs(config, groups), compose.reference_sync(config), plan.budget.largest(8, 4)]
        seen += [config.resample.sampled(4), config.resample.quota_decided(3, 3, 2, 4)]
        wave = Wave(problems, 8, state, rng)
        seen.append(first_wave(wave, plan))
        lost = [failures(under(group, self.written)) if i % 2 else group for i, group in enumerate(groups)]
        for number in range(1, 7):
            wave = dataclasses.replace(wave, number=number, groups=lost, notes={1: "x", 3: "y"}, thought=lambda t: 30)
            requests = next_wave(wave, plan)
            merged = plan.second.merge(lost, requests, [groups[r.place] for r in requests])
            seen += [requests, [[t.sample for t in group.trajectories] + list(group.rewards) for group in merged]]
        short = dataclasses.replace(groups[0], trajectories=groups[0].trajectories[:3], verdicts=groups[0].verdicts[:3])
        flat = [failures(groups[0]), make_group([1] * 8), make_group([1] + [0] * 7), make_group([0] + [1] * 7), short]
        selections = [compose.resample_group(group, config, rng) for group in (*groups, *flat)]
        seen += [(s.indices, s.reasons, s.penalties) for s in selections]
        trained = [compose.subset(g, s) for g, s in zip(groups, selections, strict=False) if s.kept]
        trajectories, noise = [t for group in trained for t in group.trajectories], np.random.default_rng(13)
        scores = Scores(
            [(t.logprobs - 0.2 + noise.normal(0, 0.3, t.length)).astype(np.float32) for t in trajectories],
            [noise.random(t.length).astype(np.float32) for t in trajectories],
            *(
                [(t.logprobs + noise.normal(0, 0.1, t.length)).astype(np.float32) for t in trajectories]
                for _ in range(2)
            ),
        )
        rows = compose.train_rows(trained, config, state, rng=rng, scores=scores)
        return [*seen, *([getattr(row, f.name) for f in dataclasses.fields(row)] for row in rows)], trained

    def reads(self, axis, kind, **more):
        """(whether other verdicts change what a method with this kind makes, whether a reward next to zero does)."""
        config = self.made(axis, kind, **more)

        def seen(right=RIGHT, paid=PAID):
            groups = [judged(self.group(i), right[i], paid) for i in range(4)]
            after = list(self.steps(config, groups, compose.initial_state(config), 3))
            problems, state = [group.problem for group in groups], after[-1][1]
            draws = [(count, np.random.default_rng(seed)) for count in (1, 2, 3) for seed in range(8)]
            chosen = [choose_problems(problems, count, config.plan, state, rng) for count, rng in draws]
            return pieces([[made, dict(state.memory)] for made, state in after] + chosen)

        base, just_below = seen(), np.where(PAID == 1e-5, -1e-5, PAID)
        return not near(base, seen(right=OTHER), 1e-9), not near(base, seen(paid=just_below), 1e-2)


@functools.cache
def some_group(seed, conditions):
    """A group with everything in it that a kind may read."""
    group = golden_group(seed, 8, ("format", "quality"))
    extra = {"hints": ["a", "b", "c"], "more_hints": ["d", "e"], "solution": "s", "explained": "t"}
    problem = dataclasses.replace(group.problem, extra=extra)
    trajectories = [
        dataclasses.replace(t, tokens=t.tokens % 5, condition=Condition.parse(kind))
        for t, kind in zip(group.trajectories, conditions, strict=True)
    ]
    trajectories[0] = dataclasses.replace(trajectories[0], stop="length")
    spliced = trajectories[4].versions.copy()
    spliced[np.flatnonzero(trajectories[4].policy_mask)[:2]] = -1
    trajectories[4] = dataclasses.replace(trajectories[4], versions=spliced)
    verdicts = [dataclasses.replace(v, turns=i % 3 + 1) for i, v in enumerate(group.verdicts)]
    verdicts[0] = dataclasses.replace(verdicts[0], status="correct", reward=1.0)
    return dataclasses.replace(group, problem=problem, trajectories=tuple(trajectories), verdicts=tuple(verdicts))


def failures(group):
    """The group with all rollouts wrong."""
    verdicts = tuple(dataclasses.replace(v, status="wrong", reward=0.0) for v in group.verdicts)
    return dataclasses.replace(group, verdicts=verdicts)


def under(group, condition):
    """The group with its first rollout under a condition."""
    first, *rest = group.trajectories
    first = dataclasses.replace(first, condition=Condition.parse(condition))
    return dataclasses.replace(group, trajectories=(first, *rest))


def teacher_inputs(config, groups):
    """What a teacher is shown of each trajectory, or where it comes from."""
    part = compose.teacher_of(config)
    if part is None or not hasattr(part, "suffix"):
        return getattr(part, "path", None)
    return part.needs_reference, [[part.suffix(group, i) for i in range(group.size)] for group in groups]


@functools.cache
def gradient(surrogate):
    """Loss and gradient on fixed arrays, with the divergence; most settings leave the surrogate as it is."""
    rng = np.random.default_rng(5)
    ratio, advantages = (jnp.asarray(rng.normal(0, s, (3, 16)), jnp.float32) for s in (0.4, 1))
    logprobs = jnp.asarray(-rng.exponential(size=(3, 16)), jnp.float32)
    segments = {"token": np.arange(16), "turn": np.arange(16) // 4, "sequence": np.zeros(16)}[surrogate.shared_level]
    segments = jnp.tile(jnp.asarray(segments, jnp.int32), (3, 1))

    def total(d):
        shared = surrogate.shared(d, advantages, jnp.ones((3, 16), bool), segments)
        each = surrogate.loss(shared, advantages, logprobs + d)
        value = each.sum() + surrogate.marked_loss(each[0], shared[0]).sum()
        term, far = surrogate.kl, logprobs.at[:, 0].add(4.0)  # the policy has dropped the first tokens
        return value + (term.coef * term.estimate(logprobs + d, far, d).sum() if term.coef else 0.0)

    value, slope = jax.jit(jax.value_and_grad(total))(ratio)
    return [np.asarray(value), np.asarray(slope), surrogate.clip_bounds, surrogate.scored_ratio]


# ---- rewards that contradict their verdicts: wrong rollouts that were paid, and right ones that were not ------------

RIGHT = np.array([[0, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 1, 0], [0] * 8, [0, 1, 1, 0, 1, 0, 1, 1]], bool)
OTHER = np.array([[1] * 8, [0] * 8, [1, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 0, 0]], bool)
"""Two sets of verdicts on the rollouts of four groups."""
PAID = np.array([0.0, 0.6, 1.4, 0.25, 1e-5, 0.9, 1e-5, 0.35])
"""What the rollouts of each group earn: right ones nothing, and wrong ones up to 1.4."""


def judged(group, right, paid):
    """The group with these verdicts and rewards, whose rollouts say something."""
    says = ("alpha 6 20", "beta 1 9")
    turned = [
        dataclasses.replace(t, turns=tuple(dataclasses.replace(turn, text=says[t.sample % 2]) for turn in t.turns))
        for t in group.trajectories
    ]
    pairs = zip(group.verdicts, np.where(right, "correct", "wrong").tolist(), paid.tolist(), strict=True)
    verdicts = tuple(dataclasses.replace(v, status=status, reward=p) for v, status, p in pairs)
    return dataclasses.replace(group, trajectories=tuple(turned), verdicts=verdicts)


def pieces(value):
    """The arrays and the other values of a nested structure."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [piece for item in value for piece in pieces(item)]
    return [np.asarray(value) if isinstance(value, np.ndarray | float | int | np.generic) else value]


def near(first, second, atol):
    """Whether two observations agree, in numbers up to `atol`."""
    return len(first) == len(second) and all(
        (a.shape == b.shape and np.allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=atol, equal_nan=True))
        if isinstance(a, np.ndarray) and a.dtype.kind in "biuf"
        else np.array_equal(a, b)
        for a, b in zip(first, second, strict=True)
    )

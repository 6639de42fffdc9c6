"""What a method makes of fixed groups: requests, selections, rows, the state, the loss and its gradient."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method import compose
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, next_wave
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.options import default_of, fields_of, type_of
from grpo_roc_jax.types import Condition
from tests.endurance.golden import golden_group
from tests.helpers.knobs import digest
from tests.helpers.method_groups import make_group, method, other


def axes(cls=Part):
    """The axes of a method, by the classes below one."""
    return [axis for below in cls.__subclasses__() for axis in (below, *axes(below)) if "axis" in vars(axis)]


AXES = {axis.axis: axis for axis in axes()}


def kinds_of(package: str, axes: Mapping[str, type] = AXES) -> list[tuple[str, str]]:
    """(axis, kind) of all kinds that a package defines: `method` or `contrib`."""
    prefix = f"grpo_roc_jax.{package}."
    every = [(name, kind, made) for name, axis in axes.items() for kind, made in axis.kinds.items()]
    return [(name, kind) for name, kind, made in every if made.__module__.startswith(prefix)]


def settings_of(package: str) -> dict[tuple[str, str, str], typing.Any]:
    """(axis, kind, setting) -> default of all settings of these kinds."""
    fields = {(axis, kind): fields_of(AXES[axis].kinds[kind]) for axis, kind in kinds_of(package)}
    return {(*pair, name): default_of(field) for pair, named in fields.items() for name, field in named.items()}


FUNCTIONS = {
    "halved": lambda rewards, features, state: rewards / 2 + 0.1 * np.arange(len(rewards)),
    "doubled": lambda rewards, features, state: 2 * rewards,
    "size": len,
}
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
    written: str = ""  # the condition of the first rollout of a group without a success

    def changed(self, axis, kind, setting):
        """Another value for a setting: one of the table, or one by its type."""
        for key in ((axis, kind, setting), (axis, setting)):
            if key in self.values:
                return self.values[key]
        if setting == "function":
            return "doubled"
        cls = AXES[axis].kinds[kind]
        default, annotation = default_of(fields_of(cls)[setting]), type_of(cls, setting)
        if typing.get_origin(annotation) is typing.Literal:
            return next(choice for choice in typing.get_args(annotation) if choice != default)
        if isinstance(default, bool):
            return not default
        if isinstance(default, int | float):
            return default + 1 if isinstance(default, int) else default / 2 or 0.5
        if isinstance(default, tuple) and default:
            return [item / 2 for item in default]
        if isinstance(default, Part):
            return next(name for name in sorted(type(default).kinds) if name not in (default.kind, "none"))
        return f"another {default}"

    def made(self, axis, kind, **more):
        """A method with this kind; groups of four, which are sampled eight at a time where the kind allows it."""
        value = {"kind": kind, **self.context.get((axis, kind), {}), **more}
        if axis in ("shaping", "advantage.adjust", "weights.masks", "weights.factors"):
            value = [value]  # a method has a list of them
        for name in reversed(axis.split(".")):
            value = {name: value}
        plain = {"scale": "none", "baseline": "none"} if axis == "shaping" else "group"
        return method(4, **({"resample": {"kind": "none", "drop": "none"}, "advantage": plain} | value))

    def group(self, seed):
        return some_group(seed, self.conditions)

    def steps(self, config, groups, state, count):
        """What the method makes of these groups in each step, and the state after it."""
        rng, drift = np.random.default_rng(11), {group.problem.uid: 0.01 for group in groups}
        for _ in range(count):
            with given(FUNCTIONS | dict(self.functions)):
                seen, trained = self.one_step(config, state, rng, groups)
                state = compose.next_state([*groups[:3], failures(groups[3])], trained, config, state, drift)
            yield seen, state

    def observed(self, config):
        """Digests of everything that a method makes of fixed groups: of the loss, and after each of two steps."""
        yield digest(gradient(config.surrogate))
        groups, state = [self.group(i) for i in range(4)], compose.initial_state(config)
        arrays = {"successes": np.array([1.0, 7, 4, 2]), "visits": np.full(4, 8.0), "level": np.array([1.0, 2, 0, 3])}
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
        wave = Wave(problems, 8, state, rng)
        seen += [config.resample.sampled(4), config.resample.quota_decided(3, 3, 2, 4), first_wave(wave, plan)]
        kinds = [[Condition.parse(self.written), *(t.condition for t in group.trajectories[1:])] for group in groups]
        lost = [failures(group, condition=kinds[i]) if i % 2 else group for i, group in enumerate(groups)]
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
        current = [(t.logprobs - 0.2 + noise.normal(0, 0.3, t.length)).astype(np.float32) for t in trajectories]
        entropies = [noise.random(t.length).astype(np.float32) for t in trajectories]
        others = [[np.float32(t.logprobs + noise.normal(0, 0.1, t.length)) for t in trajectories] for _ in range(2)]
        scores = compose.Scores(current, entropies, *others)
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
    rows, judged = group.trajectories, group.verdicts
    columns = {"tokens": [t.tokens % 5 for t in rows], "condition": [*map(Condition.parse, conditions)]}
    columns |= {"stop": ["length", *(t.stop for t in rows[1:])], "versions": [t.versions.copy() for t in rows]}
    columns["versions"][4][np.flatnonzero(rows[4].policy_mask)[:2]] = -1
    verdicts = {"status": ["correct", *(v.status for v in judged[1:])], "turns": [1, 2, 3, 1, 2, 3, 1, 2]}
    verdicts["reward"] = [1.0, *(v.reward for v in judged[1:])]
    return other(dataclasses.replace(group, problem=problem), verdicts=verdicts, **columns)


def failures(group, **columns):
    """The group with all rollouts wrong, and with other fields of its trajectories."""
    return other(group, verdicts={"status": ["wrong"] * group.size, "reward": [0.0] * group.size}, **columns)


def teacher_inputs(config, groups):
    """What a teacher is shown of each trajectory, or where it comes from."""
    part = compose.teacher_of(config)
    if not hasattr(part, "suffix"):
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
    turns = [tuple(dataclasses.replace(u, text=says[t.sample % 2]) for u in t.turns) for t in group.trajectories]
    verdicts = {"status": np.where(right, "correct", "wrong").tolist(), "reward": paid.tolist()}
    return other(group, verdicts=verdicts, turns=turns)


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

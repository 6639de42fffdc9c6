"""Accuracy from k samples per problem: avg@k, pass@k, pass^k, maj@k, a table by source, intervals and differences.

Expectations are over the choice of k of the n samples without replacement, so they do not depend on the order of
samples. Infrastructure failures are excluded from every score and reported separately.
"""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import comb, nan

import numpy as np

from grpo_roc_jax.types import Group, Metrics, Problem, Trajectory, Verdict

ALL = "all"
"""Name of the row that covers all sources."""
SETUP = "eval/setup"
"""Metric with the `setup_number` of an evaluation."""
MAX_SAMPLES = 1000
"""Binomials of more samples overflow float64."""
DRAWS, AT_ONCE = 2_000, 100
"""Bootstrap samples of an interval, and the number drawn at once, which limits the memory."""


def avg_at_k(correct: Sequence[bool] | np.ndarray) -> float:
    """Share of correct samples."""
    if not len(correct):
        raise ValueError("avg@k of no samples; leave out problems without a scored sample")
    return float(np.mean(np.asarray(correct, np.float64)))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of the n samples, c of them correct, include a correct one: 1 - C(n-c, k) / C(n, k).

    Computed as 1 - prod (1 - k / i) over i = n-c+1..n, which neither overflows nor cancels
    (arXiv:2107.03374, sec. 2.1).
    """
    _check(n, c, k)
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def all_at_k(n: int, c: int, k: int) -> float:
    """Probability that all k of the n samples are correct, C(c, k) / C(n, k): pass^k (arXiv:2406.12045)."""
    _check(n, c, k)
    return float(np.prod([(c - i) / (n - i) for i in range(k)])) if c >= k else 0.0


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Probability that the most frequent answer among k of the samples is the correct one.

    A tie is won with probability 1 / (number of tied answers), so order does not matter. All correct samples count as
    one answer, however they are written. None does not vote; without any vote the result is 0.

    With m votes for the correct answer, u for the others, t of which also have m, and a samples that do not vote:
    sum over m, u, t of C(c, m) W_m(u, t) C(a, k-m-u) / (C(n, k) (t + 1)), where W_m counts the ways to choose u votes
    with at most m for each other answer.
    """
    n = len(answers)
    c = sum(map(bool, correct))
    _check(n, c, k)
    if n > MAX_SAMPLES:
        raise ValueError(f"maj@k of {n} samples; at most {MAX_SAMPLES} are supported, since binomials overflow")
    others = Counter(a for a, right in zip(answers, correct, strict=True) if not right and a is not None)
    if k == n:  # only one subset: the vote over all samples
        most = max(others.values(), default=0)
        return 0.0 if c < max(most, 1) else 1.0 / (1 + sum(count == c for count in others.values()))
    abstaining = n - c - others.total()
    total = 0.0
    for m in range(1, min(c, k) + 1):
        ways = _ways(list(others.values()), m, k - m)
        for (u, t), count in np.ndenumerate(ways):
            if count:
                total += comb(c, m) * count * comb(abstaining, k - m - u) / (t + 1)
    return total / comb(n, k)


def _ways(sizes: Sequence[int], cap: int, votes: int) -> np.ndarray:
    """float64[votes + 1, ties + 1]: ways to choose u votes with at most `cap` for each answer, t of them with `cap`."""
    ways = np.zeros((votes + 1, votes // cap + 1))
    ways[0, 0] = 1.0
    for size in sizes:
        chosen = np.zeros_like(ways)
        for v in range(min(size, cap, votes) + 1):
            tie = int(v == cap)
            chosen[v:, tie:] += comb(size, v) * ways[: votes + 1 - v, : ways.shape[1] - tie]
        ways = chosen
    return ways


def normalized(answer: str | None) -> str | None:
    """An answer for voting, without case and spaces; None if nothing is left."""
    return "".join(answer.split()).casefold() or None if answer is not None else None


def reported_ks(samples: int) -> list[int]:
    """The k of pass@k: powers of two below the number of samples, and that number."""
    return sorted({samples, *(2**i for i in range(samples.bit_length()) if 2**i < samples)})


def summarize(
    groups: Sequence[Group], samples: int, removed: Iterable[tuple[Problem, Trajectory]] = ()
) -> dict[str, Metrics]:
    """Source -> metrics, with a row `all` over every problem; each problem counts equally.

    `avg@k` averages over the scored samples of each problem; `pass@j`, `pass^k` and `maj@k` over problems with enough
    of them. Problems without a scored sample are left out and counted in `unjudged`. Rates of tool errors are pooled
    over calls, and NaN without any; lengths, in tokens after the prompt, over trajectories. `infrastructure` is the
    removed share of all rollouts.

    Args:
        groups: Scored rollouts, one group per problem.
        samples: The configured k.
        removed: Rollouts removed from their group, for the infrastructure rate and the problems without a group.
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    lost: Counter[str] = Counter()
    unjudged: dict[str, set[str]] = defaultdict(set)
    for problem, _ in removed:
        lost[problem.source] += 1
        unjudged[problem.source].add(problem.uid)
    for group in groups:
        by_source[group.problem.source].append(group)
        without = unjudged[group.problem.source]
        (without.discard if group.size else without.add)(group.problem.uid)
    sources = sorted({*by_source, *unjudged})
    table = {source: _row(by_source[source], samples, lost[source], len(unjudged[source])) for source in sources}
    if sources:
        table[ALL] = _row(list(groups), samples, lost.total(), sum(map(len, unjudged.values())))
    return table


def problem_scores(groups: Sequence[Group], samples: int) -> dict[str, np.ndarray]:
    """Score -> float64[groups]: avg@k, pass@j, pass^k and maj@k of each problem; NaN without enough scored samples."""
    correct = [[verdict.status == "correct" for verdict in group.verdicts] for group in groups]

    def each(least: int, score: Callable[[Group, list[bool]], float]) -> np.ndarray:
        pairs = zip(groups, correct, strict=True)
        return np.array([score(group, c) if len(c) >= least else np.nan for group, c in pairs], np.float64)

    scores = {f"avg@{samples}": each(1, lambda _, c: avg_at_k(c))}
    for k in reported_ks(samples):
        scores[f"pass@{k}"] = each(k, lambda _, c, k=k: pass_at_k(len(c), sum(c), k))
    scores[f"pass^{samples}"] = each(samples, lambda _, c: all_at_k(len(c), sum(c), samples))
    scores[f"maj@{samples}"] = each(
        samples, lambda group, c: maj_at_k([normalized(verdict.answer) for verdict in group.verdicts], c, samples)
    )
    return scores


def bootstrap(values: np.ndarray, seed: int = 0, uids: Sequence[str] = ()) -> tuple[float, float]:
    """The 95% interval of the mean: percentiles of the means of problems drawn with replacement. NaN are left out.

    Args:
        values: One for each problem.
        seed: Seed of the draws.
        uids: Uids of the problems. Values with equal uids, such as those of a world under two names, are drawn
            together, since they are not independent.
    """
    known = ~np.isnan(values)
    values, uids = values[known], [uid for uid, yes in zip(uids, known, strict=False) if yes]
    if not len(values):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    if len(set(uids)) < len(uids):
        _, cluster = np.unique(np.array(uids, str), return_inverse=True)
        sums, counts = np.bincount(cluster, values), np.bincount(cluster)
        draws = (rng.integers(len(sums), size=(AT_ONCE, len(sums))) for _ in range(DRAWS // AT_ONCE))
        means = np.concatenate([sums[drawn].sum(1) / counts[drawn].sum(1) for drawn in draws])
        low, high = np.percentile(means, (2.5, 97.5))
        return float(low), float(high)
    draws = (rng.integers(len(values), size=(AT_ONCE, len(values))) for _ in range(DRAWS // AT_ONCE))
    low, high = np.percentile(np.concatenate([values[drawn].mean(1) for drawn in draws]), (2.5, 97.5))
    return float(low), float(high)


def interval(values: np.ndarray, seed: int = 0, uids: Sequence[str] = ()) -> tuple[float, float]:
    """The 95% interval of the mean of scores in [0, 1].

    It is `bootstrap`, except where all scores are 0 or all are 1: every draw is then the same, so the interval is
    Wilson's, with as many trials as there are different problems (10.1080/01621459.1927.10502953).
    """
    known = ~np.isnan(values)
    scores, names = values[known], {uid for uid, yes in zip(uids, known, strict=False) if yes}
    if len(scores) and (scores == scores[0]).all() and scores[0] in (0.0, 1.0):
        n = len(names) or len(scores)
        far = 1.96**2 / (n + 1.96**2)
        return (0.0, far) if scores[0] == 0 else (1.0 - far, 1.0)
    return bootstrap(values, seed, uids)


def intervals(groups: Sequence[Group], samples: int, seed: int = 0) -> dict[str, dict[str, tuple[float, float]]]:
    """Source -> score -> 95% interval over the problems of that source; the source `all` covers every problem."""
    parts = {source: [g for g in groups if g.problem.source == source] for source in {g.problem.source for g in groups}}
    return {
        source: {
            name: interval(values, seed, [group.problem.uid for group in part])
            for name, values in problem_scores(part, samples).items()
        }
        for source, part in (parts | {ALL: list(groups)}).items()
    }


@dataclass(frozen=True)
class Difference:
    """A score of one policy minus that of another, on the problems that both have."""

    problems: int
    first: float
    second: float
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.first - self.second


def compare(first: Sequence[Group], second: Sequence[Group], samples: int, seed: int = 0) -> dict[str, Difference]:
    """Score -> difference with its 95% interval, by a bootstrap over problems that keeps the two values paired."""
    other = {group.problem.uid: group for group in second}
    shared = [(group, other[group.problem.uid]) for group in first if group.problem.uid in other]
    scores_a, scores_b = (
        problem_scores(groups, samples) for groups in ([a for a, _ in shared], [b for _, b in shared])
    )
    differences = {}
    for name in scores_a:
        both = ~np.isnan(scores_a[name] - scores_b[name])
        a, b = scores_a[name][both], scores_b[name][both]
        uids = [scores_a.problem.uid for (scores_a, _), yes in zip(shared, both, strict=True) if yes]
        differences[name] = Difference(len(a), _mean(a), _mean(b), *bootstrap(a - b, seed, uids))
    return differences


def setup_number(problems: Iterable[Problem], samples: int, temperature: float) -> float:
    """A number for what an evaluation measures besides the policy. Results are comparable where it is equal."""
    texts = [(problem.uid, problem.prompt, problem.answer) for problem in problems]
    return float(zlib.crc32(json.dumps([samples, float(temperature), texts]).encode("ascii")))


def eval_metrics(table: dict[str, Metrics]) -> Metrics:
    """`eval/<source>/<metric>`; slashes in a source become colons, since they separate the parts of a name."""
    return {
        f"eval/{source.replace('/', ':')}/{name}": value for source, row in table.items() for name, value in row.items()
    }


def _row(groups: Sequence[Group], samples: int, lost: int, unjudged: int) -> Metrics:
    judged = [group for group in groups if group.size]
    pairs = [pair for group in judged for pair in group.pairs]
    verdicts = [verdict for _, verdict in pairs]
    row: Metrics = {"problems": float(len(judged)), "samples": float(len(pairs))}
    row |= {name: _mean(values[~np.isnan(values)]) for name, values in problem_scores(judged, samples).items()}
    right = [verdict for verdict in verdicts if verdict.status == "correct"]
    shares = {
        name: _mean([verdict.status == name for verdict in verdicts])
        for name in ("no_answer", "unparseable", "timeout", "crash")
    }
    return row | {
        "tool_error_rate": tool_error_share(verdicts),
        "tool_error_in_correct": tool_error_share(right),
        "tool_calls": _mean([verdict.tool_calls for verdict in verdicts]),
        "turns": _mean([verdict.turns for verdict in verdicts]),
        "length": _mean([trajectory.length - trajectory.prompt_length for trajectory, _ in pairs]),
        "policy_tokens": _mean([float(trajectory.policy_mask.sum()) for trajectory, _ in pairs]),
        "truncated": _mean([trajectory.truncated for trajectory, _ in pairs]),
        **shares,
        "infrastructure": lost / (len(pairs) + lost) if pairs or lost else 0.0,
        "unjudged": float(unjudged),
    }


def _check(n: int, c: int, k: int) -> None:
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"k = {k} of n = {n} samples, c = {c} correct; must have 1 <= k <= n and 0 <= c <= n")


def _mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean; NaN without values, since a score without samples is not 0."""
    return float(np.mean(values)) if len(values) else float("nan")


def tool_error_share(verdicts: Sequence[Verdict]) -> float:
    """Failed share of all tool calls of these trajectories; NaN without calls, which means and curves leave out."""
    calls = sum(verdict.tool_calls for verdict in verdicts)
    return sum(verdict.tool_errors for verdict in verdicts) / calls if calls else nan

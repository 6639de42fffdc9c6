"""The studies of `benchmarks.study` as values. `docs/evidence.md` states what would refute each claim."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from docs.methods_table import load_methods

Words = tuple[str, ...]
"""A layer of settings: YAML files, then `--section.field=value`."""
Measure = tuple[str, str, str]
"""(title, metric, axis): the value at the end of training (`step`), at the start (`first`), or at the budget of sampled
tokens or seconds that all arms of a seed have reached."""

ERRORS, REWARD = "rollout/tool_error_in_correct", "rollout/reward"
COMMON: tuple[Measure, ...] = (
    ("failing calls in correct", ERRORS, "step"),
    ("at equal tokens", ERRORS, "tokens"),
    ("at equal seconds", ERRORS, "seconds"),
    ("accuracy", "eval", "step"),
    ("at equal tokens", "eval", "tokens"),
    ("pass@4", "eval/all/pass@4", "step"),
    ("tokens", "rollout/length", "step"),
    ("turns", "rollout/turns", "step"),
)
FIRST_ERRORS: Measure = ("failing calls at the start", ERRORS, "first")
TRUNCATED: Measure = ("truncated", "rollout/truncated", "step")
REWARDS: tuple[Measure, ...] = (("reward at the start", REWARD, "first"), ("reward", REWARD, "step"))


@dataclass(frozen=True)
class Outcome:
    """What a run is counted for: its last value of a metric lies above (or below) a share of its first one."""

    name: str
    metric: str
    share: float
    above: bool

    def holds(self, first: float, last: float) -> bool:
        return last > self.share * first if self.above else last < self.share * first


@dataclass(frozen=True)
class Claim:
    """That a measure of one arm lies below (or above) that of another one by more than `margin`."""

    text: str
    arm: str
    other: str
    measure: str
    """Title of the measure; `TITLE#2` is the second one of that title."""
    below: bool = True
    margin: float = 0.0
    """Negative: the arm may be worse by so much."""


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it."""

    question: str
    arms: Mapping[str, Words]
    """Settings of each arm over those of its world. Differences are to the first arm."""
    worlds: Mapping[str, Words]
    """What is trained: files and settings below those of the arms."""
    seeds: int = 5
    words: Words = ("--eval.every=10", "--eval.samples=4", "--data.eval_problems=96")
    """Settings of every run."""
    measures: tuple[Measure, ...] = COMMON
    cold: bool = True
    """Whether runs start from a supervised stage that arms share."""
    outcome: Outcome | None = None
    """What decides the question besides the measures, run by run."""
    claims: tuple[Claim, ...] = ()
    """What the study is to show. All claims of a study, in all of its worlds, share one error rate."""
    timed: bool = False
    """Whether seconds decide it. Then no run of another study is taken over; run it with `--jobs 1`, alone."""
    first_seed: int = 0
    """Above 0 where earlier seeds were read before its claims were written."""

    @property
    def seed_numbers(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


TINY: Words = (
    *("--steps=2", "--group.problems=2", "--group.size=4", "--data.eval_problems=4", "--eval.every=1"),
    *("--model.d_model=16", "--model.layers=1", "--model.heads=2", "--model.kv_heads=1", "--model.head_dim=8"),
    *("--model.d_ff=16", "--rollout.slots=8", "--rollout.max_response_tokens=16", "--rollout.append_lengths=[16]"),
    *("--batch.row_length=192", "--batch.rows=2", "--sft.steps=2", "--sft.traces=2", "--tools.workers=1"),
)
"""Sizes for a test of the machinery."""

SHARE: Words = ("--tools.share_results=true",)
"""Programs of the generated worlds depend on nothing but their text, so one run of each is enough."""
TOY: Words = ("configs/toy.yaml", *SHARE)
HARD: Words = ("configs/world_hard.yaml", *SHARE)
BOTH = MappingProxyType({"toy": TOY, "hard": HARD})
WORD_PROBLEMS: Words = ("configs/words.yaml", *SHARE)

REAL: Words = (
    *("configs/smollm2_words.yaml", "--model.path=words2/cold_model", "--sft.steps=0"),
    *("--stages=[]", "--data.sources=[words2/sometimes.jsonl]"),
)
"""A pretrained model after its supervised stage, on problems that it solves sometimes. All runs share both, since they
cost as much as the training (docs/evidence.md has the commands): what is shown holds for this start."""

GRPO: Words = ("--resample=none",)
REPAIR: Words = ("--method.edit_groups=examples.plugins.clean_calls:purify", "--surrogate.old_logprobs=scored")


def several(updates: int) -> Words:
    """Settings for that many optimizer steps per rollout batch of 8 groups; from 8 on the rate is 2e-3 over them."""
    if updates == 1:
        return ()
    parts = min(updates, 8)
    split = ("--batch.updates=several", f"--batch.updates.parts={parts}", f"--batch.updates.epochs={updates // parts}")
    slower = (f"--optim.lr={2e-3 / updates}", f"--optim.warmup_steps={3 * updates // 2}") if updates >= 8 else ()
    return (*split, f"--optim.schedule.total_steps={30 * updates}", *slower)


SURROGATES: Mapping[str, Words] = {
    "grpo": ("--surrogate.clip_low=0.2", "--surrogate.clip_high=0.2"),
    "dapo": ("--surrogate.clip_low=0.2", "--surrogate.clip_high=0.28"),
    "cispo": ("--surrogate=cispo", "--surrogate.high=5.0"),
    "gspo": ("--surrogate.level=sequence", "--surrogate.clip_low=0.0003", "--surrogate.clip_high=0.0004"),
    "sapo": ("--surrogate=sapo",),
    "dppo": ("--surrogate=dppo", "--surrogate.low=0.15", "--surrogate.high=0.15"),
}


def phase_worlds() -> dict[str, Words]:
    """Worlds by the rate at which a guess is right and by the share of demonstrations that repair a failing call."""
    worlds = {}
    for lucky in (15, 40, 70):
        for share in (0.1, 0.3, 0.5):
            sources = f"--data.sources=[world:chain-lucky{lucky}:1]"
            shares = (f"--data.demonstrations.repair={share}", f"--data.demonstrations.clean={0.6 - share:.1f}")
            worlds[f"lucky{lucky}_repair{share}"] = (*HARD, sources, *shares)
    return worlds


AGAINST_GRPO = (
    Claim("fewer failing calls than GRPO", "roc", "grpo", "failing calls in correct"),
    Claim("fewer than GRPO at equal tokens", "roc", "grpo", "at equal tokens"),
    Claim("accuracy at most 0.02 below GRPO's", "roc", "grpo", "accuracy", below=False, margin=-0.02),
)

STUDIES: Mapping[str, Study] = {
    "roc": Study(
        "Does resampling on correct lower failing calls, and what does it cost?",
        {
            "roc": ("--resample=roc",),
            "grpo": GRPO,
            "grpo_2g": (*GRPO, "--group.size=32"),
            "uniform": ("--resample=uniform",),
            "inverse": ("--resample=roc", "--resample.positive_select=inverse"),
            "penalty": (*GRPO, "--resample.drop=none", "--shaping=[tool_errors]"),
            "repair": (*GRPO, *REPAIR),
        },
        BOTH,
        claims=(
            Claim("fewer failing calls than GRPO", "roc", "grpo", "failing calls in correct"),
            Claim("fewer than GRPO on 2G", "roc", "grpo_2g", "failing calls in correct"),
            Claim("fewer than a uniform half of 2G", "roc", "uniform", "failing calls in correct"),
            Claim("fewer than GRPO at equal tokens", "roc", "grpo", "at equal tokens"),
            Claim("accuracy at most 0.02 below GRPO's", "roc", "grpo", "accuracy", below=False, margin=-0.02),
            Claim("fewer than a penalty in the reward", "roc", "penalty", "failing calls in correct"),
            Claim("fewer than repair in place", "roc", "repair", "failing calls in correct"),
        ),
    ),
    "words": Study(
        "Does resampling on correct do on word problems what it does on generated ones?",
        {"roc": ("--resample=roc",), "grpo": GRPO},
        {"words": WORD_PROBLEMS},
        seeds=3,
        measures=(
            FIRST_ERRORS,
            *COMMON,
            ("held out", "eval/heldout/avg@4", "step"),
            ("SVAMP", "eval/svamp/avg@4", "step"),
        ),
        claims=AGAINST_GRPO,
    ),
    "real": Study(
        "Does resampling on correct lower failing calls of a pretrained model, and what does it cost?",
        {
            "roc": ("--resample=roc",),
            "grpo": GRPO,
            "grpo_2g": (*GRPO, "--group.size=16"),
            "uniform": ("--resample=uniform",),
            "penalty": (*GRPO, "--resample.drop=none", "--shaping=[tool_errors]"),
        },
        {"smollm2": REAL},
        words=("--steps=16", "--data.eval_problems=300"),
        measures=(
            FIRST_ERRORS,
            *(measure for measure in COMMON if "pass" not in measure[0]),
            TRUNCATED,
            *((title, f"eval/{source}/avg@1", "step")
              for title, source in (("held out", "heldout"), ("SVAMP", "svamp"), ("GSM8K", "gsm8k"))),
        ),
        cold=False,
        claims=(
            Claim("fewer failing calls than GRPO", "roc", "grpo", "failing calls in correct"),
            Claim("fewer than GRPO on 2G", "roc", "grpo_2g", "failing calls in correct"),
            Claim("fewer than a uniform half of 2G", "roc", "uniform", "failing calls in correct"),
            Claim("fewer than GRPO at equal tokens", "roc", "grpo", "at equal tokens"),
            Claim("fewer than a penalty in the reward", "roc", "penalty", "failing calls in correct"),
            Claim("accuracy at most 0.02 below GRPO's", "roc", "grpo", "accuracy", below=False, margin=-0.02),
        ),
    ),
    "phase": Study(
        "Where does plain GRPO lock into failing and repairing?",
        {"roc": ("--resample=roc",), "grpo": GRPO},
        phase_worlds(),
        measures=(FIRST_ERRORS, *COMMON),
        claims=(Claim("fewer failing calls than GRPO", "roc", "grpo", "failing calls in correct"),),
        outcome=Outcome("locked", ERRORS, 0.5, above=True),
    ),
    "confirm": Study(
        "Do the effects that earlier seeds suggested hold in eight new seeds?",
        {"roc": ("--resample=roc",), "grpo": GRPO},
        {"toy": TOY, "lucky70_repair0.5": phase_worlds()["lucky70_repair0.5"]},
        seeds=8,
        first_seed=10,
        measures=(FIRST_ERRORS, *COMMON),
        claims=AGAINST_GRPO,
    ),
    "confirm_hard": Study(
        "Does what was undecided in the two harder worlds hold in eight new seeds?",
        {"roc": ("--resample=roc",), "grpo": GRPO},
        {"hard": HARD, "words": WORD_PROBLEMS},
        seeds=8,
        first_seed=10,
        measures=(FIRST_ERRORS, *COMMON),
        claims=AGAINST_GRPO,
    ),
    "selection": Study(
        "Which part of the selection matters, and how much oversampling pays?",
        {
            "sort": ("--resample=roc",),
            "inverse": ("--resample=roc", "--resample.positive_select=inverse"),
            "errors_only": ("--resample=roc", "--resample.format_penalty=false"),
            "format_only": ("--resample=roc", "--resample.error_penalty=false"),
            "no_minimum": ("--resample=roc", "--resample.min_positive=0", "--resample.min_negative=0"),
            **{f"x{times}": ("--resample=roc", f"--resample.oversample={times}") for times in (1.25, 1.5, 4)},
        },
        BOTH,
        claims=(
            Claim("the error part does the work", "sort", "format_only", "failing calls in correct"),
            Claim("the minimum counts matter", "sort", "no_minimum", "failing calls in correct"),
            *(Claim(f"a factor of 2 beats {times} per token", "sort", f"x{times}", "at equal tokens")
              for times in (1.25, 1.5, 4)),
        ),
    ),
    "overlong": Study(
        "Do overlong filtering or a missing cold start make calls and lengths explode?",
        {
            "roc": ("--resample=roc",),
            "overlong_filter": ("--resample=roc", "--weights.masks=[truncated]"),
            "grpo": GRPO,
            "grpo_overlong_filter": (*GRPO, "--weights.masks=[truncated]"),
            "repetition": ("--resample=roc", "--weights.factors=[repetition]"),
            "short_cold_start": ("--resample=roc", "--sft.steps=100"),
            "no_cold_start": ("--resample=roc", "--sft.steps=0"),
        },
        BOTH,
        measures=(*COMMON, TRUNCATED, ("calls", "rollout/tool_calls", "step")),
        claims=(
            Claim("the filter raises truncation with RoC", "overlong_filter", "roc", "truncated", below=False),
            Claim("it does with GRPO", "grpo_overlong_filter", "grpo", "truncated", below=False),
            Claim("less weight for repetition lowers accuracy", "repetition", "roc", "accuracy"),
        ),
    ),
    "rc": Study(
        "Do reward tokens give groups signal, with and without their first stage?",
        {
            "grpo": GRPO,
            "rc_grpo": ("configs/methods/rc_grpo.yaml",),
            "rc_grpo_no_first_stage": (
                "configs/methods/rc_grpo.yaml",
                "--sft.reward_tokens=none",
                "--plan.condition.separation=0",
            ),
            "rc_roc": ("configs/methods/rc_roc.yaml",),
        },
        {"toy": TOY},
        measures=(*COMMON, ("spread of rewards in a group", "rollout/reward_std", "step")),
        claims=(
            Claim("tokens widen the spread", "rc_grpo", "grpo", "spread of rewards in a group", below=False),
            Claim("their first stage is needed", "rc_grpo", "rc_grpo_no_first_stage", "accuracy", below=False),
            Claim("accuracy rises", "rc_grpo", "grpo", "accuracy", below=False),
        ),
    ),
    "updates": Study(
        "Which surrogates stay stable under several updates per batch?",
        {
            f"{name}_{updates}": (*GRPO, *words, *several(updates))
            for updates in (1, 4, 16)
            for name, words in SURROGATES.items()
        },
        {"toy": TOY},
        measures=(*REWARDS, *COMMON),
        claims=tuple(
            Claim(f"four updates cost {name} reward", f"{name}_4", f"{name}_1", "reward") for name in SURROGATES
        ),
        outcome=Outcome("collapsed", REWARD, 1.0, above=False),
    ),
    "numbers": Study(
        "What do bfloat16 and truncated importance weights change?",
        {
            "float32": ("--resample=roc",),
            "bfloat16": ("--resample=roc", "--model.compute_dtype=bfloat16"),
            "float32_tis": ("--resample=roc", "--weights.factors=[truncated_is]", "--surrogate.old_logprobs=scored"),
            "bfloat16_tis": ("--resample=roc", "--weights.factors=[truncated_is]", "--surrogate.old_logprobs=scored",
                             "--model.compute_dtype=bfloat16"),
        },
        {"toy": TOY},
        measures=(
            *COMMON,
            REWARDS[1],
            ("log-prob gap", "loss/logprob_gap_max", "step"),
            ("effective sample size", "loss/effective_sample_size", "step"),
            ("k3 of scored to sampled", "mismatch/token_kl_k3", "step"),
            ("its effective sample size", "mismatch/token_effective_sample_size", "step"),
        ),
        claims=(
            Claim("bfloat16 costs reward", "bfloat16", "float32", "reward"),
            Claim("bfloat16 leaves more failing calls", "bfloat16", "float32", "failing calls in correct", below=False),
        ),
    ),
    "lag": Study(
        "What does training on older samples cost per token, and gain per second?",
        {
            "own": ("--resample=roc",),
            **{f"lag{lag}": ("--resample=roc", "--rollout.step_limit=stream", f"--rollout.step_limit.lag={lag}")
               for lag in (0, 1, 2, 4)},
        },
        {"toy": TOY},
        measures=(*COMMON, ("reward, equal tokens", REWARD, "tokens"), ("reward, equal seconds", REWARD, "seconds")),
        claims=tuple(
            Claim(f"lag {lag} pays per second", f"lag{lag}", "own", "reward, equal seconds", below=False)
            for lag in (1, 2, 4)
        ),
        timed=True,
    ),
    "methods": Study(
        "What do the recipes of configs/methods do on the toy?",
        {name: (f"configs/methods/{name}.yaml",) for name in load_methods()},
        {"toy": TOY},
        seeds=1,
    ),
}  # fmt: skip
"""Studies by name."""

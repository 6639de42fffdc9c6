"""Finds settings that cannot work with the given data, before anything is computed.

Contradictions are refused when the configuration is read. This module reports combinations that run and learn nothing:
rewards that cannot differ, groups that are always dropped, demonstrations longer than a rollout may be.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.generated import generator_of
from grpo_roc_jax.data.pipeline import first_demonstrations, first_problems
from grpo_roc_jax.data.problems import NO_EQUAL, describe_lengths, problems_of, read_rows
from grpo_roc_jax.method.advantage import Scale
from grpo_roc_jax.method.compose import initial_state, resample_group, subset, train_rows
from grpo_roc_jax.method.distillation import NoAdvantage
from grpo_roc_jax.method.planning import PlanConfig
from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.reward.config import AnswerReward, Reward
from grpo_roc_jax.reward.score import MADE_UP, Scorer
from grpo_roc_jax.reward.trial import PROBLEM, made_up, sample_trajectories
from grpo_roc_jax.run.components import prompt_length
from grpo_roc_jax.settings.cli import config_errors
from grpo_roc_jax.settings.options import as_mapping, as_text
from grpo_roc_jax.text.chat_format import ChatFormat, Trace, UnfitTrace
from grpo_roc_jax.text.exported import exported_template
from grpo_roc_jax.types import Group, Problem, Verdict

LOOKED_AT = 32
"""Number of problems and demonstrations of a generated source whose lengths are measured. Files are
measured in full."""
NEARLY_GREEDY = 0.01
"""Below this temperature, or this share of the probability (`top_p`, 1 - `min_p`), nearly every token is the most
probable one."""
SMALL_DIVISOR = 0.01
"""Advantages of a right answer that are divided by less are no units of the reward anymore."""
LEFT_OUT = re.compile(f"over-long prompts dropped|do not fit and are left out|{re.escape(MADE_UP)}")
"""In a note on a file of which rows are left out because of their length, or on a reward function that failed."""


@config_errors()
def hindrances(config: Config, chat: ChatFormat, scorer: Scorer | None = None) -> list[str]:
    """A line for each thing that cannot work, with the setting and its value; empty if nothing speaks against the run.

    Args:
        config: Configuration of a run, or of one of its stages.
        chat: Its chat format.
        scorer: Calls the user's reward functions on two made-up trajectories; None leaves that check out.
    """
    lines = settings_against_learning(config)
    lines += too_long_problems(config, chat)
    if config.sft.steps:
        lines += too_long_demonstrations(config, chat)
        lines += useless_demonstrations(config, chat)
    elif config.text.tokenizer.kind in ("model", "file") and not config.environment.agents:
        lines += unasked(config, chat)
    return lines + (equal_rewards(config, chat, scorer) if scorer is not None else [])


def settings_against_learning(config: Config) -> list[str]:
    """Hindrances that follow from the settings alone."""
    lines: list[str] = []
    if not paid_functions(config):
        lines.append(
            f"every reward function has weight 0 ({', '.join(config.reward.names)}): all rewards are 0 and nothing is "
            "learned; set reward.functions.NAME.weight"
        )
    if isinstance(config.advantage, NoAdvantage) and not config.advantage.adjust:
        lines.append(
            "advantage none without advantage.adjust: every advantage is 0, whatever the rewards are; name an "
            "adjustment, or set advantage group"
        )
    if config.resample.sampled(config.group.size) == 1 and config.resample.drop == "equal":
        lines.append(
            "one rollout a problem with resample.drop = equal: a group of one has equal rewards, so every group is "
            "dropped; set resample.drop none, or raise group.size"
        )
    scale = getattr(config.advantage, "scale", None)
    if config.group.size == 1 and isinstance(scale, Scale) and type(scale).group is not Scale.group:
        divisor = scale.group(np.ones(1))
        if divisor < SMALL_DIVISOR:
            lines.append(
                f"group.size = 1 with advantage.scale = {scale.kind}: a group of one has no deviation, so its "
                f"advantage is divided by {divisor:g}; set advantage.scale none or batch_std, or raise group.size"
            )
    sampling = config.sampling
    for greedy, setting, other in (
        (sampling.top_k == 1, f"sampling.top_k = {sampling.top_k}", "raise it, or set it to 0"),
        (sampling.top_p < NEARLY_GREEDY, f"sampling.top_p = {sampling.top_p:g}", "raise it; 1 leaves out nothing"),
        (sampling.min_p > 1 - NEARLY_GREEDY, f"sampling.min_p = {sampling.min_p:g}", "lower it; 0 leaves out nothing"),
        (sampling.temperature < NEARLY_GREEDY, f"sampling.temperature = {sampling.temperature:g}", "raise it"),
    ):
        if greedy:
            lines.append(
                f"{setting}: all rollouts of a problem are the same, or nearly, so their rewards cannot differ; {other}"
            )
    if config.rollout.max_turns == 1 and config.text.tools_section and config.environment.kind == "tools":
        lines.append(
            "rollout.max_turns = 1 with text.tools_section: the prompts offer tools, but the calls of the last turn are"
            " not run, so none is; raise the former, or set the latter to false"
        )
    if not lines and not trains(config):
        lines.append(
            f"group.size = {config.group.size} with resample {config.resample.kind} and advantage "
            f"{as_text(as_mapping(config.advantage))}: groups of right and wrong rollouts are dropped or get "
            "advantages of 0, however many are right; change one of the three"
        )
    if not config.model.path and not config.sft.steps:
        lines.append(
            "model.path is empty and sft.steps = 0: a policy with random weights hardly ever earns a reward; name a "
            "model, or raise sft.steps"
        )
    return lines


def trains(config: Config) -> bool:
    """Whether any group of right and wrong rollouts is kept and gets an advantage that is not 0, by the selection,
    shaping and advantage of the method. True for a method that reads more than rewards, or that plans its rollouts:
    what it does with them is not tried."""
    if config.plan != PlanConfig():
        return True
    made = sample_trajectories(PROBLEM)
    outcomes = [(made["wrong answer"], verdict_of(config, 0.0)), (made["right answer"], verdict_of(config, 1.0))]
    size, rng, selected = config.resample.sampled(config.group.size), np.random.default_rng(0), []
    try:
        for right in range(size + 1):
            pairs = [outcomes[i < right] for i in range(size)]
            group = Group(PROBLEM, *(tuple(part) for part in zip(*pairs, strict=True)))
            selection = resample_group(group, config, rng)
            selected += [subset(group, selection)] if selection.kept else []
        rows = train_rows(selected, config, initial_state(config), rng=rng)
    except Exception:  # of a method that reads log-probabilities, or of a function of the user's
        return True
    return any(row.advantages.any() for row in rows)


def verdict_of(config: Config, reward: float) -> Verdict:
    """The verdict on a rollout with this reward from every function, without calls."""
    status, channels = "correct" if reward else "wrong", dict.fromkeys(config.reward.names, reward)
    return Verdict(reward, status, "1", 0, 0, answers=1, well_formed=True, turns=1, channels=channels)


def unasked(config: Config, chat: ChatFormat) -> list[str]:
    """What nothing asks of a published model, which sees no demonstrations here: the use of its tools, and the form in
    which an answer is read. A model that was exported from a run with these prompts has learned both."""
    template = Path(chat.config.tokenizer.path) / "chat_template.jinja"
    if template.is_file() and template.read_text(encoding="utf-8") == exported_template(chat):
        return []
    tag, paid, problems = config.reward.answer_tag, paid_functions(config), first_prompts(config)
    lines = [unnamed] if (unnamed := chat.unnamed_tools(problems)) else []
    strict = config.reward.extraction == "strict" and config.environment.kind == "tools"
    if not strict or not all(part.kind in ("answer", "format") for part in paid):
        return lines
    texts = [chat.glue.prompt_open + chat.instruction, *problems]
    if all(any(mark in text for text in texts) for mark in (f"<{tag}>", "\\boxed")):
        return lines
    ask = "set text.instruction default" if tag == "answer" else "ask for it in text.instruction"
    return [
        *lines,
        f"neither text.system nor text.instruction asks for <{tag}>\\boxed{{...}}</{tag}>, the form that "
        "reward.extraction = strict reads: a model that was not trained to write it earns nothing; "
        f"{ask}, or set reward.extraction lenient",
    ]


def first_prompts(config: Config) -> list[str]:
    """The first prompts of the generated sources and of the files in `data.sources`."""
    data = config.data
    problems = [problem for _, drawn in first_problems(data, config.seed, 1) for problem in drawn]
    for source in data.sources:
        path = Path(source).expanduser()
        if generator_of(source) is None and path.is_file():
            columns = {"prompt_column": data.prompt_column, "answer_column": data.answer_column}
            with suppress(ValueError):  # none of these rows can be used
                problems += problems_of(islice(read_rows(path), LOOKED_AT), source, path.stem, **columns)[0]
    return [problem.prompt for problem in problems]


def unequal_references(config: Config, notes: Iterable[str]) -> list[str]:
    """The notes on references that no answer equals, if answers alone are paid."""
    if not all(isinstance(part, AnswerReward) for part in paid_functions(config)):
        return []
    lines = [(note.partition(": ")[0], line.strip()) for note in notes for line in note.splitlines()]
    return [f"{source}: {line}" for source, line in lines if NO_EQUAL in line]


def left_out(notes: Iterable[str]) -> list[str]:
    """The notes on files of which rows are left out because of their length, and on reward functions that failed."""
    return [note for note in notes if LEFT_OUT.search(note)]


def paid_functions(config: Config) -> list[Reward]:
    """The reward functions that count: those with a weight, or all where the method combines their rewards itself."""
    combined = hasattr(config.advantage, "weights")
    return [part for part in config.reward.functions if combined or part.weight]


def too_long_problems(config: Config, chat: ChatFormat) -> list[str]:
    """Generated problems whose prompts do not fit. Problems in files are counted where they are read."""
    measure, most = prompt_length(config, chat), config.rollout.max_prompt_tokens
    first = first_problems(config.data, config.seed, LOOKED_AT)
    measured = {source: [measure(problem) for problem in problems] for source, problems in first}
    beyond = {source: lengths for source, lengths in measured.items() if max(lengths) > most}
    if not beyond:
        return []
    lengths = [length for row_lengths in beyond.values() for length in row_lengths]
    return [
        f"{_named(beyond)}: {describe_lengths('prompts', lengths)}, of which {_share(lengths, most)} exceed "
        f"rollout.max_prompt_tokens = {most}; raise it to {max(lengths)}"
    ]


def too_long_demonstrations(config: Config, chat: ChatFormat) -> list[str]:
    """Demonstrations that no rollout could repeat: longer than a response may be, or with more turns."""
    lines, rollout = [], config.rollout

    def response(trace: Trace) -> int:
        _, mask = chat.trace_row(trace)
        return len(mask) - int(mask.argmax())

    def longest_turn(trace: Trace) -> int:
        return max(len(chat.turn_ids(turn)) for turn in trace.turns)

    def fits(trace: Trace) -> bool:  # others are counted where they are read
        try:
            return bool(chat.of_trace(trace))
        except UnfitTrace:
            return False

    first = first_demonstrations(config.data, config.seed, LOOKED_AT)
    sources = [(source, [*filter(fits, traces)]) for source, traces in first]
    for what, setting, most, measure in (
        ("tokens", "rollout.max_response_tokens", rollout.max_response_tokens, response),
        ("turns", "rollout.max_turns", rollout.max_turns, lambda trace: len(trace.turns)),
        ("tokens in a turn", "rollout.max_turn_tokens", rollout.max_turn_tokens or math.inf, longest_turn),
    ):
        measured = {source: [measure(trace) for trace in traces] for source, traces in sources if traces}
        beyond = {source: numbers for source, numbers in measured.items() if max(numbers) > most}
        if not beyond:
            continue
        numbers = [number for row_numbers in beyond.values() for number in row_numbers]
        lines.append(
            f"{_named(beyond)}: demonstrations of {min(numbers)} to {max(numbers)} {what} after the "
            f"prompt, of which {_share(numbers, most)} exceed {setting} = {most}: the policy learns answers that it "
            f"may not finish; raise it to {max(numbers)}"
        )
    return lines


def useless_demonstrations(config: Config, chat: ChatFormat) -> list[str]:
    """Demonstrations that teach calls of tools that the run does not have, or answers that earn nothing."""
    faults, reward = dict[str, list[str]](), config.reward
    tools = "set tools.enabled"
    if config.environment.kind != "tools":
        tools = "name built-in tools in `uses` of the environment's class, or set data.trace_sources"
    only_answers = all(isinstance(part, AnswerReward) for part in paid_functions(config))
    lenient = reward.extraction == "lenient"
    for source, traces in first_demonstrations(config.data, config.seed, LOOKED_AT):
        called = {name for trace in traces if not trace.tools for name in chat.called(trace)}
        if called and not called & chat.tool_names and not config.environment.agents:
            fault = (
                f"demonstrations call {', '.join(sorted(called))}, but the run has "
                f"{', '.join(sorted(chat.tool_names)) or 'no tool'}: such calls always fail; {tools}"
            )
            faults.setdefault(fault, []).append(source)
        answered = any(find_answer(trace.turns, tag=reward.answer_tag, lenient=lenient).answer for trace in traces)
        if traces and only_answers and not answered:
            fault = (
                f"none of {len(traces)} demonstrations ends in an answer that can be read with "
                f"reward.answer_tag = {reward.answer_tag} and reward.extraction = {reward.extraction}: rollouts like "
                "these earn nothing; set what the demonstrations use"
            )
            faults.setdefault(fault, []).append(source)
    return [f"{_named(sources)}: {fault}" for fault, sources in faults.items()]


def equal_rewards(config: Config, chat: ChatFormat, scorer: Scorer) -> list[str]:
    """Reports if the reward functions that count, where all of them are the user's, give a finished and a truncated
    trajectory equal rewards."""
    paid_names = [part.name for part in paid_functions(config)]
    if not paid_names or not scorer.functions.keys() >= set(paid_names):
        return []
    first = first_problems(config.data, config.seed, 1)
    problem = next((problem for _, problems in first for problem in problems), None)
    problem = problem or Problem("example", "What is 6 * 7?", "42", "example")
    rows = made_up(problem, chat.prompt_ids(problem), chat.raw_ids, config.reward.answer_tag)
    paid = {name: _values(scorer.functions[name], problem, rows) for name in paid_names}
    if any(values is None or len({str(value) for value in values}) > 1 for values in paid.values()):
        return []
    rewards = ", ".join(f"{name} {values[0]}" for name, values in paid.items())
    return [
        f"a finished and a cut trajectory get the same from every reward function ({rewards}): groups of equal rewards "
        f"teach nothing; `grpo-roc check-reward {next(iter(paid))}` tries more"
    ]


def _values(function: Callable, problem: Problem, rows: Sequence) -> list | None:
    try:
        return list(function(problem, rows))
    except Exception:  # `Scorer.try_functions` reports the error
        return None


def _share(numbers: Sequence[int], most: int) -> str:
    return f"{sum(number > most for number in numbers)} of {len(numbers)}"


def _named(sources: Collection[str]) -> str:
    """The first source, and how many more there are, so that sources with the same fault share a line."""
    return next(iter(sources)) + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")

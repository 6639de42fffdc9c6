"""The same GRPO run by this library and by TRL's GRPOTrainer: seconds of a step, and the curves of the reward.

    python -m benchmarks.bench_trl --model words2/cold_model --data words2/sometimes.jsonl --steps 16

The policy writes one Python program a problem, and a program that prints the answer is paid 1. Both runs have the same
weights, prompts (equal token ids, which is checked), reward function, problems a step, group size, longest completion,
temperature, loss (clipped at 0.2, mean over the tokens of the step, no divergence term), AdamW and learning rate, in
float32. They draw problems and tokens in another order. docs/real_model.md has the commands that make model and data.

TRL needs `pip install -e ".[reference]"`. The runs go one after the other, each in a process of its own. Printed is one
JSON line: medians over the steps after the first of sampling with scoring and of the update, and their ratios, unless
the completions of one run are longer. `--out FILE` appends it, with the reward of every step.
"""

import argparse
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_roc_jax.sandbox import Executor, ExecutorSettings, Program, ProgramLimits

LR, CLIP, GROUP = 2e-5, 0.2, 8
CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
NUMBERS = itertools.count()
LIKE = 1.1
"""Largest ratio of the mean lengths of completions at which seconds of both runs are compared."""


@cache
def executor() -> Executor:
    made = Executor(ExecutorSettings(limits=ProgramLimits(wall_s=2.0, memory_mb=256), preload=()))
    made.start()
    return made


def paid(texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 for each text whose first program prints the answer, else 0."""
    programs = [match[1] if (match := CODE.search(text)) else "" for text in texts]
    results = executor().run([Program(str(next(NUMBERS)), code) for code in programs])
    return [float(equal(result.stdout, answer)) for result, answer in zip(results, answers, strict=True)]


def equal(printed: str, answer: str) -> bool:
    try:
        return abs(float(printed) - float(answer)) < 1e-6
    except ValueError:
        return False


def prints_the_answer(problem: Any, trajectories: Sequence[Any]) -> list[float]:
    """The reward as a function of this library."""
    return paid([trajectory.turns[0].text for trajectory in trajectories], [problem.answer] * len(trajectories))


def words_of(options: argparse.Namespace) -> list[str]:
    """The settings of our run."""
    return [
        "configs/smollm2_words.yaml",
        *(f"--model.path={options.model}", "--sft.steps=0", "--stages=[]", f"--data.sources=[{options.data}]"),
        *("--data.eval_problems=0", "--data.eval_sources=[]", "--tools.enabled=[]", "--rollout.max_turns=1"),
        "--text.calls=hermes",  # a turn of another kind of calls does not end with </python>, as TRL's does not
        *(f"--rollout.max_response_tokens={options.longest}", f"--rollout.slots={options.problems * GROUP}"),
        *(f"--steps={options.steps}", f"--group.problems={options.problems}", f"--group.size={GROUP}"),
        *("--resample=none", "--resample.drop=none", "--advantage.scale.eps=1e-4", f"--seed={options.seed}"),
        *("--reward.functions=[benchmarks.bench_trl:prints_the_answer]", "--reward.truncated=score"),
        *(f"--surrogate.clip_low={CLIP}", f"--surrogate.clip_high={CLIP}", f"--optim.lr={LR}"),
        *("--optim.warmup_steps=0", "--log.console=off", "--log.traces=0", "--checkpoint.every=0"),
    ]


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Our run: seconds and reward of each step."""
    from grpo_roc_jax.config import read_config
    from grpo_roc_jax.record.metrics import read_metrics
    from grpo_roc_jax.train import train

    with tempfile.TemporaryDirectory() as folder:
        train(read_config(*words_of(options), f"--run_dir={folder}/run"))
        rows = [row for row in read_metrics(Path(folder) / "run") if "time/step_s" in row]
    return {
        "reward": [row["rollout/reward"] for row in rows],
        "tokens": [row["rollout/length"] for row in rows],
        "sample_s": [row["time/step_s"] - row["time/update_s"] for row in rows],
        "update_s": [row["time/update_s"] for row in rows],
    }


def prompts_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The problems with the prompts that our run renders, as text whose ids are checked to be the same."""
    from grpo_roc_jax.config import read_config
    from grpo_roc_jax.run.components import check_components, make_registry
    from grpo_roc_jax.types import Problem

    config = read_config(*words_of(options))
    tokenizer, chat = check_components(config, make_registry(config))[:2]
    rows = []
    for line in Path(options.data).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = [int(token) for token in chat.prompt_ids(Problem("0", row["prompt"], row["answer"], "data"))]
        rows.append({"prompt": tokenizer.decode(ids), "ids": ids, "answer": row["answer"]})
    return rows


def theirs(options: argparse.Namespace) -> dict[str, Any]:
    """TRL's run of the same."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = prompts_of(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for row in rows:
        if tokenizer(row["prompt"])["input_ids"] != row["ids"]:
            raise SystemExit(f"TRL would train on other token ids than ours for the prompt {row['prompt']!r}")
    measured: dict[str, list[float]] = {"reward": [], "tokens": [], "sample_s": [], "update_s": []}

    class Timed(GRPOTrainer):
        """Adds up the seconds of sampling with scoring, and of everything else in a step."""

        sampled = begun = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate_and_score_completions(inputs)
            self.sampled += time.perf_counter() - start
            return out

    class Recorder(TrainerCallback):
        """Reads what the trainer logs after each step."""

        def on_log(self, *given: Any, logs: dict[str, float], **rest: Any) -> None:
            if "reward" in logs:
                now = time.perf_counter()
                measured["reward"].append(logs["reward"])
                measured["tokens"].append(logs["completions/mean_length"])
                measured["sample_s"].append(trainer.sampled)
                measured["update_s"].append(now - trainer.begun - trainer.sampled)
                trainer.sampled, trainer.begun = 0.0, now
            elif not measured["reward"]:
                raise SystemExit(f"TRL logs no reward after its first step, only {', '.join(logs)}")

    def reward(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return paid(completions, answer)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=options.problems,
            num_generations=GROUP,
            max_completion_length=options.longest,
            temperature=1.0,
            beta=0.0,
            epsilon=CLIP,
            loss_type="dapo",
            scale_rewards="group",
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.01,
            max_grad_norm=1.0,
            seed=options.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
        data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])
        trainer = Timed(model, reward, config, data, processing_class=tokenizer, callbacks=[Recorder()])
        trainer.begun = time.perf_counter()
        trainer.train()
    return measured


def in_process(name: str, argv: Sequence[str]) -> dict[str, Any]:
    """The measurements of one run, made in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_trl", *argv, "--only", name]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    if options.only:
        print(json.dumps({"ours": ours, "trl": theirs}[options.only](options)))
        return
    runs = {name: in_process(name, words) for name in ("trl", "ours")}
    lines: dict[str, Any] = {"benchmark": "trl", "steps": options.steps, "rollouts a step": options.problems * GROUP}
    for name, run in runs.items():
        for part in ("sample_s", "update_s", "tokens"):
            lines[f"{name} {part}"] = round(statistics.median(run[part][1:]), 3)
        half = len(run["reward"]) // 2
        halves = run["reward"][:half], run["reward"][half:]
        lines[f"{name} reward, halves"] = [round(statistics.mean(part), 3) for part in halves]
    names = ("jax", "trl", "torch", "transformers")
    lines |= {"versions": {name: metadata.version(name) for name in names}, "machine": platform.machine()}
    short, long = sorted(lines[f"{name} tokens"] for name in runs)
    for part in ("sample_s", "update_s") if long <= LIKE * short else ():
        lines[f"trl / ours, {part}"] = round(lines[f"trl {part}"] / lines[f"ours {part}"], 2)
    print(json.dumps(lines))
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(lines | {"runs": runs}) + "\n")
    if long > LIKE * short:
        sys.exit(f"completions of {short} and {long} tokens: seconds of unequal work are not compared")


if __name__ == "__main__":
    main()

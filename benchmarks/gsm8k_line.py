"""Does real text pass through the whole pipeline? GSM8K: load, render, roll out with tools, score, update.

    python benchmarks/gsm8k_line.py PATH/gsm8k_train.jsonl [--problems 64]

Every row of the file is loaded and its reference answer parsed. A sample goes through training: a byte-level model with
random weights learns the call format from a few demonstrations of generated worlds, rolls out the real questions with
the real executor, is scored, and takes one update. The model is far too small to solve a problem; the benchmark shows
that no row is lost on the way. Ends with one JSON line.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.train import train

SETTINGS = """
--text.tokenizer=bytes --steps=1 --group.size=2 --resample=none --resample.drop=none --data.eval_problems=0
--model.d_model=64 --model.layers=2 --model.heads=4 --model.kv_heads=2 --model.head_dim=16 --model.d_ff=128
--rollout.slots=16 --rollout.max_prompt_tokens=1200 --rollout.max_response_tokens=400 --rollout.max_turns=3
 --rollout.append_lengths 64 256 --batch.row_length=1600 --batch.rows=4
--data.trace_sources world:products:1 --sft.traces=16 --sft.lr=0.005 --optim.lr=0.0001 --log.console=off
""".split()  # noqa: SIM905 (a command line is easier to read as one string)


def brevity(problem, trajectories):
    """Rewards short rollouts, so that advantages are not all zero whatever the answers are."""
    return [1.0 / trajectory.length for trajectory in trajectories]


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--sft-steps", type=int, default=60)
    options = parser.parse_args()

    problems, report = load_problems(options.path)
    print(report)
    with tempfile.TemporaryDirectory() as folder:
        sample = Path(folder) / "sample.jsonl"
        lines = options.path.read_text(encoding="utf-8").splitlines()
        sample.write_text("\n".join(random.Random(0).sample(lines, options.problems)) + "\n", encoding="utf-8")
        words = [*SETTINGS, f"--run_dir={folder}/run", "--data.sources", str(sample)]
        words += [f"--group.problems={options.problems}", f"--sft.steps={options.sft_steps}"]
        words += ["--reward.functions", "answer", "brevity"]
        config = load_config(Config, words, prog="gsm8k_line")

        scorer = make_scorer(load_config(Config, SETTINGS, prog="gsm8k_line").reward)
        parsed = scorer.verifier.check_gold([problem.answer for problem in problems])
        scorer.close()
        unparsed = [problem.uid for problem, good in zip(problems, parsed, strict=True) if not good]
        print(f"reference answers that parse: {sum(parsed)} of {len(problems)}; others: {unparsed or 'none'}")

        chat = make_chat(config.text, load_tokenizer(config.text))
        lengths = [len(chat.prompt_ids(problem)) for problem in problems]
        print(f"prompts rendered: {len(lengths)}, {min(lengths)} to {max(lengths)} tokens")

        train(config, functions={"brevity": brevity})
        records = list(read_trace(config.run_dir, 1))
        row = next(row for row in read_metrics(config.run_dir) if row["step"] == 1)
        print("a rollout:\n" + "".join([*records[0].context[:1], *(turn.text for turn in records[0].trajectory.turns)]))
    kinds: dict[str, int] = {}
    statuses: dict[str, int] = {}
    for record in records:
        for result in record.trajectory.results:
            kinds[result.kind] = kinds.get(result.kind, 0) + 1
        status = record.verdict.status if record.verdict else record.why
        statuses[status] = statuses.get(status, 0) + 1
    return {
        "benchmark": "gsm8k_line",
        "rows": len(problems),
        "golds_parsed": sum(parsed),
        "rollouts": len(records),
        "tool_results": kinds,
        "verdicts": statuses,
        "loss": row["loss/value"],
        "grad_norm": row["update/grad_norm"],
        "update_skipped": row["update/skipped"],
        "logprob_gap_max": row["loss/logprob_gap_max"],
    }


if __name__ == "__main__":
    print(json.dumps(main()))

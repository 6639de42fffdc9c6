"""Writes the samples in data/: `python make_data.py`. `grpo-roc check-data FILE` shows how a file of yours is read."""

import json
import random
from pathlib import Path

from tools import PRICES


def ask(item):
    """A call of the tool and what comes back, as messages."""
    call = {"function": {"name": "price", "arguments": {"item": item}}}
    output = PRICES.get(item, f"[exception] ValueError: no {item}")
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": output}]


def conversation(item, kind):
    """A demonstration: one call (clean), a failing call before it (repair), or a guess."""
    calls = {"clean": ask(item), "repair": ask(f"#{item}") + ask(item), "guess": []}[kind]
    text = PRICES[item] if calls else item
    answer = {"role": "assistant", "content": f"<answer>\\boxed{{{text}}}</answer>"}
    return {"messages": [{"role": "user", "content": f"{item}=?"}, *calls, answer]}


def write(name, rows):
    """A file with one JSON object per line."""
    path = Path(__file__).with_name("data") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


items = random.Random(0).sample(sorted(PRICES), 4300)  # enough to learn copying rather than the items
kinds = ("clean", "repair", "repair", "guess")
write("problems.jsonl", [{"prompt": f"{item}=?", "answer": PRICES[item]} for item in items[:200]])
write("heldout.jsonl", [{"prompt": f"{item}=?", "answer": PRICES[item]} for item in items[200:300]])
write("demonstrations.jsonl", [conversation(item, kinds[i % 4]) for i, item in enumerate(items[300:])])

"""Agents as functions: what each does is its name. The module counts how often it is imported."""

import asyncio
import json
import urllib.request

IMPORTED = []
IMPORTED.append(len(IMPORTED))


def request(base_url, api_key, messages):
    body = {"model": "policy", "messages": messages, "max_tokens": 6}
    headers = {"Authorization": f"Bearer {api_key}"}
    asked = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


async def ask(base_url, api_key, messages):
    said = await asyncio.to_thread(request, base_url, api_key, messages)
    return [*messages, {"role": "assistant", "content": said}]


async def two_turns(row, base_url, api_key):
    """As `linear` of `agent_script.py`: a question, a further one, a reward."""
    messages = await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    await ask(base_url, api_key, [*messages, {"role": "user", "content": "go on"}])
    return {"reward": 1.0 if row["answer"] == "5" else 0.0}


async def no_reward(row, base_url, api_key):
    await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])


async def fails(row, base_url, api_key):
    messages = await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    return float(f"not a number: {messages[-1]['content']}")


async def late(row, base_url, api_key):
    await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    await asyncio.sleep(1000)


async def quiet(row, base_url, api_key):
    return 1.0


async def huge(row, base_url, api_key):
    await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    return 1e30


def plain(row, base_url, api_key):
    return 1.0

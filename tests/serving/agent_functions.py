"""Agents as functions: what each does is its name."""

import asyncio
import json
import os
import time
import urllib.request

FORMS = {"chat/completions": "messages", "responses": "input", "messages": "messages"}
"""The field with what is said, by the path."""


def request(base_url, api_key, messages, path="chat/completions", model="policy", agent=None, **fields):
    body = {"model": model, FORMS[path]: messages, "max_tokens": 6, "max_output_tokens": 6} | fields
    headers = {"Authorization": f"Bearer {api_key}"} | ({"X-Agent": agent} if agent else {})
    http_request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(http_request, timeout=300) as answer:
        return json.load(answer)


def said_in(answer):
    return answer["choices"][0]["message"]["content"]


async def ask(base_url, api_key, messages):
    text = said_in(await asyncio.to_thread(request, base_url, api_key, messages))
    return [*messages, {"role": "assistant", "content": text}]


async def two_turns(row, base_url, api_key):
    """As `linear` of `agent_script.py`: a question, a further one, a reward."""
    messages = await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    await ask(base_url, api_key, [*messages, {"role": "user", "content": "go on"}])
    return {"reward": 1.0 if row["answer"] == "5" else 0.0}


async def late(row, base_url, api_key):
    await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    await asyncio.sleep(1000)


async def pays_by_id(row, base_url, api_key):
    """Three calls, each in another form of the endpoint: the second is paid by its id."""
    question, ids = [{"role": "user", "content": row["prompt"]}], []
    for path in FORMS:
        answer = await asyncio.to_thread(request, base_url, api_key, question, path)
        ids.append(answer["id"])
    return {"reward": 1.0, "calls": {ids[1]: 0.25}}


async def pays_in_order(row, base_url, api_key):
    await two_turns(row, base_url, api_key)
    return {"calls": [0.5, None]}


async def team(row, base_url, api_key):
    """A planner by model name, a writer by header who goes on from what the planner said, a critic of its own."""
    question = [{"role": "user", "content": row["prompt"]}]
    plan = said_in(await asyncio.to_thread(request, base_url, api_key, question, model="planner"))
    longer = [*question, {"role": "assistant", "content": plan}, {"role": "user", "content": "write"}]
    await asyncio.to_thread(request, base_url, api_key, longer, model="planner", agent="writer")
    question.insert(0, {"role": "system", "content": "Plan."})
    await asyncio.to_thread(request, base_url, api_key, question, model="critic")
    return 1.0


async def where(row, base_url, api_key):
    """Says in which process it runs, and in which import of the module."""
    await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    return {"reward": 1.0, "process": os.getpid(), "module": id(FORMS) % 999_983}


async def by_answer(row, base_url, api_key):
    """What the column `how` says: the process dies, blocks, leaves, or all is well."""
    await ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
    if row["how"] == "crash":
        os._exit(3)
    if row["how"] == "block":
        time.sleep(1000)
    if row["how"] == "leave":
        raise SystemExit("enough")
    return 1.0

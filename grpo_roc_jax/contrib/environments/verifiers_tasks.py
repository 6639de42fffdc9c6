"""Tasksets of verifiers as environments: its harness requests turns over an endpoint on loopback, the policy answers.

A harness sends its whole conversation with each request. What it adds to the previous one is what the policy reads
next, so a rollout keeps the token ids that were sampled. A harness that alters earlier messages cannot be followed.

Source: the package `verifiers`, version 0.4, its interface `verifiers.v1`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.utils.loaders import resolve_env_config

from grpo_roc_jax.environments.config import EnvironmentVerifiers
from grpo_roc_jax.environments.connection import Connection, outcome
from grpo_roc_jax.environments.environment import Environment, Observation
from grpo_roc_jax.settings.files import parse_yaml
from grpo_roc_jax.tools.registry import ToolUnavailable
from grpo_roc_jax.types import Problem, ToolResult, Turn

MOST_TASKS = 10_000
"""Most tasks that are read of a taskset, which may be endless."""
MODEL = "policy"

Message = Mapping[str, Any]


def read_taskset(text: str) -> dict[str, Any]:
    """The settings of a taskset that is written `ID` or `ID?NAME=VALUE&NAME=VALUE`; dots in a name are nested ones."""
    name, _, words = text.partition("?")
    return nested({"id": name}, [word for word in words.split("&") if word])


def nested(settings: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The settings with those of `NAME=VALUE` words: values are read as YAML, dots in a name lead into mappings.

    Raises:
        ValueError: A word has no `=`, or leads into a value that is no mapping.
    """
    for word in words:
        name, equals, value = word.partition("=")
        *path, last = name.split(".")
        inner: Any = settings
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not equals or not last or not isinstance(inner, dict):
            raise ValueError(
                f"setting {word!r} of verifiers: must be NAME=VALUE, with dots in NAME for nested settings"
            )
        inner[last] = parse_yaml(value, f"setting {name} of verifiers")
    return settings


def taskset_problems(taskset: str) -> Iterator[Problem]:
    """A problem for each task of a taskset; its column `task` says which one it is."""
    loaded, name = (
        vf.load_taskset(resolve_env_config({"taskset": read_taskset(taskset)}).taskset),
        taskset.split("?")[0],
    )
    for number, task in enumerate(islice(loaded, MOST_TASKS)):
        extra = {"task": number, "key": task.key}
        yield Problem(
            f"{taskset}:{task.key}", task.data.prompt_text, str(getattr(task.data, "answer", "")), name, extra
        )


@dataclass(eq=False)
class Desk:
    """What the episodes of an event loop share: the environment, its tasks, and the endpoint."""

    environment: Any
    tasks: Sequence[Any]
    context: vf.ModelContext
    rows: dict[str, "VerifiersEnvironment"] = field(default_factory=dict)
    """Rows by the id of their trace, which each request carries."""

    async def play(self, number: int, row: "VerifiersEnvironment") -> Any:
        """Runs the episode of a task, whose requests go to `row`."""

        def minted(trace: Any) -> None:
            self.rows[trace.id] = row

        return await self.environment.run_episode(self.tasks[number], self.context, on_trace=minted)


def environment_of(choice: EnvironmentVerifiers) -> Any:
    """The environment of verifiers that the settings describe."""
    agent = {"harness": {"id": choice.harness}, "runtime": {"type": choice.runtime}}
    settings = nested({"taskset": read_taskset(choice.taskset), "agent": agent}, choice.settings)
    return vf.load_environment(resolve_env_config(settings))


@asynccontextmanager
async def desk(choice: EnvironmentVerifiers) -> AsyncIterator[Desk]:
    """The environment while it serves, with an endpoint for its harness."""
    environment = environment_of(choice)
    desks: list[Desk] = []

    async def answer(request: web.Request) -> web.Response:
        row = desks[0].rows.get(request.headers.get("X-Session-ID", ""))
        if row is None:
            return web.json_response({"error": {"message": "this episode has ended"}}, status=404)
        body = await request.json()
        chat_completion = await row._answer_request(body)
        if not body.get("stream"):
            return web.json_response(chat_completion)
        (only,) = chat_completion["choices"]
        parts = [{"delta": only["message"]}, {"delta": {}, "finish_reason": only["finish_reason"]}]
        chunks = [
            {**chat_completion, "object": "chat.completion.chunk", "choices": [{"index": 0, **part}]} for part in parts
        ]
        lines = [*map(json.dumps, chunks), "[DONE]"]
        return web.Response(text="".join(f"data: {line}\n\n" for line in lines), content_type="text/event-stream")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="GRPO_ROC_NO_KEY")
        tasks = list(islice(environment.taskset, MOST_TASKS))
        async with environment.serving():
            desks.append(Desk(environment, tasks, vf.ModelContext(model=MODEL, client=client)))
            yield desks[0]
    finally:
        await runner.cleanup()


_DESKS: dict[tuple[asyncio.AbstractEventLoop, EnvironmentVerifiers], Connection[Desk]] = {}


async def shared_desk(choice: EnvironmentVerifiers) -> Desk:
    """The desk of the running event loop, which is opened once."""
    key = (asyncio.get_running_loop(), choice)
    if key not in _DESKS:
        _DESKS[key] = Connection(desk(choice))
    try:
        return await asyncio.shield(_DESKS[key].entered)
    except ConnectionError:
        _DESKS.pop(key, None)
        raise


class VerifiersEnvironment(Environment):
    """An episode of a task: the harness runs calls and speaks as the user, and the task's rewards are
    given at the end."""

    choice: ClassVar[EnvironmentVerifiers]
    answers_calls = True

    async def reset(self, problem: Problem) -> str:
        body = await self._begin(await shared_desk(self.choice), problem.extra["task"], problem.extra["key"])
        if (offered := tools_of(body)) != list(self.schemas):
            raise ValueError(f"the harness offers other tools for this task: {str(offered)[:200]}")
        system = [text_of(message) for message in self._messages if message["role"] in ("system", "developer")]
        user_text = "\n\n".join(text_of(message) for message in self._messages if message["role"] == "user")
        if not user_text.startswith(problem.prompt):
            raise ValueError(f"the harness asks {user_text[:80]!r}, which does not begin with the prompt of the task")
        return "\n\n".join([user_text.removeprefix(problem.prompt), *system])

    async def _begin(self, desk: Desk, number: int, key: str) -> Message:
        """Starts the episode and returns its first request."""
        if number >= len(desk.tasks) or desk.tasks[number].key != key:
            raise ValueError(f"task {number} of taskset {self.choice.taskset!r} is another one than when it was read")
        self._desk, self._requests = desk, asyncio.Queue()
        self._episode = asyncio.create_task(desk.play(number, self))
        body = await self._next()
        if body is None:
            raise ToolUnavailable(
                f"verifiers: the episode ended before its first turn: {faults_of(self._episode.result())}"
            )
        self._messages = body["messages"]
        return body

    async def _answer_request(self, body: Message) -> Message:
        """The answer to a request of the harness, once the policy has given it."""
        answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((body, answer))
        return await answer

    async def step(self, turn: Turn) -> Observation:
        open_calls = [i for i, result in enumerate(turn.results) if result is None]
        if turn.calls and not open_calls:
            return Observation()  # none of them is a call that the harness could run
        ids = {f"call_{len(self._messages)}_{i}": i for i in open_calls}
        self._answer.set_result(completion(turn, ids))
        if (body := await self._next()) is None:
            return Observation(results=(ToolResult("ok"),) * len(ids), done=True)
        known, messages = len(self._messages), body["messages"]
        if messages[:known] != self._messages or [message["role"] for message in messages[known : known + 1]] != [
            "assistant"
        ]:
            raise ValueError("the harness altered earlier messages, so its conversation cannot be followed")
        self._messages, added = messages, messages[known + 1 :]
        outputs = {message["tool_call_id"]: text_of(message) for message in added if message["role"] == "tool"}
        text = "\n\n".join(text_of(message) for message in added if message["role"] != "tool")
        if set(outputs) != set(ids):
            raise ValueError(f"the harness answered the calls {sorted(outputs)} of {sorted(ids)}")
        if text:
            text = "\n\n".join([*outputs.values(), text])
        return Observation(text, results=tuple(ToolResult("ok", echo=outputs[name]) for name in ids))

    async def get_reward(self) -> float | dict[str, float | None]:
        if not self._episode.done():
            return 0.0  # cut by the budget or the limit of turns
        episode = self._episode.result()
        if not episode.ok:
            raise ToolUnavailable(f"verifiers: {faults_of(episode)}")
        trace = episode.traces[0]
        scores = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
        return {**trace.metrics, **scores, "reward": float(trace.reward)}

    async def close(self) -> None:
        if hasattr(self, "_episode"):
            self._episode.cancel()
            if hasattr(self, "_answer"):
                self._answer.cancel()
            self._desk.rows = {key: row for key, row in self._desk.rows.items() if row is not self}

    async def _next(self) -> Message | None:
        """The next request of the harness; None if the episode has ended."""
        request = asyncio.create_task(self._requests.get())
        await asyncio.wait([request, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return None
        body, self._answer = request.result()
        return body


def completion(turn: Turn, ids: Mapping[str, int]) -> dict[str, Any]:
    """A turn as a chat completion, with the calls that the harness is to run."""
    *thought, reply = re.split(r"</reason>|</think>", turn.text, maxsplit=1)
    for call in turn.calls:
        reply = re.sub(r"<[^<>]*>\s*" + re.escape(call.raw) + r"\s*</[^<>]*>", "", reply)
    message: dict[str, Any] = {"role": "assistant", "content": re.sub(r"</?answer>", "", reply).strip() or None}
    if thought:
        message["reasoning_content"] = re.sub(r"^\s*<[^<>]*>", "", thought[0]).strip()
    if ids:
        message["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": turn.calls[i].name, "arguments": json.dumps(dict(turn.calls[i].arguments))},
            }
            for name, i in ids.items()
        ]
    ended = {"index": 0, "message": message, "finish_reason": "tool_calls" if ids else "stop"}
    usage = {"prompt_tokens": turn.start, "completion_tokens": turn.end - turn.start, "total_tokens": turn.end}
    return {"id": "turn", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [ended], "usage": usage}


def text_of(message: Message) -> str:
    """The text of a message; its content may be a list of parts."""
    content = message.get("content") or ""
    return (
        content if isinstance(content, str) else "".join(part.get("text", f"[{part.get('type')}]") for part in content)
    )


def tools_of(body: Message) -> list[Message]:
    """The tools that a request offers."""
    return [tool["function"] for tool in body.get("tools") or ()]


def faults_of(episode: Any) -> str:
    """What went wrong in an episode, in words."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(str(error) for error in errors)[:400] or "no reason given"


@lru_cache
def verifiers_class(choice: EnvironmentVerifiers) -> type[VerifiersEnvironment]:
    """The environment of a taskset. The first request of its first task tells which tools its harness offers.

    Raises:
        ValueError: It cannot be loaded or begun.
    """
    made = type("VerifiersEnvironment", (VerifiersEnvironment,), {"choice": choice})

    async def offered() -> list[Message]:
        async with desk(choice) as opened:
            row = made()
            try:
                return tools_of(await row._begin(opened, 0, opened.tasks[0].key))
            finally:
                await row.close()

    try:
        made.schemas = outcome(offered, choice.timeout_s, choice.retries)
    except ConnectionError as error:
        raise ValueError(f"environment: taskset {choice.taskset!r} cannot be used: {error}") from error
    return made

"""A taskset of verifiers and its harness, which plays in this process with one tool: `add`."""

import json

import httpx
import verifiers.v1 as vf

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.0)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / len(trace.last_reply)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    more: int = 0


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for a, b in ((2, 3), (1, 8)):
            b += self.config.more
            yield Sum(Data(prompt=f"{a}+{b}?", answer=str(a + b)), self.config.task)


class Loop(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **rest):
        """Runs calls, asks once more after a turn without one; `fail` in a turn makes it do so."""
        messages, again = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": data.prompt}], False
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=60) as client:
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": [ADD]}
                answer = await client.post(endpoint + "/chat/completions", json=body)
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                content = message["content"] or ""
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    total = str(sum(json.loads(call["function"]["arguments"]).values()))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": total})
                if "fail" in content:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr="as asked")
                if not message.get("tool_calls") and again:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                if not message.get("tool_calls"):
                    again = True
                    messages.append({"role": "user", "content": "Sure?"})


__all__ = ["Loop", "Sums"]

"""Training on a taskset of verifiers with a harness of your own; needs the extra `verifiers`."""

import sys

import httpx
import verifiers.v1 as vf

import grpo_roc_jax as g


class Double(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        answer = trace.last_reply.removeprefix("<answer>").removesuffix("</answer>")  # the tags of the toy's template
        return float(answer == str(2 * int(self.data.prompt)))


class Doubles(vf.Taskset[Double, vf.TasksetConfig]):
    def load(self):
        return (Double(vf.TaskData(prompt=str(n)), self.config.task) for n in range(10, 100))


class OneTurn(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **rest):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=None) as http:
            answer = await http.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)


def main(words: list[str]) -> dict:
    settings = "--environment=verifiers --environment.taskset=vf_taskset --environment.harness=vf_taskset"
    rest = "--data.sources=verifiers:vf_taskset --data.eval_problems=0 --sft.steps=0 --reward.functions=environment"
    return g.train_policy(g.read_config("toy.yaml", *settings.split(), *rest.split(), *words))


__all__ = ["Doubles", "OneTurn"]
main(sys.argv[1:]) if __name__ == "__main__" else None

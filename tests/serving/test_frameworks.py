"""Agents of fourteen frameworks against the endpoint, where installed (`.ci/adapters frameworks`).

Each is a class, made with the base URL and the API key, with a coroutine function of a question that has a tool, as the
framework's own pages write it. It is given the modules that it names.
"""

import asyncio
import importlib.metadata
import json
import os
import re
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.serving.recorded_calls import conversations_of
from tests.helpers.serving import WEATHER, scripted

pytestmark = pytest.mark.slow
os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["CREWAI_TESTING"] = "true"
os.environ["OTEL_SDK_DISABLED"] = os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "false"
os.environ["AGNO_TELEMETRY"] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one when it is imported
CITIES = []


def weather(city: str) -> str:
    """Says the weather.

    Args:
        city: Name of a city.
    """
    CITIES.append(city)
    return f"rain in {city}"


FRAMEWORKS = {}


class Framework:
    turns = ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "It rains in Rome.")
    """What the policy says: a call, then an answer."""
    several = (turns[0] + turns[0].replace("Rome", "Oslo"), "Rain in both.")
    """The same with two calls in a turn; None where a framework makes one at a time."""
    rows = 1

    def __init_subclass__(cls, modules):
        cls.modules = modules
        FRAMEWORKS[re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()] = cls

    def __init__(self, url, key):
        self.url, self.key, self.client = url, key, {"base_url": url, "api_key": key, "max_retries": 0}


class Langchain(Framework, modules=("langchain.agents", "langchain_openai")):
    async def tools(self, question, langchain, openai):
        agent = langchain.create_agent(openai.ChatOpenAI(model="policy", **self.client), tools=[weather])
        return (await agent.ainvoke({"messages": [("user", question)]}))["messages"][-1].content


class Langgraph(Framework, modules=("langgraph.graph", "langgraph.prebuilt", "langchain_openai")):
    async def tools(self, question, langgraph, prebuilt, openai):
        model = openai.ChatOpenAI(model="policy", **self.client).bind_tools([weather])

        async def ask(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = langgraph.StateGraph(langgraph.MessagesState).add_node("ask", ask)
        graph.add_node("tools", prebuilt.ToolNode([weather])).add_edge(langgraph.START, "ask").add_edge("tools", "ask")
        graph.add_conditional_edges("ask", prebuilt.tools_condition)
        return (await graph.compile().ainvoke({"messages": [("user", question)]}))["messages"][-1].content


class PydanticAi(Framework, modules=("pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai")):
    async def tools(self, question, pydantic_ai, models, providers):
        provider = providers.OpenAIProvider(base_url=self.url, api_key=self.key)
        model = models.OpenAIChatModel("policy", provider=provider)
        return (await pydantic_ai.Agent(model, tools=[weather]).run(question)).output


class Litellm(Framework, modules=("litellm",)):
    async def tools(self, question, litellm):
        fields = {"api_base": self.url, "api_key": self.key, "max_retries": 0, "tools": [WEATHER]}
        messages = [{"role": "user", "content": question}]
        while True:
            message = (await litellm.acompletion("openai/policy", messages, **fields)).choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


class Instructor(Framework, modules=("instructor", "openai", "pydantic")):
    several = None  # its parallel tools are types, without results that go back
    turns = ('"city": "Rome"}}</tool_call>',)  # a tool must be called: its opening is context

    async def tools(self, question, instructor, openai, pydantic):
        class Weather(pydantic.BaseModel):
            city: str

        client = instructor.from_openai(openai.AsyncOpenAI(**self.client), mode=instructor.Mode.TOOLS)
        fields = {"messages": [{"role": "user", "content": question}], "response_model": Weather, "max_retries": 0}
        CITIES.append((await client.chat.completions.create(model="policy", **fields)).city)
        return "It rains in Rome."


class Autogen(Framework, modules=("autogen_agentchat.agents", "autogen_ext.models.openai")):
    async def tools(self, question, agents, models):
        can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
        info = can | {"family": "unknown"}
        client = models.OpenAIChatCompletionClient(model="policy", **self.client, model_info=info)
        agent = agents.AssistantAgent("forecaster", client, tools=[weather], max_tool_iterations=3)
        return (await agent.run(task=question)).messages[-1].content


class Agno(Framework, modules=("agno.agent", "agno.models.openai.like")):
    async def tools(self, question, agno, models):
        model = models.OpenAILike(id="policy", base_url=self.url, api_key=self.key)
        return (await agno.Agent(model=model, telemetry=False, tools=[weather]).arun(question)).content


class Dspy(Framework, modules=("dspy",)):
    several = None  # its agents write calls as text, one at a time

    async def tools(self, question, dspy):
        model = dspy.LM("openai/policy", api_base=self.url, api_key=self.key, cache=False, num_retries=0)
        with dspy.context(lm=model):
            return (await dspy.ReAct("question -> answer", tools=[weather]).acall(question=question)).answer

    step = "[[ ## next_thought ## ]]\nSo.\n\n[[ ## next_tool_name ## ]]\n{}\n\n[[ ## next_tool_args ## ]]\n{}"
    said = "[[ ## reasoning ## ]]\nSo.\n\n[[ ## answer ## ]]\nIt rains in Rome."
    steps = (step.format("weather", '{"city": "Rome"}'), step.format("finish", "{}"), said)
    turns = tuple(text + "\n\n[[ ## completed ## ]]" for text in steps)
    rows = 3  # each step is a prompt of its own


class LlamaIndex(Framework, modules=("llama_index.core.agent.workflow", "llama_index.llms.openai_like")):
    async def tools(self, question, workflow, models):
        kind = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
        model = models.OpenAILike(model="policy", api_base=self.url, api_key=self.key, **kind)
        return str(await workflow.FunctionAgent(tools=[weather], llm=model).run(question))


class Haystack(
    Framework, modules=("haystack.components.agents", "haystack.components.generators.chat", "haystack.tools")
):
    async def tools(self, question, agents, chat, tools):
        from haystack import dataclasses, utils

        key = utils.Secret.from_token(self.key)
        model = chat.OpenAIChatGenerator(key, model="policy", api_base_url=self.url, max_retries=0)
        agent = agents.Agent(chat_generator=model, tools=[tools.create_tool_from_function(weather)])
        return (await agent.run_async(messages=[dataclasses.ChatMessage.from_user(question)]))["messages"][-1].text


class Strands(Framework, modules=("strands", "strands.models.openai")):
    async def tools(self, question, strands, models):
        model = models.OpenAIModel(client_args=self.client, model_id="policy")
        agent = strands.Agent(model=model, callback_handler=None, tools=[strands.tool(weather)])
        return str(await agent.invoke_async(question)).strip()


class Crewai(Framework, modules=("crewai", "crewai.tools")):
    async def tools(self, question, crewai, tools):
        about = {"role": "forecaster", "goal": "say the weather", "backstory": "none"}
        model = crewai.LLM(model="openai/policy", base_url=self.url, api_key=self.key)
        agent = crewai.Agent(**about, llm=model, tools=[tools.tool("weather")(weather)])
        return (await agent.kickoff_async(question)).raw


class OpenaiAgents(Framework, modules=("agents", "openai")):
    async def tools(self, question, agents, openai):
        agents.set_tracing_disabled(True)
        model = agents.OpenAIChatCompletionsModel("policy", openai.AsyncOpenAI(**self.client))
        agent = agents.Agent(name="forecaster", model=model, tools=[agents.function_tool(weather)])
        return (await agents.Runner.run(agent, question)).final_output


class Smolagents(Framework, modules=("smolagents",)):
    async def tools(self, question, smolagents):
        model = smolagents.OpenAIServerModel("policy", self.url, self.key, client_kwargs={"max_retries": 0})
        found = [smolagents.tool(weather)]
        agent = smolagents.ToolCallingAgent(tools=found, model=model, max_steps=3, verbosity_level=0)
        return await asyncio.to_thread(agent.run, question)

    # it forces a call each time, whose opening up to the name is context
    call, end = 'weather", "arguments": {"city": "Rome"}}</tool_call>', 'final_answer", "arguments": {"answer": "%s"}}'
    turns = (call, end % "It rains in Rome." + "</tool_call>")
    several = (call + Framework.turns[0].replace("Rome", "Oslo"), end % "Rain in both." + "</tool_call>")


SEEN = Path(os.environ.get("FRAMEWORKS_TABLE", os.devnull))
"""File that gets a line of JSON for each thing that was seen."""


def answer_of(adapter, modules, turns, rows=1):
    """What it says with a tool; each call is as sampled, in so many rows."""
    CITIES.clear()
    with scripted(*turns, config=g.TextConfig(max_calls_per_turn=4), token="key") as server:
        session, client = server.session(), adapter(f"http://127.0.0.1:{server.port}/s/one/v1", "key")
        answer = asyncio.run(client.tools("What is the weather in Rome?", *modules))
        written = [server.endpoint.chat.turn_ids(turn) for turn in turns]
    assert [call.ids.tolist() for call in session.calls] == written[: len(session.calls)]
    found_rows = conversations_of(session.calls)
    assert len(found_rows) == rows and sum(row.mask.sum() for row in found_rows) == sum(map(len, written))
    return answer


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_tool_and_two_calls_in_a_turn(name):
    adapter, modules = FRAMEWORKS[name], []
    for module in adapter.modules:
        pytest.importorskip(module.partition(".")[0], reason=f"needs {name}", exc_type=ImportError)
        modules.append(importlib.import_module(module))
    assert answer_of(adapter, modules, adapter.turns, adapter.rows) == "It rains in Rome." and CITIES == ["Rome"]
    if adapter.several is not None:  # some make one call at a time
        assert answer_of(adapter, modules, adapter.several) == "Rain in both." and sorted(CITIES) == ["Oslo", "Rome"]
    # Several distributions may lie below one package: its own has the shortest name.
    distributions = importlib.metadata.packages_distributions()[adapter.modules[0].partition(".")[0]]
    distribution = min(distributions, key=len)
    seen = {"tools": "yes", "parallel": "yes" if adapter.several else "-"}
    seen["version"] = f"{distribution} {importlib.metadata.version(distribution)}"
    with SEEN.open("a") as file:
        file.writelines(json.dumps({"framework": name, "what": what, "seen": seen[what]}) + "\n" for what in seen)

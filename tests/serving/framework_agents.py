"""Agents of frameworks as their own pages write them: a chat, a stream, a tool, two calls at once, an answer of a type.

Each is a class, made with the base URL and the API key, with coroutine functions of a question; what one lacks, the
framework has not. Its name in `FRAMEWORKS` is a function for `environment agent` too (`framework_agents.py:langchain`),
which asks once and is paid for digits. Packages are imported by what uses them, so the file can be imported without.
"""

import asyncio
import json
import os
import re

from tests.helpers.serving import WEATHER

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["CREWAI_TESTING"] = "true"
os.environ["OTEL_SDK_DISABLED"] = os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "false"
os.environ["AGNO_TELEMETRY"] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one when it is imported
CITIES = []
"""Arguments of the calls that were run."""
TYPED = '{"city": "Rome", "rain": true}'


def weather(city: str) -> str:
    """Says the weather.

    Args:
        city: Name of a city.
    """
    CITIES.append(city)
    return f"rain in {city}"


def messages_of(question, parts=False):
    """The messages of a question."""
    return [{"role": "user", "content": [{"type": "text", "text": question}] if parts else question}]


def report_class():
    """A type for structured answers."""
    from pydantic import BaseModel

    class Report(BaseModel):
        city: str
        rain: bool

    return Report


FRAMEWORKS = {}
"""By their names."""


class Framework:
    turns = ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "It rains in Rome.")
    """What the policy says for `tools`: a call, then an answer."""
    several = (turns[0] + turns[0].replace("Rome", "Oslo"), "Rain in both.")
    """The same with two calls in a turn; None where a framework makes one at a time."""
    rows = 1

    def __init_subclass__(cls, packages):
        cls.packages = packages
        FRAMEWORKS[re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()] = cls

    def __init__(self, url, key):
        self.url, self.key, self.client = url, key, {"base_url": url, "api_key": key, "max_retries": 0}


class Langchain(Framework, packages=("langchain", "langchain_openai")):
    def model(self):
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model="policy", **self.client)

    async def chat(self, question):
        return (await self.model().ainvoke(question)).content

    async def stream(self, question):
        return "".join([piece.content async for piece in self.model().astream(question)])

    async def tools(self, question):
        from langchain.agents import create_agent

        agent = create_agent(self.model(), tools=[weather])
        return (await agent.ainvoke({"messages": [("user", question)]}))["messages"][-1].content

    async def structured(self, question):
        return (await self.model().with_structured_output(report_class()).ainvoke(question)).city


class Langgraph(Langchain, packages=("langgraph", "langchain_openai")):
    def graph(self):
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        model = self.model().bind_tools([weather])

        async def ask(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("tools", ToolNode([weather]))
        graph.add_edge(START, "ask")
        graph.add_conditional_edges("ask", tools_condition)
        graph.add_edge("tools", "ask")
        return graph.compile()

    async def stream(self, question):
        inputs = {"messages": [("user", question)]}
        return "".join([m.content async for m, _ in self.graph().astream(inputs, stream_mode="messages")])

    async def tools(self, question):
        return (await self.graph().ainvoke({"messages": [("user", question)]}))["messages"][-1].content


class PydanticAi(Framework, packages=("pydantic_ai",)):
    def agent(self, **fields):
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=self.url, api_key=self.key)), **fields)

    async def chat(self, question):
        return (await self.agent().run(question)).output

    async def stream(self, question):
        async with self.agent().run_stream(question) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    async def tools(self, question):
        return (await self.agent(tools=[weather]).run(question)).output

    async def structured(self, question):
        from pydantic_ai import NativeOutput

        return (await self.agent(output_type=NativeOutput(report_class())).run(question)).output.city


class Litellm(Framework, packages=("litellm",)):
    async def ask(self, messages, **fields):
        import litellm

        return await litellm.acompletion(
            "openai/policy", messages, api_base=self.url, api_key=self.key, max_retries=0, **fields
        )

    async def chat(self, question):
        return (await self.ask(messages_of(question))).choices[0].message.content

    async def stream(self, question):
        pieces = await self.ask(messages_of(question), stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    async def tools(self, question):
        messages = messages_of(question)
        while True:
            message = (await self.ask(messages, tools=[WEATHER])).choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                result = weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def structured(self, question):
        answer = await self.ask(messages_of(question), response_format=report_class())
        return json.loads(answer.choices[0].message.content)["city"]


class Instructor(Framework, packages=("instructor",)):
    several = None  # its parallel tools are types, without results that go back

    turns = ('"city": "Rome"}}</tool_call>',)  # a tool must be called: its opening is context

    async def answer(self, question, kind, mode="TOOLS"):
        import instructor
        from openai import AsyncOpenAI

        client = AsyncOpenAI(**self.client)
        create = instructor.from_openai(client, mode=getattr(instructor.Mode, mode)).chat.completions.create
        return await create(model="policy", messages=messages_of(question), response_model=kind, max_retries=0)

    async def chat(self, question):
        return (await self.answer(question, None)).choices[0].message.content

    async def tools(self, question):
        from pydantic import BaseModel

        class Weather(BaseModel):
            city: str

        CITIES.append((await self.answer(question, Weather)).city)
        return "It rains in Rome."

    async def structured(self, question):
        return (await self.answer(question, report_class(), "JSON_SCHEMA")).city


class Autogen(Framework, packages=("autogen_agentchat", "autogen_ext")):
    def agent(self, **fields):
        from autogen_agentchat.agents import AssistantAgent
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
        client = OpenAIChatCompletionClient(model="policy", **self.client, model_info=can | {"family": "unknown"})
        return AssistantAgent("forecaster", client, **fields)

    async def chat(self, question):
        return (await self.agent().run(task=question)).messages[-1].content

    async def stream(self, question):
        from autogen_agentchat.messages import ModelClientStreamingChunkEvent

        events = self.agent(model_client_stream=True).run_stream(task=question)
        return "".join([e.content async for e in events if isinstance(e, ModelClientStreamingChunkEvent)])

    async def tools(self, question):
        agent = self.agent(tools=[weather], max_tool_iterations=3)
        return (await agent.run(task=question)).messages[-1].content

    async def structured(self, question):
        agent = self.agent(output_content_type=report_class())
        return (await agent.run(task=question)).messages[-1].content.city


class Agno(Framework, packages=("agno",)):
    def agent(self, **fields):
        from agno.agent import Agent
        from agno.models.openai.like import OpenAILike

        return Agent(model=OpenAILike(id="policy", base_url=self.url, api_key=self.key), telemetry=False, **fields)

    async def chat(self, question):
        return (await self.agent().arun(question)).content

    async def stream(self, question):
        events = self.agent().arun(question, stream=True)
        return "".join([event.content async for event in events if event.event == "RunContent"])

    async def tools(self, question):
        return (await self.agent(tools=[weather]).arun(question)).content

    async def structured(self, question):
        content = (await self.agent(output_schema=report_class()).arun(question)).content
        if isinstance(content, str):  # it gives an error as content
            raise ValueError(content)
        return content.city


class Dspy(Framework, packages=("dspy",)):
    several = None  # its agents write calls as text, one at a time

    def model(self):
        import dspy

        return dspy.LM("openai/policy", api_base=self.url, api_key=self.key, cache=False, num_retries=0)

    async def chat(self, question):
        return (await self.model().acall(question))[0]

    async def tools(self, question):
        import dspy

        with dspy.context(lm=self.model()):
            return (await dspy.ReAct("question -> answer", tools=[weather]).acall(question=question)).answer

    turns = (
        '[[ ## next_thought ## ]]\nAsk.\n\n[[ ## next_tool_name ## ]]\nweather\n\n[[ ## next_tool_args ## ]]\n{"city": '
        '"Rome"}\n\n[[ ## completed ## ]]',
        "[[ ## next_thought ## ]]\nDone.\n\n[[ ## next_tool_name ## ]]\nfinish\n\n[[ ## next_tool_args ## ]]\n{}\n\n"
        "[[ ## completed ## ]]",
        "[[ ## reasoning ## ]]\nSo.\n\n[[ ## answer ## ]]\nIt rains in Rome.\n\n[[ ## completed ## ]]",
    )
    rows = 3
    """Each step is a prompt of its own."""

    async def structured(self, question):
        import dspy

        with dspy.context(lm=self.model(), adapter=dspy.JSONAdapter()):
            return (await dspy.Predict("question -> city: str, rain: bool").acall(question=question)).city


class LlamaIndex(Framework, packages=("llama_index.core", "llama_index.llms.openai_like")):
    def model(self):
        from llama_index.llms.openai_like import OpenAILike

        kind = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
        return OpenAILike(model="policy", api_base=self.url, api_key=self.key, max_retries=0, **kind)

    async def chat(self, question):
        return (await self.model().acomplete(question)).text

    async def stream(self, question):
        return "".join([piece.delta async for piece in await self.model().astream_complete(question)])

    async def tools(self, question):
        from llama_index.core.agent.workflow import FunctionAgent

        return str(await FunctionAgent(tools=[weather], llm=self.model()).run(question))

    async def structured(self, question):
        return (await self.model().as_structured_llm(report_class()).acomplete(question)).raw.city


class Haystack(Framework, packages=("haystack",)):
    def generator(self, **fields):
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        return OpenAIChatGenerator(
            Secret.from_token(self.key), model="policy", api_base_url=self.url, max_retries=0, **fields
        )

    def said(self, question):
        from haystack.dataclasses import ChatMessage

        return [ChatMessage.from_user(question)]

    async def chat(self, question):
        return (await self.generator().run_async(self.said(question)))["replies"][0].text

    async def stream(self, question):
        pieces = []

        async def take(piece):
            pieces.append(piece.content)

        await self.generator(streaming_callback=take).run_async(self.said(question))
        return "".join(pieces)

    async def tools(self, question):
        from haystack.components.agents import Agent
        from haystack.tools import create_tool_from_function

        agent = Agent(chat_generator=self.generator(), tools=[create_tool_from_function(weather)])
        return (await agent.run_async(messages=self.said(question)))["messages"][-1].text

    async def structured(self, question):
        generator = self.generator(generation_kwargs={"response_format": report_class()})
        return json.loads((await generator.run_async(self.said(question)))["replies"][0].text)["city"]


class Strands(Framework, packages=("strands",)):
    def agent(self, **fields):
        from strands import Agent
        from strands.models.openai import OpenAIModel

        model = OpenAIModel(client_args=self.client, model_id="policy")
        return Agent(model=model, callback_handler=None, **fields)

    async def chat(self, question):
        return str(await self.agent().invoke_async(question)).strip()

    async def stream(self, question):
        return "".join([event.get("data", "") async for event in self.agent().stream_async(question)])

    async def tools(self, question):
        from strands import tool

        return str(await self.agent(tools=[tool(weather)]).invoke_async(question)).strip()

    async def structured(self, question):
        return (await self.agent().structured_output_async(report_class(), question)).city


class Crewai(Framework, packages=("crewai",)):
    def model(self, **fields):
        from crewai import LLM

        return LLM(model="openai/policy", base_url=self.url, api_key=self.key, **fields)

    async def chat(self, question):
        return await self.model().acall(question)

    async def stream(self, question):
        return await self.model(stream=True).acall(question)

    async def tools(self, question):
        from crewai import Agent
        from crewai.tools import tool

        about = {"role": "forecaster", "goal": "say the weather", "backstory": "none"}
        agent = Agent(**about, llm=self.model(), tools=[tool("weather")(weather)])
        return (await agent.kickoff_async(question)).raw

    async def structured(self, question):
        answer = await self.model(response_format=report_class()).acall(question)
        return getattr(answer, "city", None) or json.loads(answer)["city"]


class OpenaiAgents(Framework, packages=("agents",)):
    def agent(self, **fields):
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)
        client = AsyncOpenAI(**self.client)
        return agents.Agent(name="forecaster", model=agents.OpenAIChatCompletionsModel("policy", client), **fields)

    async def run(self, question, **fields):
        from agents import Runner

        return (await Runner.run(self.agent(**fields), question)).final_output

    async def chat(self, question):
        return await self.run(question)

    async def stream(self, question):
        from agents import Runner

        answer = Runner.run_streamed(self.agent(), question)
        events = [e.data async for e in answer.stream_events() if e.type == "raw_response_event"]
        return "".join([event.delta for event in events if event.type == "response.output_text.delta"])

    async def tools(self, question):
        from agents import function_tool

        return await self.run(question, tools=[function_tool(weather)])

    async def structured(self, question):
        return (await self.run(question, output_type=report_class())).city


class Smolagents(Framework, packages=("smolagents",)):
    def model(self):
        from smolagents import OpenAIServerModel

        return OpenAIServerModel("policy", self.url, self.key, client_kwargs={"max_retries": 0})

    async def chat(self, question):
        return (await asyncio.to_thread(self.model(), messages_of(question, parts=True))).content

    async def stream(self, question):
        pieces = await asyncio.to_thread(lambda: list(self.model().generate_stream(messages_of(question, parts=True))))
        return "".join(piece.content or "" for piece in pieces)

    async def tools(self, question):
        from smolagents import ToolCallingAgent, tool

        agent = ToolCallingAgent(tools=[tool(weather)], model=self.model(), max_steps=3, verbosity_level=0)
        return await asyncio.to_thread(agent.run, question)

    # it forces a call each time, whose opening up to the name is context
    turns = (
        'weather", "arguments": {"city": "Rome"}}</tool_call>',
        'final_answer", "arguments": {"answer": "It rains in Rome."}}</tool_call>',
    )
    several = (
        turns[0] + Framework.turns[0].replace("Rome", "Oslo"),
        'final_answer", "arguments": {"answer": "Rain in both."}}</tool_call>',
    )


def _trained(framework):
    async def rollout(row, base_url, api_key):
        answer = str(await framework(base_url, api_key).chat(row["prompt"]))
        return sum(letter.isdigit() for letter in answer) / (1 + len(answer))

    return rollout


globals().update({name.replace("-", "_"): _trained(framework) for name, framework in FRAMEWORKS.items()})

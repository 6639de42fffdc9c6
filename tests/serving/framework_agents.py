"""Agents of frameworks as their own pages write them: a chat, a stream, a tool, two calls at once, an answer of a type.

Each is a class with coroutine functions of (base URL, API key, question); what one lacks, the framework has not. Its
name in `FRAMEWORKS` is a function for `environment agent` too (`framework_agents.py:langchain`), which asks once and is
paid for digits. Packages are imported by what uses them, so the file can be imported without any.
"""

import json
import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["CREWAI_TESTING"] = "true"
os.environ["OTEL_SDK_DISABLED"] = os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "false"
os.environ["AGNO_TELEMETRY"] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one when it is imported
CITIES = []
"""Arguments of the calls that were run."""
TURNS = ['<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "It rains in Rome."]
"""What the policy says: a call, then an answer."""
SEVERAL = [
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
    "Rain in both.",
]
TYPED = '{"city": "Rome", "rain": true}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def weather(city: str) -> str:
    """Says the weather.

    Args:
        city: Name of a city.
    """
    CITIES.append(city)
    return f"rain in {city}"


def report_class():
    """A type for structured answers."""
    from pydantic import BaseModel

    class Report(BaseModel):
        city: str
        rain: bool

    return Report


class Langchain:
    packages = ("langchain", "langchain_openai")

    @staticmethod
    def model(url, key):
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model="policy", base_url=url, api_key=key, max_retries=0)

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.model(url, key).ainvoke(question)).content

    @classmethod
    async def stream(cls, url, key, question):
        return "".join([piece.content async for piece in cls.model(url, key).astream(question)])

    @classmethod
    async def tools(cls, url, key, question):
        from langchain.agents import create_agent

        agent = create_agent(cls.model(url, key), tools=[weather])
        return (await agent.ainvoke({"messages": [("user", question)]}))["messages"][-1].content

    @classmethod
    async def structured(cls, url, key, question):
        return (await cls.model(url, key).with_structured_output(report_class()).ainvoke(question)).city


class Langgraph(Langchain):
    packages = ("langgraph", "langchain_openai")

    @classmethod
    def graph(cls, url, key):
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        model = cls.model(url, key).bind_tools([weather])

        async def ask(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("tools", ToolNode([weather]))
        graph.add_edge(START, "ask")
        graph.add_conditional_edges("ask", tools_condition)
        graph.add_edge("tools", "ask")
        return graph.compile()

    @classmethod
    async def stream(cls, url, key, question):
        asked = {"messages": [("user", question)]}
        return "".join([m.content async for m, _ in cls.graph(url, key).astream(asked, stream_mode="messages")])

    @classmethod
    async def tools(cls, url, key, question):
        return (await cls.graph(url, key).ainvoke({"messages": [("user", question)]}))["messages"][-1].content


class PydanticAi:
    packages = ("pydantic_ai",)

    @staticmethod
    def agent(url, key, **fields):
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key)), **fields)

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.agent(url, key).run(question)).output

    @classmethod
    async def stream(cls, url, key, question):
        async with cls.agent(url, key).run_stream(question) as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    @classmethod
    async def tools(cls, url, key, question):
        return (await cls.agent(url, key, tools=[weather]).run(question)).output

    @classmethod
    async def structured(cls, url, key, question):
        from pydantic_ai import NativeOutput

        return (await cls.agent(url, key, output_type=NativeOutput(report_class())).run(question)).output.city


class Litellm:
    packages = ("litellm",)

    @staticmethod
    async def ask(url, key, messages, **fields):
        import litellm

        return await litellm.acompletion("openai/policy", messages, api_base=url, api_key=key, max_retries=0, **fields)

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.ask(url, key, [{"role": "user", "content": question}])).choices[0].message.content

    @classmethod
    async def stream(cls, url, key, question):
        pieces = await cls.ask(url, key, [{"role": "user", "content": question}], stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    @classmethod
    async def tools(cls, url, key, question):
        messages = [{"role": "user", "content": question}]
        while True:
            said = (await cls.ask(url, key, messages, tools=[WEATHER])).choices[0].message
            if not said.tool_calls:
                return said.content
            messages.append(said)
            for one in said.tool_calls:
                result = weather(**json.loads(one.function.arguments))
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})

    @classmethod
    async def structured(cls, url, key, question):
        asked = [{"role": "user", "content": question}]
        answer = await cls.ask(url, key, asked, response_format=report_class())
        return json.loads(answer.choices[0].message.content)["city"]


class Instructor:
    packages = ("instructor",)
    several = None  # its parallel tools are types, without results that go back

    @staticmethod
    def client(url, key, mode="TOOLS"):
        import instructor
        from openai import AsyncOpenAI

        return instructor.from_openai(
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0), mode=getattr(instructor.Mode, mode)
        )

    @classmethod
    async def chat(cls, url, key, question):
        asked = [{"role": "user", "content": question}]
        answer = await cls.client(url, key).chat.completions.create(
            model="policy", messages=asked, response_model=None, max_retries=0
        )
        return answer.choices[0].message.content

    @classmethod
    async def tools(cls, url, key, question):
        """A tool that must be called: its opening is context, the policy writes the arguments."""
        from pydantic import BaseModel

        class Weather(BaseModel):
            city: str

        asked = [{"role": "user", "content": question}]
        answer = await cls.client(url, key).chat.completions.create(
            model="policy", messages=asked, response_model=Weather, max_retries=0
        )
        CITIES.append(answer.city)
        return "It rains in Rome."

    turns = ('"city": "Rome"}}</tool_call>',)

    @classmethod
    async def structured(cls, url, key, question):
        asked = [{"role": "user", "content": question}]
        answer = await cls.client(url, key, "JSON_SCHEMA").chat.completions.create(
            model="policy", messages=asked, response_model=report_class(), max_retries=0
        )
        return answer.city


class Autogen:
    packages = ("autogen_agentchat", "autogen_ext")

    @staticmethod
    def agent(url, key, **fields):
        from autogen_agentchat.agents import AssistantAgent
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
        client = OpenAIChatCompletionClient(
            model="policy", base_url=url, api_key=key, max_retries=0, model_info=can | {"family": "unknown"}
        )
        return AssistantAgent("forecaster", client, **fields)

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.agent(url, key).run(task=question)).messages[-1].content

    @classmethod
    async def stream(cls, url, key, question):
        from autogen_agentchat.messages import ModelClientStreamingChunkEvent

        events = cls.agent(url, key, model_client_stream=True).run_stream(task=question)
        return "".join([e.content async for e in events if isinstance(e, ModelClientStreamingChunkEvent)])

    @classmethod
    async def tools(cls, url, key, question):
        agent = cls.agent(url, key, tools=[weather], max_tool_iterations=3)
        return (await agent.run(task=question)).messages[-1].content

    @classmethod
    async def structured(cls, url, key, question):
        agent = cls.agent(url, key, output_content_type=report_class())
        return (await agent.run(task=question)).messages[-1].content.city


class Agno:
    packages = ("agno",)

    @staticmethod
    def agent(url, key, **fields):
        from agno.agent import Agent
        from agno.models.openai.like import OpenAILike

        return Agent(model=OpenAILike(id="policy", base_url=url, api_key=key), telemetry=False, **fields)

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.agent(url, key).arun(question)).content

    @classmethod
    async def stream(cls, url, key, question):
        events = cls.agent(url, key).arun(question, stream=True)
        return "".join([event.content async for event in events if event.event == "RunContent"])

    @classmethod
    async def tools(cls, url, key, question):
        return (await cls.agent(url, key, tools=[weather]).arun(question)).content

    @classmethod
    async def structured(cls, url, key, question):
        content = (await cls.agent(url, key, output_schema=report_class()).arun(question)).content
        if isinstance(content, str):  # it gives an error as content
            raise ValueError(content)
        return content.city


class Dspy:
    packages = ("dspy",)
    several = None  # its agents write calls as text, one at a time

    @staticmethod
    def model(url, key):
        import dspy

        return dspy.LM("openai/policy", api_base=url, api_key=key, cache=False, num_retries=0)

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.model(url, key).acall(question))[0]

    @classmethod
    async def tools(cls, url, key, question):
        import dspy

        with dspy.context(lm=cls.model(url, key)):
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

    @classmethod
    async def structured(cls, url, key, question):
        import dspy

        with dspy.context(lm=cls.model(url, key), adapter=dspy.JSONAdapter()):
            return (await dspy.Predict("question -> city: str, rain: bool").acall(question=question)).city


class LlamaIndex:
    packages = ("llama_index.core", "llama_index.llms.openai_like")

    @staticmethod
    def model(url, key):
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model="policy",
            api_base=url,
            api_key=key,
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
            should_use_structured_outputs=True,
        )

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.model(url, key).acomplete(question)).text

    @classmethod
    async def stream(cls, url, key, question):
        return "".join([piece.delta async for piece in await cls.model(url, key).astream_complete(question)])

    @classmethod
    async def tools(cls, url, key, question):
        from llama_index.core.agent.workflow import FunctionAgent

        return str(await FunctionAgent(tools=[weather], llm=cls.model(url, key)).run(question))

    @classmethod
    async def structured(cls, url, key, question):
        return (await cls.model(url, key).as_structured_llm(report_class()).acomplete(question)).raw.city


class Haystack:
    packages = ("haystack",)

    @staticmethod
    def generator(url, key, **fields):
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        return OpenAIChatGenerator(Secret.from_token(key), model="policy", api_base_url=url, max_retries=0, **fields)

    @staticmethod
    def said(question):
        from haystack.dataclasses import ChatMessage

        return [ChatMessage.from_user(question)]

    @classmethod
    async def chat(cls, url, key, question):
        return (await cls.generator(url, key).run_async(cls.said(question)))["replies"][0].text

    @classmethod
    async def stream(cls, url, key, question):
        pieces = []

        async def take(piece):
            pieces.append(piece.content)

        await cls.generator(url, key, streaming_callback=take).run_async(cls.said(question))
        return "".join(pieces)

    @classmethod
    async def tools(cls, url, key, question):
        from haystack.components.agents import Agent
        from haystack.tools import create_tool_from_function

        agent = Agent(chat_generator=cls.generator(url, key), tools=[create_tool_from_function(weather)])
        return (await agent.run_async(messages=cls.said(question)))["messages"][-1].text

    @classmethod
    async def structured(cls, url, key, question):
        generator = cls.generator(url, key, generation_kwargs={"response_format": report_class()})
        return json.loads((await generator.run_async(cls.said(question)))["replies"][0].text)["city"]


class Strands:
    packages = ("strands",)

    @staticmethod
    def agent(url, key, **fields):
        from strands import Agent
        from strands.models.openai import OpenAIModel

        client = {"base_url": url, "api_key": key, "max_retries": 0}
        model = OpenAIModel(client_args=client, model_id="policy")
        return Agent(model=model, callback_handler=None, **fields)

    @classmethod
    async def chat(cls, url, key, question):
        return str(await cls.agent(url, key).invoke_async(question)).strip()

    @classmethod
    async def stream(cls, url, key, question):
        return "".join([event.get("data", "") async for event in cls.agent(url, key).stream_async(question)])

    @classmethod
    async def tools(cls, url, key, question):
        from strands import tool

        return str(await cls.agent(url, key, tools=[tool(weather)]).invoke_async(question)).strip()

    @classmethod
    async def structured(cls, url, key, question):
        return (await cls.agent(url, key).structured_output_async(report_class(), question)).city


class Crewai:
    packages = ("crewai",)

    @staticmethod
    def model(url, key, **fields):
        from crewai import LLM

        return LLM(model="openai/policy", base_url=url, api_key=key, **fields)

    @classmethod
    async def chat(cls, url, key, question):
        return await cls.model(url, key).acall(question)

    @classmethod
    async def stream(cls, url, key, question):
        return await cls.model(url, key, stream=True).acall(question)

    @classmethod
    async def tools(cls, url, key, question):
        from crewai import Agent
        from crewai.tools import tool

        about = {"role": "forecaster", "goal": "say the weather", "backstory": "none"}
        agent = Agent(**about, llm=cls.model(url, key), tools=[tool("weather")(weather)])
        return (await agent.kickoff_async(question)).raw

    @classmethod
    async def structured(cls, url, key, question):
        answer = await cls.model(url, key, response_format=report_class()).acall(question)
        return getattr(answer, "city", None) or json.loads(answer)["city"]


class OpenaiAgents:
    packages = ("agents",)

    @staticmethod
    def agent(url, key, **fields):
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        return agents.Agent(name="forecaster", model=agents.OpenAIChatCompletionsModel("policy", client), **fields)

    @classmethod
    async def chat(cls, url, key, question):
        from agents import Runner

        return (await Runner.run(cls.agent(url, key), question)).final_output

    @classmethod
    async def stream(cls, url, key, question):
        from agents import Runner

        answer = Runner.run_streamed(cls.agent(url, key), question)
        events = [e.data async for e in answer.stream_events() if e.type == "raw_response_event"]
        return "".join([event.delta for event in events if event.type == "response.output_text.delta"])

    @classmethod
    async def tools(cls, url, key, question):
        from agents import Runner, function_tool

        return (await Runner.run(cls.agent(url, key, tools=[function_tool(weather)]), question)).final_output

    @classmethod
    async def structured(cls, url, key, question):
        from agents import Runner

        return (await Runner.run(cls.agent(url, key, output_type=report_class()), question)).final_output.city


class Smolagents:
    packages = ("smolagents",)

    @staticmethod
    def model(url, key):
        from smolagents import OpenAIServerModel

        return OpenAIServerModel("policy", url, key, client_kwargs={"max_retries": 0})

    @classmethod
    async def chat(cls, url, key, question):
        import asyncio

        asked = [{"role": "user", "content": [{"type": "text", "text": question}]}]
        return (await asyncio.to_thread(cls.model(url, key), asked)).content

    @classmethod
    async def stream(cls, url, key, question):
        import asyncio

        asked = [{"role": "user", "content": [{"type": "text", "text": question}]}]
        pieces = await asyncio.to_thread(lambda: list(cls.model(url, key).generate_stream(asked)))
        return "".join(piece.content or "" for piece in pieces)

    @classmethod
    async def tools(cls, url, key, question):
        import asyncio

        from smolagents import ToolCallingAgent, tool

        agent = ToolCallingAgent(tools=[tool(weather)], model=cls.model(url, key), max_steps=3, verbosity_level=0)
        return await asyncio.to_thread(agent.run, question)

    # it forces a call each time, whose opening up to the name is context
    turns = (
        'weather", "arguments": {"city": "Rome"}}</tool_call>',
        'final_answer", "arguments": {"answer": "It rains in Rome."}}</tool_call>',
    )
    several = (
        'weather", "arguments": {"city": "Rome"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
        'final_answer", "arguments": {"answer": "Rain in both."}}</tool_call>',
    )


FRAMEWORKS = {
    "langchain": Langchain,
    "langgraph": Langgraph,
    "pydantic-ai": PydanticAi,
    "litellm": Litellm,
    "instructor": Instructor,
    "autogen": Autogen,
    "agno": Agno,
    "dspy": Dspy,
    "llama-index": LlamaIndex,
    "haystack": Haystack,
    "strands": Strands,
    "crewai": Crewai,
    "openai-agents": OpenaiAgents,
    "smolagents": Smolagents,
}


def _trained(framework):
    async def rollout(row, base_url, api_key):
        said = str(await framework.chat(base_url, api_key, row["prompt"]))
        return sum(letter.isdigit() for letter in said) / (1 + len(said))

    return rollout


globals().update({name.replace("-", "_"): _trained(framework) for name, framework in FRAMEWORKS.items()})

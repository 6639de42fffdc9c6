"""The sampler alone: problems in, trajectories with tool calls out. It knows no method, no reward and no run.

    with Sampler(model, params, tokenizer, tools) as sampler:
        rollouts, stats = sampler.roll_out([RolloutRequest(problem, place=0, count=8)])
        sampler.publish(new_params, version=1)            # after an update

Below it is the engine, which decodes rows of token ids, and beside that the executor, which runs the calls. What
answers a turn instead of tools, an environment of the user's or an agent's program, is made by the caller.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from jax.sharding import Mesh

from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.collect import EpisodeSource, collect_episodes, with_tools
from grpo_roc_jax.rollout.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.rollout.engine import Engine, make_engine
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RolloutStats, RunOptions
from grpo_roc_jax.text.chat_format import ChatFormat, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import ToolExecutor
from grpo_roc_jax.tools.registry import Registry, default_registry
from grpo_roc_jax.types import RolloutRequest, Trajectory


class Sampler:
    """A policy that is rolled out with tools: engine, chat format and executor, and the weights that it samples with.

    The executor's processes end with `close`, or with the block of `with`.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        tokenizer: Tokenizer,
        tools: Registry | None = None,
        *,
        rollout: RolloutConfig | None = None,
        sampling: SamplingConfig | None = None,
        text: TextConfig | None = None,
        limits: ToolsConfig | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
    ):
        """
        Args:
            model: The shape of the policy, with `vocab_size` set to at least that of the tokenizer.
            params: Its weights: those of a learner, of `load_params`, or of `init_params`.
            tokenizer: What `load_tokenizer` returned.
            tools: The functions that the policy may call; by default those that `limits` enables, the Python tool
                among them.
            rollout: Rows at a time, and the most tokens of a prompt, of a response and of turns.
            sampling: Temperature and the like.
            text: The chat template, the system text, and how observations are cut.
            limits: The limits of the executor: processes, seconds, memory, isolation.
            mesh: The devices that slots and heads are divided over; by default the first one.
            seed: Random keys of tokens derive from it, from the step, the problem's place and the sample.

        Raises:
            ValueError: Parts that do not fit each other, such as a vocabulary that is too small.
            IsolationUnavailable: The machine cannot isolate programs as `limits` asks.
        """
        rollout, limits = rollout or RolloutConfig(), limits or ToolsConfig()
        tools = default_registry(limits.enabled) if tools is None else tools
        chat = make_chat(text or TextConfig(), tokenizer, tools.schemas)
        engine = make_engine(
            model,
            rollout,
            sampling or SamplingConfig(),
            sorted(chat.stop_ids),
            mesh,
            seed=seed,
            vocab_size=tokenizer.vocab_size,
        )
        self._hold(engine, chat, make_executor(limits, tools))
        self.publish(params, 0)
        self.executor.start()

    @classmethod
    def of(
        cls,
        engine: Engine,
        chat: ChatFormat,
        executor: ToolExecutor | None,
        episodes: Episodes | None = None,
        agents: Any = None,
    ) -> "Sampler":
        """A sampler of parts that the caller has made, with no weights yet.

        Args:
            engine: What `make_engine` returned.
            chat: A chat format with the engine's stop ids.
            executor: A started executor, or None where nothing calls tools.
            episodes: Environments of the user's, which answer the policy; None where tools alone do.
            agents: `serving.agent_runs.AgentRuns`, whose programs ask the policy; None without. With environments too,
                each problem says which of the two it has.
        """
        sampler = cls.__new__(cls)
        sampler._hold(engine, chat, executor, episodes, agents)
        return sampler

    def _hold(
        self,
        engine: Engine,
        chat: ChatFormat,
        executor: ToolExecutor | None,
        episodes: Episodes | None = None,
        agents: Any = None,
    ) -> None:
        self.engine, self.chat, self.executor = engine, chat, executor
        self.episodes, self.agents = episodes, agents
        self.weights: SamplerParams | None = None
        """What `publish` was last called with, in the layout of the engine."""

    def publish(self, params: Params, version: int) -> SamplerParams:
        """Samples with these parameters from now on; rollouts in flight go on with them.

        Args:
            params: The parameters of the policy, in the layout of the trainer.
            version: Recorded with every token that they draw: the number of updates behind them.

        Raises:
            NonFiniteWeightsError: A weight is NaN or infinite.
        """
        self.weights = None  # a second copy would take memory
        self.weights = self.engine.publish(params, version)
        return self.weights

    def roll_out(
        self,
        requests: Sequence[RolloutRequest],
        options: RunOptions | None = None,
        weights: SamplerParams | None = None,
    ) -> tuple[list[Sequence[Trajectory]], RolloutStats]:
        """(trajectories of each request, statistics of the engine).

        Args:
            requests: At least one; requests of one call differ in `place` or in their samples.
            options: Step, purpose and display; those of training step 0 by default.
            weights: What `engine.publish` returned; those of the last `publish` by default.

        Raises:
            ValueError: Nothing was published, or a prompt is too long.
        """
        weights, options = self.weights if weights is None else weights, options or RunOptions()
        by_agent = [self.agents is not None and self.agents.plays(request.problem) for request in requests]
        rows: list[Sequence[Trajectory]] = [()] * len(requests)
        stats: RolloutStats | None = None
        for agents in (True, False):
            indices = [i for i, agent in enumerate(by_agent) if agent == agents]
            if not indices:
                continue
            part = [requests[i] for i in indices]
            if agents:
                trajectories, counted = self.agents.collect(weights, part, options)
            elif self.episodes is not None:
                source = EpisodeSource(self.executor, self.episodes)
                trajectories, counted = collect_episodes(self.engine, weights, self.chat, source, part, options)
            else:
                trajectories, counted = self.engine.run(weights, *self.submission(part, options))
            for i, of_request in zip(indices, split(trajectories, [request.count for request in part]), strict=True):
                rows[i] = of_request
            stats = counted if stats is None else stats.followed_by(counted)
        assert stats is not None
        return rows, stats

    def submission(self, requests: Sequence[RolloutRequest], options: RunOptions) -> tuple:
        """The arguments of `Engine.submit` after the weights: the requests with their prompts as token ids, the tools
        that answer them, and the options."""
        return with_tools(self.engine, self.chat, self.executor, requests, options)

    def close(self) -> None:
        """Ends environments and programs of agents, then the executor's processes."""
        for part in (self.agents, self.episodes, self.executor):
            if part is not None:
                part.close()

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split(rows: Sequence[Trajectory], sizes: Iterable[int]) -> list[Sequence[Trajectory]]:
    """The rows in consecutive parts of these sizes."""
    return [rows[low:high] for low, high in pairwise(accumulate(sizes, initial=0))]

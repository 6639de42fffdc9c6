"""Serves a policy over HTTP: `grpo-roc serve RUN_OR_MODEL`.

The server offers OpenAI's chat completions and completions, and token ids in and out at `/inference/v1/generate`. It
can follow a run that is training: `--follow-s` looks for newer checkpoints. It listens on loopback by default. The
environment variable `GRPO_SERVE_TOKEN` holds the bearer token that requests must carry; any other address needs one.
Connections are not encrypted. `grpo-roc serve --tinker MODEL` serves the Tinker API instead; see its `--help`.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from grpo_roc_jax.commands import serve_tinker
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.record.checkpoint_files import newest_whole
from grpo_roc_jax.rollout.sampler import Sampler
from grpo_roc_jax.run.components import serving_parts
from grpo_roc_jax.run.load import is_run, load_policy, serving_settings
from grpo_roc_jax.run.policy import PolicyModel, split_checkpoint
from grpo_roc_jax.sandbox.http_guard import is_loopback
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.serving.server import TOKEN_VARIABLE, Endpoint, ServerLimits, ServerThread

PROG = "grpo-roc serve"
log = logging.getLogger(PROG)


@dataclass(frozen=True)
class ServeConfig:
    """Serves a policy over HTTP. Further `--section.field value` replace settings of the run."""

    model: tyro.conf.Positional[str]
    """A run, one of its checkpoints, or a published model: a directory or a hub id."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port; 0 takes a free one."""
    name: str = ""
    """Name of the model in answers; empty for that of its directory."""
    follow_s: float = 0.0
    """Seconds between checks for a newer checkpoint of the run; 0 keeps the first one."""
    enforce_formats: bool = True
    """Whether answers are held to the form that a request names (`response_format`, `strict` tools). If not, the
    header `X-Not-Applied` of an answer says so."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """Limits of the server."""


class CheckpointFollower:
    """Looks for newer checkpoints of a run, and publishes them between two chunks."""

    def __init__(self, policy: PolicyModel, sampler: Sampler, source: str, every_s: float, version: int):
        self._policy, self._sampler = policy, sampler
        self._source, self._every_s, self._version = source, every_s, version
        self._checkpoints = split_checkpoint(source)[0] / "checkpoints"
        self._due = time.monotonic() + every_s

    def __call__(self) -> SamplerParams | None:
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + self._every_s
        newest: int | str = "?"
        try:
            if (checkpoint := newest_whole(self._checkpoints)) is None or (newest := checkpoint.step) <= self._version:
                return None
            version, params = load_policy(self._policy, self._source)
            if version <= self._version:
                return None
            weights = self._sampler.engine.publish(params, version)
        except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
            log.warning("checkpoint %s is not served: %s", newest, error)
            return None
        self._version = version
        log.info("serves the policy of step %d", version)
        return weights


def serve(options: ServeConfig, policy: PolicyModel, sampler: Sampler, token: str) -> None:
    """Serves until a signal arrives."""
    version, params = load_policy(policy, options.model)
    weights = sampler.engine.publish(params, version)
    del params
    follows = options.follow_s > 0 and is_run(options.model) and split_checkpoint(options.model)[1] is None
    duty = CheckpointFollower(policy, sampler, options.model, options.follow_s, version) if follows else lambda: None
    sampler.engine.warmup(weights)

    def make(deliver: Callable[..., Any]) -> Endpoint:
        loop = SamplingLoop(sampler.engine, weights, deliver, duty)
        name = options.name or Path(options.model).name
        formats = options.enforce_formats
        return Endpoint(sampler.chat, loop, name=name, token=token, limits=options.limits, enforce_formats=formats)

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = ServerThread(make, options.host, options.port)
    server.endpoint.loop.start()
    if reason := server.endpoint.loop.forgets:
        log.info("earlier turns are not always found in the cache: %s", reason)
    print(f"http://{options.host}:{server.port}/v1", flush=True)
    stop.wait()
    server.endpoint.loop.close()
    server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if "--tinker" in words:
        words.remove("--tinker")
        return serve_tinker.main(words)
    show_log("%(message)s", info=("grpo_roc_jax", PROG))
    try:
        options, overrides = tyro.cli(ServeConfig, args=argv, prog=PROG, return_unknown_args=True)
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not is_loopback(options.host) and not token:
            raise ValueError(
                f"--host {options.host} can be reached from elsewhere; set {TOKEN_VARIABLE} to a secret token"
            )
        config = serving_settings(options.model, overrides, PROG)
        with serving_parts(config) as (policy, sampler):
            serve(options, policy, sampler, token)
    except (ValueError, OSError) as error:  # ConfigError is a ValueError
        print(f"serve: {error}", file=sys.stderr)
        return 2
    return 0

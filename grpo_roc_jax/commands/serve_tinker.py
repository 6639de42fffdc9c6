"""Serves the Tinker API, on which training scripts of other projects train your own models: `grpo-roc serve --tinker
MODEL [NAME=MODEL ...]`.

A MODEL is a directory, a hub id or a GGUF file (`package:NAME`); `NAME=MODEL` serves it under another name, for scripts
that know models by a table of names. The server listens on loopback by default. The environment variable
`GRPO_SERVE_TOKEN` holds the key that requests must carry (`TINKER_API_KEY`, so it begins with `tml-`); any other
address needs one.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.engine import Engine, make_engine
from grpo_roc_jax.model.convert import find_model, read_published
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.run.choices import with_update
from grpo_roc_jax.run.components import serving_parts
from grpo_roc_jax.run.load import serving_settings
from grpo_roc_jax.sandbox.http_guard import is_loopback
from grpo_roc_jax.serving.server import TOKEN_VARIABLE, ServerLimits, ServerThread
from grpo_roc_jax.serving.tinker.endpoint import Base, TinkerEndpoint, trainable
from grpo_roc_jax.serving.tinker.snapshots import EngineForm, Snapshots
from grpo_roc_jax.serving.tinker.store import Store
from grpo_roc_jax.serving.tinker.trainer import ROW_TOKENS, Trainer

PROG = "grpo-roc serve --tinker"
log = logging.getLogger(PROG)


@dataclass(frozen=True)
class ServeTinkerConfig:
    """Serves the Tinker API. Further `--section.field=value` replace settings of sampling and sharding."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """Published models: a directory, a hub id or a GGUF file; `NAME=MODEL` for another name."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port; 0 takes a free one."""
    store: str = "runs/tinker"
    """Folder of the checkpoints."""
    context: int = 2048
    """Longest datum, and longest prompt with its answer, in tokens."""
    slots: int = 16
    """Rows that are sampled at a time."""
    snapshots: int = 8
    """Most adapters that one batch mixes; samples of further ones wait."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """Limits of the server."""


def open_base(stack: ExitStack, options: ServeTinkerConfig, text: str, overrides: Sequence[str]) -> Callable[..., Base]:
    """Returns a function that makes the base model of one argument; it takes a function that runs others on the
    server's thread."""
    name, separator, source = text.partition("=")
    source = source if separator else text
    # Samples of a group share what lies within `max_prompt_tokens`; answers can be as long as the rest.
    reserved = options.context // 4
    words = ["--lora=low_rank", f"--rollout.max_prompt_tokens={reserved}"]
    words += [f"--rollout.max_response_tokens={options.context - reserved}", f"--rollout.slots={options.slots}"]
    config = serving_settings(source, [*words, *overrides], PROG)
    policy, sampler = stack.enter_context(serving_parts(config))
    model, mesh, chat = policy.model, policy.mesh, sampler.chat
    folder = find_model(source)
    try:
        family = find_family(read_published(folder))
    except (ValueError, OSError):
        family = None

    def engine(form: EngineForm) -> Engine:
        ids, sampling = chat.tokenizer.vocab_size, SamplingConfig()
        return make_engine(model, config.rollout, sampling, (), mesh, seed=config.seed, vocab_size=ids)

    batch = replace(config.batch, row_length=options.context, rows=max(1, ROW_TOKENS // options.context))
    update = with_update(replace(config, batch=batch), model, mesh).update
    trainer = Trainer(policy.base, model, update, mesh, config.rollout.max_row_tokens)

    def make(deliver: Callable[..., Any]) -> Base:
        worker = ThreadPoolExecutor(1, thread_name_prefix="tinker-training")
        snapshots = Snapshots(engine, deliver, options.snapshots, trainable(model))
        stops = frozenset(chat.stop_ids)
        return Base(
            name if separator else text, str(folder), chat.tokenizer, stops, family, trainer, snapshots, worker,
            config.rollout.max_prompt_tokens,
        )  # fmt: skip

    return make


def serve(options: ServeTinkerConfig, overrides: Sequence[str], token: str) -> None:
    """Serves until a signal arrives."""
    root = Path(options.store).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        makers = [open_base(stack, options, text, overrides) for text in options.models]

        def make(deliver: Callable[..., Any]) -> TinkerEndpoint:
            bases = [maker(deliver) for maker in makers]
            return TinkerEndpoint(bases, Store(root.resolve()), deliver, token=token, limits=options.limits)

        server = ServerThread(make, options.host, options.port)
        bases = server.endpoint.bases.values()
        for base in bases:
            base.snapshots.start()
        print(f"http://{options.host}:{server.port}", flush=True)
        stop.wait()
        server.close()
        for base in bases:
            base.snapshots.close()
            base.worker.shutdown(cancel_futures=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line without `--tinker`; returns the exit status."""
    show_log("%(message)s", info=("grpo_roc_jax", PROG))
    try:
        options, overrides = tyro.cli(ServeTinkerConfig, args=argv, prog=PROG, return_unknown_args=True)
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not options.models:
            raise ValueError("no model; name a directory, a hub id, or package:NAME")
        if not is_loopback(options.host) and not token:
            raise ValueError(
                f"--host {options.host} can be reached from elsewhere; "
                f"set {TOKEN_VARIABLE} to a secret that begins tml-"
            )
        if token and not token.startswith("tml-"):
            raise ValueError(f"{TOKEN_VARIABLE} must begin with tml-, since the client refuses other keys")
        serve(options, overrides, token)
    except (ValueError, OSError) as error:
        print(f"serve --tinker: {error}", file=sys.stderr)
        return 2
    return 0

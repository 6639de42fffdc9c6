"""The routes of the Tinker API: sessions, futures, training and sampling of adapters on frozen bases.

Everything here runs on the thread of the event loop. Training calls go to one thread for each base, in the order of
their `seq_id`; sampling goes to `Snapshots`.
"""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.web import Application, HTTPError

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.families import Family
from grpo_roc_jax.model.lora import LowRank, Target, save_adapter
from grpo_roc_jax.sandbox.http_guard import IDLE_S, Connections, RequestHead, refusal
from grpo_roc_jax.serving.refusal import RequestRefused, field_of, read_body, whole_number
from grpo_roc_jax.serving.sampling_fields import stop_finder
from grpo_roc_jax.serving.sampling_loop import PLACES, SampleJob
from grpo_roc_jax.serving.server import TOKEN_VARIABLE, EndpointHandler, LimitedServer, ServerLimits
from grpo_roc_jax.serving.tinker.futures import Futures, InOrder, Pending
from grpo_roc_jax.serving.tinker.journal import Journal, LoggedCall, owner_of
from grpo_roc_jax.serving.tinker.sampling import Gathered, read_sample_request
from grpo_roc_jax.serving.tinker.snapshots import Snapshot, Snapshots
from grpo_roc_jax.serving.tinker.store import KINDS, NAME, About, CheckpointPath, Store, check_name
from grpo_roc_jax.serving.tinker.trainer import Adam, AdapterState, Trainer
from grpo_roc_jax.serving.tinker.wire import (
    numbered_forward_backward,
    read_forward_backward,
    write_output,
)

log = logging.getLogger(__name__)
HOLD_S = 30.0
"""How long a question for a result is held until there is one."""
PROTOBUF = "application/x-protobuf"
ALPHA = 32.0
"""The additions are multiplied by ALPHA / rank; the protocol has no field for it."""
ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
LARGEST_RANK = 256
LONGEST_TTL_S = 3650 * 24 * 3600.0
STATE_STEPS = 4
"""Optimizer steps from one state of the journal to the next; at a start so many are run again, or twice as many."""
SAMPLERS = 64
"""Sampling sessions whose weights stay in memory; those of saved paths are loaded again when they are used."""


@dataclass(frozen=True, eq=False)
class Base:
    """A model that adapters are trained on."""

    name: str
    folder: str
    """Directory with its tokenizer."""
    tokenizer: Any
    stop_ids: frozenset[int]
    family: Family | None
    """None if adapters cannot be written in PEFT's form."""
    trainer: Trainer
    snapshots: Snapshots
    worker: ThreadPoolExecutor
    """One thread."""
    reserved: int
    """Tokens of the context that prompts have to themselves: an answer to a shorter one does not get them."""

    @property
    def context(self) -> int:
        return self.trainer.longest


@dataclass(eq=False)
class ModelRun:
    """A model of a client's."""

    model_id: str
    base: Base
    seed: int
    order: InOrder
    state: AdapterState | None = None
    """None until it is made, or if that failed."""
    lora: LowRank | None = None
    failed: str = ""
    """Why gradients of the step to come are not complete."""
    used: float = field(default_factory=time.time)
    replayed: int = 0
    """Calls below this number may have run before the server started again."""
    unsaved: int = 0
    """Optimizer steps since the last state of the journal."""
    restoring: bool = False
    """Whether calls of before the start are run again."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The client's own."""


@dataclass(frozen=True, eq=False)
class SamplingSession:
    """A sampling session: its weights never change."""

    base: Base
    snapshot: Snapshot


class TinkerEndpoint:
    """Models over HTTP in the form of the Tinker API."""

    def __init__(
        self,
        bases: Sequence[Base],
        store: Store,
        deliver: Callable[..., Any],
        *,
        token: str = "",
        limits: ServerLimits | None = None,
        journal: Journal | None = None,
    ):
        self.bases = {base.name: base for base in bases}
        self.store, self.token, self._deliver = store, token, deliver
        self.limits = limits or ServerLimits()
        self.futures = Futures()
        store.repair()
        self.journal = journal or Journal(store)
        notes = self.journal.notes()
        self.sessions: dict[str, dict[str, Any]] = {
            note["session"]: note.get("about", {}) for note in notes if "sampler" not in note
        }
        """Session -> what its client says about it, in the order in which they were made."""
        self._noted: dict[str, dict[str, Any]] = {note["sampler"]: note["body"] for note in notes if "sampler" in note}
        """What samplers of before the start were made from."""
        self._written = {note["sampler"]: note["written"] for note in notes if note.get("written")}
        """Sampler -> when the checkpoint was written that it was made from."""
        self._made_by: dict[str, tuple[str, int]] = {}
        """Sampler -> the call whose weights it has, (model, number)."""
        self._replayed: LoggedCall | None = None
        """The call of before the start that is queued again."""
        self.models: dict[str, ModelRun] = {}
        self.samplers: OrderedDict[str, SamplingSession] = OrderedDict()
        """Sampling sessions in memory, the last used one last."""
        self._saved: dict[str, CheckpointPath] = {}
        """Where the weights of a sampler are on disk."""
        self._alone: dict[str, Snapshot] = {}
        """The bases without an adapter, whose caches all clients share."""
        self.connections: Connections[Any] | None = None
        self._sampled = 0

    # ---- who may ask

    def admit(self, head: RequestHead, length: int) -> str:
        """
        Raises:
            RequestRefused: No right to ask, or too large.
        """
        if head.content_type.partition(";")[0].strip().lower() == PROTOBUF:
            head = replace(head, content_type="application/json")  # no page can send either unasked
        if (refused := refusal(head, self.token, TOKEN_VARIABLE)) is not None:
            hint = " as TINKER_API_KEY, in X-Api-Key; it begins with tml-" if refused[0] == 401 else ""
            raise RequestRefused(refused[1] + hint, status=refused[0])
        if length > self.limits.body_mb << 20:
            raise RequestRefused(f"a body of {length} bytes; must be at most {self.limits.body_mb} MiB", status=413)
        return ""

    def server(self) -> HTTPServer:
        """A server of the routes, not listening yet."""
        app = Application([(r"/api/v1/(?P<path>.*)", TinkerHandler, {"endpoint": self})],
                          default_handler_class=TinkerHandler, default_handler_args={"endpoint": self},
                          log_function=lambda handler: None)  # fmt: skip
        server = LimitedServer(
            self.limits.connections,
            app,
            max_body_size=(self.limits.body_mb << 20) + 1,
            idle_connection_timeout=IDLE_S,
            body_timeout=self.limits.request_s,
        )
        self.connections = server.connections
        return server

    # ---- sessions

    def client_config(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "sample_max_concurrent_requests": self.limits.waiting // 2,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, (self.limits.body_mb << 20) // 2),
        }

    def create_session(self, body: dict[str, Any]) -> dict[str, Any]:
        name = uuid.uuid4().hex
        about = {
            "user_metadata": field_of(body, "user_metadata", dict, {}) or {},
            "display_name": field_of(body, "display_name", str),
        }
        self.journal.note(session=name, about=about)
        self.sessions[name] = about
        return {"session_id": name, "info_message": None, "warning_message": None, "error_message": None}

    def session_heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        if field_of(body, "session_id", str, "") not in self.sessions:
            raise RequestRefused("no such session; it has ended, or was idle for a week: make a new client", status=410)
        return {}

    def session(self, name: str) -> dict[str, Any]:
        """What there is of a session."""
        if name not in self.sessions:
            raise RequestRefused(f"no session {name!r:.80}; it has ended, or was idle for a week", status=404)
        models = {*self.models, *self.store.models()}
        return {
            "training_run_ids": sorted(model for model in models if model.startswith(f"{name}:")),
            "sampler_ids": sorted(
                sampler for sampler in {*self.samplers, *self._noted} if sampler.startswith(f"{name}:")
            ),
        } | self.sessions[name]

    def capabilities(self) -> dict[str, Any]:
        return {
            "supported_models": [
                {"model_name": name, "max_context_length": base.context, "trainable": True, "sampleable": True}
                for name, base in self.bases.items()
            ]
        }

    # ---- models

    def create_model(self, body: dict[str, Any], raw: bytes) -> Pending:
        model_id = self._new_model(body)
        base = self._base(field_of(body, "base_model", str, ""))
        lora, seed = self._lora(base, field_of(body, "lora_config", dict, {}))
        kind = field_of(field_of(body, "optimizer_config", dict, {}), "type", str, "adamw")
        if kind not in ("adamw", "adam"):
            raise RequestRefused(f"optimizer_config type {kind!r:.80}; must be adamw")
        pending, new = self._new_call(("create_model", model_id), model_id, 0, raw, "create_model")
        if not new:
            return pending
        run = self.models[model_id] = self._model_run(model_id, base, seed, lora)
        run.metadata = field_of(body, "user_metadata", dict, {}) or {}

        def make() -> dict[str, Any]:
            run.state = base.trainer.start(lora, seed)
            self._save_state(run, 1)
            return {"model_id": model_id}

        self._work(base, pending, make)
        return pending

    def _session(self, body: dict[str, Any]) -> str:
        session = field_of(body, "session_id", str, "")
        if session not in self.sessions:
            text = f"no session {session!r:.80}; it has ended, or was idle for a week: make a new client"
            raise RequestRefused(text, status=404)
        return session

    def _new_model(self, body: dict[str, Any]) -> str:
        name = f"{self._session(body)}:train:{whole_number(body, 'model_seq_id')}"
        if name not in self.models:
            self._restore(name)
        return name

    def _model_run(self, model_id: str, base: Base, seed: int, lora: LowRank) -> ModelRun:
        return ModelRun(model_id, base, seed, InOrder(base.worker.submit), lora=lora)

    def _base(self, name: str) -> Base:
        if name not in self.bases:
            raise RequestRefused(
                f"no model {name!r:.200}; served here: {', '.join(self.bases)}. Start with `--tinker {name or 'NAME'}="
                "DIR` to serve one under that name", status=404
            )  # fmt: skip
        return self.bases[name]

    def _lora(self, base: Base, given: dict[str, Any]) -> tuple[LowRank, int]:
        rank, seed = field_of(given, "rank", int, 32), field_of(given, "seed", int, 0) % (1 << 32)
        if not 1 <= rank <= LARGEST_RANK:
            raise RequestRefused(f"lora_config rank {rank}; must be 1 to {LARGEST_RANK}")
        parts = (("train_attn", ATTENTION), ("train_mlp", MLP))
        targets = tuple(name for key, names in parts if field_of(given, key, bool, True) for name in names)
        targets = tuple(name for name in targets if name in trainable(base.trainer.model))
        if not targets:
            raise RequestRefused("lora_config trains nothing of this model; set train_attn or train_mlp")
        if field_of(given, "train_unembed", bool, True):
            log.info("train_unembed: adapters have no unembedding here; attention and MLP are trained")
        return LowRank(rank=rank, alpha=ALPHA, targets=targets), seed

    def _new_call(self, key: Any, model_id: str, seq: int, raw: bytes, path: str) -> tuple[Pending, bool]:
        """(the result of a call, whether it is new); a new one is in the journal.

        Raises:
            HTTPError: It could not be written there, so it is not accepted; the client may send it again.
        """
        again = self._replayed
        pending, new = self.futures.make(key, raw, model_id, "" if again is None else again.request_id)
        if new and again is None:
            try:
                self.journal.append(model_id, LoggedCall(path, seq, pending.request_id, raw))
            except OSError as error:
                self.futures.drop(pending.request_id)
                log.error(
                    "call %d of %s is not accepted, since the journal cannot be written: %s", seq, model_id, error
                )
                text = f"the journal cannot be written ({error.strerror}), so the call is not accepted; send it again"
                raise HTTPError(503, text) from error
        return pending, new

    def _save_state(self, run: ModelRun, next_seq: int) -> None:
        """Puts the state of a model into the journal; on the worker's thread, and without a gradient."""
        self._save_samplers(run, self.journal.first_after(run.model_id, next_seq))
        about, leaves = self._about(run, {}), {"params": run.state.params, "moments": run.state.moments}
        first = self.journal.save_state(run.model_id, about, leaves, next_seq)
        run.unsaved = 0
        self._deliver(partial(self.journal.trim, run.model_id, first))

    def _save_samplers(self, run: ModelRun, first: int) -> None:
        """Writes the weights of samplers without a name whose calls are not run again at a start: those before the
        first that is."""
        saved = []
        for name, sampler in reversed(list(self.samplers.items())):  # the last used first
            model, seq = self._made_by.get(name, ("", 0))
            if model == run.model_id and seq < first and len(saved) < self.journal.samplers:
                saved.append(checkpoint := self.journal.sampler(model, name))
                if self.store.written(checkpoint) is None:
                    leaves = {"params": sampler.snapshot.params}
                    self.store.save(checkpoint, self._about(run, {}), leaves, overwrite=True)
        self.journal.drop_samplers(run.model_id, saved)

    def _restore(self, name: str) -> ModelRun | None:
        """A model of before the start: its state is read, and its calls since then are queued again. None if the
        journal has none of that name, if it cannot be made again, or while that is being tried."""
        if self._replayed is not None or not NAME.fullmatch(name) or name.partition(":")[0] not in self.sessions:
            return None
        calls, state = self.journal.calls(name), self.journal.first_state(name)
        if not calls and state is None:
            return None
        self.journal.trim(name, 0)  # what was not written to its end would hide what comes after it
        if state is None:  # killed while it was made
            made = calls
        else:
            checkpoint, about, first = state
            base = self._base(about.base_model)
            run = self.models[name] = self._model_run(name, base, about.seed, about.lora)
            run.order.next_seq = first
            made = []
            for call in calls:
                if call.seq == 0:
                    pending, _ = self.futures.make(("create_model", name), call.body, name, call.request_id)
                    loaded = call.path == "load_weights"
                    path = {"path": json.loads(call.body)["path"], "type": "load_weights"} if loaded else {}
                    pending.finish({"model_id": name} | path)

            def load() -> None:
                fresh = base.trainer.start(about.lora, about.seed)
                leaves = self.store.load(checkpoint, {"params": fresh.params, "moments": fresh.moments})
                run.state = AdapterState(about.lora, leaves["params"], leaves["moments"], None, about.steps)

            base.worker.submit(self._compute, Pending("", b""), load)
            made += [call for call in calls if call.seq >= max(first, 1)]
        for call in made:
            if (run := self.models.get(name)) is not None:  # the first call may make it
                run.replayed = 1 + max(call.seq for call in made)
            self._replay(name, call)
        if (run := self.models.get(name)) is not None:
            run.restoring = True

            def done() -> None:
                run.restoring = False

            run.base.worker.submit(self._deliver, done)
        log.info("model %s of before the start goes on; %d calls run again", name, len(made))
        return self.models.get(name)

    def _replay(self, model_id: str, call: LoggedCall) -> None:
        self._replayed = call
        try:
            if not call.path:
                self.skip(model_id, call.seq, call.body.decode())
            elif call.path == "forward_backward":
                self.forward_backward(call.body)
            else:
                getattr(self, call.path)(json.loads(call.body), call.body)
        except RequestRefused as error:
            if call.request_id not in self.futures:
                key = (model_id, call.seq) if call.seq else ("create_model", model_id)
                self.futures.make(key, call.body, model_id, call.request_id)[0].fail(error)
            gradients = call.path == "forward_backward" and not numbered_forward_backward(call.body)[2]
            self.skip(model_id, call.seq, error.message if gradients else "")
        finally:
            self._replayed = None

    def pending(self, request_id: str) -> Pending:
        """
        Raises:
            RequestRefused: There is no such request.
        """
        if request_id not in self.futures and owner_of(request_id) not in self.models:
            self._restore(owner_of(request_id))
        if request_id not in self.futures and not owner_of(request_id):
            # The client then asks for its samples again.
            raise RequestRefused(f"no request {request_id!r:.80}; the server started again", status=410)
        return self.futures.find(request_id)

    def _model(self, name: str) -> ModelRun:
        if (run := self.models.get(name) or self._restore(name)) is None:
            raise RequestRefused(
                f"no model {name!r:.120}; its session has ended, or was idle for a week: load the last checkpoint in a "
                "new session (create_training_client_from_state_with_optimizer)", status=404
            )  # fmt: skip
        run.used = time.time()
        return run

    def get_info(self, body: dict[str, Any]) -> dict[str, Any]:
        run = self._model(field_of(body, "model_id", str, ""))
        return {
            "model_id": run.model_id,
            "model_data": {"arch": "transformer", "model_name": run.base.name, "tokenizer_id": run.base.folder},
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "model_name": run.base.name,
        }

    def _work(self, base: Base, pending: Pending, work: Callable[[], Any]) -> None:
        base.worker.submit(self._compute, pending, work)

    def _compute(self, pending: Pending, work: Callable[[], Any]) -> None:
        """Computes the result or the error of a call, on the worker's thread."""
        try:
            result = work()
        except Exception as error:
            if not isinstance(error, RequestRefused):
                log.exception("a call failed")
            self._deliver(partial(pending.fail, error))
        else:
            self._deliver(partial(pending.finish, result))

    def _call(self, model_id: str, seq: int, raw: bytes, work: Callable[[ModelRun], Any], path: str) -> Pending:
        """Queues a call of a model after those with lower numbers."""
        run = self._model(model_id)
        pending, new = self._new_call((model_id, seq), model_id, seq, raw, path)
        if new and seq < run.order.next_seq:
            pending.fail(RequestRefused(f"seq_id {seq} of {model_id} has run; the next one is {run.order.next_seq}"))
        elif new:

            def ready() -> Any:
                if run.state is None:
                    raise RequestRefused(f"the model {model_id} was not made; see the error of that call")
                return work(run)

            run.order.put(seq, partial(self._compute, pending, ready))
        return pending

    def skip(self, model_id: str, seq: int, failed: str = "") -> None:
        """A call of this number was refused before it was queued; those with higher numbers do not wait for it.

        Args:
            model_id: The model that the call is for.
            seq: Its number.
            failed: Why gradients of the step to come are not complete.
        """
        run = self.models.get(model_id) or self._restore(model_id)
        if run is None:
            return

        def note() -> None:
            run.failed = failed or run.failed

        if self._replayed is None and seq >= run.order.next_seq:
            self.journal.append(model_id, LoggedCall("", seq, "", failed.encode()))
        run.order.skip(seq, note)

    def forward_backward(self, raw: bytes) -> Pending:
        request = read_forward_backward(raw)
        trainer, refused = self._model(request.model_id).base.trainer, None
        try:
            trainer.checked(request)
        except RequestRefused as error:  # its result is there at once, whatever runs before it
            refused = error

        def work(run: ModelRun) -> bytes:
            try:
                state, logprobs, metrics = run.base.trainer.forward_backward(run.state, request)
            except Exception as error:
                if not request.forward_only:
                    run.failed = getattr(error, "message", None) or repr(error)
                raise
            run.state = state
            return write_output(logprobs, metrics)

        pending = self._call(request.model_id, request.seq_id, raw, work, "forward_backward")
        if refused is not None:
            pending.fail(refused)
        return pending

    def optim_step(self, body: dict[str, Any], raw: bytes) -> Pending:
        params, (model_id, seq) = field_of(body, "adam_params", dict, {}), _numbered(body)
        adam = Adam(**{name: field_of(params, name, (int, float), old) for name, old in vars(Adam()).items()})

        def work(run: ModelRun) -> dict[str, Any]:
            if run.failed:
                text, run.failed = run.failed, ""
                run.state = replace(run.state, gradient=None)
                raise RequestRefused(f"optim_step after a forward_backward that failed: {text}; gradients were dropped")
            run.state, metrics = run.base.trainer.optimizer_step(run.state, adam)
            run.unsaved += 1
            if run.unsaved >= STATE_STEPS:
                try:
                    self._save_state(run, seq + 1)
                except Exception as error:  # the step is done, and the calls since the last state are in the journal
                    log.error("the state of %s is not saved and tried again after the next step: %s", model_id, error)
            return {"metrics": metrics}

        return self._call(model_id, seq, raw, work, "optim_step")

    # ---- checkpoints

    def _about(self, run: ModelRun, body: dict[str, Any], seq: int = 0) -> About:
        base, lora, expires = run.base.name, run.lora, _expiry(body)
        return About(base, lora.rank, lora.alpha, lora.targets, run.state.steps, run.seed, time.time(), expires, seq)

    def _export(self, run: ModelRun) -> Callable[[Path], Any] | None:
        base = run.base
        if base.family is None:
            return None
        return lambda folder: save_adapter(
            run.state.params, run.lora, base.trainer.model, base.family, folder, base.folder
        )

    def save_weights(self, body: dict[str, Any], raw: bytes) -> Pending:
        model_id, seq = _numbered(body)
        checkpoint = CheckpointPath(model_id, "weights", check_name(field_of(body, "path", str, "") or f"seq_{seq}"))

        def work(run: ModelRun) -> dict[str, Any]:
            leaves = {"params": run.state.params, "moments": run.state.moments}
            again = field_of(body, "overwrite", bool, False)
            about = self._about(run, body, seq)
            if not self._saved_before(run, checkpoint, about):
                self.store.save(checkpoint, about, leaves, self._export(run), overwrite=again)
            return {"path": str(checkpoint), "type": "save_weights"}

        return self._call(model_id, seq, raw, work, "save_weights")

    def _saved_before(self, run: ModelRun, checkpoint: CheckpointPath, about: About) -> bool:
        """Whether a call runs again whose checkpoint was written, by it or by one after it."""
        before = self.store.written(checkpoint) if about.call < run.replayed else None
        return before is not None and before.call >= about.call

    def load_weights(self, body: dict[str, Any], raw: bytes) -> Pending:
        checkpoint = CheckpointPath.read(field_of(body, "path", str, ""))
        optimizer, model = field_of(body, "optimizer", bool, False), field_of(body, "model_id", str)
        # A call that runs again finds in the journal what it has loaded: the checkpoint may be another by now.
        copy = self.journal.loaded(model, _numbered(body)[1]) if model else None
        again = copy is not None and self._replayed is not None and self.store.written(copy) is not None
        about = self.store.about(copy if again else checkpoint)
        if optimizer and checkpoint.kind != "weights":
            raise RequestRefused(
                f"{checkpoint} holds no optimizer state; name a path of save_state, or load without it"
            )
        base = self._base(field_of(body, "base_model", str) or about.base_model)

        def load(run: ModelRun) -> dict[str, Any]:
            if run.lora != about.lora or run.base is not base:
                raise RequestRefused(
                    f"{checkpoint} has rank {about.rank} and base {base.name}, the model {run.lora.rank} and "
                    f"{run.base.name}, or other matrices; load it as a new model"
                )
            fresh = base.trainer.start(about.lora, about.seed)
            like = {"params": fresh.params} | ({"moments": fresh.moments} if optimizer or again else {})
            loaded = self.store.load(copy if again else checkpoint, like)
            steps = about.steps if optimizer or again else 0
            run.state = AdapterState(about.lora, loaded["params"], loaded.get("moments", fresh.moments), None, steps)
            run.failed = ""  # what failed before has no part in what is loaded
            return {"path": str(checkpoint), "model_id": run.model_id, "type": "load_weights"}

        if model:
            model_id, seq = _numbered(body)

            def load_and_copy(run: ModelRun) -> dict[str, Any]:
                before = run.state, run.failed
                result = load(run)
                if not again:
                    leaves = {"params": run.state.params, "moments": run.state.moments}
                    try:
                        self.store.save(copy, self._about(run, {}), leaves, overwrite=True)
                    except Exception:
                        run.state, run.failed = before  # a load that fails changes nothing
                        raise
                return result

            return self._call(model_id, seq, raw, load_and_copy, "load_weights")
        model_id = self._new_model(body)
        pending, new = self._new_call(("create_model", model_id), model_id, 0, raw, "load_weights")
        if new:
            run = self.models[model_id] = self._model_run(model_id, base, about.seed, about.lora)

            def make() -> dict[str, Any]:
                result = load(run)
                self._save_state(run, 1)
                return result

            self._work(base, pending, make)
        return pending

    def save_weights_for_sampler(self, body: dict[str, Any], raw: bytes) -> Pending:
        model_id, seq = _numbered(body)
        name, number = field_of(body, "path", str), whole_number(body, "sampling_session_seq_id")
        checkpoint = CheckpointPath(model_id, "sampler_weights", check_name(name)) if name else None
        if checkpoint is None:
            sampler = f"{model_id.partition(':')[0]}:sample:{number}"
            maker = self._made_by.get(sampler, (model_id, seq))
            if sampler in self._noted or maker != (model_id, seq):
                raise RequestRefused(
                    f"{sampler} samples from something else; count sampling_session_seq_id up for each"
                )
            self._made_by[sampler] = maker

        def work(run: ModelRun) -> dict[str, Any]:
            snapshot = Snapshot(run.base.trainer.base, run.lora, run.state.params, model_id)
            if checkpoint is None:
                sampler_id = f"{model_id.partition(':')[0]}:sample:{number}"
                self._deliver(partial(self._keep, sampler_id, SamplingSession(run.base, snapshot)))
                return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}
            about, leaves = self._about(run, body, seq), {"params": run.state.params}
            if not self._saved_before(run, checkpoint, about):
                self.store.save(checkpoint, about, leaves, self._export(run), overwrite=True)
            return {"path": str(checkpoint), "type": "save_weights_for_sampler"}

        return self._call(model_id, seq, raw, work, "save_weights_for_sampler")

    def weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        about = self.store.about(CheckpointPath.read(field_of(body, "tinker_path", str, "")))
        return {
            "base_model": about.base_model,
            "is_lora": True,
            "lora_rank": about.rank,
            "train_unembed": False,
            "train_mlp": bool({*MLP} & {*about.targets}),
            "train_attn": bool({*ATTENTION} & {*about.targets}),
        }

    def save_weights_external(self, body: dict[str, Any], raw: bytes) -> Pending:
        model_id, seq = _numbered(body)
        if field_of(body, "age_encryption_recipients", list):
            raise RequestRefused("age_encryption_recipients: files are not encrypted here; leave it out")
        checkpoint = CheckpointPath(model_id, "external_weights", check_name(field_of(body, "path", str, "")))

        def work(run: ModelRun) -> dict[str, Any]:
            if (export := self._export(run)) is None:
                raise RequestRefused(f"adapters of {run.base.name} have no published form; use save_state")
            about = self._about(run, body, seq)
            if not self._saved_before(run, checkpoint, about):
                self.store.save(checkpoint, about, {}, export, overwrite=False)
            return {"path": str(checkpoint), "type": "save_weights_external"}

        return self._call(model_id, seq, raw, work, "save_weights_external")

    def checkpoints(self, model: str | None = None) -> list[dict[str, Any]]:
        """The checkpoints of a model, or of all models, the newest first.

        Raises:
            RequestRefused: There is no such model.
        """
        if model is not None and model not in {*self.models, *self.store.models()}:
            raise RequestRefused(f"no training run {model!r:.120}; list those that there are", status=404)
        saved = sorted(self.store.checkpoints(model), key=lambda of: of[1].time, reverse=model is None)
        return [_listed(self.store, *of) for of in saved]

    def training_runs(self) -> list[dict[str, Any]]:
        """Training runs in memory and those with checkpoints, the last used first."""
        runs: dict[str, dict[str, Any]] = {}
        last: dict[str, dict[str, Any]] = {}
        fields = {"training": "last_checkpoint", "sampler": "last_sampler_checkpoint"}
        for checkpoint, about in sorted(self.store.checkpoints(), key=lambda of: of[1].time):
            runs[checkpoint.model] = _run(checkpoint.model, about.base_model, about.rank, about.time)
            if (name := fields.get(KINDS[checkpoint.kind])) is not None:
                last.setdefault(checkpoint.model, {})[name] = _listed(self.store, checkpoint, about)
        for name, run in self.models.items():
            runs[name] = _run(name, run.base.name, run.lora.rank, run.used) | {"user_metadata": run.metadata}
        runs = {name: run | last.get(name, {}) for name, run in runs.items()}
        return sorted(runs.values(), key=lambda run: run["last_request_time"], reverse=True)

    def training_run(self, name: str) -> dict[str, Any]:
        run = next((run for run in self.training_runs() if run["training_run_id"] == name), None)
        if run is None:
            raise RequestRefused(f"no training run {name!r:.120}; list those that there are", status=404)
        return run

    def delete_checkpoint(self, model: str, kind: str, name: str) -> dict[str, Any]:
        checkpoint = CheckpointPath(check_name(model), kind, check_name(name))
        self.store.about(checkpoint)

        def wrote(call: LoggedCall) -> bool:
            """Whether a call has written it, so that it must not do so again after a restart."""
            if call.path != SAVED_BY[kind]:
                return False
            path = json.loads(call.body).get("path") or (f"seq_{call.seq}" if kind == "weights" else "")
            return path == name and (
                call.request_id not in self.futures or self.futures.find(call.request_id).done.is_set()
            )

        self.journal.forget(model, wrote)
        self.store.delete(checkpoint)
        return {}

    def urls(self, base_url: str, model: str, kind: str, name: str) -> dict[str, Any]:
        """Where the files of a checkpoint can be had."""
        checkpoint = CheckpointPath(check_name(model), kind, check_name(name))
        self.store.about(checkpoint)
        files = {}
        for path in sorted(self.store.folder(checkpoint).iterdir()):
            route = f"/api/v1/files/{model}/{kind}/{name}/{path.name}"
            files[path.name] = f"{base_url}{route}" + (f"?key={self.signature(route)}" if self.token else "")
        return {"urls": files, "expires": _time(time.time() + 3600)}

    def signature(self, route: str) -> str:
        """What lets a client without the token read one file."""
        return hmac.new(self.token.encode(), route.encode(), "sha256").hexdigest()

    # ---- sampling

    def create_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{self._session(body)}:sample:{whole_number(body, 'sampling_session_seq_id')}"
        before = self._noted.get(name, {} if name in self.samplers or name in self._made_by else body)
        if any(before.get(key) != body.get(key) for key in ("model_path", "base_model")):
            raise RequestRefused(f"{name} samples from something else; count sampling_session_seq_id up for each")
        if name not in self.samplers and name not in self._saved:
            path = field_of(body, "model_path", str)
            checkpoint = None if path is None else CheckpointPath.read(path)
            if checkpoint is None:
                base = self._base(field_of(body, "base_model", str, ""))
                sampler = SamplingSession(base, self._alone.setdefault(base.name, Snapshot(base.trainer.base)))
            else:
                sampler = self._load_sampler(name, checkpoint)
            if name not in self._noted:
                written = self._written.get(name)
                self.journal.note(session=name.partition(":")[0], sampler=name, body=body, written=written)
                self._noted[name] = body
            self._keep(name, sampler)
            if checkpoint is not None:
                self._saved[name] = checkpoint
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    def sampler_info(self, name: str) -> dict[str, Any]:
        sampler = self._sampler(name)
        return {"sampler_id": name, "base_model": sampler.base.name, "model_path": None}

    def _load_sampler(self, name: str, checkpoint: CheckpointPath) -> SamplingSession:
        about = self.store.about(checkpoint)
        if self._written.get(name, about.time) != about.time:
            raise RequestRefused(
                f"{checkpoint} was written again since {name} was made, whose weights never change; make a new client",
                status=404,
            )
        base = self._base(about.base_model)
        loaded = self.store.load(checkpoint, {"params": base.trainer.like(about.lora)})["params"]
        self._written[name] = about.time
        return SamplingSession(base, Snapshot(base.trainer.base, about.lora, loaded, checkpoint.model))

    def _keep(self, name: str, sampler: SamplingSession) -> None:
        self.samplers[name] = sampler
        while len(self.samplers) > SAMPLERS:
            self.samplers.popitem(last=False)

    def _sampler(self, name: str) -> SamplingSession:
        if name not in self.samplers and name in self._saved:
            self._keep(name, self._load_sampler(name, self._saved[name]))
        elif name not in self.samplers and name in self._noted:
            self.create_sampling_session(self._noted[name])
        session = name.partition(":")[0] + ":"
        absent = name not in self.samplers and session[:-1] in self.sessions
        if absent and (checkpoint := self.journal.find_sampler(name)) is not None:
            self._keep(name, self._load_sampler(name, checkpoint))
            self._made_by[name] = (checkpoint.model, 0)
        if name not in self.samplers:  # of before the start: a call of its model that runs again makes it
            for model in self.store.models():
                if model.startswith(session) and model not in self.models:
                    self._restore(model)
        if (sampling_session := self.samplers.get(name)) is None:
            if any(run.restoring for model, run in self.models.items() if model.startswith(session)):
                raise RequestRefused("what was going on before the start is computed again; ask later", status=503)
            raise RequestRefused(
                f"no sampling session {name!r:.120}; the server started again, or {SAMPLERS} others were used since: "
                "make a new client from a saved path",
                status=404,
            )
        self.samplers.move_to_end(name)
        return sampling_session

    def finish(self, session: str) -> None:
        """A client has ended: what it trained and did not save is freed."""
        if session in self.sessions:
            del self.sessions[session]
            self.journal.note(finished=session)
        for name in self.store.models():
            if name.startswith(f"{session}:"):
                self.journal.remove(name)
        for table in (self.models, self.samplers, self._saved, self._noted, self._written, self._made_by):
            for name in [name for name in table if name.startswith(f"{session}:")]:
                del table[name]

    def asample(self, body: dict[str, Any], raw: bytes) -> Pending:
        session = field_of(body, "sampling_session_id", str, "")
        sampling_session = self._sampler(session)
        if self.futures.open >= self.limits.waiting:
            raise RequestRefused("the server is busy; ask again later", status=429)
        base, snapshot = sampling_session.base, sampling_session.snapshot
        model = base.trainer.model
        request = read_sample_request(body, model.vocab_size, base.context, base.reserved, base.stop_ids)
        pending, new = self.futures.make((session, whole_number(body, "seq_id", bits=63)), raw)
        if not new:
            return pending
        pending.extra["sample_sequence_ids"] = [f"{pending.request_id}:{i}" for i in range(request.count)]

        def compute(work: Callable[[], Any], done: Callable[[Any], None]) -> None:
            def run() -> None:
                try:
                    result = work()
                except Exception as error:
                    log.exception("what a sampling request asks of its text cannot be computed")
                    self._deliver(partial(pending.fail, error))
                else:
                    self._deliver(partial(done, result))

            base.worker.submit(run)

        gathered = Gathered(pending, request, compute, partial(base.trainer.read, snapshot.lora, snapshot.params))
        self._sampled += 1
        seed = (request.seed if request.seed is not None else self._sampled) % PLACES
        gathered.begin(seed)
        if not request.max_tokens:
            return pending
        job = SampleJob(
            request.prompt, request.max_tokens, gathered.report, request.count, request.temperature, seed, 0,
            request.stop_ids, stop_finder(base.tokenizer, request.stops), steering=request.steering(),
        )  # fmt: skip
        base.snapshots.submit(snapshot, job)
        return pending


def trainable(model: ModelConfig) -> tuple[Target, ...]:
    """Matrices that adapters of a model may have."""
    return ATTENTION if model.experts.count else (*ATTENTION, *MLP)


def _numbered(body: dict[str, Any]) -> tuple[str, int]:
    """(model, number) of a call.

    Raises:
        RequestRefused: They are none, or the call says of its result what cannot be.
    """
    _expiry(body)
    return field_of(body, "model_id", str, ""), whole_number(body, "seq_id", least=1)


def _expiry(body: dict[str, Any]) -> float:
    """When a checkpoint with the `ttl_seconds` of a request ends, in seconds since 1970; 0 for never."""
    ttl = field_of(body, "ttl_seconds", (int, float), 0)
    if not 0 <= ttl <= LONGEST_TTL_S:
        raise RequestRefused(f"ttl_seconds = {str(ttl)[:40]}; must be 0 (never) to {LONGEST_TTL_S:.0f}", "ttl_seconds")
    return time.time() + ttl if ttl else 0.0


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _listed(store: Store, checkpoint: CheckpointPath, about: About) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in store.folder(checkpoint).iterdir())
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": _time(about.time),
        "tinker_path": str(checkpoint),
        "size_bytes": size,
        "expires_at": _time(about.expires) if about.expires else None,
    }


def _run(name: str, base: str, rank: int, used: float) -> dict[str, Any]:
    return {
        "training_run_id": name,
        "base_model": base,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": _time(used),
    }


JSON_CALLS: Mapping[str, str] = {
    "client/config": "client_config",
    "client/dynamic_config": "client_config",
    "create_session": "create_session",
    "session_heartbeat": "session_heartbeat",
    "get_info": "get_info",
    "weights_info": "weights_info",
    "create_sampling_session": "create_sampling_session",
}
"""Path -> method that answers at once."""
SAVED_BY = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Kind of a checkpoint -> the call that writes it."""
REASONS = {
    "paused_rate_limit": {"queue_state_reason": "more adapters are sampled from than one batch holds (--snapshots)"}
}
FUTURES = frozenset(
    "create_model optim_step save_weights load_weights save_weights_for_sampler save_weights_external asample".split()  # noqa: SIM905
)
"""Paths whose results come later, each a method of the same name."""
ABSENT: Mapping[str, str] = {
    "copy_weights": "there are no projects; load the path (create_training_client_from_state)",
    "create_custom_loss": "such losses run in the client (forward_backward_custom does so by itself)",
    "training_runs/.+/publish": "whoever has the key reads all checkpoints; copy the folder of the store to share one",
    "sessions/search": "list them (list_sessions)",
    "sessions/.+/project": "there are no projects",
    "sessions/.+/trace_export": "no trace of a session is recorded",
    "auth/token": "requests carry the key itself (TINKER_API_KEY)",
    "join_sampling_session": "copies of a client number themselves",
    "retrieve_futures": "results are asked for one by one (retrieve_future)",
    "(billing|audit|storage).*": "nothing is charged or audited here",
}
"""Paths of the API that are not served -> why, or what to do instead."""
CHECKPOINT = re.compile(r"training_runs/([^/]+)/checkpoints/([^/]+)/([^/]+)(/ttl|/external_weights_urls)?")


class TinkerHandler(EndpointHandler):
    """All paths of the API; errors are `{"detail": text}`."""

    async def prepare(self) -> None:
        headers = self.request.headers
        path = self.request.path
        if self.endpoint.token and path.startswith("/api/v1/files/") and self.request.method == "GET":
            key = self.get_query_argument("key", "")
            if hmac.compare_digest(key.encode(), self.endpoint.signature(path).encode()):
                headers["Authorization"] = f"Bearer {self.endpoint.token}"
        await super().prepare()

    def describe(self, error: RequestRefused) -> dict[str, Any]:
        return {"detail": error.message}

    async def post(self, path: str = "") -> None:
        endpoint, raw = self.endpoint, bytes(self.body)
        if path == "forward_backward":
            if self.request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != PROTOBUF:
                raise RequestRefused(f"forward_backward takes {PROTOBUF}; use tinker 0.25 or later", status=422)
            try:
                self._submitted(endpoint.forward_backward(raw))
            except RequestRefused as error:
                model_id, seq, forward_only = numbered_forward_backward(raw)
                endpoint.skip(model_id, seq, "" if forward_only else error.message)
                raise
            return
        body = self._json(raw)
        if path in JSON_CALLS:
            self.finish(getattr(endpoint, JSON_CALLS[path])(body))
        elif path in FUTURES:
            try:
                self._submitted(getattr(endpoint, path)(body, raw))
            except RequestRefused:
                if isinstance(body.get("model_id"), str) and type(body.get("seq_id")) is int:
                    endpoint.skip(body["model_id"], body["seq_id"])
                raise
        elif path == "retrieve_future":
            await self._retrieve(field_of(body, "request_id", str, ""))
        elif path == "telemetry":
            self.finish({"status": "accepted"})
        elif match := re.fullmatch(r"sessions/([^/]+)/finish", path):
            endpoint.finish(match[1])
            self.finish({})
        elif path == "cancel_future":
            self.finish({})
        else:
            self._absent()

    def head(self, path: str = "") -> None:
        self.get(path)

    def get(self, path: str = "") -> None:
        endpoint = self.endpoint
        if path == "healthz":
            self.finish({"status": "ok"})
        elif path == "get_server_capabilities":
            self.finish(endpoint.capabilities())
        elif path == "client/dynamic_config":
            self.finish({})
        elif path == "checkpoints":
            self.finish(self._paged("checkpoints", endpoint.checkpoints(), 100))
        elif path == "sessions":
            self.finish({"sessions": self._paged("sessions", [*endpoint.sessions][::-1], 20)["sessions"]})
        elif match := re.fullmatch(r"sessions/([^/]+)", path):
            self.finish(endpoint.session(match[1]))
        elif path == "training_runs":
            self.finish(self._paged("training_runs", endpoint.training_runs(), 20))
        elif match := re.fullmatch(r"samplers/(.+)", path):
            self.finish(endpoint.sampler_info(match[1]))
        elif match := re.fullmatch(r"training_runs/([^/]+)", path):
            self.finish(endpoint.training_run(match[1]))
        elif match := re.fullmatch(r"training_runs/([^/]+)/checkpoints", path):
            self.finish({"checkpoints": endpoint.checkpoints(match[1])})
        elif (match := CHECKPOINT.fullmatch(path)) and match[4] == "/external_weights_urls":
            at = f"{self.request.protocol}://{self.request.host}"
            self.finish(endpoint.urls(at, *match.group(1, 2, 3)))
        elif match := re.fullmatch(r"files/([^/]+)/([^/]+)/([^/]+)/([\w.]+)", path):
            self._file(*match.groups())
        else:
            self._absent()

    def delete(self, path: str = "") -> None:
        if (match := CHECKPOINT.fullmatch(path)) and match[4] is None and match[2] in KINDS:
            self.finish(self.endpoint.delete_checkpoint(*match.group(1, 2, 3)))
        else:
            self._absent()

    def put(self, path: str = "") -> None:
        if (match := CHECKPOINT.fullmatch(path)) and match[4] == "/ttl" and match[2] in KINDS:
            expires = _expiry(self._json(bytes(self.body)))
            self.endpoint.store.expire(CheckpointPath(check_name(match[1]), match[2], check_name(match[3])), expires)
            self.finish({})
        else:
            self._absent()

    def _paged(self, name: str, items: list, most: int) -> dict[str, Any]:
        first, most = self._number("offset", 0), self._number("limit", most)
        cursor = {"offset": first, "limit": most, "total_count": len(items)}
        return {name: items[first : first + most], "cursor": cursor}

    def _number(self, name: str, default: int) -> int:
        text = self.get_query_argument(name, str(default))
        if not (text.isascii() and text.isdigit()) or len(text) > 9:
            raise RequestRefused(f"{name} = {text!r:.80}; must be a number from 0", name)
        return int(text)

    def _json(self, raw: bytes) -> dict[str, Any]:
        return read_body(raw or b"{}")

    def _file(self, model: str, kind: str, name: str, file: str) -> None:
        checkpoint = CheckpointPath.read(f"tinker://{model}/{kind}/{name}")
        self.endpoint.store.about(checkpoint)
        path = self.endpoint.store.folder(checkpoint) / file
        if not path.is_file():
            self._absent()
        self.set_header("Content-Type", "application/octet-stream")
        self.finish(path.read_bytes())

    def _absent(self) -> None:
        path = self.request.path.removeprefix("/api/v1/")
        for known, why in ABSENT.items():
            if re.fullmatch(known, path):
                raise RequestRefused(f"{self.request.method} {path:.200} is not served: {why}", status=404)
        raise RequestRefused(f"{self.request.method} {self.request.path:.200} is not served here", status=404)

    def _submitted(self, pending: Pending) -> None:
        self.finish({"request_id": pending.request_id} | pending.extra)

    async def _retrieve(self, request_id: str) -> None:
        pending = self.endpoint.pending(request_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(pending.done.wait(), HOLD_S)
        if not pending.done.is_set():
            self.set_status(408)
            self.finish(
                {"type": "try_again", "request_id": request_id, "queue_state": pending.queue_state}
                | REASONS.get(pending.queue_state, {})
            )
        elif isinstance(pending.result, bytes):
            self.set_header("Content-Type", PROTOBUF)
            self.finish(pending.result)
        else:
            self.finish(pending.result)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, HTTPError):
            super().log_exception(typ, value, tb)

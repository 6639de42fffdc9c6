"""The HTTP side: routes, who may ask, how much, and the way of a request through the sampling loop.

Tornado serves, since it is one package without dependencies and holds bodies, connections and streams to limits.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from http.client import responses
from typing import Any, Protocol

import numpy as np
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream, StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler, stream_request_body

from grpo_roc_jax.engine.steering import DrawSettings, RowSteering
from grpo_roc_jax.sandbox.http_guard import IDLE_S, LINGER_BYTES, LINGER_S, REQUEST_S, Connections, RequestHead, refusal
from grpo_roc_jax.serving.answer_formats import AnswerGrammars, GrammarMask
from grpo_roc_jax.serving.dialogues import Dialogues
from grpo_roc_jax.serving.messages import COUNT_TOKENS, MessagesReply, error_body
from grpo_roc_jax.serving.refusal import RequestRefused, read_body
from grpo_roc_jax.serving.replies import ChatReply, ReplyForm, SampledChoice, TextReply, TokenReply
from grpo_roc_jax.serving.responses import RememberedResponses, ResponsesReply
from grpo_roc_jax.serving.sampling_fields import stop_finder
from grpo_roc_jax.serving.sampling_loop import PLACES, SampleJob, SamplingLoop, sampled
from grpo_roc_jax.text.chat_format import ChatFormat

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "GRPO_SERVE_TOKEN"
"""Environment variable with the bearer token."""
AGENT_HEADER = "X-Agent"
"""Header with the name of who asks; without it the name is that of the model."""
RECENT = 1024
"""Requests whose times the metrics describe."""
UNFINISHED = ("infrastructure", "cancelled")
"""Stops of rows whose tokens are no answer."""
SAMPLING_FIELDS = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "bad_words",
))  # fmt: skip
"""What a session's own sampling replaces."""
NOT_APPLIED = "X-Not-Applied"
"""Header of an answer with the fields of the request that changed nothing."""
FORMS: tuple[type[ReplyForm], ...] = (ChatReply, ResponsesReply, MessagesReply, TextReply, TokenReply)
"""Each has a path of its own."""


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes on."""

    waiting: int = 512
    """Requests at a time; further ones get status 429."""
    connections: int = 1024
    """Connections at a time; a further one takes the place of the one that has waited longest without a request."""
    body_mb: int = 16
    """Largest body of a request."""
    per_minute: int = 0
    """Requests a minute for each key; 0 for no limit."""
    request_s: float = REQUEST_S
    """Seconds from the first byte of a request, or from the connection, to the end of its body."""
    stalled_s: float = 60.0
    """Seconds for which a client may take nothing of its stream before it counts as gone."""


class CallSession(Protocol):
    """A conversation that the server knows: its calls are sampled and recorded for training."""

    temperature: float | None
    step: int

    def place(self) -> int:
        """Number of the next call in the random keys.

        Raises:
            RequestRefused: The session takes no further call.
        """

    def record(self, choice: SampledChoice, answer: str, agent: str) -> None:
        """Notes an answer that was sent, by its id, and the name of who asked."""

    def refused(self, error: RequestRefused) -> None:
        """Notes that a call was answered with an error."""


@dataclass
class ServerCounts:
    """What `/metrics` reports."""

    requests: Counter[int] = field(default_factory=Counter)
    """Number of requests by HTTP status."""
    tokens: Counter[str] = field(default_factory=Counter)
    """`prompt`, `cached`, `missed` (of earlier turns, but not found in the cache) and `completion`."""
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds from the arrival of a request to its slot in the engine."""
    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds from the arrival of a request to its first token."""

    def lines(self, **gauges: float) -> str:
        """The text that Prometheus reads."""
        counts = {f'requests_total{{status="{status}"}}': n for status, n in sorted(self.requests.items())}
        counts |= {f"{name}_tokens_total": self.tokens[name] for name in ("prompt", "cached", "missed", "completion")}
        for name, values in (("waited", self.waited_s), ("first_token", self.first_s)):
            for share in (0.5, 0.99):
                if values:
                    counts[f'{name}_seconds{{quantile="{share}"}}'] = float(np.quantile(values, share))
        return "".join(f"grpo_roc_{name} {value}\n" for name, value in (counts | gauges).items())


class Endpoint:
    """A policy over HTTP. Everything here runs on the thread of the event loop, but for the sampling loop's."""

    def __init__(
        self,
        chat: ChatFormat,
        loop: SamplingLoop,
        *,
        name: str = "policy",
        token: str = "",
        limits: ServerLimits = ServerLimits(),
        enforce_formats: bool = True,
    ):
        """`enforce_formats`: whether answers are held to the form that a request names (`response_format`, `strict`);
        those of `sessions` never are, since they train the policy as it is."""
        self.chat, self.loop, self.name, self.token, self.limits = chat, loop, name, token, limits
        self.enforce_formats = enforce_formats
        self._grammars = AnswerGrammars(chat.tokenizer)
        self._announced: set[str] = set()
        self._ends = frozenset({*chat.stop_ids, chat.tokenizer.eos_id}) - ({chat.call_end_id} - {chat.end_id})
        """Ids that end an answer, which may not be drawn before `min_tokens`."""
        self.dialogues = Dialogues(chat.config, chat.tokenizer)
        self.counts = ServerCounts()
        self.running: set[SampleJob] = set()
        self.sessions: Mapping[str, CallSession] | None = None
        """Conversations that may ask; None for any."""
        self.connections: Connections[Any] | None = None
        """Open connections of the server that `server` made; None before."""
        self._remembered = RememberedResponses()
        self._number = 0
        self._allowance: dict[str, tuple[float, float]] = {}

    def admit(self, head: RequestHead, length: int) -> str:
        """The session that a key names, if it does: `TOKEN/SESSION`.

        Raises:
            RequestRefused: No right to ask, too large, or too many requests.
        """
        authorization = head.authorization
        size = len(f"Bearer {self.token}") if self.token else authorization.find("/")
        named = size >= 0 and authorization[size : size + 1] == "/"
        key, session = (authorization[:size], authorization[size + 1 :]) if named else (authorization, "")
        if (refused := refusal(replace(head, authorization=key), self.token, TOKEN_VARIABLE)) is not None:
            raise RequestRefused(refused[1], code="invalid_api_key" if refused[0] == 401 else None, status=refused[0])
        if length > self.limits.body_mb << 20:
            raise RequestRefused(f"a body of {length} bytes; must be at most {self.limits.body_mb} MiB", status=413)
        if self.limits.per_minute:
            now, rate = time.monotonic(), self.limits.per_minute / 60
            left, before = self._allowance.get(key, (float(self.limits.per_minute), now))
            left = min(float(self.limits.per_minute), left + rate * (now - before))
            if left < 1:
                raise RequestRefused("too many requests a minute; ask again later", code="rate_limit", status=429)
            if len(self._allowance) > RECENT:
                self._allowance.clear()
            self._allowance[key] = (left - 1, now)
        return session

    def form(self, path: str, body: dict[str, Any], session: str) -> ReplyForm:
        """The request of a body, checked."""
        replaced: set[str] = set()
        if self.sessions is not None:
            for fields in (body, body.get("sampling_params")):
                for name in SAMPLING_FIELDS & (fields or {}).keys() if isinstance(fields, dict | None) else ():
                    if fields.pop(name) is not None:
                        replaced.add(name)
        form = self._form(path, body, session)
        form.not_applied += sorted(replaced)
        if self.sessions is not None and form.fields.draw.top:  # the programs of a run are compiled once
            form.fields = replace(form.fields, draw=replace(form.fields.draw, top=0))
            form.not_applied.append("top_logprobs")
        if self.sessions is not None and form.fields.draw.bias:
            raise RequestRefused(
                "logit_bias is not supported while a policy trains: its tokens would not be the policy's; leave it out",
                "logit_bias",
                "unsupported",
            )
        return form

    def _form(self, path: str, body: dict[str, Any], session: str) -> ReplyForm:
        settings = (body, self.chat.tokenizer, self.loop.engine.programs.settings.sampling)
        talk = {"dialogues": self.dialogues, "session": session}
        if path == ChatReply.path:
            return ChatReply(*settings, **talk)
        if path == ResponsesReply.path:
            return ResponsesReply(*settings, **talk, remembered=self._remembered)
        if path in (MessagesReply.path, COUNT_TOKENS):
            return MessagesReply(*settings, **talk)
        return (TextReply if path == TextReply.path else TokenReply)(*settings, chat=self.chat)

    def session(self, name: str) -> CallSession | None:
        """The session of that name, where sessions are known."""
        if self.sessions is None:
            return None
        if (session := self.sessions.get(name)) is None:
            raise RequestRefused(f"no session {name!r:.80}; it ended, or the base URL names another", status=404)
        return session

    def forget(self, name: str) -> None:
        """A session has ended; thread-safe."""
        if isinstance(self.sessions, dict):
            self.sessions.pop(name, None)

    async def pieces(self, form: ReplyForm, session: CallSession | None) -> AsyncIterator[list[Any]]:
        """Samples what a form asks for: the pieces of its stream, of a chunk at a time."""
        arrived: asyncio.Queue[tuple[int, str, Any]] = asyncio.Queue()
        jobs = self._jobs(form, session, arrived)
        form.begin()
        begun = time.perf_counter()
        self.running |= set(jobs)
        for job in jobs:
            self.loop.submit(job)
        try:
            while not form.complete:
                events = [await arrived.get()]
                while not arrived.empty():
                    events.append(arrived.get_nowait())
                pieces: list[Any] = []
                for index, event, value in events:
                    pieces += self._pieces_of(form, form.choices[index], event, value, begun)
                    if event == "ended" and session is not None:
                        session.record(form.choices[index], form.id, form.agent)
                yield pieces
        finally:
            self.running -= set(jobs)
            if not form.complete:
                for job in jobs:
                    self.loop.cancel(job)
            usage, times = form.usage, self.counts
            times.tokens["prompt"] += usage["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            times.tokens["cached"] += cached
            times.tokens["missed"] += max(0, form.known - cached)
            times.tokens["completion"] += usage["completion_tokens"]

    def _pieces_of(
        self, form: ReplyForm, choice: SampledChoice, event: str, value: Any, begun_s: float
    ) -> Iterator[Any]:
        """The pieces that follow from an event of a choice; see `SampleJob.report`."""
        if event == "failed":
            raise RequestRefused(f"sampling failed: {value}", status=500)
        if event == "seated":
            choice.cached = value[0]
            self.counts.waited_s.append(value[1])
        elif event == "drawn":
            if not choice.ids:
                self.counts.first_s.append(time.perf_counter() - begun_s)
            yield from form.drawn(choice, value[0].tolist(), value[1].tolist())
        elif value.stop in UNFINISHED:
            raise RequestRefused(f"sampling ended early: {value.stop}", status=500)
        else:
            if fault := form.fault_of(choice):
                raise RequestRefused(f"the form of the answer could not be enforced: {fault}", status=500)
            choice.stop, choice.versions = value.stop, value.versions[sampled(value)]
            yield from form.ended(choice)

    def _jobs(self, form: ReplyForm, session: CallSession | None, arrived: Any) -> list[SampleJob]:
        if session is not None:
            form.fields = replace(form.fields, temperature=session.temperature)
        fields, jobs = form.fields, []
        if len(self.running) + len(form.prompts) > self.limits.waiting:
            raise RequestRefused("the server is busy; ask again later", code="overloaded", status=429)
        find_stop = stop_finder(self.chat.tokenizer, fields.stops)
        steering = self._steering(form)
        self._announce(form.not_applied)
        for i, prompt in enumerate(form.prompts):
            room = self.loop.budget(len(prompt))
            if room < 1:
                raise RequestRefused(
                    f"the request has {len(prompt)} tokens, which leaves no room in a context of {self.loop.room}; "
                    "shorten it, or raise rollout.max_prompt_tokens and max_response_tokens",
                    code="context_length_exceeded",
                )
            if int(prompt.max()) >= self.loop.engine.programs.model.vocab_size:
                raise RequestRefused("token ids outside the vocabulary; use the tokenizer of the model")
            self._number += 1
            seed = fields.seed if fields.seed is not None else self._number
            jobs.append(
                SampleJob(
                    prompt,
                    min(fields.max_tokens or room, room),
                    lambda event, sample, value, first=i * fields.count: arrived.put_nowait(
                        (first + sample, event, value)
                    ),
                    fields.count,
                    fields.temperature,
                    seed % PLACES if session is None else session.place(),
                    0 if session is None else session.step,
                    fields.stop_ids,
                    find_stop,
                    (lambda ids: True) if fields.ignore_eos else form.goes_on,
                    steering[i * fields.count : (i + 1) * fields.count],
                )
            )
        return jobs

    def _steering(self, form: ReplyForm) -> list[RowSteering]:
        """What the choices of a request ask of their draws; none for nothing."""
        count, draw = len(form.prompts) * form.fields.count, form.fields.draw
        draw = replace(draw, ends=draw.ends | self._ends) if draw.min_tokens else draw
        masks: list[GrammarMask] = []
        if params := form.format.params:
            if self.enforce_formats and self.sessions is None:
                if form.fields.ignore_eos:
                    raise RequestRefused(f"ignore_eos beside {params[0]}, which ends with its form", "ignore_eos")
                masks = form.masks(self._grammars)
            else:
                form.not_applied += params
        if not masks and draw == DrawSettings():
            return []
        prompts = [prompt for prompt in form.prompts for _ in range(form.fields.count)]
        form.steering = [RowSteering(draw, masks[i] if masks else None, prompts[i]) for i in range(count)]
        return form.steering

    def _announce(self, fields: Iterable[str]) -> None:
        """Says once of each field that it changes nothing."""
        for name in sorted(set(fields) - self._announced)[: RECENT - len(self._announced)]:
            self._announced.add(name)
            run = name in SAMPLING_FIELDS or name == "top_logprobs"
            why = "the sampling of the run holds" if run else "answers are not held to it"
            log.info("requests ask for %s, which changes nothing here: %s", name, why)

    def models(self) -> dict[str, Any]:
        """The answer of `/v1/models`."""
        version = self.loop.sampler.version
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "grpo_roc_jax"}
        return {"object": "list", "data": [model | {"max_model_len": self.loop.room, "policy_version": version}]}

    def metrics(self) -> str:
        """The answer of `/metrics`."""
        stats = self.loop.stats
        return self.counts.lines(
            running=len(self.running),
            policy_version=self.loop.sampler.version,
            prefilled_tokens_total=stats.prefilled_tokens,
            sampled_tokens_total=stats.sampled_tokens,
        )

    def server(self) -> HTTPServer:
        """A server of the routes, not listening yet."""
        session = r"(?:/s/(?P<session>[\w.~-]{1,200}))?"
        forms = "|".join([COUNT_TOKENS, *(form.path for form in FORMS)])
        state = {"endpoint": self}
        routes = [
            (rf"{session}(?P<path>{forms})", SamplingHandler, {"endpoint": self}),
            (rf"{session}(?P<path>/v1/models|/metrics|/health)(?:(?<=/models)/(?P<model>.+))?", StateHandler, state),
        ]
        app = Application(
            routes, default_handler_class=AbsentHandler, default_handler_args={"endpoint": self}, log_function=self._log
        )
        size = (self.limits.body_mb << 20) + 1
        server = LimitedServer(
            self.limits.connections,
            app,
            max_body_size=size,
            idle_connection_timeout=IDLE_S,
            body_timeout=self.limits.request_s,
        )
        self.connections = server.connections
        return server

    def _log(self, handler: RequestHandler) -> None:
        self.counts.requests[handler.get_status()] += 1
        log.debug("%s %s %d", handler.request.method, handler.request.path, handler.get_status())


class LimitedServer(HTTPServer):
    """A server with a bounded number of connections, whose first request must be let in soon."""

    def initialize(self, most: int, *arguments: Any, body_timeout: float, **settings: Any) -> None:
        super().initialize(*arguments, body_timeout=body_timeout, **settings)
        self._request_s = body_timeout
        self.connections: Connections[IOStream] = Connections(most)

    def handle_stream(self, stream: Any, address: Any) -> None:
        late = self.connections.open(stream)
        if late is not None:
            late.close()
        if late is not stream:
            asyncio.get_running_loop().call_later(self._request_s, self._end_silent, stream)
            super().handle_stream(stream, address)

    def on_close(self, server_conn: Any) -> None:
        super().on_close(server_conn)
        self.connections.close(server_conn.stream)

    def _end_silent(self, stream: Any) -> None:
        if self.connections.is_new(stream):
            stream.close()


@stream_request_body
class EndpointHandler(RequestHandler):
    """Refuses by the head of a request, before its body is read; errors have the form of OpenAI's."""

    def initialize(self, endpoint: Endpoint) -> None:
        self.endpoint, self.body = endpoint, bytearray()

    _stream: Any = None
    """Set by `prepare`, which a request with an unknown method does not reach."""
    _let_in = False
    """Whether the request was let in, so that its answer comes after its body was read."""

    async def prepare(self) -> None:
        headers, self._stream = self.request.headers, self.request.connection.stream
        if "X-Api-Key" in headers and "Authorization" not in headers:  # the clients of Anthropic's form
            headers["Authorization"] = f"Bearer {headers['X-Api-Key']}"
        length = headers.get("Content-Length", "0")
        size = int(length) if length.isdigit() and len(length) < 13 else 0
        try:
            head = RequestHead.read(self.request.method, headers.get_list)
            self.key_session = self.endpoint.admit(head, size)
            self.begin()
            self._let_in = True
        except RequestRefused as error:
            if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
                raise
            await self._refuse_unread(error)

    def begin(self) -> None:
        """The request is let in; `on_finish` frees its connection for others.

        Raises:
            RequestRefused: For what its path says.
        """
        if self.endpoint.connections is not None:
            self.endpoint.connections.begin(self._stream)

    def on_finish(self) -> None:
        if self.endpoint.connections is not None and self._stream is not None:
            self.endpoint.connections.end(self._stream)

    async def _refuse_unread(self, error: RequestRefused) -> None:
        """Answers before the body was read, then throws away what still comes: a connection that is closed with unread
        bytes is reset, and the client would not see the answer."""
        self._describe(error)
        content = json.dumps(self.describe(error)).encode()
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        self.set_header("Content-Length", len(content))
        self.set_header("Connection", "close")
        self.write(content)
        left = LINGER_BYTES
        with suppress(StreamClosedError, TimeoutError):
            await self.flush()
            self._stream.socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(LINGER_S):
                while left > 0:
                    left -= len(await self._stream.read_bytes(1 << 16, partial=True))
        self.finish()

    def data_received(self, chunk: bytes) -> None:
        self.body += chunk

    def set_default_headers(self) -> None:
        self.set_header("Server", "grpo-roc-jax")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None))[1]
        if not isinstance(error, RequestRefused):
            message = (
                error.log_message if isinstance(error, HTTPError) and error.log_message else responses[status_code]
            )
            error = RequestRefused(f"{self.request.method} {self.request.path:.200}: {message}", status=status_code)
        self._describe(error)
        if error.status == 405:
            absent = RequestHandler._unimplemented_method
            names = (name for name in self.SUPPORTED_METHODS if getattr(type(self), name.lower()) is not absent)
            self.set_header("Allow", ", ".join(names))
        if not self._let_in:
            self.set_header("Connection", "close")  # Tornado closes where an answer comes before its request was read
        self.finish(self.describe(error))

    def describe(self, error: RequestRefused) -> dict[str, Any]:
        """The body that tells an error."""
        return error_body(self.request.path, error)

    def _describe(self, error: RequestRefused) -> None:
        self.set_status(error.status)
        if error.status == 429:
            self.set_header("Retry-After", "1")

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, RequestRefused):
            super().log_exception(typ, value, tb)


class AbsentHandler(EndpointHandler):
    """Paths that are not served."""

    def begin(self) -> None:
        super().begin()
        raise RequestRefused(f"no such path: {self.request.path:.200}", status=404)


class StateHandler(EndpointHandler):
    """`/v1/models`, `/v1/models/NAME`, `/metrics`, `/health`."""

    def head(self, path: str, session: str | None = None, model: str | None = None) -> None:
        self.get(path, session, model)

    def get(self, path: str, session: str | None = None, model: str | None = None) -> None:
        if model is not None:
            known = {entry["id"]: entry for entry in self.endpoint.models()["data"]}
            if model not in known:
                names = ", ".join(known)
                raise RequestRefused(f"no model {model!r:.80}; there is {names}", "model", "model_not_found", 404)
            self.finish(known[model])
        elif path == "/metrics":
            self.set_header("Content-Type", "text/plain; version=0.0.4")
            self.finish(self.endpoint.metrics())
        else:
            self.finish(self.endpoint.models() if path == "/v1/models" else {"status": "ok"})


class SamplingHandler(EndpointHandler):
    """Requests that sample."""

    _work: asyncio.Task[None] | None = None

    async def post(self, path: str, session: str | None = None) -> None:
        body = read_body(bytes(self.body))
        name = session or self.key_session or self.request.headers.get("X-Session-ID", "")
        known = self.endpoint.session(name)
        try:
            form = self.endpoint.form(path, body, name)
            form.agent = self.request.headers.get(AGENT_HEADER) or form.model
            if path == COUNT_TOKENS:
                self.finish({"input_tokens": sum(map(len, form.prompts))})
                return
            self._work = asyncio.ensure_future(self._answer(form, known))
            await self._work
        except RequestRefused as error:
            if known is not None:
                known.refused(error)
            raise
        except (asyncio.CancelledError, StreamClosedError):  # the client has gone
            self.request.connection.stream.close()
            self.set_status(499, "Client Closed Request")

    async def _answer(self, form: ReplyForm, session: CallSession | None) -> None:
        if not form.fields.stream:
            async with aclosing(self.endpoint.pieces(form, session)) as stream:
                async for _ in stream:
                    pass
            self._say_not_applied(form)
            self.finish(form.whole())
            return
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-cache")
        try:
            async with aclosing(self.endpoint.pieces(form, session)) as stream:
                async for pieces in stream:
                    if not self._headers_written:
                        self._say_not_applied(form)
                    self._write(form, pieces)
                    if pieces and not form.complete:
                        await self._sent()
        except RequestRefused as error:
            if not self._headers_written:
                raise
            if session is not None:
                session.refused(error)
            self._write(form, [form.fault(error)])
        if form.complete:
            self._write(form, form.last_pieces())
        self.write(form.closing)
        self.finish()

    def _say_not_applied(self, form: ReplyForm) -> None:
        if form.not_applied:
            self.set_header(NOT_APPLIED, ", ".join(dict.fromkeys(form.not_applied)))

    def _write(self, form: ReplyForm, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            self.write(form.framed(piece))

    async def _sent(self) -> None:
        """Sends what was written, and waits until the client has room for more.

        Raises:
            StreamClosedError: It has gone, or had no room for too long.
        """
        sent = self.flush()
        if not sent.done():
            try:
                await asyncio.wait_for(sent, self.endpoint.limits.stalled_s)
            except TimeoutError as error:
                raise StreamClosedError from error

    def on_connection_close(self) -> None:
        if self._work is not None:
            self._work.cancel()


class ServerThread:
    """An endpoint that is served by a thread of its own until `close`."""

    def __init__(self, make: Callable[[Callable[..., Any]], Endpoint], host: str = "127.0.0.1", port: int = 0):
        """
        Args:
            make: Makes the endpoint, given what runs functions on the thread.
            host: Address to listen on.
            port: Port; 0 takes a free one.

        Raises:
            OSError: The address cannot be listened on.
        """
        self._io = asyncio.new_event_loop()
        self.endpoint = make(self._io.call_soon_threadsafe)
        self._thread = threading.Thread(target=self._io.run_forever, daemon=True, name="http")
        self._thread.start()
        self.sockets = bind_sockets(port, host)
        """The listening sockets."""
        self.port: int = self.sockets[0].getsockname()[1]
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._io).result()

    async def _listen(self) -> HTTPServer:
        server = self.endpoint.server()
        server.add_sockets(self.sockets)
        return server

    def close(self) -> None:
        """Closes all connections and ends the thread."""

        async def end() -> None:
            self._server.stop()
            await self._server.close_all_connections()

        asyncio.run_coroutine_threadsafe(end(), self._io).result()
        self._io.call_soon_threadsafe(self._io.stop)
        self._thread.join()

"""Processes that sample as one, because the model does not fit the devices of one of them.

A team is `Processes.together` consecutive processes. The first leads: it takes every decision. It sends each call of a
program to the others before it makes the call itself, so that all enqueue the same programs in the same order.
"""

import json
import logging
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

import jax

from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import Processes, ProcessLost
from grpo_roc_jax.process.points import reach

log = logging.getLogger(__name__)

MEET_S = 300
"""Seconds that the processes of a team wait for each other at the start."""
STRANGER_S = 10
"""Seconds that a connecting process may take to prove that it belongs to the team."""
POLL_S = 1.0
"""Seconds between two signs of life of a process that waits for calls."""


class Team:
    """The team of this process, with a connection from its leader to each of the others.

    Raises:
        ProcessLost: they did not meet within `MEET_S`.
    """

    def __init__(self, processes: Processes):
        self._processes, size = processes, processes.together
        self.leads = processes.index % size == 0
        self._leader = processes.index - processes.index % size
        key = f"grpo_roc_jax/team/{self._leader}"
        try:
            self._links = self._listen(key, size - 1) if self.leads else [self._connect(key)]
        except (OSError, EOFError, AuthenticationError, jax.errors.JaxRuntimeError) as error:
            raise ProcessLost(
                f"processes {self._leader} to {self._leader + size - 1}, which sample together, did not meet within "
                f"{MEET_S} s ({error}); each must reach the others by TCP on any port"
            ) from error

    def _listen(self, key: str, others: int) -> list[Connection]:
        secret, links = secrets.token_bytes(16), []
        with socket.create_server(("", 0)) as server:
            server.settimeout(MEET_S)
            names = [route_to(self._processes.service_address), socket.gethostname()]
            self._processes.service.key_value_set(key, json.dumps([names, server.getsockname()[1], secret.hex()]))
            while len(links) < others:
                accepted, _ = server.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STRANGER_S, 0))
                link = Connection(accepted.detach())
                with suppress(OSError, EOFError, AuthenticationError):  # of a stranger
                    deliver_challenge(link, secret)
                    answer_challenge(link, secret)
                    links.append(link)
        self._processes.service.key_value_delete(key)
        return links

    def _connect(self, key: str) -> Connection:
        names, port, secret = json.loads(self._processes.service.blocking_key_value_get(key, MEET_S * 1000))
        for name in names[:-1]:
            with suppress(OSError, EOFError, AuthenticationError):
                return Client((name, port), authkey=bytes.fromhex(secret))
        return Client((names[-1], port), authkey=bytes.fromhex(secret))

    def close(self) -> None:
        for link in self._links:
            link.close()

    @contextmanager
    def leading(self) -> Iterator[Callable[[Any], None]]:
        """Yields what sends a call to the others; they are done when the block ends. If it fails, they fail too."""
        try:
            yield self._send
        except Exception as error:
            with suppress(ProcessLost):
                self._send(f"process {self._leader} failed while it sampled: {error}")
            raise
        except Preempted:
            self._send(None)
            raise
        self._send(None)

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for link in self._links:
                link.send_bytes(data)
        except OSError as error:
            raise self._lost(error) from error

    def calls(self) -> Iterator[Any]:
        """The leader's calls, until it has sampled.

        Raises:
            ProcessLost: it has died or failed.
        """
        (link,) = self._links
        while True:
            try:
                while not link.poll(POLL_S):
                    reach("rollout.chunk")
                message = link.recv()
            except (EOFError, OSError) as error:
                raise self._lost(error) from error
            if message is None:
                return
            if isinstance(message, str):
                raise ProcessLost(message)
            reach("rollout.chunk")
            yield message

    def _lost(self, error: Exception) -> ProcessLost:
        missing = self._processes.missing() or f"all processes live, but a connection to process {self._leader} closed"
        lost = ProcessLost(f"{missing} ({type(error).__name__} while it sampled in a team)")
        log.error("%s", lost)
        return lost


def route_to(address: str) -> str:
    """The address of this machine on the way to HOST:PORT; no packet is sent."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))
        return probe.getsockname()[0]

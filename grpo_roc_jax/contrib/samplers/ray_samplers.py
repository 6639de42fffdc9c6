"""Samplers as Ray actors: on this machine alone, or on the nodes of a cluster.

An actor has the cores, GPUs or TPU chips that the configuration reserves. A version of the weights lies in the object
store once and is fetched by each node. An actor for which no node has room is pending: Ray starts it when a node joins.
Ray restarts no actor by itself; the pool replaces those that are lost. Needs the `ray` extra.
"""

import contextlib
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.settings.callables import import_file

STORE_BYTES = 200 << 20
"""Size of the object store on this machine alone, besides the weights: finished groups pass through it."""
VERSIONS = 3
"""Versions of the weights in the store at a time: the newest, one that samplers still read, and one more."""
CONNECT_S = 10.0
"""Seconds in which the cluster must answer."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Environment variables with which Ray on one machine listens on the loopback interface only, as it does on Windows and
macOS, and sends no statistics. It reads them when it is imported."""


class SamplerActor:
    """The part that runs in the actor's process."""

    def __init__(self, files: Sequence[str], make: Sequence[Any]):
        """
        Args:
            files: Files of the user that define kinds, without which the configuration cannot be read.
            make: Reference to what makes the sampler.
        """
        import ray

        for path in files:
            import_file(path)
        self._sampler = ray.get(make[0])()

    def deliver(self, orders: Any, weights: Any = None) -> None:
        """Passes orders on; Ray has fetched the weights."""
        self._sampler.deliver(orders, weights)

    def poll(self) -> Any:
        """The report of the sampler."""
        return self._sampler.poll()


class RayTransport:
    """Starts the actors, and carries orders and reports (`stream.samplers.Transport`)."""

    def __init__(self, settings: Any, make: Callable[[], Any], files: Sequence[str], weight_bytes: int):
        """
        Args:
            settings: `engine.config.RaySamplers`.
            make: Makes a `stream.samplers.RemoteSampler`; sent to each actor.
            files: Files of the user that define kinds.
            weight_bytes: Size of a version of the weights.

        Raises:
            ValueError: Ray is not installed, the cluster cannot be joined, or what is sent to actors cannot be
                pickled.
        """
        if not settings.address:
            for name, value in LOOPBACK.items():
                os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"rollout.samplers ray needs the package: {install_command('ray')}") from error
        self._ray, self._settings, self._files = ray, settings, tuple(files)
        self._actors: list[Any] = []
        self._sent: dict[Any, deque] = {}
        """Deliveries to each actor whose end is not known yet."""
        self.lost = (ray.exceptions.RayError,)
        self._starts_ray = not ray.is_initialized()
        if self._starts_ray:
            self._join(weight_bytes)
        kind = ray.remote(concurrency_groups={"orders": 1, "reports": 1})(SamplerActor)
        more = {"resources": {"TPU": settings.tpus}} if settings.tpus else {}
        self._kind = kind.options(num_cpus=settings.cpus, num_gpus=settings.gpus, max_restarts=0, **more)
        try:
            self._make = ray.put(make)
        except (TypeError, AttributeError) as error:
            self.close()
            raise ValueError(f"rollout.samplers ray: tools or functions cannot be sent to actors: {error}") from error

    def _join(self, weight_bytes: int) -> None:
        """Starts Ray on this machine, for this process, or joins a cluster."""
        settings, quiet = self._settings, {"log_to_driver": False, "logging_level": "error"}
        if not settings.address:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # its children execute other programs
                # As many cores as the actors reserve, however few the machine has: they share them with the trainer.
                self._ray.init(
                    include_dashboard=False,
                    num_cpus=max(os.cpu_count() or 1, int(settings.count * settings.cpus) + 1),
                    object_store_memory=STORE_BYTES + VERSIONS * weight_bytes,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
            return
        host, _, port = settings.address.rpartition(":")
        try:
            if port.isdigit() and "//" not in host:  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), CONNECT_S).close()
            self._ray.init(address=settings.address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"rollout.samplers.address = {settings.address}: no Ray cluster answers there ({error}); start one "
                "with `ray start --head`, or leave the address empty for Ray on this machine alone"
            ) from error

    def start(self) -> Any:
        actor = self._kind.remote(self._files, [self._make])
        self._actors.append(actor)
        self._sent[actor] = deque()
        return actor

    def put(self, weights: Any) -> Any:
        return self._ray.put(weights)

    def deliver(self, sampler: Any, orders: Any, weights: Any = None) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # `result` reports a lost actor
            call = sampler.deliver.options(concurrency_group="orders").remote(orders, weights)
            self._sent[sampler].append(call)

    def poll(self, sampler: Any) -> Any:
        return sampler, sampler.poll.options(concurrency_group="reports").remote()

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        over, _ = self._ray.wait([call for _, call in calls], num_returns=1, timeout=timeout_s)
        if over:
            over, _ = self._ray.wait([call for _, call in calls], num_returns=len(calls), timeout=0)
        return [call for call in calls if call[1] in over]

    def result(self, call: Any) -> Any:
        sampler, report = call
        try:
            sent = self._sent[sampler]
            delivered, _ = self._ray.wait(list(sent), num_returns=len(sent), timeout=0) if sent else ([], [])
            for reference in delivered:
                sent.remove(reference)
                self._ray.get(reference)
            return self._ray.get(report)
        except self._ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"a sampler could not follow its orders: {error}") from error

    def stop(self, sampler: Any) -> None:
        self._actors.remove(sampler)
        del self._sent[sampler]
        self._ray.kill(sampler)

    def close(self) -> None:
        for actor in list(self._actors):
            self.stop(actor)
        if self._starts_ray:
            self._ray.shutdown()

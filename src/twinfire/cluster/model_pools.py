"""One model of a cluster: its name and text, the pool of its workers, and who starts them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twinfire.artifacts.model_store import ResolvedModel
from twinfire.cluster.cluster_file import ModelTable
from twinfire.cluster.supervisor import Supervisor
from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.cluster_metrics import ClusterMetrics
from twinfire.gateway.hosted_model import HostedModel
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.routing.router import Router
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.text.answer_formats import ParserChoice
from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.worker_config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the pools of a cluster share."""

    routing: RoutingSettings
    hash_seed: bytes
    base: WorkerConfig
    """Of every worker, but for what its model and pool say."""
    folder: Path
    """For sockets."""
    kv_share_bytes: int
    """Of a worker that is not told how much KV memory to take."""


class ModelPools:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        table: ModelTable,
        resolved: ResolvedModel,
        around: Surroundings,
        number: int | None = None,
    ) -> None:
        """With a `number`, workers and their sockets have the model in their names."""
        self._path = resolved.path
        router = Router(asyncio.get_running_loop().time, around.routing)
        self.backend = ClusterBackend(resolved.served_name, router, around.hash_seed)
        names = table.names or (resolved.served_name,)
        folder, prefix = around.folder, ""
        if number is not None:
            # Names may be long, and the paths of sockets may not.
            folder = folder / str(number)
            folder.mkdir()
            prefix = names[0].replace("/", "-") + "."
        parsers = ParserChoice(table.tool_parser, table.reasoning_parser)
        served = ServedModel(names, parsers=parsers)
        self.hosted = HostedModel(served, self.backend, Metrics(names[0]))
        self.supervisor = Supervisor(
            table,
            worker_config(around.base, table, resolved),
            self.backend.registry,
            folder,
            kv_share_bytes=around.kv_share_bytes,
            prefix=prefix,
        )
        metrics = self.hosted.metrics
        self.backend.registry.report_to(metrics.observe_load, metrics.forget_worker)
        metrics.include(ClusterMetrics(names[0], self.backend, self.supervisor.name_of))

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.hosted.model.names

    async def start(self) -> None:
        """Start the workers; they join when they are ready."""
        self.backend.start()
        await self.supervisor.start()

    async def wait_ready(self) -> None:
        """Return when the model can be served in full; TwinfireError when it never can."""
        model = self.hosted.model
        await model.load_text(self._path)
        if model.load_error is not None:
            raise TwinfireError(model.load_error)
        await self.supervisor.wait_ready()


def worker_config(base: WorkerConfig, table: ModelTable, resolved: ResolvedModel) -> WorkerConfig:
    """Return what every worker of a model is told."""
    return msgspec.structs.replace(
        base,
        model_path=str(resolved.path),
        served_name=resolved.served_name,
        dtype=table.dtype,
        quantization=table.quantization,
        kv_cache_dtype=table.kv_cache_dtype,
        speculate=table.speculate,
        device=table.device,
        max_model_len=table.max_model_len,
        connector=table.connector,
    )

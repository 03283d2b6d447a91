"""A real server on a loopback socket, in a thread of its own, over a scripted backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

from support.byte_tokenizer import EOS_ID, VOCAB_SIZE, ByteTokenizer, plain_template
from support.scripted_backend import ScriptedBackend
from twinfire.artifacts.model_config import ModelConfig
from twinfire.gateway.app import create_app, gateway_of
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.listening import bind_socket
from twinfire.gateway.served_model import ServedModel, TextSide
from twinfire.gateway.server import GatewayServer
from twinfire.gateway.settings import GatewaySettings

MODEL = "tiny"
ALIAS = "org/tiny-alias"
T = TypeVar("T")


def tiny_config() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position=512,
        eos_token_ids=(EOS_ID,),
    )


def byte_text_side() -> TextSide:
    return TextSide.load(ByteTokenizer(), plain_template(), tiny_config())


class RunningGateway:
    """Handles to a server that runs on another thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, server: GatewayServer, backend: ScriptedBackend
    ) -> None:
        self.loop = loop
        self.server = server
        self.backend = backend
        self.host, self.port = server.address

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def run(self, coroutine: Coroutine[object, object, T], timeout_s: float = 10) -> T:
        """Await on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)


@contextmanager
def running_gateway(
    settings: GatewaySettings | None = None,
    make_backend: Callable[[], ScriptedBackend] = ScriptedBackend,
    text: TextSide | None = None,
    adjust: Callable[[Gateway], None] | None = None,
) -> Iterator[RunningGateway]:
    started: list[RunningGateway] = []
    ready = threading.Event()

    async def main() -> None:
        backend = make_backend()
        model = ServedModel((MODEL, ALIAS), text or byte_text_side())
        app = create_app(settings or GatewaySettings(), backend, model)
        if adjust is not None:
            adjust(gateway_of(app))
        server = GatewayServer(app, bind_socket("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve())
        await server.started.wait()
        started.append(RunningGateway(asyncio.get_running_loop(), server, backend))
        ready.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(20), "the server did not start"
    gateway = started[0]
    try:
        yield gateway
    finally:
        if thread.is_alive():
            gateway.stop()
            gateway.stop()
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"

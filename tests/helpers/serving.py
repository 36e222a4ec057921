"""A server of its own for a test, in a thread, with the limits that the test is about."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from weft.run.predictor import load
from weft.serve.app import make_app
from weft.serve.models import ServedModel
from weft.serve.samples import Samples
from weft.serve.server import address_of, listen, make_server
from weft.serve.service import Service
from weft.serve.settings import ServeSettings


@dataclass
class Served:
    """A running server: its address, its insides, and a client."""

    url: str
    service: Service
    client: httpx.Client
    server: Any
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def predict(self, data: bytes, **params: Any) -> httpx.Response:
        return self.client.post("/predict", content=data, params=params)

    def raw(self, *parts: bytes, timeout: float = 10) -> bytes:
        """Sends bytes as they are; returns all that comes back until the server closes, or nothing more comes."""
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=timeout)) as connection:
            for part in parts:
                connection.sendall(part)
            answer = b""
            while more := connection.recv(65536):
                answer += more
        return answer


def models_of(*folders: Path) -> list[ServedModel]:
    return [ServedModel(folder.name, load(folder, "cpu")) for folder in folders]


@contextmanager
def serving(
    models: Sequence[ServedModel], samples: Samples | None = None, port: int = 0, **limits: Any
) -> Iterator[Served]:
    settings = ServeSettings(**{"decoders": 1, "port": port, **limits})
    settings.check()
    service, started = Service(models, settings), threading.Event()
    listening = listen(settings.host, port)
    server = make_server(make_app(service, samples or Samples()), service, started.set)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(180)
    url = address_of(listening)
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            yield Served(url, service, client, server, loops[0])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def form(*files: tuple[str, bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("picture", file) for file in files]

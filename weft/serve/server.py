"""`weft serve`: models on an address, until somebody stops it."""

import logging
import signal
import socket
import sys
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.errors import WeftError
from weft.serve.app import make_app
from weft.serve.decoders import prepare_processes
from weft.serve.models import DEMO, ServedModel, open_models
from weft.serve.samples import Samples, fashion_samples
from weft.serve.service import Service
from weft.serve.settings import ServeSettings

LARGEST_HEAD = 64 * 1024  # bytes of a request's first line and headers
IDLE = 15  # seconds that a connection may rest between two requests
SHARE = 0.0005  # seconds that one thread keeps the others waiting: connections must not starve the model
LATER = 1.0  # seconds after which a slow client that was not told so is cut off


def serve(
    places: Sequence[str],
    settings: ServeSettings,
    device: str = "auto",
    on_start: Callable[[list[ServedModel], str], None] = lambda models, address: None,
) -> None:
    """Serves models until SIGINT or SIGTERM; requests under way are finished first.

    `on_start` is told the models and the address, once they are ready.
    """
    settings.check()
    listening = listen(settings.host, settings.port)  # before the models: a taken port is said at once
    prepare_processes()
    models = open_models(places, device)
    samples = fashion_samples() if any(model.name == DEMO for model in models) else Samples()
    app = make_app(Service(models, settings), samples)
    server = make_server(app, settings, lambda: on_start(models, address_of(listening)))
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it has a warning for every form that is broken
    for one in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(one, lambda *_: None)
    sys.setswitchinterval(SHARE)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that goes away is no reason to end
    try:
        server.run(sockets=[listening])
    except SystemExit:  # uvicorn's, where the application did not start
        why = getattr(app.state, "failure", None)
        line = (str(why).splitlines() or [type(why).__name__])[0]
        raise WeftError(f"The models cannot be served: {line}") from why


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address; raises OSError, with the address, where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def make_server(app: Any, settings: ServeSettings, on_start: Callable[[], None]) -> uvicorn.Server:
    """uvicorn, with patience that has an end."""

    class Told(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

    class Patient(PatientProtocol):
        patience = settings.seconds + LATER
        most = max(256, 4 * settings.queue)

    config = uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        lifespan="on",
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=int(settings.seconds) + 1,
        backlog=max(256, 2 * settings.queue),
    )
    return Told(config)


class PatientProtocol(HttpToolsProtocol):
    """A connection whose requests must arrive within `patience` seconds, with little besides their bodies.

    A client that is refused while it still sends may go on for as long, so that it gets to read why.
    """

    patience = 30.0
    most = 256  # connections at once

    def connection_made(self, transport: Transport) -> None:
        self._timer: TimerHandle | None = None
        self._in_head, self._bare, self._body = True, 0, 0
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Heads, the marks between the chunks of a body, and trailers are bounded; so is the time that all may take."""
        self._bare += len(data)
        super().data_received(data)
        if self._bare > LARGEST_HEAD + self._body:
            self.transport.abort()
        elif self.cycle is None or self.cycle.response_complete:
            self._watch()  # blank lines between requests, which end the patience of the class above, too

    def on_body(self, body: bytes) -> None:
        self._bare -= len(body)
        self._body += len(body)
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are nobody's
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        self._in_head, self._bare, self._body = True, 0, 0
        self._watch()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unwatch()
        super().on_message_complete()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.patience, self.transport.abort)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""`weft serve`: models on an address, until somebody stops it."""

import gc
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from weft.errors import WeftError
from weft.serve.app import make_app
from weft.serve.decoders import prepare_processes
from weft.serve.models import DEMO, ServedModel, open_models
from weft.serve.protocol import PatientProtocol
from weft.serve.samples import Samples, fashion_samples
from weft.serve.service import Service
from weft.serve.settings import ServeSettings
from weft.threads import torch_threads

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
    os.environ.pop("WEFT_TOKEN", None)  # the processes that decode what strangers send need not have it
    prepare_processes()
    # Where torch has more threads than there are cores, GNU's OpenMP has them sleep whenever they wait for each other,
    # and a small model takes three times as long: so those of the thread that computes are to be the only ones.
    with torch_threads(1):
        models = open_models(places, device)
    samples = fashion_samples() if any(model.name == DEMO for model in models) else Samples()
    service = Service(models, settings)
    app = make_app(service, samples)

    def begin() -> None:
        leave_to_live()
        on_start(models, address_of(listening))

    server = make_server(app, service, begin)
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
    finally:
        gc.unfreeze()  # what is frozen is not freed as Python ends, and libraries report it as leaked


def leave_to_live() -> None:
    """Has the collector of garbage pass over all that is there: looking at modules and models takes it a quarter of a
    second, during which nobody is answered.
    """
    gc.collect()
    gc.freeze()


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


def make_server(app: Any, service: Service, on_start: Callable[[], None]) -> uvicorn.Server:
    """uvicorn, with patience that has an end."""
    settings = service.settings

    class Told(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

    class Patient(PatientProtocol):
        patience = settings.seconds + LATER
        most = max(256, 4 * settings.queue)
        admission, metrics = service.admission, service.metrics

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
        timeout_graceful_shutdown=math.ceil(2 * settings.seconds + LATER),  # to arrive, and to be answered
        backlog=max(256, 2 * settings.queue),
    )
    return Told(config)

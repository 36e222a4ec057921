"""A connection: its patience with slow clients, and what is told before anybody is asked."""

import json
import secrets
from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from weft.serve.admission import Admission
from weft.serve.guard import HEADERS, PICTURES
from weft.serve.metrics import ServeMetrics
from weft.serve.refusal import Refusal

LARGEST_HEAD = 64 * 1024  # bytes of a request's first line and headers
REST = 0.25  # seconds until one who was refused is heard again: refusing those who come at once must not take all time
CROWDED = Refusal(503, "There are too many connections; come again in 5 s.", retry_after=5)


class PatientProtocol(HttpToolsProtocol):
    """A connection whose requests must arrive within `patience` seconds, with little besides their bodies.

    A client that is refused while it still sends may go on for as long, so that it gets to read why. One that reads
    nothing of its answer for as long is cut off. Where the house is full the application is not even asked: so a
    refusal costs little, whatever the number of those who come again at once.
    """

    patience = 30.0
    most = 256  # connections at once
    parser: Any  # of httptools, until the connection is lost
    admission: Admission
    metrics: ServeMetrics

    def connection_made(self, transport: Transport) -> None:
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None
        self._in_head, self._refused, self._bare, self._body = True, False, 0, 0
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` is called as soon as anything waits to be read
        self._watch()
        if len(self.connections) > self.most:
            self.metrics.cut.labels("crowded").inc()
            self._tell(CROWDED, keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unwatch_reader()
        super().connection_lost(exc)

    # What comes in ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Heads, the marks between the chunks of a body, and trailers are bounded; so is the time that all may take."""
        self._bare += len(data)
        super().data_received(data)
        if self._bare > LARGEST_HEAD + self._body:
            self._cut("endless")
        elif self.cycle is None or self.cycle.response_complete:
            self._watch()  # blank lines between requests, which end the patience of the class above, too

    def on_message_begin(self) -> None:
        self._in_head, self._refused, self._bare, self._body = True, False, 0, 0
        self._watch()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are nobody's
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        path = self.url.partition(b"?")[0].decode("latin-1")
        is_next = self.cycle is None or self.cycle.response_complete
        if self.admission.is_full and is_next and path in PICTURES and self.parser.get_method() == b"POST":
            self._refused = True
            self.metrics.requests.labels(path, "503").inc()
            self._tell(self.admission.full(), keep=self.parser.should_keep_alive() and not self.expect_100_continue)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bare -= len(body)
        self._body += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unwatch()
        if self._refused:
            self.on_response_complete()
            self.flow.pause_reading()
            self.loop.call_later(REST, self._read_on)
        else:
            super().on_message_complete()

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.patience, self._cut, "slow")

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What goes out ----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_reader()

    def _watch_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.patience, self._check_reader, waiting)

    def _check_reader(self, waiting: int) -> None:
        """Nothing is added to what waits to be read, so it becomes less where there is a reader."""
        if self.transport.get_write_buffer_size() < waiting:
            self._watch_reader()
        else:
            self._cut("unread")

    def _unwatch_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _tell(self, refusal: Refusal, *, keep: bool) -> None:
        """Answers without the application, in the words and with the headers that it has."""
        number = secrets.token_hex(4)
        body = json.dumps({"error": refusal.line, "id": number}).encode()
        own = {"retry-after": refusal.retry_after, "x-request-id": number, **HEADERS}
        own |= {"content-type": "application/json", "content-length": len(body)} | (
            {} if keep else {"connection": "close"}
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in own.items()).encode()
        self.transport.write(STATUS_LINE[refusal.status] + head + b"\r\n" + body)
        if not keep:
            self.transport.close()

    def _cut(self, why: str) -> None:
        self.metrics.cut.labels(why).inc()
        self.transport.abort()

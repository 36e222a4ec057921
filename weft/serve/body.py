"""The body of a request, read with limits while it arrives: a picture as it is, or a form with several."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import python_multipart
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from weft.serve.admission import Visit
from weft.serve.refusal import Refusal

LONGEST_NAME = 255
MOST_HEADERS = 16 * 1024  # bytes in the headers of a part
MOST_FIELDS = 16  # parts of a form beside its pictures
AT_ONCE = 16 * 1024  # bytes of a form that are parsed before others have their turn


@dataclass(frozen=True)
class Upload:
    name: str
    data: bytes


async def read_uploads(request: Request, visit: Visit, *, max_bytes: int, seconds: float) -> list[Upload]:
    """The pictures of a request; raises Refusal where it is too large, too slow, or no form as its headers say."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(seconds):
            if kind == b"multipart/form-data":
                form = _Form(visit.house.most_pictures)
                await form.read(_limited(request, visit, max_bytes), options.get(b"boundary", b""))
                uploads = form.uploads
            else:
                data = b"".join([chunk async for chunk in _limited(request, visit, max_bytes)])
                uploads = [Upload(_short(request.query_params.get("name", "")) or "picture", data)]
    except TimeoutError:
        raise Refusal(408, f"The request did not arrive within {seconds:g} seconds.") from None
    if not any(upload.data for upload in uploads):
        raise Refusal(400, "There is no picture in the request; send its bytes, or a form with files.")
    visit.add_pictures(len(uploads))
    return uploads


async def _limited(request: Request, visit: Visit, most: int) -> AsyncIterator[bytes]:
    """The parts of the body as they come. What the headers say is believed only where it is too much."""
    too_much = Refusal(413, f"The request is larger than {most / 2**20:.3g} MB, the most that is taken.")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise too_much
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "The client went away.")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise too_much
        visit.add_bytes(len(chunk))
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


class _Form:
    """Collects the files of a form, `most` at most; some fields without a file name are passed over."""

    def __init__(self, most: int) -> None:
        self.most, self.uploads, self.ended = most, list[Upload](), False
        self._parts = self._files = self._head = 0  # parts and files that have begun, bytes in the headers of a part
        self._headers: dict[bytes, bytes] = {}
        self._name: bytes | None = None  # of the part's file, where it is one
        self._field, self._value, self._data = bytearray(), bytearray(), bytearray()

    async def read(self, chunks: AsyncIterator[bytes], boundary: bytes) -> None:
        """Takes what comes a little at a time: a form can be made to be slow, and others wait meanwhile."""
        if not boundary:
            raise Refusal(400, "The form has no boundary.")
        try:
            parser = python_multipart.MultipartParser(boundary, self._callbacks())
            async for chunk in chunks:
                for start in range(0, len(chunk), AT_ONCE):
                    parser.write(chunk[start : start + AT_ONCE])
                    await asyncio.sleep(0)
            parser.finalize()
        except (FormParserError, UnicodeDecodeError, ValueError):
            raise Refusal(400, "The form cannot be read.") from None
        if not self.ended:
            raise Refusal(400, "The form ends too early.")

    def _callbacks(self) -> Any:  # as python_multipart calls them
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "end")
        return {f"on_{name}": getattr(self, name) for name in (*names, "headers_finished")}

    def part_begin(self) -> None:
        self._parts += 1
        if self._parts > self.most + MOST_FIELDS:
            raise self._too_many()
        self._headers, self._data, self._head = {}, bytearray(), 0

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"filename")
        self._files += self._name is not None
        if self._files > self.most:
            raise self._too_many()

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None:
            self._data += data[start:end]

    def part_end(self) -> None:
        if self._name is not None:
            name = self._name.decode("utf-8", "replace")
            self.uploads.append(Upload(_short(name) or f"picture {len(self.uploads) + 1}", bytes(self._data)))
        self._data = bytearray()

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._check(end - start)

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check(end - start)

    def header_end(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def end(self) -> None:
        self.ended = True

    def _too_many(self) -> Refusal:
        return Refusal(413, f"The form has too many parts; at most {self.most} pictures are taken at once.")

    def _check(self, more: int) -> None:
        self._head += more
        if self._head > MOST_HEADERS:
            raise Refusal(400, "The form cannot be read.")


def _short(name: str) -> str:
    """A file's name for the answer, never for a file: without folders, printable, not too long."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:LONGEST_NAME]

"""Pictures are decoded in processes of their own: what a hostile file does to one of them, the server survives.

Each process has a socket to the server. A question is the number of a way to see pictures and the bytes of a file; the
answer is a line of JSON and pixels. A process that ends, or takes too long, is replaced by a new one.
"""

import asyncio
import json
import logging
import math
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.preprocessing import Preprocessing
from weft.data.read import BadPicture, Header, OpenedPicture, UnknownFormat, header
from weft.serve.refusal import Refusal
from weft.words import clean

ASK, ANSWER = struct.Struct("<IQ"), struct.Struct("<IQ")  # way and bytes; bytes of JSON and of pixels
TRIES = 2  # processes that may end over a picture before it is to blame
START = 120.0  # seconds for a process to say hello, imports included
SPARE = 768 * 2**20  # bytes that a process may take beyond what it has at its start, and
PER_PIXEL = 24  # for each pixel that is allowed
STEP = 5  # of a priority, from 0 to 19
DARK = 1 / 16  # of white: all that values of 12 bits reach in a file of 16
log = logging.getLogger("weft.serve")


@dataclass(frozen=True)
class PictureWay:
    """How a model wants its pictures."""

    preprocessing: Preprocessing
    sized: bool  # whether the answer is about places, so that the picture's own size matters
    max_pixels: int  # of the picture
    seen_pixels: int  # that the model looks at; a larger picture is shrunk

    def preprocessing_of(self, seen: Header) -> Preprocessing:
        """The model's own, or one that shrinks a picture of which the model would see too many pixels."""
        height, width = self.preprocessing.fitted(seen.height, seen.width)
        if self.preprocessing.crop_mode != "fit" or height * width <= self.seen_pixels:
            return self.preprocessing
        part = math.sqrt(self.seen_pixels / (height * width))
        short, long = (max(1, math.floor(part * side)) for side in sorted((height, width)))
        return replace(self.preprocessing, size=(short, long))


@dataclass(frozen=True)
class DecodedPicture:
    pixels: Tensor  # (C, h, w), as `Preprocessing.picture` gives it
    size: tuple[int, int] | None  # upright height and width in the file
    notes: tuple[str, ...]  # on what the file has and nobody would expect


# In the processes ---------------------------------------------------------------------------------------------------


def decode_for_ever(own: socket.socket, ways: Sequence[PictureWay]) -> None:
    """The life of a decoding process: it ends when the server's end of the socket is closed."""
    for one in (signal.SIGINT, signal.SIGTERM):  # the server decides when: requests under way are finished
        signal.signal(one, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries complain there about every damaged file
    torch.set_num_threads(1)
    step_back()
    _limit_memory(max(way.max_pixels for way in ways))
    with own, own.makefile("rb") as questions:
        own.sendall(ANSWER.pack(0, 0))  # hello
        while len(asked := questions.read(ASK.size)) == ASK.size:
            way, length = ASK.unpack(asked)
            found, pixels = _decode(questions.read(length), ways[way])
            text = json.dumps(found).encode()
            own.sendall(ANSWER.pack(len(text), len(pixels)) + text)
            own.sendall(pixels)


def step_back() -> None:
    """Lets connections go before the thread that calls: on Linux each thread has a priority of its own."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + STEP))


def _limit_memory(max_pixels: int) -> None:
    """A file that wants more gets a MemoryError, and a line that says so."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = now + SPARE + PER_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _decode(data: bytes, way: PictureWay) -> tuple[dict[str, Any], bytes]:
    try:
        with OpenedPicture(data, way.max_pixels):
            pass  # before anything else: the limits
        seen = header(data)
        preprocessing = way.preprocessing_of(seen)
        pixels = preprocessing.picture(data).numpy()
    except UnknownFormat as error:
        return {"status": 415, "error": str(error)}, b""
    except BadPicture as error:
        return {"status": 422, "error": str(error).replace("data.max_pixels=", "the limit of ")}, b""
    except Exception as error:
        detail = f"while decoding a picture of {len(data)} bytes: {type(error).__name__}: {error}"
        return {"status": 422, "error": "it cannot be decoded", "detail": detail}, b""
    notes = notes_on(seen)
    if seen.depth == 16 and 0 < pixels.max() <= (DARK if pixels.dtype.kind == "f" else 255 * DARK):
        notes.append("its values are small for 16 bits, perhaps those of 12: the model saw it nearly black")
    if preprocessing is not way.preprocessing:
        notes.append(f"the model saw it as {pixels.shape[2]} x {pixels.shape[1]} pixels")
    found = {"shape": pixels.shape, "dtype": pixels.dtype.name, "notes": notes}
    found["size"] = [seen.height, seen.width] if way.sized else None
    return found, pixels.tobytes()


def notes_on(seen: Header) -> list[str]:
    """Facts about a file that change its answer without showing."""
    notes = []
    if seen.frames > 1:
        notes.append(f"the first of {seen.frames} frames")
    if seen.profile:
        notes.append(f"its colour profile ({seen.profile}) is not sRGB and was not converted")
    if seen.orientation != 1:
        notes.append("turned upright as its EXIF data say")
    return notes


# In the server --------------------------------------------------------------------------------------------------------


class _DecodingProcess:
    """One process and the server's end of its socket."""

    process: BaseProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def start(self, ways: Sequence[PictureWay]) -> None:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
        arguments = (theirs, tuple(ways))
        self.process = context.Process(target=decode_for_ever, args=arguments, daemon=True)
        await asyncio.to_thread(self.process.start)
        self._kill = Finalize(None, self.process.kill, exitpriority=1)  # also where the server ends by an error
        theirs.close()
        connect = getattr(asyncio, "open_unix_connection", asyncio.open_connection)
        self.reader, self.writer = await connect(sock=ours)
        async with asyncio.timeout(START):
            await self.reader.readexactly(ANSWER.size)

    async def ask(self, way: int, data: bytes) -> tuple[dict[str, Any], bytes]:
        self.writer.write(ASK.pack(way, len(data)))
        self.writer.write(data)
        await self.writer.drain()
        text, pixels = ANSWER.unpack(await self.reader.readexactly(ANSWER.size))
        return json.loads(await self.reader.readexactly(text)), await self.reader.readexactly(pixels)

    def end(self) -> None:
        self.writer.close()
        self._kill()


class DecoderPool:
    """The decoding processes; a picture waits for a free one."""

    def __init__(self, ways: Sequence[PictureWay], *, count: int, seconds: float) -> None:
        self.ways, self.count, self.seconds = ways, count, seconds
        self.ended = 0  # processes that had to be replaced
        self._all: list[_DecodingProcess] = []
        self._free: asyncio.LifoQueue[_DecodingProcess] = asyncio.LifoQueue()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._all = [_DecodingProcess() for _ in range(self.count)]
        await asyncio.gather(*(decoder.start(self.ways) for decoder in self._all))
        for decoder in self._all:
            self._free.put_nowait(decoder)

    @property
    def pids(self) -> list[int]:
        return [decoder.process.pid or 0 for decoder in self._all]

    @property
    def alive(self) -> bool:
        return any(decoder.process.is_alive() for decoder in self._all)

    async def decode(self, way: int, data: bytes) -> DecodedPicture:
        """The picture as the way `way` sees it; raises Refusal."""
        decoder = await self._free.get()
        # The process finishes what it has begun even where nobody waits any more, else its next answer were this one.
        task = asyncio.create_task(self._with(decoder, way, data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        found, pixels = await asyncio.shield(task)
        if "detail" in found:
            log.warning("%s", clean(found["detail"]))
        if "error" in found:
            raise Refusal(found["status"], found["error"])
        values = np.frombuffer(bytearray(pixels), found["dtype"]).reshape(found["shape"])
        size = None if found["size"] is None else (found["size"][0], found["size"][1])
        return DecodedPicture(torch.from_numpy(values), size, tuple(found["notes"]))

    async def _with(self, decoder: _DecodingProcess, way: int, data: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            for _ in range(TRIES):
                try:
                    async with asyncio.timeout(self.seconds):
                        return await decoder.ask(way, data)
                except TimeoutError:
                    await self._replace(decoder)
                    return {"status": 422, "error": f"decoding it takes more than {self.seconds:g} seconds"}, b""
                except (OSError, EOFError):  # the process has ended, perhaps long before this picture came
                    await self._replace(decoder)
            return {"status": 422, "error": "it ends every process that decodes it"}, b""
        finally:
            self._free.put_nowait(decoder)

    async def _replace(self, decoder: _DecodingProcess) -> None:
        self.ended += 1
        with suppress(AssertionError):  # of one that could not even be started
            decoder.end()
            await asyncio.to_thread(decoder.process.join)
        try:
            await decoder.start(self.ways)
        except (OSError, EOFError, TimeoutError) as error:  # the next picture that it gets has it tried again
            log.warning("a decoding process cannot be started: %s", error)
            raise Refusal(503, "Pictures cannot be decoded just now.", retry_after=5) from None

    async def stop(self) -> None:
        for decoder in self._all:
            decoder.end()
        for decoder in self._all:
            with suppress(ValueError):
                await asyncio.to_thread(decoder.process.join, 5)


def prepare_processes() -> None:
    """Has the modules imported once, by the process that all decoders are forked from."""
    if sys.platform != "win32":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["weft.serve.decoders"])
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # of threads that come and go, glibc would keep memory for each

"""A picture's way through the server: let in, decoded in a process, looked at in a batch, put into words."""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from weft.serve.admission import Admission, Visit
from weft.serve.batcher import Batcher
from weft.serve.body import Upload
from weft.serve.decoders import DecodedPicture, DecoderPool, step_back
from weft.serve.metrics import ServeMetrics
from weft.serve.models import ServedModel
from weft.serve.refusal import Refusal
from weft.serve.settings import ServeSettings

WORDING = 2  # threads that draw masks and outlines


class Service:
    """The models, the processes that decode for them, and the one thread in which they compute."""

    def __init__(self, models: Sequence[ServedModel], settings: ServeSettings) -> None:
        self.models, self.settings, self.metrics = {model.name: model for model in models}, settings, ServeMetrics()
        self.admission = Admission(settings.queue, settings.max_house_bytes)
        self.decoders = DecoderPool(
            [model.way(settings) for model in models],
            count=settings.processes,
            seconds=settings.decode_seconds,
        )
        self.ways = {model.name: number for number, model in enumerate(models)}
        # One thread, whatever the number of models: they would only take the device from each other.
        self.computing = ThreadPoolExecutor(1, "weft-compute", initializer=step_back)
        # What is drawn as large as its picture takes memory, so there is little of it at once.
        self.wording = ThreadPoolExecutor(WORDING, "weft-words")
        self.batchers = {model.name: self._batcher(model) for model in models}
        self.threads = torch.get_num_threads()  # that a model may have
        self.ready = False
        self._probe: asyncio.Task[None] | None = None  # of models that failed
        self.metrics.watch("queue_pictures", "Pictures in the house.", lambda: self.admission.pictures)
        self.metrics.watch("queue_bytes", "Bytes of requests in the house.", lambda: self.admission.bytes)
        self.metrics.watch("decoders_ended", "Decoding processes that were replaced.", lambda: self.decoders.ended)

    def _batcher(self, model: ServedModel) -> Batcher[DecodedPicture]:
        observe = self.metrics.batches.labels(model.name).observe
        limits: Any = dict(most=self.settings.batch, wait=self.settings.wait, heaviest=self.settings.seen_pixels)
        return Batcher(model.answers, self.computing, **limits, weight=_pixels, on_batch=observe)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        await self.decoders.start()
        for name, model in self.models.items():
            await loop.run_in_executor(self.computing, model.warm_up)
            await loop.run_in_executor(self.computing, model.settle_threads, self.threads, self.settings)
            self.batchers[name].start()
        self.ready = True

    async def stop(self) -> None:
        """Once all requests have been answered."""
        self.ready = False
        for batcher in self.batchers.values():
            await batcher.stop()
        await self.decoders.stop()
        for threads in (self.computing, self.wording):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def well(self) -> bool:
        """Whether pictures are answered. A model that failed is asked again, beside everything else, until it answers.

        Its failure may have been a picture's fault, or be one of the device that lasts.
        """
        failing = [model for name, model in self.models.items() if self.batchers[name].failing]
        if failing and self._probe is None:
            self._probe = asyncio.create_task(self._ask_again(failing))
        alive = self.decoders.alive and all(batcher.alive for batcher in self.batchers.values())
        return self.ready and alive and not failing

    async def _ask_again(self, failing: Sequence[ServedModel]) -> None:
        loop = asyncio.get_running_loop()
        for model in failing:
            with suppress(Exception):  # the log has what it said to those who asked
                await loop.run_in_executor(self.computing, model.warm_up)
                self.batchers[model.name].failing = False
        self._probe = None

    def find(self, name: str) -> ServedModel:
        """A model by its name; the first one where none is given."""
        model = self.models.get(name) if name else next(iter(self.models.values()))
        if model is None:
            raise Refusal(404, f"There is no such model; there are {', '.join(self.models)}.")
        return model

    async def answer(
        self, model: ServedModel, upload: Upload, visit: Visit, *, top: int, score: float
    ) -> dict[str, Any]:
        """The model's answer to a picture, or why it says nothing and the status of that."""
        row: dict[str, Any] = {"name": upload.name}
        try:
            batcher = self.batchers[model.name]
            batcher.expect(+1)
            try:
                picture = await self.decode(model, upload, visit)
                asked = batcher.ask(picture)
            finally:
                batcher.expect(-1)
            with self.timed("model"):
                answer = await asked
            with self.timed("words"):
                row |= await self._words(model, picture, answer, top, score)
            if picture.notes:
                row["notes"] = list(picture.notes)
            self.metrics.pictures.labels(model.name, "answered").inc()
        except Refusal as refusal:
            row |= {"error": refusal.line, "status": refusal.status}
            if refusal.retry_after:
                row["retry_after"] = refusal.retry_after
            self.metrics.pictures.labels(model.name, "refused").inc()
        return row

    async def decode(self, model: ServedModel, upload: Upload, visit: Visit) -> DecodedPicture:
        """The pixels, and those of a mask, count as bytes in the house: a small file may hold many."""
        with self.timed("decode"):
            picture = await self.decoders.decode(self.ways[model.name], upload.data)
        visit.add_bytes(picture.pixels.nbytes + math.prod(picture.size or (0,)))
        return picture

    async def explain(self, model: ServedModel, upload: Upload, visit: Visit, of: str) -> dict[str, Any]:
        picture = await self.decode(model, upload, visit)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.computing, model.why, upload.name, picture, of)

    async def _words(
        self, model: ServedModel, picture: DecodedPicture, answer: Any, top: int, score: float
    ) -> dict[str, Any]:
        """Masks and outlines are drawn in a thread; a few names are not worth the way there."""
        words = partial(model.words, picture, answer, top=top, score=score)
        if model.task.writes_pictures:
            return await asyncio.get_running_loop().run_in_executor(self.wording, words)
        return words()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.parts.labels(part).observe(time.perf_counter() - begun)


def _pixels(picture: DecodedPicture) -> int:
    return math.prod(picture.pixels.shape[-2:])

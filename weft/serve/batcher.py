"""Pictures of many clients, looked at together.

A picture that comes while the model is free is looked at once; it waits for others, and only for a moment, while they
are known to be on their way. Whatever comes while the model is busy forms the next batch.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Generic, TypeVar

Question = TypeVar("Question")


class Batcher(Generic[Question]):
    """Gathers questions into batches of at most `most` and has `answer` answer them, a batch at a time.

    The questions of a batch weigh no more than `heaviest` together; one that alone weighs more goes alone.
    """

    def __init__(
        self,
        answer: Callable[[list[Question]], Sequence[Any]],
        executor: Executor,
        *,
        most: int,
        wait: float,
        weight: Callable[[Question], float] = lambda question: 0,
        heaviest: float = 0,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.answer, self.executor, self.most, self.wait, self.on_batch = answer, executor, most, wait, on_batch
        self.weight, self.heaviest = weight, heaviest
        self.coming = 0  # questions that will be asked in a moment
        self.failing = False  # whether the last batch ended in an error
        self._waiting: deque[tuple[Question, float, asyncio.Future[Any]]] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    @property
    def alive(self) -> bool:
        """Whether somebody looks at the questions."""
        return self._task is not None and not self._task.done()

    def ask(self, question: Question) -> "asyncio.Future[Any]":
        """The answer, once it is there; whoever is cancelled while waiting for it has withdrawn the question."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((question, loop.time(), future))
        self._changed.set()
        return future

    def expect(self, change: int) -> None:
        """Told of questions that are on their way, +1, and that have come or will not, -1."""
        self.coming += change
        if not self.coming:
            self._changed.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._drop_withdrawn()
            if not self._waiting:
                await self._next_change(None)
                continue
            until = self._waiting[0][1] + self.wait
            if len(self._waiting) < self.most and self.coming > 0 and loop.time() < until:
                await self._next_change(until - loop.time())
                continue
            chosen = self._next_batch()
            self.on_batch(len(chosen))
            await self._answer(chosen)

    def _next_batch(self) -> "list[tuple[Question, float, asyncio.Future[Any]]]":
        """The longest waiting, of which there is one; withdrawn ones are left out."""
        chosen = [self._waiting.popleft()]
        weight = self.weight(chosen[0][0])
        self._drop_withdrawn()
        while self._waiting and len(chosen) < self.most:
            weight += self.weight(self._waiting[0][0])
            if weight > self.heaviest:
                break
            chosen.append(self._waiting.popleft())
            self._drop_withdrawn()
        return chosen

    async def _answer(self, chosen: Sequence[tuple[Question, float, asyncio.Future[Any]]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self.executor, self.answer, [question for question, _, _ in chosen])
            for (_, _, future), answer in zip(chosen, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
            self.failing = False
        except Exception as error:  # those who asked are told; the next batch has another chance
            self.failing = True
            for _, _, future in chosen:
                if not future.done():
                    future.set_exception(error)

    def _drop_withdrawn(self) -> None:
        while self._waiting and self._waiting[0][2].done():
            self._waiting.popleft()

    async def _next_change(self, seconds: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

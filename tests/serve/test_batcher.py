"""Batches: never too large, nobody forgotten, nobody kept waiting for nobody."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.serve.batcher import Batcher


class Doubling:
    """Answers twice the number, and remembers the batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.batches = seconds, []

    def __call__(self, numbers: list[int]) -> list[int]:
        self.batches.append(list(numbers))
        time.sleep(self.seconds)
        return [2 * number for number in numbers]


def run(work, answer, *, most: int = 4, wait: float = 0.0):
    async def main():
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(answer, executor, most=most, wait=wait)
            batcher.start()
            try:
                return await asyncio.wait_for(work(batcher), 20)
            finally:
                await batcher.stop()

    return asyncio.run(main())


@given(
    most=st.integers(1, 7),
    steps=st.lists(st.sampled_from(["ask", "ask", "ask", "withdraw", "pause"]), min_size=1, max_size=60),
)
def test_every_question_has_its_answer_and_no_batch_is_too_large(most, steps):
    answer = Doubling()

    async def work(batcher):
        asked = []
        for number, step in enumerate(steps):
            if step == "ask":
                asked.append((number, batcher.ask(number)))
            elif step == "withdraw" and asked:
                asked[-1][1].cancel()
            else:
                await asyncio.sleep(0)
        await asyncio.wait([future for _, future in asked]) if asked else None
        return [(number, future.result()) for number, future in asked if not future.cancelled()]

    for number, answered in run(work, answer, most=most):
        assert answered == 2 * number
    assert all(1 <= len(batch) <= most for batch in answer.batches)
    flat = [number for batch in answer.batches for number in batch]
    assert flat == sorted({*flat})  # in order, and none twice


def test_what_comes_while_the_model_is_busy_goes_together():
    answer = Doubling(0.05)

    async def work(batcher):
        first = batcher.ask(0)
        await asyncio.sleep(0.01)
        return await asyncio.gather(first, *(batcher.ask(number) for number in range(1, 7)))

    assert run(work, answer) == [0, 2, 4, 6, 8, 10, 12]
    assert [len(batch) for batch in answer.batches] == [1, 4, 2]


@pytest.mark.parametrize(("coming", "waits"), [(0, False), (1, True)])
def test_waits_only_for_those_who_are_on_their_way(coming, waits):
    async def work(batcher):
        batcher.expect(coming)
        begun = time.monotonic()
        await batcher.ask(1)
        return time.monotonic() - begun

    took = run(work, Doubling(), wait=0.5)
    assert (took >= 0.49) == waits
    assert waits or took < 0.25


def test_waiting_ends_when_those_on_their_way_have_come_or_given_up():
    async def come(batcher):
        batcher.expect(+2)
        first = batcher.ask(1)
        await asyncio.sleep(0.02)
        second = batcher.ask(2)
        batcher.expect(-1)
        await asyncio.sleep(0.02)
        assert not first.done()  # one is still missing
        batcher.expect(-1)
        return await asyncio.gather(first, second)

    answer = Doubling()
    begun = time.monotonic()
    assert run(come, answer, wait=5.0) == [2, 4]
    assert time.monotonic() - begun < 2
    assert answer.batches == [[1, 2]]


def test_a_full_batch_waits_for_nobody():
    async def work(batcher):
        batcher.expect(+1)
        return await asyncio.gather(*(batcher.ask(number) for number in range(4)))

    begun = time.monotonic()
    run(work, Doubling(), wait=5.0)
    assert time.monotonic() - begun < 2


def test_withdrawn_questions_are_not_computed():
    answer = Doubling(0.05)

    async def work(batcher):
        first = batcher.ask(0)
        await asyncio.sleep(0.01)
        others = [batcher.ask(number) for number in range(1, 9)]
        for future in others[:-1]:
            future.cancel()
        return await first, await others[-1]

    assert run(work, answer) == (0, 16)
    assert answer.batches == [[0], [8]]


def test_an_error_reaches_those_who_asked_and_nobody_else():
    def answer(numbers):
        if 1 in numbers:
            raise RuntimeError("no")
        return numbers

    async def work(batcher):
        with pytest.raises(RuntimeError, match="no"):
            await batcher.ask(1)
        return await batcher.ask(2)

    assert run(work, answer) == 2

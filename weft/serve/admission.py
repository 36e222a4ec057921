"""Who is let in: a bounded number of pictures and bytes; the rest is told at once when to come again."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from weft.serve.refusal import Refusal

RECENT = 0.9  # how much of the measured pace is remembered at each answer


class Visit:
    """The pictures and bytes that one request holds in the house."""

    def __init__(self, house: "Admission") -> None:
        self.house, self.pictures, self.bytes = house, 0, 0

    def add_pictures(self, count: int) -> None:
        if self.house.pictures + count > self.house.most_pictures:
            raise self.house.full()
        self.house.pictures += count
        self.pictures += count

    def add_bytes(self, count: int) -> None:
        if self.house.bytes + count > self.house.most_bytes:
            raise self.house.full()
        self.house.bytes += count
        self.bytes += count


class Admission:
    """The pictures and bytes that are in the house."""

    def __init__(self, most_pictures: int, most_bytes: int) -> None:
        self.most_pictures, self.most_bytes = most_pictures, most_bytes
        self.pictures = self.bytes = 0
        self._pace, self._last = 0.0, time.monotonic()  # seconds between two answers, of late

    @contextmanager
    def visit(self) -> Iterator[Visit]:
        """Lets a request in, whose pictures count once they have arrived: who sends nothing takes no room."""
        visit = Visit(self)
        try:
            yield visit
            self._keep_pace(visit.pictures)
        finally:
            self.pictures -= visit.pictures
            self.bytes -= visit.bytes

    @property
    def is_full(self) -> bool:
        return self.pictures >= self.most_pictures or self.bytes >= self.most_bytes

    def full(self) -> Refusal:
        wait = max(1, min(60, math.ceil(self._pace * self.pictures)))
        return Refusal(503, f"The server has its hands full; come again in {wait} s.", retry_after=wait)

    def _keep_pace(self, pictures: int) -> None:
        now = time.monotonic()
        took, self._last = (now - self._last) / max(1, pictures), now
        if self.pictures > pictures:  # only while there is always something to do
            self._pace = RECENT * self._pace + (1 - RECENT) * took

"""Numbers about the server for Prometheus, in a registry of its own."""

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServeMetrics:
    """Counts requests, pictures and batches, and how long each part of an answer takes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._make(Counter, "requests", "Requests that were answered.", ["path", "status"])
        self.seconds = Histogram(
            "weft_request_seconds", "From head to end of answer; not those refused at the door.", ["path"],
            buckets=TIMES, registry=self.registry,
        )  # fmt: skip
        self.cut = self._make(
            Counter, "connections_cut", "Connections that were ended here: crowded, slow, endless, unread.", ["why"]
        )
        self.pictures = self._make(Counter, "pictures", "Pictures that were answered, or not.", ["model", "outcome"])
        self.parts = Histogram(
            "weft_part_seconds", "What a picture's time goes into: read, decode, model (waiting included), words.",
            ["part"], buckets=TIMES, registry=self.registry,
        )  # fmt: skip
        self.batches = Histogram(
            "weft_batch_pictures", "Pictures that a model looked at together.", ["model"],
            buckets=SIZES, registry=self.registry,
        )  # fmt: skip

    def _make(self, kind: type[Counter], name: str, text: str, labels: Collection[str]) -> Counter:
        return kind(f"weft_{name}", text, labels, registry=self.registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Has a number read off whenever somebody asks."""
        Gauge(f"weft_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

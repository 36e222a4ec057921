"""The limits of a server, and their defaults: small enough for a laptop, and none of them unlimited."""

import ipaddress
import os
from dataclasses import dataclass

from weft.errors import WeftError, check_positive, check_ratio

MEGABYTE = 2**20
SHORTEST_TOKEN = 16
PLACES = 12  # pixels of a mask for each that the model saw, at most


@dataclass(frozen=True)
class ServeSettings:
    """Where a server listens, and what it takes on at most."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""  # that clients must show; needed for any address but this machine's own
    batch: int = 16  # pictures that a model looks at together, at most
    wait: float = 0.005  # seconds that a picture waits for others which are already being decoded
    queue: int = 128  # pictures in the house, from the first byte to the answer; more are refused with 503
    max_bytes: int = 20 * MEGABYTE  # of a request
    max_pixels: int = 50_000_000  # of a picture, all frames together
    seen_pixels: int = 1_200_000  # that a model looks at at once: of a picture, else it is shrunk, and of a batch
    seconds: float = 30.0  # for a request to arrive, and again for its answer
    decode_seconds: float = 10.0  # for a picture to be decoded, else its decoder is ended
    decoders: int = 0  # processes that decode; 0: from the machine

    @property
    def max_house_bytes(self) -> int:
        """Bytes of requests that are in the house at once."""
        return max(16 * self.max_bytes, 256 * MEGABYTE)

    @property
    def max_places(self) -> int:
        """Pixels of a picture where an answer is about places: a mask is as large as its picture, whatever was seen."""
        return min(self.max_pixels, PLACES * self.seen_pixels)

    @property
    def processes(self) -> int:
        return self.decoders or min(8, os.cpu_count() or 1)

    def check(self) -> None:
        """Raises for numbers that make no sense, and for an address that others reach without a token."""
        check_positive(batch=self.batch, queue=self.queue, max_bytes=self.max_bytes)
        check_positive(max_pixels=self.max_pixels, seen_pixels=self.seen_pixels)
        check_ratio(seconds=self.seconds, decode_seconds=self.decode_seconds)
        if self.wait < 0:
            raise WeftError(f"wait={self.wait:g} is no time; choose 0 or more.")
        if self.decoders < 0:
            raise WeftError(f"decoders={self.decoders} is no number of processes; choose 0 or more.")
        if not 0 <= self.port <= 65535:
            raise WeftError(f"--port {self.port} does not exist; choose a number up to 65535, or 0 for any free one.")
        if not is_loopback(self.host) and not self.token:
            raise WeftError(
                f"--host {self.host} can be reached by others, so they need a token:"
                f" set WEFT_TOKEN, or give --token, at least {SHORTEST_TOKEN} characters."
            )
        if self.token and (len(self.token) < SHORTEST_TOKEN or not self.token.isascii() or " " in self.token):
            raise WeftError(f"The token must have at least {SHORTEST_TOKEN} characters, ASCII and without blanks.")


def is_loopback(host: str) -> bool:
    """Whether an address leads to this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

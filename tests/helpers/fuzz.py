"""Mutated pictures and requests against a running server: `make fuzz`, and some of them in the tests.

    python -m tests.helpers.fuzz 10000 [SEED]

Each request is a function of the seed and its number, so that a failure can be had again.
"""

import io
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

from benchmarks.serve import memory_of
from tests.helpers.places import ROOT
from tests.helpers.small_runs import dense, make_squares, tiny_run

ALLOWED = {200, 400, 403, 404, 405, 408, 413, 415, 422, 431, 503, 504}
KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
EXTREME = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff", b"\0\x01"]
AT_ONCE = 8
MOST_CUT = 0.02  # of the requests: those whose head is so wounded that they never end


def seeds() -> list[bytes]:
    """Pictures of every kind that is read, with what files have beside pixels."""
    rng, found = np.random.default_rng(0), []
    rgb = Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {
        "JPEG": dict(exif=exif, progressive=True),
        "TIFF": dict(compression="tiff_deflate"),
        "PNG": dict(exif=exif),
    }
    for kind in KINDS:
        file = io.BytesIO()
        rgb.save(file, kind, **options.get(kind, {}))
        found.append(file.getvalue())
    for mode, kind in (("P", "PNG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("1", "TIFF"), ("I;16", "PNG"), ("RGBA", "WEBP")):
        file = io.BytesIO()
        grey = rgb.convert("L")
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257) if mode == "I;16" else rgb.convert(mode)
        image.save(file, kind)
        found.append(file.getvalue())
    frames = [rgb, rgb.rotate(90, expand=False), rgb.rotate(180)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        found.append(file.getvalue())
    file = io.BytesIO()
    np.save(file, np.asarray(rgb))
    return [*found, file.getvalue()]


SEEDS = seeds()


def mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """A file with a few wounds: bits, bytes, numbers, cuts, repetitions, parts of another file."""
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        at, length = int(rng.integers(0, max(1, len(found)))), int(rng.integers(1, 40))
        match int(rng.integers(0, 7)):
            case 0 if found:
                found[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                found[at : at + length] = rng.bytes(length)
            case 2:
                extreme = EXTREME[int(rng.integers(len(EXTREME)))]
                found[at : at + len(extreme)] = extreme
            case 3:
                del found[at:]
            case 4:
                del found[at : at + length]
            case 5:
                found[at:at] = found[at : at + length] * int(rng.integers(1, 20))
            case 6:
                other = SEEDS[int(rng.integers(len(SEEDS)))]
                found[at:] = other[min(at, len(other)) :]
    return bytes(found)


def send(port: int, number: int, seed: int) -> int | str:
    """One request; returns its status, or in a word what became of a connection that was cut."""
    rng = np.random.default_rng([seed, number])
    data = mutated(rng, SEEDS[number % len(SEEDS)])
    kind = int(rng.integers(0, 10))
    if kind < 5:
        head, body = b"content-type: application/octet-stream", data
    else:
        name = rng.bytes(int(rng.integers(0, 30))).hex().encode()
        part = b'--edge\r\ncontent-disposition: form-data; name="a"; filename="' + name + b'.png"\r\n\r\n'
        body = part + data + b"\r\n" + (part + SEEDS[0] + b"\r\n" if kind == 6 else b"") + b"--edge--\r\n"
        head = b"content-type: multipart/form-data; boundary=edge"
    if kind == 7:
        body = mutated(rng, body)
    queries = (
        b"",
        b"?top=2",
        b"?model=masks",
        b"?model=boxes&score=0",
        b"?model=x",
        b"?top=-1",
        b"?score=nan",
        b"?model=%00%ff",
        b"?top=1&top=x&&=",
        b"?of=%ff",
    )
    path = (b"/predict", b"/explain")[kind == 4] + queries[int(rng.integers(len(queries)))]
    lines = [
        b"POST " + path + b" HTTP/1.1",
        b"host: 127.0.0.1",
        head,
        b"content-length: %d" % len(body),
        b"connection: close",
    ]
    if kind == 8:
        at = int(rng.integers(len(lines)))
        lines[at] = mutated(rng, lines[at])
    if kind == 9:
        lines[3] = b"transfer-encoding: chunked"
        body = mutated(rng, b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
    return exchange(port, b"\r\n".join(lines) + b"\r\n\r\n" + body)


def exchange(port: int, sent: bytes) -> int | str:
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            with suppress(OSError):  # refused early; the answer may be there all the same
                connection.sendall(sent)
            while more := connection.recv(65536):
                answer += more
    except ConnectionError:
        pass
    except TimeoutError:
        return "no answer"
    first = answer.split(b"\r\n", 1)[0].split(b" ")
    return int(first[1]) if len(first) > 1 and first[1].isdigit() else "cut"


def fuzz(port: int, count: int, seed: int = 0, first: int = 0) -> Counter:
    """How many requests had which status."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(lambda number: send(port, number, seed), range(first, first + count)))


def check(found: Counter, port: int) -> list[str]:
    """Complaints: statuses that must not be, a server that is not well, pictures that are still in the house."""
    wrong = [f"{n} x {status}" for status, n in found.items() if status not in ALLOWED and status != "cut"]
    if found["cut"] > MOST_CUT * found.total():
        wrong.append(f"{found['cut']} connections cut")
    if httpx.get(f"http://127.0.0.1:{port}/ready").status_code != 200:
        wrong.append("not ready")
    end = time.monotonic() + 60
    while "weft_queue_pictures 0.0" not in httpx.get(f"http://127.0.0.1:{port}/metrics").text:
        if time.monotonic() > end:
            return [*wrong, "pictures are left in the queue"]
        time.sleep(0.1)
    return wrong


def main(count: int, seed: int) -> int:
    """Tries the demo's classifier, and small models of masks and of boxes that are made for it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        masks = tiny_run(make_squares(folder / "squares"), folder / "masks", **dense("fpn", epochs=1))
        boxes = tiny_run(make_squares(folder / "coco", "coco"), folder / "boxes", **dense("mask-rcnn", epochs=1))
        return attack(["demo", str(masks.folder), str(boxes.folder)], count, seed)


def attack(models: list[str], count: int, seed: int) -> int:
    command = [sys.executable, "-m", "weft", "serve", *models, "--port", "0", "--seconds", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as weft:
        try:
            assert weft.stdout is not None
            while not (line := weft.stdout.readline()).startswith("Open"):
                assert weft.poll() is None
            port = int(line.split()[1].rstrip("/").rpartition(":")[2])
            found, begun, before = fuzz(port, min(count, 1000), seed), time.monotonic(), memory_of(weft.pid)
            while found.total() < count:
                found += fuzz(port, min(1000, count - found.total()), seed, found.total())
                print(f"{found.total()} requests, {memory_of(weft.pid):.0f} MB", flush=True)
            wrong = check(found, port)
            after = memory_of(weft.pid)
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            died = next(line for line in metrics.splitlines() if line.startswith("weft_decoders_ended"))
            wrong += [f"memory from {before:.0f} to {after:.0f} MB"] if after > before + 100 else []
            wrong += ["the server has ended"] if weft.poll() is not None else []
            print(
                f"{found.total()} requests, seed {seed}, {time.monotonic() - begun:.0f} s:", dict(found.most_common())
            )
            print(f"memory {before:.0f} MB after the first 1,000, {after:.0f} MB at the end; {died}")
            print("wrong: " + "; ".join(wrong) if wrong else "No crash, no leak, no 500.")
            return bool(wrong)
        finally:
            weft.terminate()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))

"""`weft serve` under load, next to LitServe with the same model: requests a second, latencies, a soak at overload.

    python benchmarks/serve.py [RUN] [--clients 1 8 32] [--seconds 10] [--soak 180] [--out benchmarks/results]

Requests are forms with a JPEG of 500 x 375 pixels (`--side` makes smaller ones). The load comes from wrk, where it is
installed or given by `--wrk PATH`; else from processes of this file, which says so. First comes the bare model, which
gets pictures that are decoded already: no server can be faster. A soak asks for more than there is room for, and then
compares what the clients counted with what the server did.
"""

import argparse
import asyncio
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
EDGE = "weft-edge"
ASKED = 8  # times a second that somebody polite asks during the soak
LUA = """
local file = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", file:read("*a")
wrk.headers["Content-Type"] = "multipart/form-data; boundary={edge}"
local threads = {{}}
function setup(thread) table.insert(threads, thread) end
function init(args) statuses = "" ; counts = {{}} end
function response(status, headers, body)
  counts[status] = (counts[status] or 0) + 1
  statuses = ""
  for k, v in pairs(counts) do statuses = statuses .. k .. "=" .. v .. " " end
end
function done(summary, latency, requests)
  local said = ""
  for i, thread in ipairs(threads) do said = said .. thread:get("statuses") .. " " end
  io.write(string.format("RESULT %f %f %f %f %f %d|%s\\n", summary.requests / (summary.duration / 1e6),
    latency:percentile(50) / 1e3, latency:percentile(95) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout, said))
end
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="demo", help="a run or model folder, or demo")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row; 0: the soak alone")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of overload at the end")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--decoders", type=int, default=0)
    parser.add_argument("--side", type=int, default=500, help="pixels of the longer side of the picture")
    parser.add_argument("--together", type=int, default=8, help="pictures in a request, in one more row")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--wrk", default=shutil.which("wrk") or "", help="where it is; empty: processes of this file")
    parser.add_argument("--no-litserve", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    result: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine(), "run": Path(args.run).name}
    result["load"] = "wrk" if args.wrk else "processes of benchmarks/serve.py: no wrk here"
    print(f"load: {result['load']}")
    with tempfile.TemporaryDirectory() as temporary:
        one, several = (write_body(Path(temporary) / f"{n}.form", n, args.side) for n in (1, args.together))
        if args.seconds:
            result["bare"] = bare(args.run, args.device, args.batch, args.side)
            result["rows"] = measure(args, one, several)
        if args.soak:
            result["soak"] = soak(args, one)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"serve-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nWrote {path}")


def machine() -> dict[str, Any]:
    import torch

    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# What is sent ---------------------------------------------------------------------------------------------------------


def jpeg(side: int) -> bytes:
    """A picture with large and small structure, as photographs have, so that its file is as large as theirs."""
    from PIL import Image

    rng, size = np.random.default_rng(0), (side, side * 3 // 4)
    layers = [Image.fromarray(rng.integers(0, 256, (n, n, 3), np.uint8)).resize(size, 3) for n in (5, 40)]
    file = io.BytesIO()
    Image.blend(*layers, 0.35).save(file, "JPEG", quality=88)
    return file.getvalue()


def write_body(path: Path, count: int, side: int) -> Path:
    picture = jpeg(side)
    named = 'Content-Disposition: form-data; name="request"; filename="a.jpg"'
    head = f"--{EDGE}\r\n{named}\r\nContent-Type: image/jpeg\r\n\r\n".encode()
    path.write_bytes((head + picture + b"\r\n") * count + f"--{EDGE}--\r\n".encode())
    return path


# The model by itself --------------------------------------------------------------------------------------------------


def open_predictor(run: str, device: str) -> Any:
    sys.path.insert(0, str(ROOT))
    from weft.serve.models import open_models

    return open_models([run], device)[0].predictor


def bare(run: str, device: str, batch: int, side: int) -> dict[str, float]:
    """Pictures a second of the model alone, in batches of 1 and of `batch`; and of one core that decodes."""
    import torch

    predictor, data = open_predictor(run, device), jpeg(side)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < 2:
        picture = predictor.preprocessing.picture(data)
        count += 1
    found = {"decoded a second by one core": round(count / (time.perf_counter() - begun), 1)}
    for size in (1, batch):
        pictures = torch.stack([picture] * size)
        predictor.answers(pictures)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < 3:
            predictor.answers(pictures)
            count += size
        found[f"model, batches of {size}"] = round(count / (time.perf_counter() - begun), 1)
    for name, value in found.items():
        print(f"  {name:34} {value:10.1f} pictures/s")
    return found


# Servers --------------------------------------------------------------------------------------------------------------


@contextmanager
def running(command: list[str], port: int):
    """A server as a process, from when it answers until it is stopped."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            end = time.monotonic() + 180
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not start:\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield server
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # and what it left behind


def _answers(port: int) -> bool:
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def weft_command(args: argparse.Namespace, port: int, batch: int, queue: int = 0) -> list[str]:
    common = [sys.executable, "-m", "weft", "serve", args.run, "--port", str(port), "--device", args.device]
    queue = queue or max(128, 2 * max(args.clients) * args.together)  # nobody is refused, but in the soak
    return [*common, "--batch", str(batch), "--decoders", str(args.decoders), "--queue", str(queue)]


def measure(args: argparse.Namespace, one: Path, several: Path) -> list[dict[str, Any]]:
    rows = []
    servers = {
        "weft": (weft_command(args, 8401, args.batch), 8401, one, 1),
        "weft, no batching": (weft_command(args, 8402, 1), 8402, one, 1),
        f"weft, {args.together} in a request": (weft_command(args, 8403, args.batch), 8403, several, args.together),
    }
    if not args.no_litserve:
        own = [sys.executable, __file__, "litserve", args.run, args.device]
        servers["LitServe"] = ([*own, "8404", str(args.batch)], 8404, one, 1)
        servers["LitServe, no batching"] = ([*own, "8405", "1"], 8405, one, 1)
    titles = ("clients", "pictures/s", "p50 ms", "p95 ms", "p99 ms")
    print(f"\n{'':26}" + "".join(f"{title:>12}" for title in titles))
    answers: list[dict[str, Any]] = []
    for name, (command, port, body, pictures) in servers.items():
        with running(command, port) as server:
            answers.append(ask(port, body))
            assert same(answers[0], answers[-1]), f"{name} answers otherwise"
            load(args, port, body, min(args.clients), 2.0)  # the first requests pay for what happens once
            for clients in args.clients:
                before = processor_seconds(server.pid)
                found = load(args, port, body, clients, args.seconds)
                used = {k: round(v - before.get(k, 0), 2) for k, v in processor_seconds(server.pid).items()}
                row = {"server": name, "clients": clients, "pictures_a_second": found.pop("rate") * pictures, **found}
                row["processor_seconds"] = used
                rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
                numbers = (row["pictures_a_second"], row["p50"], row["p95"], row["p99"])
                strange = {k: v for k, v in row["statuses"].items() if k != "200"}
                said = f"  {strange}" if strange else ""
                print(f"{name:26}{clients:12}" + "".join(f"{value:12.1f}" for value in numbers) + said, flush=True)
    return rows


def ask(port: int, body: Path) -> dict[str, Any]:
    import httpx

    headers = {"content-type": f"multipart/form-data; boundary={EDGE}"}
    return httpx.post(f"http://127.0.0.1:{port}/predict", content=body.read_bytes(), headers=headers).json()[
        "pictures"
    ][0]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two servers say the same, but for rounding."""
    return one["labels"] == other["labels"] and np.allclose(one["probabilities"], other["probabilities"], atol=1e-3)


def processor_seconds(pid: int) -> dict[str, float]:
    """Seconds of processor that a server and the processes below it have had."""
    found = {"server": _ticks(pid), "others": 0.0}
    waiting = _children(pid)
    while waiting:
        child = waiting.pop()
        found["others"] += _ticks(child)
        waiting += _children(child)
    return found


def _ticks(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


# Load -----------------------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace, port: int, body: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Requests a second, latencies in milliseconds, how many had which status, and connections that failed."""
    if not args.wrk:
        return own_load(port, body, clients, seconds)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA.format(body=body, edge=EDGE))
        script.flush()
        threads = max(1, min(2, clients))
        command = [args.wrk, f"-t{threads}", f"-c{clients}", f"-d{seconds:g}s", "--timeout", "60s", "-s", script.name]
        told = subprocess.run(
            [*command, f"http://127.0.0.1:{port}/predict"], capture_output=True, text=True, check=True
        )
    line = next(line for line in told.stdout.splitlines() if line.startswith("RESULT "))
    numbers, _, said = line.removeprefix("RESULT ").partition("|")
    rate, p50, p95, p99, longest, failed = map(float, numbers.split())
    statuses: Counter[str] = Counter()
    for pair in said.split():
        status, _, count = pair.partition("=")
        statuses[status] += int(count)
    return dict(rate=rate, p50=p50, p95=p95, p99=p99, max=longest, statuses=dict(statuses), failed=int(failed))


def own_load(port: int, body: Path, clients: int, seconds: float) -> dict[str, Any]:
    """The same from processes of this file, a few clients in each."""
    processes = max(1, min(clients, (os.cpu_count() or 2) // 4))
    shares = [len(part) for part in np.array_split(np.arange(clients), processes)]
    commands = [[sys.executable, __file__, "clients", str(port), str(body), str(n), str(seconds)] for n in shares]
    with ThreadPoolExecutor(processes) as pool:
        texts = list(
            pool.map(lambda command: subprocess.run(command, capture_output=True, text=True, check=True), commands)
        )
    parts = [json.loads(text.stdout) for text in texts]
    took = np.sort(np.concatenate([part["milliseconds"] for part in parts]))
    statuses = sum((Counter(part["statuses"]) for part in parts), Counter())
    p50, p95, p99 = (float(np.percentile(took, p)) for p in (50, 95, 99))
    found = dict(rate=len(took) / seconds, p50=p50, p95=p95, p99=p99, max=float(took[-1]))
    return {**found, "statuses": dict(statuses), "failed": sum(part["failed"] for part in parts)}


async def be_clients(port: int, body: bytes, clients: int, seconds: float) -> dict[str, Any]:
    """Clients that each send one request after the other; every one that was sent is counted with what became of it."""
    head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: multipart/form-data; boundary={EDGE}\r\n"
    sent = (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body
    statuses: Counter[str] = Counter()
    milliseconds: list[float] = []
    tally = Counter(sent=0, failed=0)
    end = time.monotonic() + seconds

    async def client() -> None:
        reader = writer = None
        while time.monotonic() < end:
            begun = time.perf_counter()
            tally["sent"] += 1
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
                await reader.readexactly(int(headers["content-length"]))
                statuses[lines[0].split()[1]] += 1
                milliseconds.append(1000 * (time.perf_counter() - begun))
                if lines[0].split()[1] == "503":
                    await asyncio.sleep(0.02)  # real ones wait as Retry-After says; these come again at once, nearly
            except (OSError, asyncio.IncompleteReadError):
                tally["failed"] += 1
                writer = None
        if writer is not None:
            writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return {"statuses": dict(statuses), "milliseconds": milliseconds, **tally}


# Soak -----------------------------------------------------------------------------------------------------------------


def soak(args: argparse.Namespace, body: Path) -> dict[str, Any]:
    """Four times as many clients as the queue has room for: memory over time, and every request accounted for.

    They come again at once. Beside them somebody polite asks now and then, on a connection of their own.
    """
    import httpx

    queue, port = 32, 8406
    command = weft_command(args, port, args.batch, queue)
    own = [sys.executable, __file__, "clients", str(port), str(body)]
    with running(command, port) as server:
        subprocess.run([*own, str(4 * queue), "10"], capture_output=True, check=True)  # caches and pools are filled
        before = _counts(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
        told_in = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  a pipe would be full before anybody reads it
        clients = subprocess.Popen([*own, str(4 * queue), str(args.soak)], stdout=told_in)
        memory, probes = [memory_of(server.pid)], Probes(port, body.read_bytes())
        while clients.poll() is None:
            for _ in range(ASKED):
                probes.ask()
            memory.append(memory_of(server.pid))
        told = json.loads(Path(told_in.name).read_text())
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    counted = {k: v - before.get(k, 0) for k, v in _counts(text).items() if v - before.get(k, 0)}
    counted_alone = Counter(counted) - probes.statuses  # what is left was said to the others
    answered = {status: int(count) for status, count in told["statuses"].items()}
    took = np.array(told["milliseconds"])
    found = {
        "seconds": args.soak, "clients": 4 * queue, "queue": queue, "sent": told["sent"], "answered": answered,
        "failed": told["failed"], "lost": told["sent"] - sum(answered.values()) - told["failed"],
        "counted_by_the_server": dict(counted_alone),
        "p50": float(np.percentile(took, 50)), "p99": float(np.percentile(took, 99)),
        "polite": probes.facts(),
        "memory_mb": {"first": memory[0], "last": memory[-1], "most": max(memory)},
        "left_in_queue": float(next(x for x in text.splitlines() if x.startswith("weft_queue_pictures")).split()[1]),
    }  # fmt: skip
    print(f"\nsoak: {json.dumps(found, indent=1)}")
    return found


class Probes:
    """Requests on fresh connections, one after the other: for the server's health, and with a picture."""

    def __init__(self, port: int, body: bytes) -> None:
        kind = f"Content-Type: multipart/form-data; boundary={EDGE}\r\nContent-Length: {len(body)}\r\n"
        common = f"Host: 127.0.0.1:{port}\r\nConnection: close\r\n"
        self.port, self.statuses = port, Counter[str]()
        self.asked = {
            "health": f"GET /health HTTP/1.1\r\n{common}\r\n".encode(),
            "picture": f"POST /predict HTTP/1.1\r\n{common}{kind}\r\n".encode() + body,
        }
        self.took: dict[str, list[float]] = {"health": [], "refusal": [], "answer": []}

    def ask(self) -> None:
        for name, sent in self.asked.items():
            begun = time.perf_counter()
            with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
                connection.sendall(sent)
                status = connection.recv(65536)[9:12].decode()
            took = 1000 * (time.perf_counter() - begun)
            if name == "health":
                assert status == "200"
                self.took[name].append(took)
            else:
                self.statuses[status] += 1
                self.took["answer" if status == "200" else "refusal"].append(took)
            time.sleep(1 / (2 * ASKED))

    def facts(self) -> dict[str, Any]:
        """Numbers of each kind: how many, and the milliseconds until the first bytes of the reply."""
        found: dict[str, Any] = {"statuses": dict(self.statuses)}
        for name, took in self.took.items():
            if took:
                points = {f"p{p}": round(float(np.percentile(took, p)), 1) for p in (50, 95, 99)}
                found[name] = {"count": len(took), **points, "max": round(max(took), 1)}
        return found


def memory_of(pid: int) -> float:
    """Megabytes that a server and the processes below it have written; what they share is divided among them.

    Pages of files are left out: those of torch's libraries grow when another process that uses them ends.
    """
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(text.split(kind)[1].split()[0]) for kind in ("Pss_Anon:", "Pss_Shmem:"))
        waiting += _children(one)
    return round(total / 1024, 1)


def _counts(text: str) -> dict[str, int]:
    """How many requests of /predict had which status, as the server counts."""
    rows = [line for line in text.splitlines() if line.startswith('weft_requests_total{path="/predict"')]
    return {row.partition('status="')[2].partition('"')[0]: int(float(row.split()[-1])) for row in rows}


# The peer -------------------------------------------------------------------------------------------------------------


def serve_by_litserve(run: str, device: str, port: int, batch: int) -> None:
    """The same model, preprocessing and words in LitServe, as its documentation does it."""
    import litserve

    sys.path.insert(0, str(Path(__file__).parent))
    sys.path.insert(0, str(ROOT))
    from litserve_api import WeftApi

    api = WeftApi(run, device, batch)
    server = litserve.LitServer(api, accelerator="cpu" if device == "cpu" else "auto", workers_per_device=1, timeout=60)
    server.run(port=port, host="127.0.0.1", generate_client_file=False, log_level="error")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["clients", port, body, clients, seconds]:
            told = asyncio.run(be_clients(int(port), Path(body).read_bytes(), int(clients), float(seconds)))
            print(json.dumps(told))
        case ["litserve", run, device, port, batch]:
            serve_by_litserve(run, device, int(port), int(batch))
        case _:
            main()

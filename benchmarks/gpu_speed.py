"""Our models next to their peers on one NVIDIA GPU: pictures per second and memory of training steps and of inference.

    python benchmarks/gpu_speed.py [--train] [--infer] [--models cvt_13 ...] [--columns plain fast ...] [--rounds 5]
    python benchmarks/gpu_speed.py --first                   seconds of the first step, when no kernel is compiled yet
    python benchmarks/gpu_speed.py --one cvt_13 fast train   one process of these; it measures at every line it reads

bf16, 224 pixels, batch 128 to train and 256 to infer. A training step is forward, backward and AdamW in a plain loop.
Every model in every column has a process of its own. Those of a group make their first steps side by side and then
wait; from then on one at a time measures for a second, in several rounds whose order alternates, so that a slow moment
of the machine hits all. Last of all each counts the kernels of a step and how long they ran: a step that takes longer
than its kernels waits for Python. What fails, or is not ready in time, is left out, and the file says why. Results of
other models that the file has already stay in it.
"""

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import weft
from weft.engine.compiling import compile_model
from weft.files import write_text
from weft.report.text import columns as aligned
from weft.study.speed.models import build, check_names
from weft.study.speed.report import facts

RESULTS = Path(__file__).parent / "results"
WORKER = [sys.executable, __file__, "--one"]
PEERS = {
    "ceit_tiny": "deit_tiny_patch16_224",
    "ceit_small": "deit_small_patch16_224",
    "ceit_base": "deit_base_patch16_224",
    "cvt_13": "hf:cvt-13",
    "cvt_21": "hf:cvt-21",
    "cetnet_tiny": "swin_tiny_patch4_window7_224",
    "vitae_tiny": "",
    "vitae_small": "",
    "vt_resnet18": "resnet18",
    "vt_resnet50": "resnet50",
}
PUBLISHED = ("ceit_tiny", "ceit_small", "vitae_tiny", "vitae_small")  # networks that we have as they were released
COLUMNS = {
    "train": ("peer", "published", "plain", "fast", "replay", "peer-compiled", "plain-compiled", "fast-compiled"),
    "infer": ("peer", "plain", "fuse", "replay", "peer-compiled", "fuse-compiled"),
    "first": ("plain", "fast", "replay"),
}
RATIOS = {
    "train": [("plain", "peer"), ("plain", "published"), ("fast", "plain"), ("replay", "peer")]
    + [("plain-compiled", "peer-compiled"), ("fast-compiled", "peer-compiled")],
    "infer": [("plain", "peer"), ("fuse", "plain"), ("replay", "peer"), ("fuse-compiled", "peer-compiled")],
    "first": [],
}
BATCH, SIZE, DEVICE = {"train": 128, "infer": 256}, 224, "cuda"
FIRST_STEPS, WARM_UP, AT_ONCE = 7, 3, 5  # steps; `weft.replay` records in the fourth
TRIES = 60  # of the first steps, where memory is short
PATIENCE = 60.0  # seconds for one turn
TURN, KERNELS = "turn", "kernels"  # what a process is asked for

Row = dict[str, Any]
interrupted = threading.Event()


# In a process of its own ------------------------------------------------------------------------------------------


def make_model(name: str, column: str, kind: str) -> Any:
    how, _, compiled = column.partition("-")
    torch.manual_seed(0)
    model = published(name) if how == "published" else build(PEERS[name] if how == "peer" else name, SIZE)
    model = model.train(kind == "train")
    if kind == "infer" and how in ("fuse", "replay"):
        model = weft.fuse(model)
    elif how in ("fast", "replay"):
        model = weft.fast(model)
    model = model.to(DEVICE, torch.float32 if kind == "train" else torch.bfloat16)
    if is_resnet(name, column):
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if compiled:
        model = compile_model(model)
    return weft.replay(model) if how == "replay" else model


def published(name: str) -> nn.Module:
    """The network as its authors' code computes it, with as much dropped as in ours."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests belong to the repository, not to the package
    from tests.helpers.published import OfficialCeiT
    from tests.helpers.published_vitae import SMALL, TINY, OfficialViTAE

    if name.startswith("ceit"):
        return OfficialCeiT(*((192, 3) if name == "ceit_tiny" else (384, 6)), img_size=SIZE, drop_path=0.1)
    return OfficialViTAE(*(TINY if name == "vitae_tiny" else SMALL), classes=1000, rc_drop=0.1, drop_path=0.1)


def is_resnet(name: str, column: str) -> bool:
    """Whether this is a peer made of convolutions, which are fastest in channels_last."""
    return column.startswith("peer") and PEERS[name].startswith("resnet")


def make_step(model: Any, kind: str, channels_last: bool) -> Callable[[], Any]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(BATCH[kind], 3, SIZE, SIZE, device=DEVICE).contiguous(memory_format=layout)
    if kind == "infer":
        x = x.bfloat16()
        return torch.inference_mode()(lambda: model(x))
    y = torch.randint(0, 1000, (len(x),), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(step: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def prepare(name: str, column: str, kind: str) -> tuple[Callable[[], Any], Row]:
    """The step of a column, how long the first took, and how much memory the later ones need."""
    step = make_step(make_model(name, column, kind), kind, kind == "infer" or is_resnet(name, column))
    first = seconds_of(step, 1)
    torch.cuda.reset_peak_memory_stats()
    seconds_of(step, FIRST_STEPS - 1)
    return step, {"first_seconds": first, "gib": torch.cuda.max_memory_allocated() / 2**30}


def prepare_patiently(*what: str) -> tuple[Callable[[], Any], Row]:
    """Tries again where others hold the memory just now."""
    for _ in range(TRIES):
        try:
            return prepare(*what)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("out of memory", "ALLOC_FAILED")):
                raise
        torch.cuda.empty_cache()  # behind `except`, whose traceback holds on to all tensors
        time.sleep(3)
    return prepare(*what)


def turn(step: Callable[[], Any], kind: str, seconds: float = 1.0) -> float:
    """Pictures per second: the median of groups of steps."""
    seconds_of(step, WARM_UP)
    found, end = [], time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        found.append(AT_ONCE * BATCH[kind] / seconds_of(step, AT_ONCE))
    return statistics.median(found)


def kernels(step: Callable[[], Any]) -> Row:
    """What a step asks of the GPU alone: milliseconds and launches. Every later step of the process is slower."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds_of(step, AT_ONCE)
    ran = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    ran = [event for event in ran if not event.is_user_annotation]  # a range that holds others, as the optimiser's
    milliseconds = sum(event.self_device_time_total for event in ran) / 1000
    return {"kernel_ms": milliseconds / AT_ONCE, "launches": round(len(ran) / AT_ONCE)}


def work(name: str, column: str, kind: str) -> None:
    """Says when it is ready, and does at every line that comes in what the line asks for."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is no answer
    step, found = prepare_patiently(name, column, kind)
    torch.cuda.empty_cache()  # for those who are not ready yet
    print(json.dumps(found), file=answers)
    for line in sys.stdin:
        found = kernels(step) if line.strip() == KERNELS else {"turn": turn(step, kind)}
        torch.cuda.empty_cache()
        print(json.dumps(found), file=answers)


# The run ----------------------------------------------------------------------------------------------------------


class Worker:
    """Such a process, and the row of results that comes of it."""

    def __init__(self, name: str, kind: str, column: str) -> None:
        self.row: Row = {"model": name, "kind": kind, "column": column, "turns": [], "error": ""}
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.errors = open(f"{self.folder.name}/errors", "w+")  # noqa: SIM115  until it ends
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
        if kind == "first":  # nothing is compiled yet
            environment |= {f"{who}_CACHE_DIR": f"{self.folder.name}/{who}" for who in ("TRITON", "TORCHINDUCTOR")}
        self.process = subprocess.Popen(
            [*WORKER, name, column, "infer" if kind == "infer" else "train"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # together with the compiler's processes
        )
        self.answers: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def hear(self, seconds: float) -> Row:
        """Its next answer; where none comes, the row gets the error."""
        if self.row["error"]:
            return {}
        why = "ended"
        try:
            if (found := self.answers.get(timeout=max(0.0, seconds))) is not None:
                return found
        except queue.Empty:
            why = "no answer in time"
        self.errors.seek(0)
        self.row["error"] = ": ".join([why, *[line.strip() for line in self.errors if line.strip()][-1:]])
        self.end()
        return {}

    def ask(self, what: str) -> Row:
        if self.row["error"]:
            return {}
        with suppress(OSError):  # of a process that is gone, which `hear` notices
            assert self.process.stdin is not None
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
        return self.hear(PATIENCE)

    def take_turn(self) -> None:
        if found := self.ask(TURN):
            self.row["turns"].append(found["turn"])

    def count_kernels(self) -> None:
        self.row |= self.ask(KERNELS)

    def end(self) -> None:
        if self.errors.closed:  # it has ended before, and its number may be another's now
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()
        self.folder.cleanup()


def race(workers: list[Worker], rounds: int, ready: float) -> list[Row]:
    """Waits until all are ready, and lets them measure one after the other; who interrupts it gets the whole rounds."""
    try:
        end = time.monotonic() + ready
        for worker in workers:
            worker.row |= worker.hear(end - time.monotonic())
        for i in range(rounds):
            for worker in workers[:: -1 if i % 2 else 1]:
                worker.take_turn()
        for worker in workers if rounds else ():
            worker.count_kernels()
    except KeyboardInterrupt:
        interrupted.set()
        whole = min(len(worker.row["turns"]) for worker in workers)
        for worker in workers:
            del worker.row["turns"][whole:]
    finally:
        for worker in workers:
            worker.end()
    rows = [worker.row for worker in workers]
    for row in rows:
        if row["turns"] and not row["error"]:
            row["pictures_per_second"] = statistics.median(row["turns"])
    return rows


def columns_of(name: str, kind: str, wanted: Sequence[str] = ()) -> list[str]:
    columns = [column for column in COLUMNS[kind] if not wanted or column in wanted]
    there = {"peer": PEERS.get(name), "published": name in PUBLISHED}
    return [column for column in columns if there.get(column.partition("-")[0], True)]


def measure(kind: str, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows, as soon as they are there: all of a model together, and several models if there are places. First steps
    are made alone."""
    alone = kind == "first"
    at_once = 1 if alone else max(1, args.jobs // len(COLUMNS[kind]))
    for i in range(0, len(args.models), at_once):
        if interrupted.is_set():
            return
        names = args.models[i : i + at_once]
        group = [(name, kind, column) for name in names for column in columns_of(name, kind, args.columns)]
        races = [[what] for what in group] if alone else [group]
        rounds = 0 if alone else args.rounds
        yield [row for whats in races for row in race([Worker(*what) for what in whats], rounds, args.ready)]


# Results ----------------------------------------------------------------------------------------------------------


def newest() -> Path | None:
    """The file that was written last."""
    return max(RESULTS.glob("gpu_speed-*.json"), default=None)


def merged(results: Row, rows: list[Row]) -> Row:
    """With these rows in place of older ones of the same model and kind: ratios are those of one run.

    Compiled columns, which take minutes, may come from a run of their own: they are compared with each other alone.
    """

    def group(row: Row) -> tuple[str, str, bool]:
        return row["model"], row["kind"], row["column"].endswith("compiled")

    again = {group(row) for row in rows}
    kept = [row for row in results.get("rows", []) if group(row) not in again]
    return {**results, "rows": kept + rows}


def find(results: Row, name: str, kind: str, column: str) -> Row:
    """A row without an error; empty where there is none."""
    wanted = {"model": name, "kind": kind, "column": column, "error": ""}
    return next((row for row in results["rows"] if wanted.items() <= row.items()), {})


def ratio(results: Row, name: str, kind: str, ours: str, other: str) -> float | None:
    """How many times as fast: the median over the rounds. Who has no other peer is compared with the published code."""
    if other == "peer" and not PEERS.get(name, True):
        other = "published"
    a = find(results, name, kind, ours).get("turns")
    b = find(results, name, kind, other).get("turns")
    return statistics.median(x / y for x, y in zip(a, b, strict=True)) if a and b else None


def table(results: Row, kind: str) -> list[list[str]]:
    """Pictures per second of all models, and the ratios; of first steps the seconds. Columns that were not measured are
    left out."""
    value = "first_seconds" if kind == "first" else "pictures_per_second"
    lines = [["model", *COLUMNS[kind], *(f"{a}/{b}" for a, b in RATIOS[kind])]]
    for name in dict.fromkeys(row["model"] for row in results["rows"] if row["kind"] == kind):
        numbers = [find(results, name, kind, column).get(value) for column in COLUMNS[kind]]
        ratios = [ratio(results, name, kind, *pair) for pair in RATIOS[kind]]
        form = ",.1f" if kind == "first" else ",.0f"
        lines.append([name, *(_text(x, form) for x in numbers), *(_text(x, ".2f") for x in ratios)])
    used = [i for i in range(len(lines[0])) if any(line[i] != "-" for line in lines[1:])]
    return [[line[i] for i in used] for line in lines]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="training steps; by default these and inference")
    parser.add_argument("--infer", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--models", nargs="+", default=[*PEERS])
    known = sorted({column for columns in COLUMNS.values() for column in columns})
    parser.add_argument("--columns", nargs="+", default=[], choices=known, help="by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=16, help="processes of a group")
    parser.add_argument(
        "--ready", type=float, default=240.0, help="seconds until a group must have made its first steps"
    )
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/gpu_speed-DATE.json")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "COLUMN", "KIND"))
    return parser.parse_args(words)


def main() -> None:
    args = arguments()
    if args.one:
        return work(*args.one)
    check_names(args.models)
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA GPU.")
    kinds = [kind for kind in COLUMNS if getattr(args, kind)] or ["train", "infer"]
    start = facts()
    path = args.out or RESULTS / f"gpu_speed-{start['date']}.json"
    results = {**(json.loads(path.read_text()) if path.exists() else {}), **start}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C: what was measured is written
    for rows in (rows for kind in kinds for rows in measure(kind, args)):
        results = merged(results, rows)
        write_text(path, json.dumps(results, indent=1) + "\n")
        for row in rows:
            print(row["model"], row["kind"], row["column"], row["error"] or "measured", flush=True)
    for kind in kinds:
        print("", *aligned(table(results, kind), right=range(1, 20)), sep="\n")
    print(f"\nWrote {path}")


if __name__ == "__main__":
    main()

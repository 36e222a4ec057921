"""All models next to their peers on one GPU: pictures per second, ratios, goals, memory, growth. One table.

    python benchmarks/gpu_models.py [--parts eager train compiled train-compiled growth] [--models cvt_13 ...]
    python benchmarks/gpu_models.py --curves              losses with kernels and without, step by step
    python benchmarks/gpu_models.py --floors              adds the floors to a file; needs no GPU

Every model and its peer share a process and are timed in turns. Processes build and compile at the same time, and then
measure one after the other, alone on the GPU. What is in the file already is not measured again. Numbers of bf16, 224
pixels, batch 256 for inference and 128 for training; inference of Weft's models is that of `weft.fuse`.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from weft.analysis.show import columns
from weft.bench import Contender, Settings, facts, make_rows, race
from weft.files import write_text
from weft.kernels.measure import measure_rates

RESULTS = Path(__file__).parent / "results"
PUBLISHED = "published code"  # its training step on an H200, measured when its environment was still at hand
PUBLISHED_STEPS = {"vitae_tiny": 2650.0, "vitae_small": 965.0}  # pictures per second, eager
PATIENCE = 400.0  # seconds for one process to build and compile


@dataclass(frozen=True)
class Pair:
    """A model of ours, its peer, and the ratios that are wanted: eager and compiled inference, training."""

    ours: str
    peer: str
    eager: float | None
    compiled: float | None
    train: float

    @property
    def names(self) -> list[str]:
        return [self.ours] if self.peer == PUBLISHED else [self.ours, self.peer]

    def goal(self, part: str) -> float | None:
        return self.train if part.startswith("train") else self.eager if part == "eager" else self.compiled


PAIRS = (
    Pair("ceit_tiny", "deit_tiny_patch16_224", 0.65, 0.75, 0.65),
    Pair("ceit_small", "deit_small_patch16_224", 0.75, 0.85, 0.75),
    Pair("ceit_base", "deit_base_patch16_224", 0.85, 0.90, 0.85),
    Pair("cvt_13", "hf:cvt-13", 2.5, 2.0, 2.5),
    Pair("cvt_21", "hf:cvt-21", 2.5, 2.0, 2.5),
    Pair("cetnet_tiny", "swin_tiny_patch4_window7_224", 1.8, 1.3, 1.3),
    Pair("vitae_tiny", PUBLISHED, None, None, 2.5),
    Pair("vitae_small", PUBLISHED, None, None, 2.5),
    Pair("vt_resnet18", "resnet18", 1.0, 1.05, 1.0),
    Pair("vt_resnet50", "resnet50", 1.0, 1.05, 1.0),
)
PARTS = ("eager", "train", "compiled", "train-compiled", "growth")
WORDS = {
    "eager": "inference, eager",
    "compiled": "inference, compiled",
    "train": "training step, eager",
    "train-compiled": "training step, compiled",
}


@dataclass(frozen=True)
class Plan:
    """What is measured and how long; tests have a smaller one."""

    pairs: tuple[Pair, ...] = PAIRS
    device: str = "cuda"
    dtype: str = "bf16"
    img_size: int = 224
    batch: int = 256
    train_batch: int = 128
    seconds: float = 0.5  # of timing, for each row
    rounds: int = 5
    growing: tuple[str, ...] = ("ceit_small", "cvt_13", "cetnet_tiny")
    grow_batches: tuple[int, ...] = (1, 8, 64, 256, 512)
    grow_sizes: tuple[int, ...] = (224, 384, 512)
    grow_batch: int = 64  # at all sizes

    def settings(self, part: str) -> Settings:
        train = part.startswith("train")
        batch = self.train_batch if train else self.batch
        return Settings(train, part.endswith("compiled"), batch, self.img_size, self.dtype, self.device)

    def growth(self) -> list[Settings]:
        start = replace(self.settings("eager"), batch=self.grow_batch)
        by_batch = [replace(start, batch=batch) for batch in self.grow_batches]
        return list(dict.fromkeys([*by_batch, *(replace(start, img_size=size) for size in self.grow_sizes)]))


# In a process of its own ------------------------------------------------------------------------------------------


class Desk:
    """Measures one pair. `prepare` may run beside others, `measure` and `grow` must not."""

    def __init__(self, pair: Pair, plan: Plan) -> None:
        self.pair, self.plan = pair, plan
        self.ready: dict[str, list[Contender]] = {}

    def prepare(self, parts: list[str]) -> None:
        import torch._functorch.config as functorch

        functorch.force_non_lazy_backward_lowering = True  # compile the backward before there are activations
        for part in parts:
            self.ready[part] = [patiently(name, self.plan.settings(part)) for name in self.pair.names]

    def measure(self, part: str) -> list[dict[str, Any]]:
        contenders = self.ready.pop(part)
        times = race(contenders, self.plan.seconds, self.plan.rounds)
        rows = make_rows(contenders, times, {self.pair.ours: self.pair.peer})
        del contenders
        free()
        return [{"part": part, "batch": self.plan.settings(part).batch, **asdict(row)} for row in rows]

    def grow(self) -> list[dict[str, Any]]:
        rows = []
        for settings in self.plan.growth():
            contenders = [Contender(name, settings) for name in self.pair.names]
            times = race(contenders, self.plan.seconds / 2, rounds=3)
            for row in make_rows(contenders, times, {self.pair.ours: self.pair.peer}):
                rows.append({"img_size": settings.img_size, "batch": settings.batch, **asdict(row)})
            del contenders
            free()
        return rows


def patiently(name: str, settings: Settings, tries: int = 8) -> Contender:
    """A model that is ready; where others hold the memory just now, it waits and tries again."""
    for left in reversed(range(tries)):
        contender = Contender(name, settings)
        free()
        if "memory" not in contender.error or not left or settings.device == "cpu":
            break
        time.sleep(3)
    return contender


def free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def serve(connection: Connection, pair: Pair, plan: Plan) -> None:
    desk = Desk(pair, plan)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(desk, method)(*args), ""))
        except Exception:
            connection.send((None, traceback.format_exc(limit=-4)))


class Remote:
    """A desk in its own process."""

    def __init__(self, pair: Pair, plan: Plan, context: Any) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, pair, plan))  # no daemon: compiling starts processes
        self.process.start()
        other.close()
        self.pair = pair

    def ask(self, method: str, *args: Any) -> Any:
        try:
            self.connection.send((method, args))
            if not self.connection.poll(PATIENCE):
                raise TimeoutError(f"took longer than {PATIENCE:g} s")
            answer, error = self.connection.recv()
        except (EOFError, OSError, TimeoutError) as gone:
            self.end()
            answer, error = None, f"its process is gone: {gone or type(gone).__name__}"
        if error:
            print(f"{self.pair.ours}: {method} failed: {error}", flush=True)
        return answer

    def end(self) -> None:
        self.connection.close()
        self.process.join(2)
        self.process.kill()


# The run ----------------------------------------------------------------------------------------------------------


def run(plan: Plan, parts: Iterable[str], path: Path, open_desks: Callable[..., dict[str, Any]] | None = None) -> None:
    """Measures what `path` does not have yet, and writes it there row by row."""
    results = load(path)
    todo = {part: missing(plan, results, part) for part in PARTS if part in parts}
    pairs = [pair for pair in plan.pairs if any(pair in pairs for pairs in todo.values())]
    desks = (open_desks or start)(pairs, plan)

    def save(section: str, rows: list[dict[str, Any]] | None) -> None:
        again = {(row.get("part"), row["model"]) for row in rows or []}
        kept = [row for row in results.get(section, []) if (row.get("part"), row["model"]) not in again]
        results[section] = kept + (rows or [])
        write_text(path, json.dumps(results, indent=1) + "\n")

    try:
        if "rates" not in results and plan.device == "cuda":
            results["rates"] = asdict(measure_rates(torch.device("cuda")))
        for together in (("eager", "train"), ("compiled",), ("train-compiled",)):
            prepare_all(desks, {part: todo.get(part, []) for part in together})
            for part in together:
                for pair in todo.get(part, []):
                    rows = desks[pair.ours].ask("measure", part)
                    save("rows", rows)
                    print("\n".join(row_lines(pair, part, rows or [])), flush=True)
        for pair in todo.get("growth", []):
            save("growth", desks[pair.ours].ask("grow"))
            print(f"{pair.ours}: growth measured", flush=True)
    finally:
        for desk in desks.values():
            desk.end()


def start(pairs: list[Pair], plan: Plan) -> dict[str, Remote]:
    kinds = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in kinds else "spawn")
    if "forkserver" in kinds:
        context.set_forkserver_preload(["weft.bench"])  # imported once for all
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")  # of each process; there are as many as pairs
    return {pair.ours: Remote(pair, plan, context) for pair in pairs}


def prepare_all(desks: dict[str, Any], todo: dict[str, list[Pair]]) -> None:
    """All at once: what takes long is compiling, on the CPU."""
    wanted = {name: [part for part, pairs in todo.items() if name in {p.ours for p in pairs}] for name in desks}
    wanted = {name: parts for name, parts in wanted.items() if parts}
    begin = time.monotonic()
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        list(pool.map(lambda name: desks[name].ask("prepare", wanted[name]), wanted))
    if wanted:
        print(f"prepared {', '.join(todo)} in {time.monotonic() - begin:.0f} s", flush=True)


def newest() -> Path:
    """The file that was written last."""
    files = sorted(RESULTS.glob("gpu_models-*.json"))
    if not files:
        raise SystemExit("There are no results yet: run benchmarks/gpu_models.py on a GPU.")
    return files[-1]


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else facts()


def missing(plan: Plan, results: dict[str, Any], part: str) -> list[Pair]:
    if part == "growth":
        done = {row["model"] for row in results.get("growth", [])}
        return [pair for pair in plan.pairs if pair.ours in plan.growing and pair.ours not in done]
    done = {row["model"] for row in results.get("rows", []) if row["part"] == part and not row["error"]}
    return [pair for pair in plan.pairs if not done.issuperset(pair.names)]


# The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A pair in one part of the table."""

    pair: Pair
    part: str
    ours: float
    peer: float | None
    ratio: float | None
    goal: float | None
    gib: float | None
    peer_gib: float | None
    milliseconds: float
    floor: float | None  # milliseconds


def table(results: dict[str, Any], pairs: Iterable[Pair] = PAIRS) -> Iterator[Line]:
    """The lines of all pairs that were measured, part by part."""
    rows = {(row["part"], row["model"]): row for row in results.get("rows", []) if not row["error"]}
    floors = results.get("floors", {})
    for part in WORDS:
        for pair in pairs:
            ours, peer = rows.get((part, pair.ours)), rows.get((part, pair.peer))
            if ours is None:
                continue
            theirs = peer["pictures_per_second"] if peer else None
            if pair.peer == PUBLISHED and part.startswith("train"):
                theirs = PUBLISHED_STEPS.get(pair.ours)
            yield Line(
                pair=pair,
                part=part,
                ours=ours["pictures_per_second"],
                peer=theirs,
                ratio=ours["ratio"] or (theirs and ours["pictures_per_second"] / theirs),
                goal=pair.goal(part),
                gib=ours["gib"],
                peer_gib=peer["gib"] if peer else None,
                milliseconds=ours["milliseconds"],
                floor=floors.get(pair.ours, {}).get("train" if part.startswith("train") else "inference"),
            )


def row_lines(pair: Pair, part: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["error"]:
            yield f"{WORDS[part]:24} {row['model']}: {row['error']}"
    for line in table({"rows": rows}, [pair]):
        yield "  ".join(cells(line))


HEADER = ["", "model", "peer", "ours", "peer's", "ratio", "goal", "GiB", "peer's", "ms", "floor ms", "times floor"]


def cells(line: Line) -> list[str]:
    def number(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    goal = number(line.goal) + (" met" if line.goal and line.ratio and line.ratio >= line.goal else "")
    return [
        WORDS[line.part],
        line.pair.ours,
        line.pair.peer,
        number(line.ours, ",.0f"),
        number(line.peer, ",.0f"),
        number(line.ratio),
        goal,
        number(line.gib),
        number(line.peer_gib),
        number(line.milliseconds),
        number(line.floor),
        number(line.floor and line.milliseconds / line.floor),
    ]


def add_floors(path: Path, plan: Plan) -> None:
    """The floors of all models in the file, in milliseconds, at the rates that were measured with them."""
    from floors import floor, kernels_of

    results = load(path)
    rates, names = results["rates"], {row["model"] for row in results["rows"] if not row["error"]}
    for name in sorted(names):
        for kind, batch in (("inference", plan.batch), ("train", plan.train_batch)):
            kernels = kernels_of(name, batch, plan.img_size, kind == "train")
            least = 1000 * floor(kernels, rates["copy"], rates["matrix"])
            results.setdefault("floors", {}).setdefault(name, {})[kind] = round(least, 4)
    write_text(path, json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="*", help="of ours; by default all")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing for each row")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--floors", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gpu_models-{date.today().isoformat()}.json")
    args = parser.parse_args()
    plan = Plan(pairs=tuple(p for p in PAIRS if not args.models or p.ours in args.models), seconds=args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.floors:
        add_floors(args.out, plan)
    elif args.curves:
        from curves import all_curves

        results = load(args.out) | {"curves": all_curves()}
        write_text(args.out, json.dumps(results, indent=1) + "\n")
        return
    else:
        run(plan, args.parts, args.out)
    print("\n".join(columns([HEADER, *map(cells, table(load(args.out)))], right=range(3, 12))))
    print(f"Wrote {args.out}")


if __name__ == "__main__":
    main()

"""All models next to their peers on one GPU: pictures per second, ratios, goals, memory, growth. One table.

    python benchmarks/gpu_models.py [--parts eager train compiled ...] [--models cvt_13 ...]
    python benchmarks/gpu_models.py --prepare             compiles everything, in many processes, and measures nothing
    python benchmarks/gpu_models.py --curves              losses with kernels and without, step by step
    python benchmarks/gpu_models.py --floors              adds the floors to a file; needs no GPU

Every model and its peer share a process and are timed in turns. Processes build and compile at the same time, and then
measure one after the other, alone on the GPU. What is in the file already is not measured again. Numbers of bf16, 224
pixels, batch 256 for inference and 128 for training; inference of Weft's models is that of `weft.fuse`. Replayed means
that the launches of the eager model were recorded once, as a CUDA graph: what the GPU does where Python is too slow.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from speed_table import HEADER, PAIRS, PUBLISHED, RESULTS, WORDS, Pair, cells, load, row_lines, table

from weft.analysis.show import columns
from weft.bench import Contender, Settings, make_model, make_rows, race
from weft.files import write_text
from weft.kernels.measure import measure_rates

PATIENCE = 400.0  # seconds for one process to build and compile


PARTS = (*WORDS, "growth")
RECORDED = {part: part.removesuffix("-replayed") for part in WORDS if part.endswith("-replayed")} | {
    "replayed": "eager"
}
LONGEST_FIRST = ("train-compiled", "compiled", "growth", "train", "eager")
PHASES = (
    ("eager", "replayed", "train", "train-replayed", "train-wrapped"),
    ("compiled", "compiled-replayed", "train-compiled", "train-compiled-replayed"),
)  # each prepared at once


@dataclass(frozen=True)
class Plan:
    """What is measured and how long; tests have a smaller one."""

    pairs: tuple[Pair, ...] = PAIRS
    device: str = "cuda"
    dtype: str = "bf16"
    img_size: int = 224
    batch: int = 256
    train_batch: int = 128
    seconds: float = 0.4  # of timing, for each row
    rounds: int = 5
    growing: tuple[str, ...] = ("ceit_small", "cvt_13", "cetnet_tiny")
    grow_batches: tuple[int, ...] = (1, 8, 64, 256, 512)
    grow_sizes: tuple[int, ...] = (224, 384, 512)
    grow_batch: int = 64  # at all sizes

    def settings(self, part: str) -> Settings:
        train = part.startswith("train")
        batch = self.train_batch if train else self.batch
        return Settings(
            train=train,
            compile=part.endswith("compiled"),
            wrap=part.endswith("wrapped"),
            batch=batch,
            img_size=self.img_size,
            dtype=self.dtype,
            device=self.device,
        )

    def growth(self) -> dict[int, list[int]]:
        """The batches at each size."""
        found = {size: [self.grow_batch] for size in self.grow_sizes}
        return {**found, self.img_size: sorted({*self.grow_batches, *found.get(self.img_size, [])})}


# In a process of its own ------------------------------------------------------------------------------------------


class Desk:
    """Measures one pair. `prepare` may run beside others, `measure` and `grow` must not."""

    def __init__(self, pair: Pair, plan: Plan) -> None:
        self.pair, self.plan = pair, plan
        self.ready: dict[str, list[Contender]] = {}

    def prepare(self, parts: list[str]) -> None:
        for part in parts:
            self.ready[part] = [patiently(name, self.plan.settings(part)) for name in self.pair.names]

    def measure(self, part: str, keep: bool = False) -> list[dict[str, Any]]:
        """The rows of a part; `keep` the models, which are to be replayed next."""
        contenders = self.ready.pop(RECORDED.get(part, part))
        if part in RECORDED:
            for contender in contenders:
                contender.replay()
        times = race(contenders, self.plan.seconds, self.plan.rounds)
        rows = make_rows(contenders, times, {self.pair.ours: self.pair.peer})
        if keep:
            self.ready[part] = contenders
        del contenders
        free()
        return [{"part": part, "batch": self.plan.settings(part).batch, **asdict(row)} for row in rows]

    def grow(self) -> list[dict[str, Any]]:
        """Rows of all sizes and batches, launches replayed: with few pictures Python is what takes the time."""
        rows = []
        for size, batches in self.plan.growth().items():
            settings = replace(self.plan.settings("eager"), img_size=size, replay=True)
            models = {name: make_model(name, settings) for name in self.pair.names}
            for batch in batches:
                contenders = [Contender(name, replace(settings, batch=batch), models[name]) for name in models]
                times = race(contenders, self.plan.seconds / 2, rounds=3)
                for row in make_rows(contenders, times, {self.pair.ours: self.pair.peer}):
                    rows.append({"img_size": size, "batch": batch, **asdict(row)})
                del contenders
                free()
        return rows


def patiently(name: str, settings: Settings, tries: int = 8) -> Contender:
    """A model that is ready; where others hold the memory just now, it waits and tries again."""
    for left in reversed(range(tries)):
        contender = Contender(name, settings)
        free()
        if not any(word in contender.error for word in ("memory", "ALLOC_FAILED")) or not left:
            break
        time.sleep(3)
    return contender


def free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compile_early() -> None:
    """Compiles a model's backward together with its forward, when there are no activations in memory yet."""
    import torch._functorch.config as functorch

    functorch.force_non_lazy_backward_lowering = True


def serve(connection: Connection, pair: Pair, plan: Plan) -> None:
    compile_early()
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


def run(plan: Plan, parts: Iterable[str], path: Path, open_desks: Callable[..., dict[Any, Any]] | None = None) -> None:
    """Measures what `path` does not have yet, and writes it there row by row."""
    results = load(path)
    todo = {part: missing(plan, results, part) for part in PARTS if part in parts}
    desks = (open_desks or start)(sorted({desk_of(part, pair) for part in todo for pair in todo[part]}), plan)

    def save(section: str, rows: list[dict[str, Any]] | None) -> None:
        again = {(row.get("part"), row["model"]) for row in rows or []}
        kept = [row for row in results.get(section, []) if (row.get("part"), row["model"]) not in again]
        results[section] = kept + (rows or [])
        write_text(path, json.dumps(results, indent=1) + "\n")

    try:
        if "rates" not in results and plan.device == "cuda":
            results["rates"] = asdict(measure_rates(torch.device("cuda")))
            free()
        for phase in PHASES:
            wanted = {part: todo.get(part, []) for part in phase}
            prepare_all(desks, wanted)
            for part, pairs in wanted.items():
                for pair in pairs:
                    keep = any(base == part and pair in todo.get(later, []) for later, base in RECORDED.items())
                    rows = desks[desk_of(part, pair)].ask("measure", part, keep)
                    save("rows", rows)
                    print("\n".join(row_lines(pair, part, rows or [])), flush=True)
        for pair in todo.get("growth", []):
            save("growth", desks[desk_of("growth", pair)].ask("grow"))
            print(f"{pair.ours}: growth measured", flush=True)
    finally:
        for desk in desks.values():
            desk.end()


def desk_of(part: str, pair: Pair) -> tuple[str, bool]:
    """Who measures: a process for the inference and another for the training of every pair."""
    return pair.ours, part.startswith("train")


def start(names: list[tuple[str, bool]], plan: Plan) -> dict[tuple[str, bool], Remote]:
    pairs = {pair.ours: pair for pair in plan.pairs}
    context = processes()
    return {name: Remote(pairs[name[0]], plan, context) for name in names}


def processes() -> Any:
    """The way to start processes, each of which has all imports at once where the system allows it."""
    kinds = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in kinds else "spawn")
    if "forkserver" in kinds:
        context.set_forkserver_preload(["weft.bench"])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each process; there are many
    return context


def prepare_all(desks: dict[tuple[str, bool], Any], todo: dict[str, list[Pair]]) -> None:
    """All at once: what takes long is done by the CPU."""
    wanted: dict[tuple[str, bool], list[str]] = {}
    for part, pairs in todo.items():
        for pair in pairs:
            parts = wanted.setdefault(desk_of(part, pair), [])
            parts += {RECORDED.get(part, part)} - {*parts}
    begin = time.monotonic()
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        list(pool.map(lambda name: desks[name].ask("prepare", wanted[name]), wanted))
    if wanted:
        print(f"prepared {', '.join(todo)} in {time.monotonic() - begin:.0f} s", flush=True)


def missing(plan: Plan, results: dict[str, Any], part: str) -> list[Pair]:
    if part == "growth":
        done = {row["model"] for row in results.get("growth", [])}
        return [pair for pair in plan.pairs if pair.ours in plan.growing and pair.ours not in done]
    done = {row["model"] for row in results.get("rows", []) if row["part"] == part and not row["error"]}
    return [pair for pair in plan.pairs if not done.issuperset(pair.names)]


# Compiling --------------------------------------------------------------------------------------------------------


def prepare_only(plan: Plan, parts: Iterable[str], workers: int) -> bool:
    """Fills the caches of Triton and of torch.compile: each model in each part in a process of its own.

    Whether all went well.
    """
    ours, growing = {pair.ours for pair in plan.pairs}, {*plan.growing}
    tasks = [
        (name, part)
        for part in LONGEST_FIRST
        for pair in plan.pairs
        for name in pair.names
        if part in parts
        and (part.endswith("compiled") or name in ours)  # nothing of the others' is compiled
        and (part != "growth" or name in growing)
    ]
    begin, well = time.monotonic(), True
    with ProcessPoolExecutor(workers, processes(), max_tasks_per_child=1) as pool:
        futures = {pool.submit(prepare_one, plan, *task): task for task in tasks}
        for future in as_completed(futures):
            name, part = futures[future]
            error = future.exception() or future.result()
            print(f"{time.monotonic() - begin:4.0f} s  {name} {part}: {error or 'ready'}", flush=True)
            well = well and not error
    return well


def prepare_one(plan: Plan, name: str, part: str) -> str:
    """What went wrong."""
    compile_early()
    if part == "growth":
        alone = Pair(name, PUBLISHED, None, None, 1.0)
        errors = {row["error"] for row in Desk(alone, plan).grow()} - {""}
    else:
        errors = {patiently(name, plan.settings(part)).error} - {""}
    return "; ".join(errors)


def add_floors(path: Path, plan: Plan) -> None:
    """The floors of all models of ours in the file, in milliseconds, at the rates that were measured with them."""
    from floors import floor, kernels_of

    results = load(path)
    rates, names = results["rates"], {row["model"] for row in results["rows"] if not row["error"]}
    for name in sorted(names & {pair.ours for pair in plan.pairs}):
        for kind, batch in (("inference", plan.batch), ("train", plan.train_batch)):
            kernels = kernels_of(name, batch, plan.img_size, kind == "train")
            least = 1000 * floor(kernels, rates["copy"], rates["matrix"])
            results.setdefault("floors", {}).setdefault(name, {})[kind] = round(least, 4)
    write_text(path, json.dumps(results, indent=1) + "\n")


def add_curves(path: Path) -> None:
    from curves import all_curves, in_words

    results = load(path)
    for name, curve in all_curves():
        results.setdefault("curves", {})[name] = curve
        write_text(path, json.dumps(results, indent=1) + "\n")
        print(in_words(name, curve), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="*", help="of ours; by default all")
    parser.add_argument("--seconds", type=float, default=Plan.seconds, help="of timing, for each row")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that prepare")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--floors", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gpu_models-{date.today().isoformat()}.json")
    args = parser.parse_args()
    known = [pair.ours for pair in PAIRS]
    if unknown := [name for name in args.models or [] if name not in known]:
        parser.error(f"there is no model {unknown[0]!r} in the table; choose from {', '.join(known)}")
    if args.floors and not {"rows", "rates"} <= load(args.out).keys():
        parser.error(f"{args.out} has no results to add floors to; name a file with --out")
    if not args.floors and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; `weft bench` measures on a CPU, too")
    plan = Plan(pairs=tuple(p for p in PAIRS if not args.models or p.ours in args.models), seconds=args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.prepare:
        raise SystemExit(not prepare_only(plan, args.parts, args.workers))
    if args.floors:
        add_floors(args.out, plan)
    elif args.curves:
        add_curves(args.out)
        return
    else:
        run(plan, args.parts, args.out)
    print("\n".join(columns([HEADER, *map(cells, table(load(args.out)))], right=range(3, 12))))
    print(f"Wrote {args.out}")


if __name__ == "__main__":
    main()

"""Measures every kernel at the shapes that the models have, and writes the table that `choose` reads.

    weft bench --kernels [--only OPERATION...] [--json FILE]
    python -m weft.kernels.measure [--only OPERATION...] [--out FILE]

First every case is compared with its twin, with every candidate of launch parameters; then the twin and the candidates
that were right are timed. The floor of a case is the larger of two times: its bytes at the rate of a copy, and its
multiplications at the rate of a large matrix product, both measured here.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.errors import WeftError
from weft.kernels import choose
from weft.kernels.case import Case, all_cases, in_a_line
from weft.kernels.compare import Outcome, Outcomes, compare_all, fresh_inputs, tolerance
from weft.kernels.switch import OLDEST_TRITON, has_triton, switched

COMPARE_SECONDS = 100.0  # after these no further comparison is begun
ROTATE = 160 * 2**20  # bytes of different inputs, so that none lies in the cache (60 MB) when its turn comes
MOST_SETS = 12
CALLS, REPLAYS = 4, 5
MATRIX = 8192  # side of the matrices whose product gives the matrix rate

Clock = Callable[[Callable[..., Any], list[tuple[Any, ...]]], float]  # seconds for a call with one of some inputs


@dataclass(frozen=True)
class Rates:
    """What the machine can do: bytes per second of a copy, read and written, and operations of a matrix product."""

    copy: float
    matrix: float

    def floor(self, case: Case) -> float:
        """The seconds under which no kernel gets."""
        return max(case.bytes / self.copy, case.flops / self.matrix)


@dataclass
class Finding:
    case: Case
    floor: float
    plain: float = 0.0
    best: float = 0.0  # seconds; 0 where no candidate was right
    launch: dict[str, Any] = field(default_factory=dict)
    error: float = 0.0  # relative, of the best
    wrong: bool = False  # a candidate ran and computed something else
    notes: list[str] = field(default_factory=list)  # what failed, and why

    @property
    def gain(self) -> float:
        """How many times faster than the twin; 1 where the twin cannot be timed, 0 where no kernel is right."""
        return (self.plain / self.best if self.plain else 1.0) if self.best else 0.0

    def row(self) -> choose.Row | None:
        """A row of the table; a gain of 0 keeps a kernel from being used.

        None where nothing is known: no time was left, or nothing ran, which may be the fault of the moment.
        """
        if not (self.best or self.wrong):
            return None
        return {
            "shape": self.case.shape,
            "launch": self.launch,
            "gain": round(self.gain, 3),
            "us": round(1e6 * self.best, 2),
            "floor_us": round(1e6 * self.floor, 2),
        }


def measure(
    only: list[str] | None = None,
    device: torch.device | None = None,
    seconds: float = COMPARE_SECONDS,
    say: Callable[[str], None] = print,
) -> Iterator[Finding]:
    """Compares all cases, then times them one by one. `only`: beginnings of operations' names."""
    device = device or torch.device("cuda")
    all_of_them, problems = all_cases()
    for problem in problems:
        say(problem)
    for name in only or []:
        if not any(case.operation.startswith(name) for case in all_of_them):
            known = sorted({case.operation for case in all_of_them})
            raise WeftError(f"No kernel's name begins with {name!r}; there are {', '.join(known)}.")
    cases = {n: case for n, case in enumerate(all_of_them) if not only or case.operation.startswith(tuple(only))}
    tries, start = sum(len(case.candidates) for case in cases.values()), time.monotonic()
    say(f"{len(cases)} cases, {tries} candidates: comparing with the twins")
    workers = max(1, min(len(cases), (os.cpu_count() or 2) - 2))
    outcomes = compare_all(cases, device, workers, seconds)
    say(f"compared {len(outcomes)} in {time.monotonic() - start:.0f} s")
    rates = measure_rates(device)
    say(f"copy {rates.copy / 1e12:.2f} TB/s, matrix product {rates.matrix / 1e12:.0f} TFLOP/s")
    for number, case in cases.items():
        try:
            yield measure_case(case, _of(outcomes, number, case), rates, device, time_call)
        except torch.OutOfMemoryError as error:  # and the next ones may fit
            say(f"{case.operation} {words(case.shape)}: {in_a_line(error)}")


def _of(outcomes: Outcomes, number: int, case: Case) -> list[Outcome]:
    return [outcomes.get((number, i), "was not compared: no time left") for i in range(len(case.candidates))]


def measure_case(case: Case, outcomes: list[Outcome], rates: Rates, device: torch.device, clock: Clock) -> Finding:
    """Times the twin and every candidate whose outcome is a small error; the fastest wins."""
    finding = Finding(case, rates.floor(case))
    failures: dict[str, list[str]] = {}  # what went wrong, and with which candidates

    def timed(call: Callable[..., Any], kernels: bool, launch: dict[str, Any], who: str) -> float:
        try:
            with switched(kernels), choose.forced(launch):
                return clock(call, sets)
        except Exception as error:
            failures.setdefault(f"fails: {in_a_line(error)}", []).append(who)
            return 0.0

    sets = [fresh_inputs(case, device) for _ in range(max(1, min(MOST_SETS, ROTATE // max(case.bytes, 1))))]
    allowed = tolerance(case, device)
    finding.plain = timed(case.plain, False, {}, "the twin")
    for launch, outcome in zip(case.candidates, outcomes, strict=True):
        if isinstance(outcome, str):
            failures.setdefault(outcome, []).append(words(launch))
            continue
        wrong = [f"output {i} by {error:.1e}" for i, error in enumerate(outcome) if not error <= allowed]  # NaN, too
        if wrong:
            finding.wrong = True
            failures.setdefault(f"wrong: {', '.join(wrong)}", []).append(words(launch))
        elif (took := timed(case.kernel, True, dict(launch), words(launch))) and not 0 < finding.best <= took:
            finding.best, finding.launch, finding.error = took, dict(launch), max(outcome, default=0.0)
    for what, who in failures.items():
        finding.notes.append(f"{who[0]}{f' and {len(who) - 1} more' if who[1:] else ''}: {what}")
    return finding


def time_call(call: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
    """Seconds of GPU time: the median of replays of a graph of several calls, which leaves launching out.

    What cannot be captured in a graph is launched call by call.
    """
    for inputs in sets[:2]:
        call(*inputs)
    torch.cuda.synchronize()
    runs = max(CALLS, len(sets)) if _milliseconds(lambda: call(*sets[0])) < 2 else len(sets)
    turns = [sets[i % len(sets)] for i in range(runs)]

    def launch() -> None:
        for inputs in turns:
            call(*inputs)

    graph, run = torch.cuda.CUDAGraph(), launch
    try:
        with torch.cuda.graph(graph):
            launch()
        run = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
    run()
    took = statistics.median(_milliseconds(run) for _ in range(REPLAYS))
    return took / 1000 / runs


def _milliseconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_rates(device: torch.device) -> Rates:
    """A pass over a large tensor and a large bf16 matrix product, on random numbers."""
    source = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    target = torch.empty_like(source)
    # A kernel reads and writes faster than the copy that a graph makes of `clone`.
    copy = time_call(lambda x: torch.neg(x, out=target), [(source,)])
    product = time_call(torch.matmul, [(a, b)])
    return Rates(2 * source.nbytes / copy, 2 * MATRIX**3 / product)


def words(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "default"


HEADER = (
    f"{'operation':24} {'floor us':>9} {'best us':>9} {'of floor':>8} {'twin us':>9} {'gain':>6} {'error':>8}"
    "  shape: launch parameters"
)


def lines(finding: Finding) -> Iterator[str]:
    """A row of the table on the terminal, and a line for every candidate that failed."""
    best = f"{1e6 * finding.best:9.1f} {finding.floor / finding.best:8.0%}" if finding.best else f"{'none':>9} {'-':>8}"
    yield (
        f"{finding.case.operation:24} {1e6 * finding.floor:9.1f} {best} {1e6 * finding.plain:9.1f}"
        f" {finding.gain:6.2f} {finding.error:8.1e}  {words(finding.case.shape)}: {words(finding.launch)}"
    )
    for note in finding.notes:
        yield f"    {note}"


def measure_into(table: Path, only: list[str] | None = None, seconds: float = COMPARE_SECONDS) -> list[Finding]:
    """Measures, prints and writes the table, row by row: what is interrupted keeps what it has."""
    findings = []
    for finding in measure(only, seconds=seconds, say=lambda line: print(line, flush=True)):
        if not findings:
            print(HEADER)
        print("\n".join(lines(finding)), flush=True)
        findings.append(finding)
        if row := finding.row():
            choose.write_row(table, choose.gpu_name(torch.device("cuda")), finding.case.operation, row)
    right, unknown = sum(f.best > 0 for f in findings), sum(f.row() is None for f in findings)
    print(f"{table}: {right} of {len(findings)} cases have a kernel that is right.")
    if unknown:
        print(f"Nothing was found out about {unknown} and nothing written of them; --only measures some again.")
    return findings


def why_not() -> str:
    """Why nothing can be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return "Kernels are measured on a GPU, and this machine has none; models can be: weft bench cvt_13"
    oldest = ".".join(map(str, OLDEST_TRITON))
    return "" if has_triton() else f"Kernels need Triton {oldest} or newer: pip install triton"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="beginnings of operations' names")
    parser.add_argument("--out", type=Path, help="the table to write; by default this machine's own")
    parser.add_argument("--seconds", type=float, default=COMPARE_SECONDS, help="for comparing, compilation included")
    args = parser.parse_args()
    if why := why_not():
        parser.error(why)
    measure_into(args.out or choose.own_table(), args.only, args.seconds)


if __name__ == "__main__":
    main()

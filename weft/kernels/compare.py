"""Whether kernels compute what their twins do, for all cases and all launch parameters, in processes of their own.

A kernel that crashes takes only its process with it. The processes also share the work of compiling: what they compiled
lies in Triton's cache afterwards.
"""

import json
import multiprocessing
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from weft.kernels import choose
from weft.kernels.case import Case, all_cases, in_a_line
from weft.kernels.switch import switched

Outcome = list[float] | str  # the relative errors of all outputs, or why there are none
Outcomes = dict[tuple[int, int], Outcome]  # of (number of the case, number of its candidate)
PATIENCE = 60.0  # seconds for one case with one candidate, compilation included
GRACE = 10.0  # for what is under way when the time is over
HALF, SINGLE = 2e-2, 2e-3  # the largest relative error of kernels on 16-bit and on 32-bit inputs


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def fresh_inputs(case: Case, device: torch.device) -> tuple[Any, ...]:
    """The same random inputs at every call: a kernel may write into them."""
    torch.manual_seed(0)
    return case.inputs(device)


def tolerance(case: Case, device: torch.device) -> float:
    half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors_in(case.inputs(device)))
    return HALF if half else SINGLE


def relative_errors(case: Case, launch: dict[str, Any], device: torch.device) -> list[float]:
    """Of every output the larger of ‖kernel - twin‖ / ‖twin‖ and the same for the largest single values.

    The second sees a wrong edge that drowns in the first. NaN where the kernel gives one.
    """
    wanted = tensors_in(_reference(case, device))
    with switched(True), choose.forced(launch):
        found = tensors_in(case.kernel(*fresh_inputs(case, device)))
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"gives {shapes[0]} where the twin gives {shapes[1]}")
    return [_difference(a, b) for a, b in zip(found, wanted, strict=True)]


def _reference(case: Case, device: torch.device) -> Any:
    """The twin's outputs, computed in float32 where it takes that."""
    with switched(False), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        try:
            return case.plain(*map(_wide, fresh_inputs(case, device)))
        except (RuntimeError, TypeError, ValueError):
            return case.plain(*fresh_inputs(case, device))


def _wide(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_wide, value))
    if not isinstance(value, Tensor) or value.dtype not in (torch.bfloat16, torch.float16):
        return value
    return value.detach().float().requires_grad_(value.requires_grad)


def _difference(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().float(), wanted.detach().float()
    off, tiny = found - wanted, torch.finfo(torch.float32).tiny
    norms = off.norm() / wanted.norm().clamp_min(tiny)
    peaks = off.abs().max() / wanted.abs().max().clamp_min(tiny) if off.numel() else norms
    return torch.maximum(norms, peaks).item()


def compare_all(cases: dict[int, Case], device: torch.device, workers: int, seconds: float) -> Outcomes:
    """Every case with every candidate, in `workers` processes; what was not begun after `seconds` has no outcome.

    `cases` by their number in `all_cases`, since functions cannot be sent to processes. A task is one operation with
    one candidate at all shapes, because those share compiled kernels; the longest tasks come first.
    """
    tasks: dict[str, list[tuple[int, int]]] = {}
    for number, case in cases.items():
        for i, candidate in enumerate(case.candidates):
            tasks.setdefault(json.dumps([case.operation, candidate], sort_keys=True), []).append((number, i))
    waiting = deque(sorted(tasks.values(), key=len, reverse=True))
    deadline = time.monotonic() + seconds
    outcomes: Outcomes = {}

    def serve(_: int) -> None:
        worker = _Worker(device)
        while waiting and time.monotonic() < deadline:
            try:
                task = waiting.popleft()
            except IndexError:
                break
            for key in task:
                left = deadline - time.monotonic()
                if left > 0:
                    outcomes[key] = worker.ask(key, min(PATIENCE, left + GRACE))
        worker.end()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(serve, range(workers)))
    return outcomes


class _Worker:
    """A process that compares, and is started again after it has died or hung."""

    def __init__(self, device: torch.device) -> None:
        kinds = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in kinds else "spawn")
        if "forkserver" in kinds:
            self.context.set_forkserver_preload(["weft.kernels.compare", "timm"])  # imported once for all
        self.device = device
        self.process: Any = None

    def start(self) -> None:
        self.connection, other = self.context.Pipe()
        self.process = self.context.Process(target=_answer, args=(other, str(self.device)), daemon=True)
        self.process.start()
        other.close()

    def ask(self, key: tuple[int, int], patience: float) -> Outcome:
        if self.process is None:
            self.start()
        try:
            self.connection.send(key)
            if self.connection.poll(patience):
                outcome, healthy = self.connection.recv()
            else:
                outcome, healthy = f"took longer than {patience:.0f} s", False
        except (EOFError, OSError):
            outcome, healthy = "its process died", False
        if not healthy:
            self.end()
        return outcome

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def _answer(connection: Connection, device_name: str) -> None:
    device = torch.device(device_name)
    cases, _ = all_cases()
    while True:
        try:
            number, candidate = connection.recv()
        except EOFError:
            return
        connection.send(_try(cases[number], dict(cases[number].candidates[candidate]), device))


def _try(case: Case, launch: dict[str, Any], device: torch.device) -> tuple[Outcome, bool]:
    """The outcome, and whether the GPU can still be used by this process."""
    try:
        outcome: Outcome = relative_errors(case, launch, device)
    except Exception as error:
        outcome = in_a_line(error)
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return outcome, True
    except Exception as error:
        return outcome if isinstance(outcome, str) else in_a_line(error), False

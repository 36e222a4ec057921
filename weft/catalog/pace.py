"""The pace of a machine next to that of measured.json: from work of a tenth of a second, before there is a model."""

import time

import torch
import torch.nn.functional as F

from weft.threads import torch_threads

COPIED = 4.0e12  # bytes a second that the table's GPU reads and writes
CPU_STEPS = 1220.0  # ... and training steps a second of `_small_step` on the table's CPU
CLEARLY = 1.2  # times as fast: for less, the usual number of threads stays


def pace(device: torch.device) -> float:
    """Times as fast as the machine of the table, where models as small as these train."""
    if device.type == "cuda":
        return gpu_bandwidth(device) / COPIED
    return cpu_steps(torch.get_num_threads()) / CPU_STEPS


def gpu_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy: small models wait for memory more than for arithmetic."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(8):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize(device)
    return 8 * 2 * source.numel() / (begin.elapsed_time(end) / 1e3)


def choose_threads(usual: int) -> int:
    """Threads with which a small training step is fastest here, of the usual number and less.

    Threads wait for each other several times in every layer. Where another job has one of the cores, all wait for the
    one that is there, and a single thread may be many times as fast as two.
    """
    threads, speeds = usual, {usual: cpu_steps(usual)}
    while threads > 1:
        before, threads = threads, threads // 2
        speeds[threads] = cpu_steps(threads)
        if speeds[threads] < speeds[before]:
            break
    fastest = max(speeds, key=lambda threads: speeds[threads])
    return fastest if speeds[fastest] > CLEARLY * speeds[usual] else usual


def cpu_steps(threads: int, seconds: float = 0.15) -> float:
    """Steps a second of a small block's training, with so many threads."""
    with torch_threads(threads):
        x = torch.ones(16, 32, 16, 16)
        weight = torch.full((32, 32, 3, 3), 0.01, requires_grad=True)
        _small_step(x, weight)
        count, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or count < 3:
            _small_step(x, weight)
            count += 1
        return count / elapsed


def _small_step(x: torch.Tensor, weight: torch.Tensor) -> None:
    """A residual block: a convolution alone tells of arithmetic, which is not what small models wait for."""
    y = F.batch_norm(F.conv2d(x, weight, padding=1), None, None, training=True)
    (x + F.gelu(y)).sum().backward()
    weight.grad = None

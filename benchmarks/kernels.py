"""Kernels next to their references on this GPU, with several launch parameters each: which are right, and fastest.

    python benchmarks/kernels.py [--only OPERATION...] [--out FILE]

What is found belongs into weft/kernels/tuning/launches.py. Shapes are those of the models at 224 pixels, with 128
pictures to train and 256 for what inference has alone. The floor of a case is its tensors, each read or written once,
at the rate of a copy.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.kernels.ops.activation import activation_backward, activation_forward
from weft.kernels.ops.attention import attention_forward
from weft.kernels.ops.batch_norm import batch_norm_act_backward, batch_norm_act_forward, batch_norm_statistics
from weft.kernels.ops.conv_act import conv_act_forward
from weft.kernels.ops.depthwise import depthwise_backward, depthwise_forward
from weft.kernels.ops.grouped import grouped_conv_backward, grouped_conv_forward
from weft.kernels.ops.layer_norm import residual_norm_backward, residual_norm_forward
from weft.kernels.ops.linear_act import linear_act_forward
from weft.kernels.ops.norm_depthwise import norm_depthwise, norm_depthwise_backward
from weft.kernels.ops.op import Operation
from weft.kernels.ops.performer import performer_backward, performer_forward
from weft.kernels.ops.pool import max_pool_backward, max_pool_forward
from weft.kernels.ops.qkv import qkv_backward, qkv_forward
from weft.kernels.ops.residual import add_branch_forward
from weft.kernels.ops.stem import stem_backward, stem_forward
from weft.kernels.ops.token_attention import (
    pixels_to_tokens_backward,
    pixels_to_tokens_forward,
    tokens_to_pixels_backward,
    tokens_to_pixels_forward,
)
from weft.kernels.ops.window_attention import window_attention, window_attention_backward
from weft.kernels.tuning.ahead import compile_ahead
from weft.kernels.tuning.launches import forced

HALF, TOLERANCE = torch.bfloat16, 2e-2  # of the largest value
CALLS, REPLAYS, MATRIX = 4, 5, 8192
TRAIN, INFER, DEVICE = 128, 256, "cuda"

Launch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    title: str
    operation: Operation
    inputs: Callable[[], tuple[Any, ...]]
    candidates: Sequence[Launch] = ({},)  # what differs from the table
    outputs: int | None = None  # how many of them are to be compared, if not all


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=HALF)


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def tiles(**choices: Sequence[Any]) -> list[Launch]:
    """The table's own, then one candidate for each place in the lists."""
    return [{}] + [dict(zip(choices, values, strict=True)) for values in zip(*choices.values(), strict=True)]


CUTS = tiles(cols=(14, 14, 7, 7, 7, 4), block_c=(32, 64, 32, 64, 64, 64), unroll=(2, 1, 1, 1, 2, 1))
SUMS = tiles(elements=(4096, 2048, 2048, 1024), width=(64, 128, 256, 64), per_processor=(4, 4, 4, 8))
ROWS = tiles(elements=(1024, 2048, 2048, 4096), num_warps=(1, 2, 4, 8), per_processor=(16, 8, 4, 2))
MATRICES = tiles(
    BLOCK_M=(128, 128, 128, 64), BLOCK_N=(64, 128, 128, 128), BLOCK_K=(64, 32, 64, 64), num_warps=(4, 4, 8, 4)
)
TOKENS = tiles(BLOCK=(32, 32, 64, 64, 128), num_warps=(2, 4, 2, 4, 8))  # fmt: skip


def cases() -> Iterator[Case]:
    for shape in ((56, 64), (28, 192), (14, 384), (14, 768)):  # side of the map, channels
        yield from norms(*shape)
    for shape in ((14, 768, 1), (14, 1536, 1), (28, 256, 2), (7, 512, 1)):  # and stride
        yield from depthwise(*shape)
    for shape in ((56, 64, 2), (28, 192, 2), (14, 384, 2), (56, 64, 1), (14, 256, 1)):
        yield from projection(*shape)
    for shape in ((256, 512, 64), (512, 256, 64), (384, 384, 96)):  # channels in and out, groups
        yield from grouped(*shape)
    for shape in ((7, 2, 3, 1), (7, 4, 2, 1), (3, 2, 1, 1), (7, 4, 5, 2), (7, 4, 11, 4)):  # to dilation
        yield from stem(*shape)
    for shape in ((56, 64, 256, 1), (28, 512, 128, 1), (28, 128, 128, 3)):  # side, channels in and out, kernel
        yield convolution(*shape)
    for shape in ((56 * 56, 64, 256), (196, 256, 1024), (196, 384, 1536)):  # pixels, channels in and out
        yield linear(*shape)
    yield from pooling()
    yield attention(197, 50, 6)
    for shape in ((56, 2), (14, 8)):  # side, heads
        yield from windows(*shape)
    for shape in ((3136, 64), (3136, 96)):  # tokens, channels
        yield from performer(*shape)
    for heads in (8, 16):
        yield from visual_tokens(heads)


def norms(side: int, channels: int) -> Iterator[Case]:
    title, shape, tokens = f"{side} x {side} x {channels}", (TRAIN, side, side, channels), (TRAIN, side**2, channels)

    def norm() -> tuple[Any, ...]:
        moments = torch.stack([wide(channels), wide(channels).abs() + 1])
        return half(*shape), moments, None, wide(channels), wide(channels), None, None, 1e-5, "gelu"

    def back() -> tuple[Any, ...]:
        kept = wide(*shape), None, wide(TRAIN), wide(channels), 1e-6, torch.float32, HALF, True
        return half(*tokens), None, wide(*shape), None, *kept

    yield Case(title, batch_norm_statistics, lambda: (half(*shape), None, None, None, 0.1), SUMS)
    yield Case(title, batch_norm_act_forward, norm, SUMS)
    yield Case(title, batch_norm_act_backward, lambda: (half(*shape), *norm(), True), SUMS)
    parameters = 1e-6, HALF, True
    yield Case(
        title,
        residual_norm_forward,
        lambda: (wide(*shape), None, half(*tokens), None, wide(channels), wide(channels), *parameters),
        ROWS,
    )
    yield Case(title, residual_norm_backward, back, ROWS)
    yield Case(title, add_branch_forward, lambda: (wide(*shape), None, half(*tokens), None, wide(TRAIN)))
    yield Case(title, activation_forward, lambda: (half(*shape), "gelu"))
    yield Case(title, activation_backward, lambda: (half(*shape), half(*shape), "gelu", True))


def depthwise(side: int, channels: int, stride: int) -> Iterator[Case]:
    title = f"{side} x {side} x {channels}, stride {stride}"

    def x(side: int = side) -> Tensor:
        return half(TRAIN, side, side, channels)

    def taps() -> tuple[Tensor, Tensor]:
        return wide(channels, 1, 3, 3) / 3, wide(channels)

    def norm() -> tuple[Any, ...]:
        moments = torch.stack([wide(channels), wide(channels).abs() + 1])
        return x(), moments, wide(channels), wide(channels), 1e-5, "gelu"

    small = side // stride
    yield Case(title, depthwise_forward, lambda: (x(), *taps(), None, None, stride, "none", "none"), CUTS)
    yield Case(title, depthwise_backward, lambda: (x(small), x(), *taps(), stride), CUTS)
    yield Case(title, norm_depthwise, lambda: (*norm(), *taps(), stride), CUTS)
    yield Case(title, norm_depthwise_backward, lambda: (x(small), *norm(), *taps(), stride), CUTS)


def projection(side: int, channels: int, stride: int) -> Iterator[Case]:
    title, small = f"{side} x {side} x {channels}, stride {stride}", side // stride

    def inputs() -> tuple[Any, ...]:
        return half(TRAIN, side, side, channels), *(wide(channels, 1, 3, 3) / 3 for _ in range(3))

    def forward() -> tuple[Any, ...]:
        x, *weights = inputs()
        return x, None, *weights, *(None,) * 9, stride

    def backward() -> tuple[Any, ...]:
        return *(half(TRAIN, n * n, channels) for n in (side, small, small)), *inputs(), None, False, stride

    yield Case(title, qkv_forward, forward, CUTS)
    yield Case(title, qkv_backward, backward, CUTS)


def grouped(channels: int, features: int, groups: int) -> Iterator[Case]:
    title, choices = f"{channels} to {features}", tiles(rows=(128, 128, 256), block=(32, 64, 64), num_warps=(4, 4, 8))

    def inputs() -> tuple[Any, ...]:
        weight = wide(features, channels // groups, 3, 3) / 6
        return half(TRAIN, 14, 14, channels), weight, wide(features), groups, "none"

    yield Case(title, grouped_conv_forward, inputs, choices)
    yield Case(title, grouped_conv_backward, lambda: (half(TRAIN, 14, 14, features), *inputs()), choices)


def stem(kernel: int, stride: int, padding: int, dilation: int) -> Iterator[Case]:
    title = f"{kernel} x {kernel}, stride {stride}, dilation {dilation}"
    choices = tiles(BLOCK_M=(64, 128, 128), BLOCK_N=(64, 64, 128), num_warps=(4, 4, 8), per_processor=(4, 2, 2))
    back_choices = tiles(BLOCK_M=(64, 32, 64), BLOCK_N=(128, 128, 64), num_stages=(3, 3, 2))
    side = (224 + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1

    def inputs() -> tuple[Any, ...]:
        weight = wide(64, 3, kernel, kernel) / 9
        return half(TRAIN, 224, 224, 3), weight, wide(64), stride, padding, dilation

    yield Case(title, stem_forward, lambda: (*inputs(), "none"), choices)
    yield Case(title, stem_backward, lambda: (half(TRAIN, side, side, 64), *inputs()), back_choices)


def convolution(side: int, channels: int, features: int, kernel: int) -> Case:
    def inputs() -> tuple[Any, ...]:
        weight = half(features, channels, kernel, kernel).contiguous(memory_format=torch.channels_last) / kernel
        return half(INFER, side, side, channels), weight, half(features), None, 1, kernel // 2, 1, "relu"

    ways = [dict(how="library"), dict(how="linear"), *(dict(how="kernel") | some for some in MATRICES)]
    return Case(f"{side} x {side}, {channels} to {features}, {kernel} x {kernel}", conv_act_forward, inputs, ways)


def linear(pixels: int, channels: int, features: int) -> Case:
    def inputs() -> tuple[Any, ...]:
        return half(TRAIN * pixels, channels), half(features, channels) / 9, half(features), "quick_gelu", True

    return Case(f"{channels} to {features}", linear_act_forward, inputs, MATRICES)


def pooling() -> Iterator[Case]:
    title, choices = "112 x 112 x 64", tiles(BLOCK=(16, 32, 64), num_warps=(4, 4, 8))

    def backward() -> tuple[Any, ...]:
        y, place = max_pool_forward.run(half(TRAIN, 112, 112, 64), 2, True)
        return torch.randn_like(y), place, 112, 112, 2

    yield Case(title, max_pool_forward, lambda: (half(TRAIN, 112, 112, 64), 2, True), choices)
    yield Case(title, max_pool_backward, backward, choices)


def attention(queries: int, keys: int, heads: int) -> Case:
    def inputs() -> tuple[Any, ...]:
        q, k, v = (half(INFER, length, 64 * heads) for length in (queries, keys, keys))
        return q, k, v, heads, 0.05

    return Case(f"{queries} to {keys}", attention_forward, inputs, tiles(rows=(64, 128, 128), num_warps=(2, 4, 8)))


def windows(side: int, heads: int) -> Iterator[Case]:
    title, choices = f"{side} x {side}, {heads} heads", tiles(per_processor=(2, 4, 8, 32), num_stages=(1, 1, 3, 3))

    def inputs(count: int) -> tuple[Any, ...]:
        return *(half(TRAIN, side, side, 32 * heads) for _ in range(count)), wide(169, heads), 7, True

    yield Case(title, window_attention, lambda: inputs(3), choices)
    yield Case(title, window_attention_backward, lambda: inputs(4), choices)


def performer(tokens: int, channels: int) -> Iterator[Case]:
    title = f"{tokens} x {channels}"
    choices = tiles(rows=(64, 64, 32), num_warps=(4, 4, 8), num_stages=(1, 2, 2))

    def inputs() -> tuple[Tensor, Tensor]:
        return half(TRAIN, tokens, 3 * channels) / 2, wide(channels // 2, channels) / 2

    def backward() -> tuple[Any, ...]:
        kqv, w = inputs()
        grads = (half(TRAIN, tokens, channels) for _ in range(2))
        return *grads, kqv, w, performer_forward.run(kqv, w)[2]

    yield Case(title, performer_forward, inputs, choices, outputs=2)
    yield Case(title, performer_backward, backward, choices)


def visual_tokens(heads: int) -> Iterator[Case]:
    def tokens() -> Tensor:
        return half(TRAIN, heads, 16, 64)

    def pixels() -> Tensor:
        return half(TRAIN, 196, 64 * heads)

    def gather_backward() -> tuple[Any, ...]:
        q, x = tokens(), pixels()
        return half(TRAIN, 16, 64 * heads), q, x, *pixels_to_tokens_forward.run(q, x, 0.125), 0.125

    def spread() -> tuple[Any, ...]:
        return pixels(), tokens(), None, tokens(), pixels(), None, 0.125

    def spread_backward() -> tuple[Any, ...]:
        return pixels(), pixels(), tokens(), None, tokens(), None, 0.125

    title = f"{heads} heads"
    yield Case(title, pixels_to_tokens_forward, lambda: (tokens(), pixels(), 0.125), TOKENS)
    yield Case(title, pixels_to_tokens_backward, gather_backward, TOKENS)
    yield Case(title, tokens_to_pixels_forward, spread, TOKENS)
    yield Case(title, tokens_to_pixels_backward, spread_backward, TOKENS)


# Measuring ----------------------------------------------------------------------------------------------------------


def _milliseconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_call(call: Callable[[], Any]) -> float:
    """Seconds of GPU time: the median of replays of a graph of several calls, which leaves launching out."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    return statistics.median(_milliseconds(graph.replay) for _ in range(REPLAYS)) / 1000 / CALLS


@dataclass(frozen=True)
class Rates:
    """The rates of the machine: bytes per second of a copy, read and written, and operations of a matrix product."""

    copy: float
    matrix: float


def measure_rates(device: torch.device) -> Rates:
    """A pass over a large tensor and a large bf16 matrix product, on random numbers."""
    source = torch.randn(2**30, device=device, dtype=HALF)
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=HALF) for _ in range(2))
    target = torch.empty_like(source)
    # A kernel reads and writes faster than the copy that a graph makes of `clone`.
    copy = time_call(lambda: torch.neg(source, out=target))
    return Rates(2 * source.nbytes / copy, 2 * MATRIX**3 / time_call(lambda: torch.matmul(a, b)))


def tensors_in(values: Any) -> list[Tensor]:
    return [t for t in (values if isinstance(values, tuple) else (values,)) if isinstance(t, Tensor)]


def error_of(found: Any, wanted: Any, outputs: int | None) -> float:
    """The largest difference of any output, relative to the largest value of it."""
    pairs = list(zip(tensors_in(found), tensors_in(wanted), strict=True))[:outputs]
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-6)).item() for a, b in pairs)


def measure(case: Case, rates: Rates) -> dict[str, Any]:
    """A row: the times of the reference and of the fastest right candidate, and what was wrong."""
    args = case.inputs()
    wanted = case.operation.reference(*args)
    moved = sum(t.nbytes for t in (*tensors_in(args), *tensors_in(wanted)))
    row = dict(operation=case.operation.name, shape=case.title, floor=moved / rates.copy, best=0.0, launch={}, wrong=[])
    row["reference"] = time_call(lambda: case.operation.reference(*args))
    for launch in case.candidates:
        with forced(launch):
            error = error_of(case.operation.run(*args), wanted, case.outputs)
            took = time_call(lambda: case.operation.run(*args))
        if not error <= TOLERANCE or case.operation.disabled:  # NaN, too
            row["wrong"].append(f"{words(launch)}: off by {error:.1e}{', disabled' * case.operation.disabled}")
            case.operation.disabled = False
        elif not 0 < row["best"] <= took:
            row |= dict(best=took, launch=launch)
    return row


def words(launch: Launch) -> str:
    return " ".join(f"{key}={value}" for key, value in launch.items()) or "as in the table"


def run_all(chosen: list[Case]) -> None:
    for case in chosen:
        args = case.inputs()
        for launch in case.candidates:
            with forced(launch):
                case.operation.run(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of operations' names")
    parser.add_argument("--out", type=Path, help="a JSON file for all rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    chosen = [case for case in cases() if case.operation.name.startswith(tuple(args.only))]
    compile_ahead(lambda: run_all(chosen))
    rates, rows = measure_rates(torch.device("cuda")), []
    print(f"{'operation':26} {'floor us':>9} {'best us':>9} {'ref us':>9} {'gain':>6}  shape: what was fastest")
    for case in chosen:
        row = measure(case, rates)
        rows.append(row)
        best = row["best"]
        gain = f"{row['reference'] / best:6.2f}" if best else "  none"
        times = " ".join(f"{1e6 * row[key]:9.1f}" for key in ("floor", "best", "reference"))
        print(f"{row['operation']:26} {times} {gain}  {row['shape']}: {words(row['launch'])}", flush=True)
        print("".join(f"    {line}\n" for line in row["wrong"]), end="", flush=True)
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How kernels are launched: tiles, warps and programs of each operation.

Measured on an H200, by `benchmarks/kernels.py`. An operation has a default, and exceptions where those were worth their
line. Nothing is tried out while a user waits, and nothing is looked for at run time: a shape that no exception names
gets the default. On another GPU all of it stays as it is but the number of programs, which are counted per
multiprocessor. Few different numbers also mean few kernels to compile.
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

Launch = dict[str, Any]
Override = tuple[dict[str, Container[Any]], Launch]  # sizes that it is for, and what is different there
WIDE = range(1 << 30)


def _above(n: int) -> range:
    return WIDE[n + 1 :]


def _up_to(n: int) -> range:
    return WIDE[: n + 1]


SHALLOW = dict(BLOCK_K=32, num_stages=4)  # for few channels
DEPTHWISE = dict(rows=14, cols=7, block_c=64, unroll=1, num_warps=1)
LARGE_KERNELS: tuple[Override, ...] = (({"kernel": [5]}, {"cols": 4}), ({"kernel": [7]}, {"cols": 2}))

TABLE: dict[str, tuple[Launch, *tuple[Override, ...]]] = {
    "attention": (dict(rows=64, num_warps=4),),
    "augment_step": (dict(BLOCK=1024, num_warps=4),),
    "augment_tables": (dict(BLOCK=2048, num_warps=8),),
    "batch_norm": (dict(elements=4096, width=64, num_warps=4),),
    "batch_norm_statistics": (dict(elements=2048, width=64, num_warps=4, per_processor=4, stages=3),),
    "batch_norm_backward": (dict(elements=2048, width=64, num_warps=4, per_processor=4, stages=3),),
    "column_sums": (dict(per_processor=8),),
    "conv_act": (  # "library": cudnn and one pass; "linear": cublas; "kernel": Triton
        dict(how="library", BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        ({"kernel": [1], "product": [True], "features": _above(128)}, dict(how="linear")),
        ({"kernel": [1], "product": [True], "channels": _up_to(64)}, dict(how="linear")),
        ({"kernel": [1], "channels": _up_to(128), "features": _above(63)}, dict(how="kernel") | SHALLOW),
        ({"kernel": [1], "features": _above(127)}, dict(how="kernel", BLOCK_N=128, num_warps=8)),
        ({"kernel": [1], "features": _above(63)}, dict(how="kernel")),
        ({"kernel": [3], "stride": [2], "channels": _up_to(64)}, dict(how="kernel") | SHALLOW),
    ),
    "crop": (dict(elements=1024, num_warps=4),),
    "depthwise": (
        DEPTHWISE,
        *LARGE_KERNELS,
        # Activations take registers: one channel for each lane.
        ({"stride": [1], "active": [True]}, dict(block_c=32)),
        # Wide tiles would read 15 columns, and take the compiler ten seconds.
        ({"stride": [2], "active": [True]}, dict(cols=2)),
    ),
    "depthwise_backward": (DEPTHWISE, *LARGE_KERNELS),
    "grouped_conv": (
        dict(rows=128, chunk=32, block=32, num_warps=4, num_stages=3),
        ({"widens": [True]}, dict(block=64)),
    ),
    "grouped_conv_weight": (dict(rows=128, chunk=32, block=64, num_warps=4, num_stages=2),),
    "layer_norm": (dict(elements=1024, num_warps=2),),
    "layer_norm_backward": (dict(elements=2048, num_warps=4, per_processor=4, stages=2),),
    "linear_act": (dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3),),
    "max_pool": (dict(BLOCK=64, BLOCK_C=64, num_warps=8),),
    "max_pool_backward": (dict(BLOCK=16, BLOCK_C=64, num_warps=4),),
    "mix_pictures": (dict(BLOCK=1024, num_warps=4),),
    "performer": (
        dict(rows=64, num_warps=4, num_stages=2),
        ({"channels": _above(96)}, dict(rows=32, num_warps=8)),  # more rows do not fit into registers
    ),
    "performer_backward": (
        dict(rows=64, num_warps=4, num_stages=2),
        ({"channels": _above(96)}, dict(rows=32, num_warps=8)),
        ({"channels": _above(64)}, dict(num_stages=1)),
    ),
    "pixels_to_tokens": (dict(BLOCK=32, num_warps=2),),
    "pixels_to_tokens_backward": (dict(BLOCK=32, num_warps=2),),
    "qkv_depthwise": (
        DEPTHWISE,
        ({"kernel": [3], "stride": [2]}, dict(block_c=32)),
        ({"kernel": [5, 7]}, dict(block_c=32, cols=2)),
    ),
    # Three filters have so much to write out that wide tiles take the compiler many seconds.
    "qkv_depthwise_backward": (
        DEPTHWISE | dict(cols=4),
        ({"kernel": [3], "stride": [2]}, dict(cols=2)),
        ({"kernel": [5, 7]}, dict(block_c=32, cols=2)),
    ),
    "stem": (
        dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=1, per_processor=4),
        ({"kernel": [7], "stride": [2], "dilation": [1]}, dict(BLOCK_N=128, per_processor=3)),
        ({"dilation": [2]}, dict(BLOCK_M=128, BLOCK_N=128, num_warps=8, per_processor=2)),
        ({"dilation": [3, 4]}, dict(BLOCK_M=128, per_processor=2)),
    ),
    "stem_gradient": (
        dict(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=3, per_processor=1),
        ({"dilation": [3]}, dict(BLOCK_M=32)),
        ({"dilation": [4]}, dict(BLOCK_N=64, num_stages=2)),
    ),
    "tokens_to_pixels": (dict(BLOCK=64, num_warps=4),),
    "tokens_to_pixels_backward": (dict(BLOCK=64, num_warps=4),),
    "window_attention": (
        dict(per_processor=32, num_warps=4, num_stages=3),
        ({"heads": _above(7)}, dict(per_processor=8)),
    ),
    "window_attention_backward": (dict(per_processor=4, num_warps=4, num_stages=1),),
}  # fmt: skip

_forced: Launch = {}


@cache  # every launch asks
def launch_parameters(operation: str, **sizes: int | bool) -> Launch:
    """How `operation` is launched for these sizes. The answer is everybody's: do not write into it."""
    default, *exceptions = TABLE[operation]
    for named, changes in exceptions:
        if all(sizes[name] in those for name, those in named.items()):
            return default | changes | _forced
    return default | _forced


@contextmanager
def forced(launch: Launch) -> Iterator[None]:
    """These launch parameters for every kernel inside a `with`, whatever the table says."""
    global _forced
    before, _forced = _forced, launch
    launch_parameters.cache_clear()
    try:
        yield
    finally:
        _forced = before
        launch_parameters.cache_clear()


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; two in the interpreter, where that is enough for a loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2

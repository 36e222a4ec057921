"""Attention to as many keys as fit into one tile."""

# pyright: basic, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.triton.dot import dot
from weft.kernels.triton.launch import cdiv, launch, power_of_two
from weft.kernels.tuning.launches import launch_parameters

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q, k, v, y, scale, queries, keys, channels, heads,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head of one picture. q and y are (B, queries, channels), k and v (B, keys, channels)."""
    blocks = tl.cdiv(queries, ROWS)
    which = tl.program_id(0) // blocks
    picture, head = (which // heads).to(tl.int64), which % heads
    row, key = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    channel = head * WIDTH + tl.arange(0, WIDTH)
    asked = (picture * queries + row)[:, None] * channels + channel[None, :]
    held = (picture * keys + key)[:, None] * channels + channel[None, :]
    query = tl.load(q + asked, mask=(row < queries)[:, None], other=0.0)
    known = tl.load(k + held, mask=(key < keys)[:, None], other=0.0)
    values = tl.load(v + held, mask=(key < keys)[:, None], other=0.0)
    scores = dot(query, tl.trans(known), tl.zeros((ROWS, KEYS), tl.float32)) * scale  # of powers of two
    scores = tl.where((key < keys)[None, :], scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    answer = dot(weights.to(values.dtype), values, tl.zeros((ROWS, WIDTH), tl.float32))
    tl.store(y + asked, answer / total[:, None], mask=(row < queries)[:, None])


def forward(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (batch, queries, channels), keys, width = q.shape, k.shape[1], q.shape[2] // heads
    launched = launch_parameters("attention")
    y, rows = torch.empty_like(q), launched["rows"]
    if y.numel():
        launch(
            _attend, (cdiv(queries, rows) * batch * heads,),
            q, k, v, y, scale * LOG2_E, queries, keys, channels, heads, width, max(16, power_of_two(keys)), rows,
            num_warps=launched["num_warps"],
        )  # fmt: skip
    return y

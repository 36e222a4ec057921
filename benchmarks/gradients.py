"""Are fused forms right on this GPU? Gradients of whole models, and of attention alone, next to float32.

    python benchmarks/gradients.py [--models ceit_small cvt_13 cetnet_tiny vitae_tiny vt_resnet18] [--out FOLDER]

Attention is asked which engine it takes for each shape, and must be within 0.02 of plain attention in float32. A
model's gradients in bfloat16, plain and through `weft.fast`, launched first and then recorded and replayed, are
compared with those in float32: the fused ones must not be further off than 1.2 times the plain ones. Ends with an
error where one is.
"""

import argparse
import copy
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

import weft
from weft.fast.tape.attention import CrossAttention, engine_for
from weft.fast.tape.tape import apply_operation

MODELS = ("ceit_small", "cvt_13", "cetnet_tiny", "vitae_tiny", "vt_resnet18")
SHAPES = ((197, 197, 6, 64), (197, 50, 6, 64), (784, 196, 3, 64), (3136, 784, 1, 64))  # queries, keys, heads, width
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PASSES = 5  # the third records
MOST_OFF, FURTHER = 0.02, 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    attention = [check_attention(*shape) for shape in SHAPES]
    models = [check_model(name, args.batch) for name in args.models]
    for row in (*attention, *models):
        print(json.dumps(row), flush=True)
    if args.out:
        facts = {"date": date.today().isoformat(), "torch": torch.__version__, "device": DEVICE}
        facts |= {"gpu": torch.cuda.get_device_name()} if DEVICE == "cuda" else {}
        text = json.dumps({**facts, "attention": attention, "models": models}, indent=2)
        (args.out / f"gradients-{facts['date']}.json").write_text(text + "\n")
    wrong = [row for row in attention if max(row["off"]) > MOST_OFF]
    wrong += [row for row in models if max(row["fast"]) > FURTHER * row["plain"] + 1e-4]
    if wrong:
        sys.exit(f"Further off than rounding: {wrong}")


def check_attention(queries: int, keys: int, heads: int, width: int) -> dict[str, Any]:
    """The largest differences of the answer and of the gradients of q, k and v, in parts of the largest value."""
    shapes = [(4, count, heads * width) for count in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    y = apply_operation(CrossAttention, q, k, v, heads, width**-0.5)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    z = plain_attention(*wide, heads, width**-0.5)
    upstream = torch.randn_like(z)
    found = y, *torch.autograd.grad(y, (q, k, v), upstream.to(y.dtype))
    expected = z, *torch.autograd.grad(z, wide, upstream)
    engine = engine_for(*(split(x.detach(), heads) for x in (q, k, v)), width**-0.5)
    off = [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    return {"queries": queries, "keys": keys, "engine": engine.__name__, "off": off}


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    q, k, v = (split(x, heads) for x in (q, k, v))
    return ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(2)


def check_model(name: str, batch: int) -> dict[str, Any]:
    """How far gradients in bfloat16 are off those in float32, by their norm; the fused ones in every pass."""
    torch.manual_seed(0)
    still: dict[str, Any] = {"drop_path_rate": 0.0} | ({"rc_drop_rate": 0.0} if "vitae" in name else {})
    model = timm.create_model(name, **still).to(DEVICE).train()
    fast = weft.fast(copy.deepcopy(model))
    x = torch.randn(batch, 3, 224, 224, device=DEVICE)
    upstream = torch.randn_like(model(x[:2])).repeat(-(-batch // 2), 1)[:batch]
    exact = gradients(model, x, upstream, amp=False)

    def off(found: Tensor) -> float:
        return ((found - exact).norm() / exact.norm()).item()

    passes = [off(gradients(fast, x, upstream, amp=True)) for _ in range(PASSES)]
    return {"model": name, "plain": off(gradients(model, x, upstream, amp=True)), "fast": passes}


def gradients(model: Any, x: Tensor, upstream: Tensor, amp: bool) -> Tensor:
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=amp):
        y = model(x).float()
    y.backward(upstream)
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


if __name__ == "__main__":
    main()

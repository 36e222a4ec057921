"""NCCL with one process: training through `weft.engine.parallel` on a GPU gives the weights of training without it.

    python benchmarks/nccl.py [--models cvt_13 ceit_tiny] [--batch 64] [--steps 20] [--out benchmarks/results]

Some steps of AdamW under bfloat16, in two portions each, with the model as it is and in a group of one process whose
gradients go through NCCL in buckets; launched by Python, and replayed. Prints the largest difference of the weights,
relative to how far they moved, next to that of two trainings without a group (some kernels add up in any order), and
milliseconds per step; ends with exit code 1 where the group adds to that difference, or messages do not leave before
the backward pass ends. One process sends nothing over a network: the times are those of the buckets alone.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.engine.parallel import distribute, reducing

MOST = 2.0  # times as far apart as two trainings alone ...
LEAST = 1e-3  # ... which is nothing, of the weights' way
DEVICE = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cvt_13", "ceit_tiny"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    rows = [row for model in args.models for row in compare(model, args.batch, args.steps)]
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        result = {"date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
        text = json.dumps({**result, "batch": args.batch, "steps": args.steps, "rows": rows}, indent=2)
        (args.out / f"nccl-{result['date']}.json").write_text(text + "\n")
    dist.destroy_process_group()
    sys.exit(not all(is_right(row) for row in rows))


def is_right(row: dict[str, Any]) -> bool:
    apart = row["difference"] <= MOST * max(row["alone"], LEAST)
    return apart and (row["early messages"] > 0 or row["replayed"])


def compare(name: str, batch: int, steps: int) -> list[dict[str, Any]]:
    """Rows for the model launched by Python and replayed."""
    rows = []
    for replayed in (False, True):
        start, alone, seconds = train(name, batch, steps, replayed, lambda forward: forward)
        _, again, _ = train(name, batch, steps, replayed, lambda forward: forward)
        early: list[bool] = []
        _, grouped, grouped_seconds = train(name, batch, steps, replayed, partial(watched, early=early))
        moved = distance(start, alone)
        row = {"model": name, "replayed": replayed, "difference": distance(alone, grouped) / moved}
        row |= {"alone": distance(alone, again) / moved}
        row |= {"alone ms": 1000 * seconds, "in a group ms": 1000 * grouped_seconds, "early messages": sum(early)}
        rows.append(row)
    return rows


def distance(weights: list[Tensor], others: list[Tensor]) -> float:
    return torch.stack([(a - b).norm() for a, b in zip(weights, others, strict=True)]).norm().item()


def train(
    name: str, batch: int, steps: int, replayed: bool, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[list[Tensor], list[Tensor], float]:
    """The weights before and after, and the median seconds of a step."""
    torch.manual_seed(0)
    model = weft.create_model(name, num_classes=1000, drop_path_rate=0.0).to(DEVICE).train()
    weft.fast(model, record=False)
    start = [p.detach().clone() for p in model.parameters()]
    forward = wrap(weft.replay(model) if replayed else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    times = []
    for _ in range(steps):
        x = torch.rand(2, batch // 2, 3, 224, 224, device=DEVICE, generator=generator)
        y = torch.randint(1000, (2, batch // 2), device=DEVICE, generator=generator)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in range(2):
            with reducing(forward, part == 1):
                loss(forward, x[part], y[part]).backward()
        optimizer.step()
        report = torch.ones(7, device=DEVICE)
        dist.all_reduce(report)  # the small message of a step
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return start, [p.detach() for p in model.parameters()], statistics.median(times[len(times) // 2 :])


def loss(forward: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        logits = forward(x)
    return F.cross_entropy(logits.float(), y) / 2


def watched(forward: nn.Module, early: list[bool]) -> nn.Module:
    """The model in its group; `early` gets, for each bucket, whether gradients were still to come when it left."""
    x, y = torch.rand(2, 3, 224, 224, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    distributed = distribute(forward, lambda module: loss(module, x, y).backward())
    waiting = {p for p in forward.parameters() if p.requires_grad}

    def arrived(parameter: nn.Parameter) -> None:
        if distributed.require_backward_grad_sync:
            waiting.discard(parameter)

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        early.append(bool(waiting - set(bucket.parameters())))
        if bucket.is_last():
            waiting.update(p for p in forward.parameters() if p.requires_grad)
        sent: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return sent.get_future().then(lambda done: done.value()[0])

    for parameter in list(waiting):
        parameter.register_post_accumulate_grad_hook(arrived)
    distributed.register_comm_hook(None, send)
    return distributed


if __name__ == "__main__":
    main()

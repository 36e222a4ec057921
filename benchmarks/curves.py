"""Training with kernels and without, on real small pictures: the losses must coincide as far as rounding lets them.

One model of every family learns the embedded pictures of clothes, enlarged to 224 pixels, for some hundred steps, three
times from the same weights and the same batches: with kernels in bf16, without them in bf16, and without them in
float32. The third run shows how much rounding alone moves a curve: what differs in the last digit differs in the second
some fifty steps later, with kernels or without.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F

import weft  # noqa: F401  registers the models
from weft.data.demo import fashion_mnist
from weft.kernels import switched

MODELS = ("ceit_tiny", "vitae_tiny", "vt_resnet18", "cvt_13", "cetnet_tiny")
RUNS = {"kernels": (True, torch.bfloat16), "plain": (False, torch.bfloat16), "float32": (False, torch.float32)}
STEPS, BATCH, SMOOTH, SIDE = 200, 16, 20, 224
RATE = 3e-4  # with gradients clipped: where a loss jumps, a difference of rounding grows at once
FIRST = 25  # steps in which a difference of rounding has not grown yet


def losses(name: str, run: str, device: str, steps: int, batch: int, side: int) -> list[float]:
    kernels, dtype = RUNS[run]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, drop_path_rate=0.0).to(device).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # ViTAE has some of its own, and random numbers would tell the runs apart
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    pictures, labels, _ = fashion_mnist("train")
    x = torch.from_numpy(pictures).to(device).float().div(255).sub(0.29).div(0.35)[:, None]
    y = torch.from_numpy(labels).to(device).long()
    order = np.random.default_rng(0).integers(0, len(x), (steps, batch))
    found = []
    with switched(kernels):
        for step, indices in enumerate(torch.from_numpy(order).to(device)):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 50)
            with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
                large = F.interpolate(x[indices].expand(-1, 3, -1, -1), size=(side, side), mode="bilinear")
                logits = model(large.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), y[indices])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.detach())
    return torch.stack(found).tolist()


def smooth(values: list[float], width: int = SMOOTH) -> np.ndarray:
    width = min(width, len(values))
    return np.convolve(values, np.ones(width) / width, mode="valid")


def compare(runs: dict[str, list[float]]) -> dict[str, Any]:
    """The losses of all runs, and how far from the plain ones the others are: at the beginning, and over all steps."""
    apart = {}
    for run in ("kernels", "float32"):
        off = np.abs(np.subtract(runs[run], runs["plain"]))
        apart[run] = {"first": float(off[:FIRST].mean()), "all": float(off.mean())}
    return {"losses": runs, "apart": apart}


def all_curves(
    models: Sequence[str] = MODELS, device: str = "cuda", steps: int = STEPS, batch: int = BATCH, side: int = SIDE
) -> Iterator[tuple[str, dict[str, Any]]]:
    """All runs of all models, each in a process of its own; a model's curves as soon as it has all."""
    jobs, found = list(product(models, RUNS)), {name: {} for name in models}
    with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(losses, *job, device, steps, batch, side): job for job in jobs}
        for future in as_completed(futures):
            name, run = futures[future]
            found[name][run] = future.result()
            if len(found[name]) == len(RUNS):
                yield name, compare({run: found[name][run] for run in RUNS})


def in_words(name: str, curve: dict[str, Any]) -> str:
    kernels, float32 = curve["apart"]["kernels"], curve["apart"]["float32"]
    last = ", ".join(f"{run} {smooth(values)[-1]:.3f}" for run, values in curve["losses"].items())
    return (
        f"{name:16} kernels are off by {kernels['first']:.4f} in the first {FIRST} steps, {kernels['all']:.3f} in all,"
        f" float32 by {float32['first']:.4f}, {float32['all']:.3f}; at the end: {last}"
    )

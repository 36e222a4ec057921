"""Training with kernels and without, on real small pictures: the losses must coincide.

One small model of every family learns the embedded pictures of clothes for a few hundred steps, three times from the
same weights and the same batches: with kernels in bf16, without them in bf16, and without them in float32. The third
run shows how much rounding alone moves a curve.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F

import weft  # noqa: F401  registers the models
from weft.data.demo import fashion_mnist
from weft.kernels import switched

MODELS = ("ceit_nano", "vitae_nano", "vt_resnet_nano", "cvt_nano", "cetnet_nano")
RUNS = {"kernels": (True, torch.bfloat16), "plain": (False, torch.bfloat16), "float32": (False, torch.float32)}
STEPS, BATCH, SMOOTH = 300, 128, 20


def losses(name: str, kernels: bool, dtype: torch.dtype, device: str, steps: int, batch: int) -> list[float]:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, in_chans=1, img_size=28, drop_path_rate=0.0).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    pictures, labels, _ = fashion_mnist("train")
    x = torch.from_numpy(pictures).to(device).float().div(255).sub(0.29).div(0.35)[:, None]
    y = torch.from_numpy(labels).to(device).long()
    order = np.random.default_rng(0).integers(0, len(x), (steps, batch))
    found = []
    with switched(kernels):
        for step, indices in enumerate(torch.from_numpy(order).to(device)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
            with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
                logits = model(x[indices])
            loss = F.cross_entropy(logits.float(), y[indices])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.detach())
    return torch.stack(found).tolist()


def smooth(values: list[float], width: int = SMOOTH) -> np.ndarray:
    width = min(width, len(values))
    return np.convolve(values, np.ones(width) / width, mode="valid")


def curves(name: str, device: str = "cuda", steps: int = STEPS, batch: int = BATCH) -> dict[str, Any]:
    """The losses of all runs, and the largest differences of the smoothed ones."""
    runs = {run: losses(name, *how, device, steps, batch) for run, how in RUNS.items()}
    plain = smooth(runs["plain"])
    apart = {run: float(np.abs(smooth(runs[run]) - plain).max()) for run in ("kernels", "float32")}
    return {"losses": runs, "kernels_off_by": apart["kernels"], "rounding_off_by": apart["float32"]}


def all_curves() -> dict[str, Any]:
    with ProcessPoolExecutor(len(MODELS), multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(MODELS, pool.map(curves, MODELS), strict=True))
    for name, curve in found.items():
        last = ", ".join(f"{run} {smooth(values)[-1]:.4f}" for run, values in curve["losses"].items())
        print(
            f"{name:16} kernels and plain differ by {curve['kernels_off_by']:.4f} at most,"
            f" plain and float32 by {curve['rounding_off_by']:.4f}; at the end: {last}"
        )
    return found

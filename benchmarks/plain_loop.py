"""A plain loop over a timm model, next to which `benchmarks/minutes.py --plain MODEL` puts `weft train --minutes`.

All training pictures lie in memory, a seventh larger than the model sees them; crops, flips and a cutout of a quarter
of the side; AdamW, weight decay 0.05, smoothing 0.1, warm-up of a tenth, cosine to zero; bfloat16 where that is faster.
The rate is 2e-3, nothing is tuned. Its minutes are those of training alone: start, decoding and the evaluation at the
end, which `weft train` pays for, are not counted.
"""

import copy
import math
import time
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import weft  # noqa: F401  registers its models
from weft.data.read import decode
from weft.data.sources.open import open_source

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
LR = 2e-3
TRIAL = 12  # steps that set the length


def plain_row(data: str, minutes: float, model: str, size: int, batch: int, seed: int) -> dict[str, Any]:
    """What so many minutes of training reach on the pictures that validate."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures, labels, classes = decoded(data, "train", 8 * size // 7)
    tested, answers, _ = decoded(data, "val", size)
    network = timm.create_model(model, num_classes=classes).to(device)
    before = copy.deepcopy(network.state_dict())
    dtype = faster_type(network, pictures[:batch], labels[:batch], size)
    network.load_state_dict(before)
    found = train(network, dtype, pictures.to(device), labels.to(device), size=size, batch=batch, minutes=minutes)
    reached = accuracy(network, dtype, tested, answers, device)
    return {"model": model, "size": size, "batch": batch, "seed": seed, "type": str(dtype), **found, "value": reached}


def decoded(data: str, part: str, side: int) -> tuple[Tensor, Tensor, int]:
    """(N, 3, side, side) bytes, labels and the number of classes: short sides resized, centres cut out."""
    source = open_source(data)
    chosen = [i for i, where in enumerate(source.splits) if where == part]
    if not chosen:
        raise SystemExit(f"{data} has no part called {part}, by which a plain loop could be compared.")
    shown = []
    for i in chosen:
        picture = Image.fromarray(decode(source.open(i), channels=3))
        scale = side / min(picture.size)
        size = [max(side, round(length * scale)) for length in picture.size]
        left, top = (size[0] - side) // 2, (size[1] - side) // 2
        cut = picture.resize((size[0], size[1]), Image.Resampling.BILINEAR).crop((left, top, left + side, top + side))
        shown.append(np.asarray(cut))
    labels = torch.tensor([source.labels[i] for i in chosen])
    return torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2), labels, len(source.classes)


def faster_type(model: nn.Module, pictures: Tensor, labels: Tensor, size: int) -> torch.dtype:
    """bfloat16 on a GPU, and where a few passes of a CPU say so."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.bfloat16
    x = normalised(pictures[:, :, :size, :size])
    seconds = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
    for dtype in [*seconds] * 6:
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            F.cross_entropy(model(x).float(), labels).backward()
        seconds[dtype] = min(seconds[dtype], time.perf_counter() - begin)
    model.zero_grad()
    return min(seconds, key=lambda dtype: seconds[dtype])


def augmented(pictures: Tensor, size: int) -> Tensor:
    """A window of each picture, flipped half of the time, with a square of a quarter of its side blackened."""
    n, device, most = len(pictures), pictures.device, pictures.shape[-1] - size
    pixel = torch.arange(size, device=device)
    dy, dx = torch.randint(0, most + 1, (2, n), device=device)
    flip = torch.rand(n, device=device) < 0.5
    columns = dx[:, None] + torch.where(flip[:, None], size - 1 - pixel, pixel)
    rows = (dy[:, None] + pixel)[:, None, :, None]
    x = pictures[torch.arange(n, device=device)[:, None, None, None], torch.arange(3, device=device)[:, None, None],
                 rows, columns[:, None, None, :]]  # fmt: skip
    cy, cx = torch.randint(0, size, (2, n, 1), device=device)
    near = size // 8
    cut = ((pixel - cy).abs() < near)[:, :, None] & ((pixel - cx).abs() < near)[:, None, :]
    return normalised(x).masked_fill(cut[:, None], 0)


def train(
    model: nn.Module, dtype: torch.dtype, pictures: Tensor, labels: Tensor, *, size: int, batch: int, minutes: float
) -> dict[str, float]:
    """Trains for the minutes, whose steps are counted from a few that are undone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, fused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    per_epoch = len(pictures) // batch
    order = torch.randperm(len(pictures))

    def step(number: int, lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        index = order[number % per_epoch * batch :][:batch].to(pictures.device)
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            answers = model(augmented(pictures[index], size)).float()
        F.cross_entropy(answers, labels[index], label_smoothing=0.1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    begin = time.perf_counter()
    for number in range(TRIAL):
        if number == TRIAL // 3:
            begin = time.perf_counter()
        step(number, 0.0)
    finish = wait(pictures.device)
    each = (finish - begin) / (TRIAL - TRIAL // 3)
    model.load_state_dict(before)
    optimizer.state.clear()
    begin, number = time.perf_counter(), 0
    total = round(60 * minutes / each)
    while number < total:
        if number % per_epoch == 0:
            order = torch.randperm(len(pictures))
        if number % 20 == 0 and number:  # the machine's pace varies: the schedule ends when the minutes do
            each = (wait(pictures.device) - begin) / number
            total = max(number, round(60 * minutes / each))
        part = number / total
        step(number, LR * (part / 0.1 if part < 0.1 else 0.5 * (1 + math.cos(math.pi * (part - 0.1) / 0.9))))
        number += 1
    seconds = wait(pictures.device) - begin
    speed = number * batch / seconds
    return dict(epochs=round(number / per_epoch, 1), seconds=round(seconds, 1), pictures_per_second=round(speed, 1))


def wait(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def accuracy(model: nn.Module, dtype: torch.dtype, pictures: Tensor, answers: Tensor, device: torch.device) -> float:
    model.eval()
    hits = 0
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        for begin in range(0, len(pictures), 200):
            found = model(normalised(pictures[begin : begin + 200].to(device))).argmax(1).cpu()
            hits += (found == answers[begin : begin + 200]).sum().item()
    return hits / len(pictures)


def normalised(pictures: Tensor) -> Tensor:
    mean, std = (values.to(pictures.device).view(3, 1, 1) for values in (MEAN, STD))
    return (pictures.float() / 255 - mean) / std

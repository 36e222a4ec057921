"""What a plain loop over a timm model gets out of the same minutes: the bar for `weft train --minutes`.

    python benchmarks/plain_loop.py cifar --minutes 2 --model resnet18 --out benchmarks/results
    python benchmarks/plain_loop.py imagenette --minutes 5 --model resnet18 --size 96

All training pictures lie in memory, a seventh larger than the model sees them; crops, flips and a cutout of a quarter
of the side; AdamW, weight decay 0.05, smoothing 0.1, warm-up of a tenth, cosine to zero; bfloat16 where that is faster.
The rate is given, nothing is tuned. Its minutes are those of training alone: start, decoding and the evaluation at the
end, which `weft train` pays for, are not counted.
"""

import argparse
import io
import json
import math
import time
from datetime import date
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import weft  # noqa: F401  registers its models
from weft.data.sources.open import open_source
from weft.files import write_text
from weft.report.run import processor

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
TRIAL = 12  # steps that set the length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="what `weft train` takes, with a part that validates")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for a JSON file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    margin = 8 * args.size // 7
    pictures, labels, classes = decoded(args.data, "train", margin)
    model = timm.create_model(args.model, num_classes=classes).to(device)
    dtype = faster_type(model, pictures[: args.batch], labels[: args.batch], args.size)
    row = train(model, dtype, pictures.to(device), labels.to(device), args)
    tested, answers, _ = decoded(args.data, "val", args.size)
    row["top1"] = accuracy(model, dtype, tested, answers, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    facts = dict(data=args.data, machine=where, threads=torch.get_num_threads(), torch=torch.__version__)
    row = {**vars(args), "out": None, **facts, "date": date.today().isoformat(), "dtype": str(dtype), **row}
    print(json.dumps(row), flush=True)
    if args.out:
        name = f"plain_loop-{Path(args.data).name}-{args.model}-{args.minutes:g}-{args.seed}-{row['date']}.json"
        write_text(args.out / name, json.dumps(row, indent=1) + "\n")


def decoded(data: str, part: str, side: int) -> tuple[Tensor, Tensor, int]:
    """(N, 3, side, side) bytes, labels and the number of classes: short sides resized, centres cut out."""
    source = open_source(data)
    chosen = [i for i, where in enumerate(source.splits) if where == part]
    shown = []
    for i in chosen:
        found = source.open(i)
        picture = Image.open(io.BytesIO(found) if isinstance(found, bytes) else found).convert("RGB")
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
    model: nn.Module, dtype: torch.dtype, pictures: Tensor, labels: Tensor, args: argparse.Namespace
) -> dict[str, float]:
    """Trains for the minutes, whose steps are counted from a few that are undone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    per_epoch = len(pictures) // args.batch
    order = torch.randperm(len(pictures))

    def step(number: int, lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        index = order[number % per_epoch * args.batch :][: args.batch].to(pictures.device)
        with torch.autocast(pictures.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            answers = model(augmented(pictures[index], args.size)).float()
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
    total = round(60 * args.minutes / each)
    while number < total:
        if number % per_epoch == 0:
            order = torch.randperm(len(pictures))
        if number % 20 == 0 and number:  # the machine's pace varies: the schedule ends when the minutes do
            each = (wait(pictures.device) - begin) / number
            total = max(number, round(60 * args.minutes / each))
        part = number / total
        step(number, args.lr * (part / 0.1 if part < 0.1 else 0.5 * (1 + math.cos(math.pi * (part - 0.1) / 0.9))))
        number += 1
    seconds = wait(pictures.device) - begin
    speed = number * args.batch / seconds
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


if __name__ == "__main__":
    main()

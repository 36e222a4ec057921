"""A Weft model inside an ordinary timm and torch pipeline: train on 6,000 embedded pictures, test, save, look.

    python examples/fashion.py [--model ceit_nano] [--epochs 6]

Writes demo/model (a folder that timm opens) and demo/predictions.png. Two minutes on two CPU cores.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from timm.optim import create_optimizer_v2

import weft
from weft.data.demo import fashion_mnist

BATCH = 100
MEAN, STD = 0.286, 0.353


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vt_resnet_nano", choices=weft.list_models())
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    torch.manual_seed(0)

    pictures, labels, classes = load("train")
    test_pictures, test_labels, _ = load("test")
    # From here on nothing is different from any other timm model.
    model = timm.create_model(args.model, in_chans=1, num_classes=len(classes), img_size=28)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    steps = args.epochs * len(pictures) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)

    print(f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(pictures):,} pictures")
    for epoch in range(1, args.epochs + 1):
        start, total = time.perf_counter(), 0.0
        model.train()
        for batch in torch.randperm(len(pictures)).split(BATCH):
            x = pictures[batch]
            x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)  # mirror half of them
            loss = F.cross_entropy(model(x), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(x)
        accuracy = (predict(model, test_pictures) == test_labels).float().mean().item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch}/{args.epochs}  loss {total / len(pictures):.3f}  test {accuracy:.1%}  {seconds:.0f} s")

    folder = free_folder(args.out / "model")
    model.pretrained_cfg.update(mean=(MEAN,), std=(STD,))  # what the model was trained with travels with it
    weft.save_model(model, folder, label_names=classes)
    opened = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    predicted = predict(weft.fuse(opened), test_pictures)
    picture = args.out / "predictions.png"
    draw(test_pictures, predicted, test_labels, classes).save(picture)
    print(f'Wrote {picture}, and {folder}: timm.create_model("local-dir:{folder}", pretrained=True)')


def load(split: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    pictures, labels, classes = fashion_mnist(split)
    x = torch.from_numpy(pictures.astype(np.float32) / 255).unsqueeze(1)  # (N, 1, 28, 28)
    return (x - MEAN) / STD, torch.from_numpy(labels), classes


@torch.inference_mode()
def predict(model: torch.nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    model.eval()
    return torch.cat([model(x).argmax(1) for x in pictures.split(250)])


def free_folder(folder: Path) -> Path:
    """`folder`, or `folder-2` and so on where an earlier demo left one."""
    names = [folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 1000))]
    return next(name for name in names if not name.exists())


def draw(pictures: torch.Tensor, predicted: torch.Tensor, labels: torch.Tensor, classes: list[str]) -> Image.Image:
    """Fifty test pictures with what the model says; mistakes in red with the truth behind."""
    width, height, columns = 130, 110, 10
    sheet = Image.new("RGB", (columns * width, 5 * height), "white")
    pen = ImageDraw.Draw(sheet)
    for i, index in enumerate(torch.linspace(0, len(labels) - 1, 50).long()):
        x, y = i % columns * width, i // columns * height
        grey = ((pictures[index, 0] * STD + MEAN) * 255).byte().numpy()
        sheet.paste(Image.fromarray(grey).resize((84, 84)), (x + 23, y + 2))
        said, truth = classes[predicted[index]], classes[labels[index]]
        right = said == truth
        pen.text((x + 4, y + 90), said if right else f"{said} ({truth})", fill="black" if right else "red")
    return sheet


if __name__ == "__main__":
    main()

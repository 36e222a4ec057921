"""Reading training pictures: Weft's loader next to timm's, same folder, same augmentation, in one run; tar shards.

    python benchmarks/loader.py FOLDER [--rounds 7] [--pictures 128] [--shards] [--out benchmarks/results]

FOLDER has class folders with JPEGs. They are read as they are, and as copies of the size that cameras and ImageNet
have. Both loaders run in this process, one thread, batches of 64, up to the uint8 batch that goes to the device, in
alternating rounds. Pictures per second per core are pictures per second of processor time, so that other work on the
machine does not count; the table shows medians over the rounds and their ratio.

With --shards the pictures are packed into tar shards, at 500 x 375 pixels, and read by Weft alone, by 0, 1, 2 and 4
processes: from the disk, from the file cache of the machine, and from a store that answers each read after 10
milliseconds, which is simulated by sleeping. Pictures per second are those of the clock; and how long a step that
computes half a second waits for its batch, while reading processes work ahead.
"""

import argparse
import json
import os
import platform
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import timm
import torch
from PIL import Image
from timm.data import ImageDataset, auto_augment, create_loader

from weft.config import AugmentConfig
from weft.data.augment.ops import posterize
from weft.data.augment.picture import Augmentation
from weft.data.loader import train_batches
from weft.data.preprocessing import Preprocessing
from weft.data.read import MAX_PIXELS
from weft.data.sampler import SamplingPlan
from weft.data.sources.open import open_source
from weft.data.targets import LABELS
from weft.report.run import processor

BATCH = 64
STEP = 0.5  # seconds that a step computes
NORMAL = Preprocessing(
    (224, 224), 3, 8, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", 0.9, "center", MAX_PIXELS
)
SIZES = {"as they are": None, "500 x 375": (500, 375), "2000 x 1500": (2000, 1500)}
POLICIES = ("", "rand-m9-mstd0.5-inc1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--shards", action="store_true", help="tar shards, in place of the comparison")
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_shards(args) if args.shards else compare(args)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        result = {"date": date.today().isoformat(), "machine": machine(), "batch": BATCH, "rows": rows}
        name = "shards" if args.shards else "loader"
        (args.out / f"{name}-{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = posterize  # timm's own raises with Pillow 13 when no bit is kept

    rows = []
    print(f"{'pictures':14}{'policy':24}{'timm':>10}{'weft':>10}{'ratio':>8}   (pictures per second per core)")
    with tempfile.TemporaryDirectory() as temporary:
        for size_name, size in SIZES.items():
            folder = copies(args.folder, Path(temporary) / size_name, args.pictures, size)
            for policy in POLICIES:
                speeds = measure({"timm": timm_epoch(folder, policy), "weft": weft_epoch(folder, policy)}, args.rounds)
                ratio = speeds["weft"] / speeds["timm"]
                print(f"{size_name:14}{policy or '-':24}{speeds['timm']:10.1f}{speeds['weft']:10.1f}{ratio:8.2f}")
                rows.append({"pictures": size_name, "policy": policy, **speeds, "ratio": round(ratio, 3)})
    return rows


def copies(source: Path, folder: Path, count: int, size: tuple[int, int] | None) -> Path:
    """`count` pictures of all classes in turn, in class folders; resized and encoded again where a size is given."""
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    for file in files[:: max(1, len(files) // count)][:count]:
        target = folder / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if size is None:
            target.write_bytes(file.read_bytes())
        else:
            Image.open(file).convert("RGB").resize(size, Image.Resampling.BICUBIC).save(target, quality=90)
    return folder


def timm_epoch(folder: Path, policy: str) -> Callable[[], Iterable[torch.Tensor]]:
    loader = create_loader(
        ImageDataset(str(folder)),
        input_size=(3, 224, 224),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=True,  # its transform then ends with uint8, and normalising is left to the device
        auto_augment=policy or None,
        color_jitter=0.0,
        interpolation="bicubic",
        num_workers=0,
        device=torch.device("cpu"),
        persistent_workers=False,
    ).loader
    return lambda: (pictures for pictures, _ in loader)


def weft_epoch(folder: Path, policy: str) -> Callable[[], Iterable[torch.Tensor]]:
    source = Files(folder)
    plan = SamplingPlan(np.arange(len(source.names)), batch=BATCH, seed=0)
    augmentation = Augmentation(AugmentConfig(policy=policy), NORMAL)
    steps = range(plan.steps_per_epoch)
    return lambda: (b.pictures for b in train_batches(source, augmentation, plan, steps, workers=0, pin=False))


class Files:
    """The files that timm found, as a source."""

    multilabel, kind = False, LABELS

    def __init__(self, folder: Path) -> None:
        samples = ImageDataset(str(folder)).reader.samples
        self.names = [str(path) for path, _ in samples]
        self.labels = np.array([label for _, label in samples])

    def open(self, index: int) -> Path:
        return Path(self.names[index])

    def target(self, index: int) -> None: ...


# Shards -------------------------------------------------------------------------------------------------------------


def read_shards(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(f"{'shards':26}{'processes':>10}{'pictures/s':>12}{'waiting':>12}")
    with tempfile.TemporaryDirectory() as temporary:
        pack(copies(args.folder, Path(temporary) / "pictures", args.pictures, SIZES["500 x 375"]), Path(temporary))
        source = open_source(f"{temporary}/*.tar")
        stored = source.reader
        for store, latency in (("on disk", 0.0), ("in the file cache", 0.0), ("10 ms away", 0.01)):
            source.reader = SlowStore(stored, latency)
            for workers in (0, 1, 2, 4):
                found = [
                    read_epochs(source, workers, compute, temporary if store == "on disk" else "", args.rounds)
                    for compute in (0.0, STEP)
                ]
                speed, waiting = found[0][0], found[1][1]
                print(f"{store:26}{workers:10}{speed:12.0f}{1000 * waiting:9.0f} ms")
                row = {"shards": store, "processes": workers, "pictures_per_second": round(speed, 1)}
                rows.append({**row, "waiting_ms": round(1000 * waiting, 1)})
    return rows


def pack(pictures: Path, folder: Path) -> None:
    """Class folders as tar shards of 64 pictures."""
    files = sorted(pictures.rglob("*.*"))
    classes = sorted({file.parent.name for file in files})
    for shard in range(0, len(files), 64):
        with tarfile.open(folder / f"train-{shard:06}.tar", "w") as tar:
            for number, file in enumerate(files[shard : shard + 64], start=shard):
                tar.add(file, f"{number:06}{file.suffix}")
                label = str(classes.index(file.parent.name)).encode()
                member = tarfile.TarInfo(f"{number:06}.cls")
                member.size = len(label)
                tar.addfile(member, BytesIO(label))


class SlowStore:
    """Pictures of a source that take some time to come."""

    def __init__(self, reader: Any, latency: float) -> None:
        self.reader, self.latency = reader, latency

    def __call__(self, index: int) -> bytes:
        time.sleep(self.latency)
        return self.reader(index)


def read_epochs(source: Any, workers: int, compute: float, forget: str, rounds: int) -> tuple[float, float]:
    """Pictures per second, and mean seconds that a step waits, after a first epoch that warms up."""
    plan = SamplingPlan(np.arange(len(source.names)), batch=BATCH, seed=0)
    augmentation = Augmentation(AugmentConfig(policy=POLICIES[1]), NORMAL)
    steps = range(plan.steps_per_epoch * (rounds + 1))
    batches = train_batches(source, augmentation, plan, steps, workers=workers, pin=False)
    times, waits = [], []
    for step in steps:
        if forget and step % plan.steps_per_epoch == 0:
            drop_from_cache(Path(forget))
        begin = time.monotonic()
        next(batches)
        waits.append(time.monotonic() - begin)
        time.sleep(compute)
        times.append(time.monotonic() - begin)
    late = plan.steps_per_epoch
    return BATCH * len(times[late:]) / sum(times[late:]), statistics.mean(waits[late:])


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.tar"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(epochs: dict[str, Callable[[], Iterable[torch.Tensor]]], rounds: int) -> dict[str, float]:
    """Median pictures per second of processor time."""
    speeds: dict[str, list[float]] = {name: [] for name in epochs}
    for _ in range(rounds + 1):
        for name, epoch in epochs.items():
            start = time.process_time()
            count = sum(len(pictures) for pictures in epoch())
            speeds[name].append(count / (time.process_time() - start))
    return {name: round(statistics.median(values[1:]), 1) for name, values in speeds.items()}  # the first warms up


def machine() -> dict[str, str]:
    versions = {"torch": torch.__version__, "timm": timm.__version__, "pillow": PIL.__version__}
    return {"cpu": processor(), "python": platform.python_version(), **versions}


if __name__ == "__main__":
    main()

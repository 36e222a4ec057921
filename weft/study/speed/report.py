"""Measurements of speed as JSON and as a table, with the machine and the versions they were made with."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from weft.study.speed.measure import SpeedRow, SpeedSettings
from weft.version import __version__
from weft.words import many

PACKAGES = ("torch", "timm", "transformers", "triton")


def facts() -> dict[str, Any]:
    """Machine, versions and date, with which every file of measurements begins."""
    return {"date": date.today().isoformat(), "machine": _machine(), "versions": _versions()}


def as_json(rows: Sequence[SpeedRow], settings: SpeedSettings, seconds: float) -> dict[str, Any]:
    return {**facts(), "settings": {**asdict(settings), "seconds": seconds}, "rows": [asdict(row) for row in rows]}


def _machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _versions() -> dict[str, str]:
    found = {"weft": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # it may lie in a folder of its own
            if package in sys.modules:
                found[package] = sys.modules[package].__version__
    return found


def title(result: dict[str, Any]) -> str:
    """The measurement in one line: of what, how, where."""
    settings, machine, versions = result["settings"], result["machine"], result["versions"]
    on_gpu = settings["device"].startswith("cuda")
    where = machine["gpu"] if on_gpu else f"{machine['cpu']}, {many(machine['threads'], 'thread')}"
    form = "plain" if not settings["fast"] else "fused" if settings["fuse"] and not settings["train"] else "fast"
    what = f"{'training step' if settings['train'] else 'inference'}, Weft's models {form}"
    how = ("compiled" if settings["compile"] else "eager") + (", launches replayed" if settings["replay"] else "")
    how += "" if settings["kernels"] and on_gpu else ", Weft's kernels off" if on_gpu else ", no kernels on a CPU"
    size = f"batch {settings['batch']}, {settings['img_size']} pixels, {settings['dtype']}"
    return f"{what}, {how}, {size}; {where}, torch {versions['torch']}"


HEADER = ["model", "pictures/s", "range", "ms/batch", "peak GiB", "ratio", "to"]


def as_table(rows: Sequence[SpeedRow]) -> list[list[str]]:
    """The header and a line for each row, without columns in which nothing stands."""
    lines = list(cells(rows))
    used = [i for i in range(len(HEADER)) if any(line[i] for line in lines)]
    return [[line[i] for i in used] for line in (HEADER, *lines)]


def cells(rows: Sequence[SpeedRow]) -> Iterator[list[str]]:
    """The table's rows; a model that failed has its reason in place of numbers."""
    for row in rows:
        if row.error:
            yield [row.model, "-", "", "", "", "", row.error]
        else:
            speed = f"{_number(row.low)} to {_number(row.high)}"
            gib = "" if row.gib is None else f"{row.gib:.2f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f} x"
            yield [row.model, _number(row.pictures_per_second), speed, f"{row.milliseconds:.2f}", gib, ratio, row.peer]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

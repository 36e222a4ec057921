"""The costs of a table's rows: parameters and MACs, counted; pictures per second, measured in one run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.catalog.cost import count_macs, count_parameters
from weft.catalog.papers import PAPERS
from weft.errors import WeftError
from weft.fast.fuse import fuse
from weft.models.registry import takes_size
from weft.run.build import create
from weft.study.ablate.tables import Network
from weft.study.speed.measure import DTYPES, SpeedSettings, TimedModel, time_in_turns
from weft.study.speed.models import is_ours

SECONDS = 0.5  # of timing for each network


@dataclass(frozen=True)
class Cost:
    parameters: int
    macs: float  # in G, attention included
    throughput: float | None = None  # pictures per second, inference


def cost_in_paper(network: Network) -> Cost | None:
    """At the size of the papers: 1,000 classes, 224 pixels. What `weft.catalog.papers` has is not counted again."""
    for row in (row for paper in PAPERS for row in paper.rows):
        same = row.model == network.model and as_lists(row.switches) == as_lists(network.switches)
        if same and row.img_size == 224 and not row.head:
            return Cost(row.parameters, row.macs)
    return count_cost(network, img_size=224)


def count_cost(network: Network, img_size: int, classes: int = 1000, channels: int = 3) -> Cost | None:
    """None of a network that cannot be made for pictures of this size; its cell says why."""
    try:
        model = _make(network, img_size, classes, channels, "meta")
        macs = count_macs(model, (channels, img_size, img_size))
    except (WeftError, AssertionError, ValueError, RuntimeError):
        return None
    return Cost(count_parameters(model), round(macs / 1e9, 6))


def measure_throughput(
    networks: Mapping[str, Network], img_size: int, classes: int, channels: int, device: torch.device, threads: int
) -> dict[str, float | None]:
    """Pictures per second of inference, each network timed in every round; None of one that does not run.

    On a CPU with as many threads as a cell has for its training.
    """
    gpu = device.type == "cuda"
    batch, dtype = (256, "bf16") if gpu else (16, "fp32")
    settings = SpeedSettings(batch=batch, channels=channels, img_size=img_size, dtype=dtype, device=str(device))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        models = {name: _ready(network, settings, classes) for name, network in networks.items()}
        timed = [TimedModel(name, settings, model) for name, model in models.items() if model is not None]
        times = time_in_turns(timed, SECONDS)
    finally:
        torch.set_num_threads(before)
    if gpu:
        del models, timed
        torch.cuda.empty_cache()  # for the workers
    calmest = {name: min(rounds) for name, rounds in times.items() if rounds}
    return {name: settings.batch / calmest[name] if name in calmest else None for name in networks}


def _ready(network: Network, settings: SpeedSettings, classes: int) -> Any:
    """As one would use it: fused, on its device, in its type."""
    try:
        model = _make(network, settings.img_size, classes, settings.channels, settings.device).eval()
    except (WeftError, AssertionError, ValueError, RuntimeError):
        return None
    model = fuse(model) if is_ours(network.model) else model
    return model.to(dtype=DTYPES[settings.dtype], memory_format=torch.channels_last)  # pyright: ignore


def _make(network: Network, img_size: int, classes: int, channels: int, device: str) -> nn.Module:
    size = {"img_size": img_size} if takes_size(network.model) else {}
    args = {"device": device, **size, **network.switches}
    return create(network.model, args, classes, channels, pretrained=False)


def as_lists(value: Any) -> Any:
    """The value with lists in place of tuples, so that what YAML and Python hold can be compared."""
    if isinstance(value, Mapping):
        return {key: as_lists(part) for key, part in value.items()}
    return [as_lists(part) for part in value] if isinstance(value, list | tuple) else value

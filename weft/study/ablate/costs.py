"""The costs of a table's rows: parameters and MACs, counted; pictures per second, measured in one run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.catalog.cost import count_macs, count_parameters
from weft.catalog.papers import PAPERS
from weft.config import Config
from weft.errors import WeftError
from weft.fast.fuse import fuse
from weft.heads import DETECTORS
from weft.heads.features import any_size
from weft.heads.folder import DenseSpec, build_dense
from weft.models.registry import takes_size
from weft.run.build import create
from weft.study.ablate.tables import Network, TableRow
from weft.study.speed.measure import DTYPES, SpeedSettings, TimedModel, time_in_turns
from weft.study.speed.models import is_ours
from weft.threads import torch_threads

SECONDS = 0.5  # of timing for each network
OF_SIZE = ("img_size", "strict_img_size")  # arguments that fit a network to pictures, and make it no other


@dataclass(frozen=True)
class Cost:
    parameters: int
    macs: float  # in G, attention included
    throughput: float | None = None  # pictures per second, inference


def cost_in_paper(row: TableRow, source: str = "") -> Cost | None:
    """At the size of the papers: 1,000 classes, 224 pixels. What `weft.catalog.papers` has is not counted again.

    With a head, at the size and for the classes of its table, `source`, where `weft.catalog.papers` has it.
    """
    network, size = row.full, row.settings.get("augment.img_size", 224)
    if network is None:
        return None
    for name, known in ((paper.name, known) for paper in PAPERS for known in paper.rows):
        switches = {key: value for key, value in known.switches.items() if key not in OF_SIZE}
        same = known.model == network.model and as_lists(switches) == as_lists(network.switches)
        counted = f"{name}, table {known.table}" == source if known.head else known.img_size == size
        if same and known.head == network.head and counted:
            return Cost(known.parameters, known.macs)
    return None if network.head else count_cost(network, size)


def count_cost(network: Network, img_size: int, classes: int = 1000, channels: int = 3) -> Cost | None:
    """None of a network that cannot be made for pictures of this size; its cell says why."""
    try:
        parameters, macs = count_network(network, img_size, classes, channels)
    except (WeftError, AssertionError, ValueError, RuntimeError):
        return None
    return Cost(parameters, round(macs / 1e9, 6))


def count_network(network: Network, img_size: int, classes: int, channels: int) -> tuple[int, int]:
    """Parameters and MACs, with the head, where there is one.

    The MACs of a detector are those of backbone and pyramid: what the rest costs depends on what it finds.
    """
    model: Any = _make(network, img_size, classes, channels, "meta")
    counted = model.backbone if network.head in DETECTORS else model
    return count_parameters(model), count_macs(counted, (channels, img_size, img_size))


def measure_throughput(
    networks: Mapping[str, Network],
    sizes: Mapping[str, int],
    classes: int,
    channels: int,
    device: torch.device,
    threads: int,
) -> dict[str, float | None]:
    """Pictures per second of inference, each network timed in every round; None of one that does not run.

    On a CPU with as many threads as a cell has for its training. Detectors are not timed: nothing is to be found in
    random numbers.
    """
    gpu = device.type == "cuda"
    batch, dtype = (256, "bf16") if gpu else (16, "fp32")
    common: Any = dict(channels=channels, dtype=dtype, device=str(device))
    settings = {
        name: SpeedSettings(batch=max(1, batch // 16) if network.head else batch, img_size=sizes[name], **common)
        for name, network in networks.items()
        if network.head not in DETECTORS
    }
    with torch_threads(threads):
        models = {name: _ready(networks[name], how, classes) for name, how in settings.items()}
        timed = [TimedModel(name, settings[name], model) for name, model in models.items() if model is not None]
        times = time_in_turns(timed, SECONDS)
    if gpu:
        del models, timed
        torch.cuda.empty_cache()  # for the workers
    calmest = {name: min(rounds) for name, rounds in times.items() if rounds}
    return {name: settings[name].batch / calmest[name] if name in calmest else None for name in networks}


def _ready(network: Network, settings: SpeedSettings, classes: int) -> Any:
    """As one would use it: fused, on its device, in its type."""
    try:
        model = _make(network, settings.img_size, classes, settings.channels, settings.device).eval()
    except (WeftError, AssertionError, ValueError, RuntimeError):
        return None
    model = fuse(model) if is_ours(network.model) and not network.head else model
    return model.to(dtype=DTYPES[settings.dtype], memory_format=torch.channels_last)  # pyright: ignore


def _make(network: Network, img_size: int, classes: int, channels: int, device: str) -> nn.Module:
    size = {"img_size": img_size} if takes_size(network.model) else {}
    args = {"device": device, **size, **network.switches}
    if not network.head:
        return create(network.model, args, classes, channels, pretrained=False)
    args = {**any_size(network.model), **args}
    backbone = create(network.model, args, 0, channels, pretrained=False)
    spec = DenseSpec("", network.model, args, channels, network.head, network.head_args, [""] * classes)
    with torch.device(device):
        return build_dense(spec, Config(), backbone)


def as_lists(value: Any) -> Any:
    """The value with lists in place of tuples, so that what YAML and Python hold can be compared."""
    if isinstance(value, Mapping):
        return {key: as_lists(part) for key, part in value.items()}
    return [as_lists(part) for part in value] if isinstance(value, list | tuple) else value

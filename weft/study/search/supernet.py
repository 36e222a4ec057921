"""All networks of a space in one, with shared weights: trained once, it judges any of them without training that one.

The weights are those of the largest network. A smaller one has corners of them: the first rows and columns of a matrix,
the middle of a convolution's kernel. So a subnet is the model that its arguments make, run with other tensors; nothing
in the models knows of it.

A batch in training is cut into four parts, one for the largest network, one for the smallest, two for networks drawn
at random (the sandwich rule): the loss is the mean over all four, and a step costs no more than one of the largest.
Statistics of BatchNorm cannot be shared. Those of the largest network are kept; a subnet gets its own by `recalibrate`.
"""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from weft.catalog.cost import count_macs, count_parameters
from weft.errors import WeftError
from weft.models.registry import takes_size
from weft.study.search.space import Point, Space

NAME = "weft_supernet"
FROM_TIMM = {"pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args", "cache_dir"}  # given to all models
FEWEST = 2  # pictures in a part of a batch: BatchNorm cannot train on one


class MetaNetworks:
    """Networks of a space without weights. Each kind of block is made once, and a network is put together from them."""

    def __init__(self, space: Space):
        self.space = space
        self.bodies: dict[str, nn.Module] = {}
        self.donors: dict[str, Any] = {}

    def at(self, point: Point) -> nn.Module:
        """The network at a point, on the meta device; valid until the next call."""
        fixed = {name: value for name, value in point.items() if name.count("[") < 2}
        whole: Any = self._made(self.bodies, fixed, point)
        if len(fixed) < len(point):
            for i, j in ((i, j) for i, depth in enumerate(self.space.depths) for j in range(depth)):
                everywhere = {name: point[f"{name.split('[')[0]}[{i}][{j}]"] for name in point if name not in fixed}
                donor: Any = self._made(self.donors, fixed | everywhere, fixed | everywhere)
                whole.stages[i].blocks[j] = donor.stages[i].blocks[j]
        return whole

    def _made(self, kept: dict[str, nn.Module], key: Point, point: Point) -> nn.Module:
        name = str(sorted(key.items()))
        if name not in kept:
            kept[name] = self.space.build(point, device="meta")
        return kept[name]


class Costs:
    """Parameters and MACs of the networks of a space, each counted once."""

    def __init__(self, space: Space, input_size: tuple[int, int, int]):
        self.networks, self.input_size = MetaNetworks(space), input_size
        self.known: dict[str, tuple[int, int]] = {}

    def of(self, point: Point) -> tuple[int, int]:
        key = str(sorted(point.items()))
        if key not in self.known:
            network = self.networks.at(point)
            self.known[key] = count_parameters(network), count_macs(network, self.input_size)
        return self.known[key]

    def extremes(self) -> tuple[Point, Point]:
        """The smallest and the largest network: by parameters and, among equal ones, by MACs."""
        points = [(count_parameters(self.networks.at(point)), point) for point in self.networks.space.uniform()]
        fewest, most = (pick(count for count, _ in points) for pick in (min, max))
        smallest = [point for count, point in points if count == fewest]
        largest = [point for count, point in points if count == most]
        return min(smallest, key=self.of), max(largest, key=self.of)


class Supernet(nn.Module):
    """The largest network of a space, as which it is evaluated; and in training all the others.

    Args:
        space: what is shared; its largest network must hold all that any of the others has.
        input_size: (C, H, W) of the pictures, for the MACs.
        points: the smallest and the largest network, where they are known: to find them all kinds are made once.
    """

    def __init__(
        self,
        space: Space,
        input_size: tuple[int, int, int],
        device: Any = None,
        points: Sequence[Point] | None = None,
    ):
        super().__init__()
        self.networks = MetaNetworks(space)
        self.points = points or find_extremes(Costs(space, input_size))
        self.whole = space.build(self.points[1], device=device)
        self.pretrained_cfg: dict[str, Any] = {**self.whole.pretrained_cfg, "architecture": NAME}  # pyright: ignore
        self.num_classes, self.num_features = self.whole.num_classes, self.whole.num_features

    def no_weight_decay(self) -> set[str]:
        exempt: Any = getattr(self.whole, "no_weight_decay", set)
        return {f"whole.{pattern}" for pattern in exempt()}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.whole(x)
        seed = int(torch.randint(2**31, ()))  # the step's, so that a resumed run draws the same networks
        rng, space = random.Random(seed), self.networks.space
        smallest, largest = self.points
        paths = [largest, smallest, space.random(rng), space.random(rng)]
        parts = x.tensor_split(4) if len(x) >= 4 * FEWEST else [x]
        paths = paths if len(parts) == 4 else [rng.choice(paths)]
        return torch.cat([self.run(path, part) for path, part in zip(paths, parts, strict=True)])

    def run(self, point: Point, x: Tensor) -> Tensor:
        """Trains the network at a point. Only the largest one leaves its statistics behind."""
        network = self.networks.at(point).train(self.training)
        weights = slice_weights(network, self.whole)
        if point != self.points[1]:
            weights |= {name: weights[name].clone() for name, _ in network.named_buffers()}
        return functional_call(network, weights, (x,))

    @torch.no_grad()
    def subnet(self, point: Point) -> nn.Module:
        """The network at a point as a model of its own, with a copy of the weights."""
        where = next(self.whole.parameters())
        network = self.networks.space.build(point, device=where.device).to(where.dtype)
        for name, value in itertools.chain(network.named_parameters(), network.named_buffers()):
            value.copy_(slice_weight(name, value.shape, self.whole))
        return network


def slice_weights(network: nn.Module, whole: nn.Module) -> dict[str, Tensor]:
    """The tensors of `whole` under the names and in the shapes that `network` has them; gradients flow back."""
    own = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    wanted = itertools.chain(network.named_parameters(), network.named_buffers())
    return {name: slice_to(own[name], value.shape) for name, value in wanted}


def slice_weight(name: str, shape: torch.Size, whole: nn.Module) -> Tensor:
    owner, _, last = name.rpartition(".")
    return slice_to(getattr(whole.get_submodule(owner), last), shape)


def slice_to(weight: Tensor, shape: torch.Size) -> Tensor:
    """The first rows and columns of a tensor; of a (N, C, h, w) kernel the middle of the last two dimensions."""
    if weight.shape == shape:
        return weight
    for dim, (have, want) in enumerate(zip(weight.shape, shape, strict=True)):
        weight = weight.narrow(dim, (have - want) // 2 if dim >= 2 else 0, want)
    return weight.contiguous()


def find_extremes(costs: Costs) -> tuple[Point, Point]:
    """The smallest and the largest network; raises where that does not hold all the others."""
    space, (smallest, largest) = costs.networks.space, costs.extremes()
    whole = space.build(largest, device="meta")
    for point in space.uniform():
        check_contained(costs.networks.at(point), whole)
    return smallest, largest


def check_contained(network: nn.Module, whole: nn.Module) -> None:
    own = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, value in itertools.chain(network.named_parameters(), network.named_buffers()):
        have = own[name].shape if name in own else None
        if have is None or len(have) != value.ndim or any(a < b for a, b in zip(have, value.shape, strict=True)):
            raise WeftError(
                f"The networks of this space cannot share weights: {name} {tuple(value.shape)} of one is not part of"
                f" the largest ({'none' if have is None else tuple(have)}). Search without a supernet: --no-supernet."
            )


@torch.no_grad()
def recalibrate(network: nn.Module, batches: Iterable[Tensor]) -> None:
    """Gives every BatchNorm the mean statistics of these batches; those of the largest network do not fit it."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    network.eval()  # no dropout, no dropped paths
    before = [norm.momentum for norm in norms]
    for i, batch in enumerate(batches):
        for norm in norms:
            norm.train()
            norm.momentum = 1 / (i + 1)  # the mean over all batches so far
        network(batch)
    for norm, momentum in zip(norms, before, strict=True):
        norm.eval()
        norm.momentum = momentum


default_cfgs = generate_default_cfgs({NAME: dict(input_size=(3, 224, 224), crop_pct=0.875, interpolation="bicubic")})


@register_model
def weft_supernet(
    pretrained: bool = False,
    of: str = "cvt_nano",
    choices: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    num_classes: int = 1000,
    in_chans: int = 3,
    img_size: Any = 224,
    device: Any = None,
    points: Sequence[Point] | None = None,
    **others: Any,
) -> nn.Module:
    """The supernet of a space over the model `of`, by a name that a run can have.

    `others` are drop_rate and drop_path_rate, and what timm gives to all models.
    """
    rates = {name: others.pop(name) for name in ("drop_rate", "drop_path_rate") if name in others}
    if not others.keys() <= FROM_TIMM:
        raise TypeError(f"a supernet has arguments of its networks in `args`, not {', '.join(others)}")
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    shape = dict(num_classes=num_classes, in_chans=in_chans)
    sized = {"img_size": (height, width)} if takes_size(of) else {}
    space = Space(of, dict(choices or {}), {**(args or {}), **rates, **shape, **sized})
    return Supernet(space, (in_chans, height, width), device, points)

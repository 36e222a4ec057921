"""Spaces of architectures, and the supernet whose networks share weights."""

import copy
import functools
import random
import re

import pytest
import timm
import torch
from torch import nn

import weft  # noqa: F401  registers the models
from tests.helpers.places import ROOT
from tests.helpers.variants import CEIT, CVT
from weft.catalog.cost import count_macs, count_macs_by_kind, count_parameters
from weft.errors import WeftError
from weft.models.cvt import VARIANTS
from weft.study.search.space import SPACES, Space, check_choices, read_space
from weft.study.search.supernet import Costs, MetaNetworks, Supernet, recalibrate

BLOCKS = {"block": {"stride_kv": [1, 2], "mlp_ratio": [2.0, 4.0]}}
SMALL = dict(num_classes=5, img_size=32, drop_path_rate=0.0)
MODELS = {  # a model of each family that has a ready space, and the size of that
    "cvt_nano": 4**8,
    "cvt_13": 4**13,
    "ceit_nano": 3 * 3 * 6 * 2,
    "vitae_nano": 3 * 2 * 3 * 3,
    "vt_resnet_nano": 3 * 2 * 3,
    "cetnet_nano": 2 * 2 * 4,
    "pvt_small": 12**4,
    "cswin_tiny": 6**4,
    "t2t_vit_7": 3 * 3,
}


def cvt_space(**args) -> Space:
    return Space("cvt_nano", BLOCKS, {**CVT, **SMALL, **args})


@pytest.mark.parametrize(("model", "size"), MODELS.items())
def test_ready_spaces(model, size):
    space = read_space("", model, {})
    assert space.size == size
    point = space.random(random.Random(1))
    assert space.point(space.arguments(point)) == point
    space.build(point, device="meta")
    whole_map = model == "cswin_tiny"  # in its last stage: shares no weights with stripes
    assert (space.default is None) == whole_map


def test_every_ready_space_is_tested():
    families = {path.stem for path in SPACES.glob("*.yaml")}
    assert families == {name.split("_nano")[0].split("_13")[0].split("_small")[0] for name in MODELS} - {
        "cswin_tiny",
        "t2t_vit_7",
    } | {"cswin", "t2t_vit"}


def test_cvt_13_nas_is_a_point_of_cvts_space():
    space = read_space("", "cvt_13", {})
    point = space.point(VARIANTS["cvt_13_nas"])
    found, named = space.build(point, device="meta"), timm.create_model("cvt_13_nas", device="meta")
    assert {k: v.shape for k, v in found.state_dict().items()} == {k: v.shape for k, v in named.state_dict().items()}
    assert Costs(space, (3, 64, 64)).of(point) == (count_parameters(named), count_macs(named, (3, 64, 64)))


def test_documented_limits_hold_the_network_that_the_paper_found():
    """And not the one that it was searched from."""
    command = re.search(
        r"weft search .* --model cvt_13 --params (\S+)M --macs (\S+)G", (ROOT / "docs/search.md").read_text()
    )
    most_parameters, most_macs = (float(number) for number in command.groups())
    for name, fits in (("cvt_13_nas", True), ("cvt_13", False)):
        model = timm.create_model(name, device="meta")
        parameters, macs = count_parameters(model), count_macs(model, (3, 224, 224))
        assert (parameters <= most_parameters * 1e6 and macs <= most_macs * 1e9) == fits


def test_the_space_has_the_bounds_of_the_paper():
    """13.66 M parameters and 2.59 GMACs to 19.88 M: counted without the depth-wise convolutions and attention."""
    space = read_space("", "cvt_13", {})
    uniform = {(p["stride_kv[0][0]"], p["mlp_ratio[0][0]"]): p for p in space.uniform()}
    smallest, largest = (space.build(uniform[ends], device="meta") for ends in ((2, 2.0), (1, 4.0)))
    for network, published in ((smallest, 13.66e6), (largest, 19.88e6)):
        depthwise = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d) and m.groups > 1)
        assert count_parameters(network) - depthwise == pytest.approx(published, rel=1e-3)
    assert count_macs_by_kind(smallest, (3, 224, 224))[0] == pytest.approx(2.59e9, rel=1e-2)


def test_the_model_as_it_is():
    assert cvt_space().arguments(cvt_space().default or {}) == {
        "stride_kv": [[2], [2, 2], [2, 2]],
        "mlp_ratio": [[4.0], [4.0, 4.0], [4.0, 4.0]],
    }
    assert Space("cvt_nano", {"model": {"stem_stride": [1, 4]}}, {}).default is None  # the nano one has 2


def test_networks_put_together_from_blocks_are_those_that_are_built():
    space = cvt_space()
    networks = MetaNetworks(space)
    for seed in range(3):
        point = space.random(random.Random(seed))
        built, put = space.build(point, device="meta"), networks.at(point)
        assert {k: v.shape for k, v in built.state_dict().items()} == {k: v.shape for k, v in put.state_dict().items()}
        assert count_macs(built, (3, 32, 32)) == count_macs(put, (3, 32, 32))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"blocks": {"mlp_ratio": [2.0]}}, "Did you mean 'block'"),
        ({"block": {"mlp_ratio": 2.0}}, "list of distinct choices"),
        ({"block": {"mlp_ratio": [2.0, 2.0]}}, "list of distinct choices"),
        ({"block": {"mlp_ratio": []}}, "list of distinct choices"),
        ([1], "must hold"),
        (None, "must hold"),
    ],
)
def test_a_bad_space_is_told(content, words):
    with pytest.raises(WeftError, match=words):
        check_choices(content, "my.yaml")


def test_arguments_that_a_model_does_not_take():
    with pytest.raises(WeftError, match="does not take"):
        Space("cvt_nano", {"model": {"wings": [1, 2]}}).build({"wings": 1}, device="meta")
    with pytest.raises(WeftError, match="no stages of blocks"):
        _ = Space("ceit_nano", {"block": {"mlp_ratio": [2.0]}}).size
    with pytest.raises(WeftError, match="is not in the space"):
        cvt_space().point({"stride_kv": 3, "mlp_ratio": 2.0})
    with pytest.raises(WeftError, match="no search space for resnet18"):
        read_space("", "resnet18", {})


# The supernet ---------------------------------------------------------------------------------------------------

SPACE_OF = {
    "cvt": cvt_space(),
    "ceit": Space(
        "ceit_nano",
        {"model": {"leff_kernel": [1, 3, 5], "mlp_ratio": [2.0, 4.0], "depth": [2, 3]}},
        {**{k: v for k, v in CEIT.items() if k != "depth"}, **SMALL},
    ),
}


@functools.cache
def made(family: str) -> Supernet:
    torch.manual_seed(0)
    return Supernet(SPACE_OF[family], (3, 32, 32))


def cut_by_hand(weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Leading rows and columns; of a kernel the middle."""
    for dim, want in enumerate(shape):
        first = (weight.shape[dim] - want) // 2 if dim > 1 else 0
        weight = weight.index_select(dim, torch.arange(first, first + want))
    return weight


def test_the_largest_and_the_smallest_network():
    smallest, largest = made("cvt").points
    assert {name.split("[")[0]: value for name, value in smallest.items()} == {"stride_kv": 2, "mlp_ratio": 2.0}
    assert {name.split("[")[0]: value for name, value in largest.items()} == {"stride_kv": 1, "mlp_ratio": 4.0}


@pytest.mark.parametrize("family", SPACE_OF)
@pytest.mark.parametrize("training", [False, True])
def test_a_subnet_is_the_standalone_network_with_those_weights(family, training):
    """In value and in gradient, to float64; in training by the statistics of the batch."""
    torch.manual_seed(0)
    space = SPACE_OF[family]
    net = copy.deepcopy(made(family)).double().train(training)
    for buffer in net.buffers():
        if buffer.dtype == torch.float64:
            buffer.uniform_(0.5, 1.5)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for seed in range(2):
        point = space.random(random.Random(seed))
        alone = space.build(point).double().train(training)
        state = {k: cut_by_hand(net.whole.state_dict()[k], v.shape) for k, v in alone.state_dict().items()}
        alone.load_state_dict(state)
        got, want = net.run(point, x), alone(x)
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)
        assert torch.allclose(net.subnet(point).train(training)(x), want, rtol=1e-10, atol=1e-12)
        net.zero_grad()
        got.square().sum().backward()
        want.square().sum().backward()
        whole = dict(net.whole.named_parameters())
        for name, parameter in alone.named_parameters():
            gradient = whole[name].grad
            assert torch.allclose(cut_by_hand(gradient, parameter.shape), parameter.grad, rtol=1e-8, atol=1e-10)
            assert gradient.norm() == pytest.approx(parameter.grad.norm().item(), rel=1e-6)  # and none beside it


def test_a_step_trains_all_and_keeps_the_statistics_of_the_largest_alone():
    torch.manual_seed(0)
    net = copy.deepcopy(made("cvt")).train()
    x = torch.randn(16, 3, 32, 32)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.run(net.points[0], x)
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())
    alone = net.networks.space.build(net.points[1])
    alone.load_state_dict(net.whole.state_dict())
    alone.train()(x[:4])
    net(x).sum().backward()
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(net.whole.get_buffer(name), buffer)
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_step_draws_its_networks_from_its_own_seed():
    net = copy.deepcopy(made("cvt")).train()
    x = torch.randn(16, 3, 32, 32)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(net(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_known_ends_are_not_looked_for(monkeypatch):
    """A run that goes on, and the judge, make no other network than the largest."""
    ends = made("cvt").points
    monkeypatch.setattr("weft.study.search.supernet.Costs", None)
    again = Supernet(SPACE_OF["cvt"], (3, 32, 32), points=[*ends])
    shapes, known = ({k: v.shape for k, v in net.state_dict().items()} for net in (again, made("cvt")))
    assert shapes == known


def test_networks_that_share_nothing_are_refused():
    space = Space("cvt_nano", {"model": {"embed": ["conv", "ce"]}}, {**CVT, **SMALL})
    with pytest.raises(WeftError, match=r"cannot share weights.*--no-supernet"):
        Supernet(space, (3, 32, 32), device="meta")


def test_recalibrated_statistics_are_means_over_the_batches():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm2d(3), nn.Dropout(0.9))
    batches = [torch.randn(4, 3, 5, 5) * (i + 1) + i for i in range(4)]
    recalibrate(network, batches)
    norm = network[1]
    torch.testing.assert_close(norm.running_mean, torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([b.var((0, 2, 3)) for b in batches]).mean(0))
    assert norm.momentum == 0.1
    assert not any(module.training for module in network.modules())

"""Optimiser, learning rate, weight average, freezing: against timm, torch and numbers worked out by hand."""

import copy
import fnmatch
import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, MultiStepLR, PolynomialLR

import weft  # noqa: F401  registers the models
from tests.conftest import randomise
from tests.helpers.variants import NANO
from weft.config import OptimConfig
from weft.engine.optim import Ema, freeze, learning_rate, make_optimizer, parameter_groups, scale_schedule
from weft.errors import WeftError

ADAMW = dict(opt="adamw", betas=(0.9, 0.999), eps=1e-8)
SGD = dict(opt="momentum", momentum=0.9)
RMSPROP = dict(opt="rmsproptf", momentum=0.8, alpha=0.95, eps=1e-3)


def small(name="cvt_nano", **kwargs):
    return timm.create_model(name, num_classes=5, **kwargs)


def names_of(model, parameters):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {by_id[id(p)] for p in parameters}


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    pictures = torch.randn(2, 3, 32, 32, dtype=next(model.parameters()).dtype)
    model(pictures).square().sum().backward()
    optimizer.step()


# Optimiser ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "timms"),
    [
        (OptimConfig(name="adamw"), ADAMW),
        (OptimConfig(name="adamw", layer_decay=0.7), ADAMW),
        (OptimConfig(name="adamw", weight_decay=0.0, lr=0.01), ADAMW),
        (OptimConfig(name="sgd", lr=0.02), SGD),
        (OptimConfig(name="sgd", lr=0.02, layer_decay=0.5), SGD),
        (OptimConfig(name="rmsprop", momentum=0.8, alpha=0.95, eps=1e-3, weight_decay=1e-5), RMSPROP),
    ],
    ids=lambda value: value.get("opt", "") if isinstance(value, dict) else f"{value.name}-{value.layer_decay}",
)
def test_steps_as_timm(config, timms):
    """Three steps of a model that timm's own factory moves the same way."""
    ours = small().eval().double()  # the gradient of a key's bias is 0 but for rounding, which AdamW would blow up
    theirs = copy.deepcopy(ours)
    decay = None if config.layer_decay == 1 else config.layer_decay
    optimizer = make_optimizer(ours, config, 64)
    reference = create_optimizer_v2(
        theirs, **timms, lr=config.lr, weight_decay=config.weight_decay, layer_decay=decay
    )  # like us, timm leaves the learning rate of layers to the schedule, through lr_scale
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["lr"] = config.lr * group.get("lr_scale", 1.0)
    for seed in range(3):
        step(ours, optimizer, seed)
        step(theirs, reference, seed)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
def test_state_is_tensors_and_goes_on_where_it_was(name):
    """What is stored is tensors alone; with them another optimiser takes the same steps to the last bit."""
    model = small().eval()
    config = OptimConfig(name=name, layer_decay=0.9)
    optimizer = make_optimizer(model, config, 64)
    for seed in range(2):
        step(model, optimizer, seed)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert states
    assert all(isinstance(value, torch.Tensor) for value in states)
    twin = copy.deepcopy(model)
    other = make_optimizer(twin, config, 64)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, 9)
    step(twin, other, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "exempt"),
    [
        ("ceit_tiny", ["cls_token", "pos_embed.*"]),
        ("vitae_tiny", []),
        ("vitae_tiny", ["cls_token"]),
        ("cvt_13", ["stages.2.cls_token"]),
        ("cetnet_tiny", ["*relative_position_bias_table"]),
        ("ce_swin_tiny", ["*relative_position_bias_table"]),
        ("vt_resnet18", []),
        ("t2t_vit_7", ["cls_token"]),
        ("resnet18", []),
        ("vit_tiny_patch16_224", ["cls_token", "pos_embed"]),
        ("swin_tiny_patch4_window7_224", ["*relative_position_bias_table"]),
    ],
)
@pytest.mark.parametrize("layer_decay", [1.0, 0.8])
def test_no_decay_where_the_papers_have_none(name, exempt, layer_decay):
    kwargs = dict(class_token=True, global_pool="token") if name == "vitae_tiny" and exempt else {}
    model = timm.create_model(name, device="meta", **kwargs)
    named = dict(model.named_parameters())
    free = {n for n, p in named.items() if p.ndim <= 1 or any(fnmatch.fnmatch(n, e) for e in exempt)}
    for pattern in exempt:
        assert any(fnmatch.fnmatch(n, pattern) for n in named)
    groups = make_optimizer(model, OptimConfig(layer_decay=layer_decay), 8).param_groups
    assert all(isinstance(group["lr_scale"], float) for group in groups)
    assert names_of(model, [p for g in groups if g["weight_decay"] == 0 for p in g["params"]]) == free
    assert names_of(model, [p for g in groups if g["weight_decay"] == 0.05 for p in g["params"]]) == set(named) - free


@pytest.mark.parametrize("name", [*NANO, "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("decay", [0.05, 0.0])
def test_groups_are_those_of_timm(name, decay):
    """In timm's order, by which states are stored; what is frozen is in none."""
    model = timm.create_model(name, device="meta")
    next(model.parameters()).requires_grad_(False)
    expected = param_groups_weight_decay(model, decay, no_weight_decay_list=model.no_weight_decay())
    found = parameter_groups(model, OptimConfig(weight_decay=decay))
    assert [{**group, "lr_scale": 1.0} for group in expected] == found


@pytest.mark.parametrize("name", [*NANO, "resnet18"])
def test_learning_rate_grows_from_layer_to_layer(name):
    """The classifier learns at the full rate, and no parameter more slowly than one before it in the network."""
    model = timm.create_model(name, device="meta")
    optimizer = make_optimizer(model, OptimConfig(layer_decay=0.5), 8)
    scale = {n: g["lr_scale"] for g in optimizer.param_groups for n in names_of(model, g["params"])}
    classifier = set(names_of(model, model.get_classifier().parameters()))
    first = next(iter(scale))
    assert all(scale[n] == 1 for n in classifier)
    assert scale[first] == min(scale.values()) < 0.1
    powers = sorted({round(math.log(s, 0.5), 6) for s in scale.values()})
    assert powers == list(range(len(powers)))  # every power of the decay, no layer left out


def test_frozen_parameters_are_left_out():
    model = small()
    total = sum(p.numel() for p in model.parameters())
    frozen = freeze(model, "backbone")
    optimizer = make_optimizer(model, OptimConfig(), 8)
    left = [p for g in optimizer.param_groups for p in g["params"]]
    assert names_of(model, left) == {"head.weight", "head.bias"}
    assert frozen == total - sum(p.numel() for p in left)
    freeze(model, "head")
    with pytest.raises(WeftError, match="every parameter is frozen"):
        make_optimizer(model, OptimConfig(), 8)


# Learning rate --------------------------------------------------------------------------------------------------


def timms_schedule(scheduler_class, lr, steps, by_updates, **kwargs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = scheduler_class(optimizer, t_in_epochs=not by_updates, **kwargs)
    rates = []
    for t in range(steps):
        scheduler.step_update(t) if by_updates else scheduler.step(t)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@settings(deadline=None, max_examples=60)
@given(
    epochs=st.integers(2, 40),
    warmup=st.integers(0, 10),
    cooldown=st.integers(0, 5),
    per_epoch=st.sampled_from([1, 7]),
    batch=st.sampled_from([1, 64, 1024]),
    lr_batch=st.sampled_from([0, 512]),
)
def test_cosine_is_timms(epochs, warmup, cooldown, per_epoch, batch, lr_batch):
    """By epochs and by updates, over the whole run and its cool-down; all three rates scale with the batch."""
    config = OptimConfig(lr=1e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=warmup, lr_batch=lr_batch)
    scale = batch / lr_batch if lr_batch else 1
    steps = (epochs + cooldown) * per_epoch
    expected = timms_schedule(
        CosineLRScheduler,
        1e-3 * scale,
        steps,
        per_epoch > 1,
        t_initial=epochs * per_epoch,
        lr_min=1e-5 * scale,
        warmup_t=warmup * per_epoch,
        warmup_lr_init=1e-6 * scale,
    )
    ours = [learning_rate(config, batch, t / per_epoch, epochs) for t in range(steps)]
    assert ours == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("warmup", [0, 3])
def test_steps_are_timms(warmup):
    config = OptimConfig(lr=0.1, schedule="step", step_epochs=30, gamma=0.1, warmup_epochs=warmup, warmup_lr=1e-3)
    expected = timms_schedule(
        StepLRScheduler, 0.1, 90, False, decay_t=30, decay_rate=0.1, warmup_t=warmup, warmup_lr_init=1e-3,
        warmup_prefix=False,
    )  # fmt: skip
    assert [learning_rate(config, 256, t, 90) for t in range(90)] == pytest.approx(expected)
    assert learning_rate(config, 256, 29.99, 90) == pytest.approx(0.1)  # the step is at the end of an epoch


def test_exponential_is_timms_and_vts():
    """VT: 0.01 to 0.16 over five epochs, then 0.9875 of it for each epoch; timm with a step after every epoch."""
    config = OptimConfig(lr=0.16, warmup_lr=0.01, warmup_epochs=5, schedule="exponential", gamma=0.9875, lr_batch=2048)
    expected = timms_schedule(
        StepLRScheduler, 0.16, 400, False, decay_t=1, decay_rate=0.9875, warmup_t=5, warmup_lr_init=0.01,
        warmup_prefix=True,
    )  # fmt: skip
    rates = [learning_rate(config, 2048, epoch, 400) for epoch in range(400)]
    assert rates == pytest.approx(expected)
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[5] == pytest.approx(0.16)


def torchs_schedule(make_scheduler, lr, steps, **kwargs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(optimizer, **kwargs)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@settings(deadline=None, max_examples=40)
@given(epochs=st.integers(1, 30), power=st.sampled_from([0.5, 0.9, 1.0, 2.0]), per_epoch=st.sampled_from([1, 7]))
def test_polynomial_is_torchs(epochs, power, per_epoch):
    """Step by step to the end, where nothing is left of the rate, and behind it."""
    config = OptimConfig(lr=0.01, schedule="poly", power=power, min_lr=0.0)
    total = epochs * per_epoch
    expected = torchs_schedule(PolynomialLR, 0.01, total + 3, total_iters=total, power=power)
    ours = [learning_rate(config, 16, t / per_epoch, epochs) for t in range(total + 3)]
    assert ours == pytest.approx(expected, rel=1e-6, abs=1e-15)
    assert ours[-3:] == [0, 0, 0]


@pytest.mark.parametrize("power", [0.9, 1.0])
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 0), (3, 0), (2, 4)])
def test_polynomial_to_a_lowest_rate_is_timms(power, warmup, cooldown):
    config = OptimConfig(
        lr=6e-5, schedule="poly", power=power, warmup_epochs=warmup, warmup_lr=6e-11, min_lr=1e-6, lr_batch=16
    )
    expected = timms_schedule(
        PolyLRScheduler, 1.2e-4, 20 + cooldown, False, t_initial=20, power=power, lr_min=2e-6, warmup_t=warmup,
        warmup_lr_init=1.2e-10, warmup_prefix=False,
    )  # fmt: skip
    assert [learning_rate(config, 32, t, 20) for t in range(20 + cooldown)] == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    milestones=st.lists(st.integers(1, 40), unique=True, max_size=4, min_size=1),
    gamma=st.sampled_from([0.1, 0.5]),
    per_epoch=st.sampled_from([1, 7]),
)
def test_milestones_are_torchs(milestones, gamma, per_epoch):
    """In any order, and each step just when its epoch begins."""
    config = OptimConfig(lr=1e-4, schedule="step", milestones=[float(at) for at in milestones], gamma=gamma)
    steps = sorted(at * per_epoch for at in milestones)
    expected = torchs_schedule(MultiStepLR, 1e-4, 45 * per_epoch, milestones=steps, gamma=gamma)
    ours = [learning_rate(config, 16, t / per_epoch, 45) for t in range(45 * per_epoch)]
    assert ours == pytest.approx(expected, rel=1e-9)


def test_milestones_behind_a_warmup_are_torchs():
    """Mask R-CNN's schedule, chained from two of torch's as torchvision's reference training does it."""
    config = OptimConfig(lr=1e-4, schedule="step", milestones=[8, 11], gamma=0.1, warmup_epochs=0.5, warmup_lr=1e-7)
    expected = torchs_schedule(
        lambda optimizer: ChainedScheduler(
            [LinearLR(optimizer, 1e-3, total_iters=10), MultiStepLR(optimizer, [160, 220], gamma=0.1)]
        ),
        1e-4,
        240,
    )
    assert [learning_rate(config, 16, t / 20, 12) for t in range(240)] == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(["cosine", "poly", "step", "exponential", "constant"]),
    milestones=st.sampled_from([[], [8.0, 11.0]]),
    warmup=st.sampled_from([0.0, 2.0]),
    factor=st.floats(0.01, 10),
    half_epochs=st.integers(0, 39),
)
def test_stretched_schedule_is_the_same_one(schedule, milestones, warmup, factor, half_epochs):
    """A run of another length has at each part of its way the rate that the original has there."""
    config = OptimConfig(
        schedule=schedule, milestones=milestones, warmup_epochs=warmup, cooldown_epochs=3, step_epochs=5, power=0.9,
        gamma=0.9,
    )  # fmt: skip
    epoch = (half_epochs + 0.5) / 2  # never where a step is
    longer = scale_schedule(config, factor)
    ours = learning_rate(longer, 16, epoch * factor, 15 * factor)
    assert ours == pytest.approx(learning_rate(config, 16, epoch, 15), rel=1e-9)
    assert longer.cooldown_epochs == 3 * factor
    assert (longer.lr, longer.min_lr, longer.power) == (config.lr, config.min_lr, config.power)


def test_constant():
    config = OptimConfig(lr=5e-6, schedule="constant", lr_batch=1024)
    assert {learning_rate(config, 1024, epoch, 30) for epoch in (0, 0.5, 15, 30, 40)} == {5e-6}
    assert learning_rate(config, 2048, 3, 30) == pytest.approx(1e-5)


# Weight average -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cvt_nano", "ceit_nano", "vt_resnet_nano", "resnet18"])
def test_average_is_timms(name):
    """To the last bit, over three steps in training mode, so that BatchNorm's statistics move too."""
    torch.manual_seed(0)
    model = small(name)
    ema, reference = Ema(model, 0.9), ModelEmaV3(model, decay=0.9, exclude_buffers=True)
    optimizer = make_optimizer(model, OptimConfig(lr=0.01), 8)
    for seed in range(3):
        step(model.train(), optimizer, seed)
        ema.update(model)
        reference.update(model)
    ours, theirs, raw = ema.module.state_dict(), reference.module.state_dict(), model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    buffers = [key for key, _ in model.named_buffers()]
    assert buffers
    assert all(torch.equal(ours[key], raw[key]) for key in buffers if key in raw)
    assert not torch.equal(ours[next(iter(ours))], raw[next(iter(ours))])
    assert not ema.module.training
    assert not any(p.requires_grad for p in ema.module.parameters())


def test_average_without_buffers():
    model = nn.Linear(2, 3)
    ema = Ema(model, 0.5)
    before = ema.module.weight.clone()
    with torch.no_grad():
        model.weight.add_(1)
    ema.update(model)
    torch.testing.assert_close(ema.module.weight, before + 0.5)


# Freezing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["cvt_nano", "ceit_nano", "resnet18", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
)
def test_backbone_is_all_but_the_classifier(name):
    model = timm.create_model(name, num_classes=5)
    frozen = freeze(model, "backbone")
    left = {n for n, p in model.named_parameters() if p.requires_grad}
    heads = ("head.", "head_dist.", "fc.")
    assert left == {n for n, _ in model.named_parameters() if n.startswith(heads)}
    assert frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad)


def test_what_is_frozen_stays_as_it_is():
    """Training mode and a step change neither the weights nor the statistics of what is frozen; the rest moves."""
    model = small()
    randomise(model)
    freeze(model, "stages.0, stages.1.embed")
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, OptimConfig(lr=0.1), 8)
    model.eval().train()
    step(model, optimizer, 0)
    step(copy.deepcopy(model), optimizer, 1)  # a copy stays frozen too
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = {name for name in before if name.startswith(("stages.0.", "stages.1.embed."))}
    assert not moved & frozen
    assert any("running_mean" in name for name in frozen)
    assert any("running_mean" in name for name in moved)


def test_freeze_norms():
    model = small()
    freeze(model, "norm")
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm | nn.BatchNorm2d)}
    frozen = {n.rpartition(".")[0] for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == norms
    statistics = [m.training for m in model.train().modules() if isinstance(m, nn.BatchNorm2d)]
    assert statistics
    assert not any(statistics)


def test_names_are_whole():
    model = timm.create_model("vit_tiny_patch16_224", device="meta")
    freeze(model, "blocks.1")
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if n.startswith("blocks.1.")}


@pytest.mark.parametrize(("what", "hint"), [("stagez.0", "stages.0"), ("hea", "head"), ("nothing", "")])
def test_unknown_names_are_told(what, hint):
    with pytest.raises(WeftError, match=f"model.freeze='{what}'.*{hint}"):
        freeze(small(device="meta"), what)


def test_nothing_to_freeze():
    model = small(device="meta")
    assert freeze(model, "") == 0
    assert all(p.requires_grad for p in model.parameters())

"""Layers that make again what the BatchNorm in front of them gave: numbers as ever, and less kept on the way."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import weft
from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from tests.lost_kernels import QUICK_CHECKS
from tests.test_kernels_in_blocks import by_kernels, check_training, randomise  # noqa: F401  a fixture
from weft.kernels import linear, op
from weft.kernels.batch_norm import batch_norm_statistics, plain_batch_norm_act
from weft.kernels.depthwise import plain_depthwise
from weft.kernels.norm_depthwise import norm_depthwise
from weft.models.ceit import LeFF
from weft.models.cetnet import LEWinAttention
from weft.models.layers import LayerNorm, Linear, norm_tokens

# side, columns, channels, kernel, stride
MAPS = [(3, 4, 8, 3, 1), (3, 2, 5, 3, 2), (2, 3, 5, 5, 1)]


def norm_conv(act: str, stride: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def kernel(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        moments = batch_norm_statistics(x.detach(), None, None, None, 0.1)
        return norm_depthwise(x, moments, gamma, beta, 1e-5, act, weight, bias, stride)

    def twin(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = plain_batch_norm_act(x, gamma, beta, None, None, True, 0.1, 1e-5, act)
        return plain_depthwise(y, weight, bias, None, None, stride, "none", "none")

    return kernel, twin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "channels", "kernel", "stride"), MAPS)
def test_norm_and_convolution(
    rows: int, cols: int, channels: int, kernel: int, stride: int, dtype: torch.dtype
) -> None:
    functions = norm_conv("gelu" if channels % 2 else "none", stride)
    x = random(2, rows, cols, channels, dtype=dtype) * 2 + 1
    gamma, beta = random(channels, seed=1), random(channels, seed=2)
    weight, bias = random(channels, 1, kernel, kernel) / kernel, random(channels, seed=3) if stride == 1 else None
    check_values(*functions, x, gamma, beta, weight, bias, factor=2.0)
    check_gradients(*functions, x, gamma, beta, weight, bias, factor=4.0)


def test_it_is_an_operator() -> None:
    x, weight = random(2, 3, 4, 8).requires_grad_(), random(8, 1, 3, 3).requires_grad_()
    gamma, beta = random(8, seed=1).requires_grad_(), random(8, seed=2)
    moments = batch_norm_statistics(x.detach(), None, None, None, 0.1)
    args = (x, moments, gamma, beta, 1e-5, "gelu", weight, None, 2)
    torch.library.opcheck(torch.ops.weft.norm_depthwise.default, args, test_utils=QUICK_CHECKS)


class OneMap(nn.Module):
    """LeFF without its class token, perhaps as `weft.fuse` changes it."""

    def __init__(self, leff: LeFF, fused: bool = False):
        super().__init__()
        self.leff = leff
        if fused:
            leff.fuse()

    def forward(self, x: Tensor) -> Tensor:
        return self.leff(x, x[:, 0, :1])[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LeFF": lambda: OneMap(LeFF(8, 16, 3, norm=True, final_act=False)),
    "LeFF, 5x5, final GELU": lambda: OneMap(LeFF(8, 16, 5, norm=True, final_act=True)),
    "LeFF, no norm": lambda: OneMap(LeFF(8, 16, 3, norm=False, final_act=False)),
    "LeFF, fused": lambda: OneMap(LeFF(8, 16, 3, norm=True, final_act=False), fused=True),
    "LEWin": lambda: LEWinAttention(16, 2, 2, True, "qkv", 0.0, 0.0),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, by_kernels: Callable[[], None]) -> None:  # noqa: F811
    """Outputs, gradients and running statistics are those of the modules one by one."""
    check_training(randomise(MODULES[name]()), by_kernels, random(2, 4, 4, 16 if name == "LEWin" else 8))


@pytest.mark.parametrize("name", ["LeFF", "LEWin"])
def test_nobody_who_watches_is_passed_by(name: str, by_twins: Callable[[], None]) -> None:
    by_twins()
    for watched, _ in list(MODULES[name]().named_modules())[1:]:
        module, seen = MODULES[name]().train(), []
        if not list(module.get_submodule(watched).parameters()):
            continue
        module.get_submodule(watched).register_forward_hook(lambda *_, seen=seen: seen.append(True))
        module(random(2, 4, 4, 16 if name == "LEWin" else 8)).sum().backward()
        assert seen or "rel_pos" in watched, watched  # of which attention takes the table, in torch as well


# Whole models, their operators by twins: what is kept for the backward pass is the same -----------------------------


@pytest.fixture
def by_twins(by_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:  # noqa: F811
    def force() -> None:
        monkeypatch.setattr(op, "has_triton", lambda: False)
        by_kernels()

    return force


@pytest.mark.parametrize("name", ["LeFF", "LEWin"])
def test_derivatives(name: str, by_twins: Callable[[], None]) -> None:
    by_twins()
    module = randomise(MODULES[name]()).double().train()
    x = random(2, 2, 3, 16 if name == "LEWin" else 8).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *_: module(x).square().sum(), (x, *module.parameters()), fast_mode=True)


def small(name: str, depth: int) -> nn.Module:
    make = weft.create_model if name.startswith("ceit") else timm.create_model
    return make(name, depth=depth, img_size=64, embed_dim=96, num_heads=3).train()


def bytes_kept(model: nn.Module, batch: int) -> int:
    """What the backward pass needs beside weights and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()  # alive, so that no other can lie at its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(random(batch, 3, 64, 64))
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


def bytes_per_block(name: str) -> int:
    """Of one picture: two blocks and two pictures against fewer of each, so that all else cancels."""
    models = small(name, 2), small(name, 1)
    two, one = (bytes_kept(model, 3) - bytes_kept(model, 2) for model in models)
    return two - one


def test_a_block_keeps_no_more_than_that_of_deit(by_twins: Callable[[], None]) -> None:
    plain = bytes_per_block("ceit_tiny")
    by_twins()
    found, peer = bytes_per_block("ceit_tiny"), bytes_per_block("deit_tiny_patch16_224")
    assert found <= peer
    assert found < 0.6 * plain


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["ceit_nano", "cetnet_nano"])
def test_model(name: str, checkpointing: bool, by_twins: Callable[[], None]) -> None:
    """Loss and gradients are those of the plain path; running statistics move as often."""
    options: dict[str, Any] = dict(depth=2) if name == "ceit_nano" else dict(depths=(1, 1, 1, 1))
    model = weft.create_model(name, img_size=32, drop_path_rate=0.0, **options).double().train()
    model.set_grad_checkpointing(checkpointing)  # pyright: ignore[reportCallIssue]
    start, found = copy.deepcopy(model.state_dict()), []
    for _ in range(2):
        model.load_state_dict(start)
        model.zero_grad()
        model(random(3, 3, 32, 32).double()).square().mean().backward()
        grads = {key: parameter.grad for key, parameter in model.named_parameters()}
        found.append(grads | {key: buffer.clone() for key, buffer in model.named_buffers()})
        by_twins()
    for key, wanted in found[0].items():
        torch.testing.assert_close(found[1][key], wanted, rtol=1e-5, atol=1e-7, msg=key)  # biases in float32


def test_a_changed_norm_is_kept(by_twins: Callable[[], None]) -> None:
    """Who writes into what a norm gave gets the gradient for what is there now."""
    by_twins()
    norm, layer = LayerNorm(8), Linear(8, 4)
    x = random(2, 2, 3, 8).requires_grad_()
    _, _, z = norm_tokens(norm, x, None, again=True)
    z.mul_(2)
    layer(z).sum().backward()
    wanted = 2 * nn.functional.layer_norm(x.detach(), (8,)).sum((0, 1, 2))
    torch.testing.assert_close(layer.weight.grad, wanted.expand(4, 8), rtol=1e-5, atol=1e-5)


def test_what_a_norm_gave_can_be_saved_and_is_freed(by_twins: Callable[[], None]) -> None:
    """How it is made again goes into no file, and holds on to nothing once it is gone."""
    by_twins()
    x = random(2, 2, 3, 8).requires_grad_()
    z, file = norm_tokens(LayerNorm(8), x, None, again=True)[2], io.BytesIO()
    assert linear.how_again(z)
    torch.save(z, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), z)
    before = len(linear._again)
    del z
    assert len(linear._again) == before - 1

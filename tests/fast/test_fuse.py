"""`weft.fuse`: the same outputs without a single BatchNorm, for every model and switch."""

import copy
import io
import warnings

import pytest
import timm
import torch
from timm.layers import QuickGELU
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import weft
from tests.conftest import randomise
from tests.helpers.variants import PLAIN, SMALL, SWITCHES
from weft.fast.inference.packed_linear import PackedLinear


@pytest.mark.parametrize(
    ("name", "args"),
    [pytest.param(*case, id=key, marks=() if key in PLAIN else pytest.mark.slow) for key, case in SWITCHES.items()],
)
def test_every_switch(name, args):
    check(randomise(timm.create_model(name, **args)), torch.randn(2, 3, 57, 70))


QUICK = {*SMALL}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in weft.list_models()]
)
def test_every_model(name):
    check(randomise(timm.create_model(name)), torch.randn(1, 3, 112, 96))


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Rounding grows with the largest number, and the sums of a random ResNet grow large."""
    scale = max(1.0, want.abs().max().item())
    torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=tolerance)


def check(model: nn.Module, picture: torch.Tensor) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fused = weft.fuse(model)
    with torch.no_grad():
        assert_close(fused(picture), model(picture), 2e-5)
        assert_close(fused.forward_features(picture), model.forward_features(picture), 1e-4)
        for got, want in zip(
            fused.forward_intermediates(picture, intermediates_only=True),
            model.forward_intermediates(picture, intermediates_only=True),
            strict=True,
        ):
            assert_close(got, want, 1e-4)
    left = {name for name, m in fused.named_modules() if isinstance(m, nn.BatchNorm2d | QuickGELU)}
    assert all(name.endswith(".layer.norm1") for name in left)  # DenseNet's, which follows no convolution
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"fuse changed the original: {key}"


def test_fused_leaves_eval_and_accepts_wrapped_models():
    """A model in training mode is fused as if it were in eval mode; a features_only wrapper fuses, too."""
    model = randomise(timm.create_model("cvt_nano")).train()
    fused = weft.fuse(model)
    assert model.training
    assert not fused.training
    features = randomise(timm.create_model("ceit_nano", features_only=True))
    picture = torch.randn(1, 3, 40, 40)
    with torch.no_grad():
        for got, want in zip(weft.fuse(features)(picture), features(picture), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_packed_weights_follow_the_weights():
    """Weights packed by a call are packed anew after they were converted, loaded or copied, and never saved."""
    picture = torch.randn(2, 3, 32, 32)
    model, other = (randomise(timm.create_model("cvt_nano")) for _ in range(2))
    fused = weft.fuse(model)
    wanted = fused(picture)
    keys = set(weft.fuse(model).state_dict())
    assert set(fused.state_dict()) == keys
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for same in (copy.deepcopy(fused), torch.load(file, weights_only=False), torch.jit.script(fused)):
        torch.testing.assert_close(same(picture), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.double()(picture.double()).float(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.float()(picture), wanted, rtol=1e-4, atol=1e-4)
    fused.load_state_dict(weft.fuse(other).state_dict())
    torch.testing.assert_close(fused(picture), other.eval()(picture), rtol=1e-4, atol=1e-4)


def test_gradients_of_a_fused_copy():
    """For attribution: the picture gets the gradient that it gets through the model."""
    model = randomise(timm.create_model("cvt_nano")).eval()
    pictures = [torch.randn(1, 3, 32, 32).requires_grad_()]
    pictures.append(pictures[0].detach().clone().requires_grad_())
    for network, picture in zip((model, weft.fuse(model)), pictures, strict=True):
        network(picture)[0, 0].backward()
    assert_close(pictures[1].grad, pictures[0].grad, 1e-4)


@torch.no_grad()
def test_packed_weights_follow_changes_in_place():
    layer = PackedLinear.of(nn.Linear(6, 4), "gelu")
    x = torch.randn(3, 6)

    def check_layer() -> None:
        torch.testing.assert_close(layer(x), nn.functional.gelu(nn.functional.linear(x, layer.weight, layer.bias)))

    check_layer()
    layer.weight.mul_(2)
    check_layer()
    layer.weight.copy_(torch.randn(4, 6))
    check_layer()
    layer.weight.data = torch.randn(4, 6)
    check_layer()
    layer.weight = nn.Parameter(torch.randn(4, 6))
    check_layer()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_layers_take_any_tokens(dtype, bias):
    plain = nn.Linear(6, 4, bias=bias, dtype=dtype)
    layer = PackedLinear.of(copy.deepcopy(plain))
    tokens = torch.randn(3, 5, 6, dtype=dtype)
    for y in (tokens, tokens[:, :1], torch.randn(3, 6, 5, dtype=dtype).mT, tokens[:0], tokens[0, 0], tokens[:, None]):
        torch.testing.assert_close(layer(y), plain(y))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_products_leave_their_terms_alone(dtype):
    plain = nn.Linear(6, 4, dtype=dtype)
    layer, y = PackedLinear.of(copy.deepcopy(plain)), torch.randn(3, 5, 6, dtype=dtype)
    for x in (torch.randn(3, 5, 4, dtype=dtype), torch.randn(3, 4, 5, dtype=dtype).mT):
        before = x.clone()
        torch.testing.assert_close(layer.add_to(x, y), x + plain(y))
        assert torch.equal(x, before)
    assert layer.add_to(x[:0], y[:0]).shape == (0, 5, 4)


def test_sums_in_products_without_a_bias():
    """With a gradient and without one."""
    plain = nn.Linear(6, 4, bias=False)
    layer, x, y = PackedLinear.of(copy.deepcopy(plain)), torch.randn(3, 5, 4), torch.randn(3, 5, 6)
    torch.testing.assert_close(layer.add_to(x, y), x + plain(y))
    with torch.no_grad():
        torch.testing.assert_close(layer.add_to(x, y), x + plain(y))


@torch.no_grad()
def test_packed_layers_say_what_does_not_fit():
    """As torch does, and not as oneDNN does."""
    layer = PackedLinear.of(nn.Linear(6, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(3, 5))
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(RuntimeError, match="same dtype"):
            PackedLinear.of(nn.Linear(6, 4, dtype=dtype))(torch.randn(3, 6))


@torch.no_grad()
def test_packed_layers_are_plain_where_onednn_is_off_or_unknown():
    layer, x = PackedLinear.of(nn.Linear(6, 4)), torch.randn(3, 6)
    wanted = nn.functional.linear(x, layer.weight, layer.bias)
    with torch.backends.mkldnn.flags(enabled=False):
        torch.testing.assert_close(layer(x), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that there is no rule for batches of oneDNN's products
        torch.testing.assert_close(torch.func.vmap(layer)(x), wanted)
    assert layer.packed is None
    torch.testing.assert_close(layer(x), wanted)
    assert layer.packed is not None


class Halved:
    """A mixin of somebody's own: what a module gives, times a half."""

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return super().forward(*args) / 2  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
@pytest.mark.parametrize(
    "where",
    ["attn", "attn.proj", "attn.proj_q", "attn.proj_drop"]
    + ["mlp", "mlp.fc1", "mlp.drop1", "mlp.norm", "mlp.fc2", "mlp.drop2"],
)
def test_modules_of_other_classes_are_called(where):
    """Somebody's own kind of layer is no product to be added to something else, nor is it nothing."""
    model = randomise(timm.create_model("cvt_nano", **SMALL["cvt_nano"]))
    for stage in model.stages:
        module = stage.blocks[0].get_submodule(where)
        module.__class__ = type("Odd", (Halved, type(module)), {})
    check(model, torch.randn(2, 3, 40, 40))


@torch.no_grad()
def test_a_fused_copy_is_one_graph_for_compilers():
    fused, picture = weft.fuse(timm.create_model("cvt_nano", **SMALL["cvt_nano"])), torch.randn(2, 3, 40, 40)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(picture), fused(picture), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_counters_see_the_products_of_a_fused_copy():
    model = timm.create_model("cvt_nano", global_pool="avg").requires_grad_(False)
    picture, counts = torch.randn(1, 3, 32, 32), []
    for network in (model.eval(), weft.fuse(model)):
        with FlopCounterMode(display=False) as counter:
            network(picture)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@torch.no_grad()
def test_a_block_takes_any_layout():
    model = randomise(timm.create_model("cvt_nano", **SMALL["cvt_nano"]))
    x = torch.randn(2, 16, 5, 4).permute(0, 2, 3, 1)
    wanted = model.stages[1].blocks[0](x.contiguous(), None)[0]
    torch.testing.assert_close(weft.fuse(model).stages[1].blocks[0](x, None)[0], wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_fused_copy_in_training_mode_drops():
    """As the model does: whoever keeps dropout on for an estimate of uncertainty gets one from the copy, too."""
    for rate in ("proj_drop_rate", "drop_path_rate"):
        model = randomise(timm.create_model("cvt_nano", **SMALL["cvt_nano"], **{rate: 0.99}))
        x, cls = torch.randn(2, 5, 4, 32), torch.randn(2, 1, 32)
        block = weft.fuse(model).train().stages[2].blocks[-1]
        for y, y_cls in (block(x, cls), (None, block.forward_class_token(x, cls))):
            kept = torch.isclose(y_cls, cls).float().mean()
            assert kept > 0.7, rate  # almost every branch was dropped
            assert y is None or torch.isclose(y, x).float().mean() > 0.7


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Dropout", "StochasticDepth"])
def test_dropouts_that_alone_are_in_training_mode_drop(kind):
    """As in Monte Carlo dropout: everything else stays in eval mode."""
    rate = "proj_drop_rate" if kind == "Dropout" else "drop_path_rate"
    model = randomise(timm.create_model("cvt_nano", **SMALL["cvt_nano"], **{rate: 0.99}))
    x, cls = torch.randn(2, 5, 4, 32), torch.randn(2, 1, 32)
    block = weft.fuse(model).stages[2].blocks[-1]
    for module in block.modules():
        module.train(type(module).__name__ == kind)
    for y_cls in (block(x, cls)[1], block.forward_class_token(x, cls)):
        assert torch.isclose(y_cls, cls).float().mean() > 0.7  # almost every branch was dropped


@torch.no_grad()
@pytest.mark.parametrize(
    "where", ["", "norm1", "norm2", "attn", "attn.proj", "attn.proj_drop", "mlp", "mlp.fc2", "mlp.drop2", "drop_path"]
)
def test_a_fused_copy_calls_what_is_watched(where):
    model = randomise(timm.create_model("cvt_nano", **SMALL["cvt_nano"]))
    x, cls = torch.randn(2, 5, 4, 32), torch.randn(2, 1, 32)
    block = weft.fuse(model).stages[2].blocks[-1]
    wanted, seen = block(x, cls), []
    block.get_submodule(where).register_forward_hook(lambda *args: seen.append(args))
    for run in (block, lambda x, cls: (wanted[0], block.forward_class_token(x, cls))):
        torch.testing.assert_close(run(x, cls), wanted, rtol=1e-4, atol=1e-5)
        assert seen
        seen.clear()


def test_a_name_is_not_a_model():
    with pytest.raises(weft.WeftError, match="takes a model, not str"):
        weft.fuse("cvt_13")  # pyright: ignore[reportArgumentType]
    with pytest.raises(weft.WeftError, match="before it is replayed"):
        weft.fuse(weft.replay(nn.Identity()))

"""Parts that blocks of several families have inside, and whether they are what fused forms know."""

from typing import Any

import timm.layers
from torch import nn

from weft.fast.inference.packed_linear import LINEAR_TYPES, PackedLinear
from weft.fast.tape.linear import mlp
from weft.fast.tape.tape import Tape, Var
from weft.models.layers import LayerNorm, QuickGELU

ACTIVATIONS: dict[type[nn.Module], str] = {nn.GELU: "gelu", nn.SiLU: "silu", QuickGELU: "quick_gelu"}


def activation_of(module: nn.Module) -> str | None:
    """The name by which kernels know this activation; None if they do not."""
    if getattr(module, "approximate", "none") != "none":
        return None
    return ACTIVATIONS.get(type(module))


def is_standard_mlp(module: Any) -> bool:
    """Whether this is timm's MLP of two linear layers with biases, and nothing else between or behind them."""
    return (
        type(module) is timm.layers.Mlp
        and type(module.fc2) in (nn.Linear, PackedLinear)
        and is_linear(module.fc1, module.fc2)
        and isinstance(module.norm, nn.Identity)
        and mlp_activation(module) is not None
    )


def mlp_activation(module: Any) -> str | None:
    """The activation of an MLP; in the copies that `weft.fuse` makes it belongs to the first layer."""
    if type(module.fc1) is PackedLinear and module.fc1.act != "none":
        return module.fc1.act if isinstance(module.act, nn.Identity) else None
    return activation_of(module.act) if type(module.fc1) in (nn.Linear, PackedLinear) else None


def run_mlp(t: Tape, x: Var, module: Any) -> Var:
    """Without the dropouts."""
    act = mlp_activation(module)
    assert act is not None
    return mlp(t, x, module.fc1, act, module.fc2)


def is_layer_norm(*modules: Any) -> bool:
    """Whether all of these are LayerNorms over the channels with weight and bias."""
    return all(type(m) in (nn.LayerNorm, LayerNorm) and m.weight is not None and m.bias is not None for m in modules)


def is_linear(*modules: Any) -> bool:
    """Whether all of these are linear layers with a bias, not of a class derived from them."""
    return all(type(module) in LINEAR_TYPES and module.bias is not None for module in modules)

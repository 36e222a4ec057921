"""What the copies that `weft.fuse` makes do differently on a CPU, where passes over memory cost as much as arithmetic.

A linear layer and its activation are one product by oneDNN, on weights that are stored once as it reads them; the
products that end the branches of CvT's blocks are added to the sums they belong to, in place.
"""

import platform
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.kernels.activation import activation, plain_activation
from weft.models.cvt import Block
from weft.models.layers import join, part

ONEDNN_NAMES = {"gelu": "gelu", "silu": "swish"}
HAS_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()


def takes_packed(x: Tensor) -> bool:
    """Whether this is eager float32 inference on a CPU: packed weights have no gradient and fit into no graph."""
    return (
        HAS_ONEDNN
        and type(x) is Tensor  # no proxy of a tracer
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


class LinearAct(nn.Linear):
    """A linear layer and the activation behind it.

    The packed copy of the weight is made at the first call, and again after weights were loaded or moved; it belongs
    to no state dict and no file.
    """

    __jit_ignored_attributes__ = ("packed",)

    def __init__(self, linear: nn.Linear, act: str):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.act = act
        self.packed: Optional[Tensor] = None
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return plain_activation(F.linear(input, self.weight, self.bias), self.act)
        else:  # not compiled by TorchScript
            if not takes_packed(input):
                return activation(F.linear(input, self.weight, self.bias), self.act)
            if self.packed is None:
                self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous())
            name = ONEDNN_NAMES[self.act]
            return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, name, [], "none")

    def _apply(self, fn: Any, recurse: bool = True) -> "LinearAct":
        self.packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.packed = None
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}


def add_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x + F.linear(y, weight, bias) of (B, N, C) tokens: the product is added where x + bias already lies."""
    total = x + bias
    total.flatten(0, 1).addmm_(y.flatten(0, 1), weight.t())
    return total


class TokenBlock(Block):
    """A block of CvT that on a CPU works on one sequence of tokens, the class token among them."""

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self.forward_tokens(x, cls)
        else:  # not compiled by TorchScript
            if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
                return Block.forward(self, x, cls)
            return self.forward_tokens(x, cls)

    def forward_tokens(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        tokens = join(cls, x)  # (B, [1 +] H*W, C)
        z, z_cls = part(self.norm1(tokens), x, cls)
        q, k, v = self.attn.project(z.contiguous(), z_cls)  # pyright: ignore[reportCallIssue]
        y = self.attn.answer(q, k, v)  # pyright: ignore[reportCallIssue]
        tokens = add_linear(tokens, y, self.attn.proj.weight, self.attn.proj.bias)  # pyright: ignore
        y = self.mlp.act(self.mlp.fc1(self.norm2(tokens)))
        tokens = add_linear(tokens, y, self.mlp.fc2.weight, self.mlp.fc2.bias)  # pyright: ignore[reportArgumentType]
        return part(tokens, x, cls)

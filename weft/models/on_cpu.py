"""What the copies that `weft.fuse` makes do differently on a CPU, where passes over memory cost as much as arithmetic.

A linear layer and its activation are one product by oneDNN, on weights that are stored once as it reads them; the
products that end the branches of CvT's blocks are added to the sums they belong to, in place.
"""

import platform
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.kernels.activation import plain_activation
from weft.kernels.linear import Linear
from weft.kernels.linear_act import linear_act
from weft.kernels.watch import bare
from weft.models.cvt import Attention, Block
from weft.models.layers import Mlp, StochasticDepth, join, part, present

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

    The packed copy of the weight is made at the first call, and again after the weight was replaced, moved, loaded or
    changed in place (but through `.data`, of which torch keeps no account); it belongs to no state dict and no file.
    """

    __jit_ignored_attributes__ = ("packed",)

    def __init__(self, linear: nn.Linear, act: str):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.act = act
        self.packed: Optional[tuple[Tensor, Tensor, int]] = None  # the copy, of which weight, in which version
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return plain_activation(F.linear(input, self.weight, self.bias), self.act)
        else:  # not compiled by TorchScript
            if not takes_packed(input):
                return linear_act(input, self.weight, self.bias, self.act)
            name = ONEDNN_NAMES[self.act]
            return torch.ops.mkldnn._linear_pointwise(input, self.pack(), self.bias, name, [], "none")

    def pack(self) -> Tensor:
        weight, version = self.weight.detach(), 0 if self.weight.is_inference() else self.weight._version
        if self.packed is None or self.packed[1].data_ptr() != weight.data_ptr() or self.packed[2] != version:
            # The weight is kept along: as long as it is, no other one can lie at its address.
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), weight, version
        return self.packed[0]

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
    total = (x + bias).flatten(0, 1)  # a copy where x is no row of tokens in memory
    return total.addmm_(y.flatten(0, 1), weight.t()).view(x.shape)


class TokenBlock(Block):
    """A block of CvT that on a CPU works on one sequence of tokens, the class token among them."""

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self.forward_tokens(x, cls)
        else:  # not compiled by TorchScript
            if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
                return Block.forward(self, x, cls)
            return self.forward_tokens(x, cls) if self.may_be_read() else Block.forward(self, x, cls)

    def forward_class_token(self, x: Tensor, cls: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript compiles both halves of an `and`
            if not self.may_be_read():
                return present(self(x, cls)[1])
        cls = cls + self.attn.answer_class_token(self.norm1(x), self.norm1(cls))  # pyright: ignore[reportCallIssue]
        return cls + self.mlp(self.norm2(cls))

    def may_be_read(self) -> bool:
        """Whether what is not called here, but read, would do no more than is read: drop something, or call hooks."""
        if self.training or torch.compiler.is_compiling():
            return not self.training
        attn, mlp = self.attn, self.mlp
        read = self, attn, attn.proj, attn.proj_drop, mlp, mlp.drop1, mlp.fc2, mlp.drop2, self.drop_path
        return bare(*read, types=(TokenBlock, Attention, Linear, nn.Linear, nn.Dropout, Mlp, StochasticDepth))

    def forward_tokens(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        tokens = join(cls, x)  # (B, [1 +] H*W, C)
        z, z_cls = part(self.norm1(tokens), x, cls)
        q, k, v = self.attn.project(z.contiguous(), z_cls)  # pyright: ignore[reportCallIssue]
        y = self.attn.answer(q, k, v)  # pyright: ignore[reportCallIssue]
        tokens = add_linear(tokens, y, self.attn.proj.weight, self.attn.proj.bias)  # pyright: ignore
        y = self.mlp.act(self.mlp.fc1(self.norm2(tokens)))
        tokens = add_linear(tokens, y, self.mlp.fc2.weight, self.mlp.fc2.bias)  # pyright: ignore[reportArgumentType]
        return part(tokens, x, cls)

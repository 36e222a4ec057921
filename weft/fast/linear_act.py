"""A linear layer and the activation behind it, as one, in the copies that `weft.fuse` makes.

On a GPU fused blocks have a kernel for it. On a CPU it is one product by oneDNN, on weights that are stored once as
it reads them.
"""

import platform
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.layers import activate

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
            return activate(F.linear(input, self.weight, self.bias), self.act)
        else:  # not compiled by TorchScript
            if not takes_packed(input):
                return activate(F.linear(input, self.weight, self.bias), self.act)
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

"""The linear layers of the copies that `weft.fuse` makes, with the activation behind them where there is one.

On a CPU each is one product by oneDNN, on weights that are stored once as it reads them, and activations or sums belong
to it. That product was as fast as MKL's, which torch takes for other linear layers, on an Intel Xeon, and a tenth
faster on an AMD EPYC. On a GPU fused blocks have a kernel for the activation.
"""

import platform
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.fast.swap import is_eager_tensor
from weft.kernels.switch import is_transformed
from weft.models.layers import PointwiseConv, activate

ONEDNN_NAMES = {"none": "none", "gelu": "gelu", "silu": "swish"}
HAS_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()


def can_use_packed(x: Tensor, weight: Tensor) -> bool:
    """Whether this is eager float32 inference on a CPU: packed weights have no gradient and fit into no graph.

    Where `x` does not fit `weight`, torch says why.
    """
    return (
        HAS_ONEDNN
        and not torch.compiler.is_compiling()  # first: compilers cannot follow what is asked behind it
        and is_eager_tensor(x)
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and x.shape[-1] == weight.shape[1]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.jit.is_tracing()
        and not is_transformed()
        and torch._C._get_mkldnn_enabled()
    )


class PackedLinear(nn.Linear):
    """A linear layer and the activation behind it, which may be "none".

    The packed copy of the weight is made at the first call, and again after the weight was replaced, moved, loaded or
    changed in place; it belongs to no state dict and no file. Torch keeps no account of changes through `.data`, nor of
    a weight that was itself made in inference mode: whoever changes one in place sets `packed` to None.
    """

    __jit_ignored_attributes__ = ("packed",)

    act: str
    packed: Optional[tuple[Tensor, Tensor, int]]  # the copy, of which weight, in which version

    @classmethod
    def of(cls, linear: nn.Linear, act: str = "none") -> "PackedLinear":
        """Makes `linear` one of these, in place. Its hooks stay."""
        layer: Any = linear
        layer.__class__ = cls
        layer.act, layer.packed = act, None
        return layer

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return activate(F.linear(input, self.weight, self.bias), self.act)
        else:  # not compiled by TorchScript
            if not can_use_packed(input, self.weight):
                return activate(F.linear(input, self.weight, self.bias), self.act)
            name = ONEDNN_NAMES[self.act]
            return torch.ops.mkldnn._linear_pointwise(input, self.pack(), self.bias, name, [], "none")

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """x + F.linear(y, weight, bias) of (B, N, C) tokens, of which no pass over memory is made for the sum alone."""
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript compiles both halves of an `and`
            if can_use_packed(y, self.weight):
                return torch.ops.mkldnn._linear_pointwise.binary(y, x.contiguous(), self.pack(), self.bias, "add")
        if self.bias is None:
            return torch.addmm(x.flatten(0, 1), y.flatten(0, 1), self.weight.t()).view(x.shape)
        total = (x + self.bias).flatten(0, 1)  # a copy where x is no row of tokens in memory
        return total.addmm_(y.flatten(0, 1), self.weight.t()).view(x.shape)

    def pack(self) -> Tensor:
        """The packed copy of the weight as it is now."""
        weight, version = self.weight.detach(), 0 if self.weight.is_inference() else self.weight._version
        packed = self.packed  # asked once: another thread may be at it, too
        if packed is None or packed[1].data_ptr() != weight.data_ptr() or packed[2] != version:
            # The weight is kept along: as long as it is, no other one can lie at its address.
            packed = self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), weight, version
        return packed[0]

    def _apply(self, fn: Any, recurse: bool = True) -> "PackedLinear":
        self.packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.packed = None
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "packed": None}


# Not classes derived from them, which may compute something else.
LINEAR_TYPES = (nn.Linear, PointwiseConv, PackedLinear)

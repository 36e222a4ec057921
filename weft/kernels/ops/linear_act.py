"""A linear layer and the activation behind it, which is applied as the product is written.

The library writes the product, and the activation reads and writes all of it again, which takes longer than the product
did where channels are few.
"""

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.activation import reference_activation
from weft.kernels.ops.op import define


def reference_linear_act(x: Tensor, weight: Tensor, bias: Tensor, act: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The reference: (..., C) -> act(x weight' + bias), and that without the activation if it is to be kept."""
    y = F.linear(x, weight, bias)
    return reference_activation(y, act), y if keep else None


linear_act_forward = define("linear_act", reference_linear_act, "linear_act.forward")

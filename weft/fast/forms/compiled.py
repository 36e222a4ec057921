"""The fused model that torch.compile sees: plain modules, but for a few operations that our kernels do better.

The compiler fuses norms, activations and sums with what stands around them, which an operator of its own would prevent;
and it calls an operator so slowly that one must save a lot. With depth-wise convolutions and BatchNorm by our kernels a
training step of CeiT-S had 8 ms less work for an H200, and took 22 ms longer. Left to us are windows, which are eight
copies otherwise, the Performer, and convolutions in groups of a few channels, for which libraries change layouts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from weft.fast.swap import Fused, fused
from weft.kernels.ops.grouped import grouped_conv_forward, is_grouped
from weft.kernels.ops.performer import WIDEST, performer_forward
from weft.kernels.ops.window_attention import window_attention
from weft.kernels.switch import amp_dtype, usable
from weft.models import cetnet, performer
from weft.models.layers import to_nchw, to_nhwc


class Compiled(Fused):
    """A form for compilers alone; in eager mode the block around it is fused, or this is plain."""

    def remember_parts(self) -> None:
        """Nothing inside is passed by."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not named and torch.compiler.is_compiling() and usable(inputs[0]):
            return self.compiled(*inputs)
        return super(Fused, self).forward(*inputs, **named)  # pyright: ignore[reportAttributeAccessIssue]


@fused(nn.Conv2d)
class FusedConv2d(Compiled, nn.Conv2d):
    """In groups of a few channels, as ViTAE's PCM has it."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        return is_grouped(module) and module.padding_mode == "zeros"

    def compiled(self, x: Tensor) -> Tensor:
        rows = to_nhwc(x).to(amp_dtype(x))
        return to_nchw(grouped_conv_forward(rows, self.weight, self.bias, self.groups, "none"))


@fused(cetnet.LEWinAttention)
class FusedLEWinAttention(Compiled, cetnet.LEWinAttention):
    @classmethod
    def fits(cls, module: Any) -> bool:
        from weft.fast.forms.cetnet import fits_windows

        return fits_windows(module)

    def compiled(self, x: Tensor) -> Tensor:
        if self.training and self.attn_drop > 0:
            return cetnet.LEWinAttention.forward(self, x)
        q, k, v = self.project(x)
        table = self.rel_pos.relative_position_bias_table
        y = window_attention(q, k, v, table, self.window, self.shifted)
        return self.proj_drop(self.proj(y))


@fused(performer.PerformerAttention)
class FusedPerformerAttention(Compiled, performer.PerformerAttention):
    @classmethod
    def fits(cls, module: Any) -> bool:
        return module.w.shape[1] <= WIDEST

    def mix(self, kqv: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() and usable(kqv):
            y, v, _ = performer_forward(kqv, self.w)
            return y, v
        return performer.PerformerAttention.mix(self, kqv)

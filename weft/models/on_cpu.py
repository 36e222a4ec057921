"""What the copies that `weft.fuse` makes do differently on a CPU, where passes over memory cost as much as arithmetic.

The products that end the branches of CvT's blocks are added to the sums they belong to, in place.
"""

from typing import Optional

import torch
from torch import Tensor, nn

from weft.kernels.linear import Linear
from weft.kernels.watch import bare
from weft.models.cvt import Attention, Block
from weft.models.layers import Mlp, StochasticDepth, join, part, present


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

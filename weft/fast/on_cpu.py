"""What the copies that `weft.fuse` makes do differently on a CPU, where passes over memory cost as much as arithmetic.

The products that end the branches of CvT's blocks are added to the sums they belong to while they are computed.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from weft.fast.cvt import FusedBlock
from weft.fast.packed_linear import PackedLinear
from weft.fast.swap import PLAIN, are_untouched, taken_down
from weft.models.cvt import Block
from weft.models.layers import join, part, present


class FusedTokenBlock(FusedBlock):
    """A block of CvT that on a CPU works on one sequence of tokens, the class token among them."""

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self.forward_tokens(x, cls)
        else:  # not compiled by TorchScript
            if x.device.type == "cpu" and self.may_be_read() and not torch.is_autocast_enabled("cpu"):
                return self.forward_tokens(x, cls)
            return FusedBlock.forward(self, x, cls)

    def remember(self) -> None:
        super().remember()
        self.__dict__["_fits"] = FusedBlock.fits(self)
        attn: Any = self.attn
        inside = attn.proj, attn.proj_drop, self.mlp, self.mlp.drop1, self.mlp.fc2, self.mlp.drop2, self.drop_path
        self.__dict__["_passed_by"] = taken_down([self, attn, *inside])

    def ready(self, *inputs: Any) -> bool:
        return self.__dict__["_fits"] and super().ready(*inputs)

    def __prepare_scriptable__(self) -> "FusedTokenBlock":
        return self

    def forward_class_token(self, x: Tensor, cls: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript compiles both halves of an `and`
            if not self.may_be_read() or self._forward_hooks or self._forward_pre_hooks:
                return present(self(x, cls)[1])
        cls = cls + self.answer_class_token(self.norm1(x), self.norm1(cls))
        return cls + self.mlp(self.norm2(cls))

    def answer_class_token(self, x: Tensor, cls: Tensor) -> Tensor:
        """What the class token alone gets when it asks the map and itself."""
        attn = self.attn
        k, v = join(cls, attn.conv_proj_k(x)), join(cls, attn.conv_proj_v(x))  # pyright: ignore[reportCallIssue]
        return attn.proj_drop(attn.proj(attn.answer(cls, k, v)))  # pyright: ignore[reportCallIssue]

    def may_be_read(self) -> bool:
        """Whether what is not called here, but read, would do no more than is read: drop something, or call hooks."""
        if self.training or not (type(self.attn.proj) is type(self.mlp.fc2) is PackedLinear):
            return False
        return torch.compiler.is_compiling() or are_untouched(self.__dict__["_passed_by"], self)

    def forward_tokens(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        tokens = join(cls, x)  # (B, [1 +] H*W, C)
        z, z_cls = part(self.norm1(tokens), x, cls)
        q, k, v = self.attn.project(z.contiguous(), z_cls)  # pyright: ignore[reportCallIssue]
        y = self.attn.answer(q, k, v)  # pyright: ignore[reportCallIssue]
        tokens = self.attn.proj.add_to(tokens, y)  # pyright: ignore
        y = self.mlp.act(self.mlp.fc1(self.norm2(tokens)))
        tokens = self.mlp.fc2.add_to(tokens, y)  # pyright: ignore[reportCallIssue]
        return part(tokens, x, cls)


PLAIN[FusedTokenBlock] = Block

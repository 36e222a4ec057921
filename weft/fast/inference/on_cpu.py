"""CvT's blocks in the copies that `weft.fuse` makes, on a CPU, where passes over memory cost as much as arithmetic.

The products that end the branches of a block are added to the sums they belong to while they are computed.
"""

from typing import Any, Optional

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from weft.fast.forms.cvt import FusedCvTBlock
from weft.fast.inference.packed_linear import PackedLinear
from weft.fast.swap import PLAIN, are_unmodified, snapshot
from weft.fast.tape.ops import are_idle, is_idle_drop_path
from weft.models.cvt import Attention, Block
from weft.models.layers import join, part, present


class FusedTokenBlock(FusedCvTBlock):
    """A block of CvT that on a CPU works on one sequence of tokens, the class token among them."""

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        if torch.jit.is_scripting():
            return self.forward_tokens(x, cls)
        else:  # not compiled by TorchScript
            if x.device.type == "cpu" and self.can_bypass_modules() and not torch.is_autocast_enabled("cpu"):
                return self.forward_tokens(x, cls)
            return FusedCvTBlock.forward(self, x, cls)

    def remember_parts(self) -> None:
        super().remember_parts()
        self.__dict__["_fits"] = FusedCvTBlock.fits(self)
        attn: Any = self.attn
        inside = attn.proj, attn.proj_drop, self.mlp, self.mlp.drop1, self.mlp.fc2, self.mlp.drop2, self.drop_path
        self.__dict__["_bypassed"] = snapshot([self, attn, *inside])

    def ready(self, *inputs: Any) -> bool:
        return self.__dict__["_fits"] and super().ready(*inputs)

    def __prepare_scriptable__(self) -> "FusedTokenBlock":
        return self

    def forward_class_token(self, x: Tensor, cls: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript compiles both halves of an `and`
            if not self.can_bypass_modules() or self._forward_hooks or self._forward_pre_hooks:
                return present(self(x, cls)[1])
        cls = cls + self.attend_class_token(self.norm1(x), self.norm1(cls))
        return cls + self.mlp(self.norm2(cls))

    def attend_class_token(self, x: Tensor, cls: Tensor) -> Tensor:
        """The attention of the class token alone to the map and itself."""
        attn = self.attn
        k, v = join(cls, attn.conv_proj_k(x)), join(cls, attn.conv_proj_v(x))  # pyright: ignore[reportCallIssue]
        return attn.proj_drop(attn.proj(attn.answer(cls, k, v)))  # pyright: ignore[reportCallIssue]

    def can_bypass_modules(self) -> bool:
        """Whether modules that are not called here, but read, would do no more if they were: drop, or call hooks."""
        attn: Any = self.attn
        if self.training or not (type(attn.proj) is type(self.mlp.fc2) is PackedLinear):
            return False
        if not (type(attn) is Attention and type(self.mlp) is Mlp and type(self.mlp.norm) is nn.Identity):
            return False
        if not are_idle(attn.proj_drop, self.mlp.drop1, self.mlp.drop2) or not is_idle_drop_path(self.drop_path):
            return False
        return torch.compiler.is_compiling() or are_unmodified(self.__dict__["_bypassed"], self)

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

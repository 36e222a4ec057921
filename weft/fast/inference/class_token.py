"""CvT for logits alone: where only the class token is read, the last block computes nothing else."""

from torch import Tensor

from weft.fast.precompile import PrecompiledModel
from weft.fast.swap import PLAIN
from weft.models.cvt import CvT, Stage
from weft.models.layers import present


class FusedClassTokenStage(Stage):
    """The last stage of CvT, as far as the class token needs it. Its blocks are `on_cpu.FusedTokenBlock`s."""

    def forward_class_token(self, x: Tensor) -> Tensor:
        x, cls = self.forward_embed(x)
        for i, block in enumerate(self.blocks):
            if i < len(self.blocks) - 1:
                x, cls = block(x, cls)
        return self.blocks[-1].forward_class_token(x, present(cls))  # pyright: ignore[reportCallIssue]


class FusedClassTokenCvT(PrecompiledModel, CvT):
    def forward(self, x: Tensor) -> Tensor:
        self.precompile(self.forward_logits, x)
        return self.forward_logits(x)

    def forward_logits(self, x: Tensor) -> Tensor:
        if self.global_pool == "token":
            return self.forward_head(self.forward_class_token(x))
        return self.forward_head(self.forward_features(x))

    def forward_class_token(self, x: Tensor) -> Tensor:
        """`forward_features` without the map, (B, 1, C): a fifteenth of CvT-13's work is not needed for the logits."""
        x, _, _ = self.forward_trunk(x, last=len(self.stages) - 2)
        return self.norm(self.stages[-1].forward_class_token(x))  # pyright: ignore[reportCallIssue]


PLAIN[FusedClassTokenStage], PLAIN[FusedClassTokenCvT] = Stage, CvT

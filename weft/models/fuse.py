"""A copy of a model for inference, with everything folded away that training needed and inference does not."""

import copy
from typing import Any, TypeVar

import torch
from timm.layers import Mlp, QuickGELU
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval

from weft.models.base import HybridModel
from weft.models.layers import ConvNorm, LinearNorm
from weft.models.vt_resnet import ResNetTrunk

ModelT = TypeVar("ModelT", bound=nn.Module)


def fuse(model: ModelT) -> ModelT:
    """Returns a copy of a Weft model in eval mode with every BatchNorm folded into the layer before it.

    QuickGELU, which torch computes in three passes over memory, becomes one: x sigmoid(a x) = SiLU(a x) / a, and both
    factors go into the linear layers beside it. Where only the class token is read, the last block of CvT computes
    nothing else. Weights are laid out in memory as the kernels read them, which saves
    a copy per call. The outputs are those of `model.eval()` up to rounding. The copy is for inference: its parameters
    no longer match checkpoints of the model.
    """
    fused = copy.deepcopy(model).eval()
    for module in list(fused.modules()):
        if isinstance(module, ConvNorm | LinearNorm):
            module.fuse()
        elif isinstance(module, BasicBlock | Bottleneck | ResNetTrunk):
            _fold_resnet(module)
        elif isinstance(module, Mlp) and isinstance(module.act, QuickGELU):
            _fold_quick_gelu(module)
        elif isinstance(module, HybridModel):
            module.fused = True
    for module in fused.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        elif isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()  # (out, in), stored by columns
    return fused


def _fold_resnet(module: BasicBlock | Bottleneck | ResNetTrunk) -> None:
    """bn1 follows conv1, bn2 follows conv2, and so on; in a shortcut BatchNorm follows in the Sequential."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            conv = name.replace("bn", "conv")
            setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), child))
            setattr(module, name, nn.Identity())
        elif name == "downsample" and isinstance(child, nn.Sequential):
            shortcut: Any = child  # convolution and BatchNorm
            setattr(module, name, fuse_conv_bn_eval(*shortcut))


@torch.no_grad()
def _fold_quick_gelu(mlp: Mlp, slope: float = 1.702) -> None:
    for parameter in mlp.fc1.parameters():
        parameter.mul_(slope)
    mlp.fc2.weight.div_(slope)
    mlp.act = nn.SiLU(inplace=True)

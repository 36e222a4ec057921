"""A copy of a model for inference, with everything folded away that training needed and inference does not."""

import copy
from itertools import pairwise
from typing import Any, TypeVar

import torch
from timm.layers import BatchNormAct2d, Mlp, QuickGELU
from timm.models.densenet import DenseLayer
from timm.models.ghostnet import GhostBottleneck
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval, fuse_linear_bn_eval

from weft.errors import WeftError
from weft.fast.inference.class_token import FusedClassTokenCvT, FusedClassTokenStage
from weft.fast.inference.on_cpu import FusedTokenBlock
from weft.fast.inference.packed_linear import LINEAR_TYPES, PackedLinear
from weft.fast.replay import Replayed
from weft.fast.swap import fast, plain
from weft.models._timm import ConvBnAct, DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from weft.models.base import HybridModel
from weft.models.cvt import Attention, Block, CvT, Stage
from weft.models.layers import ConvNorm, LinearNorm
from weft.models.vt_resnet import ResNetTrunk

ModelT = TypeVar("ModelT", bound=nn.Module)

IN_ORDER = (  # their children run in the order in which they are stored, so that a BatchNorm follows its convolution
    nn.Sequential,
    ConvNorm,
    ResNet,
    ResNetTrunk,
    BasicBlock,
    Bottleneck,
    ConvBnAct,
    DepthwiseSeparableConv,
    InvertedResidual,
    EdgeResidual,
    GhostBottleneck,
    DenseLayer,
)

FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Block: FusedTokenBlock,
    Stage: FusedClassTokenStage,
    CvT: FusedClassTokenCvT,
}


def fuse(model: ModelT) -> ModelT:
    """Returns a copy of a Weft model in eval mode with every BatchNorm folded into the layer before it.

    Only a DenseNet layer (CETNet with ce_unit="dense") starts with a BatchNorm, and keeps it. QuickGELU, which torch
    computes in three passes over memory, becomes one: x sigmoid(a x) = SiLU(a x) / a, and both factors go into the
    linear layers beside it. Where only the class token is read, the last block of CvT computes nothing else; keys and
    values of CvT need no bias. Weights are laid out in memory as the kernels read them, which saves a copy per call;
    on a CPU linear layers keep a second, packed copy for that. `packed_linear` and `on_cpu` say what else is done. The
    outputs are those of `model.eval()` up to rounding. The copy is for inference: its parameters no longer match
    checkpoints of the model.
    """
    if not isinstance(model, nn.Module):
        raise WeftError(f"weft.fuse takes a model, not {type(model).__name__}; make one with weft.create_model.")
    if isinstance(model, Replayed):
        raise WeftError("A model is fused before it is replayed: weft.replay(weft.fuse(model)).")
    fused = plain(copy.deepcopy(model)).eval()
    for module in list(fused.modules()):
        if isinstance(module, LinearNorm):
            _fold_linear_norm(module)
        elif isinstance(module, IN_ORDER):
            _fold_batch_norms(module)
        elif isinstance(module, Mlp):
            _fold_activation(module)
        elif isinstance(module, Attention) and module.proj_v.bias is not None:
            _fold_biases(module)
        elif type(module) in FUSED:
            module.__class__ = FUSED[type(module)]  # pyright: ignore[reportAttributeAccessIssue]
    for module in fused.modules():
        if isinstance(module, HybridModel):
            module.fused = True  # pyright: ignore[reportArgumentType]  and so it cannot be saved
        elif isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        elif isinstance(module, nn.Linear) and type(module) in LINEAR_TYPES:
            if not isinstance(module, PackedLinear):
                PackedLinear.of(module)
            module.weight.data = module.weight.data.t().contiguous().t()  # (out, in), stored by columns
    return fast(fused.eval())


def _fold_batch_norms(module: nn.Module) -> None:
    for (conv_name, conv), (norm_name, norm) in pairwise(list(module.named_children())):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            rest: Any = norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity()
            setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
            setattr(module, norm_name, rest)


def _fold_linear_norm(module: LinearNorm) -> None:
    if isinstance(module.bn, nn.BatchNorm2d):
        module.linear, module.bn = fuse_linear_bn_eval(module.linear, module.bn), nn.Identity()


def _fold_activation(mlp: Mlp, slope: float = 1.702) -> None:
    if isinstance(mlp.act, QuickGELU):
        with torch.no_grad():
            for parameter in mlp.fc1.parameters():
                parameter.mul_(slope)
            mlp.fc2.weight.div_(slope)
        mlp.act = nn.SiLU()
    name = "silu" if isinstance(mlp.act, nn.SiLU) else "gelu" if isinstance(mlp.act, nn.GELU) else None
    if name is not None and type(mlp.fc1) is nn.Linear and getattr(mlp.act, "approximate", "none") == "none":
        mlp.fc1, mlp.act = PackedLinear.of(mlp.fc1, name), nn.Identity()


@torch.no_grad()
def _fold_biases(attn: Attention) -> None:
    """The bias of the keys adds one number to all logits of a query; that of the values is a part of every answer."""
    attn.proj.bias.add_(attn.proj.weight @ attn.proj_v.bias)
    for linear in (attn.proj_k, attn.proj_v):
        linear.register_parameter("bias", None)

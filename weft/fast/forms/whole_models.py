"""The fused forms of whole models: their blocks have forms of their own, and all their kernels are compiled at once."""

from weft.fast.precompile import PrecompiledModel
from weft.fast.swap import fused
from weft.models.ce_hosts import CESwin
from weft.models.ceit import CeiT
from weft.models.cetnet import CETNet
from weft.models.cvt import CvT
from weft.models.vitae import ViTAE
from weft.models.vt_resnet import VTResNet


@fused(CeiT)
class FusedCeiT(PrecompiledModel, CeiT):
    pass


@fused(CESwin)
class FusedCESwin(PrecompiledModel, CESwin):
    pass


@fused(CETNet)
class FusedCETNet(PrecompiledModel, CETNet):
    pass


@fused(CvT)
class FusedCvT(PrecompiledModel, CvT):
    pass


@fused(ViTAE)
class FusedViTAE(PrecompiledModel, ViTAE):
    pass


@fused(VTResNet)
class FusedVTResNet(PrecompiledModel, VTResNet):
    pass

"""The families. Importing this package registers them with timm."""

from weft.models import ce_hosts, ceit, cetnet, cvt, vitae, vt, vt_resnet
from weft.models.baselines import cswin, pvt, resnet_v1, t2t_vit

__all__ = ["ce_hosts", "ceit", "cetnet", "cswin", "cvt", "pvt", "resnet_v1", "t2t_vit", "vitae", "vt", "vt_resnet"]

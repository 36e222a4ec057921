"""The families. Importing this package registers them with timm."""

from weft.models import ce_hosts, ceit, cetnet, cswin, cvt, pvt, resnet_v1, t2t_vit, vitae, vt, vt_resnet

__all__ = ["ce_hosts", "ceit", "cetnet", "cswin", "cvt", "pvt", "resnet_v1", "t2t_vit", "vitae", "vt", "vt_resnet"]

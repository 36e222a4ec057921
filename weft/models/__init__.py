"""The families. Importing this package registers them with timm."""

from weft.models import ceit, cetnet, cvt, t2t_vit, vitae, vt, vt_resnet

__all__ = ["ceit", "cetnet", "cvt", "t2t_vit", "vitae", "vt", "vt_resnet"]

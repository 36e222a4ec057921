"""The families. Importing this package registers them with timm."""

from weft.models import ceit, cetnet, cvt, vt, vt_resnet

__all__ = ["ceit", "cetnet", "cvt", "vt", "vt_resnet"]

"""The families. Importing this package registers them with timm."""

from weft.models import ceit, cetnet, cswin, cvt, pvt

__all__ = ["ceit", "cetnet", "cswin", "cvt", "pvt"]

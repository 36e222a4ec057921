"""The families. Importing this package registers them with timm."""

from weft.models import ceit, cetnet, cvt

__all__ = ["ceit", "cetnet", "cvt"]

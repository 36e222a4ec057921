"""The families. Importing this package registers them with timm."""

from weft.models import ceit, cvt

__all__ = ["ceit", "cvt"]

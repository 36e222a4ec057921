"""The families. Importing this package registers them with timm; `registry.FAMILIES` lists them."""

from weft.models import registry

__all__ = ["registry"]

"""The families. Importing this package registers them with timm; `registry.FAMILIES` lists them."""

import importlib

importlib.import_module("weft.models.registry")  # which imports every family, from this package

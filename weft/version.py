"""The version of the package; `weft.__version__` and the build take it from here."""

__version__ = "0.1.0"

"""Weft: convolutions woven into vision transformers."""
import timm
from weft import models
def list_models(filter=""):
    return sorted({n for m in ("ceit","cvt") for n in timm.list_models(filter, module=m)})

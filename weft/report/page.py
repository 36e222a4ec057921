"""Pages that stand alone: templates beside this file, everything escaped, pictures inside the file."""

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.version import __version__
from weft.words import clean

if TYPE_CHECKING:
    from PIL import Image


def render(template: str, **values: Any) -> str:
    """The page of `template` (such as "check.html.j2", which extends "base.html.j2"); values are escaped."""
    import jinja2

    loader = jinja2.PackageLoader("weft.report", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["clean"] = clean
    return environment.get_template(template).render(version=__version__, **values)


def data_uri(picture: "np.ndarray | Image.Image", side: int = 160) -> str:
    """A picture, shrunk to `side` where it is larger, as text for `<img src>`. Arrays: (H, W) or (H, W, C) uint8."""
    from PIL import Image

    if isinstance(picture, np.ndarray):
        picture = Image.fromarray(picture[..., 0] if picture.ndim == 3 and picture.shape[2] != 3 else picture)
    picture = picture.copy()
    picture.thumbnail((side, side))
    file = io.BytesIO()
    if max(picture.size) <= 64:
        picture.save(file, "PNG", optimize=True)  # small pictures are looked at pixel by pixel
    else:
        picture.convert("RGB").save(file, "WEBP", quality=80)
    kind = "png" if max(picture.size) <= 64 else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"

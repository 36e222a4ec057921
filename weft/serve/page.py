"""The pages for people, each one file with its style and its script inside."""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from weft.version import __version__


def _text(name: str) -> str:
    return (files("weft.serve") / "templates" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    names = ("draw.js", "save.js", "pictures.js", "stage.js", "why.js", "page.js")  # the last one begins
    return "\n".join(_text(name) for name in names)


@cache
def style() -> str:
    return _text("page.css")


def front_page() -> str:
    """The page at /."""
    return _render("page.html", script=script(), style=style())


def docs_page(schema: dict[str, Any]) -> str:
    """The page at /docs, from the OpenAPI description."""
    return _render("docs.html", schema=schema, style=style())


def policy() -> str:
    """The content security policy of both: nothing from elsewhere, and no script but ours."""
    allowed = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src 'self' blob: data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _render(name: str, **values: Any) -> str:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=_TemplateLoader())
    return environment.get_template(name).render(version=__version__, **values)


class _TemplateLoader(jinja2.BaseLoader):
    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, None, None]:
        return _text(template), None, None

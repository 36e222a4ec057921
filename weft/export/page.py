"""An agreement to look at: a page that stands alone."""

from pathlib import Path
from typing import Any

from weft.export.agreement import Agreement
from weft.files import write_text
from weft.report.page import render


def write_page(path: Path, found: Agreement, facts: dict[str, Any]) -> None:
    write_text(path, render("export.html.j2", found=found, facts=facts, rows=found.table(), sides=found.facts()))

"""Photographs the page of a running `weft serve` for docs/serving.md, in Chromium.

weft serve demo runs/outlines runs/masks      # as `weft demo detect` and `weft demo segment` train them
python -m tools.page_pictures http://127.0.0.1:8000 NUCLEI.png...
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parents[1] / "docs" / "pictures"


def main(url: str, files: list[str]) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.goto(url)
        page.wait_for_selector("#samples:not([hidden])")
        for number in (1, 5, 7, 2, 8):
            page.locator("#samples button").nth(number).dispatch_event("click")
        page.click("text=Why?")
        page.wait_for_selector("[role=tab]")
        photograph(page, "serve-why", 900)
        two = browser.new_page(viewport={"width": 1100, "height": 900})
        two.goto(url)
        two.wait_for_selector("#models:not([hidden])")
        two.select_option("#model", index=1)
        two.select_option("#beside", index=3)
        two.set_input_files("#files", files)
        photograph(two, "serve-two", 760)
        phone = {**playwright.devices["Pixel 5"], "color_scheme": "dark"}
        small = browser.new_context(**phone).new_page()
        small.goto(url)
        small.wait_for_selector("#models:not([hidden])")
        small.select_option("#model", index=2)
        small.set_input_files("#files", files[:3])
        photograph(small, "serve-phone", 330)
        browser.close()


def photograph(page: Page, name: str, width: int) -> None:
    """The whole page as a small WebP."""
    page.wait_for_timeout(4000)  # answers, and transitions
    image = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    height = round(image.height * width / image.width)
    small = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    small.save(OUT / f"{name}.webp", quality=82, method=6)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

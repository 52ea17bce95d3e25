"""Draw the picture of the web page in the README: `vitral serve` in a browser.

    vitral serve flowers-run
    python docs/pictures/serving.py http://127.0.0.1:8000 IMAGES...

The picture in the repository shows the flowers run of docs/pictures/inspection.py. Playwright drives Chromium.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from inspection import CHROMIUM, FLAGS, HERE, shrink
from playwright.sync_api import sync_playwright


def photograph(url: str, images: list[str], target: Path) -> None:
    """Save the page after it has classified the images, with the relevance for the label of the first one."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 940}, color_scheme="light")
        page.goto(url)
        page.locator("#facts dd").first.wait_for(state="attached")
        page.set_input_files("#files", images)
        page.locator("#rows td", has_text="waiting").first.wait_for(state="detached")
        page.check("#show-map")
        page.select_option("#method", "relevance")
        page.locator("#overlay:not([hidden])").wait_for()
        page.wait_for_timeout(500)  # the bars grow
        page.screenshot(path=target)
        browser.close()


def main() -> None:
    url, *images = sys.argv[1:]
    with TemporaryDirectory() as folder:
        photograph(url, images, Path(folder) / "page.png")
        shrink(Path(folder) / "page.png", HERE / "serve-page.png")


if __name__ == "__main__":
    main()

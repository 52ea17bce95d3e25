"""The page of an inspection in Chromium: sliders, hovering, tapping; no console error and no outgoing request."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.conftest import small_model
from tests.data.images import photo

AXE = Path(__file__).parents[2] / "build" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--disable-default-apps", "--no-first-run", "--disable-dev-shm-usage"]
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
SCREENS = [("light", 1280, 900, False), ("dark", 390, 844, True)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium. Skip where it is not installed, except in continuous integration."""
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("Chromium is missing. Run: make browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inspect images of two shapes with a small network whose labels are hostile."""
    folder = tmp_path_factory.mktemp("inspected")
    torch.manual_seed(0)
    model = small_model(depth=3, registers=1, num_classes=4, image_size=32)
    labels = ("a", "b", "c", HOSTILE)  # the model predicts the last one
    preprocess = vitral.Preprocess(size=(32, 32), resize="native")
    checkpoint = vitral.Checkpoint(model=model, preprocess=preprocess, labels=labels)
    images = [np.asarray(photo(120, 120)), *[np.asarray(photo(100, 150, seed=seed)) for seed in range(1, 10)]]
    vitral.inspect(checkpoint, images, out=folder, faithfulness=True)
    return folder / "inspect.html"


@pytest.fixture(params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def page(request: pytest.FixtureRequest, browser: Any, page_file: Path) -> Iterator[Any]:
    """Open the page, and check at the end that nothing was logged or requested."""
    scheme, width, height, has_touch = request.param
    viewport = {"width": width, "height": height}
    context = browser.new_context(color_scheme=scheme, viewport=viewport, has_touch=has_touch, offline=True)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda sent: sent.url.startswith(("file:", "data:")) or problems.append(sent.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    yield page
    assert not problems
    context.close()


def pixels(page: Any, canvas: str) -> str:
    """Return what a canvas shows."""
    return page.evaluate(f"document.querySelector('{canvas}').toDataURL()")


def test_it_can_be_explored(page: Any) -> None:
    has_touch = page.viewport_size["width"] < 500
    # ---- the first view: the class token, in the last layer ----
    assert page.text_content("#layer-value") == "3 of 3"
    assert page.text_content("#head-value") == "mean of all"
    assert page.text_content("#readout").startswith("The class token looks most at row")
    assert page.locator("#heads button").count() == 3
    assert page.locator("#queries button").all_text_contents() == ["class token", "register 1", "a patch"]
    # ---- sliders ----
    before = pixels(page, "#stage")
    page.locator("#layer").fill("0")
    assert page.text_content("#layer-value") == "1 of 3"
    first = pixels(page, "#stage")
    assert first != before
    page.locator("#head").fill("1")
    assert page.text_content("#head-value") == "2 of 3"
    assert page.get_attribute("#heads button:nth-child(2)", "aria-pressed") == "true"
    assert pixels(page, "#stage") != first
    # ---- hover or tap ----
    stage = page.locator("#stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    point = {"x": box["width"] * 0.56, "y": box["height"] * 0.31}  # of 8 x 8 patches: row 3, column 5
    stage.tap(position=point) if has_touch else stage.hover(position=point)
    assert page.text_content("#readout").startswith("The patch in row 3, column 5 looks most at row")
    assert "pixels far on average" in page.text_content("#readout")
    if not has_touch:
        stage.click(position=point)  # pins it
        page.mouse.move(box["x"] + 5, box["y"] + 5)
        assert "row 3, column 5" in page.text_content("#readout")
    stage.press("ArrowRight")
    assert "row 3, column 6" in page.text_content("#readout")
    # ---- other images, heads, maps and classes ----
    page.locator("#heads button").nth(2).click()
    assert page.text_content("#head-value") == "3 of 3"
    page.get_by_role("button", name="spotlight").click()
    page.locator("#thumbnails button").nth(1).click()
    assert page.get_attribute("#thumbnails button:nth-child(2)", "aria-pressed") == "true"
    relevance = "#gallery .row:nth-child(1) figure:nth-child(3) canvas"
    shown = pixels(page, relevance)
    page.locator("#gallery .row").nth(0).locator(".chips button").nth(1).click()
    assert pixels(page, relevance) != shown
    page.locator("#distance .dot").first.click()
    assert page.text_content("#distance-note").startswith("Layer 1, head 1: ")
    assert page.text_content("#layer-value") == "1 of 3"


def test_everything_is_shown_and_nothing_overflows(page: Any) -> None:
    assert page.text_content("h1") == "Inside model"
    assert page.locator("#gallery .row").count() == 8
    assert page.locator("#gallery figure").count() == 32
    assert page.locator("#distance .dot").count() == 9
    assert page.locator("#filters img").count() == 28
    assert page.locator("#norms canvas").count() == 3
    assert page.locator("#faithfulness path").count() == 3
    assert "95% interval" in page.text_content("#faithfulness-note")
    assert HOSTILE in page.locator("#gallery .chips button").all_text_contents()  # as text
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    blank = "[...document.querySelectorAll('canvas')].filter((canvas) => new Set(canvas.getContext('2d')"
    blank += ".getImageData(0, 0, canvas.width, canvas.height).data).size < 3).length"
    assert page.evaluate(blank) == 0
    if AXE.exists() or os.environ.get("CI"):
        result = page.evaluate(AXE.read_text(encoding="utf-8") + "; axe.run()")
        assert not [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in result["violations"]]


def test_cells_that_a_stem_rounds_up_are_cut_off(browser: Any, tmp_path: Path) -> None:
    """33 pixels make 5 columns of 8: nine tenths of the width lie in the fourth, and the fifth has one pixel."""
    stem = vitral.ConvStem(widths=(16, 16, 16))
    model = small_model(stem=stem, patch_size=1, image_size=33, num_classes=3)
    checkpoint = vitral.Checkpoint(model=model, preprocess=vitral.Preprocess(size=(33, 33)))
    vitral.inspect(checkpoint, [photo(66, 66)], out=tmp_path)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "inspect.html").as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    stage = page.locator("#stage")
    box = stage.bounding_box()
    for share, column in ((0.1, 1), (0.9, 4), (0.99, 5)):
        stage.hover(position={"x": box["width"] * share, "y": box["height"] * 0.5})
        assert f"row 3, column {column} looks" in page.text_content("#readout")
    page.close()

"""The page in a real browser: upload, result, sliders, bad and many files, phone, keyboard, accessibility, offline.

Without Chromium or axe-core these tests are skipped, except in CI, where they fail. `make browser` fetches both.
"""

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route

from tests.data.images import photo
from tests.serving.pages import AXE, Visit, pixels, require
from tests.serving.servers import RunningServer, running

FIRST = re.compile(r"/api/predict\?model=first$")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"image {number} <b>&.png" for number in range(3)]
    for number, path in enumerate(paths):
        photo(90, 120, seed=number).save(path)
    (folder / "bad.jpg").write_bytes(b"not an image")
    return [*paths, folder / "bad.jpg"]


def test_result_and_sliders(browser: Browser, server: RunningServer, images: list[Path]) -> None:
    visit = Visit(browser, server)
    page = visit.page
    visit.upload(images[0])
    expected = server.post(images[0].read_bytes()).json()["predictions"][0]
    assert page.locator("#result-title").inner_text() == expected["label"]
    assert page.locator("#bars .label").all_inner_texts() == [row["label"] for row in expected["top"]]
    assert (
        page.locator("#caption").inner_text() == "image 0 <b>&.png, 120 \N{MULTIPLICATION SIGN} 90 pixels"
    )  # a name is text
    assert page.locator("#caption b").count() == 0
    assert page.locator("#many").is_hidden()
    page.check("#show-map")
    page.locator("#overlay:not([hidden])").wait_for()
    drawn = [pixels(page)]
    for slider, key in (("#layer", "Home"), ("#head", "ArrowRight"), ("#strength", "Home")):
        page.focus(slider)
        page.keyboard.press(key)
        drawn.append(pixels(page))
    assert len(set(drawn)) == 4  # every slider changes the picture
    assert page.locator("#layer-value").inner_text() == "1 of 6"
    assert "layer 1, head 1" in str(page.locator("#overlay").get_attribute("aria-label"))
    page.uncheck("#show-map")
    assert page.locator("#overlay").is_hidden()
    visit.check()


def test_many_images_and_csv(browser: Browser, server: RunningServer, images: list[Path]) -> None:
    visit = Visit(browser, server)
    page = visit.page
    visit.upload(*images)
    assert page.locator("#rows tr").count() == 4
    assert page.locator("#status").inner_text() == "4 images, 1 failed"
    assert page.locator("#rows tr").nth(3).inner_text().strip().endswith("The file is not a JPEG, PNG or WebP image.")
    page.click("#rows tr:nth-child(4) button")
    assert page.locator("#result-title").inner_text() == "This image cannot be used"
    page.click("#rows tr:nth-child(2) button")
    assert page.locator("#caption").inner_text().startswith("image 1")
    with page.expect_download() as download:
        page.click("#download")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert [row["file"] for row in rows] == [path.name for path in images]
    assert rows[3]["error"]
    expected = server.post(images[2].read_bytes()).json()["predictions"][0]
    assert (rows[2]["label"], rows[2]["label_5"]) == (expected["label"], expected["top"][4]["label"])
    assert float(rows[2]["probability"]) == pytest.approx(expected["probability"], abs=1e-5)
    page.click("#clear")
    assert page.locator("#result").is_hidden()
    visit.check(allowed="status of 415")


def test_drop_paste_and_camera(browser: Browser, server: RunningServer, images: list[Path]) -> None:
    visit = Visit(browser, server, permissions=["camera"])
    page = visit.page
    data = list(images[0].read_bytes())
    for number, event in enumerate(("drop", "paste"), 1):
        page.evaluate(
            """([event, data]) => {
                const transfer = new DataTransfer();
                transfer.items.add(new File([new Uint8Array(data)], `${event}.png`, {type: "image/png"}));
                const options = {bubbles: true, cancelable: true, dataTransfer: transfer, clipboardData: transfer};
                document.dispatchEvent(new (event === "drop" ? DragEvent : ClipboardEvent)(event, options));
            }""",
            [event, data],
        )
        page.locator(f"#rows tr:nth-child({number})").wait_for(state="attached")
    page.click("#camera")
    page.locator("#shoot").wait_for()
    page.wait_for_timeout(500)  # the fake camera starts
    page.click("#shoot")
    page.locator("#rows tr:nth-child(3)").wait_for()
    assert page.locator("#camera-panel").is_hidden()
    visit.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Browser, server: RunningServer, images: list[Path], scheme: str) -> None:
    """axe-core finds nothing, on a phone and a desktop, before and after results; nothing exceeds the screen."""
    for width in (390, 1200):
        visit = Visit(browser, server, color_scheme=scheme, viewport={"width": width, "height": 844})
        assert visit.violations() == []
        visit.upload(*images)
        visit.page.check("#show-map")
        visit.page.click("#about summary")
        visit.page.locator("#overlay:not([hidden])").wait_for()
        assert visit.violations() == []
        assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= width
        table = "() => { const box = document.querySelector('.scroll'); return box.scrollWidth - box.clientWidth; }"
        assert visit.page.evaluate(table) <= 0, "a column of the table is cut off"
        if folder := os.environ.get("SCREENSHOTS"):
            visit.page.screenshot(path=f"{folder}/{scheme}-{width}.png", full_page=True)
        visit.check(allowed="status of 415")


def test_keyboard(browser: Browser, server: RunningServer) -> None:
    """The tab key reaches every control, in the order of the page."""
    visit = Visit(browser, server)
    reached = []
    for _ in range(5):
        visit.page.keyboard.press("Tab")
        reached.append(
            visit.page.evaluate("() => document.activeElement.id || document.activeElement.textContent.trim()")
        )
    assert reached == ["Skip to the images", "choose", "camera", "About this model", "API documentation"]
    visit.check()


def test_documentation(browser: Browser, server: RunningServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(f"{server.url}/docs")
    page.locator("section.card").first.wait_for()
    assert "POST\n/api/predict" in page.locator("#routes").inner_text().replace("POST/", "POST\n/")
    require(AXE.exists(), "axe-core")
    result = page.evaluate(AXE.read_text(encoding="utf-8") + "; axe.run()")
    assert json.dumps(result["violations"]) == "[]"
    assert errors == []
    context.close()


def test_token_and_models(browser: Browser, images: list[Path]) -> None:
    models = {"first": "vit-cifar10", "second": "vit-cifar10"}
    with running(models, token="a-long-secret") as guarded:
        context = browser.new_context()
        page = context.new_page()
        page.goto(guarded.url)
        page.locator("#token").wait_for()
        for token in ("wrong-token", "a-long-secret"):
            page.fill("#token", token)
            page.keyboard.press("Enter")
            page.locator("#token-error", has_text="wrong").wait_for(state="visible" if token[0] == "w" else "hidden")
        page.locator("#model option").nth(1).wait_for(state="attached")
        page.set_input_files("#files", str(images[0]))
        page.locator("#bars li").first.wait_for()
        page.select_option("#model", "second")
        page.wait_for_function("() => document.title.includes('second')")
        page.locator("#bars li").first.wait_for()
        context.close()


def test_late_response_of_another_model_is_not_shown(browser: Browser, images: list[Path]) -> None:
    with running({"first": "vit-cifar10", "second": "vit-cifar10"}) as server:
        visit = Visit(browser, server)
        page, held = visit.page, list[Route]()
        page.route(FIRST, lambda route: held.append(route))
        page.set_input_files("#files", str(images[0]))
        page.locator("#result-title", has_text="Looking").wait_for()
        page.select_option("#model", "second")
        page.locator("#bars li").first.wait_for()
        label = page.locator("#result-title").inner_text()
        row = {"label": "late", "probability": 1.0, "top": [{"label": "late", "probability": 1.0}]}
        with page.expect_response(FIRST):
            held[0].fulfill(json={"predictions": [row]})
        page.wait_for_function("() => document.getElementById('status').textContent === ''")
        assert page.locator("#result-title").inner_text() == label
        visit.check()

"""Models that can do less or more than a classifier: exported files, models without a head, and runs that detect
unusual images. Each over the API, and in the page, which hides what a model cannot do."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser

import vitral
from tests.conftest import small_model
from tests.data.images import class_folders, encoded, photo
from tests.serving.pages import Visit, pixels
from tests.serving.servers import RunningServer, started

LABELS = tuple("abcdefg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a classifier and a model without a head, and train a run, which has statistics of its images."""
    folder = tmp_path_factory.mktemp("models")
    preprocess = vitral.Preprocess(size=(16, 16))
    for name, classes in {"exported": 7, "headless": 0}.items():
        model = small_model(num_classes=classes)
        checkpoint = vitral.Checkpoint(model=model, preprocess=preprocess, labels=LABELS if classes else None)
        vitral.export(checkpoint, folder / f"{name}.onnx", to="onnx")
        vitral.save(checkpoint, folder / f"{name}.safetensors")
    data = class_folders(folder / "data", {"red": 24, "green": 24, "blue": 24})
    options = dict(steps=4, batch_size=8, image_size=32, workers=0, progress=False, device="cpu")
    vitral.train(data, model="vit-ti16", out=folder / "colors", **options)
    photo(90, 120).save(folder / "photo.png")
    return folder


@pytest.fixture(scope="module")
def variety(folder: Path) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "vitral", "serve", str(folder / "exported.onnx"), "--port", "0"]
    others = {"headless": "headless.onnx", "features": "headless.safetensors", "colors": "colors"}
    for name, file in others.items():
        command += ["--model", f"{name}={folder / file}"]
    with started(command) as server:
        yield server


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_exported_file_predicts_like_the_command(variety: RunningServer, folder: Path) -> None:
    image = folder / "photo.png"
    command = [sys.executable, "-m", "vitral", "predict", str(folder / "exported.onnx"), str(image), "--format", "json"]
    expected = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["top"]
    content = variety.post(image.read_bytes()).json()
    assert content["model"] == "exported"
    for got, want in zip(content["predictions"][0]["top"], expected, strict=True):
        assert got["label"] == want["label"]
        assert got["probability"] == pytest.approx(want["probability"], abs=1e-5)


@pytest.mark.parametrize("name", ["exported", "headless"])
def test_exported_file_has_no_maps(variety: RunningServer, name: str) -> None:
    info = httpx.get(f"{variety.url}/api/model", params={"model": name}).json()
    assert (info["methods"], info["layers"], info["can_detect_unusual"]) == ([], 0, False)
    assert info["labels"] == (list(LABELS) if name == "exported" else [])
    for method in ("attention", "rollout", "relevance"):
        options = {"model": name, "method": method}
        assert refusal(variety.post(encoded(photo(), "PNG"), "/api/attention", params=options)) == (
            501,
            "not_available",
        )


def test_exported_classifier_has_no_features(variety: RunningServer) -> None:
    assert not httpx.get(f"{variety.url}/api/model").json()["can_embed"]
    assert refusal(variety.post(encoded(photo(), "PNG"), "/api/features")) == (501, "no_features")
    assert 'status="500"' not in httpx.get(f"{variety.url}/metrics").text


@pytest.mark.parametrize("file", ["headless.onnx", "headless.safetensors"])
def test_models_without_a_head_have_features(variety: RunningServer, folder: Path, file: str) -> None:
    content, options = encoded(photo(), "PNG"), {"model": "headless" if file.endswith("onnx") else "features"}
    ((_, expected),) = vitral.Predictor(folder / file, device="cpu").features([content])
    assert isinstance(expected, np.ndarray)
    (row,) = variety.post(content, "/api/features", params=options).json()["embeddings"]
    np.testing.assert_allclose(row["features"], expected, atol=1e-5)
    assert refusal(variety.post(content, params=options)) == (501, "no_head")


def test_models_without_a_head_have_no_relevance(variety: RunningServer) -> None:
    """Attention needs no labels, but relevance does."""
    options, content = {"model": "features"}, encoded(photo(), "PNG")
    assert httpx.get(f"{variety.url}/api/model", params=options).json()["methods"] == ["attention", "rollout"]
    for method, status in {"attention": 200, "rollout": 200, "relevance": 501}.items():
        response = variety.post(content, "/api/attention", params={**options, "method": method})
        assert response.status_code == status, response.text


def test_relevance_is_that_of_the_model(variety: RunningServer, folder: Path) -> None:
    """By default it explains the predicted label, otherwise the requested one."""
    import torch

    from vitral.data.transforms import normalize, preprocess_image
    from vitral.inspection import relevance

    content = (folder / "photo.png").read_bytes()
    loaded = vitral.Predictor(folder / "colors", device="cpu").loaded
    image = normalize(preprocess_image(content, loaded.preprocess)[None], loaded.preprocess)
    with torch.no_grad():
        best = int(loaded.model(image).argmax())
    options = {"model": "colors", "method": "relevance"}
    for label in (None, best, (best + 1) % 3):
        chosen = {} if label is None else {"label": label}
        response = variety.post(content, "/api/attention", params={**options, **chosen})
        expected = relevance(loaded.model, image, best if label is None else label)[0]
        np.testing.assert_allclose(response.json()["map"], expected / expected.sum(), atol=1e-5)
    response = variety.post(content, "/api/attention", params={**options, "label": 3})
    assert refusal(response) == (400, "invalid_parameter")


def test_unusual_images_are_rejected(variety: RunningServer, folder: Path) -> None:
    """The run knows images of one color. A photo is unlike all of them."""
    ordinary = next((folder / "data").rglob("*.png"))
    rows = [
        variety.post(path.read_bytes(), params={"model": "colors"}).json()["predictions"][0]
        for path in (ordinary, folder / "photo.png")
    ]
    assert rows[0]["unusual"] < 0.95 <= rows[1]["unusual"] <= 1
    assert [row["rejected"] for row in rows] == [False, True]


def test_page_hides_what_an_exported_file_cannot_do(browser: Browser, variety: RunningServer, folder: Path) -> None:
    visit = Visit(browser, variety)
    page = visit.page
    visit.upload(folder / "photo.png")
    assert page.locator("#bars li").count() == 5
    assert page.locator("#maps").is_hidden()
    assert "layers unknown" in str(page.locator("#facts").text_content())
    page.select_option("#model", "headless")
    page.locator("#labels-title", has_text="features only").wait_for(state="attached")
    page.locator("#result-title", has_text="features only").wait_for()
    assert page.locator("#bars li").count() == 0
    assert page.locator("#maps").is_hidden()
    assert visit.violations() == []
    visit.check()


def test_page_shows_relevance_and_none_of_these(browser: Browser, variety: RunningServer, folder: Path) -> None:
    visit = Visit(browser, variety)
    page = visit.page
    page.select_option("#model", "colors")
    page.locator("#labels-title", has_text="3 labels").wait_for(state="attached")
    visit.upload(folder / "photo.png")
    assert page.locator("#result-title").inner_text() == "None of these"
    assert page.locator("#unusual").is_visible()
    assert "ordinary images" in page.locator("#unusual").inner_text()
    assert page.locator("#bars li").count() == 3  # the closest labels
    page.check("#show-map")
    drawn = []
    for method in ("attention", "rollout", "relevance"):
        page.select_option("#method", method)
        page.locator("#overlay:not([hidden])").wait_for()
        assert page.locator("#sliders").is_visible() == (method == "attention")
        drawn.append(pixels(page))
    assert len(set(drawn)) == 3
    assert str(page.locator("#overlay").get_attribute("aria-label")).startswith("Relevance for the label: strongest in")
    assert visit.violations() == []
    visit.upload(next((folder / "data").rglob("*.png")))
    assert page.locator("#result-title").inner_text() in ("red", "green", "blue")
    assert page.locator("#unusual").is_hidden()
    assert page.locator("#rows tr").nth(0).inner_text().endswith("None of these\t")
    visit.check()

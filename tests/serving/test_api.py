"""The API of a running server: the results of `vitral predict`, several images, models, tokens, proxies, metrics."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import vitral
from tests.conftest import small_model
from tests.data.images import encoded, photo
from tests.serving.servers import RunningServer, started
from vitral.errors import ConfigError
from vitral.serving.settings import ModelSource, ServeSettings, name_of, name_sources

TOKEN = "a-long-secret"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of several formats, sizes and color modes, with and without transparency."""
    folder = tmp_path_factory.mktemp("images")
    for number, name in enumerate(["jpg", "png", "webp", "jpg"]):
        photo(40 + 37 * number, 60 + 23 * number, seed=number).save(folder / f"{number}.{name}")
    image = photo(48, 64)
    veil = Image.fromarray((np.indices((48, 64)).sum(0) * 2).astype(np.uint8))
    for mode in ("1", "L", "LA", "P", "RGBA"):
        converted = image.convert(mode)
        if mode in ("LA", "RGBA"):
            converted.putalpha(veil)
        converted.save(folder / f"{mode}.png")
    for mode, color in {"L": 128, "P": 3, "RGB": image.getpixel((5, 5))}.items():
        image.convert(mode).save(folder / f"{mode} with a transparent color.png", transparency=color)
    partly = image.quantize(16)
    partly.save(folder / "P with an opacity per color.png", transparency=bytes(range(0, 256, 16)))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run two models behind a token and a path, started by the command."""
    folder = tmp_path_factory.mktemp("model")
    model = small_model()
    vitral.save(
        vitral.Checkpoint(model=model, preprocess=vitral.Preprocess(size=(16, 16)), labels=tuple("abcdefg")),
        folder / "small.safetensors",
    )
    command = [
        sys.executable,
        "-m",
        "vitral",
        "serve",
        "vit-cifar10",
        "--model",
        f"small={folder / 'small.safetensors'}",
    ]
    command += ["--port", "0", "--token", TOKEN, "--root-path", "/models", "--allow-host", "models.example"]
    with started([*command, "--allow-origin", "https://app.example", "--trusted-proxy", "127.0.0.1"]) as server:
        yield server


def test_results_are_those_of_the_command(server: RunningServer, files: list[Path]) -> None:
    """Top-5 and probabilities of every image equal those of `vitral predict`, alone and many at once."""
    command = [sys.executable, "-m", "vitral", "predict", "vit-cifar10", "--format", "json", *map(str, files)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    expected = [json.loads(line)["top"] for line in lines]
    alone = [server.post(file.read_bytes()).json()["predictions"][0] for file in files]
    parts = [("images", (file.name, file.read_bytes())) for file in files]
    together = httpx.post(f"{server.url}/api/predict", files=parts, timeout=60).json()
    assert together["model"] == "cifar"
    assert [row["file"] for row in together["predictions"]] == [file.name for file in files]
    for rows in (alone, together["predictions"]):
        for row, top in zip(rows, expected, strict=True):
            assert [entry["label"] for entry in row["top"]] == [entry["label"] for entry in top]
            for got, want in zip(row["top"], top, strict=True):
                assert got["probability"] == pytest.approx(want["probability"], abs=1e-5)


def test_one_bad_image_among_good_ones(server: RunningServer) -> None:
    good = encoded(photo(), "JPEG")
    parts = [
        ("images", ("a.jpg", good)),
        ("images", ("b.txt", b"text")),
        ("images", ("c.jpg", good[:-200])),
        ("images", ("d", good)),
    ]
    response = httpx.post(f"{server.url}/api/predict", files=parts, timeout=60)
    assert response.status_code == 200
    rows = response.json()["predictions"]
    assert [row.get("error", {}).get("code") for row in rows] == [None, "unsupported", "truncated", None]
    assert rows[0]["probability"] == pytest.approx(rows[3]["probability"], abs=1e-5)


def test_features(server: RunningServer) -> None:
    content = encoded(photo(), "PNG")
    predictor = vitral.Predictor("vit-cifar10", device="cpu")
    ((_, expected),) = predictor.features([content])
    (row,) = server.post(content, "/api/features").json()["embeddings"]
    assert isinstance(expected, np.ndarray)
    np.testing.assert_allclose(row["features"], expected, atol=1e-5)


def test_attention(server: RunningServer) -> None:
    """The maps are the weights that `record_attention` records, normalized over the patches."""
    import torch

    from vitral.data.transforms import normalize, preprocess_image

    content = encoded(photo(), "PNG")
    loaded = vitral.Predictor("vit-cifar10", device="cpu").loaded
    image = normalize(preprocess_image(content, loaded.preprocess)[None], loaded.preprocess)
    with torch.inference_mode(), vitral.record_attention(loaded.model) as maps:
        loaded.model(image)
    content_of = server.post(content, "/api/attention").json()
    assert (content_of["rows"], content_of["columns"], len(content_of["layers"])) == (4, 4, 6)
    weights = maps[2]
    assert isinstance(weights, torch.Tensor)
    expected = weights[0, 3].mean(0)  # without a class token: what each patch receives
    np.testing.assert_allclose(np.ravel(content_of["layers"][2]["heads"][3]), expected, atol=1e-5)
    last = server.post(content, "/api/attention", params={"layer": -1}).json()["layers"]
    assert [row["layer"] for row in last] == [5]
    assert server.post(content, "/api/attention", params={"layer": 6}).status_code == 400


def test_rollout_and_relevance(server: RunningServer) -> None:
    """They return one map."""
    assert httpx.get(f"{server.url}/api/model").json()["methods"] == ["attention", "rollout", "relevance"]
    for method in ("rollout", "relevance"):
        response = server.post(encoded(photo(), "PNG"), "/api/attention", params={"method": method})
        assert response.status_code == 200, response.text
        assert np.shape(response.json()["map"]) == (4, 4)


def test_model(server: RunningServer) -> None:
    model = httpx.get(f"{server.url}/api/model").json()
    assert model["labels"][:2] == ["airplane", "automobile"]
    assert model["preprocess"]["size"] == [32, 32]
    assert model["limits"]["body_bytes"] == 10 * 2**20
    assert httpx.get(f"{server.url}/api/models").json() == {"models": ["cifar"]}
    assert server.post(encoded(photo(), "PNG"), params={"model": "other"}).status_code == 404


def test_several_models_token_and_proxy(guarded: RunningServer) -> None:
    image, allowed = encoded(photo(), "PNG"), {"Authorization": f"Bearer {TOKEN}"}
    with guarded.client(headers=allowed) as client:
        assert client.get("/api/models").json() == {"models": ["vit-cifar10", "small"]}
        small = client.post("/api/predict?model=small", content=image).json()
        assert {entry["label"] for entry in small["predictions"][0]["top"]} <= set("abcdefg")
        assert client.post("/api/predict", content=image).json()["model"] == "vit-cifar10"
        page = client.get("/", headers={"Host": "models.example"})
        assert page.status_code == 200
        assert client.get("/", headers={"Host": "other.example"}).status_code == 403
    for headers in (
        {},
        {"Authorization": "Bearer wrong-token"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \xff"},
    ):
        encoded_headers = {name: value.encode("latin-1") for name, value in headers.items()}
        for path in ("/api/predict", "/api/features", "/api/attention"):
            response = guarded.post(image, path, headers=encoded_headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/api/model", "/metrics"):
            assert httpx.get(f"{guarded.url}{path}", headers=encoded_headers).status_code == 401
    for path in ("/healthz", "/readyz", "/", "/static/page.js"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 200


def test_other_sites(guarded: RunningServer, server: RunningServer) -> None:
    """CORS is off by default; allowed sites pass with their preflight requests."""
    origin, asking = {"Origin": "https://app.example"}, {"Access-Control-Request-Method": "POST"}
    response = httpx.options(f"{guarded.url}/api/predict", headers={**origin, **asking})
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert httpx.options(f"{server.url}/api/predict", headers={**origin, **asking}).status_code == 403
    response = guarded.post(encoded(photo(), "PNG"), headers={**origin, "Authorization": f"Bearer {TOKEN}"})
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/").headers


def test_pages_are_offline(server: RunningServer) -> None:
    """Every page has a strict policy, and none refers to another server."""
    for path in ("/", "/docs", "/static/page.js", "/static/page.css", "/static/overlay.js", "/static/docs.js"):
        response = httpx.get(f"{server.url}{path}")
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["permissions-policy"].startswith("camera=(self)")
        assert "http://" not in response.text.replace("http://www.w3.org", "")
        assert "https://" not in response.text
        assert "style=" not in response.text
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/none", "/etc/passwd"):
        assert httpx.get(f"{server.url}{path}").status_code == 404
    assert httpx.delete(f"{server.url}/api/predict").status_code == 405


def test_metrics(server: RunningServer) -> None:
    """Prometheus' own parser reads them, and they count."""
    before = server.metric("vitral_requests_total")
    server.post(encoded(photo(), "PNG"))
    text = httpx.get(f"{server.url}/metrics").text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"vitral_requests", "vitral_request_seconds", "vitral_batch_size", "vitral_queue_images"} <= names
    assert server.metric("vitral_requests_total") >= before + 2


def test_settings() -> None:
    assert [name_of(text) for text in ("runs/pets-1/", "a/vit.b.safetensors", "hf:google/vit-base", "C:\\runs\\x")] == [
        "pets-1", "vit.b", "vit-base", "x",
    ]  # fmt: skip
    assert name_sources(["a/x", "b/x"]) == {"x": "a/x", "x-2": "b/x"}
    model = ModelSource(name="a", source="b")
    for options in (
        dict(token="short"),
        dict(root_path="models"),
        dict(port=99999),
        dict(workers=0),
        dict(allowed_origins=("*",)),
        dict(models=()),
    ):
        with pytest.raises(ConfigError):
            ServeSettings(**{"models": (model,), **options})  # type: ignore[arg-type]
    assert TOKEN not in repr(ServeSettings(models=(model,), token=TOKEN))


def test_command_reports_what_it_cannot_serve(server: RunningServer, tmp_path: Path) -> None:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "vitral", "serve", *words], capture_output=True, text=True, timeout=120
        )

    missing = run(str(tmp_path / "none.safetensors"), "--port", "0")
    assert missing.returncode == 2
    assert "none.safetensors" in missing.stderr
    assert "Traceback" not in missing.stderr
    taken = run("vit-cifar10", "--port", str(server.port))
    assert taken.returncode == 2
    assert f":{server.port}" in taken.stderr
    assert run("--model", "cifar10").returncode == 2
    assert run().returncode == 2

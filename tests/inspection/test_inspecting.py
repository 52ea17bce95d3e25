"""What an inspection collects, how it is reduced, and what it writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from tests.cli.typed import typed as run
from tests.conftest import small_model
from tests.data.images import photo
from vitral import ConfigError, DataError, Inspection
from vitral.data.transforms import normalize, preprocess_image
from vitral.inspection import attention_distance, faithfulness, relevance, rollout
from vitral.inspection.attention_tables import (
    BUDGETS,
    MAX_COMPRESSED,
    cell_matrix,
    choose_reduction,
    coarse_grid,
    tabulate_attention,
)
from vitral.inspection.overlays import covered_part, heat, spotlight
from vitral.report.inspection_page import render_inspection, uniform_distance

PNGS = ["attention.png", "distance.png", "filters.png", "images.png", "positions.png", "tokens.png"]


def checkpoint(**variant: Any) -> vitral.Checkpoint:
    model = small_model(**variant)
    channels = model.config.channels
    half = (0.5,) * channels
    preprocess = vitral.Preprocess(size=model.config.image_hw, resize="squash", channels=channels, mean=half, std=half)
    return vitral.Checkpoint(model=model, preprocess=preprocess, labels=tuple("abcdefg")[: model.config.num_classes])


# ---- tables of attention ----


@pytest.mark.parametrize("variant", [dict(), dict(registers=2), dict(attention="axial", pool="mean")], ids=str)
def test_tables_hold_the_attention_in_eight_bits(variant: dict[str, Any]) -> None:
    model, image = small_model(**variant), torch.randn(3, 16, 24)
    (table,) = tabulate_attention(model, [image])
    extras = model.config.extra_tokens
    assert table.grid == (4, 6)
    assert len(table.extras) == extras
    with torch.no_grad(), vitral.record_attention(model) as maps:
        model(image[None])
    for index, layer in enumerate(table.layers):
        expected = maps[layer][0, :, :, extras:].numpy()
        decoded = np.square(table.values[index] / 255.0) * table.maxima[index][..., None]
        assert np.abs(decoded - expected).max() <= expected.max() / 50  # 64 levels of the square root
        np.testing.assert_allclose(table.on_patches[index], expected.sum(axis=-1), atol=1e-5)


def test_coarse_tables_keep_the_sum_of_attention() -> None:
    matrix = cell_matrix((5, 7), (2, 3))
    assert matrix.shape == (6, 35)
    assert (matrix.sum(dim=0) == 1).all()  # every patch belongs to one cell
    assert matrix.sum(dim=1).min() >= 4
    assert coarse_grid((37, 37), 256) == (13, 13)
    assert coarse_grid((14, 14), 256) == (14, 14)


@pytest.mark.parametrize(("size", "pixels"), [("vit-b16", 224), ("vit-l16", 384), ("vit-h14", 518), ("vit-s8", 384)])
@pytest.mark.parametrize("count", [1, 8])
def test_large_models_fit_on_a_page(size: str, pixels: int, count: int) -> None:
    """The tables of all images stay below the limit even without compression, in base64 below 25 MB."""
    with torch.device("meta"):
        config = vitral.create(size, image_size=pixels).config
    grid = config.grid(pixels, pixels)
    layers, cells = choose_reduction(config, [grid] * count, BUDGETS[-1])
    rows, columns = coarse_grid(grid, cells)
    assert rows * columns <= cells
    total = count * len(layers) * config.heads * (rows * columns + 1) * rows * columns
    assert total <= BUDGETS[-1]
    assert layers[-1] == config.blocks - 1
    assert layers == sorted(set(layers))
    assert len(layers) >= 2
    assert layers[0] == 0


# ---- pictures ----


def test_overlays_are_bright_where_the_map_is_high() -> None:
    pixels = np.full((40, 60, 3), 128, dtype=np.uint8)
    map = np.array([[0.0, 0.0, 3.0], [0.0, 0.0, 3.0]])
    for draw in (spotlight, heat):
        drawn = draw(pixels, map, 120)
        assert drawn.shape == (80, 120, 3)
        assert drawn.dtype == np.uint8
        assert drawn[:, -10:].mean() > drawn[:, :10].mean() + 50
    assert spotlight(pixels[..., :1], map).shape[2] == 3


def test_a_map_is_drawn_as_far_as_the_image_covers_its_grid() -> None:
    """A stem rounds up: 33 pixels make 5 cells of 8 pixels, of which the last has a single pixel."""
    assert covered_part((33, 32), (5, 4), (8, 8)) == (33 / 40, 1.0)
    pixels, map = np.full((33, 32, 3), 255, dtype=np.uint8), np.repeat(np.arange(5.0)[:, None], 4, axis=1)
    covered = spotlight(pixels, map, 330, covered_part((33, 32), (5, 4), (8, 8)))
    whole = spotlight(np.full((40, 32, 3), 255, dtype=np.uint8), map, 400)
    assert covered.shape == (330, 320, 3)
    difference = np.abs(covered.astype(int) - whole[:330].astype(int))
    assert difference[:-50].max() <= 1  # all but the last cell, whose lower neighbor is cut off
    assert difference.max() <= 40


def test_uniform_distance_is_the_mean_of_all_pairs() -> None:
    assert uniform_distance((1, 2), [16, 16]) == 8
    assert uniform_distance((2, 1), [4, 16]) == 2


# ---- everything together ----


@pytest.mark.parametrize(
    "variant",
    [
        dict(position="relative"),
        dict(pool="map"),
        dict(attention="axial", pool="mean"),
        dict(num_classes=0),
        dict(channels=1),
        dict(patch_size=1, stem=vitral.ConvStem(widths=(16, 16))),
    ],
    ids=str,
)
def test_every_kind_of_model_can_be_inspected(variant: dict[str, Any], tmp_path: Path) -> None:
    result = vitral.inspect(checkpoint(**variant), [photo(), photo(seed=1)], out=tmp_path)
    assert isinstance(result, Inspection)
    assert result.distance_images == 2
    assert result.distance.shape == (4 if "attention" in variant else 2, 3)
    content = json.loads((tmp_path / "inspect.json").read_text())
    assert content["name"] == "model"
    assert np.array(content["images"][0]["rollout"]).sum() == pytest.approx(1, abs=1e-3)
    assert bool(content["images"][0]["predictions"]) == (variant.get("num_classes") != 0)
    assert (content["position_similarity"] is None) == (variant.get("position") == "relative")
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    assert "://" not in page.replace("http://www.w3.org", "")  # opens offline
    assert "{{" not in page
    for name in PNGS:
        if name != "positions.png" or content["position_similarity"]:
            with Image.open(tmp_path / name) as image:
                assert min(image.size) > 100


def test_the_command_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vitral.save(checkpoint(), "small.safetensors")
    photo().save("a.jpg")
    photo(seed=1).save("b.jpg")
    Path("bad.jpg").write_bytes(b"no image")
    command = ["inspect", "small.safetensors", "a.jpg", "b.jpg", "bad.jpg"]
    done = run(*command, "--faithfulness", "--label", "c", "--label", "a")
    assert done.returncode == 0
    assert "skipped bad.jpg" in done.stderr
    assert "Wrote inspect-small/inspect.html" in done.stdout
    assert "Faithfulness of relevance: " in done.stdout
    assert "(2 images): too few images for a verdict; pass at least 10" in done.stdout
    names = sorted(path.name for path in Path("inspect-small").iterdir())
    assert names == sorted([*PNGS, "faithfulness.png", "inspect.html", "inspect.json"])
    content = json.loads(Path("inspect-small/inspect.json").read_text())
    (first, *_) = content["images"]
    assert [row["label"] for row in first["relevance"]] == ["c", "a"]
    best = [row["probability"] for row in first["predictions"]]
    assert best == sorted(best, reverse=True)  # --label changes the maps, not the predictions
    assert len(best) == 3
    assert best[0] >= max(row["probability"] for row in first["relevance"])
    assert f"a.jpg: {first['predictions'][0]['label']} " in done.stdout
    assert content["skipped"][0]["file"] == "bad.jpg"
    again = run(*command[:-1])
    assert again.returncode == 2
    assert "already exists" in again.stderr
    quiet = run(*command[:-1], "--overwrite", "--format", "quiet")
    assert quiet.stdout == "inspect-small/inspect.html\n"
    assert not Path("inspect-small/faithfulness.png").exists()  # it belonged to the earlier inspection


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no label 'z'"):
        vitral.inspect(checkpoint(), [photo()], out=tmp_path / "a", labels=["z"])
    with pytest.raises(DataError, match="^image 1: unsupported: "):
        vitral.inspect(checkpoint(), [b"no image"], out=tmp_path / "a")
    missing = str(tmp_path / "missing.jpg")
    with pytest.raises(DataError, match=r"None of the 2 images is usable. The first: .*missing.jpg: missing: no such"):
        vitral.inspect(checkpoint(), [missing, b"no image"], out=tmp_path / "a")
    with pytest.raises(ConfigError, match="no classification head"):
        vitral.inspect(checkpoint(num_classes=0), [photo()], out=tmp_path / "a", faithfulness=True)
    bit = vitral.create("bit-r50x1", num_classes=3, image_size=32)
    preprocess = vitral.Preprocess(size=(32, 32))
    with pytest.raises(ConfigError, match="convolutions have no attention"):
        vitral.inspect(vitral.Checkpoint(model=bit, preprocess=preprocess), [photo()], out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match=r"file is not a folder. Pass another --out.$"):
            vitral.inspect(checkpoint(), [photo()], out=out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images.png").touch()
    with pytest.raises(ConfigError, match=r"images.png already exists"):
        vitral.inspect(checkpoint(), [photo()], out=tmp_path / "mine")


def test_a_folder_that_is_not_writable_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"is not writable. Pass another --out.$"):
        vitral.inspect("no-such-model", [photo()], out=tmp_path / "a")


def test_a_model_that_merges_tokens_is_inspected_without_merging(tmp_path: Path) -> None:
    vitral.save(checkpoint(merge=2), tmp_path / "merging.safetensors")
    result = vitral.inspect(tmp_path / "merging.safetensors", [photo()], out=tmp_path / "a")
    assert result.images[0].attention.grid == (4, 4)


def test_many_images_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The means over all images equal those of one call, although at most eight are normalized at a time."""
    loaded, sizes = checkpoint(), list[int]()
    images = [np.asarray(photo(seed=seed)) for seed in range(11)]

    def count(model: Any, inputs: Any) -> torch.Tensor:
        sizes.append(len(inputs))
        return attention_distance(model, inputs)

    monkeypatch.setattr("vitral.inspection.inspecting.attention_distance", count)
    result = vitral.inspect(loaded, images, out=tmp_path, faithfulness=True)
    assert sizes == [8, 3]
    assert len(result.images) == 8
    assert result.distance_images == 11
    inputs = normalize(torch.stack([preprocess_image(image, loaded.preprocess) for image in images]), loaded.preprocess)
    expected = attention_distance(loaded.model, inputs)
    np.testing.assert_allclose(result.distance, expected.numpy(), rtol=1e-5)
    at_once = faithfulness(loaded.model, inputs, rollout(loaded.model, inputs))
    assert result.faithfulness["rollout"]["score"] == pytest.approx(at_once.score, abs=1e-4)
    assert result.faithfulness["relevance"]["random_curve"] == pytest.approx(at_once.random_curve, abs=1e-4)
    assert result.faithfulness["relevance"]["images"] == 11


def test_the_page_of_the_largest_tables_stays_below_25_mb(tmp_path: Path) -> None:
    """Random bytes do not compress, so these tables are as large as the limit allows."""
    result = vitral.inspect(checkpoint(), [photo()], out=tmp_path)
    (image,) = result.images
    values = np.random.default_rng(0).integers(0, 256, (1, 1, 1, MAX_COMPRESSED), dtype=np.uint8)
    large = replace(image, attention=replace(image.attention, values=values))
    assert 20e6 < len(render_inspection(replace(result, images=(large,)))) < 25e6


def test_deletion_beats_chance_on_the_shipped_model() -> None:
    """Real photos: tiles of the two that scikit-learn has.

    They are too few for a narrow interval; benchmarks/faithfulness.py has the one of CIFAR-10, which is above 0."""
    from sklearn.datasets import load_sample_images

    loaded = vitral.load("vit-cifar10")
    model = loaded.model.float().eval()
    photos = load_sample_images().images
    corners = [(top, left) for top in range(0, 400, 100) for left in range(0, 600, 100)]
    tiles = [image[top : top + 100, left : left + 100] for image in photos for top, left in corners]
    pixels = [preprocess_image(np.ascontiguousarray(tile), loaded.preprocess) for tile in tiles]
    images = normalize(torch.stack(pixels), loaded.preprocess)
    result = faithfulness(model, images, relevance(model, images), steps=8, random_orders=3)
    assert result.images == 48
    assert result.score > 0
    assert result.curve[1] < result.random_curve[1]  # the first patches matter most
    assert result.low < result.score < result.high


def test_the_benchmark_shows_that_both_maps_beat_chance() -> None:
    """The intervals that the documentation quotes, of the shipped model on CIFAR-10, are above 0."""
    (newest,) = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("faithfulness-*.json"))[-1:]
    content = json.loads(newest.read_text())
    for name in ("rollout", "relevance"):
        assert content[name]["images"] >= 200
        assert 0 < content[name]["low"] < content[name]["score"] < content[name]["high"]

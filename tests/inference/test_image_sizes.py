"""Ranges of image sizes are read from files with suspicion, and errors name a size that fits."""

import json
from pathlib import Path

import onnx
import pytest

import vitral
from tests.conftest import small_model
from vitral.errors import ConfigError, WeightsError
from vitral.exporting.exporter import export
from vitral.inference.image_sizes import SizeRange, read_sizes


def test_a_range_contains_multiples_up_to_its_maximum() -> None:
    sizes = SizeRange(multiple_of=(16, 8), maximum=(64, 32))
    assert [size for size in ((16, 8), (64, 32), (0, 8), (80, 8), (16, 40), (8, 8), (16, 12)) if size in sizes] == [
        (16, 8),
        (64, 32),
    ]
    assert sizes.nearest((100, 1)) == (64, 8)
    assert sizes.nearest((41, 21)) == (48, 24)
    assert str(sizes) == "any height and width that are multiples of 16 and 8, up to 64 x 32 pixels"
    with pytest.raises(ConfigError, match=r"cat.onnx takes images of .* \(got 40 x 32\). Use 32 x 32."):
        sizes.check((40, 32), "cat.onnx")


def test_a_file_without_a_range_takes_one_size() -> None:
    sizes = read_sizes({"dynamic_size": None}, (24, 16))
    assert (24, 16) in sizes
    assert sizes.is_single
    with pytest.raises(ConfigError, match=r"takes images of 24 x 16 pixels \(got 48 x 32\). Export .* --dynamic-size"):
        sizes.check((48, 32), "cat.onnx")


@pytest.mark.parametrize(
    "limits",
    [
        dict(multiple_of=[16, 16], maximum=[8, 8]),
        dict(multiple_of=[0, 1], maximum=[64, 64]),
        dict(multiple_of=[1, 1], maximum=[10**9, 64]),
        dict(multiple_of=[1, 1], maximum=[64.0, 64]),
        dict(multiple_of=[1, 1], maximum="64"),
        dict(multiple_of=[1], maximum=[64, 64]),
        dict(maximum=[64, 64]),
        [16, 64],
        "any",
    ],
)
def test_invalid_ranges_of_a_file_are_refused(limits: object) -> None:
    with pytest.raises((ConfigError, TypeError)):
        read_sizes({"dynamic_size": limits}, (16, 16))


def test_a_file_must_take_the_sizes_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export(small_model(depth=1), path, to="onnx")
    model = onnx.load(path)
    entry = next(entry for entry in model.metadata_props if entry.key == "vitral")
    for limits, problem in (
        (dict(multiple_of=[4, 4], maximum=[64, 64]), r"takes images of \(16, 16\), but describes \(32, 32\)"),
        (dict(multiple_of=[4, 4], maximum=[-1, 64]), "invalid description"),
        (5, "invalid description"),
    ):
        entry.value = json.dumps(json.loads(entry.value) | {"dynamic_size": limits})
        onnx.save(model, path)
        with pytest.raises(WeightsError, match=problem):
            vitral.Predictor(path, image_size=32)

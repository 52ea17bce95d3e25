"""Predictor: the same probabilities for every kind of input, and failures that do not disturb the others."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.errors import ConfigError
from vitral.inference.predictor import Failure, Prediction


def test_every_kind_of_input_gives_the_same_probabilities(run: Path, photos: Path) -> None:
    files = sorted((photos / "test").glob("*/*.png"))
    predictor = vitral.Predictor(run)
    predictions = predictor(files)
    for file, expected in zip(files, predictions, strict=True):
        pillow = Image.open(file)
        for image in (file, str(file), file.read_bytes(), pillow, np.asarray(pillow)):
            prediction = predictor(image)
            assert [label for label, _ in prediction.top(5)] == [label for label, _ in expected.top(5)]
            np.testing.assert_allclose(prediction.probabilities, expected.probabilities, atol=1e-5)


def test_a_tensor_is_an_image_too(run: Path, photos: Path) -> None:
    file, predictor = photos / "test" / "red" / "000.png", vitral.Predictor(run)
    tensor = torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)
    np.testing.assert_allclose(predictor(tensor).probabilities, predictor(file).probabilities, atol=1e-5)
    with pytest.raises(vitral.DataError, match=r"got float32 \(3, .*before normalization"):
        predictor(tensor / 255)


def test_merging(run: Path, photos: Path) -> None:
    files = sorted((photos / "test").glob("*/*.png"))
    plain, merging = vitral.Predictor(run), vitral.Predictor(run, merge=2)
    assert merging.loaded.model.config.merge == 2
    predictions = merging(files)
    for file, prediction in zip(files, predictions, strict=True):  # a batch gives what each image gives alone
        np.testing.assert_allclose(merging(file).probabilities, prediction.probabilities, atol=1e-5)
    assert not np.allclose(plain(files[0]).probabilities, predictions[0].probabilities, atol=1e-7)
    checkpoint = vitral.load(vitral.Run(run).trained_model(), merge=2)
    np.testing.assert_array_equal(vitral.Predictor(checkpoint)(files[0]).probabilities, merging(files[0]).probabilities)
    with pytest.raises(ConfigError, match=r"vitral.load\(..., merge=3\)"):
        vitral.Predictor(checkpoint, merge=3)
    with pytest.raises(ConfigError, match="merge"):
        vitral.Predictor(checkpoint, merge=-1)


def test_predictions_equal_an_evaluation(run: Path, photos: Path) -> None:
    files = sorted((photos / "test").glob("*/*.png"))
    predictions = vitral.Predictor(run)(files)
    evaluation = vitral.evaluate(run)
    labels = [file.parent.name for file in files]
    correct = [label == prediction.label for label, prediction in zip(labels, predictions, strict=True)]
    assert np.mean(correct) == evaluation.scores.top1
    losses = [
        -np.log(prediction.probabilities[prediction.labels.index(label)])
        for label, prediction in zip(labels, predictions, strict=True)
    ]
    assert evaluation.scores.loss == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_folder_gives_a_list_sorted_by_name(run: Path, photos: Path, tmp_path: Path) -> None:
    predictor = vitral.Predictor(run)
    files = sorted((photos / "test").glob("*/*.png"))
    for folder in (photos / "test", str(photos / "test")):
        predictions = predictor(folder)
        assert [prediction.label for prediction in predictions] == [prediction.label for prediction in predictor(files)]
    assert [Path(file) for file, _ in predictor.stream(photos / "test")] == files
    with pytest.raises(vitral.DataError, match="no images"):
        predictor(tmp_path)


def test_a_path_streams_as_one_image(run: Path, photos: Path) -> None:
    """A string is an iterable of letters, which are not images."""
    ((file, result),) = vitral.Predictor(run).stream(str(photos / "test" / "red" / "000.png"))
    assert file.endswith("000.png")
    assert isinstance(result, Prediction)


def test_unusable_images_do_not_disturb_the_others(run: Path, photos: Path, tmp_path: Path) -> None:
    good = photos / "test" / "red" / "000.png"
    predictor = vitral.Predictor(run)
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:-200])
    with Image.open(tmp_path / "cut.png") as cut:
        results = [result for _, result in predictor.stream([cut, good, np.zeros((2, 2, 9)), b""])]
    assert [type(result) for result in results] == [Failure, Prediction, Failure, Failure]
    with pytest.raises(vitral.DataError, match="empty"):
        predictor(b"")
    with pytest.raises(vitral.DataError, match="got int"):
        predictor(3)  # type: ignore[call-overload]


def test_arrays_with_negative_strides_and_alpha(run: Path, photos: Path) -> None:
    good = photos / "test" / "red" / "000.png"
    pixels = np.asarray(Image.open(good))
    predictor = vitral.Predictor(run)
    expected = predictor(good)
    mirrored = predictor(np.ascontiguousarray(pixels[:, ::-1])[:, ::-1])  # as OpenCV users reverse BGR
    np.testing.assert_allclose(mirrored.probabilities, expected.probabilities, atol=1e-6)
    alpha = np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])
    np.testing.assert_allclose(predictor(alpha).probabilities, expected.probabilities, atol=1e-6)


def test_four_threads_share_a_predictor(run: Path, photos: Path) -> None:
    """The results are those of one thread, and no thread leaves a warning filter behind."""
    files = sorted((photos / "test").glob("*/*.png")) * 4
    predictor = vitral.Predictor(run, batch_size=3)
    expected = [prediction.probabilities for prediction in predictor(files)]
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: predictor(files), range(8)))
    assert warnings.filters == before
    for predictions in results:
        for prediction, probabilities in zip(predictions, expected, strict=True):
            np.testing.assert_allclose(prediction.probabilities, probabilities, atol=1e-6)


def test_top_returns_the_most_probable_labels_first(run: Path, photos: Path) -> None:
    prediction = vitral.Predictor(run)(photos / "test" / "red" / "000.png")
    top = prediction.top(2)
    assert top[0] == (prediction.label, pytest.approx(prediction.probability))
    assert top[0][1] >= top[1][1]
    assert len(prediction.top(99)) == 3
    for k in (0, 2.5, "3"):
        with pytest.raises(ConfigError, match="k must be"):
            prediction.top(k)  # type: ignore[arg-type]


def test_another_image_size(run: Path) -> None:
    assert vitral.Predictor(run, image_size=32).loaded.preprocess.size == (32, 32)
    with pytest.raises(ConfigError, match="16 x 16"):
        vitral.Predictor(vitral.load(run / "model.safetensors"), image_size=32)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (5, {}),
        (None, {}),
        ("vit-cifar10", {"batch_size": "3"}),
        ("vit-cifar10", {"batch_size": 2**63}),
        ("vit-cifar10", {"batch_size": 0}),
    ],
)
def test_wrong_arguments_are_refused(source: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        vitral.Predictor(source, **options)


def test_the_repr_shows_labels_and_size(run: Path) -> None:
    assert "3 labels, images of 16 x 16" in repr(vitral.Predictor(run))


def test_a_folder_that_cannot_be_listed_is_a_failure(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "open.png").write_bytes((photos / "test" / "red" / "000.png").read_bytes())
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    results = dict(vitral.Predictor(run).stream(tmp_path))
    assert isinstance(results[str(closed)], Failure)
    assert isinstance(results[str(tmp_path / "open.png")], Prediction)

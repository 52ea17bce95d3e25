"""How unusual images are: the whitening against scikit-learn, the calibration, and the file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance, shrunk_covariance
from torch import Tensor

from vitral.errors import ConfigError, WeightsError
from vitral.inference.novelty import Novelty, fit_novelty, fit_whitening


def clusters(images: int, *, seed: int = 0, classes: int = 5, width: int = 24) -> tuple[Tensor, Tensor]:
    """Return features around class means that are the same for every seed, spread unevenly, and labels."""
    means = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(100))
    labels = torch.arange(images) % classes
    noise = torch.randn(images, width, generator=torch.Generator().manual_seed(seed))
    return means[labels] + noise * torch.linspace(0.2, 3, width) + 5, labels


@pytest.mark.parametrize(("images", "width"), [(500, 20), (15, 40)])
def test_whitening_equals_scikit_learns_shrunk_covariance(images: int, width: int) -> None:
    features = torch.randn(images, width) * torch.linspace(0.1, 2, width) + 4
    mean, whitening = fit_whitening(features, shrinkage=0.5)
    covariance = EmpiricalCovariance().fit(features.double().numpy()).covariance_
    expected = np.linalg.inv(shrunk_covariance(covariance, 0.5 * width / (images + width)))
    product = (whitening @ whitening.T).double()
    torch.testing.assert_close(mean, features.mean(0))
    torch.testing.assert_close(product, torch.from_numpy(expected / expected.diagonal().mean()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_held_out", [True, False])
def test_levels_reject_as_many_ordinary_images_as_they_state(has_held_out: bool) -> None:
    features, labels = clusters(2000)
    novelty = fit_novelty(features, labels, held_out=clusters(2000, seed=1)[0] if has_held_out else None)
    scores = novelty.score(clusters(4000, seed=2)[0])
    for level in (0.5, 0.9, 0.95, 0.99):
        rejected = (scores >= level).double().mean().item()
        assert rejected == pytest.approx(1 - level, abs=0.04)  # three standard errors at 0.5


def test_other_images_are_unusual() -> None:
    features, labels = clusters(1000)
    novelty = fit_novelty(features, labels)
    other = features.mean(0) + 3 * torch.randn(200, 24)
    assert (novelty.score(other) > 0.95).double().mean() > 0.8
    assert ((novelty.score(other) >= 0) & (novelty.score(other) <= 1)).all()


def test_scores_grow_with_the_distance_also_beyond_all_ordinary_images() -> None:
    features, labels = clusters(50)
    novelty = fit_novelty(features, labels, held_out=clusters(5, seed=1)[0])
    x = torch.randn(300, 24) * 9
    order = novelty.distance(x).argsort()
    scores = novelty.score(x)[order]
    assert (scores.diff() >= -1e-6).all()
    assert scores.unique().numel() > 250


@pytest.mark.parametrize("images", [20, 60])
def test_folds_of_few_images_are_those_of_all_dimensions(images: int) -> None:
    """Fewer images than dimensions are calibrated in the space that they span; the distances are the same."""
    features, labels = clusters(images, width=48)
    folds = torch.arange(images) % 4
    distances = [
        fit_novelty(features[folds != fold], labels[folds != fold], held_out=features[:2]).distance(
            features[folds == fold]
        )
        for fold in range(4)
    ]
    expected = torch.quantile(torch.cat(distances).double(), torch.linspace(0, 1, images, dtype=torch.double))
    torch.testing.assert_close(
        fit_novelty(features, labels, folds=folds).quantiles, expected.float(), rtol=1e-4, atol=1e-5
    )


def test_few_images_and_constant_features() -> None:
    labels = torch.tensor([0, 1, 1])
    for features in (torch.randn(3, 8), torch.ones(3, 8)):
        scores = fit_novelty(features, labels).score(torch.randn(4, 8))
        assert scores.isfinite().all()
        assert ((scores >= 0) & (scores <= 1)).all()
    with pytest.raises(ConfigError, match="at least 2"):
        fit_novelty(torch.ones(1, 8), torch.tensor([0]))


def test_multi_label_images_belong_to_each_of_their_labels() -> None:
    features, labels = clusters(600)
    table = torch.nn.functional.one_hot(labels)
    expected = fit_novelty(features, labels).distance(features)
    torch.testing.assert_close(fit_novelty(features, table).distance(features), expected)


def test_a_file_keeps_the_scores(tmp_path: Path) -> None:
    features, labels = clusters(300)
    novelty = fit_novelty(features, labels)
    novelty.save(tmp_path / "novelty.safetensors")
    assert (tmp_path / "novelty.safetensors").stat().st_size < 10_000
    restored = Novelty.load(tmp_path / "novelty.safetensors")
    # The file has float16, so a cosine is exact to three digits.
    torch.testing.assert_close(restored.distance(features), novelty.distance(features), rtol=0, atol=3e-3)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "novelty.safetensors"
    path.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    with pytest.raises(WeightsError, match="novelty.safetensors is damaged"):
        Novelty.load(path)
    path.write_bytes(b"no file")
    with pytest.raises(WeightsError, match="novelty.safetensors is damaged"):
        Novelty.load(path)

"""Positions, filters, tokens and faithfulness, against definitions and scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

import vitral
from tests.conftest import small_model
from vitral import ConfigError, DataError
from vitral.inspection import (
    faithfulness,
    feature_pca,
    patch_filters,
    position_similarity,
    token_norms,
    token_similarity,
)


@pytest.mark.parametrize("position", ["learned", "learned-2d", "sincos-2d"])
def test_position_similarity_is_the_cosine_of_all_pairs(position: str) -> None:
    model = small_model(position=position, image_size=(16, 24))
    result = position_similarity(model)
    assert result.shape == (4, 6, 4, 6)
    with torch.no_grad():
        rows = model.positions[0].rows((4, 6), like=model.norm.weight)[1:].detach()
    np.testing.assert_allclose(result.reshape(24, 24).numpy(), cosine_similarity(rows.numpy()), atol=1e-5)


def test_every_layer_can_have_a_table_and_some_models_have_none() -> None:
    model = small_model(position_at="every-layer")
    assert not torch.allclose(position_similarity(model), position_similarity(model, block=1))
    with pytest.raises(ConfigError, match="relative offsets"):
        position_similarity(small_model(position="relative"))
    with pytest.raises(ConfigError, match="no positions"):
        position_similarity(small_model(position="none"))


def test_filters_are_the_principal_components() -> None:
    model = small_model(width=96)
    filters = patch_filters(model, components=5)
    theirs = PCA(5, svd_solver="full").fit(model.patches.project.weight.detach().numpy())
    assert filters.components.shape == (5, 3, 4, 4)
    ours = filters.components.flatten(1).numpy()
    np.testing.assert_allclose(np.abs((ours * theirs.components_).sum(axis=1)), 1, atol=1e-4)  # up to the sign
    np.testing.assert_allclose(filters.explained.numpy(), theirs.explained_variance_ratio_, rtol=1e-4)


def test_a_hybrid_has_the_filters_of_its_first_convolution() -> None:
    model = small_model(patch_size=1, stem=vitral.ResNetStem(stages=(1,), width_factor=0.5), image_size=32)
    assert patch_filters(model).components.shape[1:] == (3, 7, 7)


def test_norms_and_similarity_follow_their_definitions() -> None:
    model = small_model(registers=1)
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 24)]
    norms, similarity = token_norms(model, images), token_similarity(model, images)
    with torch.no_grad():
        features = model.features(images, layers=[0, 1])
    for index, (image, grid) in enumerate(zip(features, [(4, 4), (2, 6)], strict=True)):
        assert norms[index].shape == (2, *grid)
        for layer in range(2):
            tokens = image.layers[layer].patches[0].numpy()
            np.testing.assert_allclose(norms[index][layer].flatten(), np.linalg.norm(tokens, axis=1), rtol=1e-4)
            pairs = cosine_similarity(tokens)[~np.eye(len(tokens), dtype=bool)]
            assert similarity[index, layer].item() == pytest.approx(pairs.mean(), abs=1e-4)


def test_feature_colors_are_principal_components_of_all_images() -> None:
    model = small_model()
    images = torch.randn(3, 3, 16, 16)
    colors = feature_pca(model, images)
    assert colors.shape == (3, 4, 4, 3)
    assert colors.min() == 0
    assert colors.max() == 1
    with torch.no_grad():
        theirs = PCA(3).fit_transform(model.features(images).patches.flatten(0, 1).numpy())
    for channel in range(3):
        ours = colors[..., channel].flatten().numpy()
        inside = (ours > 0) & (ours < 1)
        assert abs(np.corrcoef(ours[inside], theirs[inside, channel])[0, 1]) > 0.999
    listed = feature_pca(model, list(images))
    assert isinstance(listed, list)
    torch.testing.assert_close(torch.stack(listed), colors, atol=1e-4, rtol=1e-4)


# ---- faithfulness ----


def additive_model() -> Any:
    """Return a model whose logit of class 0 grows with the brightness of a patch."""
    model = small_model(pool="mean", depth=1, num_classes=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.patches.project.weight[0] = 1.0
        model.norm.weight.fill_(1.0)
        model.head.weight[0, 0] = 2.0
    return model


def test_the_right_ranking_beats_chance_and_the_opposite_loses() -> None:
    model = additive_model()
    random = torch.Generator().manual_seed(0)
    bright = torch.rand(12, 4, 4, generator=random) < 0.3
    images = bright.float().repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None].expand(-1, 3, -1, -1)
    good = faithfulness(model, images, bright.float())
    bad = faithfulness(model, images, -bright.float())
    assert good.is_clear
    assert good.images == 12
    assert good.low <= good.score <= good.high
    assert bad.high < 0
    assert good.fractions == tuple(step / 10 for step in range(11))
    assert good.curve[0] == pytest.approx(good.random_curve[0])  # nothing is deleted yet
    assert good.curve[-1] == pytest.approx(good.random_curve[-1])  # and everything in the end
    area = np.trapezoid(np.subtract(good.random_curve, good.curve), dx=0.1)
    assert good.score == pytest.approx(area)


def test_hybrids_lists_and_few_images() -> None:
    """Fewer than ten images have a score but no interval."""
    model = small_model(patch_size=1, stem=vitral.ConvStem(widths=(16, 16)))
    images = [torch.randn(3, 16, 16), torch.randn(3, 9, 21)]
    result = faithfulness(model, images, [torch.rand(4, 4), torch.rand(3, 6)], labels=[0, 1], steps=3)
    assert np.isfinite(result.score)
    assert np.isnan(result.low)
    assert not result.is_clear
    nine, ten = ([image] * count for image, count in ((images[0], 9), (images[0], 10)))
    assert np.isnan(faithfulness(model, nine, [torch.rand(4, 4)] * 9, steps=1).high)
    assert np.isfinite(faithfulness(model, ten, [torch.rand(4, 4)] * 10, steps=1).high)
    with pytest.raises(DataError, match="one map per image"):
        faithfulness(model, images, [torch.rand(4, 4)])
    with pytest.raises(ConfigError, match="predicts classes"):
        faithfulness(small_model(num_classes=0), images, [torch.rand(4, 4)] * 2)

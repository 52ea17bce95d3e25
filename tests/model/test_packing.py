"""A list of images of any sizes gives the logits of each image alone."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import small_config, small_model
from vitral import ConvStem, DataError, ResNetStem, ViT
from vitral.model.packing import arrange

POSITIONS = [
    *product(["learned", "learned-2d", "sincos-2d"], ["stem", "every-layer", "every-layer-shared"]),
    ("none", "stem"),
    ("relative", "stem"),
]
VARIANTS: list[dict[str, Any]] = [
    *(dict(position=position, position_at=at) for position, at in POSITIONS),
    *(dict(pool=pool) for pool in ("mean", "map", "none")),
    *(dict(pool=pool, class_token=True, registers=2) for pool in ("token", "mean", "map", "none")),
    *(dict(attention="axial", pool=pool, position=p) for pool in ("token", "mean") for p in ("learned", "relative")),
    dict(pool="mean", class_token=True, norm_after_pool=True),
    dict(layer_scale=0.5, representation=20),
    dict(stem=ResNetStem(stages=(1,)), patch_size=1),
    dict(stem=ConvStem(widths=(8, 16)), patch_size=1),
]


sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6)


def make_images(sizes: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(3, 4 * rows, 4 * columns, dtype=dtype, requires_grad=True) for rows, columns in sizes]


def logits_alone(model: ViT, images: list[Tensor]) -> list[Tensor]:
    return [model(image[None])[0] for image in images]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(sizes=sizes, train=st.booleans())
def test_packed_logits_equal_those_of_each_image_alone(
    variant: dict[str, Any], sizes: list[tuple[int, int]], train: bool
) -> None:
    model = small_model(**variant).train(train)
    images = make_images(sizes)
    for packed, alone in zip(model(images), logits_alone(model, images), strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("train", [False, True])
def test_packed_gradients_equal_those_of_each_image_alone(variant: dict[str, Any], train: bool) -> None:
    model = small_model(**variant).train(train)
    images = make_images([(4, 4), (2, 5), (4, 4), (1, 1), (5, 2), (2, 5)])
    inputs = [*images, *model.parameters()]
    weight = torch.randn(7)

    def gradients(outputs: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum((out @ weight).square().sum() for out in outputs), inputs, allow_unused=True)

    packed, alone = gradients(model(images)), gradients(logits_alone(model, images))
    largest = max(gradient.abs().max() for gradient in alone if gradient is not None)
    for ours, expected in zip(packed, alone, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            # Some processors convolve batches with another kernel than single images; the stem's norms amplify that.
            assert (ours - expected).abs().max() <= 3e-5 * largest


def test_sequence_has_no_padding() -> None:
    model = small_model()
    x, packing = model.embed(make_images([(4, 4), (2, 5), (4, 4), (6, 1)]))
    assert x.shape == (1, 17 + 11 + 17 + 7, 48)
    assert [group.images for group in packing.groups] == [2, 1, 1]


def test_logits_follow_the_order_of_the_list() -> None:
    model = small_model()
    images = make_images([(1, 2), (4, 4), (1, 2), (3, 3), (4, 4)])
    order = [3, 0, 4, 1, 2]
    logits = model(images)
    torch.testing.assert_close(model([images[i] for i in order]), logits[order], atol=1e-5, rtol=0)


def test_list_of_equal_sizes_equals_the_batch() -> None:
    model = small_model()
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(model(list(images)), model(images))


def test_logits_do_not_depend_on_the_batch() -> None:
    model = small_model()
    images = torch.randn(9, 3, 16, 16)
    torch.testing.assert_close(model(images)[:2], model(images[:2]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 16, 16), r"shape \(batch, channels, height, width\).*image\[None\]"),
        (torch.zeros(1, 1, 16, 16), "channels=3.*have 1.*channels=1"),
        (torch.zeros(1, 3, 17, 16), "17 x 16 pixels.*Resize, crop or pad the image to 16 x 16.*patch_size"),
        (torch.zeros(1, 3, 2, 16), "2 x 16 pixels.*to 4 x 16"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "floating-point.*uint8"),
        (torch.zeros(1, 16, 16, 3), r"Channels seem to come last: use images.movedim\(-1, 1\)"),
        (torch.zeros(1, 1, 3, 16, 16), r"got \(1, 1, 3, 16, 16\)\)\.$"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.float64), "float64.*model is torch.float32. Convert them"),
        (torch.zeros(1, 3, 16, 16, device="meta"), "images are on meta.*model is on cpu. Move them"),
        ([], "list of images is empty"),
        ([torch.zeros(1, 3, 16, 16)], r"\(channels, height, width\)"),
        ([torch.zeros(3, 16, 16), torch.zeros(3, 16, 16).half()], r"images\[1\]: The images are torch.float16"),
        ([torch.zeros(3, 16, 16), torch.zeros(3, 16, 18)], r"images\[1\]: An image of 16 x 18 pixels"),
        ([torch.zeros(3, 16, 16), torch.zeros(1, 16, 16)], "have 1\\."),
        ([torch.zeros(3, 16, 16), torch.zeros(3, 16, 16, dtype=torch.uint8)], "uint8"),
    ],
)
def test_invalid_images(images: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        arrange(images, small_config(), torch.zeros(1))

"""The patch embedding is the strided convolution of the other implementations."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import small_model
from vitral.model.patches import cut


@pytest.mark.parametrize("patch", [4, (2, 8), (8, 2)])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_equals_a_convolution(patch: int | tuple[int, int], channels: int) -> None:
    patches = small_model(patch_size=patch, channels=channels).patches
    images = torch.randn(2, channels, 16, 32)
    kernel = patches.project.weight.unflatten(1, (channels, *patches.patch_hw))
    convolved = F.conv2d(images, kernel, patches.project.bias, stride=patches.patch_hw)
    torch.testing.assert_close(patches(images), convolved.flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_order_within_and_of_patches() -> None:
    image = torch.arange(3.0 * 4 * 6).reshape(1, 3, 4, 6)
    found = cut(image, (2, 3))
    assert found.shape == (1, 4, 3, 2, 3)
    for patch in range(4):
        row, column = divmod(patch, 2)
        expected = image[0, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        assert torch.equal(found[0, patch], expected)

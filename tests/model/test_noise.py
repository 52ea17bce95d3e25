"""The noise of an image depends on its key and the layer, not on the batch around it."""

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import small_model
from vitral.model.noise import Dropout, Noisy, mix, noise_of

KEYS = [7, 2**63, 11, 5]
NOISE = dict(dropout=0.3, drop_path=0.4, depth=3)


def run(model: nn.Module, images: Tensor | list[Tensor], keys: list[int]) -> Tensor:
    with noise_of(keys):
        return model(images)


@pytest.mark.parametrize("noise", [NOISE, {"dropout": 0.3}, {"drop_path": 0.4}], ids=str)
def test_an_image_has_the_same_noise_in_every_batch(noise: dict[str, float]) -> None:
    model, images = small_model(**noise).train(), torch.randn(4, 3, 16, 16)
    whole = run(model, images, KEYS)
    for part in (slice(0, 1), slice(1, 4), slice(2, 4)):
        torch.testing.assert_close(run(model, images[part], KEYS[part]), whole[part])
    order = [2, 0, 3, 1]
    torch.testing.assert_close(run(model, images[order], [KEYS[index] for index in order]), whole[order])
    assert not torch.allclose(run(model, images, [key + 1 for key in KEYS]), whole)


def test_packed_images_keep_their_branches() -> None:
    """Dropout has no mask per image there; stochastic depth has."""
    model, images = small_model(drop_path=0.6, depth=3).train(), [torch.randn(3, 16, side) for side in (16, 8, 16, 12)]
    whole = run(model, images, KEYS)
    for index, image in enumerate(images):
        torch.testing.assert_close(run(model, [image], [KEYS[index]])[0], whole[index])


def test_recomputed_blocks_draw_the_same_noise() -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = small_model(**NOISE).train()
        model.gradient_checkpointing = checkpointing
        with noise_of(KEYS):
            model(torch.ones(4, 3, 16, 16)).square().sum().backward()
        gradients.append(model.patches.project.weight.grad)
    assert torch.equal(gradients[0], gradients[1])


def test_layers_and_keys_draw_different_masks_at_the_right_rate() -> None:
    layers = [module for module in small_model(**NOISE).modules() if isinstance(module, Noisy)]
    assert len({layer.layer for layer in layers}) == len(layers) == 1 + 3 * 5
    first, second = Dropout(0.25).train(), Dropout(0.25).train()
    second.layer = 1
    ones = torch.ones(200, 50, 20)
    with noise_of(range(200)):
        masks = first(ones), second(ones)
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0, 1 / 0.75])
        assert (mask == 0).float().mean().item() == pytest.approx(0.25, abs=0.005)  # 4 sigma
    both = ((masks[0] == 0) & (masks[1] == 0)).float().mean().item()
    assert both == pytest.approx(0.0625, abs=0.004)
    neighbors = ((masks[0][1:] == 0) & (masks[0][:-1] == 0)).float().mean().item()
    assert neighbors == pytest.approx(0.0625, abs=0.004)


def test_mixed_numbers_spread_evenly() -> None:
    numbers = [mix(0, step, item) for step in range(100) for item in range(100)]
    assert len(set(numbers)) == 10_000
    for bit in range(64):
        assert sum(number >> bit & 1 for number in numbers) == pytest.approx(5000, abs=250)  # 5 sigma


def test_without_keys_noise_comes_from_the_global_generator() -> None:
    x = torch.randn(4, 5, 6)
    torch.manual_seed(3)
    expected = nn.functional.dropout(x, 0.4)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.4).train()(x), expected)
    torch.manual_seed(3)
    assert torch.equal(run(Dropout(0.4).train(), x, []), expected)

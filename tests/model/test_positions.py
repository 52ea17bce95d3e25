"""Positions on the trained grid and on other grids."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import small_config, small_model
from vitral.errors import ConfigError
from vitral.model.positions import Positions, resample_rows, sincos_rows

METHODS: dict[str, dict[str, Any]] = {
    "bilinear-corners": dict(mode="bilinear", align_corners=True),
    "bicubic": dict(mode="bicubic", align_corners=False),
    "bicubic-antialias": dict(mode="bicubic", align_corners=False, antialias=True),
    "bicubic-corners": dict(mode="bicubic", align_corners=True),
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
@pytest.mark.parametrize("to", [(7, 7), (2, 9), (1, 1), (4, 4), (24, 3)])
def test_resampling_is_interpolation(method: Any, grid: tuple[int, int], to: tuple[int, int]) -> None:
    table = torch.randn(grid[0] * grid[1], 8)
    maps = table.T.unflatten(1, grid)[None]
    expected = F.interpolate(maps, size=to, **METHODS[method])[0].flatten(1).T
    torch.testing.assert_close(resample_rows(table, grid, to, method), expected, atol=2e-6, rtol=1e-5)


def test_bilinear_corners_equals_googles_zoom() -> None:
    """scipy.ndimage.zoom of order 1, by its definition: the corners of both grids coincide."""
    table = torch.randn(3 * 4, 2, dtype=torch.float64)
    old = table.unflatten(0, (3, 4))
    new = torch.empty(5, 9, 2, dtype=torch.float64)
    for row in range(5):
        for column in range(9):
            y, x = row * 2 / 4, column * 3 / 8
            y0, x0 = min(int(y), 1), min(int(x), 2)
            fy, fx = y - y0, x - x0
            upper = old[y0, x0] * (1 - fx) + old[y0, x0 + 1] * fx
            lower = old[y0 + 1, x0] * (1 - fx) + old[y0 + 1, x0 + 1] * fx
            new[row, column] = upper * (1 - fy) + lower * fy
    resampled = resample_rows(table.float(), (3, 4), (5, 9), "bilinear-corners")
    torch.testing.assert_close(resampled, new.flatten(0, 1).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("position", ["learned", "learned-2d", "sincos-2d"])
@pytest.mark.parametrize("registers", [0, 2])
def test_another_size_equals_a_resampled_table(method: Any, position: Any, registers: int) -> None:
    """Resampling in the forward pass equals a model built with the resampled table, bit for bit."""
    fields = dict(position=position, position_resample=method, registers=registers)
    model = small_model(**fields)
    images = torch.randn(2, 3, 24, 12)
    rows = model.positions[0].rows((6, 3), model.head.weight)
    loaded = small_model(registers=registers, image_size=(24, 12))
    loaded.load_state_dict(
        {
            **{name: value for name, value in model.state_dict().items() if "positions" not in name},
            "positions.0.table": torch.cat([rows[:1], rows[1 + registers :]]),
        }
    )
    assert torch.equal(model(images), loaded(images))


def test_position_grid_sets_the_grid_of_the_table() -> None:
    model = small_model(image_size=32, position_grid=(4, 4))
    assert model.positions[0].table.shape == (17, 48)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def test_the_interpolation_is_cached_and_the_table_is_not() -> None:
    model = small_model()
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        before = model(images)
    with torch.no_grad():
        model.positions[0].table.mul_(2)
    assert not torch.equal(before, model(images))
    model.train()(images).sum().backward()  # constants cached in inference mode still allow training
    assert model.positions[0].table.grad.abs().sum() > 0


def test_two_dimensional_positions_are_x_and_y_halves() -> None:
    positions = Positions(small_config(position="learned-2d", image_size=(8, 12)))
    rows = positions.rows((2, 3), positions.row_table)
    assert torch.equal(rows[0], positions.class_row[0])
    for row in range(2):
        for column in range(3):
            expected = torch.cat([positions.column_table[column], positions.row_table[row]])
            assert torch.equal(rows[1 + row * 3 + column], expected)


def test_sincos_equals_big_vision() -> None:
    rows, columns, width = 2, 3, 8
    table = sincos_rows(rows, columns, width, CPU)
    for y in range(rows):
        for x in range(columns):
            for k in range(width // 4):
                omega = 1 / 10_000 ** (k / (width // 4 - 1))
                expected = [f(v * torch.tensor(omega)) for v in (x, y) for f in (torch.sin, torch.cos)]
                torch.testing.assert_close(table[y * columns + x, k :: width // 4], torch.stack(expected))


def test_fixed_positions_skip_class_token_and_registers() -> None:
    model = small_model(position="sincos-2d", registers=2)
    assert not model.positions[0].rows((4, 4), model.head.weight)[:3].any()
    assert not list(model.positions.parameters())


def logits_of_table_8(model: Any, images: Tensor, position_at: str) -> Tensor:
    """Add positions once, or to the input of each layer from separate tables or a shared one."""
    x = model.prepend_extras(model.patches(images))
    for index, block in enumerate(model.blocks):
        if index == 0 or position_at != "stem":
            x = x + model.positions[index if position_at == "every-layer" else 0].table
        x = block(x, model.embed(images)[1])
    return model.head(model.norm(x)[:, 0])


@pytest.mark.parametrize(("position_at", "tables"), [("stem", 1), ("every-layer", 3), ("every-layer-shared", 1)])
def test_where_positions_are_added(position_at: Any, tables: int) -> None:
    model = small_model(position_at=position_at, depth=3)
    assert len(model.positions) == tables
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), logits_of_table_8(model, images, position_at))


def test_without_positions_the_order_of_patches_does_not_matter() -> None:
    model = small_model(position="none")
    images = torch.randn(1, 3, 16, 16)
    shuffled = images.unflatten(3, (4, 4)).flip(3).flatten(3)  # columns of patches in reverse
    torch.testing.assert_close(model(images), model(shuffled), atol=1e-5, rtol=1e-5)
    with_positions = small_model()
    assert (with_positions(images) - with_positions(shuffled)).abs().max() > 1e-3


def test_patches_and_positions_permuted_together_change_nothing() -> None:
    model = small_model()
    images = torch.randn(1, 3, 16, 16)
    expected = model(images)
    order = torch.randperm(16)
    with torch.no_grad():
        model.positions[0].table[1:] = model.positions[0].table[1:][order]
    patches = images.unflatten(3, (4, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    images = patches.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", ["learned", "sincos-2d", "relative"])
def test_cached_constants_do_not_depend_on_the_first_call(position: Any) -> None:
    """Another default dtype or fake tensors in the first call leave nothing behind for the next."""
    from torch._subclasses import FakeTensorMode

    model = small_model(position=position)
    images = torch.randn(1, 3, 20, 28)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(images)
    torch.set_default_dtype(torch.float64)
    try:
        model(images)
    finally:
        torch.set_default_dtype(torch.float32)
    logits = model(images)
    assert type(logits) is torch.Tensor
    assert logits.dtype == torch.float32


class FixedRows(nn.Module):
    """Positions from outside the package that return the same value whatever the images are."""

    def __init__(self, rows: Any):
        super().__init__()
        self.value = rows

    def forward(self, packing: Any, like: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("rows", "images", "facts"),
    [
        (torch.zeros(16, 48), (2, 3, 16, 16), r"FixedRows returned rows of shape \(16, 48\); expected \(17, 48\)"),
        (torch.zeros(17, 47), (2, 3, 16, 16), r"shape \(17, 47\); expected \(17, 48\): per image 1 .* \(4 x 4\)"),
        (torch.zeros(17, 48), [(3, 16, 16), (3, 8, 24)], r"expected \(30, 48\).*\(4 x 4 and 2 x 6\).*packing.groups"),
        (torch.zeros(3, 17, 48), (2, 3, 16, 16), r"shape \(3, 17, 48\)"),
        (None, (2, 3, 16, 16), "returned NoneType"),
    ],
)
def test_rows_of_a_replaced_module_that_do_not_match_the_tokens(rows: Any, images: Any, facts: str) -> None:
    model = small_model()
    model.positions = nn.ModuleList([FixedRows(rows)])
    inputs = [torch.zeros(shape) for shape in images] if isinstance(images, list) else torch.zeros(images)
    with pytest.raises(ConfigError, match=facts):
        model(inputs)


@pytest.mark.parametrize("shape", [(17, 48), (1, 48), (2, 17, 48), (17, 1)])
def test_rows_of_a_replaced_module_are_added(shape: tuple[int, ...]) -> None:
    model, rows = small_model(), torch.randn(shape)
    images = torch.randn(2, 3, 16, 16)
    plain = model.embed(images)[0] - model.positions[0].table
    model.positions = nn.ModuleList([FixedRows(rows)])
    torch.testing.assert_close(model.embed(images)[0], plain + rows)


def test_positions_are_a_list_of_modules() -> None:
    model = small_model()
    model.positions = FixedRows(torch.zeros(17, 48))
    with pytest.raises(ConfigError, match=r"must be an nn.ModuleList \(got FixedRows\)"):
        model(torch.zeros(2, 3, 16, 16))

"""The choice between DDP, FSDP and gradient checkpointing, and its reason."""

from itertools import pairwise
from typing import Any

from vitral.model.sizes import named_config
from vitral.scaling.hardware import DEVICES
from vitral.scaling.memory import RESERVE
from vitral.scaling.strategy import Request, Strategy, choose_strategy


def choose(model: str, *, devices: int, batch: int, gigabytes: int = 80, **more: Any) -> Strategy:
    config, device = named_config(model), DEVICES["a100"]
    capacity = gigabytes * 10**9
    request = Request(
        config=config, device=device, name="a100", devices=devices, capacity=capacity, batch=batch, **more
    )
    return choose_strategy(request)


def test_the_simplest_way_that_fits_is_chosen() -> None:
    assert choose("vit-b16", devices=1, batch=64).parallel == "none"
    small = choose("vit-b16", devices=8, batch=256)
    assert (small.parallel, small.checkpointing) == ("ddp", False)
    assert "fits on each device" in small.reason
    assert choose("vit-b16", devices=8, batch=256, parallel="fsdp").parallel == "fsdp"


def test_a_model_that_does_not_fit_is_sharded() -> None:
    large = choose("vit-G14", devices=64, batch=8, gigabytes=24)
    assert (large.parallel, large.checkpointing) == ("fsdp", False)
    assert "sharded" in large.reason
    larger = choose("vit-G14", devices=64, batch=64, gigabytes=24)
    assert (larger.parallel, larger.checkpointing) == ("fsdp", True)
    assert "computed again" in larger.reason
    assert larger.chosen is not None
    assert larger.chosen.memory.peak <= 24e9 * (1 - RESERVE)


def test_too_much_for_the_devices() -> None:
    nothing = choose("vit-G14", devices=1, batch=1, gigabytes=8)
    assert (nothing.parallel, nothing.chosen, nothing.growth, nothing.seconds(100)) == (None, None, (), None)
    assert "not even one image" in nothing.reason
    batch = choose("vit-b16", devices=1, batch=10**6, gigabytes=8)
    assert batch.parallel is None
    assert f"at most {max(option.largest_batch for option in batch.options)}" in batch.reason


def test_recorded_attention_is_not_checkpointed() -> None:
    strategy = choose("vit-b16", devices=8, batch=8, attention="recorded")
    assert [option.checkpointing for option in strategy.options] == [False, False]


def test_growth_goes_to_a_thousand_devices() -> None:
    growth = choose("vit-b16", devices=24, batch=64).growth
    assert [prediction.devices for prediction in growth] == [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024]
    assert growth[0].efficiency > 0.99
    assert all(earlier.efficiency >= later.efficiency for earlier, later in pairwise(growth))


def test_a_known_speed_replaces_the_data_sheet() -> None:
    known = choose("vit-b16", devices=1, batch=64, images_per_second=100.0)
    assert known.chosen is not None
    assert round(known.chosen.prediction.images_per_second) == 100
    slower = next(option for option in known.options if option.checkpointing)
    assert round(slower.prediction.images_per_second) == 75  # the forward pass runs twice

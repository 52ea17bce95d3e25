"""The prediction of many devices: limits that arithmetic gives, a simulation of failures, and published runs."""

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from vitral.model.config import ViTConfig
from vitral.model.sizes import named_config
from vitral.planning import LARGE
from vitral.scaling.hardware import DEVICES, Assumptions, Device
from vitral.scaling.memory import Setup
from vitral.scaling.published import PUBLISHED, PublishedRun
from vitral.scaling.simulation import availability, best_interval, expected_maximum, predict, simulate_run

IDEAL = Assumptions(jitter=0, latency=0, device_hours_between_failures=1e12, save_wait=0)


def test_one_device_has_the_speed_of_its_data_sheet() -> None:
    config, device = named_config("vit-b16"), DEVICES["a100"]
    prediction = predict(config, Setup(), device, 64, IDEAL)
    assert prediction.images_per_second == pytest.approx(312e12 * 0.4 / (3 * 35.13e9), rel=0.01)
    assert prediction.efficiency == pytest.approx(1, abs=1e-6)
    again = predict(config, Setup(checkpointing=True), device, 64, IDEAL)
    assert again.images_per_second == pytest.approx(0.75 * prediction.images_per_second)


def test_communication_takes_bytes_by_bandwidth_and_can_be_hidden() -> None:
    config, device = named_config("vit-b16"), DEVICES["a100"]
    setup, full = Setup(parallel="ddp", devices=8), replace(IDEAL, link_efficiency=1.0)
    visible = predict(config, setup, device, 64, replace(full, overlap=0.0))
    assert visible.communication_seconds == pytest.approx(2 * 86_567_656 * 4 * 7 / 8 / device.inside, rel=1e-6)
    assert visible.step_seconds == pytest.approx(visible.compute_seconds + visible.communication_seconds)
    hidden = predict(config, setup, device, 64, replace(full, overlap=1.0))
    assert hidden.step_seconds == pytest.approx(hidden.compute_seconds)
    slow = replace(device, inside=1e9, outside=1e9)
    assert predict(config, setup, slow, 64, full).efficiency < 0.5


@pytest.mark.parametrize("count", [2, 8, 64, 1024])
def test_the_slowest_of_many(count: int) -> None:
    drawn = np.random.default_rng(0).standard_normal((2000, count)).max(axis=1).mean()
    assert expected_maximum(count) == pytest.approx(drawn, abs=0.06)
    assert expected_maximum(1) == 0


@pytest.mark.parametrize("between", [3600.0, 20_000.0])
def test_failures_cost_what_a_simulation_of_them_costs(between: float) -> None:
    save, restart, seconds = 5.0, 60.0, 300_000.0
    interval = best_interval(save, between)
    settings = dict(interval=interval, save=save, between=between, restart=restart)
    measured = mean(seconds / simulate_run(seconds, **settings, seed=seed) for seed in range(40))
    assert availability(**settings) == pytest.approx(measured, abs=0.02)


def test_the_interval_of_young_is_the_best() -> None:
    save, between, restart = 10.0, 10_000.0, 60.0
    best = best_interval(save, between)
    values = [availability(best * factor, save, between, restart) for factor in (0.5, 0.8, 1.0, 1.25, 2.0)]
    assert max(values) == values[2]


# ---- published runs ----


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_predictions_are_near_published_figures(run: PublishedRun) -> None:
    assert run.predicted == pytest.approx(run.published, abs=run.tolerance), run.source


def test_the_size_of_vit_22b() -> None:
    from vitral.model.cost import count_cost

    config = ViTConfig(**LARGE["vit-22b14"], num_classes=0)
    assert count_cost(config).parameters == pytest.approx(21.743e9, rel=0.005)  # table 1 of the paper


def test_more_devices_than_one_machine_use_the_slower_links() -> None:
    config, device = named_config("vit-l16"), Device(flops=1e14, gibibytes=80, inside=3e11, outside=1e9)
    one, two = (predict(config, Setup(parallel="ddp", devices=n), device, 32, IDEAL) for n in (8, 16))
    assert two.communication_seconds > 10 * one.communication_seconds

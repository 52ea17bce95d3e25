"""Planned memory and traffic, against the peaks and the socket counters of real processes."""

import sys

import pytest

from benchmarks.memory import Case, measure
from vitral.model.config import ViTConfig
from vitral.model.sizes import named_config
from vitral.scaling.communication import bytes_per_step
from vitral.scaling.memory import RESERVE, Setup, estimate_memory, largest_batch

MAX_ERROR = 0.15


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "case",
    [
        Case(model="vit-ti16", batch=8),
        Case(model="vit-ti16", batch=2, parallel="ddp"),
        Case(model="vit-ti16", batch=2, parallel="fsdp"),
    ],
    ids=lambda case: case.parallel,
)
def test_memory_and_traffic_are_those_of_real_processes(case: Case) -> None:
    row = measure(case)
    assert row["planned_bytes"] == pytest.approx(row["measured_bytes"], rel=MAX_ERROR)
    # Beside the tensors, gloo sends headers and our processes exchange a few small values.
    assert row["planned_sent"] == pytest.approx(row["sent_bytes"], rel=0.02)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    config, capacity = named_config("vit-l16"), 80 * 10**9
    for setup in (
        *(Setup(), Setup(precision="bfloat16"), Setup(checkpointing=True), Setup(recorded=True)),
        *(Setup(parallel="ddp", devices=8), Setup(parallel="fsdp", devices=8, precision="bfloat16")),
    ):
        batch = largest_batch(config, setup, capacity)
        assert batch > 0
        assert estimate_memory(config, setup, batch).peak <= capacity * (1 - RESERVE)
        assert estimate_memory(config, setup, batch + 1).peak > capacity * (1 - RESERVE)
    assert largest_batch(config, Setup(), 10**9) == 0


def test_shards_divide_what_ddp_repeats() -> None:
    config = named_config("vit-G14")
    whole, parts = (estimate_memory(config, Setup(parallel=kind, devices=8), 1) for kind in ("ddp", "fsdp"))
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name) / 8, rel=1e-6)
    assert parts.activations == whole.activations
    assert parts.peak < whole.peak / 4


def test_more_options_need_more_memory() -> None:
    config = named_config("vit-s16")
    plain = estimate_memory(config, Setup(), 8)
    assert estimate_memory(config, Setup(ema=True), 8).peak == plain.peak + plain.parameters
    assert estimate_memory(config, Setup(optimizer="sgd"), 8).optimizer == plain.optimizer // 2
    assert estimate_memory(config, Setup(precision="bfloat16"), 8).activations < 0.65 * plain.activations
    assert estimate_memory(config, Setup(recorded=True), 8).activations > plain.activations


def test_traffic_of_a_ring() -> None:
    config = named_config("vit-b16")
    assert isinstance(config, ViTConfig)
    weights = 86_567_656 * 4
    assert bytes_per_step(config, Setup()).sent == 0
    assert bytes_per_step(config, Setup(parallel="ddp", devices=1)).sent == 0
    assert bytes_per_step(config, Setup(parallel="ddp", devices=4)).sent == 2 * weights * 3 // 4
    sharded = bytes_per_step(config, Setup(parallel="fsdp", devices=4))
    assert sharded.reduce_scatter == weights * 3 // 4
    assert sharded.all_gather == pytest.approx(2 * sharded.reduce_scatter, rel=0.02)

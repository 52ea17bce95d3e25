"""Estimates against the paper's own column of exaFLOPs."""

import json
import subprocess
import sys

import pytest

from vitral.cli.models import plan as plan_command
from vitral.errors import ConfigError
from vitral.planning import DAY, DEVICES, JFT, TABLE_2, TABLE_6, UTILIZATION, parse_bytes, parse_count, plan

EXACT = ("vit-b16", "vit-l32", "vit-l16", "vit-h14")


@pytest.mark.parametrize(("name", "epochs"), list(TABLE_6))
def test_exaflops_match_table_6(name: str, epochs: int) -> None:
    result = plan(name, images=JFT, epochs=epochs)
    assert result.paper_exaflops == TABLE_6[name, epochs]
    tolerance = 0.01 if name in EXACT else 0.03 if name == "vit-b32" else 0.05
    assert result.training_exaflops == pytest.approx(result.paper_exaflops, rel=tolerance)


@pytest.mark.parametrize(("name", "images", "epochs"), list(TABLE_2))
def test_core_days_are_close_to_table_2(name: str, images: int, epochs: int) -> None:
    result = plan(name, images=images, epochs=epochs)
    assert result.paper_core_days == TABLE_2[name, images, epochs]
    assert result.tpuv3_core_days == pytest.approx(result.paper_core_days, rel=0.25)


def test_only_runs_of_the_paper_show_its_numbers() -> None:
    for change in ({"images": 10**6}, {"epochs": 8}, {"image_size": 384}):
        result = plan("vit-l16", **{"images": JFT, "epochs": 7, **change})  # type: ignore[arg-type]
        assert result.paper_exaflops is None


def test_time_follows_from_speed() -> None:
    single = plan("vit-b16", images=1_000_000, epochs=90, device="a100").estimates[0]
    assert single.seconds == pytest.approx(3 * 35.13e9 * 90e6 / (312e12 * UTILIZATION), rel=0.01)
    eight = plan("vit-b16", images=1_000_000, epochs=90, device="a100", devices=8).estimates[0]
    assert eight.seconds == pytest.approx(single.seconds / 8)
    given = plan("vit-b16", images=86_400, epochs=10, images_per_second=10.0).estimates[0]
    assert given.seconds == DAY
    assert given.largest_batch is None
    assert {estimate.device for estimate in plan("vit-b16", images=1, epochs=1).estimates} == set(DEVICES)


def test_cost_follows_from_time_and_price() -> None:
    (estimate,) = plan("vit-b16", images=3600, epochs=10, images_per_second=5.0, devices=2, price=1.5).estimates
    assert (estimate.seconds, estimate.price, estimate.cost) == (3600, 1.5, 3.0)
    assert {estimate.cost for estimate in plan("vit-b16", images=1, epochs=1).estimates} == {None}


def test_the_command_shows_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {
        "model": "vit-b16",
        "images": "3600",
        "epochs": 10.0,
        "images_per_second": 5.0,
        "devices": 2,
        "price": 1.5,
    }
    plan_command(**arguments, format="json")  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["estimates"][0]["cost"] == 3.0
    plan_command(**arguments)  # type: ignore[arg-type]
    assert "3.00" in capsys.readouterr().out


def test_here_times_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0, 1, 10, 14, 20, 22, 30, 38])  # four steps; the first is a warm-up
    monkeypatch.setattr("vitral.planning.perf_counter", lambda: float(next(seconds)))
    estimate = plan("vit-pico7", images=1000, epochs=1, device="here", batch_size=8).estimates[0]
    assert estimate.images_per_second == 8 / 2


def test_a_price_needs_a_device() -> None:
    with pytest.raises(ConfigError, match="one kind of device"):
        plan("vit-b16", images=1000, epochs=1, price=2.0)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    largest = plan("vit-l16", images=1, epochs=1, device="v100").estimates[0].largest_batch
    assert largest is not None
    memory = DEVICES["v100"].gibibytes * 2**30
    assert plan("vit-l16", images=1, epochs=1, batch_size=largest).memory_bytes <= memory
    assert plan("vit-l16", images=1, epochs=1, batch_size=largest + 1).memory_bytes > memory
    assert plan("vit-G14", images=1, epochs=1, device="tpuv3-core").estimates[0].largest_batch == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("303M", JFT), ("1.28m", 1_280_000), ("50k", 50_000), ("4,000", 4000), ("2 G", 2 * 10**9)),
        *(("1_281_167", 1_281_167), ("303,000,000", JFT), ("1,280.5k", 1_280_500), ("1e6", 10**6)),
    ],
)
def test_parse_count(text: str, number: int) -> None:
    assert parse_count(text, "--images") == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "-5",
        "0",
        "1e6x",
        "NaN",
        "9" * 400,
        "0." + "1" * 400,
        "999999999999G",
        "1,28M",
        "1,,000",
        "12,34",
        "0.5",
        "1.5",
    ],
)
def test_parse_count_refuses_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="--images must be an integer from 1 to"):
        parse_count(text, "--images")


def test_invalid_arguments() -> None:
    for settings in (
        *({"epochs": 0}, {"epochs": float("nan")}, {"devices": -1}, {"batch_size": 0}),
        *({"batch_size": 2.5}, {"devices": 1.0}, {"images": 2.5}, {"images": 10**400}, {"images": True}),
        *({"images_per_second": 0.0}, {"images_per_second": 1e-320}, {"price": 0.0}, {"price": float("inf")}),
    ):
        with pytest.raises(ConfigError, match=rf"^{next(iter(settings))} must be"):
            plan("vit-b16", **{"images": 10, "epochs": 1, **settings})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a100"):
        plan("vit-b16", images=10, epochs=1, device="a1000")


def test_the_command_chooses_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = dict(model="vit-g14", devices=64, memory="80GB", batch_size=64, device="a100", price=2.0)
    plan_command(**arguments, format="json")  # type: ignore[arg-type]
    printed = json.loads(capsys.readouterr().out)
    strategy = printed["strategy"]
    assert (strategy["parallel"], strategy["capacity"], strategy["devices"]) == ("ddp", 80 * 10**9, 64)
    assert {"parameters", "gradients", "optimizer", "activations", "buffers", "peak"} == set(
        strategy["options"][0]["memory"]
    )
    assert strategy["growth"][-1]["devices"] == 1024
    assert printed["predicted_seconds"] > printed["estimates"][0]["seconds"]
    assert printed["predicted_cost"] == pytest.approx(2 * 64 * printed["predicted_seconds"] / 3600)
    plan_command(**arguments)  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "Choice: DDP, because" in text
    assert "A prediction, not a measurement" in text


def test_sizes_that_only_a_plan_knows() -> None:
    for name in ("vit-22b", "ViT-22B/14", "vit-22b14"):
        assert plan(name, images=1).model == "vit-22b14"
    assert plan("vit-e", images=1).parameters == pytest.approx(3.9e9, rel=0.05)


def test_attention_changes_the_memory() -> None:
    peaks = [
        plan("vit-b16", images=1, batch_size=64, attention=kind).strategy.options[0].memory.peak
        for kind in ("fused", "recorded", "axial")
    ]
    assert peaks == sorted(peaks)
    with pytest.raises(ConfigError, match="attention must be one of fused, recorded, axial"):
        plan("vit-b16", images=1, attention="sparse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "number"), [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("0.5gb", 5 * 10**8), ("512MB", 512 * 10**6)]
)
def test_parse_bytes(text: str, number: int) -> None:
    assert parse_bytes(text, "--memory") == number


@pytest.mark.parametrize("text", ["", "80", "GB", "-1GB", "0GB", "1e9GB", "80XB", "999999TB"])
def test_parse_bytes_refuses_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory must be a number of bytes"):
        parse_bytes(text, "--memory")


def test_the_command_does_not_import_torch() -> None:
    script = (
        "import sys; from vitral.cli.main import main\n"
        "try: main(['plan', '--model', 'ViT-L/16', '--images', '303M', '--epochs', '7', '--format', 'json'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    printed = json.loads(result.stdout)
    assert printed["training_exaflops"] == pytest.approx(783, rel=0.01)
    assert {"parameters", "forward_flops", "memory_bytes"} <= printed.keys()

"""Devices and precisions are chosen with a reason."""

import pytest
import torch

from vitral import ConfigError
from vitral.devices import choose_device, choose_precision, normalize_device


def test_automatic_choice_has_a_reason() -> None:
    choice = choose_device()
    assert torch.empty(1, device=choice.value).device.type == choice.value.split(":")[0]
    assert choice.reason


def test_cpu_is_always_available() -> None:
    assert choose_device("cpu").value == "cpu"
    assert choose_precision("cpu").value in ("float32", "bfloat16")


@pytest.mark.parametrize("device", ["tpu", "cpu:x", "cpu:1", "auto:0", "cuda:", "cuda:1x", "mps:1", "CPU", ""])
def test_unknown_device(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device must be one of auto, cpu, cuda, mps.*got '{device}'"):
        choose_device(device)


def test_number_zero_is_redundant_for_cpu_and_mps() -> None:
    assert [normalize_device(name) for name in ("cpu:0", "mps:0", "cuda:0", "auto")] == ["cpu", "mps", "cuda:0", "auto"]
    assert choose_device("cpu:0").value == "cpu"


def test_number_of_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1").value == "cuda:1"
    with pytest.raises(ConfigError, match="device='cuda:2' does not exist .*from 0 to 1"):
        choose_device("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_unavailable_device() -> None:
    with pytest.raises(ConfigError, match="device='cuda:1' is not available.*Use device='cpu'"):
        choose_device("cuda:1")

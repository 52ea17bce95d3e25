"""Where to compute, with the reason."""

import pytest
import torch

from vitral import ConfigError
from vitral.devices import choose_device, choose_precision, device_name


def test_automatic_choice_has_a_reason() -> None:
    choice = choose_device()
    assert torch.empty(1, device=choice.value).device.type == choice.value.split(":")[0]
    assert choice.reason


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu").value == "cpu"
    assert choose_precision("cpu").value in ("float32", "bfloat16")


@pytest.mark.parametrize("word", ["tpu", "cpu:x", "cpu:1", "auto:0", "cuda:", "cuda:1x", "mps:1", "CPU", ""])
def test_unknown_device(word: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{word}' must be one of auto, cpu, cuda, mps"):
        choose_device(word)


def test_the_only_one_of_its_kind_needs_no_number() -> None:
    assert [device_name(word) for word in ("cpu:0", "mps:0", "cuda:0", "auto")] == ["cpu", "mps", "cuda:0", "auto"]
    assert choose_device("cpu:0").value == "cpu"


def test_a_number_that_no_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1").value == "cuda:1"
    with pytest.raises(ConfigError, match="device='cuda:2' is not here: there are 2"):
        choose_device("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message where there is no GPU")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="device='cuda:1' is not usable.*Use device='cpu'"):
        choose_device("cuda:1")

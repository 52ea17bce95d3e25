"""Where to compute, with the reason."""

import pytest
import torch

from vitral import ConfigError
from vitral.devices import choose_device, choose_precision


def test_automatic_choice_has_a_reason() -> None:
    choice = choose_device()
    assert torch.empty(1, device=choice.value).device.type == choice.value.split(":")[0]
    assert choice.reason


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu").value == "cpu"
    assert choose_precision("cpu").value in ("float32", "bfloat16")


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match="device='tpu' must be one of auto, cpu, cuda, mps"):
        choose_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message where there is no GPU")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="device='cuda:1' is not usable.*Use device='cpu'"):
        choose_device("cuda:1")

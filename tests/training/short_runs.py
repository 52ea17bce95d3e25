"""Short runs for the tests of training: their settings, how to interrupt them and how to compare them."""

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from vitral.training.entry import train_events
from vitral.training.events import Event, Interrupted, Stepped, Warned
from vitral.training.state import load_state

TINY: dict[str, Any] = dict(
    model="vit-pico4",
    network=dict(width=48, depth=2, heads=3, mlp_width=96),
    image_size=16,
    batch_size=8,
    epochs=2,
    workers=0,
    device="cpu",
    optim=dict(lr=2e-3),
)
Kind = TypeVar("Kind")


def train(data: str | Path, out: Path, **settings: Any) -> list[Event]:
    """Train with the settings of TINY and return all events."""
    return list(train_events(data, out=out, **{**TINY, **settings}))


def last(events: Iterable[Event], kind: type[Kind]) -> Kind:
    return [event for event in events if isinstance(event, kind)][-1]


def warnings_of(events: Iterable[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Warned)]


def interrupt_at(step: int, events: Iterator[Event]) -> Interrupted:
    """Send this process a SIGTERM right after a step, and return the event that ends the run."""
    event = None
    for event in events:
        if isinstance(event, Stepped) and event.step == step:
            signal.raise_signal(signal.SIGTERM)
    assert isinstance(event, Interrupted), f"the run has no step {step}"
    return event


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Assert the same names and the same bits."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_same_run(first: Path, second: Path) -> None:
    """Assert that two runs kept the same weights and ended with the same weights, moments and averages."""
    assert_equal(read_weights(first), read_weights(second))
    states = [load_state(folder / "state") for folder in (first, second)]
    assert states[0] is not None
    assert states[1] is not None
    assert states[0][0].step == states[1][0].step
    assert_equal(states[0][1], states[1][1])

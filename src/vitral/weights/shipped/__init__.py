"""Weights that come with vitral, by name; each has a model card beside it."""

from pathlib import Path

SHIPPED = {"vit-cifar10": "ten classes of CIFAR-10, 32 pixels"}
_HERE = Path(__file__).parent


def shipped_weights(name: str) -> Path | None:
    return _HERE / f"{name}.safetensors" if name in SHIPPED else None

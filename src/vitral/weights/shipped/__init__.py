"""Models that ship with vitral, by name. Each has a model card beside its weights."""

from pathlib import Path

SHIPPED = {"vit-cifar10": "ten classes of CIFAR-10, 32 pixels"}


def shipped_weights(name: str) -> Path | None:
    """Return the path of a shipped model, or None for another name."""
    return Path(__file__).with_name(f"{name}.safetensors") if name in SHIPPED else None

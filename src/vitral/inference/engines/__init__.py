"""Engines: programs that compute logits and features of uint8 images, faster than eager torch where they can.

An engine takes images of one size (an exported file possibly of many) in batches of any size. Everything else goes to
eager torch, which is the reference: an engine is accepted only if its outputs agree with it (`agreement`). This module
does not import torch.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np

EngineName = Literal["torch", "compiled", "onnxruntime", "openvino"]
ENGINES: tuple[EngineName, ...] = ("torch", "compiled", "onnxruntime", "openvino")
PRECISIONS = ("float32", "bfloat16", "float16", "int8")
NEAR_TIE = 0.95
"""A label is nearly as probable as another one from this fraction of its probability on."""


class Engine(Protocol):
    """Compute the outputs of one model for uint8 (B, C, H, W) images."""

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def size(self) -> tuple[int, int] | None:
        """Return the (height, width) of the images that the engine takes; None for a file that takes several sizes."""
        ...

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return (B, K) logits in float32."""
        ...

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return (B, D), the input of the head, in float32."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """The agreement with float32 torch that an engine needs to be accepted."""

    max_difference: float = 0.02
    """Largest difference of any probability."""
    min_top1: float = 0.98
    """Smallest fraction of images with the same most probable label, or one that is nearly as probable."""
    max_drop: float = 0.5
    """Points of top-1 that int8 may lose, measured on images that it was not calibrated with."""

    def __str__(self) -> str:
        return f"probabilities within {self.max_difference:g} and top-1 agreement of at least {self.min_top1:.0%}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far the outputs of an engine are from those of float32 torch."""

    difference: float
    """Largest difference of any probability, or of any feature relative to the largest, without a head."""
    top1: float
    """Fraction of images with the same most probable label, or one that float32 torch finds nearly as probable."""
    images: int

    def passes(self, gate: Gate) -> bool:
        """Return whether the engine may be used. NaN never passes."""
        return self.difference <= gate.max_difference and self.top1 >= gate.min_top1

    def __str__(self) -> str:
        same = f"top-1 agrees on {self.top1:.0%} of {self.images} images"
        return f"probabilities within {self.difference:.1e}, {same}"


def compare_outputs(outputs: np.ndarray, expected: np.ndarray, *, kind: str) -> Agreement:
    """Compare (N, K) outputs with those of float32 torch.

    `kind` is what the outputs are: logits of one label per image, logits of several (multi-label), or features.
    """
    if kind == "features":
        difference = float(np.abs(outputs - expected).max() / max(1e-6, np.abs(expected).max()))
        return Agreement(difference=difference, top1=1.0, images=len(outputs))
    ours, theirs = (to_probabilities(values, multi_label=kind == "multi-label") for values in (outputs, expected))
    of_our_label = np.take_along_axis(theirs, ours.argmax(1)[:, None], axis=1)[:, 0]
    same = float((of_our_label >= NEAR_TIE * theirs.max(1)).mean())
    return Agreement(difference=float(np.abs(ours - theirs).max()), top1=same, images=len(outputs))


def to_probabilities(logits: np.ndarray, *, multi_label: bool) -> np.ndarray:
    """Return (B, K) probabilities: a softmax, or a sigmoid per label for multi-label models."""
    if multi_label:
        return 1 / (1 + np.exp(-logits.clip(-80, 80)))
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


_PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": (),
    "compiled": (),
    "onnxruntime": ("onnxruntime", "onnxscript"),
    "openvino": ("openvino",),
}


def missing_packages(engine: str) -> list[str]:
    """Return the packages that an engine needs and that are not installed."""
    return [package for package in _PACKAGES[engine] if find_spec(package) is None]


def describe_engine(engine: Engine) -> str:
    """Return the name and precision of an engine, as results report it."""
    return f"{engine.name} {engine.precision}"

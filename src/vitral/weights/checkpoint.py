"""Checkpoint: a model with everything that must not get lost on the way."""

from dataclasses import dataclass

from vitral.model.network import Network
from vitral.preprocess import IMAGENET_MEAN, IMAGENET_STD, Interpolation, Preprocess
from vitral.weights.report import Report


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What ``vitral.load`` gives and ``vitral.save`` takes."""

    model: Network
    preprocess: Preprocess
    """How a picture becomes the model's input."""
    labels: tuple[str, ...] | None = None
    """A name for each logit, where they are known."""
    multi_label: bool = False
    """Whether a picture may have several labels: each logit then is a yes or no of its own."""
    report: Report | None = None
    """What became of every tensor of the file."""


def default_preprocess(model: Network) -> Preprocess:
    """For a model that never had one: Google's."""
    preprocess = Preprocess(size=model.config.image_hw, antialias=True)
    return preprocess.with_channels(model.config.channels)


def google_preprocess(size: tuple[int, int]) -> Preprocess:
    """vit_jax: squashed by TensorFlow's plain bilinear resize, pixels from -1 to 1."""
    return Preprocess(size=size, resize="squash", interpolation="bilinear", antialias=False)


def imagenet_preprocess(size: tuple[int, int], interpolation: Interpolation) -> Preprocess:
    """torchvision, DeiT, MAE and DINOv2: the short side to 256 for 224, centre crop, ImageNet's mean and deviation."""
    return Preprocess(
        size=size,
        resize="crop",
        crop_fraction=0.875,
        interpolation=interpolation,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )

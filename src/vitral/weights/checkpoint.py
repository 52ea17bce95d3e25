"""Checkpoint: a model with everything that must not get lost on the way."""

from dataclasses import asdict, dataclass, field
from typing import Any

from vitral.model.network import Network
from vitral.preprocess import IMAGENET_MEAN, IMAGENET_STD, Interpolation, Preprocess


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Every tensor of the file is in taken, renamed, resized or ignored, and every new one of the model in fresh."""

    source: str
    dialect: str
    format: str
    taken: tuple[str, ...] = ()
    """Under the same name."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Their name: ours."""
    resized: dict[str, str] = field(default_factory=dict)
    """Their name: our name and what was done."""
    fresh: dict[str, str] = field(default_factory=dict)
    """Our name: why it is not from the file."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Their name: why it is not needed."""
    assumed: tuple[str, ...] = ()
    """What the file does not tell."""
    warnings: tuple[str, ...] = ()
    """What may surprise."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = [f"{len(self.taken)} taken"]
        counts += [f"{len(part)} {name}" for name, part in self._parts().items() if part]
        lines = [f"{self.source}: {self.dialect} ({self.format}), {', '.join(counts)}"]
        for name, part in self._parts().items():
            if name != "renamed":
                lines += [f"  {name} {tensor}: {why}" for tensor, why in part.items()]
        lines += [f"  assumed {line}" for line in self.assumed]
        lines += [f"  warning: {line}" for line in self.warnings]
        return "\n".join(lines)

    def _parts(self) -> dict[str, dict[str, str]]:
        return {"renamed": self.renamed, "resized": self.resized, "fresh": self.fresh, "ignored": self.ignored}


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
    report: LoadReport | None = None
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

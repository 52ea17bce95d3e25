"""Checkpoint: a model with its preprocessing, its labels and the report of how it was loaded."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vitral.errors import ConfigError, short_repr
from vitral.files import as_text
from vitral.preprocess import Preprocess

if TYPE_CHECKING:
    from vitral.model.network import Network


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Report what became of every tensor.

    Each tensor of the file is listed under unchanged, renamed, resized or ignored. Each tensor of the model that does
    not come from the file is listed under initialized.
    """

    source: str
    dialect: str
    format: str
    unchanged: tuple[str, ...] = ()
    """Tensors with the same name in the file and in the model."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Name in the file: name in the model."""
    resized: dict[str, str] = field(default_factory=dict)
    """Name in the file: name in the model and how it was resized."""
    initialized: dict[str, str] = field(default_factory=dict)
    """Name in the model: why its values are not from the file."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Name in the file: why the model does not need it."""
    assumed: tuple[str, ...] = ()
    """Choices that the file does not state."""
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        listed = {"resized": self.resized, "initialized": self.initialized, "ignored": self.ignored}
        counts = [f"{len(self.unchanged)} unchanged"]
        counts += [f"{len(entries)} {name}" for name, entries in {"renamed": self.renamed, **listed}.items() if entries]
        lines = [f"{self.source}: {self.dialect} ({self.format}), {', '.join(counts)}"]
        for name, entries in listed.items():
            lines += [f"  {name} {tensor}: {reason}" for tensor, reason in entries.items()]
        lines += [f"  assumed {sentence}" for sentence in self.assumed]
        lines += [f"  warning: {sentence}" for sentence in self.warnings]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model and everything that must travel with it: ``vitral.load`` returns it and ``vitral.save`` takes it."""

    model: "Network"
    preprocess: Preprocess
    """How to turn an image into the model's input."""
    labels: tuple[str, ...] | None = None
    """One name per logit, if known."""
    multi_label: bool = False
    """An image may have several labels: each logit is a separate yes or no."""
    report: LoadReport | None = None
    """Report of how the model was loaded."""

    def __post_init__(self) -> None:
        if not isinstance(self.preprocess, Preprocess):
            raise ConfigError(f"preprocess must be a Preprocess (got {type(self.preprocess).__name__}).")
        config = getattr(self.model, "config", None)
        if config is None:
            return
        if self.preprocess.channels != config.channels:
            problem = f"The preprocessing has {self.preprocess.channels} channels, but the model has {config.channels}."
            raise ConfigError(problem, hint=f"Pass preprocess.with_channels({config.channels}).")
        if self.labels is not None:
            object.__setattr__(self, "labels", check_labels(self.labels, config.num_classes))


def check_labels(labels: object, classes: int) -> tuple[str, ...]:
    """Return labels as printable text, or raise ConfigError unless there is one per class."""
    if not isinstance(labels, list | tuple):
        raise ConfigError(f"labels must be a list or tuple with one name per class (got {short_repr(labels)}).")
    if len(labels) != classes:
        problem = f"The model has {classes} classes, but there are {len(labels)} labels."
        raise ConfigError(problem, hint="Pass one label per class.")
    return tuple(as_text(str(label)) for label in labels)


def default_preprocess(model: "Network") -> Preprocess:
    """Return the preprocessing of a model that has none yet: Google's, antialiased."""
    preprocess = Preprocess(size=model.config.image_hw, antialias=True)
    return preprocess.with_channels(model.config.channels)

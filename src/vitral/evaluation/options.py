"""The options of `vitral.evaluate` as one checked value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitral.errors import ConfigError, DataError, check_int
from vitral.weights.checkpoint import Checkpoint

MAX_BATCH_SIZE, MAX_WORKERS = 2**31, 1024

ModelSource = str | Path | Checkpoint
DataSource = str | Path


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    """The options of `evaluate`, checked."""

    few_shot: int | Sequence[int] | None = None
    knn: int | None = None
    against: ModelSource | None = None
    against_label_map: str | Path | None = None
    temperature: bool = False
    label_map: str | Path | None = None
    real: str | Path | None = None
    image_size: int | tuple[int, int] | None = None
    device: str = "auto"
    precision: str = "float32"
    batch_size: int = 64
    workers: int = 0
    cache: bool = True

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, minimum=1, maximum=MAX_BATCH_SIZE)
        check_int("workers", self.workers, minimum=0, maximum=MAX_WORKERS)
        for shots in self.shots:
            check_int("few_shot", shots, minimum=1)
        if self.knn is not None:
            check_int("knn", self.knn, minimum=1)
        if self.against_label_map is not None and self.against is None:
            raise ConfigError("against_label_map needs a second model.", hint="Pass against=MODEL.")
        for name in ("against", "real", "temperature", "label_map"):
            if self.uses_features and getattr(self, name):
                raise ConfigError(f"{name} evaluates a classifier, but few_shot and knn evaluate features.")
        for name in ("real", "label_map", "against_label_map"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str | Path):
                raise ConfigError(f"{name} must be the path of a file (got {path!r}).")
            if path is not None and not Path(path).is_file():
                raise DataError(f"{name}: file not found: {path}.")

    @property
    def shots(self) -> tuple[int, ...]:
        """Return the requested numbers of shots."""
        if self.few_shot is None:
            return ()
        return tuple(self.few_shot) if isinstance(self.few_shot, list | tuple) else (self.few_shot,)  # type: ignore[return-value]

    @property
    def uses_features(self) -> bool:
        """Return whether frozen features are evaluated instead of the classifier."""
        return bool(self.shots) or self.knn is not None

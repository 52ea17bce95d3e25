"""Open a file that `vitral export` wrote: an ONNX or OpenVINO model with its preprocessing and labels.

This module does not import torch, so that `vitral predict model.onnx photo.jpg` starts at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from vitral.data.decode import BadImageError
from vitral.data.headers import Pixels
from vitral.data.pillow_transforms import preprocess_array
from vitral.errors import ConfigError, WeightsError, check_choice
from vitral.inference.engines import Engine, describe_engine, to_probabilities
from vitral.inference.engines.onnxruntime import open_onnx
from vitral.inference.engines.openvino import compile_model
from vitral.inference.exported_checks import check_onnx, check_openvino
from vitral.inference.image_sizes import SizeRange, as_text, read_sizes
from vitral.model.config import check_size, pair
from vitral.preprocess import Preprocess

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".onnx", ".xml")


def is_exported(source: object) -> bool:
    """Return whether a MODEL names an exported file. Raise WeightsError for a .pt2, which is never opened."""
    if not isinstance(source, str | Path):
        return False
    suffix = Path(source).suffix.lower()
    if suffix == ".pt2":
        refuse_pt2(source)
    return suffix in SUFFIXES and not Path(source).is_dir()


def refuse_pt2(source: str | Path) -> NoReturn:
    """Raise WeightsError: torch falls back to unpickling parts of such a file."""
    raise WeightsError(
        f"{source} is not opened, because loading a .pt2 file can run code.",
        hint="Pass the checkpoint that it was exported from, or export it with --to onnx.",
    )


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """An exported file, ready to run on the CPU. It has the part of `LoadedModel` that classifiers need."""

    engine: Engine
    preprocess: Preprocess
    sizes: SizeRange
    """The sizes of images that the file takes."""
    labels: tuple[str, ...]
    has_names: bool
    multi_label: bool
    outputs: tuple[str, ...]
    path: Path
    warnings: tuple[str, ...] = ()
    run: None = None

    @property
    def step_hw(self) -> tuple[int, int]:
        """Return what the sides of an image must be multiples of, if they keep their size."""
        return (1, 1) if self.sizes.is_single else self.sizes.multiple_of

    @property
    def computed_by(self) -> str:
        """Return the engine and the precision."""
        return describe_engine(self.engine)

    @property
    def precision(self) -> str:
        return self.engine.precision

    def check_has_head(self) -> None:
        """Raise ConfigError if the file has features but no predictions."""
        if "logits" not in self.outputs:
            raise ConfigError(f"{self.path} has no classification head.", hint="Pass the checkpoint to write features.")

    def choose(self, images: list[np.ndarray], total: int) -> None:
        """Keep the engine of the file."""

    def prepare(self, content: bytes | Pixels) -> np.ndarray:
        """Return uint8 (C, H, W), the model's input before normalization."""
        image = preprocess_array(content, self.preprocess, patch=self.step_hw)
        if (size := _size_of(image)) not in self.sizes:
            detail = f"{as_text(size)} for the model, but {self.path} takes {self.sizes}"
            raise BadImageError("bad dimensions", detail)
        return image

    def predict(self, images: list[np.ndarray]) -> tuple[np.ndarray, None]:
        """Return (B, K) probabilities."""
        logits = self.check_finite_array(_run_by_size(self.engine.logits, images))
        return to_probabilities(logits, multi_label=self.multi_label), None

    def embed(self, images: list[np.ndarray]) -> np.ndarray:
        """Return (B, D) features."""
        if "features" not in self.outputs:
            raise ConfigError(f"{self.path} outputs logits, not features.", hint="Pass the checkpoint as MODEL.")
        return self.check_finite_array(_run_by_size(self.engine.features, images))

    def check_finite_array(self, outputs: np.ndarray) -> np.ndarray:
        """Return the outputs, or raise WeightsError if any is NaN or Inf."""
        if not np.isfinite(outputs).all():
            raise WeightsError(f"{self.path} produced NaN or Inf: its weights are damaged.")
        return outputs

    # ---- for evaluations, which import torch anyway ----

    def logits(self, images: "Tensor | list[Tensor]") -> "Tensor":
        """Return (B, K) logits in float32."""
        import torch

        arrays = [image.numpy() for image in images]
        for image in arrays:
            self.sizes.check(_size_of(image), str(self.path))
        return torch.from_numpy(_run_by_size(self.engine.logits, arrays))  # pyright: ignore[reportUnknownMemberType]

    def check_finite(self, outputs: "Tensor") -> "Tensor":
        """Return the outputs, or raise WeightsError if any is NaN or Inf."""
        self.check_finite_array(outputs.numpy())
        return outputs


def open_exported(
    source: str | Path,
    *,
    engine: str = "auto",
    precision: str = "auto",
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
) -> ExportedModel:
    """Check an exported file and open it with ONNX Runtime or OpenVINO."""
    path = Path(source)
    is_onnx = path.suffix.lower() == ".onnx"
    choices = ("auto", "onnxruntime", "openvino") if is_onnx else ("auto", "openvino")
    check_choice(f"engine of {path.name}", engine, choices)
    if device not in ("auto", "cpu"):
        raise ConfigError(f"Exported files run on the CPU (got device={device!r}).")
    description = check_onnx(path) if is_onnx else check_openvino(path)
    if description.get("from_bytes"):
        problem = f"{path} takes decoded images and resizes them itself, for programs without vitral."
        raise ConfigError(problem, hint="Export the model again without --from-bytes.")
    stored = str(description.get("precision", "float32"))
    if precision not in ("auto", stored):
        hint = f"Export it again: vitral export MODEL --to {'onnx' if is_onnx else 'openvino'} --precision {precision}."
        raise ConfigError(f"{path} computes in {stored} (got precision={precision!r}).", hint=hint)
    preprocess, sizes = _read_preprocess(path, description)
    if image_size is not None:
        preprocess = _with_size(path, preprocess, sizes, image_size)
    fixed = preprocess.size if sizes.is_single or preprocess.resize != "native" else None
    opened: Any = _open(path, stored, fixed, use_openvino=not is_onnx or engine == "openvino")
    if opened.size != fixed:
        raise WeightsError(f"{path} takes images of {opened.size or 'any size'}, but describes {fixed or 'any size'}.")
    return _describe(path, opened, preprocess, sizes, description)


def check_not_merged(merge: int | None) -> None:
    """Raise ConfigError for a request to merge tokens, which an exported graph cannot change."""
    if merge is not None:
        raise ConfigError("merge does not apply to exported files.", hint="Export the model again with --merge.")


def _with_size(path: Path, preprocess: Preprocess, sizes: SizeRange, image_size: int | tuple[int, int]) -> Preprocess:
    """Return the preprocessing for another size. Raise ConfigError if the file does not take it."""
    check_size("image_size", image_size)
    size = pair(image_size)
    if size != preprocess.size and preprocess.resize == "native" and not sizes.is_single:
        problem = f"{path} takes each image at its own size, so image_size does not apply (got {as_text(size)})."
        raise ConfigError(problem, hint="Export the model again with --image-size.")
    sizes.check(size, str(path))
    return replace(preprocess, size=size)


def _open(path: Path, precision: str, size: tuple[int, int] | None, *, use_openvino: bool) -> Engine:
    open_file = compile_model if use_openvino else open_onnx
    try:
        return open_file(path, precision=precision, size=size)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} cannot be run: {str(error).splitlines()[0]}.") from error
    except Exception as error:
        if "onnxruntime" not in type(error).__module__:
            raise
        raise WeightsError(f"{path} cannot be run: {str(error).splitlines()[0]}.") from error


def _read_preprocess(path: Path, description: Mapping[str, Any]) -> tuple[Preprocess, SizeRange]:
    """Return the preprocessing, and the sizes that the file takes."""
    try:
        preprocess = Preprocess(**description["preprocess"])
        return preprocess, read_sizes(description, preprocess.size)
    except (TypeError, ConfigError) as error:
        raise WeightsError(f"{path} has an invalid description of its preprocessing: {error}.") from error


def _size_of(image: np.ndarray) -> tuple[int, int]:
    return image.shape[1], image.shape[2]


def _run_by_size(compute: Callable[[np.ndarray], np.ndarray], images: Sequence[np.ndarray]) -> np.ndarray:
    """Return one row per image (C, H, W), computing the images of each size together."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for number, image in enumerate(images):
        by_size.setdefault(_size_of(image), []).append(number)
    rows = np.concatenate([compute(np.stack([images[number] for number in group])) for group in by_size.values()])
    return rows[np.argsort([number for group in by_size.values() for number in group])]


def _describe(
    path: Path,
    engine: Any,  # noqa: ANN401
    preprocess: Preprocess,
    sizes: SizeRange,
    description: Mapping[str, Any],
) -> ExportedModel:
    """Return the model, after a first run that shows how many logits it has."""
    outputs: tuple[str, ...] = engine.outputs
    labels: list[Any] | None = description["labels"]
    count = len(labels or ())
    if "logits" in outputs:
        blank = np.zeros((1, preprocess.channels, *preprocess.size), np.uint8)
        shape = engine.logits(blank).shape
        if len(shape) != 2 or (labels is not None and shape[1] != count):
            raise WeightsError(f"{path} has outputs of shape {shape}, but {count} labels.")
        count = shape[1]
    names = labels or range(count)
    return ExportedModel(
        engine=engine,
        preprocess=preprocess,
        sizes=sizes,
        labels=tuple(map(str, names)),
        has_names=labels is not None,
        multi_label=bool(description["multi_label"]),
        outputs=outputs,
        path=path,
    )

"""Export a model to ONNX, OpenVINO or torch.export, and keep the file only if its outputs equal the model's.

    trace -> write to a temporary folder -> run the file -> compare -> move into place

The file takes uint8 images of the model's size, or of many sizes (dynamic_sizes.py). It normalizes them itself, so that
nobody has to copy a mean or a standard deviation. Its metadata describes the preprocessing and the labels as JSON.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.errors import ConfigError, VitralError, WeightsError, did_you_mean
from vitral.exporting.decoded_images import check_can_resize, compare_photos
from vitral.exporting.dynamic_sizes import at_size, choose_sizes, example_size, make_dynamic, other_sizes
from vitral.exporting.targets import TARGETS, Content, Run, Target, check_precision, onnx_weights
from vitral.files import atomic_files
from vitral.inference.engines import onnx_graph
from vitral.inference.engines.graph import PixelModel, reason_of, trace
from vitral.inference.engines.quantization import Drop, RealImages, quantize
from vitral.inference.image_sizes import SizeRange, as_text
from vitral.inference.real_images import check_calibration
from vitral.model.network import Network
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.dialects.native import config_as_dict
from vitral.weights.save import as_checkpoint

TOLERANCE = 1e-4
"""Largest allowed difference, relative to the largest logit or 1: other kernels add in another order."""
TOLERANCES = {"float32": TOLERANCE, "float16": 0.02, "bfloat16": 0.1, "int8": 0.5}
"""The same for lower precisions: about ten times the error of a trained ViT. int8 is judged by its accuracy."""
BATCH_SIZES = (1, 3)
COMPARED_BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The file that was written, and how far its outputs are from the model's."""

    path: str
    to: str
    precision: str
    bytes: int
    difference: float
    """Largest difference of any output, relative to the largest output or 1."""
    images: int
    """Number of images that were compared."""
    origin: str = "random images"
    """The origin of the images that were compared besides random ones."""
    drop: Drop | None = None
    """The accuracy that int8 loses."""
    kept: tuple[str, ...] = ()
    """The kinds of layers that stayed in float32."""
    dynamic_size: SizeRange | None = None
    """The sizes of images that the file takes, if there are several."""
    sizes: tuple[tuple[int, int], ...] = ()
    """The (height, width) of the images that were compared."""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    model: Checkpoint | Network,
    path: str | Path,
    *,
    to: str,
    precision: str = "float32",
    images: RealImages | None = None,
    max_drop: float = 0.5,
    from_bytes: bool = False,
    dynamic_size: bool = False,
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Write the file, run it, and keep it only if its outputs equal the model's. Pass each stage to ``on_stage``."""
    checkpoint = as_checkpoint(model, preprocess=None, labels=None)
    if from_bytes:
        check_can_resize(to, checkpoint.preprocess)
    target, path = check_target(to, path, overwrite, precision), Path(path)
    sizes = choose_sizes(checkpoint, precision, from_bytes=from_bytes) if dynamic_size else None
    if precision == "int8":
        images = check_calibration(images, hint="Pass --images FOLDER with images like those that the model will see.")
    output = "logits" if checkpoint.model.config.num_classes else "features"
    with _errors_of(to), atomic_files(path) as temporary:
        on_stage("tracing the model")
        network = PixelModel(deepcopy(checkpoint.model).float().cpu(), checkpoint.preprocess).eval()
        comparisons = [*compute_comparisons(network, checkpoint, images, sizes)]
        expected = comparisons[0].outputs
        if to == "onnx":
            onnx_graph.unfuse_relative_attention(network)
        program = trace_network(network, checkpoint, sizes)
        quantized = None
        if precision == "int8" and images is not None:
            outputs = expected[-len(images.compared) :]
            options: dict[str, Any] = dict(outputs=[output], max_drop=max_drop, on_stage=on_stage)
            quantized = quantize(program, checkpoint.preprocess, checkpoint.model.config, images, outputs, **options)
        on_stage(f"writing {path.name}")
        inputs = {"from_bytes": from_bytes, "dynamic_size": sizes and asdict(sizes)}
        metadata = json.dumps(file_metadata(checkpoint, precision) | inputs, ensure_ascii=False)
        model_in_int8 = quantized.model if quantized else None
        content = Content(program, checkpoint.preprocess, output, metadata, precision, model_in_int8, sizes)
        target.write(content, temporary)
        on_stage("comparing the outputs")
        run = target.load(temporary, precision)
        difference = max(compare(run, pair.batches, pair.outputs, precision) for pair in comparisons)
        if from_bytes:  # the same network, which now resizes as well
            for file in temporary.parent.iterdir():
                file.unlink()
            target.write(content._replace(resizes=True), temporary)
            difference = max(difference, compare_photos(temporary, network, checkpoint.preprocess))
        lengths = [file.stat().st_size for file in temporary.parent.iterdir()]
        check_target(to, path, overwrite)  # somebody may have written a file there in the meantime
    if to == "onnx" and len(lengths) == 1:
        onnx_weights(path.resolve()).unlink(missing_ok=True)  # weights of the file that was replaced
    return Exported(
        path=str(path),
        to=to,
        precision=precision,
        bytes=sum(lengths),
        difference=difference,
        images=sum(len(pair.outputs) for pair in comparisons),
        origin=images.origin if images is not None and len(images.compared) else "random images",
        drop=quantized.drop if quantized else None,
        kept=quantized.kept if quantized else (),
        dynamic_size=sizes,
        sizes=tuple(pair.size for pair in comparisons),
        notes=tuple(export_notes(checkpoint, expected, sizes)),
    )


def trace_network(network: PixelModel, checkpoint: Checkpoint, sizes: SizeRange | None) -> torch.export.ExportedProgram:
    """Trace the network for the size of its images, or for many. The latter replaces its positions."""
    if sizes is None:
        return trace(network, random_images(checkpoint, BATCH_SIZES[-1]))
    make_dynamic(network.model, checkpoint.preprocess, sizes)
    example = random_images(checkpoint, BATCH_SIZES[-1], example_size(checkpoint.preprocess, sizes))
    return trace(network, example, sizes)


class Comparison(NamedTuple):
    """Images of one size, and the outputs of the model for them."""

    size: tuple[int, int]
    batches: Sequence[Tensor]
    outputs: np.ndarray


def compute_comparisons(
    network: PixelModel, checkpoint: Checkpoint, images: RealImages | None, sizes: SizeRange | None
) -> Iterator[Comparison]:
    """Yield what the file is compared with: the model at its own size, and resampled to other sizes of the file."""
    preprocess = checkpoint.preprocess
    default = comparison_batches(checkpoint, images)
    if sizes is None:
        yield Comparison(preprocess.size, default, compute_outputs(network, default))
        return
    for size in (preprocess.size, *other_sizes(preprocess, sizes)):
        batches = default if size == preprocess.size else [random_images(checkpoint, 2, size)]
        resampled = PixelModel(at_size(network.model, preprocess, size), preprocess).eval()
        yield Comparison(size, batches, compute_outputs(resampled, batches))


def comparison_batches(checkpoint: Checkpoint, images: RealImages | None) -> list[Tensor]:
    """Return random images, alone and several at once, and the real ones if there are any."""
    batches = [random_images(checkpoint, size) for size in BATCH_SIZES]
    if images is not None and len(images.compared):
        batches += torch.from_numpy(images.compared).split(COMPARED_BATCH)
    return batches


def check_target(to: str, path: str | Path, overwrite: bool, precision: str = "float32") -> Target:
    """Return the format, or raise before any work if the file cannot be written."""
    if to not in TARGETS:
        raise ConfigError(f"to must be one of {', '.join(TARGETS)} (got {to!r}).", hint=did_you_mean(str(to), TARGETS))
    if not isinstance(path, str | Path):
        raise ConfigError(f"path must be a file name (got {path!r}).")
    target, path = TARGETS[to], Path(path)
    check_precision(to, precision)
    if path.is_dir():
        raise WeightsError(f"{path} is a folder; expected a file name.")
    if path.suffix != target.suffix:
        raise ConfigError(f"{path} must end in {target.suffix}.", hint=f"Use {path.with_suffix(target.suffix).name}.")
    for file in filter(None, (path, target.weights(path))):
        if os.path.lexists(file) and not overwrite:
            raise WeightsError(f"{file} already exists.", hint="Pass --overwrite to replace it.")
    if not path.parent.is_dir():
        raise WeightsError(f"Cannot write {path}: the folder {path.parent} does not exist.", hint="Create it first.")
    target.check()
    return target


@contextmanager
def _errors_of(to: str) -> Iterator[None]:
    """Turn the many exceptions of torch's exporter and of the runtimes into one sentence."""
    try:
        yield
    except VitralError:
        raise
    except Exception as error:
        raise VitralError(f"Cannot export this model to {to}: {reason_of(error)}.") from error


def file_metadata(checkpoint: Checkpoint, precision: str = "float32") -> dict[str, Any]:
    """Return the description that is stored in the file."""
    return {
        "vitral": __version__,
        "precision": precision,
        "config": config_as_dict(checkpoint.model.config),
        "preprocess": checkpoint.preprocess.as_dict(),
        "labels": checkpoint.labels,
        "multi_label": checkpoint.multi_label,
        "assumed": list(checkpoint.report.assumed) if checkpoint.report else [],
    }


def random_images(checkpoint: Checkpoint, count: int, size: tuple[int, int] | None = None) -> Tensor:
    shape = (count, checkpoint.preprocess.channels, *(size or checkpoint.preprocess.size))
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def compute_outputs(network: nn.Module, batches: Sequence[Tensor]) -> np.ndarray:
    with torch.inference_mode():
        outputs = torch.cat([network(images) for images in batches]).numpy()
    if not np.isfinite(outputs).all():
        raise WeightsError("The model produced NaN or Inf; its weights are too large or damaged.")
    return outputs


def compare(run: Run, batches: Sequence[Tensor], expected: np.ndarray, precision: str = "float32") -> float:
    """Return the largest relative difference of any output; raise VitralError if it exceeds the tolerance."""
    outputs = np.concatenate([run(images.numpy()) for images in batches])
    difference = float(np.abs(outputs - expected).max()) / max(1.0, float(np.abs(expected).max()))
    tolerance = TOLERANCES[precision]
    if not difference <= tolerance:  # also if it is NaN
        problem = f"The exported file's outputs differ from the model's by {difference:.1e}"
        raise VitralError(f"{problem} (expected at most {tolerance:.0e}); it was deleted.")
    return difference


def export_notes(checkpoint: Checkpoint, outputs: np.ndarray, sizes: SizeRange | None = None) -> Iterator[str]:
    """Yield what somebody who uses the file should know."""
    config = checkpoint.model.config
    for assumption in checkpoint.report.assumed if checkpoint.report else ():
        yield f"assumed: {assumption}"
    if not np.ptp(outputs, axis=0).any():
        yield "All images have the same output because the head is untrained, so the comparison proves nothing."
    if not config.num_classes:
        yield "The model has no head; the file outputs features."
    if config.pool == "none":
        yield "The model has one output per token: (batch, tokens, classes)."
    if sizes is not None:
        yield f"The file takes images of {sizes}."
    elif checkpoint.preprocess.resize == "native":
        size = as_text(checkpoint.preprocess.size)
        yield f"The model takes images of any size, but this file only takes {size}. Pass --dynamic-size for any size."

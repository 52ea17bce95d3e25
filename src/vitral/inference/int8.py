"""Run a model in int8: quantized once per model and calibration images, and kept in the cache with what it loses."""

import json
from collections.abc import Callable
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
import torch

from vitral import __version__
from vitral.cache import keep_entry, read_entry
from vitral.collectives import current_world
from vitral.errors import ConfigError
from vitral.inference.engines import graph
from vitral.inference.engines.choosing import Chosen, Subject, find_obstacle
from vitral.inference.engines.fingerprint import describe_cpu, package_versions, weights_digest
from vitral.inference.engines.openvino import compile_model, import_openvino, open_core
from vitral.inference.engines.quantization import (
    AccuracyLossError,
    Drop,
    Quantized,
    RealImages,
    import_nncf,
    quantize,
    run_all,
)
from vitral.inference.engines.torch_eager import as_tensor
from vitral.inference.loaded_model import LoadedModel
from vitral.weights.checkpoint import Checkpoint


def open_int8(
    loaded: LoadedModel,
    find_images: Callable[[Checkpoint], RealImages],
    *,
    fingerprint: str,
    max_drop: float,
    on_stage: Callable[[str], None],
) -> Chosen:
    """Return the model in int8 by OpenVINO. Raise VitralError if it loses more than `max_drop` points of top-1.

    `find_images` returns the images to calibrate and measure it with; they are not read if the cache has the model for
    images of this fingerprint.
    """
    import_openvino()
    _check_possible(loaded)
    key = _key_of(loaded, fingerprint, max_drop)
    quantized = _read(key)
    if quantized is None:
        if current_world().size > 1:
            hint = "Run the command in one process first: the quantized model is kept."
            raise ConfigError("Several processes cannot quantize a model.", hint=hint)
        quantized = _quantize(loaded, find_images, max_drop, on_stage)
        keep_entry("engines", key, _pack(quantized))
    if isinstance(quantized, AccuracyLossError):
        raise quantized
    kept = f", {' and '.join(quantized.kept)} in float32" if quantized.kept else ""
    engine = compile_model(quantized.model, precision="int8", calibration=key)
    return Chosen(engine=engine, reason=f"engine: openvino int8 ({quantized.drop}{kept})")


def _check_possible(loaded: LoadedModel) -> None:
    """Raise ConfigError for a model that has no int8 engine: nothing falls back to a slower precision unasked."""
    hint = "Use another precision."
    if loaded.device.type != "cpu":
        raise ConfigError(f"int8 runs on the CPU (got device={loaded.device.type!r}).", hint=hint)
    subject = Subject(
        model=loaded.model, preprocess=loaded.preprocess, device=loaded.device, multi_label=loaded.multi_label
    )
    if problem := find_obstacle(subject):
        raise ConfigError(f"int8 is not possible, because {problem}.", hint=hint)


def _quantize(
    loaded: LoadedModel,
    find_images: Callable[[Checkpoint], RealImages],
    max_drop: float,
    on_stage: Callable[[str], None],
) -> Quantized | AccuracyLossError:
    """Return the quantized model, or the error with the numbers if it loses too much accuracy."""
    import_nncf()  # if it is missing, say so before reading images
    on_stage("int8: reading images to calibrate with; quantizing takes a minute or more, once")
    labels = loaded.labels if loaded.has_names else None
    checkpoint = Checkpoint(
        model=loaded.model, preprocess=loaded.preprocess, labels=labels, multi_label=loaded.multi_label
    )
    images = find_images(checkpoint)
    names = ["features", "logits"] if loaded.model.config.num_classes else ["features"]
    try:
        network = graph.build_outputs(loaded.model, loaded.preprocess)
        program = graph.trace_outputs(network, loaded.preprocess)
        on_stage(f"int8: computing {len(images.compared):,} images in float32, to compare with")
        return quantize(
            program,
            loaded.preprocess,
            loaded.model.config,
            images,
            _last_outputs(network, images),
            outputs=names,
            max_drop=max_drop,
            on_stage=lambda stage: on_stage(f"int8: {stage}"),
        )
    except graph.CannotTraceError as error:
        raise ConfigError(f"int8 is not possible, because {error}.", hint="Use another precision.") from error
    except AccuracyLossError as error:
        return error


def _last_outputs(network: graph.PixelOutputs, images: RealImages) -> np.ndarray:
    with torch.inference_mode():
        return run_all(lambda batch: network(as_tensor(batch))[-1].numpy(), images.compared)


# ---- the cache ----


def _key_of(loaded: LoadedModel, images: str, max_drop: float) -> str:
    """Return the name of the cache entry: everything that the quantized model and its accuracy depend on."""
    digest = weights_digest(loaded.model.state_dict())
    facts: list[Any] = [asdict(loaded.model.config), loaded.preprocess.as_dict(), images, max_drop]
    facts += [__version__, package_versions(), describe_cpu()]
    digest.update(json.dumps(["int8", *facts], sort_keys=True, default=str).encode())
    return f"{digest.hexdigest()}.npz"


def _pack(quantized: Quantized | AccuracyLossError) -> bytes:
    """Return the quantized model and what it loses, or why it was refused, as an npz file."""
    files: dict[str, np.ndarray] = {}
    if isinstance(quantized, AccuracyLossError):
        facts: dict[str, Any] = {"refused": quantized.message, "hint": quantized.hint}
    else:
        facts = {"drop": asdict(quantized.drop), "kept": quantized.kept}
        with TemporaryDirectory(prefix="vitral-int8-") as folder:
            path = Path(folder) / "int8.xml"
            import_openvino().save_model(quantized.model, str(path), compress_to_fp16=False)
            files = {name: np.fromfile(path.with_suffix(f".{name}"), np.uint8) for name in ("xml", "bin")}
    files["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    stream = BytesIO()
    np.savez(stream, **cast(dict[str, Any], files))
    return stream.getvalue()


def _read(key: str) -> Quantized | AccuracyLossError | None:
    """Return an entry of the cache, or None if it is missing or damaged."""
    content = read_entry("engines", key)
    if content is None:
        return None
    try:
        with np.load(BytesIO(content), allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            if "refused" in facts:
                return AccuracyLossError(facts["refused"], hint=facts["hint"])
            model = open_core().read_model(arrays["xml"].tobytes(), arrays["bin"].tobytes())
        return Quantized(model=model, drop=Drop(**facts["drop"]), kept=tuple(facts["kept"]))
    except (ValueError, KeyError, TypeError, OSError, BadZipFile, RuntimeError):
        return None

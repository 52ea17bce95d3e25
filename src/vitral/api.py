"""The public functions that combine packages: train, train_events, export and inspect."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature as signature_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from vitral.console.training import show_progress
from vitral.errors import ConfigError, DataError, check_number
from vitral.exporting.exporter import Exported, check_target
from vitral.exporting.exporter import export as export_checkpoint
from vitral.exporting.targets import TARGETS
from vitral.inference.exported_model import ExportedModel
from vitral.inference.loaded_model import open_checkpoint
from vitral.inference.predictor import Failure, Predictor
from vitral.inference.real_images import find_real_images
from vitral.inspection.inspecting import inspect_model
from vitral.inspection.results import Inspection
from vitral.inspection.traversal import check_vit
from vitral.report.inspection_page import check_target as check_inspection_target
from vitral.report.inspection_page import write_inspection
from vitral.report.page import write_report
from vitral.report.tensorboard import with_tensorboard
from vitral.runs import Run
from vitral.training import entry
from vitral.training.events import Event, Finished, Measuring

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitral.inference.loaded_model import LoadedModel
    from vitral.inference.predictor import ImageInput
    from vitral.weights.checkpoint import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")
_SETTING_NAMES = {"from_": "from", "lr": "optim.lr"}
"""Settings that have a shorter name in Python."""


def train(
    data: str | Path | None = None,
    *,
    from_: str | Path | None = None,
    model: "str | nn.Module | None" = None,
    recipe: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
    val: str | Path | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    lr: float | None = None,
    tune: str | Mapping[str, Any] | None = None,
    objective: str | None = None,
    seed: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    resume: str | Path | None = None,
    tensorboard: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train on a dataset, show progress on standard error, and return the finished run.

    Options you omit are chosen automatically; the report of the run lists every choice with its reason.
    Raise KeyboardInterrupt on Ctrl-C, after the state is saved and the command that resumes the run is printed.

        run = vitral.train("photos/", from_="hf:google/vit-base-patch16-224", minutes=10)
        print(run.test.top1, run.report)

    Parameters
    ----------
    data, val: a folder of class folders, a table, tar shards, hf:OWNER/NAME or builtin:digits; test on `val` if set
    from_: the MODEL to start from: a run folder, a weights file, a shipped or pretrained name, hf:OWNER/NAME, or auto
    model: the architecture to train from scratch, such as "vit-s16", or a ViT of your own (a module with a ViTConfig)
    recipe, config: the name of a recipe and a TOML file with settings; keyword arguments override both
    out, resume: the run folder to create, or the one to continue
    epochs, steps, minutes: the length of the run; pass one of them
    batch_size, image_size, lr, seed: images per step, pixels (or height and width), peak learning rate, random seed
    tune: what to train after the linear probe: "probe" (nothing), "head", "last-blocks", "lora" or "all"
    objective: "classify", or "masked-patches" to pretrain without labels
    device, precision, workers: "cuda:1", "bfloat16", processes that load images
    tensorboard, progress: write TensorBoard curves; show progress
    settings: any other setting of TrainConfig; a section takes a dict, such as optim=dict(weight_decay=0.1)
    """
    named: dict[str, Any] = dict(from_=from_, model=model, recipe=recipe, config=config, out=out, val=val, lr=lr)
    named |= dict(epochs=epochs, steps=steps, minutes=minutes, batch_size=batch_size, image_size=image_size)
    named |= dict(tune=tune, objective=objective, seed=seed, device=device, precision=precision, workers=workers)
    events = _start(data, named | settings | dict(resume=resume, tensorboard=tensorboard))
    ending = show_progress(events, "human" if progress else "quiet")
    assert ending is not None
    if isinstance(ending, Finished):
        return Run.open(ending.folder)
    if ending.signal == signal.SIGINT:
        raise KeyboardInterrupt(f"Interrupted at step {ending.step}. Resume with: {ending.resume}")
    raise SystemExit(128 + ending.signal)


def _same_options(source: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the parameters of another one, for type checkers and for help()."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        signature = signature_of(source)
        parameters = [parameter for name, parameter in signature.parameters.items() if name != "progress"]
        returns = signature_of(function).return_annotation
        vars(function)["__signature__"] = signature.replace(parameters=parameters, return_annotation=returns)
        return function

    return decorate


@_same_options(train)
def train_events(data: str | Path | None = None, **options: Any) -> Iterator[Event]:
    """Train with the options of vitral.train, and yield the events of the run instead of showing them.

    Nothing is trained before the first event is requested. The last event is Finished or Interrupted.

        for event in vitral.train_events("photos/", model="vit-s16"):
            if isinstance(event, vitral.training.events.EpochEnded):
                print(event.epoch, event.top1)
    """
    return _start(data, options)


def _start(data: str | Path | None, options: dict[str, Any]) -> Iterator[Event]:
    """Return the events of a run, which also write its report and, if requested, its curves."""
    passed = {_SETTING_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    if isinstance(passed.get("tune"), str):
        passed["tune.what"] = passed.pop("tune")
    has_curves = "resume" in passed and Run(passed["resume"]).tensorboard.is_dir()  # the resumed run continues them
    wants_curves = passed.pop("tensorboard", False) or has_curves
    events = entry.train_events(data, **passed)
    return _with_report(with_tensorboard(events) if wants_curves else events)


def _with_report(events: Iterator[Event]) -> Iterator[Event]:
    """Yield the same events, and write the report before the last one."""
    for event in events:
        if isinstance(event, Finished):
            yield Measuring(what="writing the report", done=0, total=1)
            write_report(event.folder)
        yield event


def export(
    model: "str | Path | Checkpoint",
    path: str | Path | None = None,
    *,
    to: str,
    precision: str = "float32",
    images: str | Path | None = None,
    max_drop: float = 0.5,
    image_size: int | tuple[int, int] | None = None,
    merge: int | None = None,
    from_bytes: bool = False,
    dynamic_size: bool = False,
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Export a model to a file for other runtimes, and keep the file only if its outputs equal the model's.

        vitral.export("runs/photos-1", "photos.onnx", to="onnx")

    Parameters
    ----------
    model: a run folder, a weights file, a shipped or pretrained name, hf:OWNER/NAME, or a Checkpoint
    path: the file to write; by default the model's name in the current folder
    to: "onnx" for most runtimes, "openvino" for Intel and ARM CPUs, or "pt2" for torch.export
    precision: "float32", "bfloat16", "float16", or "int8" (openvino only)
    images: a folder or dataset to compare the file on, and to calibrate int8; by default that of the run
    max_drop: largest loss of top-1 by int8, in points
    image_size: another input size than the model was trained at
    merge: pairs of similar tokens to merge per block
    from_bytes: let an ONNX file take one decoded image of any size, uint8 (height, width, channels), and resize it
    dynamic_size: take images of any height and width that the patches divide, up to a limit that the result states
    overwrite: replace the file if it exists
    on_stage: called with the name of each stage
    """
    suffix = TARGETS[to].suffix if to in TARGETS else f".{to}"
    path = Path(f"{_name_of(model)}{suffix}") if path is None else path
    check_target(to, path, overwrite, precision)
    check_number("max_drop", max_drop, minimum=0, maximum=100)
    on_stage("loading")
    checkpoint, run = open_checkpoint(model, image_size, merge=merge)
    if dynamic_size and image_size is not None and checkpoint.preprocess.resize != "native":
        preprocess = checkpoint.preprocess  # the file resamples the original positions
        checkpoint = replace(open_checkpoint(model, merge=merge)[0], preprocess=preprocess)
    real = find_real_images(checkpoint, run, images, calibrate=precision == "int8")
    options: dict[str, Any] = dict(precision=precision, images=real, max_drop=max_drop, overwrite=overwrite)
    options |= dict(from_bytes=from_bytes, dynamic_size=dynamic_size, on_stage=on_stage)
    return export_checkpoint(checkpoint, path, to=to, **options)


def inspect(
    model: "str | Path | Checkpoint",
    images: "str | Path | Sequence[ImageInput]",
    *,
    out: str | Path | None = None,
    labels: Sequence[str] = (),
    faithfulness: bool = False,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Inspection:
    """Show where a model looks and what it learned: a page, PNGs and a JSON file.

        vitral.inspect("vit-cifar10", ["cat.jpg", "ship.jpg"], out="inside")  # open inside/inspect.html

    Parameters
    ----------
    model: a run folder, a weights file, a shipped or pretrained name, hf:OWNER/NAME, or a Checkpoint
    images: a folder, or a list of images as `Predictor` takes them; the page shows the first eight
    out: the folder to write; by default inspect-NAME in the current folder
    labels: show the relevance of these classes instead of the most probable ones
    faithfulness: also delete the patches that the maps rank highest, to test the maps
    image_size: another input size than the model was trained at
    overwrite: replace the files of an earlier inspection
    on_stage: called with the name of each stage
    """
    name = _name_of(model)
    folder = Path(f"inspect-{name}") if out is None else Path(out)
    check_inspection_target(folder, overwrite=overwrite)
    on_stage("loading")
    load = partial(Predictor, model, device=device, engine="torch", precision="float32", image_size=image_size)
    predictor = load()
    loaded = predictor.loaded
    if isinstance(loaded, ExportedModel):
        hint = "Pass the checkpoint that it was exported from."
        raise ConfigError(f"{name} is an exported file, whose layers cannot be inspected.", hint=hint)
    if check_vit(loaded.model).config.merge:
        predictor = load(merge=0)  # maps need every patch
        loaded = cast("LoadedModel", predictor.loaded)
    on_stage("reading images")
    skipped: list[tuple[str, str]] = []
    usable = _usable_images(predictor.preprocessed(images), skipped)
    result = inspect_model(loaded, name, usable, labels=labels, with_faithfulness=faithfulness, on_stage=on_stage)
    on_stage("drawing")
    result = replace(result, skipped=tuple(skipped), out=str(folder))
    write_inspection(result, folder)
    return result


def _usable_images(
    images: "Iterable[tuple[ImageInput, Tensor | Failure]]", skipped: list[tuple[str, str]]
) -> "Iterator[tuple[str, Tensor]]":
    """Yield each image with its name, and append the others to `skipped`. Raise DataError if none is usable."""
    has_images = False
    for number, (source, image) in enumerate(images, 1):
        label = str(source) if isinstance(source, str | Path) else f"image {number}"
        if isinstance(image, Failure):
            skipped.append((label, image.reason))
        else:
            has_images = True
            yield label, image
    if not has_images and skipped:
        label, reason = skipped[0]
        many = "" if len(skipped) == 1 else f"None of the {len(skipped)} images is usable. The first: "
        raise DataError(f"{many}{label}: {reason}")
    if not has_images:
        raise DataError("There are no images to inspect.", hint="Pass at least one.")


def _name_of(model: "str | Path | Checkpoint") -> str:
    """Return a file name for a model: runs/photos -> photos, vit.safetensors -> vit, hf:google/vit -> vit."""
    if not isinstance(model, str | Path):
        return "model"
    text = str(model).removeprefix("hf:").removesuffix(":img")
    path = Path(os.path.abspath(text))  # not resolved: a link of a cache points to a hash
    return path.stem if path.is_file() else path.name

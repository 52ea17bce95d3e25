"""`vitral train` and `vitral report`: train a model on a folder of images, and open the report of a run."""

import sys
import webbrowser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import vitral
from vitral.cli.launch import MAX_RESTARTS, launch_if_asked
from vitral.cli.parameters import Device, File, Format, OptionalInt, OptionalNumber, Switch, Text, option, split_setting
from vitral.console.output import show_as, show_lines
from vitral.console.tables import show_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vitral.console.training import Ending, Event

AUTO = Parameter(show_default="auto")
RECIPES = (
    "small, photos, finetune, digits, cifar10-10min, vit-cifar10, augreg, plain-s16, paper-finetune, paper-imagenet, "
    "paper-i21k, paper-jft, paper-masked, bit-small, bit-medium, bit-large"
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a run that have a flag of their own; None is "as in the recipe, else automatic"."""

    from_: Annotated[
        Text,
        option("Start from the weights of MODEL, such as dinov2-s14; auto chooses one.", "MODEL", name="--from"),
    ] = None
    model: Annotated[Text, AUTO, option("Architecture to train from scratch, such as vit-s16.", "NAME")] = None
    tune: Annotated[
        Text,
        AUTO,
        option("Train the probe only, head, last-blocks, lora or all.", "WHAT"),
    ] = None
    minutes: Annotated[OptionalNumber, option("Time limit of the whole command; settings are chosen to fit.")] = None
    epochs: Annotated[OptionalNumber, AUTO, option("Number of passes over the training images.")] = None
    steps: Annotated[OptionalInt, option("Number of optimizer steps, instead of epochs.")] = None
    batch_size: Annotated[OptionalInt, AUTO, option("Images per optimizer step.")] = None
    image_size: Annotated[Text, AUTO, option("Input size, such as 384 or 320x480 (height x width).", "SIZE")] = None
    lr: Annotated[Text, AUTO, option("Peak learning rate.", "LR", name="--optim.lr")] = None
    val: Annotated[Text, option("Test on this dataset instead of on a held-out split.", "DATA")] = None
    group_by: Annotated[
        Text,
        option("Keep images of one group in one split: a column, or a regular expression on names.", "COLUMN|PATTERN"),
    ] = None
    drop: Annotated[Text, option("Train without the images that a CSV file lists.", "FILE")] = None
    objective: Annotated[
        Text, option("classify, or masked-patches to pretrain without labels.", "NAME", show_default="classify")
    ] = None
    parallel: Annotated[
        Text, AUTO, option("ddp, or fsdp to divide weights, gradients and moments among the processes.", "STRATEGY")
    ] = None
    seed: Annotated[OptionalInt, option("Random seed.", show_default="0")] = None
    device: Annotated[Device | None, AUTO] = None
    precision: Annotated[Text, AUTO, option("float32, bfloat16 or float16.", "PRECISION")] = None
    engine: Annotated[
        Text,
        option(
            "Engine of the probe's features: torch, compiled, onnxruntime, openvino or auto.",
            "ENGINE",
            show_default="torch",
        ),
    ] = None
    workers: Annotated[Text, AUTO, option("Processes that load images.", "N")] = None

    def by_name(self) -> dict[str, Any]:
        """Return the settings that were passed, by the names that a TOML file uses."""
        values = {_SETTING_NAMES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


_SETTING_NAMES = {"from_": "from", "tune": "tune.what", "lr": "optim.lr"}


def train(
    data: str | None = None,
    /,
    *,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    recipe: Annotated[Text, AUTO, option(f"Start from the settings of a recipe: {RECIPES}, or none.", "NAME")] = None,
    config: Annotated[File, option("Read settings from a TOML file.")] = None,
    out: Annotated[Path | None, option("Run folder to create. By default runs/<data>-<model>-<n>.", "DIR")] = None,
    resume: Annotated[Path | None, option("Continue an interrupted run.", "RUN")] = None,
    processes: Annotated[
        OptionalInt, option("Train in this many processes of this machine, one per GPU.", show_default="1")
    ] = None,
    max_restarts: Annotated[
        OptionalInt,
        option("With --processes: how often to start all processes again after one was killed.", show_default="3"),
    ] = None,
    tensorboard: Annotated[Switch, option("Also write curves to RUN/tensorboard.")] = False,
    print_config: Annotated[Switch, option("Print all settings as a TOML file and exit.")] = False,
    help_all: Annotated[Switch, option("List all other settings, such as --ema, and exit.")] = False,
    format: Annotated[Format, option("human, json (one line per event on standard error) or quiet.")] = "human",
    set: Annotated[tuple[str, ...], Parameter(show=False, consume_multiple=False)] = (),
) -> None:
    """Train a Vision Transformer on a folder of images.

    Options you omit are chosen automatically and explained. The run folder receives the model, its scores on a held-out
    test split, and a report. Ctrl-C saves the state and prints the command that resumes the run.

    Parameters
    ----------
    data
        A folder of class folders (with or without train, val and test), a CSV or Parquet table, tar shards,
        hf:OWNER/NAME, or builtin:digits.

    Examples
    --------
    vitral train photos/ --from dinov2-s14 --minutes 10
    vitral train photos/ --from dinov2-b14 --tune lora
    vitral train builtin:digits --model vit-nano7 --epochs 20 --optim.lr 3e-4
    vitral train photos/ --model vit-s16 --processes 2
    vitral train --resume runs/photos-1
    """
    if help_all:
        show_settings(list_settings(), RECIPES.split(", "))
        return
    launch_if_asked(processes, max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts)
    values: dict[str, Any] = settings.by_name() | dict(split_setting(setting, "--set optim.lr=3e-4") for setting in set)
    sources: dict[str, Any] = {"recipe": recipe, "config": config}
    if print_config:
        sys.stdout.write(resolved_toml(data, values, resume=resume, out=out, **sources))
    else:
        from vitral.console.training import Interrupted

        events = vitral.train_events(data, tensorboard=tensorboard, resume=resume, out=out, **sources, **values)
        if isinstance(ending := _show(events, format, is_new=resume is None), Interrupted):
            sys.exit(128 + ending.signal)


def _show(events: "Iterator[Event]", format: Format, *, is_new: bool) -> "Ending | None":
    """Show a run and return its last event. Explain Ctrl-C before the run has a folder."""
    from vitral.console.training import Started, show_training

    started = False

    def watched() -> "Iterator[Event]":
        nonlocal started
        for event in events:
            started = started or isinstance(event, Started)
            yield event

    try:
        return show_training(watched(), format)
    except KeyboardInterrupt:
        if started or not is_new:
            raise
        kept = "Nothing is saved yet, except finished features in the cache."
        raise KeyboardInterrupt(f"Interrupted before the first step. {kept} Start again with:") from None


def resolved_toml(
    data: str | None, values: dict[str, Any], resume: Path | None, out: Path | None, **sources: Any
) -> str:
    """Return the settings that a run would start or resume with, as a commented TOML file."""
    from vitral.training.request import collect_settings, reopen
    from vitral.training.settings import as_toml

    if resume is not None:
        return as_toml(reopen(resume, data, values, out=out, **sources)[1])
    return as_toml(collect_settings(data, values, origin="the command line", **sources).config)


def list_settings() -> list[tuple[str, Any, str]]:
    """Return the name, default and meaning of every setting."""
    from vitral.training.config import TrainConfig
    from vitral.training.settings import as_settings, field_texts

    texts = field_texts()
    rows = [(name, value, texts.get(name, "")) for name, value in as_settings(TrainConfig(data="")).items()]
    rows.append(("network.FIELD", "", "Any field of ViTConfig, such as --network.pool mean."))
    return [row for row in rows if row[0] != "data"]


def report(
    run: Path,
    /,
    *,
    open: Annotated[Switch, option("Open the page in the web browser.")] = False,
    overwrite: Annotated[Switch, option("Write the page again, even if it exists.")] = False,
    format: Format = "human",
) -> None:
    """Print the path of a run's report, or open it.

    Writes the page and the model card from the files of the run if the page is missing.

    Parameters
    ----------
    run
        The folder of a finished run.

    Examples
    --------
    vitral report runs/photos-1 --open
    vitral report runs/photos-1 --overwrite
    """
    page = vitral.Run.open(run).report
    if overwrite or not page.is_file():
        page = vitral.write_report(run)
    show_as(format, json={"report": str(page)}, quiet=[str(page)], human=lambda: show_lines([str(page)]))
    if open:
        webbrowser.open(page.resolve().as_uri())

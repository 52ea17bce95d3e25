"""The way in: from what was said to a run that goes on event by event."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitral.data.dataset import DatasetIndex
from vitral.errors import ConfigError
from vitral.runs import Run
from vitral.training.classification import Classification
from vitral.training.config import SECTIONS, TrainConfig
from vitral.training.events import Chosen, Event, Finished, Warned
from vitral.training.loop import Training
from vitral.training.pretraining import Pretraining
from vitral.training.settings import collect_settings, flatten, reopen

OBJECTIVES: dict[str, type[Training]] = {"classify": Classification, "masked-patches": Pretraining}


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    recipe: str | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Iterator[Event]:
    """Trains, and yields what happens. ``settings`` are those of TrainConfig, a section takes a dict; ``recipe`` and
    ``config`` (a TOML file) come before them, as on the command line.

    ``resume`` goes on with a run; settings may be repeated, and must then be the same."""
    if resume is not None:
        return resume_run(*reopen(Path(resume), data, settings, recipe=recipe, config=config, out=out))
    return start_run(*collect_settings(data, flatten(settings), recipe=recipe, config=config), out=out)


def resume_run(run: Run, settled: TrainConfig) -> Iterator[Event]:
    """A run that was begun before."""
    if told := run.read_json(run.report):
        yield Warned(message=f"{run.folder} is finished; there is nothing to go on with.")
        yield Finished(
            folder=run.folder,
            test=told["test"],
            best_step=told["best_step"],
            train_seconds=told["train_seconds"],
        )
        return
    yield from OBJECTIVES[settled.objective](settled, run, resumed=True).run()


def start_run(
    config: TrainConfig,
    data: DatasetIndex | None = None,
    decided: Sequence[Chosen] = (),
    *,
    out: str | Path | None = None,
) -> Iterator[Event]:
    """A new run by settings that are complete; ``data`` is what they name, where it is open already."""
    check_objective(config)
    if out is not None:
        Run.check_free(Path(out))
    place = None if out is None else Path(out)
    return OBJECTIVES[config.objective](config, place, resumed=False, data=data, decided=decided).run()


def check_objective(config: TrainConfig) -> None:
    """ConfigError for a setting of the other objective, which nothing would read. Not part of a TrainConfig's own
    checks: a recipe or a file may bring such a setting before a later layer says which objective it is for."""
    other, section = ("masked-patches", "masking") if config.objective == "classify" else ("classify", "loss")
    for one in fields(SECTIONS[section]):
        value = getattr(getattr(config, section), one.name)
        if value not in (one.default, "none"):  # class_weights are none where there are no classes
            name = f"{section}.{one.name}"
            raise ConfigError(
                f"{name}={value!r} is for objective={other!r}, and this run has objective={config.objective!r}.",
                hint=f"Leave it out; where a recipe brings it, say {name}={one.default}.",
            )
    if config.objective == "masked-patches" and config.tune.what == "head":
        raise ConfigError(
            "tune.what='head' trains the head alone, and the network of objective='masked-patches' has none.",
            hint="Use tune.what=all.",
        )

"""Around a run: what the starting features are worth, and what is written down before and after it."""

import platform
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from vitral.data.contact_sheet import contact_sheet, thumbnail
from vitral.data.dataset import DatasetIndex, Item, counts
from vitral.data.decode import BadImageError
from vitral.data.scan import Progress
from vitral.data.splits import Splits
from vitral.evaluation.evaluator import Options, frozen, make_loader
from vitral.evaluation.results import Evaluation
from vitral.inference.loaded_model import LoadedModel
from vitral.inference.pipeline import ModelOutputs, gather
from vitral.model.cost import count_cost
from vitral.runs import Run, quoted
from vitral.training.config import TrainConfig
from vitral.training.events import Baseline, Chosen, Measuring

SHOTS, NEIGHBOURS, FEWEST = 10, 10, 5
_BUDGET = {"cpu": 2e12, "cuda": 2e14, "mps": 2e13}  # FLOPs: some seconds
_MOST_BEFORE = 5000  # pictures, which have to be decoded, too


def measured(
    events: Generator[Progress, None, ModelOutputs], what: str, *, before: int = 0, total: int | None = None
) -> Generator[Measuring, None, ModelOutputs]:
    """What the pictures are asked for, in the words of a run; ``before`` of the ``total`` were asked already."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return end.value
        yield Measuring(what=what, done=before + event.done, total=total or event.total)


def measure_start(
    ready: LoadedModel, data: DatasetIndex, splits: Splits
) -> Generator[Measuring, None, Baseline | str | None]:
    """Few-shot and nearest neighbours on the features as they come, on a few pictures: what training has to beat; or
    why not. Of several labels a picture they say nothing."""
    each = count_cost(ready.model.config).forward_flops
    affordable = min(_MOST_BEFORE, int(_BUDGET[ready.device.type] / each))
    test = evenly(splits.validation, affordable // 3)
    train = evenly(splits.train, affordable - len(test))
    if data.multi_label:
        return None
    if len(train) < 2 * len(data.classes) or len(test) < FEWEST:
        is_slow = len(splits.train) > len(train) or len(splits.validation) > len(test)
        why = "It would take too long here" if is_slow else "There are too few pictures"
        return f"{why} to measure what the checkpoint knows before training."
    how, total = Options(few_shot=SHOTS, cache=False), len(train) + len(test)
    features: list[ModelOutputs] = []
    for items, before in ((train, 0), (test, len(train))):
        asked = gather(make_loader(ready, items, data, how), ready.features)
        features.append((yield from measured(asked, "start", before=before, total=total)))
    k = min(NEIGHBOURS, len(features[0].rows))
    found: Any = frozen(features[0], features[1], classes=len(data.classes), shots=[SHOTS], k=k)
    return Baseline(
        few_shot=found["few_shot"]["top1"],
        knn=found["knn"]["top1"],
        train_pictures=len(features[0].rows),
        pictures=len(features[1].rows),
    )


def evenly(items: Sequence[Item], most: int) -> tuple[Item, ...]:
    """At most so many, from everywhere."""
    if len(items) <= most:
        return tuple(items)
    return tuple(items[place * len(items) // most] for place in range(most))


def describe_machine(device: torch.device) -> dict[str, Any]:
    from vitral import __version__

    return {
        "versions": {"vitral": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def describe_run(
    config: TrainConfig, data: DatasetIndex, splits: Splits, decisions: Sequence[Chosen], baseline: Baseline | None
) -> dict[str, Any]:
    """The manifest of a run that begins."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {
        **describe_machine(torch.device(config.device)),
        "data": config.data,
        "data_fingerprint": data.fingerprint(),
        "classes": list(data.classes),
        "seed": config.seed,
        "pictures": {name: len(items) for name, items in parts.items()},
        "decisions": [[one.name, str(one.value), one.reason] for one in decisions],
        "baseline": None if baseline is None else asdict(baseline),
        "resumes": [],
    }


def describe_data(data: DatasetIndex, splits: Splits) -> dict[str, Any]:
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {
        "name": data.name,
        "classes": list(data.classes),
        "multi_label": data.multi_label,
        "pictures": {name: len(items) for name, items in parts.items()},
        "per_class": {name: counts(items, len(data.classes)) for name, items in parts.items()},
        "reasons": splits.reasons,
        "notes": list(data.notes),
    }


def write_results(
    run: Run,
    test: dict[str, Any],
    config: TrainConfig,
    data: DatasetIndex,
    splits: Splits,
    facts: dict[str, Any],
    decisions: Sequence[Chosen],
) -> None:
    """report.json and the sheet of the data; the page is drawn from them."""
    shown = [item if data.classes else replace(item, label=0) for item in splits.train]
    contact_sheet(shown, data.classes or ("pictures",)).save(run.plots / "data.png")
    run.write_json(  # the last of all: it says that the run is finished
        run.report,
        {
            "test": test,
            **facts,
            "data": describe_data(data, splits),
            "decisions": [asdict(decided) | {"value": str(decided.value)} for decided in decisions],
            "environment": describe_machine(torch.device(config.device)),
            "command": f"vitral train {quoted(config.data)} --recipe none --config {quoted(str(run.config))}",
        },
    )


def draw_mistakes(run: Run, found: Evaluation, splits: Splits) -> None:
    by_key = {item.key: item for item in splits.test}
    for number, mistake in enumerate(found.mistakes, 1):
        with suppress(BadImageError):  # it was there a moment ago; the report can do without
            thumbnail(by_key[mistake.key]).save(run.plots / f"mistake-{number:02d}.png")

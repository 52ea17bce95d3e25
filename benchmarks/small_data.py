"""Fine-tune a checkpoint on small datasets within a time budget: vitral's default against its own ways alone, logistic
regression on frozen features, and the usual fine-tuning script.

    python -m benchmarks.small_data WEIGHTS --flowers FOLDER --cifar10 SHARDS --work DIR --minutes 1 3 --seeds 0 1 2

Each seed draws other training images: of flowers four fifths, of CIFAR-10 500 or 5,000. All ways see the same images.
The time is that of the whole command; the accuracy is measured afterwards, on the same test images for all ways (all of
flowers, 1,000 of CIFAR-10). A finished cell is written to the results at once and not measured again, so the command
can be stopped and started again, also on another machine. All ways of one dataset, budget and seed are measured on one
CPU, because the time decides the plan: a group that another CPU left incomplete starts over. In the end the command
writes the table into docs/explanation/results.md; `--table` only does that.
"""

import argparse
import itertools
import json
import math
import os
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegressionCV
from torch import Tensor

import vitral
from benchmarks.timing import RESULTS, describe_machine
from vitral.data import Augment, loader
from vitral.data.dataset import Item
from vitral.data.sources import open_dataset
from vitral.data.splits import sample_items
from vitral.evaluation.metrics import compare, wilson
from vitral.files import atomic_path
from vitral.inference.loaded_model import LoadedModel, load_model
from vitral.inference.pipeline import ModelOutputs, make_loader, run_model

TUNED = ("probe", "head", "last-blocks", "lora", "all")
WAYS = ("vitral", "scikit-learn", "script", *TUNED)
DATASETS = {"flowers": 816, "cifar10-500": 500, "cifar10-5000": 5000}
"""Training images per dataset."""
TEST_IMAGES = 1000
SCRIPT_LR, SCRIPT_BATCH, SCRIPT_SIZE = 5e-5, 8, 224
"""As in the image-classification example of transformers."""
SEEDS = {1.0: 3, 3.0: 3, 10.0: 1}
"""Number of seeds that a complete table has, by the minutes."""
KEY = ("data", "minutes", "way", "seed")
PATH = RESULTS / "small_data.json"
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "results.md"
START, END = "<!-- small data -->", "<!-- end of small data -->"
Cell = dict[str, Any]


def write_subset(source: str, folder: Path, images: int, seed: int) -> Path:
    """Write a seeded sample of the training images, an equal share of each class, and the test images."""
    if (folder / "complete").is_file():
        return folder / "data"
    data = open_dataset(source)
    random = torch.Generator().manual_seed(seed)
    shuffled = [data.splits["train"][int(i)] for i in torch.randperm(len(data.splits["train"]), generator=random)]
    per_class, counts = math.ceil(images / len(data.classes)), dict.fromkeys(range(len(data.classes)), 0)
    for item in shuffled:
        assert isinstance(item.label, int)
        if counts[item.label] < per_class and sum(counts.values()) < images:
            counts[item.label] += 1
            _write_image(item, folder / "data" / "train", data.classes)
    for item in sample_items(data.splits["test"], TEST_IMAGES):
        _write_image(item, folder / "data" / "test", data.classes)
    (folder / "complete").touch()
    return folder / "data"


def _write_image(item: Item, folder: Path, classes: tuple[str, ...]) -> None:
    content = item.source.read()
    assert isinstance(item.label, int)
    assert isinstance(content, bytes)
    target = folder / classes[item.label] / item.key.replace("/", "-")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(target.suffix or ".png").write_bytes(content)


# ---- ways: each returns the seconds it took, whether each test image is correct, and the size of the images ----


def run_vitral(way: str, data: Path, weights: str, out: Path, minutes: float) -> Cell:
    """Train as the command does, with its default or one way forced."""
    tune: dict[str, Any] = {} if way == "vitral" else {"tune": way}
    start = time.perf_counter()
    run = vitral.train(data, from_=weights, minutes=minutes, out=out, progress=False, **tune)
    seconds = time.perf_counter() - start
    report, model = run.read_report(), load_model(run.folder)
    outputs = compute(model, open_dataset(data).splits["test"], model.logits)
    return {
        "seconds": seconds,
        "correct": as_text(outputs.correct),
        "size": model.model.config.image_hw[0],
        "reported": {name: report["test"][name] for name in ("top1", "images")},
        "candidates": report["candidates"],
    }


def run_scikit_learn(data: Path, weights: str, size: int) -> Cell:
    """Fit LogisticRegressionCV to the class tokens at the size that vitral chose: the ten lines that people write."""
    start = time.perf_counter()
    model, dataset = load_model(weights, image_size=(size, size)), open_dataset(data)
    train = compute(model, dataset.splits["train"], model.features)
    probe = LogisticRegressionCV(Cs=9, cv=3, max_iter=300, n_jobs=2).fit(train.outputs.numpy(), train.labels.numpy())
    test = compute(model, dataset.splits["test"], model.features)
    correct = torch.from_numpy(probe.predict(test.outputs.numpy())) == test.labels
    return {"seconds": time.perf_counter() - start, "correct": as_text(correct), "size": size}


def run_script(data: Path, weights: str, minutes: float) -> Cell:
    """Fine-tune all weights from a head of zeros with AdamW at 5e-5, linear decay, until the time is over."""
    dataset, start = open_dataset(data), time.perf_counter()
    checkpoint = vitral.load(weights, image_size=SCRIPT_SIZE, num_classes=len(dataset.classes))
    model = checkpoint.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SCRIPT_LR, weight_decay=0.0)
    options: dict[str, Any] = dict(preprocess=checkpoint.preprocess, batch_size=SCRIPT_BATCH)
    batches = (
        batch
        for epoch in itertools.count()
        for batch in loader(data, "train", augment=Augment(flip=0.5), seed=epoch, **options)
    )
    end = start + 60 * minutes
    for images, labels in batches:
        left = (end - time.perf_counter()) / (end - start)
        if left <= 0:
            break
        optimizer.param_groups[0]["lr"] = SCRIPT_LR * left
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.inference_mode():
        correct = [model(images).argmax(1) == labels for images, labels in loader(data, "test", **options)]
    return {"seconds": seconds, "correct": as_text(torch.cat(correct)), "size": SCRIPT_SIZE}


def compute(model: LoadedModel, items: Sequence[Item], function: Callable[..., Tensor]) -> ModelOutputs:
    running = run_model(make_loader(model, items), function)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


# ---- results ----


def as_text(correct: Tensor) -> str:
    return "".join("1" if hit else "0" for hit in correct.tolist())


def as_tensor(cells: Sequence[Cell]) -> Tensor:
    return torch.tensor(
        [hit == "1" for cell in sorted(cells, key=lambda cell: cell["seed"]) for hit in cell["correct"]]
    )


def cpu_of(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']} ({machine['threads']} threads, {machine['capability']})"


def key_of(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell[field] for field in KEY)


def drop_other_cpus(cells: dict[tuple[Any, ...], Cell], group: tuple[Any, ...], ways: Sequence[str], cpu: str) -> None:
    """Remove the cells of a dataset, budget and seed that another CPU measured, unless it measured all these ways."""
    data, minutes, seed = group
    keys = [(data, minutes, way, seed) for way in WAYS]
    measured = {key: cells[key] for key in keys if key in cells}
    if not {(data, minutes, way, seed) for way in ways} <= measured.keys():
        for key, cell in measured.items():
            if cpu_of(cell["machine"]) != cpu:
                del cells[key]


def read_cells() -> list[Cell]:
    return json.loads(PATH.read_text())["rows"] if PATH.is_file() else []


def write_cells(cells: Sequence[Cell]) -> None:
    with atomic_path(PATH) as temporary:
        temporary.write_text(json.dumps({"rows": [*cells]}, indent=1) + "\n")


def make_table(cells: Sequence[Cell]) -> str:
    """Return a row per dataset, budget and way, with vitral's paired difference from that way on the same images."""
    dates = sorted({cell["machine"]["date"] for cell in cells})
    complete = len(DATASETS) * len(WAYS) * sum(SEEDS.values())
    cpus = [*dict.fromkeys(cpu_of(cell["machine"]) for cell in cells)]
    names = dict(zip(cpus, string.ascii_uppercase, strict=False))
    lines = [
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {len(cells)} of {complete} cells. CPUs:",
        *(f"{letter}: {cpu}." for cpu, letter in names.items()),
        "",
        "| dataset | minutes | method | image size | accuracy | 95 % interval | seconds | seeds | CPU "
        "| vitral minus this |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for data, minutes in sorted({(cell["data"], cell["minutes"]) for cell in cells}):
        ways = {
            way: {c["seed"]: c for c in cells if (c["data"], c["minutes"], c["way"]) == (data, minutes, way)}
            for way in WAYS
        }
        rows = [_row(way, of_way, ways["vitral"], names) for way, of_way in ways.items() if of_way]
        lines += [f"| {data} | {minutes:g} | {row}" for row in rows]
    return "\n".join(lines)


def _row(way: str, of_way: dict[int, Cell], ours: dict[int, Cell], cpus: dict[str, str]) -> str:
    hits = as_tensor([*of_way.values()])
    low, high = wilson(hits.sum().item(), len(hits))
    seconds = mean(cell["seconds"] for cell in of_way.values())
    cpu = ", ".join(sorted({cpus[cpu_of(cell["machine"])] for cell in of_way.values()}))
    sizes = ", ".join(str(size) for size in sorted({cell["size"] for cell in of_way.values()}))
    gap = ""
    if way != "vitral" and (both := sorted(of_way.keys() & ours.keys())):
        pair = compare(as_tensor([of_way[seed] for seed in both]), as_tensor([ours[seed] for seed in both]))
        gap = f"{100 * pair.difference:+.1f} ({100 * pair.low:+.1f} to {100 * pair.high:+.1f})"
    name = "**vitral**" if way == "vitral" else f"--tune {way}" if way in TUNED else way
    accuracy = f"{hits.double().mean():.1%} | {low:.1%} to {high:.1%}"
    return f"{name} | {sizes} | {accuracy} | {seconds:.0f} | {len(of_way)} | {cpu} | {gap} |"


def renew_page(text: str, table: str) -> str:
    """Return the page with this table between its markers."""
    return f"{text.split(START)[0]}{START}\n{table}\n{END}{text.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="?")
    parser.add_argument("--flowers")
    parser.add_argument("--cifar10")
    parser.add_argument("--work", type=Path, help="folder for the subsets and the runs")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 3, 10])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    sources = {name: options.flowers if name == "flowers" else options.cifar10 for name in options.datasets}
    machine = describe_machine()
    cells = {key_of(cell): cell for cell in read_cells()}
    todo = itertools.product(options.seeds, options.minutes, sources, options.ways)
    for seed, minutes, name, way in todo if not options.table else ():
        key, default = ((name, minutes, chosen, seed) for chosen in (way, "vitral"))
        if sources[name] is None:
            continue
        drop_other_cpus(cells, (name, minutes, seed), options.ways, cpu_of(machine))
        if key in cells:
            continue
        if way == "scikit-learn" and default not in cells:
            parser.error(f"scikit-learn uses the image size of vitral, which {name} with seed {seed} does not have yet")
        os.environ["VITRAL_CACHE"] = str(options.work / "cache" / f"{time.time_ns()}")  # no cell profits from another
        data = write_subset(sources[name], options.work / f"{name}-{seed}", DATASETS[name], seed)
        if way == "scikit-learn":
            size = cells[default]["size"]
            before = (c for k, c in cells.items() if (k[0], *k[2:]) == (name, way, seed) and c["size"] == size)
            measured = next((c for c in before if cpu_of(c["machine"]) == cpu_of(machine)), None)  # for another budget
            result = measured or run_scikit_learn(data, options.weights, size)
        elif way == "script":
            result = run_script(data, options.weights, minutes)
        else:
            out = options.work / "runs" / f"{name}-{minutes:g}-{way}-{seed}-{time.time_ns()}"
            result = run_vitral(way, data, options.weights, out, minutes)
        cells[key] = cell = {**result, **dict(zip(KEY, key, strict=True)), "machine": machine}
        write_cells([*cells.values()])
        accuracy = as_tensor([cell]).double().mean()
        print(f"{name}, {minutes:g} min, {way}, seed {seed}: {accuracy:.1%}, {result['seconds']:.0f} s", flush=True)
    table = make_table([*cells.values()])
    PAGE.write_text(renew_page(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()

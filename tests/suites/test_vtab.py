"""VTAB-1k: the table of tasks, their labels and splits, and the whole suite on stand-ins in every format."""

import io
import json
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from tests.cli.typed import typed as run
from vitral.console.tables import show_suite
from vitral.errors import DataError
from vitral.suites.runner import SuiteResult, TaskProgress, TaskResult, suite_events
from vitral.suites.vtab import GROUPS, TASKS, class_of_label, find_task, open_task

pa = pytest.importorskip("pyarrow")


# As printed in the paper: natural | specialized | structured | mean.
TABLE_9 = (
    "95.3 85.5 75.2 99.7 97.2 65.0 88.9 | 83.3 96.7 91.4 76.6 | 91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2 | 77.6",
    "95.4 81.9 74.3 99.7 96.7 63.5 87.4 | 83.6 96.5 89.7 77.1 | 86.4 63.1 49.7 74.5 60.5 82.2 36.2 51.1 | 76.3",
    "90.8 84.1 74.1 99.3 92.7 61.0 80.9 | 82.5 95.6 85.2 75.3 | 70.3 56.1 41.9 74.7 64.9 79.9 30.5 41.7 | 72.7",
)


def test_the_tasks_match_table_9() -> None:
    assert len(TASKS) == 19
    assert [sum(task.group == group for task in TASKS.values()) for group in GROUPS] == [7, 4, 8]
    for column, row in enumerate(TABLE_9):
        numbers = [float(word) for word in row.replace("|", " ").split()]
        assert [task.paper[column] for task in TASKS.values()] == numbers[:19]
        assert sum(numbers[:19]) / 19 == pytest.approx(numbers[19], abs=0.06)


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("clevr-count", ["3", "10"], [0, 7]),
        ("clevr-distance", ["0.5", "7.9", "8", "8.1", "8.6", "9.4", "9.9", "42"], [0, 0, 0, 1, 2, 3, 4, 5]),
        ("kitti-distance", ["-3", "8", "8.1", "20", "20.5", "500", "none", "1000"], [0, 0, 1, 1, 2, 2, 3, 3]),
        ("dsprites-location", ["0", "1", "2", "31"], [0, 0, 1, 15]),
        ("dsprites-orientation", ["0", "2", "3", "39"], [0, 0, 1, 15]),
    ],
)
def test_raw_labels_fall_into_the_bins_of_the_reference_code(name: str, raw: list[str], expected: list[int]) -> None:
    assert [class_of_label(label, TASKS[name]) for label in raw] == expected


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("clevr-count", "2"),
        ("clevr-count", "3.5"),
        ("dsprites-location", "31.9"),
        ("clevr-distance", "101"),
        ("kitti-distance", "car"),
        ("kitti-distance", "nan"),
    ],
)
def test_invalid_raw_labels(name: str, label: str) -> None:
    with pytest.raises(DataError, match=label):
        class_of_label(label, TASKS[name])


# ---- stand-ins ----


def make_image(number: int, label: int, labels: int) -> bytes:
    """Return a PNG whose brightness shows its class."""
    random = np.random.default_rng(number)
    pixels = np.clip(255 * label / max(1, labels - 1) + random.normal(0, 4, (16, 16, 3)), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


RAW = {
    "clevr-count": [str(n) for n in range(3, 11)],
    "clevr-distance": ["4.0", "8.25", "8.75", "9.25", "9.75", "20.0"],
    "dsprites-location": [str(2 * n) for n in range(16)],
    "dsprites-orientation": [str(n) for n in (0, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30, 33, 35, 38)],
    "kitti-distance": ["5.0", "12.0", "80.0", "none"],
}


def labels_of(name: str) -> list[str]:
    return RAW.get(name) or [f"c{n:03d}" for n in range(TASKS[name].classes)]


def write_folders(path: Path, rows: list[tuple[str, str, bytes]]) -> None:
    for number, (split, label, content) in enumerate(rows):
        (path / split / label).mkdir(parents=True, exist_ok=True)
        (path / split / label / f"{number:05d}.png").write_bytes(content)


def write_table(path: Path, rows: list[tuple[str, str, bytes]]) -> None:
    import pyarrow.parquet as pq

    table = {
        "image": [{"bytes": content, "path": None} for _, _, content in rows],
        "label": [label for _, label, _ in rows],
        "split": [split for split, _, _ in rows],
    }
    pq.write_table(pa.table(table), path.with_suffix(".parquet"))


def write_shards(path: Path, rows: list[tuple[str, str, bytes]]) -> None:
    path.mkdir(parents=True)
    classes = sorted({label for _, label, _ in rows})
    (path / "classes.txt").write_text("\n".join(classes) + "\n")
    for split in {split for split, _, _ in rows}:
        with tarfile.open(path / f"{split}-000.tar", "w") as shard:
            for number, (_, label, content) in enumerate(row for row in rows if row[0] == split):
                for ending, data in (("png", content), ("cls", str(classes.index(label)).encode())):
                    member = tarfile.TarInfo(f"{number:05d}.{ending}")
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))


def write_task(name: str, folder: Path, write: Any, each: int = 3) -> None:
    """Write a task with the splits of its original dataset; classes take turns, as in shuffled data."""
    task, labels = TASKS[name], labels_of(name)
    splits = ["train", "test"]
    if (task.group == "specialized" and task.fractions) or name.startswith("dsprites"):
        splits = ["train"]  # these datasets have no other split
    elif task.fractions is None and not name.startswith("smallnorb"):
        splits = ["train", "val", "test"]
    rows = [
        (split, label, make_image(1000 * turn + number, number, len(labels)))
        for split in splits
        for turn in range(each * (3 if splits == ["train"] else 1))
        for number, label in enumerate(labels)
    ]
    write(folder / name, rows)


FORMATS = [write_folders, write_table, write_shards]


def test_the_first_800_and_200_images_are_trained_on(tmp_path: Path) -> None:
    write_task("cifar100", tmp_path, write_shards, each=12)  # 1,200 training images, 10 % of them for validation
    data = open_task(TASKS["cifar100"], tmp_path / "cifar100")
    assert {name: len(items) for name, items in data.splits.items()} == {"train": 920, "val": 120, "test": 1200}
    keys = [item.key for item in data.splits["train"]]
    stored = [f"train-000/{number:05d}" for number in (*range(800), *range(1080, 1200))]
    assert [key.removesuffix(".png") for key in keys] == stored  # the first 800, and the validation images


def test_a_dataset_without_splits_is_split_as_in_the_reference_code(tmp_path: Path) -> None:
    write_task("eurosat", tmp_path, write_table, each=50)
    data = open_task(TASKS["eurosat"], tmp_path / "eurosat.parquet")
    assert {name: len(items) for name, items in data.splits.items()} == {"train": 1000, "val": 200, "test": 300}
    seen = [{item.key for item in items} for items in data.splits.values()]
    assert not seen[0] & seen[2]


def test_class_folders_are_shuffled(tmp_path: Path) -> None:
    write_task("svhn", tmp_path, write_folders, each=100)
    data = open_task(TASKS["svhn"], tmp_path / "svhn")
    assert len(data.splits["train"]) == 900
    assert len({item.label for item in data.splits["train"][:40]}) == 10


def test_a_wrong_number_of_classes_raises(tmp_path: Path) -> None:
    write_folders(tmp_path / "pets", [("train", "cat", make_image(0, 0, 2)), ("test", "cat", make_image(1, 0, 2))])
    with pytest.raises(DataError, match="1 classes; pets needs 37"):
        open_task(TASKS["pets"], tmp_path / "pets")


def test_the_whole_suite_on_stand_ins(tmp_path: Path) -> None:
    """Run all 19 tasks for one step each, in three formats."""
    for number, name in enumerate(TASKS):
        write_task(name, tmp_path / "vtab", FORMATS[number % 3], each=1)
        assert find_task(name, tmp_path / "vtab") is not None
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    options = ["--suite", "vtab-1k", "--steps", "1", "--image-size", "16", "--format", "json"]
    done = run("evaluate", str(tmp_path / "model.safetensors"), str(tmp_path / "vtab"), *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [task["task"] for task in result["tasks"]] == list(TASKS)
    assert not result["complete"]  # the paper trains on 1,000 images per task
    assert not result["failed"]
    assert not result["missing"]
    assert result["mean"] == pytest.approx(np.mean([task["top1"] for task in result["tasks"]]))
    assert result["changed"] == {"steps": 1, "image_size": [16, 16]}


@pytest.mark.parametrize("name", TASKS)
def test_training_and_test_images_are_disjoint(name: str, tmp_path: Path) -> None:
    write_task(name, tmp_path, write_shards, each=1)
    splits = open_task(TASKS[name], tmp_path / name).splits
    train, test = ({item.key for item in splits[split]} for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_missing_and_failed_tasks_are_reported(tmp_path: Path) -> None:
    write_task("camelyon", tmp_path, write_folders, each=20)
    write_folders(tmp_path / "pets", [("train", "cat", make_image(0, 0, 2)), ("test", "cat", make_image(1, 0, 2))])
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    options = ["--suite", "vtab-1k", "--steps", "60", "--image-size", "16", "--batch-size", "16"]
    done = run("evaluate", str(tmp_path / "model.safetensors"), str(tmp_path), *options)
    assert done.returncode == 3  # one task failed
    assert "camelyon" in done.stdout
    assert "83.3" in done.stdout  # the paper's H/14
    assert "pets: failed: " in done.stdout
    assert "Not found: caltech101" in done.stdout
    assert "Differs from the paper's protocol: image_size=(16, 16), steps=60, batch_size=16" in done.stdout
    assert "camelyon: trained on 80 images instead of 1,000" in done.stdout
    assert float(done.stdout.split("camelyon")[1].split()[0]) > 90  # bright or dark: it has learned


def test_problems_of_a_dataset_are_reported(tmp_path: Path) -> None:
    """Rows without a label remove a class, and an empty file is not an image."""
    labels = ["5", "15", "30", ""]
    rows = [
        (split, label, make_image(number, labels.index(label), 4))
        for split in ("train", "val", "test")
        for number, label in enumerate(labels * 3)
    ]
    lines = ["image,label,split"]
    for number, (split, label, content) in enumerate(rows):
        (tmp_path / "kitti-distance").mkdir(exist_ok=True)
        (tmp_path / "kitti-distance" / f"{number}.png").write_bytes(content)
        lines.append(f"kitti-distance/{number}.png,{label},{split}")
    (tmp_path / "kitti-distance.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "kitti-distance" / "24.png").write_bytes(b"")
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    options = ["--suite", "vtab-1k", "--steps", "1", "--image-size", "16", "--batch-size", "4"]
    done = run("evaluate", str(tmp_path / "model.safetensors"), str(tmp_path), *options)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "kitti-distance: the test images cover 3 of 4 classes" in done.stdout
    assert "kitti-distance: 1 unreadable test image" in done.stdout
    assert "kitti-distance: Skipped rows: " in done.stdout


def test_two_datasets_for_one_task_raise(tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100.csv").touch()
    assert find_task("cifar100", tmp_path) == (tmp_path / "cifar100.csv", None)
    (tmp_path / "cifar100=cifar10").mkdir()
    with pytest.raises(DataError, match="2 datasets for cifar100"):
        find_task("cifar100", tmp_path)


def test_stand_ins_are_named(tmp_path: Path) -> None:
    rows = [
        (split, str(number % 4), make_image(part * 100 + number, number % 4, 4))
        for part, split in enumerate(("train", "test"))
        for number in range(40)
    ]
    write_shards(tmp_path / "cifar100=four-colors", rows)
    write_task("camelyon", tmp_path, write_folders, each=20)
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    first, *_, result = suite_events(
        str(tmp_path / "model.safetensors"), tmp_path, epochs=1, image_size=(16, 16), batch_size=8
    )
    assert isinstance(first, TaskProgress)
    assert first.total < 100  # an epoch instead of the protocol's 2,500 steps
    assert isinstance(result, SuiteResult)
    assert [(task.task, task.stand_in) for task in result.tasks] == [("cifar100", "four-colors"), ("camelyon", None)]
    assert result.tasks[0].train_images == 40  # 36, and 4 for validation
    assert result.unrecognized == ("model.safetensors",)
    write_shards(tmp_path / "cifar100=others", rows)
    with pytest.raises(DataError, match="2 datasets for cifar100"):
        list(suite_events(str(tmp_path / "model.safetensors"), tmp_path))


def test_the_size_of_the_paper_is_not_a_change(tmp_path: Path) -> None:
    for name in ("camelyon", "pets", "svhn"):
        write_folders(tmp_path / name, [("train", "cat", make_image(0, 0, 2)), ("test", "cat", make_image(1, 0, 2))])
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    for size in (384, (384, 384)):
        *_, result = suite_events(tmp_path / "model.safetensors", tmp_path, image_size=size)
        assert len(result.failed) == 3  # a single class is not enough
        assert not result.changed


def test_an_interrupted_suite_reports_the_finished_tasks(tmp_path: Path) -> None:
    for name in ("svhn", "camelyon", "eurosat"):
        write_task(name, tmp_path, write_folders, each=8)
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    events = suite_events(tmp_path / "model.safetensors", tmp_path, steps=3, image_size=16, batch_size=8)
    seen = []
    for event in events:
        seen.append(event)
        if sum(isinstance(earlier, TaskResult) for earlier in seen) == 1 and isinstance(event, TaskProgress):
            signal.raise_signal(signal.SIGTERM)
    result = seen[-1]
    assert isinstance(result, SuiteResult)
    assert [task.task for task in result.tasks] == ["svhn"]
    assert result.unfinished == ("camelyon", "eurosat")
    assert result.signal == signal.SIGTERM


def test_finished_tasks_survive_one_that_runs_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("svhn", "camelyon"):
        write_task(name, tmp_path, write_folders, each=8)
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    original = vitral.suites.runner.start_run  # type: ignore[attr-defined]

    def fail(request: Any, out: Path) -> Any:
        if out.name == "camelyon":
            raise RuntimeError("can't allocate memory: you tried to allocate 177167400960 bytes\nand so on")
        return original(request, out=out)

    monkeypatch.setattr("vitral.suites.runner.start_run", fail)
    settings: dict[str, Any] = dict(steps=2, image_size=16, batch_size=8, accumulate=2)
    *_, result = suite_events(tmp_path / "model.safetensors", tmp_path, **settings)
    assert isinstance(result, SuiteResult)
    assert [task.task for task in result.tasks] == ["svhn"]
    assert result.failed == {
        "camelyon": "RuntimeError: can't allocate memory: you tried to allocate 177167400960 bytes"
    }
    assert result.changed.keys() == {"steps", "image_size", "batch_size"}  # accumulation does not change the batch


def test_a_stand_in_without_a_name_raises(tmp_path: Path) -> None:
    (tmp_path / "pets=").mkdir()
    with pytest.raises(DataError, match="pets= does not name its stand-in"):
        find_task("pets", tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "vit-cifar1"}, "Did you mean 'vit-cifar10'"),
        ({"model": vitral.create("vit-pico8")}, "path or name of a model"),
        ({"data": None}, "folder of the tasks"),
        ({"image_size": 17}, "17"),
        ({"device": "cuda:77"}, "cuda"),
        ({"objective": "masked-patches"}, "sets objective itself"),
        ({"val_fraction": 0.1}, "sets val_fraction itself"),
        ({"epochs": 1}, "steps and epochs both"),
        ({"from": "x"}, "sets from itself"),
    ],
)
def test_mistakes_in_the_settings_raise_before_the_first_task(changes: Any, reason: str, tmp_path: Path) -> None:
    write_task("camelyon", tmp_path, write_folders)
    write_task("svhn", tmp_path, write_folders)
    vitral.save(vitral.create("vit-pico8", image_size=16), tmp_path / "model.safetensors")
    arguments = {"model": str(tmp_path / "model.safetensors"), "data": tmp_path, "image_size": 16, "steps": 1} | changes
    with pytest.raises(vitral.VitralError, match=reason):
        list(suite_events(arguments.pop("model"), arguments.pop("data"), **arguments))


def test_a_stand_in_is_not_compared_with_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    task = {"group": "natural", "top1": 0.5, "low": 0.4, "high": 0.6, "images": 9, "paper": (85.5, 81.9, 84.1)}
    result = {"paper_models": ["H"], "groups": {"natural": 0.5}, "failed": {}, "missing": (), "changed": {}}
    task |= {"train_images": 1000, "classes": 100, "classes_seen": 10, "unreadable": 0, "notes": ()}
    result |= {"train_images": 1000, "interrupted": True, "unfinished": ("svhn",), "unrecognized": ("Pets.csv",)}
    show_suite(result | {"tasks": [task | {"task": "cifar100", "stand_in": "cifar10"}]})
    shown = capsys.readouterr().out
    assert "Not finished: svhn" in shown
    assert "Not a task of the suite: Pets.csv" in shown
    assert "cifar10 for cifar100" in shown
    assert "cifar100: replaced by cifar10" in shown
    assert "85.5" not in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{m} --suite vtab-1k", "needs the folder of its tasks"),
        ("{m} {d} --suite vtab-1k", "has no task of the suite"),
        ("{m} {d}/nothing --suite vtab-1k", "does not exist"),
        ("{m} {d} --suite vtab-1k --knn 3", "cannot be combined with --suite"),
        ("{m} {d} --suite vtab-1k --knn 0", "cannot be combined with --suite"),
        ("{m} {d} --suite vtab-1k --temperature", "cannot be combined with --suite"),
        ("{m} {d} --suite vtab-1k --no-cache", "cannot be combined with --suite"),
        ("{m} {d} --steps 3", "applies to a suite only"),
    ],
)
def test_wrong_use_exits_with_2(arguments: str, reason: str, tmp_path: Path) -> None:
    vitral.save(vitral.create("vit-pico8"), tmp_path / "m.safetensors")
    (tmp_path / "empty").mkdir()
    done = run("evaluate", *arguments.format(m=tmp_path / "m.safetensors", d=tmp_path / "empty").split())
    assert done.returncode == 2
    assert reason in done.stderr

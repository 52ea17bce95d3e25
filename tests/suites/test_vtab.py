"""VTAB-1k: the table of tasks, their labels and splits, and the whole suite on stand-ins in every form."""

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
from vitral.console.suite import show_suite
from vitral.errors import DataError
from vitral.suites.runner import SuiteResult, TaskProgress, TaskResult
from vitral.suites.vtab import GROUPS, TASKS, find_task, open_task

pa = pytest.importorskip("pyarrow")


# As it is printed: natural | specialized | structured | mean.
TABLE_9 = (
    "95.3 85.5 75.2 99.7 97.2 65.0 88.9 | 83.3 96.7 91.4 76.6 | 91.7 63.8 53.1 79.4 63.3 84.5 33.2 51.2 | 77.6",
    "95.4 81.9 74.3 99.7 96.7 63.5 87.4 | 83.6 96.5 89.7 77.1 | 86.4 63.1 49.7 74.5 60.5 82.2 36.2 51.1 | 76.3",
    "90.8 84.1 74.1 99.3 92.7 61.0 80.9 | 82.5 95.6 85.2 75.3 | 70.3 56.1 41.9 74.7 64.9 79.9 30.5 41.7 | 72.7",
)


def test_the_table_of_tasks() -> None:
    assert len(TASKS) == 19
    assert [sum(task.group == group for task in TASKS.values()) for group in GROUPS] == [7, 4, 8]
    for column, row in enumerate(TABLE_9):
        numbers = [float(word) for word in row.replace("|", " ").split()]
        assert [task.papers[column] for task in TASKS.values()] == numbers[:19]
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
def test_raw_labels_fall_into_the_bins_of_the_reference(name: str, raw: list[str], expected: list[int]) -> None:
    from vitral.suites.vtab import _class_of

    assert [_class_of(label, TASKS[name]) for label in raw] == expected


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
def test_raw_labels_that_cannot_be(name: str, label: str) -> None:
    from vitral.suites.vtab import _class_of

    with pytest.raises(DataError, match=label):
        _class_of(label, TASKS[name])


# ---- stand-ins ----


def picture(number: int, kind: int, kinds: int) -> bytes:
    """The brightness says which kind it is."""
    random = np.random.default_rng(number)
    pixels = np.clip(255 * kind / max(1, kinds - 1) + random.normal(0, 4, (16, 16, 3)), 0, 255).astype(np.uint8)
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


def stand_in(name: str, place: Path, form: Any, each: int = 3) -> None:
    """A task with the splits that its data come with; classes in turn, as shuffled data have them."""
    task, labels = TASKS[name], labels_of(name)
    splits = ["train", "test"]
    if (task.group == "specialized" and task.parts) or name.startswith("dsprites"):
        splits = ["train"]  # these come in one piece
    elif task.parts is None and not name.startswith("smallnorb"):
        splits = ["train", "val", "test"]
    rows = [
        (split, label, picture(1000 * turn + number, number, len(labels)))
        for split in splits
        for turn in range(each * (3 if splits == ["train"] else 1))
        for number, label in enumerate(labels)
    ]
    form(place / name, rows)


FORMS = [write_folders, write_table, write_shards]


def test_which_pictures_are_trained_on(tmp_path: Path) -> None:
    stand_in("cifar100", tmp_path, write_shards, each=12)  # 1,200 to train with, 10 % of them to validate
    data = open_task(TASKS["cifar100"], tmp_path / "cifar100")
    assert {name: len(items) for name, items in data.splits.items()} == {"train": 920, "val": 120, "test": 1200}
    keys = [item.key for item in data.splits["train"]]
    stored = [f"train-000/{number:05d}" for number in (*range(800), *range(1080, 1200))]
    assert [key.removesuffix(".png") for key in keys] == stored  # the first 800, and the first of the tail


def test_data_in_one_piece_are_cut_as_the_reference_does(tmp_path: Path) -> None:
    stand_in("eurosat", tmp_path, write_table, each=50)
    data = open_task(TASKS["eurosat"], tmp_path / "eurosat.parquet")
    assert {name: len(items) for name, items in data.splits.items()} == {"train": 1000, "val": 200, "test": 300}
    seen = [{item.key for item in items} for items in data.splits.values()]
    assert not seen[0] & seen[2]


def test_folders_are_not_taken_class_by_class(tmp_path: Path) -> None:
    stand_in("svhn", tmp_path, write_folders, each=100)
    data = open_task(TASKS["svhn"], tmp_path / "svhn")
    assert len(data.splits["train"]) == 900
    assert len({item.label for item in data.splits["train"][:40]}) == 10


def test_a_wrong_number_of_classes_is_told(tmp_path: Path) -> None:
    write_folders(tmp_path / "pets", [("train", "cat", picture(0, 0, 2)), ("test", "cat", picture(1, 0, 2))])
    with pytest.raises(DataError, match="1 classes, and pets has 37"):
        open_task(TASKS["pets"], tmp_path / "pets")


def test_the_whole_suite_on_stand_ins(tmp_path: Path) -> None:
    """All 19 tasks, each in one of the three forms, a few steps each."""
    for number, name in enumerate(TASKS):
        stand_in(name, tmp_path / "vtab", FORMS[number % 3])
        assert find_task(name, tmp_path / "vtab") is not None
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    words = ["--suite", "vtab-1k", "--steps", "1", "--image-size", "16", "--format", "json"]
    done = run("evaluate", str(tmp_path / "model.safetensors"), str(tmp_path / "vtab"), *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [task["task"] for task in told["tasks"]] == list(TASKS)
    assert not told["is_whole"]  # a few pictures each are not the thousand of the paper
    assert not told["failed"]
    assert not told["missing"]
    assert told["mean"] == pytest.approx(np.mean([task["top1"] for task in told["tasks"]]))
    assert told["changed"] == {"steps": 1, "image_size": [16, 16]}


@pytest.mark.parametrize("name", TASKS)
def test_no_picture_is_trained_on_and_tested(name: str, tmp_path: Path) -> None:
    stand_in(name, tmp_path, write_shards)
    splits = open_task(TASKS[name], tmp_path / name).splits
    train, test = ({item.key for item in splits[split]} for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_what_is_missing_is_said_and_the_rest_reported(tmp_path: Path) -> None:
    stand_in("camelyon", tmp_path, write_folders, each=20)
    write_folders(tmp_path / "pets", [("train", "cat", picture(0, 0, 2)), ("test", "cat", picture(1, 0, 2))])
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    words = ["--suite", "vtab-1k", "--steps", "60", "--image-size", "16", "--batch-size", "16"]
    done = run("evaluate", str(tmp_path / "model.safetensors"), str(tmp_path), *words)
    assert done.returncode == 3  # one task could not be used
    assert "camelyon" in done.stdout
    assert "83.3" in done.stdout  # the paper's H/14
    assert "not measured: pets" in done.stdout
    assert "not there: caltech101" in done.stdout
    assert "not the paper's protocol: image_size=(16, 16), steps=60, batch_size=16" in done.stdout
    assert "camelyon was trained on 80 pictures instead of 1,000" in done.stdout
    assert float(done.stdout.split("camelyon")[1].split()[0]) > 90  # bright or dark: it did learn


def test_what_is_wrong_with_a_tasks_pictures_is_told(tmp_path: Path) -> None:
    """Rows without a label are a class that is gone; a test picture that is no picture."""
    kinds = ["5", "15", "30", ""]
    rows = [
        (split, kind, picture(number, kinds.index(kind), 4))
        for split in ("train", "val", "test")
        for number, kind in enumerate(kinds * 3)
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
    words = ["--suite", "vtab-1k", "--steps", "1", "--image-size", "16", "--batch-size", "4"]
    done = run("evaluate", str(tmp_path / "model.safetensors"), str(tmp_path), *words)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the test pictures of kitti-distance show 3 of its 4 classes" in done.stdout
    assert "test pictures of kitti-distance that could not be read: 1" in done.stdout
    assert "kitti-distance: Rows that were left out" in done.stdout


def test_a_table_and_what_stands_in_its_place_are_two(tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100.csv").touch()
    assert find_task("cifar100", tmp_path) == (tmp_path / "cifar100.csv", None)
    (tmp_path / "cifar100=cifar10").mkdir()
    with pytest.raises(DataError, match="2 things in the place of cifar100"):
        find_task("cifar100", tmp_path)


def test_other_data_in_a_tasks_place_are_named_so(tmp_path: Path) -> None:
    rows = [
        (split, str(number % 4), picture(place * 100 + number, number % 4, 4))
        for place, split in enumerate(("train", "test"))
        for number in range(40)
    ]
    write_shards(tmp_path / "cifar100=four-colours", rows)
    stand_in("camelyon", tmp_path, write_folders, each=20)
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    first, *_, found = vitral.run_suite(
        str(tmp_path / "model.safetensors"), tmp_path, epochs=1, image_size=(16, 16), batch_size=8
    )
    assert isinstance(first, TaskProgress)
    assert first.total < 100  # an epoch instead of the protocol's 2,500 steps
    assert isinstance(found, SuiteResult)
    assert [(task.task, task.stand_in) for task in found.tasks] == [("cifar100", "four-colours"), ("camelyon", None)]
    assert found.tasks[0].train_images == 40  # 36 and the 4 that were cut off
    assert found.unknown == ("model.safetensors",)
    write_shards(tmp_path / "cifar100=others", rows)
    with pytest.raises(DataError, match="2 things in the place of cifar100"):
        list(vitral.run_suite(str(tmp_path / "model.safetensors"), tmp_path))


def test_the_papers_size_is_no_change(tmp_path: Path) -> None:
    for name in ("camelyon", "pets", "svhn"):
        write_folders(tmp_path / name, [("train", "cat", picture(0, 0, 2)), ("test", "cat", picture(1, 0, 2))])
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    for size in (384, (384, 384)):
        *_, found = vitral.run_suite(tmp_path / "model.safetensors", tmp_path, image_size=size)
        assert len(found.failed) == 3  # one class is not what they have
        assert not found.changed


def test_a_suite_that_is_left_tells_what_is_finished(tmp_path: Path) -> None:
    for name in ("svhn", "camelyon", "eurosat"):
        stand_in(name, tmp_path, write_folders, each=8)
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    events = vitral.run_suite(tmp_path / "model.safetensors", tmp_path, steps=3, image_size=16, batch_size=8)
    told = []
    for event in events:
        told.append(event)
        if len([one for one in told if isinstance(one, TaskResult)]) == 1 and isinstance(event, TaskProgress):
            signal.raise_signal(signal.SIGTERM)
    found = told[-1]
    assert isinstance(found, SuiteResult)
    assert [task.task for task in found.tasks] == ["svhn"]
    assert found.left == ("camelyon", "eurosat")
    assert found.signal == signal.SIGTERM


def test_what_is_finished_outlives_a_task_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("svhn", "camelyon"):
        stand_in(name, tmp_path, write_folders, each=8)
    model = vitral.create("vit-pico8", image_size=16, width=24, heads=3, depth=1, mlp_width=48)
    vitral.save(model, tmp_path / "model.safetensors")
    original = vitral.suites.runner.start_run  # type: ignore[attr-defined]

    def full(config: Any, data: Any, out: Path) -> Any:
        if out.name == "camelyon":
            raise RuntimeError("can't allocate memory: you tried to allocate 177167400960 bytes\nand so on")
        return original(config, data, out=out)

    monkeypatch.setattr("vitral.suites.runner.start_run", full)
    settings: dict[str, Any] = dict(steps=2, image_size=16, batch_size=8, accumulate=2)
    *_, found = vitral.run_suite(tmp_path / "model.safetensors", tmp_path, **settings)
    assert isinstance(found, SuiteResult)
    assert [task.task for task in found.tasks] == ["svhn"]
    assert found.failed == {"camelyon": "RuntimeError: can't allocate memory: you tried to allocate 177167400960 bytes"}
    assert found.changed.keys() == {"steps", "image_size", "batch_size"}  # a batch in parts is the same batch


def test_a_name_that_is_missing_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pets=").mkdir()
    with pytest.raises(DataError, match="does not say what stands in the place of pets"):
        find_task("pets", tmp_path)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"model": "vit-cifar1"}, "Did you mean 'vit-cifar10'"),
        ({"model": vitral.create("vit-pico8")}, "takes the path or the name of a model"),
        ({"place": None}, "and the folder of the tasks"),
        ({"image_size": 17}, "17"),
        ({"device": "cuda:77"}, "cuda"),
        ({"objective": "masked-patches"}, "objective is not for a suite to change"),
        ({"val_fraction": 0.1}, "val_fraction is not for a suite to change"),
        ({"epochs": 1}, "steps and epochs both say how long"),
        ({"from": "x"}, "from is not for a suite to change"),
    ],
)
def test_what_is_wrong_for_every_task_is_told_before_the_first(asked: Any, reason: str, tmp_path: Path) -> None:
    stand_in("camelyon", tmp_path, write_folders)
    stand_in("svhn", tmp_path, write_folders)
    vitral.save(vitral.create("vit-pico8", image_size=16), tmp_path / "model.safetensors")
    words = {"model": str(tmp_path / "model.safetensors"), "place": tmp_path, "image_size": 16, "steps": 1} | asked
    with pytest.raises(vitral.VitralError, match=reason):
        list(vitral.run_suite(words.pop("model"), words.pop("place"), **words))


def test_what_stands_in_has_none_of_the_papers_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    task = {"group": "natural", "top1": 0.5, "low": 0.4, "high": 0.6, "images": 9, "papers": (85.5, 81.9, 84.1)}
    told = {"papers": ["H"], "groups": {"natural": 0.5}, "failed": {}, "missing": (), "changed": {}}
    task |= {"train_images": 1000, "classes": 100, "classes_seen": 10, "unreadable": 0, "notes": ()}
    told |= {"train_images": 1000, "interrupted": True, "left": ("svhn",), "unknown": ("Pets.csv",)}
    show_suite(told | {"tasks": [task | {"task": "cifar100", "stand_in": "cifar10"}]})
    shown = capsys.readouterr().out
    assert "interrupted before the end of: svhn" in shown
    assert "no task of the suite: Pets.csv" in shown
    assert "cifar10 for cifar100" in shown
    assert "cifar10 stands in the place of cifar100" in shown
    assert "85.5" not in shown


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("{m} --suite vtab-1k", "needs the place"),
        ("{m} {d} --suite vtab-1k", "holds none of the tasks"),
        ("{m} {d}/nothing --suite vtab-1k", "There is no folder"),
        ("{m} {d} --suite vtab-1k --knn 3", "does not go with --suite"),
        ("{m} {d} --suite vtab-1k --knn 0", "does not go with --suite"),
        ("{m} {d} --suite vtab-1k --temperature", "does not go with --suite"),
        ("{m} {d} --suite vtab-1k --no-cache", "does not go with --suite"),
        ("{m} {d} --steps 3", "there is no --suite"),
    ],
)
def test_wrong_use(words: str, reason: str, tmp_path: Path) -> None:
    vitral.save(vitral.create("vit-pico8"), tmp_path / "m.safetensors")
    (tmp_path / "empty").mkdir()
    done = run("evaluate", *words.format(m=tmp_path / "m.safetensors", d=tmp_path / "empty").split())
    assert done.returncode == 2
    assert reason in done.stderr

"""Folders, tables, shards and the built-in digits, as people really have them."""

import csv
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

import vitral
from tests.data.pictures import class_folders, encoded, photo
from vitral.data.dataset import DatasetIndex, FileSource, Item, counts
from vitral.data.sources import find_equal, open_dataset, split_off


def keys(data: DatasetIndex, split: str = "train") -> list[str]:
    return [item.key for item in data.splits[split]]


def test_digits() -> None:
    data = open_dataset("builtin:digits")
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 4000, "test": 1000}
    assert counts(data.splits["test"], 10) == [100] * 10
    content = data.splits["train"][0].source.read()
    assert isinstance(content, np.ndarray)
    assert content.shape == (28, 28, 1)
    with pytest.raises(vitral.DataError, match="builtin:digits"):
        open_dataset("builtin:letters")


def test_class_folders_with_odd_contents(tmp_path: Path) -> None:
    class_folders(tmp_path, {"class2": 2, "class10": 3, "Größe ü": 1})
    (tmp_path / "class2" / ".hidden.png").write_bytes(b"x")
    (tmp_path / "class2" / "notes.txt").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / "class10" / "deep" / "deeper").mkdir(parents=True)
    photo().save(tmp_path / "class10" / "deep" / "deeper" / "x.JPG")
    (tmp_path / "class10" / "deep" / "loop").symlink_to(tmp_path / "class10")
    (tmp_path / "empty").mkdir()
    data = open_dataset(tmp_path)
    assert set(data.classes) == {"Größe ü", "class2", "class10"}
    assert data.classes.index("class2") < data.classes.index("class10")
    assert sum(counts(data.splits["train"], 3)) == 7
    assert data.notes == (
        "Left out, as there is no picture in it: empty.",
        "Not taken, as these are no pictures that can be read: 1 file (.txt).",
    )


def test_links_do_not_mix_classes(tmp_path: Path) -> None:
    data, pool = tmp_path / "data", class_folders(tmp_path / "pool", {"more": 2, "lions": 4}, size=(20, 20))
    class_folders(data, {"cat": 3, "dog": 5})
    (data / "cat" / "up").symlink_to("..")
    (data / "cat" / "deep").mkdir()
    (data / "cat" / "deep" / "beside").symlink_to(data / "dog")
    (data / "cat" / "far").symlink_to(tmp_path)
    (data / "cat" / "more").symlink_to(pool / "more")  # elsewhere: that is what links are for
    (data / "lion").symlink_to(pool / "lions")
    (data / "kitten").symlink_to("cat")
    found = open_dataset(data)
    assert dict(zip(found.classes, counts(found.splits["train"], 3), strict=True)) == {"cat": 5, "dog": 5, "lion": 4}
    links = ["cat/deep/beside", "cat/far", "cat/up", "kitten"]
    assert sorted(found.notes) == [f"Left out, as it is a link to other classes: {link}." for link in links]


def test_a_split_may_be_a_link_to_another(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 3, "b": 2}, split="train")
    (tmp_path / "val").symlink_to("train")
    (tmp_path / "test").mkdir()
    for name in "ab":
        (tmp_path / "test" / name).symlink_to(tmp_path / "train" / name)
    data = open_dataset(tmp_path)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 5, "val": 5, "test": 5}
    assert not data.notes


def test_names_that_are_no_text_and_names_that_are_one(tmp_path: Path) -> None:
    class_folders(tmp_path, {"caf\udce9": 12, "gr\u00fcn": 2, "gru\u0308n": 3})
    (tmp_path / "caf\udce9" / "000.png").rename(tmp_path / "caf\udce9" / "\udcff.png")
    data = open_dataset(tmp_path)
    assert data.classes == ("caf\\xe9", "gr\u00fcn")
    assert counts(data.splits["train"], 2) == [12, 5]
    assert "caf\\xe9/\\xff.png" in keys(data)
    assert all(item.source.read() for item in data.splits["train"])
    assert sum(map(len, split_off(data.splits["train"]))) == 17
    assert len(data.fingerprint()) == 64


def test_split_folders(tmp_path: Path) -> None:
    for split, number in (("train", 3), ("Validation", 2), ("test", 1)):
        class_folders(tmp_path, {"a": number, "b": number}, split=split)
    data = open_dataset(tmp_path)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 6, "val": 4, "test": 2}
    assert keys(data)[0] == "train/a/000.png"


def test_a_class_called_test_is_a_class(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, {"test": 2, "cat": 2}))
    assert data.classes == ("cat", "test")


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    data = open_dataset(class_folders(tmp_path, {"bus": 2, "car": 2, "train": 3}))
    assert data.classes == ("bus", "car", "train")
    assert len(open_dataset(tmp_path, labelled=False).splits["train"]) == 7
    class_folders(tmp_path / "train", {"a": 2, "b": 2})  # folders in it: now it is a split
    assert open_dataset(tmp_path).classes == ("a", "b")


def test_splits_without_labels_stay_apart(tmp_path: Path) -> None:
    for name, number in (("train", 3), ("test", 2), ("masks", 4)):
        (tmp_path / name).mkdir()
        for index in range(number):
            photo(seed=index).save(tmp_path / name / f"{index}.png")
    data = open_dataset(tmp_path, labelled=False)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 3, "test": 2}


def test_pictures_that_are_left_out_are_told(tmp_path: Path) -> None:
    class_folders(tmp_path, {"cat": 2, "dog": 2}, split="train")
    (tmp_path / "test").mkdir()
    for number in range(3):  # as contests have it, without labels
        photo().save(tmp_path / "test" / f"{number}.png")
    assert open_dataset(tmp_path).notes == ("Left out: 3 pictures of test in no class folder.",)
    photo().save(tmp_path / "train" / "x.png")
    assert "Left out: 1 picture of train in no class folder." in open_dataset(tmp_path).notes


def test_pictures_of_several_labels_are_held_out_as_others_are() -> None:
    random = np.random.default_rng(0)
    labels = [tuple(np.flatnonzero(random.random(20) < 0.15).tolist()) or (0,) for _ in range(1000)]
    items = [Item(f"{number}.png", label, FileSource("nowhere")) for number, label in enumerate(labels)]
    rest, part = split_off(items)
    assert 150 < len(part) < 250
    of_each = [sum(len(item.label) for item in side) / len(side) for side in (rest, part)]  # type: ignore[arg-type]
    assert of_each[0] == pytest.approx(of_each[1], abs=0.35)


def test_large_files_are_equal_only_as_a_whole(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 4})
    for number, first in enumerate((b"1", b"1", b"2")):  # the same size, and the same end
        (tmp_path / "a" / f"large{number}.png").write_bytes(first + bytes(20_000))
    leaders = find_equal(open_dataset(tmp_path).splits["train"])
    assert leaders["a/large1.png"] == "a/large0.png"
    assert leaders["a/large2.png"] == "a/large2.png"


@pytest.mark.parametrize("name", ["nothing", "empty", "loose"])
def test_folders_that_are_no_data(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    if name != "nothing":
        folder.mkdir()
    if name == "loose":
        photo().save(folder / "x.png")
    with pytest.raises(
        vitral.DataError, match={"nothing": "no folder", "empty": "no pictures", "loose": "no folders"}[name]
    ):
        open_dataset(folder)


def test_the_split_is_stable_and_keeps_duplicates_together(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 40, "b": 40, "one": 1})
    copy = (tmp_path / "a" / "000.png").read_bytes()
    for number in range(10):
        (tmp_path / "a" / f"copy{number}.png").write_bytes(copy)
    items = open_dataset(tmp_path).splits["train"]
    _, part = split_off(items)
    assert 0.08 < len(part) / len(items) < 0.4
    chosen = {item.key for item in part}
    copies = {f"a/copy{i}.png" for i in range(10)} | {"a/000.png"}
    assert copies <= chosen or not copies & chosen
    assert "one/000.png" not in chosen
    class_folders(tmp_path, {"a": 60, "b": 40, "one": 1})
    _, later = split_off(open_dataset(tmp_path).splits["train"])
    moved = chosen ^ {item.key for item in later if item.key in {i.key for i in items}}
    assert not moved
    for label in (0, 1):
        assert {item.label for item in part} >= {label}


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(delimiter: str, tmp_path: Path) -> None:
    class_folders(tmp_path / "pictures", {"a": 2})
    rows = [
        {"File": "pictures/a/000.png", "Label": "cat", "split": "train"},
        {"File": "pictures/a/001.png", "Label": "dog", "split": "test"},
    ]
    write_csv(tmp_path / "x.csv", rows, delimiter)
    data = open_dataset(tmp_path / "x.csv")
    assert data.classes == ("cat", "dog")
    assert keys(data) == ["pictures/a/000.png"]
    assert len(data.splits["test"]) == 1
    assert data.splits["train"][0].source.read()


def test_multi_label_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [{"image": "a.png", "labels": "cat|dog"}, {"image": "b.png", "labels": ""}])
    data = open_dataset(tmp_path / "x.csv")
    assert data.multi_label
    assert data.splits["train"][0].label == (0, 1)
    assert data.splits["train"][1].label == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "a", "path": "b", "label": "c"}, "several columns of pictures"),
        ({"image": "a"}, "no column of labels"),
        ({"label": "a"}, "no column of pictures"),
    ],
)
def test_tables_that_do_not_say(row: dict[str, str], reason: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [row])
    with pytest.raises(vitral.DataError, match=reason):
        open_dataset(tmp_path / "x.csv")


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pictures = [encoded(photo(seed=i), "PNG") for i in range(3)]
    table = pyarrow.table({"image": [{"bytes": content, "path": "x.png"} for content in pictures], "label": [1, 0, 1]})
    told = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(told)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    data = open_dataset(tmp_path / "x.parquet")
    assert data.classes == ("cat", "dog")
    assert [item.label for item in data.splits["train"]] == [1, 0, 1]
    assert data.splits["train"][2].source.read() == pictures[2]
    two = table.append_column("second", pyarrow.array(pictures))
    pyarrow.parquet.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(vitral.DataError, match="several columns of pictures"):
        open_dataset(tmp_path / "two.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(vitral.DataError, match="no Parquet"):
        open_dataset(tmp_path / "bad.parquet")


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


def samples(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    found = []
    for number in range(start, start + count):
        found += [
            (f"k{number:03d}.png", encoded(photo(seed=number), "PNG")),
            (f"k{number:03d}.cls", str(number % 2).encode()),
        ]
    return found


def test_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-000.tar", samples(4))
    write_shard(tmp_path / "train-001.tar", samples(2, start=4))
    write_shard(tmp_path / "test-000.tar", samples(3))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    data = open_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 6, "test": 3}
    assert data.splits["train"][3].source.read() == samples(4)[6][1]
    one = open_dataset(tmp_path / "train-001.tar")
    assert len(one.splits["train"]) == 2
    pattern = open_dataset(str(tmp_path / "train-{000..001}.tar"))
    assert keys(pattern) == keys(data)
    with pytest.raises(vitral.DataError, match="train-002"):
        open_dataset(str(tmp_path / "train-{000..002}.tar"))


def test_evil_shards(tmp_path: Path) -> None:
    path = tmp_path / "train-000.tar"
    with tarfile.open(path, "w") as shard:
        for name, content in samples(2):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
        for name, kind in (
            ("../../evil.png", tarfile.REGTYPE),
            ("/abs.png", tarfile.REGTYPE),
            ("link.png", tarfile.SYMTYPE),
            ("dev.png", tarfile.CHRTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            shard.addfile(member)
    before = set(os.listdir(tmp_path))
    data = open_dataset(path)
    assert len(data.splits["train"]) == 2
    assert len(data.skipped) == 4
    assert set(os.listdir(tmp_path)) == before
    assert not (tmp_path.parent / "evil.png").exists()
    write_shard(path, samples(6))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = open_dataset(path)
    assert 1 <= len(cut.splits["train"]) < 6
    assert "cut off" in cut.notes[0]
    (tmp_path / "no.tar").write_bytes(b"not a tar at all" * 100)
    with pytest.raises(vitral.DataError, match="no tar shard"):
        open_dataset(tmp_path / "no.tar")


def test_fingerprints(tmp_path: Path) -> None:
    first = open_dataset(class_folders(tmp_path, {"a": 2, "b": 2})).fingerprint()
    assert open_dataset(tmp_path).fingerprint() == first
    class_folders(tmp_path, {"a": 3})
    assert open_dataset(tmp_path).fingerprint() != first

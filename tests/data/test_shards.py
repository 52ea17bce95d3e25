"""Shards that lie, and keys and labels that are easily taken for others."""

import tarfile
from pathlib import Path

import pytest

import vitral
from tests.data.pictures import encoded, photo
from tests.data.test_sources import keys, samples, write_shard
from vitral.data.dataset import named_split
from vitral.data.decode import BadImageError
from vitral.data.sources import open_dataset
from vitral.data.sources.shards import expand_braces

PICTURES = [encoded(photo(seed=number), "PNG") for number in range(4)]


def test_equal_names_in_different_folders_are_different_pictures(tmp_path: Path) -> None:
    members = []
    for folder, label in (("cat", b"0"), ("dog", b"1")):
        for number in range(2):
            content = PICTURES[2 * int(label) + number]
            members += [(f"{folder}/{number:02d}.png", content), (f"{folder}/{number:02d}.cls", label)]
    write_shard(tmp_path / "x.tar", members)
    data = open_dataset(tmp_path / "x.tar")
    assert keys(data) == ["x/cat/00", "x/cat/01", "x/dog/00", "x/dog/01"]
    assert [item.label for item in data.splits["train"]] == [0, 0, 1, 1]
    assert [item.source.read() for item in data.splits["train"]] == PICTURES
    assert not data.skipped


@pytest.mark.parametrize("second", ["a.png", "a.mask.png"])
def test_a_second_picture_of_a_key_is_told(second: str, tmp_path: Path) -> None:
    members = [("a.png", PICTURES[0]), ("a.cls", b"0"), (second, PICTURES[1]), ("b.png", PICTURES[2]), ("b.cls", b"1")]
    write_shard(tmp_path / "x.tar", members)
    data = open_dataset(tmp_path / "x.tar")
    assert data.splits["train"][0].source.read() == PICTURES[0]
    assert data.skipped == {f"x/{second}": "there is another picture of the same key before it"}
    assert f"1 (x/{second}: there is another picture" in data.notes[0]


def test_the_picture_is_the_one_with_the_plain_name(tmp_path: Path) -> None:
    write_shard(
        tmp_path / "x.tar", [("a.depth.png", PICTURES[0]), ("a.png", PICTURES[1]), ("a.cls", b"0"), *samples(2)]
    )
    data = open_dataset(tmp_path / "x.tar")
    assert data.splits["train"][0].source.read() == PICTURES[1]
    assert data.skipped.keys() == {"x/a.depth.png"}


def test_a_word_of_the_name_tells_the_split(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "imagenet-val", "more")):
        write_shard(tmp_path / f"{name}-0.tar", samples(2, start=2 * number))
    data = open_dataset(tmp_path)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 4, "val": 2}
    assert data.notes == ("Taken for training, as the name says no split: more-0.tar.",)
    data = open_dataset(f"{tmp_path}/{{train,imagenet-val}}-0.tar")
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 2, "val": 2}
    assert open_dataset(f"{tmp_path}/imagenet-val-0.tar").splits.keys() == {"train"}  # it was asked for
    assert named_split("crash-test-signs-train-000.tar") == "train"


def test_a_negative_label_is_left_out(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*samples(4), ("z.png", PICTURES[0]), ("z.cls", b"-1")])
    data = open_dataset(tmp_path / "x.tar")
    assert data.classes == ("0", "1")
    assert len(data.splits["train"]) == 4
    assert "x/z" in data.skipped


def test_a_second_label_of_a_name_is_told(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*samples(2), ("k000.cls", b"1")])
    data = open_dataset(tmp_path / "x.tar")
    assert [item.label for item in data.splits["train"]] == [0, 1]
    assert list(data.skipped) == ["x/k000.cls"]


def shard_with_a_liar(path: Path, size: int) -> Path:
    """Two good pictures, and behind them one that claims this size."""
    write_shard(path, [*samples(2), ("last.cls", b"1")])
    liar = tarfile.TarInfo("last.png")
    liar.size = size
    content = path.read_bytes()
    end = content.rindex(b"last.cls") + 1024
    path.write_bytes(content[:end] + liar.tobuf(tarfile.GNU_FORMAT) + PICTURES[0])
    return path


@pytest.mark.parametrize("size", [2**28 + 1, 2**40, 2**62, 2**63 - 1, 2**65])
def test_a_member_that_claims_a_giant_size(size: int, tmp_path: Path) -> None:
    items = open_dataset(shard_with_a_liar(tmp_path / "x.tar", size)).splits["train"]
    assert len(items) == 3
    assert items[0].source.read()
    with pytest.raises(BadImageError, match="too large"):
        items[2].source.read()


@pytest.mark.parametrize("size", [-1, -512, -2048, -(2**40)])
def test_a_member_that_claims_less_than_nothing(size: int, tmp_path: Path) -> None:
    data = open_dataset(shard_with_a_liar(tmp_path / "x.tar", size))
    assert len(data.splits["train"]) == 2
    assert data.notes == ("x.tar is cut off; the 2 pictures before that are used.",)


@pytest.mark.parametrize(
    ("ending", "label", "reason"),
    [
        ("cls", b"100000000", "label 100000000 is none of the 2 classes"),
        ("cls", b"9" * 5000, "no usable label"),
        ("cls", b"", "no usable label"),
        ("json", b'{"label": true}', "no usable label"),
        ("json", b"-1", "label -1 is none of the 2 classes"),
        ("json", b"[0, -1]", "is none of the 2 classes"),
        ("json", b"[0, 100000000]", "is none of the 2 classes"),
        ("json", b'["a"]', "no usable label"),
        ("json", b"\xff", "no usable label"),
    ],
)
def test_labels_that_cannot_be(ending: str, label: bytes, reason: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*samples(2), ("z.png", PICTURES[0]), (f"z.{ending}", label)])
    data = open_dataset(tmp_path / "x.tar")
    assert data.classes == ("0", "1")
    assert reason in data.skipped["x/z"]
    assert len(data.splits["train"]) == 2


def test_labels_beyond_the_named_classes(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*samples(2), ("z.png", PICTURES[0]), ("z.json", b"[0, 99]")])
    (tmp_path / "classes.txt").write_bytes("\ufeffcat\r\ndog\r\n".encode())
    data = open_dataset(tmp_path / "x.tar")
    assert data.classes == ("cat", "dog")
    assert "none of the 2 classes" in data.skipped["x/z"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"caf\xe9\ndog\n", "no text in UTF-8"),
        (b"cat\ndog\ncat\n", "names a class twice: cat"),
        (b"cat\n\ndog\n", "Line 2 .* is empty"),
    ],
)
def test_lists_of_classes_that_cannot_be(content: bytes, reason: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", samples(2))
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(vitral.DataError, match=reason):
        open_dataset(tmp_path / "x.tar")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = "caf\udce9"
    half = ("y.json", b'{"label": "\\ud800"}')
    write_shard(tmp_path / "x.tar", [(f"{name}.png", PICTURES[0]), (f"{name}.cls", b"a"), ("y.png", PICTURES[1]), half])
    data = open_dataset(tmp_path / "x.tar")
    assert keys(data) == ["x/caf\\xe9", "x/y"]
    assert data.classes == ("\\ud800", "a")
    assert len(data.fingerprint()) == 64


@pytest.mark.parametrize("pattern", ["x{0..99999999}.tar", "{0..999}{0..999}.tar", "x{5..1}.tar"])
def test_patterns_of_too_many_shards_or_none(pattern: str) -> None:
    with pytest.raises(vitral.DataError, match="it may be 1 to 100,000"):
        expand_braces(pattern)


def test_an_existing_path_is_no_pattern(tmp_path: Path) -> None:
    write_shard(tmp_path / "x{1,2}.tar", samples(2))
    assert len(open_dataset(tmp_path / "x{1,2}.tar").splits["train"]) == 2
    for folder in ("photos{1}", "photos.tar"):
        for number in range(2):
            (tmp_path / folder / str(number)).mkdir(parents=True)
            (tmp_path / folder / str(number) / "x.png").write_bytes(PICTURES[number])
        assert open_dataset(tmp_path / folder).classes == ("0", "1")
    with pytest.raises(vitral.DataError, match="no shard"):
        open_dataset(tmp_path / "no{1}.tar")

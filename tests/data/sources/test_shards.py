"""Tar shards, also forged ones, and keys and labels that are easily confused."""

import io
import os
import tarfile
import time
from pathlib import Path

import pytest

import vitral
from tests.data.images import encoded, keys, photo, shard_members, write_shard
from vitral.data.dataset import check_classes, split_from_name
from vitral.data.headers import BadImageError
from vitral.data.sources import open_dataset
from vitral.data.sources.shards import expand_paths

IMAGES = [encoded(photo(seed=number), "PNG") for number in range(4)]


def test_equal_names_in_different_folders_are_different_images(tmp_path: Path) -> None:
    members = []
    for folder, label in (("cat", b"0"), ("dog", b"1")):
        for number in range(2):
            content = IMAGES[2 * int(label) + number]
            members += [(f"{folder}/{number:02d}.png", content), (f"{folder}/{number:02d}.cls", label)]
    write_shard(tmp_path / "x.tar", members)
    data = open_dataset(tmp_path / "x.tar")
    assert keys(data) == ["x/cat/00", "x/cat/01", "x/dog/00", "x/dog/01"]
    assert [item.label for item in data.splits["train"]] == [0, 0, 1, 1]
    assert [item.source.read() for item in data.splits["train"]] == IMAGES
    assert not data.skipped


@pytest.mark.parametrize("second", ["a.png", "a.mask.png"])
def test_a_second_image_of_a_key_is_skipped(second: str, tmp_path: Path) -> None:
    members = [("a.png", IMAGES[0]), ("a.cls", b"0"), (second, IMAGES[1]), ("b.png", IMAGES[2]), ("b.cls", b"1")]
    write_shard(tmp_path / "x.tar", members)
    data = open_dataset(tmp_path / "x.tar")
    assert data.splits["train"][0].source.read() == IMAGES[0]
    assert data.skipped == {f"x/{second}": "an earlier image has the same key"}
    assert f"1 (x/{second}: an earlier image" in data.notes[0]


def test_the_image_with_the_plain_name_wins(tmp_path: Path) -> None:
    write_shard(
        tmp_path / "x.tar", [("a.depth.png", IMAGES[0]), ("a.png", IMAGES[1]), ("a.cls", b"0"), *shard_members(2)]
    )
    data = open_dataset(tmp_path / "x.tar")
    assert data.splits["train"][0].source.read() == IMAGES[1]
    assert data.skipped.keys() == {"x/a.depth.png"}


def test_the_split_is_a_word_of_the_name(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "imagenet-val", "more")):
        write_shard(tmp_path / f"{name}-0.tar", shard_members(2, start=2 * number))
    data = open_dataset(tmp_path)
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 4, "val": 2}
    assert data.notes == ("Used for training, because the name contains no split: more-0.tar.",)
    data = open_dataset(f"{tmp_path}/{{train,imagenet-val}}-0.tar")
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 2, "val": 2}
    assert open_dataset(f"{tmp_path}/imagenet-val-0.tar").splits.keys() == {"train"}  # named explicitly
    assert split_from_name("crash-test-signs-train-000.tar") == "train"


def test_a_negative_label_is_skipped(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*shard_members(4), ("z.png", IMAGES[0]), ("z.cls", b"-1")])
    data = open_dataset(tmp_path / "x.tar")
    assert data.classes == ("0", "1")
    assert len(data.splits["train"]) == 4
    assert "x/z" in data.skipped


def test_a_second_label_of_a_key_is_skipped(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*shard_members(2), ("k000.cls", b"1")])
    data = open_dataset(tmp_path / "x.tar")
    assert [item.label for item in data.splits["train"]] == [0, 1]
    assert list(data.skipped) == ["x/k000.cls"]


def forged_shard(path: Path, size: int) -> Path:
    """Write two good images, and one that claims this size."""
    write_shard(path, [*shard_members(2), ("last.cls", b"1")])
    forged = tarfile.TarInfo("last.png")
    forged.size = size
    content = path.read_bytes()
    end = content.rindex(b"last.cls") + 1024
    path.write_bytes(content[:end] + forged.tobuf(tarfile.GNU_FORMAT) + IMAGES[0])
    return path


@pytest.mark.parametrize("size", [2**28 + 1, 2**40, 2**62, 2**63 - 1, 2**65])
def test_a_member_that_claims_a_giant_size(size: int, tmp_path: Path) -> None:
    items = open_dataset(forged_shard(tmp_path / "x.tar", size)).splits["train"]
    assert len(items) == 3
    assert items[0].source.read()
    with pytest.raises(BadImageError, match="too large"):
        items[2].source.read()


@pytest.mark.parametrize("size", [-1, -512, -2048, -(2**40)])
def test_a_member_that_claims_a_negative_size(size: int, tmp_path: Path) -> None:
    data = open_dataset(forged_shard(tmp_path / "x.tar", size))
    assert len(data.splits["train"]) == 2
    assert data.notes == ("x.tar is cut off; the 2 images before that are used.",)


@pytest.mark.parametrize(
    ("ending", "label", "reason"),
    [
        ("cls", b"100000000", "label 100000000 is not one of the 2 classes"),
        ("cls", b"9" * 5000, "no usable label"),
        ("cls", b"", "no usable label"),
        ("json", b'{"label": true}', "no usable label"),
        ("json", b"-1", "label -1 is not one of the 2 classes"),
        ("json", b"[0, -1]", "is not one of the 2 classes"),
        ("json", b"[0, 100000000]", "is not one of the 2 classes"),
        ("json", b'["a"]', "no usable label"),
        ("json", b"\xff", "no usable label"),
    ],
)
def test_unusable_labels(ending: str, label: bytes, reason: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*shard_members(2), ("z.png", IMAGES[0]), (f"z.{ending}", label)])
    data = open_dataset(tmp_path / "x.tar")
    assert data.classes == ("0", "1")
    assert reason in data.skipped["x/z"]
    assert len(data.splits["train"]) == 2


def test_labels_beyond_the_named_classes(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", [*shard_members(2), ("z.png", IMAGES[0]), ("z.json", b"[0, 99]")])
    (tmp_path / "classes.txt").write_bytes("\ufeffcat\r\ndog\r\n".encode())
    data = open_dataset(tmp_path / "x.tar")
    assert data.classes == ("cat", "dog")
    assert "not one of the 2 classes" in data.skipped["x/z"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"caf\xe9\ndog\n", "not UTF-8"),
        (b"cat\ndog\ncat\n", "repeats a class: cat"),
        (b"cat\n\ndog\n", "Line 2 .* is empty"),
    ],
)
def test_unusable_class_lists(content: bytes, reason: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "x.tar", shard_members(2))
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(vitral.DataError, match=reason):
        open_dataset(tmp_path / "x.tar")


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = "caf\udce9"
    half = ("y.json", b'{"label": "\\ud800"}')
    write_shard(tmp_path / "x.tar", [(f"{name}.png", IMAGES[0]), (f"{name}.cls", b"a"), ("y.png", IMAGES[1]), half])
    data = open_dataset(tmp_path / "x.tar")
    assert keys(data) == ["x/caf\\xe9", "x/y"]
    assert data.classes == ("\\ud800", "a")
    assert len(data.fingerprint()) == 64


@pytest.mark.parametrize("pattern", ["x{0..99999999}.tar", "{0..999}{0..999}.tar", "x{5..1}.tar"])
def test_patterns_of_too_many_shards_or_none(pattern: str) -> None:
    with pytest.raises(vitral.DataError, match="expected 1 to 100,000"):
        expand_paths(pattern)


def test_an_existing_path_is_not_a_pattern(tmp_path: Path) -> None:
    write_shard(tmp_path / "x{1,2}.tar", shard_members(2))
    assert len(open_dataset(tmp_path / "x{1,2}.tar").splits["train"]) == 2
    for folder in ("photos{1}", "photos.tar"):
        for number in range(2):
            (tmp_path / folder / str(number)).mkdir(parents=True)
            (tmp_path / folder / str(number) / "x.png").write_bytes(IMAGES[number])
        assert open_dataset(tmp_path / folder).classes == ("0", "1")
    with pytest.raises(vitral.DataError, match="not found: .*no1.tar"):
        open_dataset(tmp_path / "no{1}.tar")


def test_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-000.tar", shard_members(4))
    write_shard(tmp_path / "train-001.tar", shard_members(2, start=4))
    write_shard(tmp_path / "test-000.tar", shard_members(3))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    data = open_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    assert {split: len(items) for split, items in data.splits.items()} == {"train": 6, "test": 3}
    assert data.splits["train"][3].source.read() == shard_members(4)[6][1]
    one = open_dataset(tmp_path / "train-001.tar")
    assert len(one.splits["train"]) == 2
    pattern = open_dataset(str(tmp_path / "train-{000..001}.tar"))
    assert keys(pattern) == keys(data)
    with pytest.raises(vitral.DataError, match="train-002"):
        open_dataset(str(tmp_path / "train-{000..002}.tar"))


def test_evil_shards(tmp_path: Path) -> None:
    path = tmp_path / "train-000.tar"
    with tarfile.open(path, "w") as shard:
        for name, content in shard_members(2):
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
    write_shard(path, shard_members(6))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = open_dataset(path)
    assert 1 <= len(cut.splits["train"]) < 6
    assert "cut off" in cut.notes[0]
    (tmp_path / "no.tar").write_bytes(b"not a tar at all" * 100)
    with pytest.raises(vitral.DataError, match="not a tar shard"):
        open_dataset(tmp_path / "no.tar")


@pytest.mark.parametrize("listed", [False, True])
def test_labels_that_mix_names_and_indices_are_refused(listed: bool, tmp_path: Path) -> None:
    """The label 0 could be an index or a name: 8 images each of 0, bg and zz must not become 16 of bg."""
    members = []
    for number in range(24):
        label = ("0", "bg", "zz")[number % 3].encode()
        members += [(f"k{number:02d}.png", IMAGES[number % 4]), (f"k{number:02d}.cls", label)]
    write_shard(tmp_path / "x.tar", members)
    if listed:
        (tmp_path / "classes.txt").write_text("0\nbg\nzz\n")
    with pytest.raises(vitral.DataError, match="mix names and indices") as caught:
        open_dataset(tmp_path / "x.tar")
    assert "'bg' for x/k01" in str(caught.value)
    assert "0 for x/k00" in str(caught.value)
    assert len(open_dataset(tmp_path / "x.tar", labeled=False).splits["train"]) == 24


def one_class(path: Path, label: bytes, count: int = 8) -> Path:
    members = []
    for number in range(count):
        members += [(f"k{number}.png", encoded(photo(seed=number), "PNG")), (f"k{number}.cls", label)]
    write_shard(path, members)
    return path


@pytest.mark.parametrize("label", [b"cat", b"0", b"3"])
def test_shards_with_one_used_class_are_refused_for_classification(label: bytes, tmp_path: Path) -> None:
    data = open_dataset(one_class(tmp_path / "x.tar", label))
    with pytest.raises(vitral.DataError, match=f"1 class .*{label.decode()}.*at least 2"):
        check_classes(data)
    assert any("at least 2" in problem for problem in vitral.scan(tmp_path / "x.tar").problems)


def test_a_large_label_takes_seconds(tmp_path: Path) -> None:
    """The largest class index makes 100,000 classes, nearly all of them empty."""
    members = shard_members(24)
    members[1] = ("k000.cls", b"99999")
    write_shard(tmp_path / "x.tar", members)
    start = time.perf_counter()
    result = vitral.scan(tmp_path / "x.tar")
    assert time.perf_counter() - start < 10
    assert len(result.classes) == 100_000
    assert result.can_train
    assert any("Classes without images: 2, 3" in warning for warning in result.warnings)

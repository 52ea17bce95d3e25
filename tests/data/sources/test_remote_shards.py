"""Shards on a web server and on an S3 server are the dataset that the same files are on a disk."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import vitral
from tests.data.images import encoded, photo, write_shard
from tests.data.stores import WebServer, serve_folder, serve_s3
from vitral.data import remote
from vitral.data.dataset import DatasetIndex
from vitral.data.headers import BadImageError
from vitral.data.remote import RemoteSource, is_url, without_query
from vitral.data.sources import open_dataset
from vitral.data.splits import find_equal

COUNTS = {"train-0": 1, "train-1": 7, "train-2": 19, "train-3": 5, "test-0": 4}


def write_shards(folder: Path) -> Path:
    """Write shards of unequal length, with a bad image, a member without a label and one with a strange name."""
    folder.mkdir()
    number = 0
    for name, count in COUNTS.items():
        members = []
        for _ in range(count):
            content = encoded(photo(seed=number, height=20, width=24), "PNG")
            members += [(f"{number:03d}.png", content), (f"{number:03d}.cls", str(number % 3).encode())]
            number += 1
        if name == "train-2":
            members[6] = (members[6][0], members[6][1][:50])
            members += [("alone.png", b"x"), ("../up.png", b"x"), ("up.cls", b"1")]
        write_shard(folder / f"{name}.tar", members)
    (folder / "classes.txt").write_text("cat\ndog\nhen\n")
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("remote") / "shards")


@pytest.fixture
def server(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    with serve_folder(shards.parent) as server:
        yield server


def assert_equal_datasets(first: DatasetIndex, second: DatasetIndex) -> None:
    assert first.fingerprint() == second.fingerprint()
    assert (first.name, first.classes, first.notes, first.skipped) == (
        second.name,
        second.classes,
        second.notes,
        second.skipped,
    )
    for split, items in first.splits.items():
        contents = [item.source.read() for item in items]
        assert contents == [item.source.read() for item in second.splits[split]]


@pytest.mark.parametrize("form", ["", "/", "/train-{0..3}.tar", "/{train-1,test-0}.tar", "/train-2.tar"])
def test_forms_over_http(form: str, server: WebServer, shards: Path) -> None:
    assert_equal_datasets(open_dataset(f"{server.url}/shards{form}"), open_dataset(f"{shards}{form}"))


def test_s3(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    with serve_s3(shards) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        remote._make_store.cache_clear()
        for form in ("", "/train-{0..3}.tar"):
            assert_equal_datasets(open_dataset(f"s3://bucket/shards{form}"), open_dataset(f"{shards}{form}"))
        with pytest.raises(vitral.DataError, match="s3://bucket/shards/none.tar not found"):
            open_dataset("s3://bucket/shards/none.tar")
        with pytest.raises(vitral.DataError, match="s3://empty/x not found"):
            open_dataset("s3://empty/x")
    remote._make_store.cache_clear()


def test_the_index_is_kept(server: WebServer, shards: Path) -> None:
    first = open_dataset(f"{server.url}/shards")
    read = sum(int(span.rpartition("-")[2]) - int(span[6:].partition("-")[0]) + 1 for _, span in server.ranges)
    assert read == sum(file.stat().st_size for file in shards.glob("*.tar"))  # each byte once
    server.ranges.clear()
    second = open_dataset(f"{server.url}/shards")
    assert not server.ranges
    assert first == second


def test_a_replaced_shard_is_indexed_again(tmp_path: Path, server: WebServer) -> None:
    server.folder = tmp_path
    write_shards(tmp_path / "new")
    data = open_dataset(f"{server.url}/new/train-0.tar")
    (item,) = data.splits["train"]
    content = encoded(photo(seed=77, height=20, width=24), "PNG")
    write_shard(tmp_path / "new/train-0.tar", [("000.png", content), ("000.cls", b"1")])
    with pytest.raises(vitral.DataError, match="train-0.tar has changed while it was in use"):
        item.source.read()
    (item,) = open_dataset(f"{server.url}/new/train-0.tar").splits["train"]
    assert item.source.read() == content


def test_failed_requests_are_repeated(server: WebServer, shards: Path) -> None:
    for failure in ("drop", "503"):
        server.failure, server.failures = failure, remote.ATTEMPTS - 1
        data = open_dataset(f"{server.url}/shards/train-1.tar?{failure}")
        assert server.failures == 0
        assert len(data.splits["train"]) == COUNTS["train-1"]
    source = data.splits["train"][0].source
    server.failures = 10**6
    with pytest.raises(vitral.DataError, match=rf"Cannot read {server.url}/shards/train-1.tar: .*5 attempts"):
        source.read()
    with pytest.raises(vitral.DataError, match="attempts"):
        open_dataset(f"{server.url}/shards/train-2.tar")


def test_a_server_without_ranges(server: WebServer) -> None:
    server.failure, server.failures = "ignore", 10**6
    source = RemoteSource(f"{server.url}/shards/train-1.tar", 512, 100, b"")
    with pytest.raises(vitral.DataError, match="does not support requests for ranges"):
        source.read()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("shards/none.tar", "none.tar not found"),
        ("shards/train-{0..9}.tar", "train-[4-9].tar not found"),
        ("nothing/", "not found"),
        ("shards/classes.txt", "There are no tar shards in"),
    ],
)
def test_missing_files(name: str, problem: str, server: WebServer) -> None:
    with pytest.raises(vitral.DataError, match=problem):
        open_dataset(f"{server.url}/{name}")


def test_nothing_listens() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "FIRST_WAIT", 0.01)
        with pytest.raises(vitral.DataError, match="127.0.0.1:9/x.tar"):
            open_dataset("http://127.0.0.1:9/x.tar")


def test_a_cut_shard_and_a_bad_image(tmp_path: Path, server: WebServer) -> None:
    server.folder = tmp_path
    write_shards(tmp_path / "cut")
    path = tmp_path / "cut/train-3.tar"
    path.write_bytes(path.read_bytes()[:4000])
    data = open_dataset(f"{server.url}/cut")
    assert "train-3.tar is cut off; the 1 images before that are used." in data.notes
    assert sum(item.key.startswith("train-3/") for item in data.splits["train"]) == 1
    not_tar = tmp_path / "cut/text.tar"
    not_tar.write_bytes(b"no tar" * 100)
    with pytest.raises(vitral.DataError, match="text.tar is not a tar shard"):
        open_dataset(f"{server.url}/cut/text.tar")


def test_equal_images_are_found_without_reading_them(tmp_path: Path, server: WebServer) -> None:
    content = [encoded(photo(seed=number % 2), "PNG") for number in range(4)]
    server.folder = tmp_path
    write_shard(
        tmp_path / "x.tar", [(f"{n}.{s}", c) for n in range(4) for s, c in (("png", content[n]), ("cls", b"0"))]
    )
    items = open_dataset(f"{server.url}/x.tar").splits["train"]
    server.ranges.clear()
    assert find_equal(items) == {"x/0": "x/0", "x/1": "x/1", "x/2": "x/0", "x/3": "x/1"}
    assert not server.ranges


def test_an_image_that_is_too_large_is_reported(
    tmp_path: Path, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadImageError, match="too large"):
        RemoteSource(f"{server.url}/x.tar", 0, 2**40, b"").read()


def test_addresses() -> None:
    assert is_url("s3://bucket/x.tar")
    assert is_url("filecache::https://host/x.tar")
    assert not is_url("C:/photos")
    assert not is_url("photos/")
    assert without_query("https://user:pass@host/x.tar?signature=1") == "https://host/x.tar"


def test_an_unknown_kind_of_address() -> None:
    with pytest.raises(vitral.DataError, match="nonsense:// is not a known kind of address"):
        open_dataset("nonsense://x/y.tar")


def test_other_tar_forms(tmp_path: Path, server: WebServer) -> None:
    """Long names (GNU and PAX) and folders shift the offsets, which the index must have right."""
    server.folder = tmp_path
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "x.tar", "w", format=form) as shard:
            shard.addfile(_folder("sub"))
            for number in range(3):
                stem = f"sub/{'long' * 40}{number}ü"
                content = encoded(photo(seed=number), "JPEG", quality=60 + number)
                for name, data in ((f"{stem}.jpg", content), (f"{stem}.cls", b"%d" % number)):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))
        remote_data, local = open_dataset(f"{server.url}/x.tar?{form}"), open_dataset(tmp_path / "x.tar")
        assert_equal_datasets(remote_data, local)


def _folder(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = tarfile.DIRTYPE
    return member


def test_scan(server: WebServer, shards: Path) -> None:
    results = [vitral.scan(place).as_dict() for place in (f"{server.url}/shards", str(shards))]
    assert results[0] == results[1]
    assert len(results[0]["unreadable"]) == 1
    assert np.array(results[0]["splits"]["train"]).sum() == 32

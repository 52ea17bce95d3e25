"""The cache: one folder, one limit, shared by processes, and never a reason to fail."""

import errno
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.typed import typed
from vitral import ConfigError, cache
from vitral.cache import cache_folder, cache_limit, clear, has_entry, keep_entry, prune, read_entry, usage

DAY = 24 * 3600


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAL_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"


def name(number: int) -> str:
    return f"{number:064x}.npz"


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


# ---- folder and limit ----


@pytest.mark.parametrize(("platform", "peer"), [("linux", "unix.Unix"), ("darwin", "macos.MacOS")])
@pytest.mark.parametrize("xdg", ["", "/elsewhere"])
def test_the_folder_is_the_platforms(platform: str, peer: str, xdg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform == "darwin" and xdg:
        pytest.skip("macOS has no such variable")
    pytest.importorskip("platformdirs")
    monkeypatch.delenv("VITRAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setattr(sys, "platform", platform)
    module, _, kind = peer.partition(".")
    directories = getattr(import_module(f"platformdirs.{module}"), kind)
    assert str(cache_folder()) == directories("vitral", appauthor=False).user_cache_dir


def test_the_folder_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITRAL_CACHE")
    monkeypatch.setenv("LOCALAPPDATA", "/AppData/Local")
    monkeypatch.setattr(sys, "platform", "win32")
    assert cache_folder() == Path("/AppData/Local/vitral/Cache")


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("VITRAL_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 10_000_000_000),
        ("20GB", 20_000_000_000),
        ("1.5 gb", 1_500_000_000),
        ("2GiB", 2 * 2**30),
        ("3M", 3_000_000),
        ("500", 500),
        ("0", 0),
    ],
)
def test_limits(text: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE_LIMIT", text)
    assert cache_limit() == expected


@pytest.mark.parametrize("text", ["much", "-1", "20 apples", "1e9", "GB", "5i", "9" * 20, "²"])
def test_a_bad_limit_is_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE_LIMIT", text)
    with pytest.raises(ConfigError, match="VITRAL_CACHE_LIMIT is not a size .*got .*20GB"):
        read_entry("features", name(1))
    done = typed("doctor")
    assert done.returncode == 2
    assert done.stderr.startswith("vitral: VITRAL_CACHE_LIMIT")
    assert len(done.stderr.splitlines()) == 1


# ---- entries ----


def test_what_is_kept_is_read(folder: Path) -> None:
    assert read_entry("features", name(1)) is None
    assert not has_entry("features", name(1))
    keep_entry("features", name(1), b"content")
    assert read_entry("features", name(1)) == b"content"
    assert has_entry("features", name(1))
    assert (folder / "features" / name(1)).read_bytes() == b"content"
    assert read_entry("verified", name(1)) is None
    sizes = usage()
    assert (sizes["features"].files, sizes["features"].bytes) == (1, 7)
    assert (sizes["verified"].files, sizes["verified"].bytes) == (0, 0)


def test_the_least_recently_used_entries_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        keep_entry("verified" if number == 1 else "features", name(number), bytes(100))
        age(folder / ("verified" if number == 1 else "features") / name(number), 1000 - number)
    assert read_entry("features", name(0)) is not None  # used now, though it is the oldest
    monkeypatch.setenv("VITRAL_CACHE_LIMIT", "350")
    keep_entry("features", name(4), bytes(100))
    kept = [number for number in range(5) if has_entry("features", name(number)) or has_entry("verified", name(number))]
    assert kept == [0, 3, 4]  # one limit for both kinds


def test_an_entry_beyond_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE_LIMIT", "100")
    keep_entry("features", name(1), bytes(60))
    keep_entry("features", name(2), bytes(101))
    assert has_entry("features", name(1))
    assert not has_entry("features", name(2))


def test_other_peoples_files_are_neither_counted_nor_deleted(folder: Path) -> None:
    """VITRAL_CACHE may be a folder with files of its own, even one with a folder of our name."""
    keep_entry("features", name(1), b"ours")
    theirs = [folder / "thesis.npz", folder / "features" / "mine.npz", folder / "other" / name(2)]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"theirs")
        age(path, 9 * DAY)
    assert sum(size.bytes for size in usage().values()) == 4
    prune(0)
    assert not has_entry("features", name(1))
    keep_entry("features", name(1), b"ours")
    clear()
    assert [path.read_bytes() for path in theirs] == [b"theirs"] * 3


def test_temporary_files_stay_for_a_day(folder: Path) -> None:
    keep_entry("features", name(1), b"")
    for number, seconds in ((2, 60), (3, DAY + 60)):
        temporary = folder / "features" / f".{name(number)}.99.tmp"
        temporary.write_bytes(bytes(50))
        age(temporary, seconds)
    prune(10)
    assert [path.name for path in (folder / "features").glob(".*")] == [f".{name(2)}.99.tmp"]
    clear()
    assert [path.name for path in (folder / "features").iterdir()] == [f".{name(2)}.99.tmp"]


def test_clear_returns_what_it_deleted() -> None:
    keep_entry("features", name(1), bytes(10))
    keep_entry("features", name(2), bytes(20))
    keep_entry("verified", name(3), bytes(5))
    assert clear("verified") == {"verified": cache.Usage(files=1, bytes=5)}
    assert has_entry("features", name(1))
    nothing = cache.Usage(files=0, bytes=0)
    others = dict.fromkeys(("shards", "tokens", "verified", "engines"), nothing)
    assert clear() == {"features": cache.Usage(files=2, bytes=30), **others}
    assert not has_entry("features", name(1))


# ---- disks and processes ----


def test_a_full_disk_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_entry("features", name(1), b"before")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    keep_entry("features", name(2), b"content")
    assert [path.name for path in (folder / "features").iterdir()] == [name(1)]


def test_a_read_only_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_entry("features", name(1), b"content")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for function in ("utime", "replace", "unlink"):
        monkeypatch.setattr(os, function, fail)
    assert read_entry("features", name(1)) == b"content"
    keep_entry("features", name(2), b"content")
    prune(0)
    assert clear()["features"].files == 0
    assert read_entry("features", name(1)) == b"content"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses new folders")
def test_a_folder_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE", "/proc/vitral")
    keep_entry("features", name(1), b"content")
    assert read_entry("features", name(1)) is None
    assert usage()["features"].files == 0


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("VITRAL_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    keep_entry("features", name(1), b"content")
    assert not has_entry("features", name(1))
    assert read_entry("features", name(1)) is None
    assert clear()["features"].files == 0


SHARE = """
import random, sys
from vitral.cache import clear, keep_entry, read_entry, usage
random.seed(int(sys.argv[1]))
hits = 0
for _ in range(300):
    number = random.randrange(20)
    content = bytes([number]) * 1000
    found = read_entry("features", f"{number:064x}")
    assert found in (None, content), "a part of an entry"
    hits += found is not None
    keep_entry("features", f"{number:064x}", content)
    usage()
    if random.random() < 0.01:
        clear()
print(hits)
"""


def test_processes_share_the_cache(folder: Path) -> None:
    """Entries vanish under the readers all the time: the limit is half of what the processes write."""
    environment = {**os.environ, "VITRAL_CACHE_LIMIT": "10000"}
    processes = [
        subprocess.Popen([sys.executable, "-c", SHARE, str(seed)], env=environment, stdout=-1, stderr=-1, text=True)
        for seed in range(3)
    ]
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert int(output) > 0
    prune(10_000)
    assert 0 < usage()["features"].bytes <= 10_000
    assert not list((folder / "features").glob(".*"))  # nobody left a temporary file

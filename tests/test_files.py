"""Files are written whole or not at all, and names can be printed anywhere."""

import errno
import io
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from vitral import DataError, WeightsError
from vitral.files import as_text, atomic_path, printable, sha256_of, to_json, try_lock, write_json


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "report.json"
    write_json(path, {"a": 1})

    def fail_halfway() -> None:
        with atomic_path(path, DataError) as temporary:
            temporary.write_text("half")
            raise OSError("disk on fire")

    with pytest.raises(DataError, match="report.json: disk on fire"):
        fail_halfway()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_link_keeps_pointing_to_the_replaced_target(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    write_json(target, 1)
    link.symlink_to(target)
    write_json(link, 2)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == 2


def test_unwritable_folder_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="Cannot write .*report.json"):
        write_json(tmp_path / "file" / "report.json", {})


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7424 vs 7312"),
    ],
)
def test_a_full_disk_exits_with_code_1(tmp_path: Path, cause: Exception) -> None:
    with pytest.raises(WeightsError, match=r"Cannot write .*a\.bin: No space left on device\.") as caught:  # noqa: SIM117
        with atomic_path(tmp_path / "a.bin"):
            raise cause
    assert caught.value.exit_code == 1
    assert WeightsError.exit_code == 2


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.skipif(os.name == "nt", reason="Windows locks per process")
def test_second_lock_fails(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        assert try_lock(first)
        assert not try_lock(second)
    finally:
        os.close(first)
        os.close(second)


def test_names_become_printable() -> None:
    assert as_text("caf\udcc3\udca9") == "café"  # UTF-8 that Python read as surrogates
    assert as_text("\udcff.jpg") == "\\xff.jpg"
    assert printable("a\x1b[31mb\n") == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}"


def test_json_fits_the_stream() -> None:
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert to_json("é", ascii_stream) == '"\\u00e9"'
    assert to_json("é", io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) == '"é"'

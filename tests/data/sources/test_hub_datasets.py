"""hf:owner/name as a dataset: from a hub on this machine, then from the cache alone. Errors are one line."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import vitral
from tests.data.images import class_folders
from tests.loopback_hub import NOBODY, run_vitral, serve_hub
from vitral.data.dataset import RowGroups
from vitral.data.sources import open_dataset
from vitral.data.sources.hub import choose_files, find_split, missing_shards


def shard(images: list[tuple[bytes, int]], names: list[str], rows: int = 4) -> bytes:
    """Return Parquet as Hugging Face writes it: images as structs, class names in the metadata."""
    content = {
        "image": [{"bytes": image, "path": f"{index}.png"} for index, (image, _) in enumerate(images)],
        "label": [label for _, label in images],
    }
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    stream = io.BytesIO()
    table = pyarrow.table(content).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, stream, row_group_size=rows)
    return stream.getvalue()


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = class_folders(tmp_path_factory.mktemp("images"), {"cat": 20, "dog": 20}, size=(16, 16))
    labeled = [
        (path.read_bytes(), label) for label, name in enumerate(("cat", "dog")) for path in (folder / name).iterdir()
    ]
    mixed = [labeled[index % 2 * 20 + index // 2] for index in range(40)]
    names = ["cat", "dog"]
    return {
        "team/pets": {
            "README.md": b"# Pets",
            "data/train-00000-of-00002.parquet": shard(mixed[:16], names),
            "data/train-00001-of-00002.parquet": shard(mixed[16:30], names),
            "data/test-00000-of-00001.parquet": shard(mixed[30:], names),
        },
        "team/files": {"README.md": b"# Files", "cats.zip": b"PK"},
        "team/several": {
            "large/train/0000.parquet": shard(mixed[:30], names),
            "large/test/0000.parquet": shard(mixed[30:], names),
            "small/train/0000.parquet": shard(mixed[:10], names),
        },
        "team/broken": {"train.parquet": b"PAR1 not a table PAR1"},
        "team/gated": {"train.parquet": b""},  # listed, but not readable without a login
    }


@pytest.fixture(scope="module")
def hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serve the repositories. Yield the address, and the list of requests."""
    with serve_hub(repositories, "datasets", gated="team/gated") as served:
        yield served


def look(name: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_vitral("data", name, "--format", "json", cache=cache, **environment)


def test_splits_and_classes_from_the_hub_then_from_the_cache(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, requests = hub
    first = look("hf:team/pets", tmp_path, HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    (line,) = [line for line in first.stderr.splitlines() if "downloading" in line]
    assert "3 files" in line
    assert "MB" in line
    assert str(tmp_path) in line
    scan = json.loads(first.stdout)
    assert scan["name"] == "pets"
    assert scan["classes"] == ["cat", "dog"]
    assert scan["splits"] == {"test": 10, "train": 30}
    assert scan["per_class"] == {"test": [5, 5], "train": [15, 15]}
    assert not scan["unreadable"]
    assert not any("README" in path for path in requests), "only tables should be downloaded"

    again = look("hf:team/pets", tmp_path, HF_ENDPOINT=endpoint)
    assert "downloading" not in again.stderr
    before = len(requests)
    offline = look("hf:team/pets", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert len(requests) == before, "no request while offline"
    dead = look("hf:team/pets", tmp_path, HF_ENDPOINT=NOBODY)
    for done in (again, offline, dead):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == scan

    (lost,) = tmp_path.rglob("train-00001-of-00002.parquet")
    lost.unlink()
    partial = look("hf:team/pets", tmp_path, HF_ENDPOINT=NOBODY)
    assert partial.returncode == 2
    assert "only partly in the cache (data/train-00001-of-00002.parquet is missing)" in partial.stderr
    assert len(partial.stderr.splitlines()) == 1
    restored = look("hf:team/pets", tmp_path, HF_ENDPOINT=endpoint)
    assert json.loads(restored.stdout) == scan


def test_training_on_a_hub_dataset(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    options = "--model vit-pico4 --network.width 48 --network.depth 1 --network.heads 3 --image-size 16 --batch-size 8"
    done = run_vitral(
        *(
            "train",
            "hf:team/pets",
            "--out",
            str(tmp_path / "run"),
            *options.split(),
            "--epochs",
            "8",
            "--format",
            "json",
        ),
        cache=tmp_path / "cache",
        HF_ENDPOINT=hub[0],
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["test"]["images"] == 10
    assert result["test"]["top1"] > 0.8
    assert vitral.load(tmp_path / "run").labels == ("cat", "dog")


def test_one_of_several(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    several = look("hf:team/several", tmp_path, HF_ENDPOINT=hub[0])
    assert several.returncode == 2
    assert "has several datasets: large, small. Choose one: hf:team/several/small" in several.stderr
    large = look("hf:team/several/large", tmp_path, HF_ENDPOINT=hub[0])
    assert json.loads(large.stdout)["splits"] == {"test": 10, "train": 30}
    assert json.loads(large.stdout)["name"] == "large"
    offline = look("hf:team/several/large", tmp_path, HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout) == json.loads(large.stdout)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf:team/nothing", "There is no public dataset team/nothing on the Hugging Face hub."),
        ("hf:team/files", "hf:team/files has no Parquet files. Download it and pass its folder."),
        ("hf:team/several/tiny", "hf:team/several has no Parquet files in tiny/."),
        ("hf:team/pets@older", "The dataset team/pets has no revision older."),
        ("hf:pets", "Use hf:owner/name."),
        ("hf:team/", "Use hf:owner/name."),
        ("hf:team/a b", "There is no public dataset team/a b"),
        ("hf:team/broken", "is not a Parquet file"),
        ("hf:team/gated", "Cannot download hf:team/gated"),
    ],
)
def test_errors_are_one_line(hub: tuple[str, list[str]], name: str, reason: str, tmp_path: Path) -> None:
    done = look(name, tmp_path, HF_ENDPOINT=hub[0], HF_HUB_DISABLE_PROGRESS_BARS="1")
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "downloading" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("vitral: ")
    assert reason in lines[0]
    assert not done.stdout


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOBODY}])
def test_neither_hub_nor_cache(environment: dict[str, str], tmp_path: Path) -> None:
    done = look("hf:team/pets", tmp_path, **environment)
    assert done.returncode == 2
    assert "hf:team/pets is not in the cache, and the hub is unreachable" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(vitral.VitralError, match=r"pip install 'vitral\[hub\]'"):
        open_dataset("hf:team/pets")


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00002.parquet", "train"),
        ("data/validation-00000-of-00001.parquet", "val"),
        ("default/test/0000.parquet", "test"),
        ("test/train-images.parquet", "train"),
        ("data/latest-00000.parquet", "train"),
        ("testing.parquet", "test"),
        ("0000.parquet", "train"),
    ],
)
def test_splits_by_name(path: str, split: str) -> None:
    assert find_split(path) == split


def test_shards_by_number() -> None:
    assert missing_shards(["a/train-00000-of-00003.parquet", "a/train-00002-of-00003.parquet", "b.parquet"]) == [
        "a/train-00001-of-00003.parquet"
    ]
    assert choose_files("x/y", ["b/train-1.parquet", "b/train-0.parquet", "b/test.parquet", "b/x.json"]) == [
        "b/test.parquet",
        "b/train-0.parquet",
        "b/train-1.parquet",
    ]


def test_cells_in_any_order_within_a_budget_of_bytes(tmp_path: Path) -> None:
    cells = [np.random.default_rng(row).bytes(1000) for row in range(200)]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells}), tmp_path / "x.parquet", row_group_size=16)
    shutil.copy(tmp_path / "x.parquet", tmp_path / "y.parquet")
    groups = RowGroups(max_bytes=40_000)
    for row in np.random.default_rng(0).permutation(200).tolist():
        for name in ("x", "y"):
            assert groups.read_cell(str(tmp_path / f"{name}.parquet"), "image", row) == cells[row]
            assert groups.bytes == sum(values.nbytes for values in groups.cached.values()) <= 40_000
    assert len(groups.cached) == 2  # of 26
    tight = RowGroups(max_bytes=1)
    assert tight.read_cell(str(tmp_path / "x.parquet"), "image", 199) == cells[199]
    assert len(tight.cached) == 1

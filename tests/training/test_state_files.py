"""The files of sharded states: any number of processes reads them, and no damage goes unnoticed."""

import hashlib
import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitral.errors import VitralError
from vitral.training.state import TrainState, load_state, open_state, save_state
from vitral.weights.formats.safetensors import stream_safetensors

TENSORS = {"model:weight": torch.arange(35.0).reshape(7, 5), "model:bias": torch.arange(3.0)}


def write_shards(folder: Path, tensors: dict[str, Tensor], world: int, step: int = 1) -> Path:
    """Write a state as so many processes of a sharded run would, with torch's own division into rows."""
    path = save_state(folder, TrainState(step=step), tensors)
    (path / "tensors.safetensors").unlink()
    firsts = dict.fromkeys(tensors, 0)
    for rank in range(world):
        mine, rows = {"optimizer:step": torch.tensor(4.0)} if rank == 0 else {}, {}
        for name, tensor in tensors.items():
            parts = tensor.chunk(world)
            if rank < len(parts):
                mine[name], rows[name] = parts[rank].contiguous(), (firsts[name], len(tensor))
                firsts[name] += len(parts[rank])
        save_file(mine, path / f"tensors-{rank:05d}-of-{world:05d}.safetensors", metadata={"rows": json.dumps(rows)})
    write_manifest(path)
    return path


def write_manifest(path: Path) -> None:
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    entries = {f.name: {"sha256": hashlib.sha256(f.read_bytes()).hexdigest(), "bytes": f.stat().st_size} for f in files}
    (path / "manifest.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_one_process_reads_the_files_of_many(world: int, tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, world)
    loaded = load_state(tmp_path)
    assert loaded is not None
    assert all(torch.equal(loaded[1][name], tensor) for name, tensor in TENSORS.items())
    assert loaded[1]["optimizer:step"] == 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_rows_can_be_read(world: int, tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, world)
    opened = open_state(tmp_path)
    assert opened is not None
    saved = opened[1]["model:weight"]
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(saved.read(slice(start, stop)), TENSORS["model:weight"][start:stop])


def test_faults_in_shards_are_detected(tmp_path: Path) -> None:
    chance = random.Random(0)
    write_shards(tmp_path, TENSORS, 2)
    for number in range(40):
        newest = write_shards(tmp_path, TENSORS, 2, step=2)
        first, second = sorted(newest.glob("tensors-*"))
        if number % 4 == 0:
            chance.choice([first, second]).unlink()
        elif number % 4 == 1:
            contents = first.read_bytes(), second.read_bytes()
            first.write_bytes(contents[1])
            second.write_bytes(contents[0])
        elif number % 4 == 2:
            content = bytearray(first.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            first.write_bytes(content)
        else:
            second.write_bytes(second.read_bytes()[: chance.randrange(second.stat().st_size)])
        opened = open_state(tmp_path)
        assert opened is not None
        assert opened[0].step == 1
        assert opened[2][0].startswith("step-00000002 is damaged (")


def test_missing_rows_with_a_valid_manifest_are_detected(tmp_path: Path) -> None:
    """The files of one state under the names of another number of processes, or with rows left out."""
    path = write_shards(tmp_path, TENSORS, 3)
    (path / "tensors-00001-of-00003.safetensors").unlink()
    write_manifest(path)
    with pytest.raises(VitralError, match="manifest does not list the files of one state"):
        open_state(tmp_path)
    path = write_shards(tmp_path, TENSORS, 2)
    empty = {"model:other": torch.zeros(1)}
    save_file(empty, path / "tensors-00001-of-00002.safetensors", metadata={"rows": "{}"})
    write_manifest(path)
    with pytest.raises(VitralError, match=r"rows of model:\w+ are missing"):
        open_state(tmp_path)


def test_a_crafted_metadata_file_is_never_opened(tmp_path: Path) -> None:
    """torch.distributed.checkpoint unpickles such a file; we read only what our manifest lists, and no pickle."""
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (canary,)

    path = write_shards(tmp_path / "state", TENSORS, 2)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert open_state(tmp_path / "state") is not None
    write_manifest(path)
    with pytest.raises(VitralError, match="manifest does not list"):
        open_state(tmp_path / "state")
    assert not canary.exists()


def test_a_streamed_file_equals_one_written_at_once(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 2), "a": torch.arange(5), "c": torch.randn(())}
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    stream_safetensors(tmp_path / "turn.safetensors", layout, iter(tensors.items()), lambda: {"key": "value"})
    save_file(tensors, tmp_path / "once.safetensors", metadata={"key": "value"})
    with safe_open(tmp_path / "turn.safetensors", "pt") as turn, safe_open(tmp_path / "once.safetensors", "pt") as once:
        assert turn.metadata() == once.metadata()
        assert sorted(turn.keys()) == sorted(once.keys())
        assert all(torch.equal(turn.get_tensor(name), tensors[name]) for name in tensors)

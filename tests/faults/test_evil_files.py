"""Refuse checkpoints that lie, contain code or exhaust memory, in one sentence and without running anything."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitral
from tests.conftest import small_model


class Canary:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    path = tmp_path / "canary"
    yield Canary(path)
    assert not path.exists(), "code in a checkpoint was run"


def refused(path: Path, reason: str, **overrides: Any) -> None:
    """Assert that loading raises one sentence that matches the reason."""
    with pytest.raises(vitral.WeightsError, match=reason) as caught:
        vitral.load(path, **overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def timm_state() -> dict[str, torch.Tensor]:
    from vitral.weights.dialects import timm
    from vitral.weights.dialects.plan import Content

    model = small_model()
    content = Content(
        dialect="timm", network=model.config, state=model.state_dict(), preprocess=vitral.Preprocess(size=(16, 16))
    )
    return content.renamed(list(timm.rules(model.config, token_rows=1)))


# ---- pickles ----


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pth_that_runs_code(canary: Canary, legacy: bool, tmp_path: Path) -> None:
    content = {**timm_state(), "extra": canary}
    torch.save(content, tmp_path / "evil.pth", _use_new_zipfile_serialization=not legacy)
    refused(tmp_path / "evil.pth", "mkdir")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_bare_pickle_that_runs_code(canary: Canary, protocol: int, tmp_path: Path) -> None:
    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"x": canary}, protocol=protocol))
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"x": canary}, protocol=protocol))
    for name in ("evil.pth", ".metadata"):
        with pytest.raises(vitral.WeightsError):
            vitral.load(tmp_path / name)


def test_a_pth_with_code_in_a_second_program(canary: Canary, tmp_path: Path) -> None:
    torch.save(timm_state(), tmp_path / "good.pth")
    with zipfile.ZipFile(tmp_path / "good.pth") as good, zipfile.ZipFile(tmp_path / "evil.pth", "w") as evil:
        for info in good.infolist():
            evil.writestr(info.filename, good.read(info))
        evil.writestr("other/data.pkl", pickle.dumps(canary, protocol=2))
    with pytest.raises(vitral.WeightsError):
        vitral.load(tmp_path / "evil.pth")


def test_a_pth_that_swaps_its_program_after_the_check(canary: Canary, tmp_path: Path) -> None:
    """Two members of one name: whichever a reader takes, nothing may run."""
    torch.save(timm_state(), tmp_path / "good.pth")
    with zipfile.ZipFile(tmp_path / "good.pth") as good, zipfile.ZipFile(tmp_path / "evil.pth", "w") as evil:
        program = next(info.filename for info in good.infolist() if info.filename.endswith("data.pkl"))
        for info in good.infolist():
            evil.writestr(info.filename, good.read(info))
        with pytest.warns(UserWarning, match="Duplicate"):
            evil.writestr(program, pickle.dumps(canary, protocol=2))
    with pytest.raises(vitral.WeightsError):
        vitral.load(tmp_path / "evil.pth")


def test_an_exported_program_is_not_opened(canary: Canary, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.pt2", "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/data/sample_inputs/model.pt", pickle.dumps(canary))
    refused(tmp_path / "evil.pt2", "pt2")


def test_a_scripted_program_is_not_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("model/constants.pkl", b"")
        archive.writestr("model/data.pkl", b"")
    refused(tmp_path / "evil.pt", "TorchScript")


def test_a_storage_larger_than_the_file(tmp_path: Path) -> None:
    """The old format allocates what the pickle declares before it reads."""
    path = tmp_path / "evil.pth"
    torch.save(OrderedDict(x=torch.zeros(1000)), path, _use_new_zipfile_serialization=False)
    two_bytes, four_bytes = struct.pack("<BH", 0x4D, 1000), struct.pack("<BI", 0x4A, 2**31 - 1)
    assert two_bytes in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(two_bytes, four_bytes))
    refused(path, "declares")


def test_a_view_that_is_larger_than_its_storage(tmp_path: Path) -> None:
    torch.save({**timm_state(), "pos_embed": torch.zeros(1).expand(1, 10**9, 10**3)}, tmp_path / "evil.pth")
    refused(tmp_path / "evil.pth", "more than it stores")


def test_a_compressed_pth(tmp_path: Path) -> None:
    torch.save(timm_state(), tmp_path / "good.pth")
    with (
        zipfile.ZipFile(tmp_path / "good.pth") as good,
        zipfile.ZipFile(tmp_path / "evil.pth", "w", zipfile.ZIP_DEFLATED) as evil,
    ):
        for info in good.infolist():
            evil.writestr(info.filename, good.read(info))
    refused(tmp_path / "evil.pth", "compressed")


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_truncated_pth(fraction: float, legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "cut.pth"
    torch.save(timm_state(), path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])
    with pytest.raises(vitral.WeightsError):
        vitral.load(path, heads=3)


def test_storages_shared_by_many_tensors_are_valid(tmp_path: Path) -> None:
    whole = torch.cat([tensor.flatten() for tensor in timm_state().values()])
    views, start = {}, 0
    for name, tensor in timm_state().items():
        views[name] = whole[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    for legacy in (False, True):
        torch.save(views, tmp_path / "shared.pth", _use_new_zipfile_serialization=not legacy)
        assert vitral.load(tmp_path / "shared.pth", heads=3).model.config.width == 48


# ---- npz ----


def write_npz(path: Path, members: list[tuple[str, bytes]], compress: bool = False) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name, content in members:
            archive.writestr(name, content)


def array(values: Any, dtype: Any = None) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(values, dtype=dtype), allow_pickle=True)
    return stream.getvalue()


def header(shape: Any, dtype: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def test_objects_in_an_npz(canary: Canary, tmp_path: Path) -> None:
    write_npz(tmp_path / "evil.npz", [("embedding/kernel.npy", array([canary], dtype=object))])
    refused(tmp_path / "evil.npz", "pickled Python objects")


def test_a_bomb(tmp_path: Path) -> None:
    write_npz(tmp_path / "bomb.npz", [("embedding/kernel.npy", array(np.zeros(50_000_000, np.float32)))], compress=True)
    assert (tmp_path / "bomb.npz").stat().st_size < 400_000
    refused(tmp_path / "bomb.npz", "bomb")


@pytest.mark.parametrize("name", ["../../evil.npy", "/etc/evil.npy", "a/../../b.npy", "..\\evil.npy", "C:/evil.npy"])
def test_members_that_point_outside(name: str, tmp_path: Path) -> None:
    write_npz(tmp_path / "evil.npz", [(name, array([1.0]))])
    refused(tmp_path / "evil.npz", "outside")


def test_duplicate_members(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        write_npz(tmp_path / "evil.npz", [("cls.npy", array([1.0])), ("cls.npy", array([2.0]))])
    refused(tmp_path / "evil.npz", "twice")


@pytest.mark.parametrize("shape", [(10**12,), (10**6, 10**6), (2**62, 4), (-1, 5)])
def test_headers_that_declare_too_much(shape: tuple[int, ...], tmp_path: Path) -> None:
    write_npz(tmp_path / "evil.npz", [("embedding/kernel.npy", header(shape) + b"\0" * 64)])
    refused(tmp_path / "evil.npz", "declares shape")


@pytest.mark.parametrize("dtype", ["<U8", "|S4", "<c8", "<M8[s]", "|V3", "|V16"])
def test_dtypes_that_are_not_numbers(dtype: str, tmp_path: Path) -> None:
    write_npz(tmp_path / "evil.npz", [("embedding/kernel.npy", header((1,), dtype) + b"\0" * 64)])
    refused(tmp_path / "evil.npz", "expected numbers|not a NumPy array")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 100, b"{" * 70_000])
def test_members_that_are_not_arrays(content: bytes, tmp_path: Path) -> None:
    write_npz(tmp_path / "evil.npz", [("embedding/kernel.npy", content)])
    refused(tmp_path / "evil.npz", "not a NumPy array")


def test_a_member_with_a_wrong_checksum(tmp_path: Path) -> None:
    golden = Path("tests/parity/golden/token.npz").read_bytes()
    broken = bytearray(golden)
    broken[len(broken) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(broken)
    refused(tmp_path / "flipped.npz", "damaged")


PEAK_OF_LOADING = """
import sys, vitral, torch, vitral.weights.load
peak = lambda: int([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
before = peak()
for path in sys.argv[1:]:
    try: vitral.load(path)
    except vitral.WeightsError: print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_declared_giants_do_not_take_memory(ours: Path, tmp_path: Path) -> None:
    """Measure the peak memory of a separate process that loads one after the other."""
    files = [tmp_path / "evil.npz"]
    write_npz(files[0], [("embedding/kernel.npy", header((10**12,)) + b"\0" * 64)])
    for number, change in enumerate(GIANT_SIZES.values()):
        files.append(metadata(ours, change).rename(tmp_path / f"{number}.safetensors"))
    command = [sys.executable, "-c", PEAK_OF_LOADING, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    growth = list(map(int, done.stdout.split()))
    assert len(growth) == len(files), done.stderr
    assert max(growth) < 20_000  # kilobytes


# ---- safetensors ----


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    vitral.save(small_model(), path)
    return path


def rewrite(path: Path, change: Any) -> Path:
    """Write the same metadata with changed tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    evil = path.with_name("evil.safetensors")
    save_file(tensors, evil, metadata=metadata)
    return evil


def test_a_missing_tensor(ours: Path) -> None:
    evil = rewrite(ours, lambda tensors: tensors.pop("blocks.1.norm1.bias"))
    refused(evil, "missing.*blocks.1.norm1.bias")


def test_an_extra_tensor(ours: Path) -> None:
    refused(rewrite(ours, lambda tensors: tensors.update(stray=torch.zeros(3))), "unexpected: stray")


def test_a_wrong_shape(ours: Path) -> None:
    refused(rewrite(ours, lambda tensors: tensors.update({"norm.bias": torch.zeros(49)})), "norm.bias")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(ours: Path, value: float) -> None:
    evil = rewrite(ours, lambda tensors: tensors["blocks.0.mlp.expand.weight"][3].__setitem__(5, value))
    refused(evil, "blocks.0.mlp.expand.weight contains NaN or Inf")


@pytest.mark.parametrize("length", [2**62, 2**31, 0])
def test_a_header_that_is_too_long(ours: Path, length: int) -> None:
    content = ours.read_bytes()
    ours.write_bytes(struct.pack("<Q", length) + content[8:])
    refused(ours, "damaged or truncated|not a checkpoint")


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_safetensors(ours: Path, fraction: float) -> None:
    ours.write_bytes(ours.read_bytes()[: int(ours.stat().st_size * fraction)])
    with pytest.raises(vitral.WeightsError):
        vitral.load(ours)


def metadata(path: Path, change: Any) -> Path:
    """Write a copy with changed metadata and return its path."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["vitral"])
    change(content)
    evil = path.with_name("evil.safetensors")
    save_file(load_file(path), evil, metadata={"vitral": json.dumps(content)})
    return evil


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.update(format=99), "format version 99"),
        (lambda content: content.pop("format"), "no format version"),
        (lambda content: content["config"].update(width=10**9, heads=10**9), "does not match|shape|Cannot build"),
        (lambda content: content["config"].update(depth=10**8), "damaged"),
        (lambda content: content["config"].update(wisdom=3), "damaged"),
        (lambda content: content["preprocess"].update(std=[0, 0, 0]), "damaged"),
        (lambda content: content.pop("config"), "damaged"),
        (lambda content: content["config"].update(stem={"kind": "evil"}), "damaged"),
    ],
)
def test_metadata_that_lie(ours: Path, change: Any, reason: str) -> None:
    metadata(ours, change)
    refused(ours.with_name("evil.safetensors"), reason)


@pytest.mark.parametrize("key", ["vitral", "vitral.hints"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{" * 100_000, "not valid JSON"),
        ('{"x":' * 100_000 + "1" + "}" * 100_000, "nested"),
        ('{"x":' * 500 + "1" + "}" * 500, "nested"),
        ("[1]", "JSON object"),
        ('{"x": "' + "y" * 17 * 2**20 + '"}', "larger than 16 MiB"),
    ],
    ids=["open", "deep", "less deep", "list", "huge"],
)
def test_metadata_that_are_not_json(key: str, text: str, reason: str, tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in timm_state().items()}, tmp_path / "x.safetensors")
    save_file(load_file(tmp_path / "x.safetensors"), tmp_path / "x.safetensors", metadata={key: text})
    refused(tmp_path / "x.safetensors", reason)


GIANT_SIZES: dict[str, Callable[[Any], None]] = {
    "image": lambda content: content["config"].update(image_size=20_000, position_grid=4),
    "waves": lambda content: content["config"].update(position="sincos-2d", image_size=20_000),
    "grid": lambda content: content["config"].update(position_grid=20_000),
    "preprocessing": lambda content: content["preprocess"].update(size=[20_000, 20_000]),
    "patches": lambda content: content["preprocess"].update(size=[8_000, 8_000]),
    "wide": lambda content: content["preprocess"].update(size=[4, 10**9]),
}
"""Each is refused before anything is built, so it takes no memory, as test_declared_giants_do_not_take_memory shows."""


@pytest.mark.parametrize("name", GIANT_SIZES)
def test_giant_sizes_in_metadata_are_refused(ours: Path, name: str) -> None:
    refused(metadata(ours, GIANT_SIZES[name]), "too large|from 1 to 16384")


# ---- other things ----


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"hello, this is a text file", "not a checkpoint"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "LFS pointer"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 50, "HDF5"),
        (b"PK\x03\x04" + b"\0" * 30, "damaged"),
        (b"\x80", "truncated"),
    ],
)
def test_foreign_files(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    refused(tmp_path / "x.bin", reason)


def test_missing_and_ambiguous_checkpoints(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.npz", "not found")
    refused(tmp_path, "no checkpoint")
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"x": torch.zeros(2)}, tmp_path / "b.safetensors")
    refused(tmp_path, "several checkpoints")
    refused(tmp_path / "a.safetensors", "no known dialect")


@pytest.mark.parametrize("content", ["[1]", "{", '{"weight_map": {"x": "../../etc/passwd"}}', '{"weight_map": 3}'])
def test_an_index_of_shards_that_lies(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(vitral.WeightsError):
        vitral.load(tmp_path)


def test_layers_with_a_gap_or_a_giant_number(tmp_path: Path) -> None:
    state = timm_state()
    save_file({**state, "blocks.999999999.norm1.weight": torch.zeros(48)}, tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", "no layer 2", heads=3)


def test_a_config_json_that_lies(tmp_path: Path) -> None:
    save_file(timm_state(), tmp_path / "model.safetensors")
    for content in ("{", "[]", "null", '"x"'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(vitral.WeightsError, match="config.json"):
            vitral.load(tmp_path)

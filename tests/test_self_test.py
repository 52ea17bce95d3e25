"""`vitral doctor --check`: its tests hold on this machine, and any failure becomes a row and exit code 1."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.typed import typed
from vitral import self_test
from vitral.errors import VitralError

NAMES = ["train", "kill and resume", "predict as on the CPU", "export to ONNX", "two processes"]


def fail(*_: object) -> str:
    raise VitralError("The weights differ.")


def crash(*_: object) -> str:
    raise RuntimeError("CUDA error: no kernel image")


def skip(*_: object) -> str:
    raise self_test._SkippedError("this machine has one core")  # pyright: ignore[reportPrivateUsage]


def test_every_failure_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"_train": lambda *_: "accuracy 90%", "_kill_and_resume": fail, "_compare_with_cpu": crash}
    for name, function in {**functions, "_export": skip, "_two_processes": skip}.items():
        monkeypatch.setattr(self_test, name, function)
    done = typed("doctor", "--check", "--device", "cpu", "--format", "json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)
    assert [row["name"] for row in findings["checks"]] == NAMES
    assert [row["result"] for row in findings["checks"]] == ["holds", "fails", "fails", "skipped", "skipped"]
    assert findings["problems"][-1] == "predict as on the CPU: RuntimeError: CUDA error: no kernel image"
    page = typed("doctor", "--check", "--device", "cpu").stdout
    assert all(name in page for name in NAMES)


@pytest.mark.soak
def test_everything_holds_here() -> None:
    rows = json.loads(typed("doctor", "--check", "--device", "cpu", "--format", "json").stdout)["checks"]
    assert {row["name"]: row["result"] for row in rows} == dict.fromkeys(NAMES, "holds")
    assert sum(row["seconds"] for row in rows) < 180


@pytest.mark.soak
def test_other_weights_after_a_resume_are_noticed(tmp_path: Path) -> None:
    """The check compares files: one bit in the weights of the run that was not killed makes it fail."""
    self_test._train(tmp_path / "whole", "cpu")  # pyright: ignore[reportPrivateUsage]
    path = tmp_path / "whole" / "model.safetensors"
    weights = load_file(path)
    weights["norm.bias"] = torch.nextafter(weights["norm.bias"], torch.tensor(float("inf")))
    save_file(weights, path)
    with pytest.raises(VitralError, match="The weights differ by up to"):
        self_test._kill_and_resume(tmp_path, "cpu")  # pyright: ignore[reportPrivateUsage]

"""All that a resume needs, in folders that are either whole or not there.

    state/step-00000120/tensors.safetensors   weights, averages, moments
                        state.json            counters, the best so far
                        manifest.json         the SHA-256 and size of both

A state is written aside, its manifest last, everything is brought to the disk, and then it is renamed. On the way back
the newest one whose manifest verifies is taken.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.errors import ConfigError, VitralError

KEEP = 2
_FILES = ("tensors.safetensors", "state.json")


@dataclass(frozen=True, kw_only=True)
class State:
    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def save_state(folder: Path, state: State) -> Path:
    """Writes a state and lets go of old ones; a failure leaves those that were there."""
    final = folder / f"step-{state.step:08d}"
    aside = folder / f"step-{state.step:08d}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        save_file(tensors, aside / _FILES[0])
        (aside / _FILES[1]).write_text(json.dumps({"step": state.step, **state.facts}), encoding="utf-8")
        manifest = {name: {"sha256": _digest(aside / name), "bytes": (aside / name).stat().st_size} for name in _FILES}
        (aside / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*_FILES, "manifest.json"):
            _to_disk(aside / name)
        _to_disk(aside)
        shutil.rmtree(final, ignore_errors=True)  # the same step, saved twice, is the same state
        os.rename(aside, final)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise VitralError(
            f"The state could not be saved in {folder}: {reason}.", hint="Make room, then resume."
        ) from error
    prune(folder)
    return final


def prune(folder: Path) -> None:
    for old in _saved(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    for left in folder.glob("step-*.tmp-*"):
        if left.name.rpartition("-")[2] != str(os.getpid()):
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed while saving


def load_state(folder: Path) -> tuple[State | None, list[str]]:
    """The newest whole state, and what is wrong with newer ones, in sentences; None where none was saved."""
    damaged: list[str] = []
    for path in _saved(folder):
        if problem := check_state(path):
            damaged.append(f"{path.name} is damaged ({problem})")
            continue
        facts = json.loads((path / _FILES[1]).read_text(encoding="utf-8"))
        state = State(step=facts["step"], tensors=load_file(path / _FILES[0]), facts=facts)
        return state, [f"{one}; the state before it is used." for one in damaged]
    if damaged:  # to start over would write over the best model that the run has
        raise VitralError(
            f"No saved state in {folder} can be used: {'; '.join(damaged)}.",
            hint="Bring them back, or start another run with another --out; this one was left as it is.",
        )
    return None, []


def check_fits(state: State, fresh: Mapping[str, Tensor], folder: Path) -> None:
    """ConfigError where a state is not one of this network: somebody has changed config.toml. ``fresh`` is what the
    learner would save before its first step, when the optimizer may have no moments yet."""
    for name, tensor in fresh.items():
        saved = state.tensors.get(name)
        if saved is None or saved.shape != tensor.shape:
            seen = "is not there" if saved is None else f"has shape {tuple(saved.shape)}"
            raise ConfigError(
                f"The state in {folder} does not fit the settings beside it: {name.partition(':')[2]} {seen}, and "
                f"{tuple(tensor.shape)} is expected.",
                hint="Bring config.toml back as it was, or start another run.",
            )
    for name in state.tensors:
        if not name.startswith("optimizer:") and name not in fresh:
            raise ConfigError(
                f"The state in {folder} does not fit the settings beside it: they have no {name.partition(':')[2]}.",
                hint="Bring config.toml back as it was, or start another run.",
            )


def check_state(path: Path) -> str | None:
    """What is wrong with a saved state; None: nothing."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        for name in _FILES:
            if _digest(path / name) != manifest[name]["sha256"]:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _saved(folder: Path) -> list[Path]:
    """Newest first; what somebody else has put beside them is not ours."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch("step-[0-9]{8}", path.name)), reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handle for folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes only what can be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

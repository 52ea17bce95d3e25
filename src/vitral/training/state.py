"""Everything that changes while a run trains, saved in folders that are complete or absent.

    state/step-00000120/tensors.safetensors   weights, moments, averages; one file per process if sharded
                        state.json            the TrainState
                        manifest.json         SHA-256 and size of every file

A state is written to a temporary folder, its manifest last, flushed to disk and renamed. Loading uses the newest state
whose manifest verifies.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from safetensors import SafetensorError
from torch import Tensor

from vitral.collectives import current_world, from_first, gather
from vitral.data.scan import max_bad_images
from vitral.errors import MAX_NUMBER, ConfigError, DataError, VitralError
from vitral.files import flush_and_hash, flush_to_disk, sha256_of
from vitral.training.schedule import Pace
from vitral.training.selection import BestEpoch
from vitral.training.state_files import SavedTensor, check_names, is_divided, open_tensors, write_tensors

if TYPE_CHECKING:
    from vitral.data.batches import Batch
    from vitral.data.dataset import Item
    from vitral.runs import Run

STATES_KEPT = 2
Stage = Literal["train", "refit", "done"]
"""train: on the training images; refit: also on the validation images; done: the final model is written."""
Result = TypeVar("Result")
_STATE, _MANIFEST = "state.json", "manifest.json"


@dataclass(kw_only=True, slots=True)
class UnreadableImages:
    """The images that could not be read, of any split."""

    reasons: dict[str, str] = field(default_factory=dict[str, str])
    """Reason by name."""
    training: int = 0
    """Number of training images among them."""
    reported: int = 0

    def add(self, images: Iterable[tuple[str, str]], run: "Run") -> None:
        """Record names and reasons, each once, also in skipped.txt."""
        for key, reason in images:
            if key not in self.reasons:
                self.reasons[key] = reason
                run.add_skipped(key, reason)

    def add_batch(self, batch: "Batch", items: "Sequence[Item]", run: "Run", max_fraction: float) -> None:
        """Record those of a training batch. DataError if there are too many, or the batch is empty."""
        before = len(self.reasons)
        self.add(((items[index].key, reason) for index, reason in batch.bad), run)
        self.training += len(self.reasons) - before
        if not len(batch.items) or self.training > max_bad_images(len(items), max_fraction):
            index, reason = batch.bad[0] if batch.bad else (0, "")
            raise _too_many_unreadable(self.training, len(items), items[index].key, reason, max_fraction)

    def report_new(self, run: "Run") -> str | None:
        """Return a sentence about the images added since the last call, or None."""
        new = list(self.reasons.items())[self.reported :]
        self.reported = len(self.reasons)
        if not new:
            return None
        (key, reason), more = new[0], f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        return f"Skipped an unreadable image: {key}: {reason}{more}. {run.skipped} lists all."


def check_unreadable(images: Sequence[tuple[str, str]], total: int, max_fraction: float) -> None:
    """Raise DataError if more of the training images cannot be read than the settings allow."""
    if len(images) > max_bad_images(total, max_fraction):
        raise _too_many_unreadable(len(images), total, *images[0], max_fraction)


def _too_many_unreadable(count: int, total: int, key: str, reason: str, max_fraction: float) -> DataError:
    return DataError(
        f"{count} of {total} training images cannot be read, such as {key} ({reason}); "
        f"at most {max_fraction:.0%} may be unreadable.",
        hint="Run `vitral data` to list them, or raise --max-bad-fraction.",
    )


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Everything that changes while a run trains, except the tensors."""

    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    """Sum of the training losses since the last validation."""
    loss_steps: int = 0
    is_unscored: bool = False
    """Whether a signal interrupted the validation of the last epoch."""
    loss_scale: float = 1.0
    """Factor that keeps gradients within the range of float16."""
    steps_in_range: int = 0
    """Steps since the last overflow of float16."""
    stage: Stage = "train"
    pace: Pace = field(default_factory=Pace)
    tuned: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The candidates that training added, once they are compared with the linear probe."""
    temperature: float = 1.0
    """Divisor of the logits of the winner, which makes its probabilities right on the validation images."""
    share: float = 1.0
    """How far the winner went from the linear probe to the trained weights."""
    best: BestEpoch = field(default_factory=BestEpoch)
    unreadable: UnreadableImages = field(default_factory=UnreadableImages)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "TrainState":
        """Return a state that was saved. ValueError if no run can have saved it."""
        values = dict(content)
        best, unreadable = BestEpoch(**values.pop("best")), UnreadableImages(**values.pop("unreadable"))
        state = cls(best=best, unreadable=unreadable, pace=Pace(**values.pop("pace", {})), **values)
        _check_values(state)
        return state


def _check_values(state: TrainState) -> None:
    best, unreadable = state.best, state.unreadable
    pace = state.pace
    counts = (state.step, state.loss_steps, state.steps_in_range, best.step, unreadable.training, unreadable.reported)
    counts += (pace.first, pace.planned, pace.end, pace.moved_at)
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or type(best.epoch) is not int:
        raise ValueError("a counter is not a count")
    if state.stage not in get_args(Stage):
        raise ValueError(f"{state.stage!r} is not a stage")
    amounts = (state.seconds, state.loss_sum, state.loss_scale, pace.position, state.temperature, state.share)
    if not all(type(amount) in (int, float) and -MAX_NUMBER < amount < MAX_NUMBER for amount in amounts):
        raise ValueError("a number is not finite")
    if not all(type(score) is float for score in (best.top1, best.loss)):  # NaN and infinity are values of their own
        raise ValueError("a score is not a number")
    reasons = unreadable.reasons
    if type(reasons) is not dict or not all(type(reason) is str for reason in reasons.values()):
        raise ValueError("the unreadable images are not names with reasons")


def save_state(folder: Path, state: TrainState, tensors: Mapping[str, Tensor]) -> Path:
    """Write a state and remove old ones. A failure leaves the existing states.

    Processes that hold parts of the tensors all call this and write their parts at the same time.
    """
    is_joint = is_divided(tensors)
    is_first = not is_joint or current_world().is_first
    final = folder / _folder_name(state.step)
    temporary = folder / f"{final.name}.tmp-{from_first(os.getpid()) if is_joint else os.getpid()}"

    def create() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> tuple[str, dict[str, Any]]:
        path = write_tensors(temporary, tensors)
        return path.name, _describe(path, flush_and_hash(path))

    def commit() -> None:
        (temporary / _STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        manifest = {**dict(written), _STATE: _describe(temporary / _STATE, flush_and_hash(temporary / _STATE))}
        (temporary / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for path in (temporary / _MANIFEST, temporary):
            flush_to_disk(path)
        shutil.rmtree(final, ignore_errors=True)  # the same step saved twice is the same state
        os.rename(temporary, final)
        flush_to_disk(folder)

    try:
        _do_jointly(create if is_first else _do_nothing, is_joint)
        written = _do_jointly(write, is_joint)
        _do_jointly(commit if is_first else _do_nothing, is_joint)
    except _SaveError as error:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise VitralError(
            f"Cannot save the state in {folder}: {error}.", hint="Free some space, then resume."
        ) from error
    leftovers = folder.glob("step-*.tmp-*")  # of a process that was killed while saving
    for path in (*_saved_states(folder)[STATES_KEPT:], *leftovers) if is_first else ():
        shutil.rmtree(path, ignore_errors=True)
    return final


class _SaveError(Exception):
    """A part of a state cannot be written, by any of the processes."""


def _do_jointly(work: Callable[[], Result], is_joint: bool) -> list[Result]:
    """Do something in this process, or in all of them, and return the results by rank. Raise if one fails."""
    result: Result | None = None
    reason = None
    try:
        result = work()
    except (OSError, SafetensorError) as error:
        reason = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    outcomes = gather((result, reason)) if is_joint else [(result, reason)]
    if failures := [reason for _, reason in outcomes if reason is not None]:
        raise _SaveError(failures[0])
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]


def _do_nothing() -> None:
    pass


def _describe(path: Path, sha256: str) -> dict[str, Any]:
    return {"sha256": sha256, "bytes": path.stat().st_size}


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def load_state(folder: Path) -> tuple[TrainState, dict[str, Tensor], list[str]] | None:
    """Return the newest intact state with its tensors in memory, as `open_state` does."""
    opened = open_state(folder)
    if opened is None:
        return None
    state, tensors, problems = opened
    return state, {name: tensor.read() for name, tensor in tensors.items()}, problems


def open_state(folder: Path) -> tuple[TrainState, dict[str, SavedTensor], list[str]] | None:
    """Return the newest intact state, its tensors, and a sentence per damaged newer one; None if none was saved.

    Several processes call this together, and each verifies some of the files.
    """
    damaged: list[str] = []
    for path in from_first(_saved_states(folder)):
        try:
            state, tensors = _open_state(path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            name = Path(str(error.filename)).name if isinstance(error, OSError) and error.filename else None
            reason = f"{name}: {error.strerror}" if isinstance(error, OSError) and name else str(error)
            damaged.append(f"{path.name} is damaged ({reason})")
            continue
        return state, tensors, [f"{problem}; the state before it is used." for problem in damaged]
    if damaged:  # starting over would overwrite the best model of the run
        raise VitralError(
            f"No saved state in {folder} can be used: {'; '.join(damaged)}.",
            hint="Restore them, or start another run with another --out; this one was not changed.",
        )
    return None


def _open_state(path: Path) -> tuple[TrainState, dict[str, SavedTensor]]:
    """Return a state and its tensors. All processes raise an error if one of them finds a damaged file."""
    opened: tuple[TrainState, dict[str, SavedTensor]] | None = None
    error: Exception | None = None
    try:
        opened = _verify_state(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as caught:
        error = caught
    if errors := [other for other in gather(error) if other is not None]:
        raise error or errors[0]
    assert opened is not None
    return opened


def _verify_state(path: Path) -> tuple[TrainState, dict[str, SavedTensor]]:
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    files = [name for name in manifest if name != _STATE]
    check_names(files)
    world = current_world()
    for name in (_STATE, *sorted(files)[world.rank :: world.size]):
        if manifest[name] != _describe(path / name, sha256_of(path / name)):
            raise ValueError(f"{name} does not match its SHA-256")
    state = TrainState.from_dict(json.loads((path / _STATE).read_text(encoding="utf-8")))
    if path.name != _folder_name(state.step):
        raise ValueError(f"{_STATE} is of step {state.step}")
    return state, open_tensors(path, files)


def has_state(folder: Path) -> bool:
    """Return whether a state was saved, intact or not."""
    return bool(_saved_states(folder))


def check_fits(tensors: Mapping[str, SavedTensor | Tensor], expected: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ConfigError if saved tensors are not those of this network, because somebody changed config.toml.

    `expected` has the tensors before the first step, when the optimizer may have no moments yet.
    """
    for name in (*expected, *(name for name in tensors if not name.startswith("optimizer:"))):
        saved, wanted = tensors.get(name), expected.get(name)
        if wanted is None:
            problem = "is unexpected"
        elif saved is None:
            problem = f"is missing (expected {tuple(wanted.shape)})"
        elif (saved.shape, saved.dtype) != (wanted.shape, wanted.dtype):
            dtype = "" if saved.dtype == wanted.dtype else f"{saved.dtype} and "
            problem = f"has {dtype}shape {tuple(saved.shape)} (expected {tuple(wanted.shape)})"
        else:
            continue
        raise ConfigError(
            f"The state in {folder} does not fit config.toml: {name.partition(':')[2]} {problem}.",
            hint="Restore config.toml, or start another run.",
        )


def _saved_states(folder: Path) -> list[Path]:
    """Return the folders of saved states, newest first; other names are not ours."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch("step-[0-9]{8}", path.name)), reverse=True)

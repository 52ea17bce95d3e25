"""Train in several processes: each computes its part of every batch, and the first one writes the run folder.

All processes run the same loop on the same values, so that they decide alike. Those after the first keep a run folder
of their own in a temporary folder, which ends with them.
"""

import atexit
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from vitral.collectives import current_world, from_first, gather, is_shared, join_world
from vitral.data.batches import Batch, Share
from vitral.data.dataset import DatasetIndex
from vitral.errors import ConfigError, DataError, VitralError
from vitral.runs import Run

MIRRORED = ("*.toml", "*.json", "*.csv", "*.txt", "*.safetensors", "state/*.safetensors")
"""The files of a run folder that a resumed run reads, apart from the saved states."""


def share_batch(batch: Batch) -> Batch:
    """Return the batch with what every process knows of the others: labels, items, and unreadable images."""
    if not is_shared():
        return batch
    parts = gather((batch.labels, batch.items, batch.bad))
    bad = tuple(unreadable for part in parts for unreadable in part[2])
    if not all(len(items) for _, items, _ in parts):
        raise DataError(
            f"None of the images that one process has in this step is readable{f': {bad[0][1]}' if bad else ''}.",
            hint="Use fewer processes or a larger --batch-size.",
        )
    starts = [0, *accumulate(len(items) for _, items, _ in parts)]
    labels, items = map(torch.cat, zip(*(part[:2] for part in parts), strict=True))
    return replace(batch, bad=bad, share=Share(start=starts[current_world().rank], labels=labels, items=items))


def check_same_dataset(dataset: DatasetIndex) -> None:
    """Raise DataError if the processes found different datasets, as on machines with folders of their own."""
    prints = gather(dataset.fingerprint()) if is_shared() else [""]
    if len(set(prints)) > 1:
        odd = next(rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0])
        raise DataError(
            f"Process {odd} found other images in {dataset.name} than process 0.",
            hint="Put the dataset on a disk that all machines share, or copy it to each of them.",
        )


def mirror_run(run: Run, *, is_sharded: bool = False) -> Run:
    """Return the run for the first process, and for every other a temporary copy of what a resumed run reads.

    The processes of a sharded run read the model, which may be larger than their memory, where it is.
    """
    if not is_shared():
        return run
    folder = run.folder
    paths = [path for pattern in MIRRORED for path in folder.glob(pattern)] if current_world().is_first else []
    files = {p.relative_to(folder): p.read_bytes() for p in paths if not (is_sharded and p == run.model)}
    files = from_first(files)
    if current_world().is_first:
        return run
    copy = Run(temporary_folder())
    for name, content in files.items():
        path = copy.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return copy


def find_restarted(out: Path | None) -> Run | None:
    """Return the run that this command started before its launcher restarted its processes; None without a restart."""
    world = join_world()
    if not world.restarts:
        return None
    folders = sorted(Path("runs").glob("*")) if out is None else [out]
    runs = (Run(folder) for folder in folders if Run.is_run(folder))
    unknown = "" if out is None else world.launch
    launched = [run.folder for run in runs if _read_launch(run, unknown) == world.launch]
    folder = from_first(launched[-1] if launched else None)
    return None if folder is None else Run(folder)


def _read_launch(run: Run, unknown: str) -> str:
    """Return the launch that started a run, or `unknown` if it was killed before it wrote its manifest."""
    try:
        manifest = run.read_manifest()
    except ConfigError:  # of another run, which is damaged
        return ""
    return manifest.get("launch", "") if manifest else unknown


def temporary_folder() -> Path:
    """Return a new folder that is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="vitral-rank-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def only_first() -> Generator[bool]:
    """Yield whether this process is the one to write. If that fails, every process raises the error."""
    error: VitralError | None = None
    try:
        yield current_world().is_first
    except VitralError as caught:
        error = caught
        if not is_shared():
            raise
    if is_shared() and (message := from_first(str(error) if error else "")):
        raise error or VitralError(message)

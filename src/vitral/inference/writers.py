"""Write predictions to CSV or JSON lines, in a file that an interrupted command can resume."""

import csv
import io
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, NoReturn, TextIO, TypeVar

from vitral.collectives import current_world, from_first, gather
from vitral.data.scan import Progress
from vitral.errors import ConfigError, VitralError, check_int
from vitral.files import as_text, to_json, try_lock
from vitral.inference.engines import Gate
from vitral.inference.prediction import Failure

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor

Output = TypeVar("Output")
MAX_ROW_BYTES = 2**24
"""A longer row of a file to resume was not written by vitral."""
TOLERANCE = 1e-3
"""Largest change of a probability between two runs of the same model, such as on another device."""


class Row(NamedTuple):
    """The most probable labels of one image (none if it was rejected), or the reason why it is unusable."""

    file: str
    top: list[tuple[str, float]]
    error: str | None = None
    unusual: float | None = None


class WrittenRow(NamedTuple):
    """A row of an existing file."""

    file: str
    label: str | None = None
    """None for an unusable or rejected image."""
    probability: float = 0.0
    width: int = 0
    """Number of labels."""
    failed: bool = False
    """Whether the image is unusable."""


class CsvRows:
    """Rows as lines of a CSV file; quotes may contain line breaks."""

    start, quoted = b"file,label,probability,", True

    def write_header(self, stream: TextIO, top: int) -> None:
        names = [("label", "probability"), *((f"label_{k}", f"probability_{k}") for k in range(2, top + 1))]
        labels = [name for pair in names for name in pair]
        csv.writer(stream, lineterminator="\n").writerow(["file", *labels, "unusual", "error"])

    def write(self, stream: TextIO, row: Row, top: int) -> None:
        labels = [value for label, probability in row.top for value in (label, f"{probability:.6f}")]
        unusual = "" if row.unusual is None else f"{row.unusual:.6f}"
        cells = [as_text(row.file), *labels, *[""] * (2 * top - len(labels)), unusual, row.error or ""]
        has_return = any("\r" in cell for cell in cells)  # Python 3.11 leaves \r bare
        quoting = csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
        csv.writer(stream, lineterminator="\n", quoting=quoting).writerow(cells)

    def parse(self, text: str, top: int) -> WrittenRow | None:
        """Return a row with up to ``top`` labels, or None for the header. Raise an error for other text."""
        (cells,) = csv.reader(io.StringIO(text, newline=""))
        is_header = cells[:3] == ["file", "label", "probability"]
        if is_header and cells[-2:] == ["unusual", "error"] and (written := (len(cells) - 3) // 2) != top:
            _refuse_top(written, top)
        if is_header and cells[-1] == "error" and "unusual" not in cells:
            raise ConfigError(
                "The --out file has predictions of an older version, without the column `unusual`.",
                hint="Pass another --out to predict all images again.",
            )
        if len(cells) != 2 * top + 3:
            raise ValueError(f"{len(cells)} columns")
        if is_header:
            return None
        if cells[-1] or not cells[2]:
            return WrittenRow(cells[0], failed=bool(cells[-1]))
        return WrittenRow(cells[0], cells[1], float(cells[2]), sum(map(bool, cells[2:-2:2])))


class JsonRows:
    """Rows as JSON objects, one per line."""

    start, quoted = b'{"file": ', False

    def write_header(self, stream: TextIO, top: int) -> None:
        """Write nothing."""

    def write(self, stream: TextIO, row: Row, top: int) -> None:
        labels = [{"label": label, "probability": probability} for label, probability in row.top]
        best = labels[0] if labels else {"label": None, "probability": None}
        values = {"error": row.error} if row.error is not None else {**best, "top": labels}
        unusual = {} if row.unusual is None else {"unusual": row.unusual}
        stream.write(to_json({"file": as_text(row.file), **values, **unusual}, stream) + "\n")

    def parse(self, text: str, top: int) -> WrittenRow:
        row = json.loads(text)
        if "error" in row:
            return WrittenRow(row["file"], failed=True)
        if row["label"] is None:
            return WrittenRow(row["file"])
        if (width := len(row["top"])) > top:
            _refuse_top(width, top)
        return WrittenRow(row["file"], str(row["label"]), float(row["probability"]), width)


def _refuse_top(written: int, top: int) -> NoReturn:
    raise ConfigError(
        f"The --out file was written with --top {written} (got --top {top}).", hint=f"Pass --top {written}."
    )


CSV, JSON_LINES = CsvRows(), JsonRows()
FORMATS = {".csv": CSV, ".jsonl": JSON_LINES, ".json": JSON_LINES}


# ---- predictions ----


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionFile:
    """The result of `predict_to_file`."""

    path: Path
    rows: int
    failed: int
    """Number of unusable images, whose rows hold the reason."""
    engine: str = "torch float32"
    """The engine and the precision that computed the rows."""


def predict_rows(
    predictor: "Predictor", files: Sequence[str], *, top: int, reject: float | None = None
) -> Iterator[Row]:
    """Yield a row per image, in order. Images that are at least as unusual as ``reject`` have no labels."""
    for file, result in predictor.stream(files):
        if isinstance(result, Failure):
            yield Row(file, [], result.reason)
        else:
            is_rejected = reject is not None and result.unusual is not None and result.unusual >= reject
            yield Row(file, [] if is_rejected else result.top(top), unusual=result.unusual)


def share_images(
    images: Sequence[str], batch_size: int, compute: Callable[[Sequence[str]], Iterable[Output]]
) -> Iterator[Output]:
    """Yield the outputs of all images, in order, in every process of a command.

    The batches are those of one process, and so are the outputs, bit for bit: the processes compute batches in turn.
    """
    world = current_world()
    if world.size == 1:
        yield from compute(images)
        return
    for start in range(0, len(images), batch_size * world.size):
        first = start + batch_size * world.rank
        for outputs in gather(list(compute(images[first : first + batch_size]))):
            yield from outputs


def share_rows(
    predictor: "Predictor", files: Sequence[str], *, start: int = 0, top: int, reject: float | None = None
) -> Iterator[Row]:
    """Yield the rows of `predict_rows`, from row ``start`` on, in every process of a command.

    Each process predicts every so many of the batches. The batch of the first row is predicted as a whole, because the
    last digits of a probability may depend on the other images of its batch.
    """
    skipped = start % predictor.batch_size
    compute = partial(predict_rows, predictor, top=top, reject=reject)
    return islice(share_images(files[start - skipped :], predictor.batch_size, compute), skipped, None)


def predict_to_file(
    predictor: "Predictor",
    files: Sequence[str],
    out: Path,
    *,
    top: int = 5,
    reject: float | None = None,
    resume: bool = False,
) -> Iterator[Progress | PredictionFile]:
    """Write a row per image to a .csv or .jsonl file; yield progress, then the result.

    A killed process loses at most one batch per process; ``resume`` continues after the last complete row. Raise
    ConfigError if the file exists (without ``resume``), another process writes it, or it has rows of other images or
    another model. In several processes that share the images, the first one writes.
    """
    top = min(check_int("top", top, minimum=1), len(predictor.labels))
    predictor.loaded.check_has_head()
    if not current_world().is_first:
        yield from _help_to_predict(predictor, files, out, top=top, reject=reject)
        return
    row_format = check_prediction_target(out, resume=resume)
    with _open_exclusively(out) as stream:
        written = _read_written(stream, row_format, files, top=top, out=out)
        _check_same_model(written, predictor, files, top=top, reject=reject)
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
        if stream.tell() == 0:
            row_format.write_header(text, top)
        failed = sum(row.failed for row in written)
        yield Progress(done=len(written), total=len(files))
        start = from_first(len(written))
        for number, row in enumerate(share_rows(predictor, files, start=start, top=top, reject=reject), start + 1):
            failed += row.error is not None
            row_format.write(text, row, top)
            if number % predictor.batch_size == 0 or number == len(files):
                text.flush()
                os.fsync(stream.fileno())
                yield Progress(done=number, total=len(files))
        text.flush()
    yield PredictionFile(path=out, rows=len(files), failed=failed, engine=predictor.engine)


def _help_to_predict(
    predictor: "Predictor", files: Sequence[str], out: Path, *, top: int, reject: float | None
) -> Iterator[Progress | PredictionFile]:
    """Predict the part of the images that another process writes; yield progress, then the result without old rows."""
    start, failed = from_first(0), 0
    for number, row in enumerate(share_rows(predictor, files, start=start, top=top, reject=reject), start + 1):
        failed += row.error is not None
        yield Progress(done=number, total=len(files))
    yield PredictionFile(path=out, rows=len(files), failed=failed)


def check_prediction_target(out: Path, *, resume: bool) -> CsvRows | JsonRows:
    """Return the format of a target by its suffix. Raise ConfigError if it cannot be used."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out must end in .csv or .jsonl (got {out}).")
    if out.exists() and not resume:
        raise ConfigError(f"{out} already exists.", hint="Pass --resume to continue it, or another --out.")
    return FORMATS[out.suffix.lower()]


@contextmanager
def _open_exclusively(out: Path) -> Generator[BinaryIO]:
    try:
        stream = out.open("r+b" if out.exists() else "x+b")
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror or error}.") from error
    try:
        with stream:
            if not try_lock(stream.fileno()):
                hint = "Wait for it, or pass another --out."
                raise ConfigError(f"{out} is being written by another process.", hint=hint)
            yield stream
    except OSError as error:
        raise VitralError(f"Cannot write {out}: {error.strerror or error}.") from error


def _read_written(
    stream: BinaryIO, row_format: CsvRows | JsonRows, files: Sequence[str], *, top: int, out: Path
) -> list[WrittenRow]:
    """Return the complete rows of the file, cut off an incomplete one, and move to the end."""
    rows: list[WrittenRow] = []
    end = 0
    try:
        if not row_format.start.startswith(stream.read(len(row_format.start))):
            raise ValueError("another start")
        stream.seek(0)
        for record in _complete_records(stream, quoted=row_format.quoted):
            if (row := row_format.parse(record.decode("utf-8"), top)) is not None:
                rows.append(row)
                number = len(rows)
                if number > len(files) or as_text(files[number - 1]) != row.file:
                    raise ConfigError(
                        f"Row {number} of --out is for {row.file}, which is not image {number} of this command.",
                        hint="Pass the same images in the same order, or another --out.",
                    )
            end += len(record)
        stream.truncate(end)
        stream.seek(end)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{out} does not contain predictions.", hint="Pass another --out.") from error
    return rows


def _complete_records(stream: BinaryIO, *, quoted: bool) -> Iterator[bytes]:
    """Yield each row with its line break. Stop at an incomplete one."""
    lines: list[bytes] = []
    size = quotes = 0
    while (line := stream.readline(MAX_ROW_BYTES)).endswith(b"\n"):
        lines.append(line)
        size, quotes = size + len(line), quotes + line.count(b'"')
        if size > MAX_ROW_BYTES:
            break
        if not quoted or quotes % 2 == 0:
            yield b"".join(lines)
            lines, size, quotes = [], 0, 0
    if size + len(line) >= MAX_ROW_BYTES:
        raise ValueError(f"a row of over {MAX_ROW_BYTES} bytes")


def _check_same_model(
    rows: Sequence[WrittenRow], predictor: "Predictor", files: Sequence[str], *, top: int, reject: float | None
) -> None:
    """Raise ConfigError if the model no longer predicts the last row whose image is still readable."""
    for row, file in zip(reversed(rows), reversed(files[: len(rows)]), strict=True):
        if row.label is None:
            continue
        (current,) = predict_rows(predictor, [file], top=top, reject=reject)
        if current.error is not None:
            continue
        if not current.top:
            hint = "Resume with the same --reject, or pass another --out."
            raise ConfigError(f"--out has the label {row.label} for {row.file}, which is now rejected.", hint=hint)
        label, probability = current.top[0]
        if len(current.top) != row.width or not _agrees(row, current, predictor):
            raise ConfigError(
                f"--out has {row.label} ({row.probability:.1%}, {row.width} labels) for {row.file}, but the model now "
                f"predicts {label} ({probability:.1%}, {len(current.top)} labels).",
                hint="Resume with the same model, --precision and --top, or pass another --out.",
            )
        return


def _agrees(row: WrittenRow, current: Row, predictor: "Predictor") -> bool:
    """Return whether a prediction equals that of an earlier run, which may have computed in a lower precision."""
    label, probability = current.top[0]
    if label == row.label and abs(probability - row.probability) < TOLERANCE:
        return True
    probability = dict(current.top).get(row.label or "", float("inf"))
    return predictor.may_round and abs(probability - row.probability) <= Gate().max_difference

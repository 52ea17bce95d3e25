"""``evaluate``, ``predict``, ``features`` and ``train`` where something is wrong with the model, the pictures or the
console."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitral
from tests.cli.conftest import TINY
from tests.cli.typed import typed as run
from tests.data.pictures import class_folders
from vitral.errors import ConfigError, DataError, WeightsError
from vitral.inference.writers import open_rows
from vitral.training.entry import train


@pytest.fixture(scope="module")
def overflowing(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Finite weights whose products are not."""
    checkpoint = vitral.load(Path(model) / "model.safetensors")
    with torch.no_grad():
        for parameter in checkpoint.model.parameters():
            parameter.mul_(1e20)
    path = tmp_path_factory.mktemp("weights") / "large.safetensors"
    vitral.save(checkpoint, path)
    return str(path)


@pytest.mark.parametrize(
    "words", ["predict {m} {p}", "evaluate {m} {p}", "evaluate {m} {p} --knn 3", "evaluate {good} {p} --against {m}"]
)
def test_answers_that_are_no_numbers_are_refused(overflowing: str, model: str, photos: Path, words: str) -> None:
    done = run(*words.format(m=overflowing, p=photos, good=model).split())
    assert done.returncode == 2
    assert "no finite numbers" in done.stderr


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predictions_are_gone_on_with_by_the_same_model_only(
    model: str, photos: Path, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"rows.{suffix}"
    assert run("predict", model, str(photos), "--out", str(out)).returncode == 0
    whole = out.read_text()
    out.write_text("\n".join(whole.split("\n")[:5]) + "\n")
    other = tmp_path / "other.safetensors"
    torch.manual_seed(7)
    stranger = vitral.create("vit-pico4", num_classes=2, image_size=16)
    torch.nn.init.normal_(stranger.head.weight)
    vitral.save(stranger, other, labels=["red", "green"])
    for words in ((str(other),), (model, "--top", "1")):
        done = run("predict", words[0], str(photos), "--out", str(out), "--resume", *words[1:])
        assert done.returncode == 2, words
        assert "top" in done.stderr or "--out has" in done.stderr
        assert len(out.read_text().split("\n")) == 6  # nothing was added
    assert run("predict", model, str(photos), "--out", str(out), "--resume").returncode == 0
    assert out.read_text() == whole


def test_another_model_is_found_out_though_the_last_picture_is_gone(model: str, photos: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes((photos / "red" / f"00{number}.png").read_bytes())
    out, names = tmp_path / "rows.csv", [str(file) for file in files]
    assert run("predict", model, *names[:2], "--out", str(out)).returncode == 0
    files[1].unlink()
    other = vitral.create("vit-pico4", num_classes=2, image_size=16)
    vitral.save(other, tmp_path / "other.safetensors", labels=["red", "green"])  # says 50 % of everything
    before = out.read_text()
    done = run("predict", str(tmp_path / "other.safetensors"), *names, "--out", str(out), "--resume")
    assert (done.returncode, out.read_text()) == (2, before)
    assert "and would now have" in done.stderr


def test_two_commands_do_not_write_one_file(model: str, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    with open_rows(out, "human", 2, ["a.png"], resume=False) as rows:
        done = run("predict", model, str(photos), "--out", str(out), "--resume")
        assert done.returncode == 2
        assert "is being written by another process" in done.stderr
        rows.add("a.png", [("red", 0.9), ("green", 0.1)])
    assert out.read_text().splitlines()[1:] == ["a.png,red,0.900000,green,0.100000,"]


def test_more_labels_than_there_are_and_a_label_without_letters(photos: Path, tmp_path: Path) -> None:
    vitral.save(vitral.create("vit-pico4", num_classes=2, image_size=16), tmp_path / "m.safetensors", labels=["", "b"])
    words = ["predict", str(tmp_path / "m.safetensors"), str(photos), "--top", "9", "--out", str(tmp_path / "rows.csv")]
    assert run(*words).returncode == 0
    whole = (tmp_path / "rows.csv").read_text()
    assert whole.startswith("file,label,probability,label_2,probability_2,error\n")
    (tmp_path / "rows.csv").write_text(whole[:200])
    assert run(*words, "--resume").returncode == 0
    assert (tmp_path / "rows.csv").read_text() == whole


def test_json_is_json_on_a_console_without_the_letters(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "größe.png").write_bytes((photos / "red" / "000.png").read_bytes())
    program = "import sys; from vitral.cli.main import main; main(sys.argv[1:])"
    words = ["predict", "vit-cifar10", str(tmp_path / "größe.png"), "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"].endswith("größe.png")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_too_little_memory_is_one_sentence(
    model: str, photos: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("vitral.inference.predictor.Predictor.stream", fail)
    done = run("predict", model, str(photos))
    assert done.returncode == 1
    assert "The memory is not enough" in done.stderr
    assert "--batch-size" in done.stderr


def test_other_faults_are_not_taken_for_that(model: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("vitral.inference.predictor.Predictor.stream", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run("predict", model, str(photos))


def test_a_wrong_out_is_told_before_anything_is_loaded() -> None:
    assert "must end in .csv" in run("predict", "hf:nobody/nothing", "nothing.png", "--out", "x.txt").stderr


def test_labels_with_half_a_letter(photos: Path, tmp_path: Path) -> None:
    vitral.save(vitral.create("vit-pico4", num_classes=2, image_size=16), tmp_path / "m", dialect="huggingface")
    described = json.loads((tmp_path / "m" / "config.json").read_text())
    described["id2label"] = {"0": "a\ud800", "1": "b"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(described))
    save_file(load_file(tmp_path / "m" / "model.safetensors"), tmp_path / "m" / "model.safetensors")  # without our own
    assert vitral.load(tmp_path / "m").labels == ("a\\ud800", "b")
    assert run("predict", str(tmp_path / "m"), str(photos), "--out", str(tmp_path / "rows.jsonl")).returncode == 0
    vitral.save(vitral.load(tmp_path / "m"), tmp_path / "again.safetensors", labels=["\ud800", "b"])
    assert vitral.load(tmp_path / "again.safetensors").labels == ("\\ud800", "b")


def test_bad_training_pictures_count_for_neighbours_too(model: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        class_folders(tmp_path, {"red": 6, "green": 6}, size=(16, 16), split=split)
    (tmp_path / "train" / "red" / "002.png").write_bytes(b"")
    done = run("evaluate", model, str(tmp_path), "--knn", "3")
    assert done.returncode == 3
    assert "train/red/002.png" in done.stdout


def test_without_a_train_split_there_are_no_neighbours(model: str, tmp_path: Path) -> None:
    class_folders(tmp_path, {"red": 3, "green": 3}, size=(16, 16), split="test")
    done = run("evaluate", model, str(tmp_path), "--knn", "3")
    assert done.returncode == 2
    assert "train split" in done.stderr


def test_held_out_pictures_are_tried_before_training(tmp_path: Path) -> None:
    for split in ("train", "test"):
        class_folders(tmp_path, {"red": 6, "green": 6}, size=(16, 16), split=split)
    for picture in (tmp_path / "test").rglob("*.png"):
        picture.write_bytes(b"no picture")
    with pytest.raises(DataError, match="held-out pictures"):
        list(train(tmp_path, out=tmp_path / "run", **TINY))
    assert not (tmp_path / "run").exists()


def test_every_unreadable_picture_is_told_and_listed(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        class_folders(tmp_path / "data", {"red": 8, "green": 8}, size=(16, 16), split=split)
        (tmp_path / "data" / split / "red" / "003.png").write_bytes(b"")
    events = list(train(tmp_path / "data", out=tmp_path / "run", **TINY))
    listed = (tmp_path / "run" / "skipped.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0] for line in listed) == [
        f"{split}/red/003.png" for split in ("test", "train", "val")
    ]
    told = " ".join(str(event) for event in events if type(event).__name__ == "Warned")
    assert "cannot be read" in told
    assert json.loads((tmp_path / "run" / "report.json").read_text())["bad_pictures"] == 3


def test_val_must_have_as_many_labels_a_picture(photos: Path, tmp_path: Path) -> None:
    rows = [f"{photos}/red/00{number}.png,red|green\n" for number in range(5)]
    (tmp_path / "val.csv").write_text("image,labels\n" + "".join(rows))
    with pytest.raises(DataError, match="several labels"):
        list(train(photos, val=str(tmp_path / "val.csv"), out=tmp_path / "run", **TINY))


def test_a_run_outlives_its_console(photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitral", "train", str(photos), "--steps", "12", "--batch-size", "8", "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "run")], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()  # as `2>&1 | head -1` does
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_closed_output_is_told() -> None:
    done = subprocess.run(
        f"{sys.executable} -m vitral models >&-", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "vitral: Standard output is closed, and the result would go there.\n"


def test_names_that_the_console_cannot_show(model: str, photos: Path, tmp_path: Path) -> None:
    picture = tmp_path / "größe.png"
    picture.write_bytes((photos / "red" / "000.png").read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "vitral", "predict", model, str(picture)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "gr\\xf6\\xdfe.png" in done.stdout


def test_an_interrupted_prediction_says_how_to_go_on(model: str, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    words = [
        sys.executable,
        "-m",
        "vitral",
        "predict",
        model,
        *[str(photos)] * 400,
        "--out",
        str(out),
        "--batch-size",
        "1",
    ]

    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell inherit that it is ignored

    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    while not (out.exists() and out.stat().st_size > 500):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in told


def test_a_format_beside_a_file_is_refused(model: str, photos: Path, tmp_path: Path) -> None:
    done = run("predict", model, str(photos), "--out", str(tmp_path / "x.csv"), "--format", "json")
    assert done.returncode == 2
    assert "nothing to print" in done.stderr


def test_a_file_of_predictions_is_summed_up(model: str, photos: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    done = run("predict", model, str(photos / "red" / "000.png"), str(bad), "--out", str(tmp_path / "x.csv"))
    assert done.returncode == 3
    assert "2 rows, of which 1 could not be used" in done.stderr


def test_another_size_than_it_was_trained_at(model: str, photos: Path, tmp_path: Path) -> None:
    large = run("predict", model, str(photos / "red"), "--image-size", "32", "--format", "json")
    small = run("predict", model, str(photos / "red"), "--format", "json")
    assert large.returncode == small.returncode == 0
    assert large.stdout != small.stdout
    told = json.loads(run("evaluate", model, str(photos), "--image-size", "32x16", "--format", "json").stdout)
    assert told["images"] > 0
    assert vitral.Predictor(model, image_size=32).ready.preprocess.size == (32, 32)
    with pytest.raises(ConfigError, match="has its size"):
        vitral.Predictor(vitral.load(Path(model) / "model.safetensors"), image_size=32)


def test_labels_that_do_not_fit_the_head_are_damage(model: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        told, tensors = json.loads(file.metadata()["vitral"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for labels in (["red"], [["red"], "green"]):
        save_file(tensors, tmp_path / "x.safetensors", metadata={"vitral": json.dumps({**told, "labels": labels})})
        with pytest.raises(WeightsError, match="damaged"):
            vitral.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("call", [
    lambda model: vitral.Predictor(5),
    lambda model: vitral.Predictor(None),
    lambda model: vitral.Predictor(model, batch_size="3"),
    lambda model: vitral.evaluate(model, few_shot="5"),
    lambda model: vitral.evaluate(model, knn=2.5),
    lambda model: vitral.evaluate(model, real=5),
])  # fmt: skip
def test_wrong_types_in_python(model: str, call: Any) -> None:
    with pytest.raises(ConfigError):
        call(model)


def test_what_python_shows(model: str) -> None:
    assert "2 labels, pictures of 16 x 16" in repr(vitral.Predictor(model))
    assert "right of" in repr(vitral.evaluate(model))


def test_python_checks_at_the_call_and_writes_the_report(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no setting 'outt'"):
        vitral.train_events(photos, outt="x")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="optim.lr"):
        vitral.train_events(photos, lr=1.0)  # type: ignore[operator]
    *_, finished = vitral.train_events(photos, out=tmp_path / "run", **TINY)  # type: ignore[operator]
    assert (finished.folder / "report.html").is_file()
    with pytest.raises(ConfigError, match="never overwrites") as caught:
        vitral.train_events(photos, out=tmp_path / "run", **TINY)  # type: ignore[operator]
    assert "--resume" not in str(caught.value)  # it is finished

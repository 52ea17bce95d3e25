"""Every engine computes the outputs of the network in torch, for any batch, and is chosen only if it does."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from tests.conftest import small_model
from vitral.cache import read_entry
from vitral.devices import choose_precision
from vitral.errors import ConfigError, VitralError
from vitral.inference.engines import Gate, choosing, compare_outputs, to_probabilities
from vitral.inference.engines.choosing import Measurement, Subject, build_engine, choose_engine, example_images
from vitral.inference.engines.fingerprint import describe_cpu
from vitral.inference.loaded_model import load_model
from vitral.inference.torch_backend import subject_of
from vitral.weights.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    preprocess = vitral.Preprocess(size=(16, 16), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    return Checkpoint(model=small_model(depth=1), preprocess=preprocess, labels=tuple("abcdefg"))


@pytest.fixture(scope="module")
def subject(checkpoint: Checkpoint) -> Subject:
    return subject_of(load_model(checkpoint))


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_engines_compute_what_the_network_computes(subject: Subject, name: str) -> None:
    engine = build_engine(subject, name, "float32", batch=4)
    mean, std = (np.float64(values)[:, None, None] for values in (subject.preprocess.mean, subject.preprocess.std))
    for count in (1, 3):
        images = example_images(subject.preprocess, count)
        with torch.inference_mode():  # normalized by hand
            expected = subject.model.features(torch.from_numpy((images / 255 - mean) / std).float()).pooled
            logits = subject.model.head(expected)
        np.testing.assert_allclose(engine.features(images), expected.numpy(), atol=2e-5)
        np.testing.assert_allclose(engine.logits(images), logits.numpy(), atol=2e-5)
    assert (engine.name, engine.precision, engine.size) == (name, "float32", (16, 16))


def test_openvino_sends_nothing_over_the_network() -> None:
    script = (
        "import sys; from vitral.inference.engines.openvino import import_openvino; import_openvino();"
        "from openvino.tools.ovc import telemetry_utils; print(telemetry_utils.tm.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "openvino.tools.ovc.telemetry_stub"


def test_a_model_that_openvino_cannot_convert_runs_in_torch() -> None:
    model = small_model(depth=1, position="relative", attention="axial", pool="mean")
    checkpoint = Checkpoint(model=model, preprocess=vitral.Preprocess(size=model.config.image_hw))
    reasons: list[str] = []
    predictor = vitral.Predictor(checkpoint, engine="openvino", on_choice=reasons.append)
    assert predictor.engine == "torch float32"
    assert "No conversion rule found for operations: aten.diagonal" in reasons[0]


def test_openvino_emulates_no_bfloat16(subject: Subject) -> None:
    engine = build_engine(subject, "openvino", "bfloat16", batch=4)
    assert engine.precision == choose_precision("cpu").value


@pytest.mark.soak
def test_compiled_torch_pads_batches(subject: Subject) -> None:
    engine = build_engine(subject, "compiled", "float32", batch=4)
    images = example_images(subject.preprocess, 6)
    np.testing.assert_allclose(engine.logits(images), subject.reference.logits(images), atol=2e-5)


def test_the_gate_compares_probabilities_and_labels() -> None:
    expected = np.log(np.array([[0.7, 0.3], [0.52, 0.48], [0.505, 0.495], [0.2, 0.8]]))
    shifted = np.log(np.array([[0.69, 0.31], [0.49, 0.51], [0.495, 0.505], [0.2, 0.8]]))
    agreement = compare_outputs(shifted, expected, kind="logits")
    assert agreement.difference == pytest.approx(0.03)
    assert agreement.top1 == pytest.approx(3 / 4), "the third image is a near tie"
    assert not agreement.passes(Gate())
    assert agreement.passes(Gate(max_difference=0.04, min_top1=0.5))
    assert not compare_outputs(shifted * np.nan, expected, kind="logits").passes(Gate(min_top1=0))
    for multi_label, function in ((False, lambda x: x.softmax(1)), (True, torch.sigmoid)):
        ours = to_probabilities(expected, multi_label=multi_label)
        np.testing.assert_allclose(ours, function(torch.from_numpy(expected)).numpy(), atol=1e-12)


class FakeTimes:
    """Measurements that are set instead of taken: the choice is tested, not the clock."""

    def __init__(self, patch: pytest.MonkeyPatch, rows: dict[tuple[str, str], Measurement]):
        self.rows, self.calls, self.built = rows, list[tuple[str, str]](), list[tuple[str, str]]()
        patch.setattr(choosing, "time_per_image", lambda *_, **__: 1.0)
        patch.setattr(choosing, "list_candidates", lambda *_: iter(rows))
        patch.setattr(choosing, "measure_candidate", self.measure)
        patch.setattr(choosing, "build_engine", self.build)

    def measure(self, subject: Subject, candidate: tuple[str, str], images: np.ndarray) -> Any:
        self.calls.append(candidate)
        return self.rows[candidate], None

    def build(self, subject: Subject, name: str, precision: str, *, batch: int) -> Any:
        self.built.append((name, precision))
        return replace(subject.reference, precision=precision)


def good(seconds: float, difference: float = 1e-6) -> Measurement:
    return Measurement(seconds=seconds, torch_seconds=1.0, difference=difference, top1=1.0, images=4)


def test_auto_takes_the_fastest_engine_that_agrees_and_measures_once(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path))
    rows = {
        ("openvino", "float32"): good(0.5),
        ("openvino", "bfloat16"): good(0.2, difference=0.1),  # too far
        ("onnxruntime", "float32"): Measurement(error="no such kernel"),
    }
    times = FakeTimes(monkeypatch, rows)
    images = example_images(subject.preprocess)
    for now in (1.0, 0.3):  # a machine that is faster today does not change the comparison of yesterday
        monkeypatch.setattr(choosing, "time_per_image", lambda *_, now=now, **__: now)
        chosen = choose_engine(subject, images, total=10_000, gate=Gate())
        assert "openvino float32, 2.00 x torch float32" in chosen.reason
        assert chosen.engine is not None
    assert times.calls == list(rows)  # the second time, they come from the cache
    loose = choose_engine(subject, images, total=10_000, gate=Gate(max_difference=0.2))
    assert "bfloat16, 5.00 x" in loose.reason
    assert read_entry("engines", choosing.measurement_key(subject, batch=4)) is not None
    assert choosing.measurement_key(subject, batch=4) != choosing.measurement_key(subject, batch=64)


def test_auto_stays_with_torch_if_nothing_is_gained(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path))
    times = FakeTimes(monkeypatch, {("openvino", "float32"): good(1.1)})
    images = example_images(subject.preprocess)
    assert choose_engine(subject, images, total=10, gate=Gate()).reason == ""  # too few images to pay for it
    assert not times.calls
    chosen = choose_engine(subject, images, total=10_000, gate=Gate())
    assert chosen.engine is None
    assert "0.91 x torch" in chosen.reason
    native = replace(subject, preprocess=replace(subject.preprocess, resize="native"))
    assert "mixed sizes" in choose_engine(native, images, total=10_000, gate=Gate()).reason


def test_a_damaged_cache_entry_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_CACHE", str(tmp_path))
    key = "0" * 64 + ".json"
    without_torch = b'{"openvino float32": {"seconds": 1.0, "difference": 0.0, "top1": 1.0, "images": 4}}'
    for content in (b"{", b"[1]", b'{"openvino float32": {"speed": 1}}', without_torch):
        choosing.keep_entry("engines", key, content)
        assert choosing.read_measurements(key) == {}


def test_a_predictor_with_an_engine(checkpoint: Checkpoint) -> None:
    images = list(np.random.default_rng(0).integers(0, 256, (5, 20, 24, 3), np.uint8))
    plain = vitral.Predictor(checkpoint)
    assert plain.engine == "torch float32"
    lines: list[str] = []
    fast = vitral.Predictor(checkpoint, engine="openvino", on_choice=lines.append)
    assert fast.engine == "openvino float32"
    assert "openvino float32 (probabilities within" in lines[0]
    for ours, theirs in zip(fast(images), plain(images), strict=True):
        np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
        assert (ours.engine, theirs.engine) == ("openvino float32", "torch float32")
    for (_, ours), (_, theirs) in zip(fast.features(images), plain.features(images), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_many_images_are_measured_and_few_are_not(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[int] = []

    def choose(subject: Subject, images: np.ndarray, *, total: int, **_: Any) -> choosing.Chosen:
        totals.append(total)
        return choosing.Chosen(engine=None, reason="")

    monkeypatch.setattr("vitral.inference.torch_backend.choose_engine", choose)
    images = [np.zeros((16, 16, 3), np.uint8)] * 300
    predictor = vitral.Predictor(checkpoint)
    predictor(images[:100])
    list(predictor.stream(iter(images)))  # nobody knows how many there are
    assert not totals
    predictor(images)
    predictor(images)
    assert totals == [300]
    vitral.Predictor(checkpoint, engine="torch")(images)
    assert totals == [300]


def test_models_that_an_engine_cannot_run_stay_with_torch(checkpoint: Checkpoint) -> None:
    native = replace(checkpoint, preprocess=replace(checkpoint.preprocess, resize="native"))
    lines: list[str] = []
    predictor = vitral.Predictor(native, engine="openvino", on_choice=lines.append)
    assert predictor.engine == "torch float32"
    assert lines == ["engine: torch float32 instead of openvino, because the model takes images of mixed sizes"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "tensorrt"}, "engine must be one of auto, torch"),
        ({"precision": "int8"}, "vitral export MODEL --to openvino --precision int8"),
        ({"engine": "torch", "precision": "int8"}, "does not compute int8"),
        ({"engine": "onnxruntime", "precision": "bfloat16"}, "does not compute bfloat16"),
    ],
)
def test_impossible_requests_name_the_fix(checkpoint: Checkpoint, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        vitral.Predictor(checkpoint, **options)


def test_a_requested_engine_that_disagrees_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(VitralError, match="openvino (bfloat16|float32) disagrees with torch"):
        vitral.Predictor(checkpoint, engine="openvino", precision="bfloat16", gate=Gate(max_difference=1e-9))


def test_the_cpu_is_described() -> None:
    facts = describe_cpu()
    assert facts["cpu"]
    assert set(facts) == {"cpu", "cores", "instructions"}


def test_a_signal_after_openvino_was_used_and_released() -> None:
    """The second of two plugins would restore the stack for signal handlers that the first has freed."""
    script = (
        "import gc, signal, torch, vitral\n"
        "from tests.conftest import small_model\n"
        "from vitral.weights.checkpoint import Checkpoint\n"
        "checkpoint = Checkpoint(model=small_model(depth=1), preprocess=vitral.Preprocess(size=(16, 16)))\n"
        "first, second = (vitral.Predictor(checkpoint, engine='openvino') for _ in range(2))\n"
        "assert first.engine == second.engine == 'openvino float32'\n"
        "del first\n"
        "gc.collect()\n"
        "del second\n"
        "gc.collect()\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('handled'))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr

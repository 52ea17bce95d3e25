"""Files of `--from-bytes` resize decoded images as vitral does, within one level of a pixel."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest

import vitral
from tests.conftest import small_model
from vitral.data.transforms import normalize, preprocess_image
from vitral.errors import ConfigError
from vitral.exporting.decoded_images import TOLERANCE, add_preprocessing, example_photos
from vitral.exporting.exporter import export
from vitral.inference.exported_checks import check_onnx
from vitral.preprocess import Preprocess
from vitral.weights.checkpoint import Checkpoint


def resizing_session(preprocess: Preprocess) -> Any:
    """Return a graph that outputs its preprocessed pixels."""
    shape = onnx_ir.Shape(["batch", preprocess.channels, *preprocess.size])
    images = onnx_ir.Value(name="images", shape=shape, type=onnx_ir.TensorType(onnx_ir.DataType.UINT8))
    cast = onnx_ir.node("Cast", [images], attributes={"to": onnx_ir.DataType.INT32})
    cast.outputs[0].name, cast.outputs[0].shape = "pixels", shape
    cast.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.INT32)
    graph = onnx_ir.Graph([images], cast.outputs, nodes=[cast], opset_imports={"": 18}, name="pixels")
    add_preprocessing(graph, preprocess)
    model = onnx_ir.serde.serialize_model(onnx_ir.Model(graph, ir_version=10))
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False])
def test_pixels_equal_those_of_our_preprocessing(resize: str, interpolation: str, antialias: bool) -> None:
    preprocess = Preprocess(
        size=(32, 40),
        resize=resize,  # type: ignore[arg-type]
        crop_fraction=0.875,
        interpolation=interpolation,  # type: ignore[arg-type]
        antialias=antialias,
        background=17,
    )
    session = resizing_session(preprocess)
    for photo in (*example_photos(preprocess), example_photos(preprocess)[0].transpose(1, 0, 2)):
        (pixels,) = session.run(None, {"image": np.ascontiguousarray(photo)})
        expected = preprocess_image(photo, preprocess).numpy()
        assert pixels.shape == (1, 3, 32, 40)
        assert np.abs(pixels[0] - expected.astype(int)).max() <= 1, photo.shape


def test_gray_images() -> None:
    preprocess = Preprocess(size=(20, 20), resize="crop").with_channels(1)
    session = resizing_session(preprocess)
    for photo in example_photos(preprocess):
        (pixels,) = session.run(None, {"image": photo})
        assert np.abs(pixels[0] - preprocess_image(photo, preprocess).numpy().astype(int)).max() <= 1


def test_an_exported_file_takes_images_of_any_size(tmp_path: Path) -> None:
    checkpoint = Checkpoint(model=small_model(depth=1), preprocess=Preprocess(size=(16, 16), resize="crop"))
    path = tmp_path / "model.onnx"
    assert export(checkpoint, path, to="onnx", from_bytes=True).difference <= TOLERANCE
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["height", "width", 3]
    for photo in example_photos(checkpoint.preprocess):
        images = normalize(preprocess_image(photo, checkpoint.preprocess)[None], checkpoint.preprocess)
        expected = checkpoint.model(images)
        np.testing.assert_allclose(session.run(None, {"image": photo})[0], expected.detach().numpy(), atol=0.02)
    assert check_onnx(path)["from_bytes"] is True
    assert json.loads(session.get_modelmeta().custom_metadata_map["vitral"])["preprocess"]["resize"] == "crop"
    with pytest.raises(ConfigError, match="without --from-bytes"):
        vitral.Predictor(path)


def test_what_cannot_resize_says_why(tmp_path: Path) -> None:
    checkpoint = Checkpoint(model=small_model(), preprocess=Preprocess(size=(16, 16), resize="native"))
    with pytest.raises(ConfigError, match="takes mixed sizes"):
        export(checkpoint, tmp_path / "model.onnx", to="onnx", from_bytes=True)
    with pytest.raises(ConfigError, match="needs to='onnx'"):
        export(checkpoint, tmp_path / "model.xml", to="openvino", from_bytes=True)

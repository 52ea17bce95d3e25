"""Things of the wrong kind, given to the Python interface as a user would: without the type checks of the tests."""

import subprocess
import sys

CASES = [
    ("model(None)", "a tensor of images or a list of tensors, and this is a NoneType"),
    ("model(numpy.zeros((1, 3, 28, 28)))", "this is a ndarray"),
    ("model([numpy.zeros((3, 28, 28))])", "number 0 is a ndarray"),
    ("model('cat.jpg')", "this is a str"),
    ("model(image for image in images)", "this is a generator"),
    ("model(images[0])", "Add the batch axis to a single image with image[None]"),
    ("model(images.to(torch.uint8))", "images.float() / 127.5 - 1"),
    ("vitral.create(model.config)", "this is a ViTConfig. ViT(config) builds one."),
    ("vitral.create(16)", "A model is named by a word"),
    ("model.features(images, layers=['last'])", "there is no layer 'last'"),
    ("vitral.record_attention(model, layers=9).__enter__()", "there is no layer 9; this model has 0 to 3"),
    ("vitral.create('vit-pico7', pool=['mean'])", "pool=['mean'] must be one of"),
]
SCRIPT = """
import numpy, torch, vitral
model = vitral.create("vit-pico7")
images = torch.zeros(1, 3, 28, 28)
for call, message in CASES:
    try:
        eval(call)
    except vitral.VitralError as error:
        assert message in str(error), (call, str(error))
        assert "\\n" not in str(error), call
    else:
        raise AssertionError(f"{call} was accepted")
"""


def test_each_gets_one_clear_sentence() -> None:
    script = f"CASES = {CASES!r}\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Things of the wrong kind, given to the Python interface as a user would: without the type checks of the tests."""

import subprocess
import sys

CASES = [
    ("model(None)", "a tensor of images or a list of tensors, and this is of type NoneType"),
    ("model(numpy.zeros((1, 3, 28, 28)))", "this is of type ndarray"),
    ("model([numpy.zeros((3, 28, 28))])", "Number 0 of the list is of type ndarray"),
    ("model('cat.jpg')", "this is of type str"),
    ("model(image for image in images)", "this is of type generator"),
    ("model(images[0])", "Add the batch axis to a single image with image[None]"),
    ("model(images.to(torch.uint8))", "images.float() / 127.5 - 1"),
    ("vitral.create(model.config)", "this is of type ViTConfig. ViT(config) builds one."),
    ("vitral.create(16)", "A model is named by a word"),
    ("model.features(images, layers='last')", "there is no layer 'last'"),
    ("model.features(images, layers=['last'])", "there is no layer 'last'"),
    ("vitral.record_attention(model, layers=9).__enter__()", "there is no layer 9; this model has 0 to 3"),
    ("model.features(images, layers=1.5)", "there is no layer 1.5"),
    ("model.features(images, layers=True)", "there is no layer True"),
    ("vitral.record_attention('vit-b16').__enter__()", "A str has no attention to record"),
    ("vitral.ViT('vit-b16')", "A name goes to vitral.create"),
    ("vitral.create('vit-pico7', pool=['mean'])", "pool=('mean',) must be one of"),
    ("vitral.create('vit-pico7', pool=numpy.array(['mean', 'map']))", "must be one of token, mean, map, none"),
    ("vitral.create('vit-pico7', width=10**9, heads=7)", "heads=7 does not divide width=1000000000. Use heads=8"),
    ("vitral.create('vit-pico7', dropout=10**400)", "must be a number"),
    ("vitral.create('vit-pico7', num_classes=10**30)", "must be a whole number of at least 0"),
    ("vitral.create('vit-pico7', norm_eps=1e-60)", "at least 1e-30"),
    ("model.config.grid(10**30 + 1, 28)", "cannot be cut"),
]
SCRIPT = """
import numpy, torch, vitral
model = vitral.create("vit-pico7")
images = torch.zeros(1, 3, 28, 28)
assert sorted(model.features(images, layers=numpy.arange(2)).layers) == [0, 1]  # NumPy's numbers are numbers
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

"""The tables of models, plans, suites, the doctor and the settings."""

from typing import Any

import pytest

from vitral.console.tables import show_findings, show_models, show_settings, show_suite

ROW = dict(
    name="vit-b16", width=768, depth=12, heads=12, mlp_width=3072, patch_size=(16, 16), image_size=(224, 224),
    tokens=197, parameters=86_567_656, forward_flops=35_100_000_000, inference_bytes=347 * 2**20, training_batch=32,
    training_bytes=6 * 2**30,
)  # fmt: skip
TASK: dict[str, Any] = dict(
    task="pets", group="natural", stand_in=None, top1=0.9, low=0.85, high=0.93, images=100, paper=[90.0, 94.5],
    train_images=1000, classes=37, classes_seen=37, unreadable=0, notes=[],
)  # fmt: skip
SUITE: dict[str, Any] = dict(
    paper_models=["ViT H/14", "BiT L"], groups={"natural": 0.9, "structured": None}, tasks=[TASK], train_images=1000,
    failed={}, interrupted=False, unfinished=[], missing=[], unrecognized=[], changed={},
)  # fmt: skip
FINDINGS: dict[str, Any] = dict(
    vitral="0.2.0",
    device=dict(value="cpu", reason="no GPU found"),
    packages=dict(torch="2.13.0", numpy=None),
    extras=dict(fast=dict(what="faster JPEG", missing=[]), hub=dict(what="the Hub", missing=["huggingface-hub"])),
    cache=dict(
        folder="/home/me/.cache/vitral",
        bytes=3_000_000,
        limit=10_000_000_000,
        kinds=dict(features=dict(files=2, bytes=2_999_000), verified=dict(files=1, bytes=1000)),
        downloads="/home/me/hub",
    ),
    problems=["numpy is not installed. Run: pip install numpy"],
)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_models_have_size_cost_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    show_models([ROW], {"vit-cifar10": "CIFAR-10"}, omitted=2)
    text = capsys.readouterr().out
    row = text.splitlines()[1].split()
    assert row == ["vit-b16", "224", "x", "224", "197", "86.6", "M", "35.1", "G", "347", "MiB", "6.00", "GiB"]
    assert "vit-cifar10 (CIFAR-10)" in text
    assert "2 models omitted" in text


def test_suite_has_means_beside_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    show_suite(SUITE)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["pets", "90.0", "85.0-93.0", "100", "90.0", "94.5"] in lines
    assert ["mean", "of", "1", "90.0", "90.0", "94.5"] in lines


def test_suite_warns_about_everything_that_differs_from_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    stand_in = TASK | dict(stand_in="my[b]pets", train_images=500, unreadable=1, notes=["cut\x1b off"])
    unseen = TASK | dict(task="dmlab", classes=6, classes_seen=5)
    show_suite(
        SUITE
        | dict(tasks=[stand_in, unseen], failed={"svhn": "no images"}, interrupted=True, unfinished=["eurosat"])
        | dict(missing=["clevr"], unrecognized=["mine"], changed={"steps": 10})
    )
    text = capsys.readouterr().out
    for warning in (
        "my[b]pets for pets",
        "pets: replaced by my[b]pets",
        "pets: trained on 500 images instead of 1,000",
        "pets: 1 unreadable test image",
        "pets: cut\N{REPLACEMENT CHARACTER} off",
        "dmlab: the test images cover 5 of 6 classes",
        "svhn: failed: no images",
        "Not finished: eurosat",
        "Not found: clevr",
        "Not a task of the suite: mine",
        "steps=10",
    ):
        assert warning in text
    assert "94.5" not in [line.split()[-1] for line in text.splitlines() if line.startswith("mean of")]


@pytest.mark.parametrize("problems_only", [False, True])
def test_doctor_states_versions_extras_and_problems(problems_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    show_findings(FINDINGS, problems_only=problems_only)
    text = capsys.readouterr().out
    assert "Problem: numpy is not installed. Run: pip install numpy" in text
    for fact in ("cpu (no GPU found)", "2.13.0", "missing", "installed (faster JPEG)", "pip install 'vitral[hub]'"):
        assert (fact in text) == (not problems_only)
    assert "No problems found" not in text


def test_doctor_without_problems(capsys: pytest.CaptureFixture[str]) -> None:
    show_findings(FINDINGS | dict(problems=[]), problems_only=False)
    assert "No problems found." in capsys.readouterr().out


def test_doctor_shows_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    show_findings(FINDINGS, problems_only=False)
    text = capsys.readouterr().out
    assert "/home/me/.cache/vitral: 3.00 MB of at most 10.0 GB" in text
    assert "features 3.00 MB in 2 files, verified 1.00 kB in 1 file" in text
    assert "/home/me/hub (shared with other programs" in text
    assert "removed" not in text
    emptied = FINDINGS["cache"] | dict(folder=None, downloads=None, removed=dict(features=dict(files=2, bytes=5000)))
    show_findings(FINDINGS | dict(cache=emptied), problems_only=False)
    text = capsys.readouterr().out
    assert "none (no home folder)" in text
    assert ["removed", "features", "5.00", "kB", "in", "2", "files"] in map(str.split, text.splitlines())
    assert "downloads" not in text


def test_settings_are_grouped_and_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = "A long explanation. " * 10
    rows = [
        ("epochs", "auto", explanation),
        ("optim.lr", 0.0003, "Peak learning rate."),
        ("optim.betas", (0.9, 0.999), "Decay rates."),
        ("batch_size", 64, "Images per step."),
        ("compile", False, "Compile the model."),
        ("steps", None, "Number of steps."),
        ("network.FIELD", "", "Any field."),
    ]
    show_settings(rows, ["small", "finetune"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(text.split()).count(explanation.strip()) == 1
    names = [line.strip() for line in lines if not line.startswith(" " * 6) and line.strip()]
    assert names == [
        "general",
        "--epochs [default: auto]",
        "--batch-size [default: 64]",
        "--compile [default: false]",
        "--steps",
        "optim",
        "--optim.lr [default: 0.0003]",
        "--optim.betas [default: 0.9,0.999]",
        "network",
        "--network.FIELD",
        "Recipes: small, finetune",
    ]

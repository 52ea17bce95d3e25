"""``vitral train``: pictures in, a model out."""

import sys
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from vitral.cli.numbers import WHOLE
from vitral.console.output import Format, show_json
from vitral.errors import ConfigError


def train(
    data: str | None = None,
    /,
    *,
    model: Annotated[str | None, Parameter(help="A name such as vit-s16, from scratch.")] = None,
    from_: Annotated[str | None, Parameter(name="--from", help="A checkpoint to start from.")] = None,
    objective: Annotated[str | None, Parameter(help="classify, or masked-patches: without labels.")] = None,
    recipe: Annotated[str | None, Parameter(help="Settings by name: small, finetune, paper-finetune, ...")] = None,
    config: Annotated[Path | None, Parameter(help="Settings of your own, as TOML.")] = None,
    out: Annotated[Path | None, Parameter(help="The run folder; by default runs/DATA-MODEL-1.")] = None,
    val: Annotated[str | None, Parameter(help="Other data to hold out.")] = None,
    epochs: Annotated[float | None, Parameter(help="Times that every picture is seen.")] = None,
    steps: Annotated[int | None, WHOLE, Parameter(help="Or this many steps in all.")] = None,
    minutes: Annotated[float | None, Parameter(help="Plan the run to fit into this time.")] = None,
    batch_size: Annotated[int | None, WHOLE, Parameter(help="Pictures in one step.")] = None,
    image_size: Annotated[str | None, Parameter(help="Pixels: 384, or HEIGHTxWIDTH.")] = None,
    seed: Annotated[int | None, WHOLE, Parameter(help="Another seed, another run.")] = None,
    device: Annotated[str | None, Parameter(help="cpu, cuda, cuda:1, mps.")] = None,
    resume: Annotated[Path | None, Parameter(help="Go on with this run.")] = None,
    tensorboard: Annotated[bool, Parameter(help="Also write curves to RUN/tensorboard.", negative="")] = False,
    print_config: Annotated[
        bool, Parameter(help="Write all settings and their meaning, and stop.", negative="")
    ] = False,
    help_all: Annotated[bool, Parameter(help="List every other setting, such as --optim.lr.", negative="")] = False,
    format: Annotated[Format, Parameter(help="human: a page; json: a line an event; quiet: the result.")] = "human",
    set: Annotated[tuple[str, ...], Parameter(show=False, consume_multiple=False)] = (),
) -> None:
    """Train a Vision Transformer on pictures. What is not said is decided, and the reason is printed.

    Parameters
    ----------
    data
        A folder of class folders (with or without train, val, test), a CSV or Parquet table, tar shards, hf:owner/name,
        or builtin:digits.
    """
    from vitral.api import with_report
    from vitral.console.training import show_settings, shower
    from vitral.report.tensorboard import has_curves, with_tensorboard

    if help_all:
        show_settings(*all_settings())
        return
    named = dict(
        model=model,
        objective=objective,
        val=val,
        epochs=epochs,
        steps=steps,
        minutes=minutes,
        batch_size=batch_size,
        image_size=image_size,
        seed=seed,
        device=device,
    )
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    given |= dict(map(split_setting, set))
    if from_ is not None:
        given["from"] = from_
    events = start(data, given, recipe, config, out, resume, print_config)
    if events is None:
        return
    if tensorboard or (resume is not None and has_curves(resume)):
        events = with_tensorboard(events)
    finished = shower(format)(with_report(events))
    if isinstance(finished, dict) and "signal" in finished:
        sys.exit(128 + finished["signal"])
    if format == "json" and finished is not None:
        show_json(finished)


def all_settings() -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Name, default and meaning of every setting; and the recipes."""
    from vitral.training.config import TrainConfig, as_settings, field_texts, recipe_names

    texts = field_texts()
    rows = [(name, value, texts.get(name, "")) for name, value in as_settings(TrainConfig(data="")).items()]
    rows.append(("network.FIELD", "", "any field of ViTConfig, such as --network.pool mean"))
    return [row for row in rows if row[0] != "data"], recipe_names()


def split_setting(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"--set {word} must be NAME=VALUE.", hint="Such as --set optim.lr=3e-4, or --optim.lr 3e-4.")
    return name, value


SWITCHES = {"compile", "gradient_checkpointing"}
"""Settings that are true or false, and need no word behind them."""


def gather_settings(words: list[str]) -> list[str]:
    """--optim.lr 3e-4, and every other flag that has no place of its own in the help -> --set optim.lr=3e-4."""
    own = {f"--{name.rstrip('_').replace('_', '-')}" for name in signature(train).parameters} | {"--help", "-h"}
    rest: list[str] = []
    words = words.copy()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in own or word == "--":
            rest.append(word)
            continue
        setting = name.removeprefix("--").replace("-", "_")
        if not equals:
            is_value = words and (words[0] in ("true", "false") if setting in SWITCHES else words[0][:2] != "--")
            value = words.pop(0) if is_value else "true"
        rest += ["--set", f"{setting}={value}"]
    return rest


def start(
    data: str | None,
    given: dict[str, Any],
    recipe: str | None,
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    print_config: bool,
) -> Any:
    """The events of a run that is about to begin; None when only the settings were asked for."""
    from vitral.training.config import as_toml
    from vitral.training.entry import resume_run, start_run
    from vitral.training.settings import collect_settings, reopen

    if resume is not None:
        run, own = reopen(resume, data, given, recipe=recipe, config=config, out=out)
        if not print_config:
            return resume_run(run, own)
        sys.stdout.write(as_toml(own))
        return None
    settled = collect_settings(data, given, recipe=recipe, config=config, origin="the command line")
    if print_config:
        sys.stdout.write(as_toml(settled.config))
        return None
    return start_run(*settled, out=out)

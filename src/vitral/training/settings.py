"""Dotted settings (`optim.lr`) to configs and back: from Python, the command line, TOML files and recipes."""

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from vitral.errors import ConfigError, did_you_mean, short_repr
from vitral.model.sizes import parse_field
from vitral.training.config import SECTIONS, TrainConfig

RESUME_TABLE = "resume"
"""The table of config.toml with the length of a run in other units, which only --resume reads."""
_SPELLED = {"from_weights": "from"}  # `from` is a keyword of Python
_OLD_NAMES = {"selection": "val_fraction", "most_bad": "max_bad_fraction"}


def setting_names() -> dict[str, Any]:
    """Return every setting by its dotted name, with its type."""
    names: dict[str, Any] = {}
    for name, kind in get_type_hints(TrainConfig).items():
        if name in SECTIONS:
            names |= {f"{name}.{field}": inner for field, inner in get_type_hints(SECTIONS[name]).items()}
        else:
            names[_SPELLED.get(name, name)] = kind
    return names


def as_settings(config: TrainConfig) -> dict[str, Any]:
    """Return every setting of a config by its dotted name."""
    settings: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name == "network":
            settings |= {f"network.{name}": part for name, part in value.items()}
        elif is_dataclass(value) and not isinstance(value, type):
            settings |= {f"{item.name}.{name}": part for name, part in asdict(value).items()}
        else:
            settings[_SPELLED.get(item.name, item.name)] = value
    return settings


def with_settings(config: TrainConfig | None, settings: Mapping[str, Any], origin: str) -> TrainConfig:
    """Return a config with dotted settings changed. `origin` names their source in errors."""
    known = setting_names()
    changes: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for word, value in settings.items():
        name = _SPELLED.get(word.rstrip("_"), word.rstrip("_"))
        section, dot, rest = name.partition(".")
        if section == "network" and dot:
            value = parse_field(rest, value) if isinstance(value, str) else value
        elif name in known:
            value = parse_value(name, value, known[name], origin)
        else:
            raise ConfigError(f"{origin}: there is no setting {name!r}.", hint=_suggest_setting(name, known))
        if dot:
            sections.setdefault(section, {})[rest] = value
        else:
            changes[{"from": "from_weights"}.get(name, name)] = value
    for section, values in sections.items():
        current: Any = getattr(config, section) if config else SECTIONS.get(section, dict)()
        changes[section] = {**current, **values} if section == "network" else replace(current, **values)
    if config is None and "data" not in changes:
        raise ConfigError(f"{origin}: the setting data is missing.", hint="Set data to the dataset to train on.")
    return replace(config, **changes) if config else TrainConfig(**changes)


def _suggest_setting(name: str, known: Mapping[str, Any]) -> str:
    if name in SECTIONS:
        return f"{name} is a section; set for example {name}.{fields(SECTIONS[name])[0].name}."
    if name in _OLD_NAMES:
        return f"It is now called {_OLD_NAMES[name]}."
    inside = [setting for setting in known if setting.endswith(f".{name}")]
    if inside:
        return f"Did you mean {' or '.join(inside)}?"
    return did_you_mean(name, known) or "Run `vitral train --help-all` to list them."


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings: optim=dict(lr=1) becomes optim.lr=1. A dict inside a section, as network.stem, stays."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and "." not in name:
            section = cast("Mapping[str, Any]", value)
            flat |= {f"{name}.{field}": inner for field, inner in section.items()}
        else:
            flat[name] = value
    return flat


# ---- values ----


def parse_value(name: str, value: object, kind: Any, origin: str) -> Any:
    """Return a value in the type of its setting, reading words as numbers; raise ConfigError if it does not fit."""
    for choice in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        with suppress(TypeError, ValueError, OverflowError):
            return _parse(value, choice)
    hint = "The paper's Adam has decoupled decay: use adamw." if (name, value) == ("optim.name", "adam") else None
    raise ConfigError(f"{origin}: {name} must be {_describe(kind)} (got {short_repr(value)}).", hint=hint)


def _parse(value: Any, kind: Any) -> Any:
    """Return a value in one type. ValueError, TypeError or OverflowError if it does not fit."""
    if kind in (int, float) and not isinstance(value, bool):
        return _parse_number(value, kind)
    if get_origin(kind) is tuple and isinstance(value, str | list | tuple):
        parts = cast("list[Any]", value.replace("x", ",").split(",") if isinstance(value, str) else value)
        return tuple(_parse(part, inner) for part, inner in zip(parts, get_args(kind), strict=True))
    if kind is str and isinstance(value, str | PathLike):
        return fspath(cast("str", value))
    if kind is bool and (isinstance(value, bool) or value in ("true", "false")):
        return value in (True, "true")
    if kind is type(None) and value in (None, "none"):
        return None
    if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
        return value
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    raise ValueError(value)


def _parse_number(value: Any, kind: type[int] | type[float]) -> int | float:
    if kind is int and (isinstance(value, int) or re.fullmatch(r"[+-]?[0-9]{1,40}", str(value))):
        return int(value)  # exact, also beyond 2**53
    number = float(value)
    if kind is int and number != int(number):
        raise ValueError(value)
    return kind(number)


def _describe(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_describe(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} numbers"
    if get_origin(kind) is Mapping:
        return "a table of fields"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, "none")


# ---- TOML ----


def read_toml(path: Path) -> dict[str, Any]:
    """Return the dotted settings of a TOML file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # also numbers with thousands of digits and deep nesting
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    return flatten(content)


def as_toml(config: TrainConfig) -> str:
    """Return the config as a TOML file, with the text under each field as a comment."""
    comments = field_texts()
    lines: list[str] = []
    section = ""
    lengths = _other_lengths(config)
    settings = as_settings(config) | dict.fromkeys(lengths)
    for name, value in sorted(settings.items(), key=lambda pair: "." in pair[0]):
        head, dot, rest = name.partition(".")
        if dot and head != section:
            section = head
            lines += ["", f"[{section}]"]
        if comment := comments.get(name):
            lines.append(f"# {comment}")
        value = "none" if value is None and head == "network" else value
        lines.append(f"# {rest or head} = (not set)" if value is None else f"{_key(rest or head)} = {_to_toml(value)}")
    if lengths:
        lines += ["", f"[{RESUME_TABLE}]", "# The length of this run in other units; only --resume reads it."]
        lines += [f"{name} = {_to_toml(value)}" for name, value in lengths.items()]
    return "\n".join(lines) + "\n"


def _other_lengths(config: TrainConfig) -> dict[str, Any]:
    """Return the second length of a resolved run. A file that starts a new run states one length: the requested steps,
    or the epochs that were planned for the minutes."""
    if config.epochs == "auto":
        return {}
    lengths: dict[str, Any] = {} if config.steps is None else {"epochs": config.epochs}
    return lengths if config.minutes is None else {**lengths, "minutes": config.minutes}


def _to_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_to_toml, cast("list[object]", value))) + "]"
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{_key(name)} = {_to_toml(inner)}" for name, inner in table.items()) + "}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are JSON's


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _to_toml(name)


def field_texts() -> dict[str, str]:
    """Return the text under each field, by dotted name."""
    texts: dict[str, str] = {}
    for prefix, kind in {"": TrainConfig, **{f"{name}.": kind for name, kind in SECTIONS.items()}}.items():
        tree = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
                name = _SPELLED.get(node.target.id, node.target.id)
                texts[prefix + name] = " ".join(str(ast.literal_eval(after.value)).split())
    return texts


# ---- recipes ----


def _recipe_folders() -> tuple[Path, Path]:
    """Return where recipes are: inside an installed package, and beside the sources in a clone."""
    package = Path(__file__).parents[1]
    return package / "recipes", package.parents[1] / "recipes"


def recipe_path(name: str) -> Path:
    """Return the file of a recipe, by its name or its path."""
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    for folder in _recipe_folders():
        if (path := folder / f"{name.removesuffix('.toml')}.toml").is_file():
            return path
    names = recipe_names()
    hint = did_you_mean(name, names) or f"Choose one of {', '.join(names)}."
    raise ConfigError(f"There is no recipe {name!r}.", hint=hint)


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in _recipe_folders() for path in folder.glob("*.toml")})

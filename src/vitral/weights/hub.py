"""From a name to a path: a file, a folder, or a repository of the Hugging Face hub.

Nothing is downloaded without saying what, how large and where to; what is in the cache is used without asking, and is
all there is when offline.
"""

import sys
from pathlib import Path
from typing import Any

from vitral.errors import MissingError, WeightsError

_DESCRIPTIONS = ("config.json", "preprocessor_config.json")


def locate(source: str | Path) -> Path:
    """The path of a checkpoint; ``hf:owner/name`` is fetched, ``file.npz:img`` names the image tower of two."""
    if isinstance(source, str) and source.startswith("hf:"):
        return fetch(source.removeprefix("hf:"))
    if not isinstance(source, str | Path) or not str(source):
        raise WeightsError(f"A checkpoint is named by a path or hf:owner/name, and this is {source!r}.")
    path = Path(str(source).removesuffix(":img")).expanduser()
    if not path.exists():
        raise WeightsError(f"There is no file or folder {path}.", hint=_hint(str(source)))
    return path


def _hint(source: str) -> str | None:
    looks_like_repository = source.count("/") == 1 and "." not in Path(source).suffix and not source.startswith(".")
    return f"If it is on the Hugging Face hub: hf:{source}" if looks_like_repository else None


def fetch(repository: str) -> Path:
    """The folder of a repository's checkpoint in the local cache, filled as needed. ``owner/name@revision`` works."""
    try:
        import huggingface_hub
    except ImportError:
        raise MissingError("huggingface_hub", "hub", f"hf:{repository}") from None
    name, _, revision = repository.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise WeightsError(f"hf:{repository} should be hf:owner/name.")
    try:
        files = _list_files(huggingface_hub, name, revision or None)
    except _OFFLINE() as error:
        return _from_cache(huggingface_hub, name, revision or None, error)
    wanted = choose_files(repository, files)
    missing = {file: size for file, size in wanted.items() if not _is_cached(huggingface_hub, name, file, revision)}
    if missing:
        place = huggingface_hub.constants.HF_HUB_CACHE
        total = sum(missing.values())
        _say(f"hf:{repository}: downloading {', '.join(missing)} ({total / 1e6:,.1f} MB) to {place}")
    paths = [Path(_download(huggingface_hub, name, file, revision or None)) for file in wanted]
    return paths[0].parent


def _OFFLINE() -> tuple[type[Exception], ...]:  # noqa: N802
    from huggingface_hub import errors

    return (errors.OfflineModeIsEnabled, OSError)


def _list_files(hub: Any, name: str, revision: str | None) -> dict[str, int]:
    from huggingface_hub import errors

    try:
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except errors.RepositoryNotFoundError as error:
        raise WeightsError(
            f"There is no public repository {name} on the Hugging Face hub.",
            hint="Check the name; a private one needs `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"The repository {name} has no revision {revision}.") from error
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def choose_files(repository: str, files: dict[str, int]) -> dict[str, int]:
    """The descriptions and one checkpoint, the safest kind that is there."""
    descriptions = {name: files[name] for name in _DESCRIPTIONS if name in files}
    for name in ("model.safetensors", "pytorch_model.bin"):
        if name in files:
            return {name: files[name], **descriptions}
        if f"{name}.index.json" in files:
            stem, suffix = name.rsplit(".", 1)
            parts = {
                file: size for file, size in files.items() if file.startswith(f"{stem}-") and file.endswith(suffix)
            }
            return {f"{name}.index.json": files[f"{name}.index.json"], **parts, **descriptions}
    for suffix in (".safetensors", ".npz", ".pth", ".pt"):
        found = [name for name in files if name.endswith(suffix) and "/" not in name]
        if len(found) == 1:
            return {found[0]: files[found[0]], **descriptions}
    raise WeightsError(f"hf:{repository} holds no single checkpoint, but {', '.join(sorted(files)[:8]) or 'nothing'}.")


def _is_cached(hub: Any, name: str, file: str, revision: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(name, file, revision=revision or None), str)


def _download(hub: Any, name: str, file: str, revision: str | None) -> str:
    try:
        return hub.hf_hub_download(name, file, revision=revision)
    except OSError as error:
        raise WeightsError(f"hf:{name}: {file} could not be downloaded: {error}.") from error


def _from_cache(hub: Any, name: str, revision: str | None, error: Exception) -> Path:
    for file in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        found = hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    raise WeightsError(
        f"hf:{name} is not in the cache, and the hub cannot be reached ({type(error).__name__}).",
        hint="Connect and try again, or give a file.",
    ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

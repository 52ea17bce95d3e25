"""From a name to a path: a file, a folder, a model that comes with vitral, or a repository of the Hugging Face hub.

Nothing is downloaded without saying what, how large and where to. What is in the cache is used without asking, and is
all there is when offline.
"""

import sys
from contextlib import suppress
from pathlib import Path

from vitral.errors import ConfigError, WeightsError, did_you_mean, first_line, missing_package
from vitral.model.sizes import canonical_name
from vitral.weights.shipped import SHIPPED, shipped_weights

_DESCRIPTIONS = ("config.json", "preprocessor_config.json")
_CHECKPOINTS = ("model.safetensors", "pytorch_model.bin")


def locate(source: str | Path) -> Path:
    """The path of a checkpoint; ``hf:owner/name`` is fetched, ``file.npz:img`` names the image tower of two. What lies
    here under the name of a shipped model comes first."""
    if isinstance(source, str) and source.startswith("hf:"):
        return fetch(source.removeprefix("hf:"))
    if not isinstance(source, str | Path) or not str(source):
        raise WeightsError(f"A checkpoint is named by a path or hf:owner/name, and this is {source!r}.")
    path = Path(str(source).removesuffix(":img"))
    try:
        path = path.expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, somebody else's home, a zero byte
        raise WeightsError(f"{str(path)[:200]} is no path: {error}.") from error
    if not is_there and (shipped := shipped_weights(str(source).rstrip("/\\"))):
        return shipped
    if not is_there:
        raise WeightsError(f"There is no file or folder {source}.", hint=_hint(str(source)))
    return path


def _hint(words: str) -> str | None:
    """For the name of a network, which has no weights, for nearly that of a model that comes with vitral, and for what
    looks like a repository."""
    with suppress(ConfigError):
        name = canonical_name(words)
        return f"{name} is a network without weights. `vitral train DATA --model {name}` trains it."
    if hint := did_you_mean(words, SHIPPED):
        return hint
    looks_like_repository = words.count("/") == 1 and not words.startswith((".", "/", "~")) and not Path(words).suffix
    return f"If it is on the Hugging Face hub: hf:{words}" if looks_like_repository else None


def fetch(repository: str) -> Path:
    """The local folder of a repository's checkpoint, filled as needed; ``owner/name@revision`` works, too."""
    name, _, revision = repository.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise WeightsError(f"hf:{repository} is no repository.", hint="It should be hf:owner/name.")
    try:
        from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise missing_package("huggingface_hub", "hub", f"hf:{repository}") from None
    try:
        wanted = choose_files(repository, _list_files(name, revision or None))
    except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        return _from_cache(name, revision or None, error)
    cached = {file: try_to_load_from_cache(name, file, revision=revision or None) for file in wanted}
    if missing := [file for file, path in cached.items() if not isinstance(path, str)]:
        size = sum(wanted[file] for file in missing) / 1e6
        _say(f"hf:{repository}: downloading {', '.join(missing)} ({size:,.1f} MB) to {constants.HF_HUB_CACHE}")
    try:
        paths = [hf_hub_download(name, file, revision=revision or None) for file in wanted]
    except (OSError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise WeightsError(f"hf:{repository} could not be downloaded: {first_line(error)}.") from error
    return _whole(Path(paths[0]))


def _list_files(name: str, revision: str | None) -> dict[str, int]:
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"The repository {name} has no revision {revision}.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise WeightsError(
            f"There is no public repository {name} on the Hugging Face hub.",
            hint="Check the name; a private or gated one needs `hf auth login`.",
        ) from error
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def choose_files(repository: str, files: dict[str, int]) -> dict[str, int]:
    """One checkpoint, of the safest kind that is there, and what describes it: names and bytes."""
    descriptions = {name: files[name] for name in _DESCRIPTIONS if name in files}
    for name in _CHECKPOINTS:
        if name in files:
            return {name: files[name], **descriptions}
        if (index := f"{name}.index.json") in files:
            stem, ending = name.split(".")
            parts = [file for file in files if file.startswith(f"{stem}-") and file.endswith(f".{ending}")]
            return {index: files[index], **{file: files[file] for file in parts}, **descriptions}
    for ending in (".safetensors", ".npz", ".pth", ".pt"):
        found = [name for name in files if name.endswith(ending) and "/" not in name]
        if len(found) == 1:
            return {found[0]: files[found[0]], **descriptions}
    raise WeightsError(f"hf:{repository} holds no single checkpoint, but {', '.join(sorted(files)[:8]) or 'nothing'}.")


def _from_cache(name: str, revision: str | None, error: Exception) -> Path:
    from huggingface_hub import try_to_load_from_cache

    for file in (*_CHECKPOINTS, *(f"{file}.index.json" for file in _CHECKPOINTS), "config.json"):
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return _whole(Path(found)) if file != "config.json" else Path(found).parent
    if (folder := _snapshot(name, revision)) is not None:
        return folder
    raise WeightsError(
        f"hf:{name} is not in the cache, and the hub cannot be reached: {first_line(error)}.",
        hint="Connect and try again, or give a file.",
    ) from error


def _snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a repository in the cache, whatever it holds."""
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True, cache_dir=constants.HF_HUB_CACHE))
    except Exception:  # it is not there, which the hub says in several ways
        return None


def _whole(file: Path) -> Path:
    """The folder of a repository; the file itself where the folder would not tell which one is meant."""
    return file.parent if file.name.removesuffix(".index.json") in _CHECKPOINTS else file


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

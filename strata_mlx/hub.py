"""Find a model: the embedded one, a folder, or a Hugging Face repository (from the cache, or downloaded)."""

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_mlx.errors import Fault, InputError, ModelNotFoundError, StrataError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

EMBEDDED = Path(__file__).parent / "embedded"

INDEX = "model.safetensors.index.json"

#: What a model is made of, as patterns over the top level of a repository. Never code.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template.json",
    "*.jinja",
)

# The same weights once more in another layout: in `original/` and the like, or as one consolidated file.
DUPLICATES = ("*/*", "consolidated*.safetensors")


def find_model(
    model: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
    progress: bool = True,
    files: Sequence[str] = MODEL_FILES,
) -> Path:
    """Return the folder that holds ``model``, downloading it if need be.

    ``model`` is None (the model embedded in this package), a folder with a ``config.json``, or a Hugging
    Face repository ``owner/name``. A folder wins over a repository of the same name; whatever looks like a
    path, and every ``PathLike``, is never looked up on the network.

    ``revision`` (branch, tag or commit), ``cache_dir``, ``token`` and ``progress`` (bars on stderr) concern
    repositories. What they leave open comes from huggingface_hub's own settings: ``HF_ENDPOINT``,
    ``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``. Only files whose name matches one of ``files`` are fetched.
    Files that an interrupted download had completed are not fetched again. When the hub cannot be asked, a
    complete copy in the cache is used.

    Raises ``ModelNotFoundError`` for what the caller can correct (no such folder, repository or revision, no
    access) and ``Fault`` for what the caller cannot (network, hub, disk).
    """
    name = "" if model is None else os.fspath(model)
    folder = EMBEDDED if model is None else Path(os.path.expanduser(name))
    if (model is None or name) and os.path.isdir(folder):
        if revision is not None:
            raise InputError(f"revision {revision!r} means nothing for the folder {folder}: leave it out")
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"no config.json in {folder}: name a folder in the Hugging Face layout")
        return folder
    if model is None:
        raise ModelNotFoundError(f"no embedded model in {folder}: reinstall strata-mlx or name a model")
    if name and os.path.exists(folder):
        raise ModelNotFoundError(f"{name!r} is a file: name the folder that it lies in")
    looks_local = name.startswith(("./", "../", "/", "~")) or "\\" in name or name.count("/") > 1
    if looks_local or not isinstance(model, str):
        raise ModelNotFoundError(f"no folder {name!r}: check the path, or name a repository as owner/name")
    if "/" not in name:
        raise ModelNotFoundError(f"no folder {name!r}: name a folder, or a Hugging Face repository as owner/name")
    return _find_repository(name, revision, cache_dir, (token or "").strip() or None, progress, files)


@dataclass(frozen=True)
class _Source:
    """Where a repository is looked for: what every error message has to say."""

    repo: str
    revision: str | None
    endpoint: str
    cache: Path
    offline: bool
    has_token: bool

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def _find_repository(
    repo: str,
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
    token: str | None,
    progress: bool,
    files: Sequence[str],
) -> Path:
    # Imported here because it takes longer than all the rest of a start from a local folder.
    from huggingface_hub import HfApi, constants, get_token, snapshot_download
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    source = _Source(
        repo=repo,
        revision=revision,
        endpoint=(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
        cache=Path(cache_dir or constants.HF_HUB_CACHE).expanduser(),
        offline=constants.HF_HUB_OFFLINE
        or os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES,
        has_token=bool(token or get_token()),
    )

    def snapshot(*, cached: bool) -> Path:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=source.cache,
                token=token,
                endpoint=source.endpoint,
                allow_patterns=list(files),
                ignore_patterns=list(DUPLICATES),
                tqdm_class=None if progress else Silent,
                local_files_only=cached,
            )
        )
        present = [path.name for path in folder.iterdir() if path.is_file()]
        if missing := _missing(present, files, _shards(folder)):
            raise ModelNotFoundError(
                f"the copy of {source} in {folder} is incomplete (no {', '.join(missing[:3])}): "
                "run again with network access to complete it"
            )
        return folder

    asked = False
    try:
        if not source.offline:
            # snapshot_download asks the same, but without a timeout: a silent server would hold it for ever.
            info = HfApi(endpoint=source.endpoint, token=token).model_info(
                repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
            asked = True
            if missing := _missing([file.rfilename for file in info.siblings or ()], files):
                raise ModelNotFoundError(
                    f"{source} at {source.endpoint} has no {' and no '.join(missing)}: "
                    "choose a repository with config.json and safetensors weights"
                )
        return snapshot(cached=source.offline)
    except StrataError:
        raise
    except Exception as error:  # the HTTP library differs between huggingface_hub 1 and 2: no base to name
        if not (source.offline or asked or isinstance(error, (HFValidationError, RevisionNotFoundError))):
            with suppress(OSError, ModelNotFoundError):
                return snapshot(cached=True)
        raise _explain(error, source) from error


def _missing(present: Collection[str], files: Sequence[str], shards: Sequence[str] = ()) -> list[str]:
    """Which of the files that a model cannot do without were asked for and are not ``present``."""

    def asked_for(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in files)

    missing = [name for name in ("config.json", *shards) if asked_for(name) and name not in present]
    weights = [
        name
        for name in present
        if name.endswith(".safetensors") and not any(fnmatchcase(name, pattern) for pattern in DUPLICATES)
    ]
    return missing if weights or not asked_for("model.safetensors") else [*missing, "*.safetensors"]


def _shards(folder: Path) -> list[str]:
    """The files that the index of ``folder`` names (a broken index is the checkpoint reader's to report)."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


AGAIN = "run again to go on: files that are complete are kept"


def _explain(error: Exception, source: _Source) -> StrataError:
    """Turn what huggingface_hub raised into one line that says what is wrong, where, and what to do."""
    from huggingface_hub.errors import (
        FileMetadataError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return ModelNotFoundError(f"{source.repo!r} is not a repository owner/name: {_first_line(error)}")
    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, HfHubHTTPError):
            return _explain_refusal(cause, source)
    if source.offline and isinstance(error, LocalEntryNotFoundError):
        return ModelNotFoundError(
            f"no complete copy of {source} in {source.cache}, and HF_HUB_OFFLINE is set: "
            "unset it and run again with network access"
        )
    if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
        return Fault(f"no space left for {source} in {source.cache}: free some or choose another cache")
    if isinstance(error, OSError) and error.errno is not None:
        return Fault(
            f"cannot use the cache folder {source.cache} for {source}: {error.strerror}: {error.filename}; "
            "make it writable or choose another"
        )

    # The HTTP library is told by the names of its classes: httpx for huggingface_hub 1, httpx2 for 2.
    kinds = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    where = f"{source} at {source.endpoint}"
    if "JSONDecodeError" in kinds or any(isinstance(cause, FileMetadataError) for cause in chain):
        return Fault(f"no hub answers for {where}: check HF_ENDPOINT, the proxy and the network")
    if "TimeoutException" in kinds:
        return Fault(f"no answer in time for {where}: check the network; {AGAIN}")
    if kinds & {"ReadError", "WriteError", "RemoteProtocolError"}:
        return Fault(f"the connection broke during the download of {where}: {AGAIN}")
    if "TransportError" in kinds:
        return Fault(
            f"cannot reach {source.endpoint}, and {source.cache} holds no complete copy of {source}: "
            "run again with network access (check the proxy and HF_ENDPOINT too)"
        )
    if "Consistency check failed" in str(error):
        return Fault(f"a file of {where} arrived with the wrong size: {AGAIN} ({_first_line(error)})")
    return Fault(f"the download of {where} failed: {type(error).__name__}: {_first_line(error)}; {AGAIN}")


def _explain_refusal(refusal: "HfHubHTTPError", source: _Source) -> StrataError:
    """The same for what the hub answered with an HTTP status."""
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = refusal.response.status_code
    where = f"{source} at {source.endpoint}"
    log_in = "log in with `hf auth login` or pass a token"
    if isinstance(refusal, RevisionNotFoundError):
        return ModelNotFoundError(
            f"no revision {source.revision!r} of {source.repo} at {source.endpoint}: look at its branches"
        )
    if isinstance(refusal, GatedRepoError):
        ask = f"ask for access at {source.endpoint}/{source.repo}"
        if source.has_token:
            return ModelNotFoundError(f"{source} is gated and this token has no access to it: {ask}")
        return ModelNotFoundError(f"{source} is gated: {ask}, then {log_in}")
    if isinstance(refusal, DisabledRepoError):
        return ModelNotFoundError(f"{where} has been disabled: choose another repository")
    # Without a token the hub answers 401 for what is private and for what does not exist.
    if isinstance(refusal, RepositoryNotFoundError) or (status == 401 and not source.has_token):
        advice = "use a token that may read it" if source.has_token else log_in
        return ModelNotFoundError(f"no repository {where}: check the name; if it is private, {advice}")
    if status == 401:
        return ModelNotFoundError(f"the token was rejected for {where}: {log_in}")
    if status == 403:
        return ModelNotFoundError(f"no permission to read {where}: use a token that may read it")
    if status == 429:
        return Fault(f"too many requests for {where}: wait some minutes, then {AGAIN}")
    return Fault(f"the hub answered {status} for {where}: try later; {AGAIN}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no details")

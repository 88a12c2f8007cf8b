"""Finding a model: embedded, in a folder, in the cache, on a hub (a server on loopback) that may fail."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from itertools import chain, repeat
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from strata_mlx import hub as finder
from strata_mlx.errors import Fault, InputError, ModelNotFoundError, StrataError
from strata_mlx.hub import find_model
from tests.hubserver import COMMIT, REPO, Drop, Hub, Replace, Silence, Status, Trouble, serve

SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 4096 for i in (1, 2)}
NEEDED = {
    "config.json": b'{"model_type": "qwen3_moe"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "<|end|>"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(),
    **SHARDS,
    "mtp.safetensors": b"m" * 2048,
}
UNNEEDED = {
    "modeling_tiny.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "tiny-q4_k_m.gguf": b"GGUF",
    "model.onnx": b"onnx",
    "consolidated.00.pth": b"pth",
    "consolidated.safetensors": b"once more",
    "original/model.safetensors": b"once more",
    "original/config.json": b"{}",
    "README.md": b"# tiny",
}
SHARD = next(iter(SHARDS))
NOWHERE = "http://127.0.0.1:1"  # a port on which nothing listens


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings, tokens or caches of the machine; no way to a real hub; no waiting between retries."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "hf" / "stored_tokens"))
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(NEEDED | UNNEEDED) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@contextmanager
def refused(kind: type[StrataError], *says: str) -> Iterator[None]:
    """The block raises exactly ``kind``, in one line that contains every one of ``says``."""
    with pytest.raises(StrataError) as caught:
        yield
    message = str(caught.value)
    assert caught.type is kind, message
    assert "\n" not in message
    for words in says:
        assert words in message


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)


# --- embedded and local ----------------------------------------------------------------------------------


def test_no_name_means_the_embedded_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Path(finder.__file__).parent / "embedded" == finder.EMBEDDED
    monkeypatch.setattr(finder, "EMBEDDED", tmp_path)
    (tmp_path / "config.json").touch()
    assert find_model() == tmp_path


def test_an_installation_without_the_embedded_model_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(finder, "EMBEDDED", tmp_path / "embedded")
    with refused(ModelNotFoundError, str(tmp_path / "embedded"), "reinstall"):
        find_model()


def test_a_folder_needs_neither_the_network_nor_huggingface_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path) == tmp_path
    assert find_model(str(tmp_path)) == tmp_path


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    assert find_model("~/m") == tmp_path / "m"


def test_a_folder_wins_over_a_repository_of_its_name(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(REPO)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert find_model(REPO) == folder
    assert hub.requests == []


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with refused(ModelNotFoundError, "config.json", str(tmp_path)):
        find_model(tmp_path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with refused(ModelNotFoundError, "is a file", "folder"):
        find_model(tmp_path / "model.safetensors")


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with refused(InputError, "revision 'v1'", str(tmp_path)):
        find_model(tmp_path, revision="v1")


@pytest.mark.parametrize(
    "name",
    [
        "./no",
        "../no",
        "/no/such",
        "~/no",
        "~no/such",
        r"no\such",
        "a/b/c",
        "http://host/a/b",
        "./",
        Path("a/b"),
    ],
)
def test_what_looks_like_a_path_is_never_looked_up(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with refused(ModelNotFoundError):
        find_model(name)
    assert hub.requests == []


@pytest.mark.parametrize(
    "name", ["", " ", "tiny", "a--b/c", "a/b.git", "-a/b", "a/b c", "a/", "a/b\n", "a/" + "b" * 999, "a\0/b"]
)
def test_a_malformed_name_is_refused_without_asking(hub: Hub, name: str) -> None:
    with refused(ModelNotFoundError, "owner/name"):
        find_model(name)
    assert hub.requests == []


# --- download and cache ----------------------------------------------------------------------------------


def test_only_the_needed_files_are_fetched(hub: Hub) -> None:
    assert contents(find_model(REPO)) == NEEDED
    assert sorted(hub.fetched()) == sorted(NEEDED)
    assert {r.target for r in hub.requests} == {"info", "tree", *NEEDED}


def test_the_caller_can_ask_for_fewer_files(hub: Hub) -> None:
    assert set(contents(find_model(REPO, files=("config.json",)))) == {"config.json"}
    assert hub.fetched() == ["config.json"]


def test_a_second_call_fetches_nothing(hub: Hub) -> None:
    first = find_model(REPO)
    hub.requests.clear()
    assert find_model(REPO) == first
    assert {r.target for r in hub.requests} == {"info"}


def test_a_new_commit_is_found_and_equal_files_are_told_by_their_hash(hub: Hub) -> None:
    find_model(REPO)
    hub.requests.clear()
    hub.refs["main"] = "b" * 40
    hub.files["config.json"] = b'{"model_type": "qwen3_next"}'
    assert (find_model(REPO) / "config.json").read_bytes() == hub.files["config.json"]
    assert hub.fetched() == ["config.json"]


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_the_revision_is_the_one_asked_for(hub: Hub, revision: str) -> None:
    hub.refs |= {"main": "b" * 40, "v1": COMMIT}
    assert find_model(REPO, revision=revision).name == COMMIT
    assert {r.revision for r in hub.requests} <= {revision, COMMIT}


def test_the_cache_folder_is_the_one_asked_for(hub: Hub, tmp_path: Path) -> None:
    assert find_model(REPO, cache_dir=tmp_path / "mine").is_relative_to(tmp_path / "mine")
    assert not (tmp_path / "hf" / "hub").exists()
    assert hub.fetched()


def test_the_token_goes_with_every_request(hub: Hub) -> None:
    find_model(REPO, token="hf_secret\n")
    assert {r.authorization for r in hub.requests} == {"Bearer hf_secret"}


def test_the_environment_gives_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    find_model(REPO)
    assert {r.authorization for r in hub.requests} == {"Bearer hf_other"}


def test_without_a_token_none_is_sent(hub: Hub) -> None:
    find_model(REPO)
    assert {r.authorization for r in hub.requests} == {None}


@pytest.mark.parametrize("progress", [True, False])
def test_progress_can_be_silenced(hub: Hub, capsys: pytest.CaptureFixture[str], progress: bool) -> None:
    find_model(REPO, progress=progress)
    out, err = capsys.readouterr()
    assert (out, bool(err)) == ("", progress)
    assert hub.fetched()


# --- interrupted downloads -------------------------------------------------------------------------------


def test_a_dropped_connection_is_taken_up_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.trouble("GET", SHARD, [Drop(1000)])
    assert contents(find_model(REPO)) == NEEDED
    assert [r.range for r in hub.requests if (r.method, r.target) == ("GET", SHARD)] == [None, "bytes=1000-"]


@pytest.mark.parametrize("reset", [False, True])
def test_running_again_completes_an_interrupted_download(hub: Hub, reset: bool) -> None:
    hub.trouble("GET", SHARD, chain([Drop(1000, reset)], repeat(Drop(0, reset))))
    with refused(Fault, REPO, "connection broke", "run again"):
        find_model(REPO)
    complete = {path.name for path in Path(constants.HF_HUB_CACHE).glob("*/snapshots/*/*")}
    assert SHARD not in complete

    hub.recover()
    hub.requests.clear()
    assert contents(find_model(REPO)) == NEEDED
    assert sorted(hub.fetched()) == sorted(set(NEEDED) - complete)


def test_an_interrupted_download_is_never_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.trouble("GET", "tokenizer.json", repeat(Drop(0)))
    with refused(Fault):
        find_model(REPO)
    unreachable(monkeypatch)
    with refused(Fault, "no complete copy", "run again with network access"):
        find_model(REPO)


def test_a_file_of_the_wrong_size_is_refused(hub: Hub) -> None:
    hub.trouble("GET", SHARD, repeat(Replace(b"short")))
    with refused(Fault, REPO, "wrong size", "4096", "run again"):
        find_model(REPO)
    hub.recover()
    assert contents(find_model(REPO)) == NEEDED


def test_ctrl_c_passes_through(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        find_model(REPO)
    assert hub.requests


# --- without a hub ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_complete_copy_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, revision: str | None) -> None:
    folder = find_model(REPO, revision=revision)
    assert hub.requests
    unreachable(monkeypatch)
    assert find_model(REPO, revision=revision) == folder


@pytest.mark.parametrize("trouble", [Status(500), Status(403), Status(404, "RepoNotFound"), Drop(0, reset=True)])
def test_a_complete_copy_survives_a_hub_that_fails(hub: Hub, trouble: Trouble) -> None:
    folder = find_model(REPO)
    hub.trouble("GET", "info", repeat(trouble))
    assert find_model(REPO) == folder


def test_offline_mode_asks_nobody(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model(REPO)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_model(REPO) == folder
    assert hub.requests == []


def test_offline_mode_with_nothing_cached_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(ModelNotFoundError, REPO, "HF_HUB_OFFLINE", "unset it"):
        find_model(REPO)
    assert hub.requests == []


def test_offline_mode_refuses_a_copy_that_lacks_a_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    (find_model(REPO) / "tokenizer.json").unlink()
    assert hub.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(ModelNotFoundError, REPO, "network access"):
        find_model(REPO)


@pytest.mark.parametrize("lost", ["config.json", SHARD])
def test_a_copy_of_unknown_listing_is_judged_by_its_index(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    folder = find_model(REPO)
    fresh = tmp_path / "copied"  # as left by a huggingface_hub that kept no listing
    (fresh / f"models--{REPO.replace('/', '--')}" / "snapshots").mkdir(parents=True)
    copy = fresh / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT
    copy.mkdir()
    for name, body in contents(folder).items():
        (copy / name).write_bytes(body)
    assert hub.requests
    unreachable(monkeypatch)
    assert find_model(REPO, cache_dir=fresh, revision=COMMIT) == copy
    (copy / lost).unlink()
    with refused(Fault, "no complete copy", "run again with network access"):
        find_model(REPO, cache_dir=fresh, revision=COMMIT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(ModelNotFoundError, lost, "run again with network access"):
        find_model(REPO, cache_dir=fresh, revision=COMMIT)


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable(monkeypatch)
    with refused(Fault, f"cannot reach {NOWHERE}", REPO, "run again with network access"):
        find_model(REPO)


def test_a_silent_hub_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
    hub.trouble("GET", "info", repeat(Silence()))
    with refused(Fault, hub.endpoint, REPO, "no answer in time"):
        find_model(REPO)


def test_a_download_that_stalls_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.trouble("GET", SHARD, repeat(Silence()))
    with refused(Fault, hub.endpoint, REPO, "no answer in time", "run again"):
        find_model(REPO)


# --- refusals of the hub ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "token", "kind", "says"),
    [
        (Status(404, "RepoNotFound"), None, ModelNotFoundError, ["no repository", "auth login"]),
        (Status(404, "RepoNotFound"), "t", ModelNotFoundError, ["no repository", "a token that may read it"]),
        (Status(401), None, ModelNotFoundError, ["no repository", "auth login"]),
        (Status(401, "GatedRepo"), None, ModelNotFoundError, ["gated", "ask for access", "auth login"]),
        (Status(403, "GatedRepo"), "t", ModelNotFoundError, ["this token has no access", "ask for access"]),
        (
            Status(401, message="Invalid credentials in Authorization header"),
            "t",
            ModelNotFoundError,
            ["token was rejected", "auth login"],
        ),
        (
            Status(403, message="Access to this resource is disabled."),
            None,
            ModelNotFoundError,
            ["disabled", "another"],
        ),
        (Status(403), "t", ModelNotFoundError, ["no permission", "token"]),
        (Status(429), None, Fault, ["too many requests", "wait"]),
        (Status(500), None, Fault, ["answered 500", "try later"]),
        (Status(503), None, Fault, ["answered 503", "try later"]),
        (Status(404), None, Fault, ["answered 404"]),
    ],
)
def test_a_refusal_is_explained(
    hub: Hub, status: Status, token: str | None, kind: type[StrataError], says: list[str]
) -> None:
    hub.trouble("GET", "info", repeat(status))
    with refused(kind, REPO, *says):
        find_model(REPO, token=token)
    assert hub.fetched() == []


def test_an_unknown_repository_is_named(hub: Hub) -> None:
    with refused(ModelNotFoundError, "no repository owner/typo", hub.endpoint):
        find_model("owner/typo")


def test_an_unknown_revision_is_named(hub: Hub) -> None:
    find_model(REPO)
    with refused(ModelNotFoundError, "no revision 'v9'", REPO, hub.endpoint):
        find_model(REPO, revision="v9")


@pytest.mark.parametrize(
    ("method", "target", "status", "kind", "says"),
    [
        ("GET", "tree", Status(500), Fault, "answered 500"),
        ("HEAD", SHARD, Status(403, "GatedRepo"), ModelNotFoundError, "gated"),
        ("HEAD", SHARD, Status(503), Fault, "answered 503"),
        ("GET", SHARD, Status(403), ModelNotFoundError, "no permission"),
        ("GET", SHARD, Status(500), Fault, "answered 500"),
        ("GET", SHARD, Status(404, "EntryNotFound"), Fault, "answered 404"),
    ],
)
def test_a_refusal_in_the_middle_is_explained(
    hub: Hub, method: str, target: str, status: Status, kind: type[StrataError], says: str
) -> None:
    hub.trouble(method, target, repeat(status))
    with refused(kind, REPO, says):
        find_model(REPO)


def test_a_passing_server_error_is_survived(hub: Hub) -> None:
    hub.trouble("GET", "tree", [Status(503)])
    hub.trouble("HEAD", SHARD, [Status(502)])
    assert contents(find_model(REPO)) == NEEDED


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tiny.gguf": b"GGUF", "config.json": b"{}"}, "no *.safetensors"),
        ({"consolidated.safetensors": b"", "params.json": b""}, "no config.json"),
        ({"model.safetensors": b"large"}, "no config.json"),
    ],
)
def test_a_repository_of_another_kind_is_refused_before_the_download(
    hub: Hub, files: dict[str, bytes], says: str
) -> None:
    hub.files = files
    with refused(ModelNotFoundError, REPO, hub.endpoint, says, "choose a repository"):
        find_model(REPO)
    assert hub.fetched() == []


def test_a_server_that_is_no_hub_is_recognised(hub: Hub) -> None:
    hub.trouble("GET", "info", repeat(Replace(b"<html>Please log in to this network</html>")))
    with refused(Fault, "no hub answers", hub.endpoint, REPO, "HF_ENDPOINT"):
        find_model(REPO)


# --- disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [ENOSPC, EDQUOT])
def test_a_full_disk_is_a_fault(hub: Hub, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with refused(Fault, REPO, "no space left", constants.HF_HUB_CACHE):
        find_model(REPO)
    assert hub.requests


def test_a_cache_that_cannot_be_a_folder_is_a_fault(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(Fault, REPO, str(tmp_path / "file"), "cannot use the cache"):
        find_model(REPO, cache_dir=tmp_path / "file" / "cache")
    assert hub.requests


def test_a_read_only_cache_serves_what_it_has_and_takes_nothing(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = find_model(REPO, cache_dir=cache)
    locked = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    try:
        for path in locked:
            path.chmod(0o555)
        if os.access(cache, os.W_OK):
            pytest.skip("this user may write anywhere")
        assert find_model(REPO, cache_dir=cache) == folder
        hub.refs["main"] = "b" * 40
        with refused(Fault, REPO, "Permission denied", "writable"):
            find_model(REPO, cache_dir=cache)
    finally:
        for path in locked:
            path.chmod(0o755)


# --- a process of its own --------------------------------------------------------------------------------


def test_the_environment_alone_configures_everything(hub: Hub, tmp_path: Path) -> None:
    def run(**settings: str) -> subprocess.CompletedProcess[str]:
        code = f"from strata_mlx.hub import find_model; print(find_model({REPO!r}, progress=False))"
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "DO_NOT_TRACK": "1", **settings},
            cwd=Path(finder.__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )

    online = run(HF_TOKEN="hf_env")
    folder = Path(online.stdout.strip())
    assert folder.is_relative_to(tmp_path / "hf"), online.stderr
    assert contents(folder) == NEEDED
    assert {r.authorization for r in hub.requests} == {"Bearer hf_env"}
    hub.requests.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == online.stdout
    assert hub.requests == []

"""What ranks say to each other, and how they notice that one has another opinion or is gone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_mlx.errors import Fault, InputError
from strata_mlx.parallel import channel
from strata_mlx.parallel import ranks as ranks_module
from strata_mlx.parallel.channel import Peer
from strata_mlx.parallel.ranks import Ranks, expert_parallel


class Group:
    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Left(BaseException):
    """A process would have ended here."""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The codes that processes would have ended with."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr(ranks_module, "_leave", leave)
    monkeypatch.setattr(ranks_module, "_GRACE", 0.0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield codes
    for ranks in _MADE:  # whose threads outlive the test
        ranks._ended = True


_MADE: list[Ranks] = []


def made(rank: int, connection: socket.socket, timeout: float) -> Ranks:
    """Rank 0 or 1 of two, in this process."""
    peer = Peer(1 - rank, f"rank {1 - rank}", _tcp(connection), timeout)
    _MADE.append(Ranks(Group(rank, 2), [peer], timeout))  # type: ignore[arg-type]
    return _MADE[-1]


def pair(timeout: float = 30.0) -> tuple[Ranks, Ranks]:
    ours, theirs = socket.socketpair()
    return made(0, ours, timeout), made(1, theirs, timeout)


def _tcp(one: socket.socket) -> Any:
    """A socket pair is not TCP, and has nothing to delay."""

    class Pretending:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: None) if name == "setsockopt" else getattr(one, name)

    return Pretending()


def together(*calls: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_hear_what_rank_0_says_and_what_each_says() -> None:
    first, second = pair()
    assert together(lambda: first.broadcast({"a": [1.5, None]}), second.broadcast) == [{"a": [1.5, None]}] * 2
    assert together(lambda: first.exchange(3), lambda: second.exchange("x")) == [[3, "x"]] * 2
    assert together(first.close, second.close) == [None, None]


def test_ranks_that_chose_other_experts_are_told_so_at_the_end() -> None:
    first, second = pair()
    for rank, chosen in ((first, [1, 2]), (second, [1, 3])):
        rank.compare(np.array(chosen))
    for error in together(first.close, second.close):
        assert isinstance(error, Fault)
        assert "rank 1 has not chosen the same experts" in str(error)


def test_ranks_that_chose_other_experts_are_told_so_on_the_way(
    left: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_EVERY", 1)
    first, second = pair(timeout=5)
    first.compare(np.array([1]))
    second.compare(np.array([2]))
    _wait_for(lambda: len(left) >= 2)
    assert "rank 1 has not chosen the same experts as rank 0" in capsys.readouterr().err


def test_a_silent_rank_is_lost(left: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    made(0, ours, 0.2)
    _wait_for(lambda: left == [1])
    assert "error: rank 1 has been silent for 0.2 s; this run needs all 2 ranks" in capsys.readouterr().err
    theirs.close()


def test_a_rank_that_hangs_at_a_layer_ends_the_run(
    left: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_PATIENCE", 0.1)
    first, _second = pair(timeout=5)
    with first.layer():
        _wait_for(lambda: len(left) >= 2)
    assert "has been at one layer for more than 0.5 s" in capsys.readouterr().err


def test_an_error_at_a_layer_ends_the_run(left: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    first, _second = pair()
    with pytest.raises(Left), first.layer():
        raise Fault("the disk\nhas gone")
    _wait_for(lambda: len(left) >= 2)
    assert capsys.readouterr().err == 2 * "error: rank 0 has failed: the disk has gone\n"


def test_one_process_is_a_rank_alone() -> None:
    with expert_parallel() as ranks:
        assert (ranks.rank, ranks.size, ranks.leads) == (0, 1, True)
        assert ranks.exchange(5) == [5]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(InputError, match="must be positive"), expert_parallel(timeout):
        pass


def test_a_stranger_is_turned_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for hello in (b'{"secret": "guessed", "rank": 1, "name": "x"}\n', b"GET / HTTP/1.1\n", b"[]\n", b""):
            stranger = socket.create_connection(listening.getsockname())
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            assert channel._accept(listening, "secret", 1.0) is None
            stranger.close()
        known = socket.create_connection(listening.getsockname())
        known.sendall(b'{"secret": "secret", "rank": 3, "name": "x"}\n')
        peer = channel._accept(listening, "secret", 1.0)
        assert peer is not None
        assert peer.rank == 3
        known.close()
        peer.close()


def test_rank_0_is_where_mlx_launch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    assert channel.own_address() == socket.gethostname()
    monkeypatch.setenv("NCCL_HOST_IP", "10.0.0.3")
    assert channel.own_address() == "10.0.0.3"
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "10.0.0.2:5000")
    assert channel.own_address() == "10.0.0.2"
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.9:5001"]]))
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    assert channel.own_address() == "10.0.0.1"


def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it has not come")

"""Servers around an engine that follows a script."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx.server.serving import Generates, Settings

from .scripted import ScriptedEngine, make_tokenizer, serving

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    """With a chat template, thinking and tools."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    """Without any of these, as the embedded model's."""
    return make_tokenizer(tmp_path_factory.mktemp("plain"), template=None)


@pytest.fixture(scope="module")
def shared(tokenizer: TokenizerWrapper) -> Iterator[tuple[ScriptedEngine, str]]:
    """An engine with a server around it, which starting takes longer than most tests."""
    engine = ScriptedEngine()
    with serving(engine, Settings(tokenizer, names=("tiny",))) as url:
        yield engine, url


@pytest.fixture
def engine(shared: tuple[ScriptedEngine, str]) -> ScriptedEngine:
    """As new."""
    shared[0].reset()
    return shared[0]


@pytest.fixture
def url(shared: tuple[ScriptedEngine, str]) -> str:
    """Of the server around the engine."""
    return shared[1]


@pytest.fixture
def serve(tokenizer: TokenizerWrapper) -> Iterator[Serve]:
    """Start another server, with the given engine and settings, and return its address."""
    with ExitStack() as stack:

        def start(engine: Generates, **settings: Any) -> str:
            return stack.enter_context(
                serving(engine, Settings(**{"tokenizer": tokenizer, "names": ("tiny",), **settings}))
            )

        yield start

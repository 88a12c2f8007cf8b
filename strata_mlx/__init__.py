"""Run mixture-of-experts language models that are bigger than memory, on MLX.

from strata_mlx import load, generate

model, tokenizer = load()  # the embedded model; or a folder, or a Hugging Face repository
print(generate(model, tokenizer, prompt="class Stack:", max_tokens=100))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import CheckpointError, Fault, InputError, ModelNotFoundError, StrataError

if TYPE_CHECKING:
    from .engine import GenerationResponse, generate, stream_generate
    from .loading import load
    from .speculation.decoder import SpeculativeDecoder
    from .speculation.retention import RetentionPolicy

# Most of these need MLX, which takes most of a second to import: not for --help, --version or a wrong option.
_LAZY = {
    "GenerationResponse": "engine",
    "RetentionPolicy": "speculation.retention",
    "SpeculativeDecoder": "speculation.decoder",
    "generate": "engine",
    "load": "loading",
    "stream_generate": "engine",
}

__all__ = [
    "CheckpointError",
    "Fault",
    "GenerationResponse",
    "InputError",
    "ModelNotFoundError",
    "RetentionPolicy",
    "SpeculativeDecoder",
    "StrataError",
    "__version__",
    "generate",
    "load",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

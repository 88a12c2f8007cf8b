"""Run mixture-of-experts language models that are bigger than memory, on MLX.

from strata_mlx import load, generate

model, tokenizer = load()  # the embedded model; or a folder, or a Hugging Face repository
print(generate(model, tokenizer, prompt="class Stack:", max_tokens=100))
"""

import os
import sys
from typing import TYPE_CHECKING

from ._lazy import lazy
from ._version import __version__
from .errors import CheckpointError, Fault, InputError, ModelNotFoundError, StrataError

if TYPE_CHECKING:
    from .engine import GenerationResponse, generate, stream_generate
    from .loading import load
    from .models.moe import set_routing
    from .parallel import Ranks, expert_parallel
    from .policy import Policy
    from .routing import Residency, Routing, RoutingPolicy
    from .speculation.decoder import SpeculativeDecoder
    from .speculation.retention import RetentionPolicy

# Launches that MLX hands to a CUDA device together; it reads this once, when its first stream is made. Its own 100 are
# all of a small step, which the device awaits idle: on an H200, 20 to 40 made rounds of speculation 1.2 to 1.5 times as
# fast.
if sys.platform != "darwin":
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "30")

__all__ = [
    "CheckpointError",
    "Fault",
    "GenerationResponse",
    "InputError",
    "ModelNotFoundError",
    "Policy",
    "Ranks",
    "Residency",
    "RetentionPolicy",
    "Routing",
    "RoutingPolicy",
    "SpeculativeDecoder",
    "StrataError",
    "__version__",
    "expert_parallel",
    "generate",
    "load",
    "set_routing",
    "stream_generate",
]

__getattr__ = lazy(
    __name__,
    {
        "GenerationResponse": "engine",
        "Policy": "policy",
        "Ranks": "parallel",
        "Residency": "routing",
        "RetentionPolicy": "speculation.retention",
        "Routing": "routing",
        "RoutingPolicy": "routing",
        "SpeculativeDecoder": "speculation.decoder",
        "expert_parallel": "parallel",
        "generate": "engine",
        "load": "loading",
        "set_routing": "models.moe",
        "stream_generate": "engine",
    },
)


def __dir__() -> list[str]:
    return __all__

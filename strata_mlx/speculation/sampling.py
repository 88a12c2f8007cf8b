"""Sampling whose distribution is known, so that drafts can be drawn and accepted by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from .acceptance import sampling_logprobs

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [1, V] to a token [1]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens [N], logits [1, V] to logits [1, V]


@dataclass(frozen=True)
class Sampling:
    """The settings of mlx_lm.sample_utils.make_sampler, as a sampler of the same draws.

    temp: temperature; 0 always takes the likeliest token. top_p, min_p, min_tokens_to_keep, top_k: what is cut off, see
    sampling_logprobs().
    """

    temp: float = 1.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Tokens ``[...]`` for log-probabilities ``[..., V]``."""
        return make_sampler(**asdict(self))(logprobs)

    def logprobs(self, logits: mx.array) -> mx.array:
        """The distribution that tokens are drawn from: float32 ``[..., V]`` for logits of that shape."""
        return sampling_logprobs(logits, **asdict(self))

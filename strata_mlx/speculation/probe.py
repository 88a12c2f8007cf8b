"""Which hidden states of the trunk an MTP head was trained on: no tensor says it, but the acceptance does."""

from __future__ import annotations

import argparse
import inspect
from pydoc_data.topics import topics

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..device import evaluate, integer
from ..errors import InputError
from ..models.trunk import Hidden, Trunk
from ..prefill import make_cache

_TOKENS = 512  # of each text


def probe_hidden(model: nn.Module, tokenizer: TokenizerWrapper) -> dict[str, float]:
    """The share of positions where the head's draft is the trunk's own next token, by what hidden states it is given:
    those "before" or "after" the final norm. Measured on a page of Python and one of English.

    Raises InputError for a model that was loaded without its head.
    """
    if "mtp" not in model:
        raise InputError("the model was loaded without an MTP head; load it with mtp=True")
    trunk, agreed, positions = Trunk(model), dict.fromkeys(Hidden._fields, 0), 0
    for text in (inspect.getsource(argparse), topics["exceptions"]):
        tokens = mx.array(tokenizer.encode(text[: 8 * _TOKENS])[:_TOKENS])[None]
        hidden = trunk(tokens[:, :-1], make_cache(model))
        expected = mx.argmax(trunk.logits(hidden.after), axis=-1)[:, 1:]
        embedding = trunk.embed(tokens[:, 1:-1])
        for kind, states in hidden._asdict().items():
            drafts = mx.argmax(trunk.logits(model.mtp(embedding, states[:, :-1])), axis=-1)
            same = (drafts == expected).sum()
            evaluate(same, "measuring the MTP head")
            agreed[kind] += integer(same)
        positions += expected.size
    return {kind: count / positions for kind, count in agreed.items()}

"""A request that is the only one, and may draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..speculation.decoder import SpeculativeDecoder
from ..speculation.record import Round
from .prefixes import Head, Prefixes
from .reading import Reading
from .sequences import PENALISED


class Alone:
    """Decodes the sequence of ``reading``, whose drafter has read the prompt, with SpeculativeDecoder.

    options: of SpeculativeDecoder, for drafts. on_round: told every round.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        reading: Reading,
        prefixes: Prefixes,
        options: dict[str, Any],
        on_round: Callable[[Round], object],
    ):
        sequence = self.sequence = reading.sequence
        reading.finish()
        assert reading.drafter is not None
        self._drafter, self._prefixes = reading.drafter, prefixes
        before = mx.array(sequence.context[-PENALISED:])

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            return sequence.process(mx.concatenate([before, tokens.astype(mx.int32)]), logits)

        def record(latest: Round) -> None:
            sequence.round(latest)
            on_round(latest)

        self._decoder = SpeculativeDecoder(
            model,
            tokenizer,
            prompt=[sequence.last],
            max_tokens=sequence.limit,
            sampler=sequence.sampling,
            logits_processors=[process] if sequence.processors else [],
            drafter=self._drafter,
            prompt_cache=reading.cache,
            on_round=record,
            **options,
        )
        sequence.phase, sequence.alone = "decoding", True

    def step(self) -> int:
        """Give the next token, and keep what was read when that was the last one. Returns the tokens given.

        Raises Fault where a forward fails: the sequence cannot go on then.
        """
        token = next(self._decoder)
        if self.sequence.accept(token.token, token.logprobs):
            cache = self.leave()
            self._prefixes.keep(self.sequence.context, cache, self._head())
        return 1

    def leave(self) -> list[Any]:
        """Stop, and return the caches of all tokens but the last."""
        self._decoder.close()
        self.sequence.alone = False
        return self._decoder.cache

    def _head(self) -> Head | None:
        """What the drafter has seen, less the last token, with which the text need not go on in the next prompt; None
        where that cannot be taken back.
        """
        self._drafter.catch_up()
        if not all(layer.is_trimmable() for layer in self._drafter.cache):
            return None
        ahead = sum(latest.committed for latest in self._decoder.rounds) - len(self.sequence.tokens)
        for layer in self._drafter.cache:
            layer.trim(1 + ahead)
        return Head(self._drafter.cache, None)

"""The draft head of the Qwen families as a few graphs, so that a chain of drafts costs the host little."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..device import evaluate
from ..kernels import Build
from ..models.mtp import DraftHead, MTPHead
from ..models.trunk import Trunk
from .matrix import Matrix, Norm, matrix_of
from .mixers import Arrays, compiled
from .project import MAX_ROWS, project


class FusedHead(MTPHead):
    """Takes over a draft head, parameters and their names included, but for prompts, which go its own way.

    Its drafts are those of its own way up to rounding: the norms are not rounded before they are projected. Its input
    projection is a copy of the head's as that is when it is made.
    """

    def __init__(self, head: MTPHead, inputs: tuple[Matrix, Matrix], trunk: Trunk, build: Build | None):
        self.__dict__.update(head.__dict__)
        dict.update(self, head)
        of_embedding, of_hidden = inputs
        norms = Norm.of(head.pre_fc_norm_embedding), Norm.of(head.pre_fc_norm_hidden)

        def enter(tokens: mx.array, hidden: mx.array) -> Arrays:
            x = project(hidden, [of_hidden], norm=norms[1], dtype=mx.float32, build=build)
            embedding = trunk.embed(tokens)
            return [project(embedding, [of_embedding], norm=norms[0], residual=x, dtype=hidden.dtype, build=build)]

        self._enter = compiled(enter, build)
        self._leave = compiled(lambda hidden: [*head.likeliest(trunk, hidden)], build)

    @classmethod
    def of(cls, head: DraftHead, trunk: Trunk, build: Build | None) -> FusedHead | None:
        """None for another family's, or where the kernels do not take its input projection."""
        if type(head) is not MTPHead:
            return None
        whole, width = matrix_of(head.fc), head.pre_fc_norm_hidden.weight.size
        if whole is None or width % whole.group or width % whole.span:
            return None
        halves = whole.columns(0, width), whole.columns(width, 2 * width)
        # A graph that is compiled would make again, at every call, what has not been computed yet.
        evaluate([half.arrays for half in halves], "splitting the input projection of the draft head")
        return cls(head, halves, trunk, build)

    def read(
        self, trunk: Trunk, tokens: mx.array, hidden: mx.array, cache: list[Any] | None = None, head: int = 0
    ) -> mx.array:
        if tokens.size > MAX_ROWS:
            return super().read(trunk, tokens, hidden, cache, head)
        return self._through(self._enter(tokens, hidden)[0], cache)

    def likeliest(self, trunk: Trunk, hidden: mx.array, head: int = 0) -> tuple[mx.array, mx.array]:  # noqa: ARG002
        token, confidence = self._leave(hidden)
        return token, confidence

"""What a model drafts, accepts and routes at every position of some texts: enough to replay any policy on them.

A file is NumPy's .npz: ``header``, JSON as uint8, and for document i the arrays of a Document as ``i/field``.

    {"format": "strata-mlx recording", "version": 1, "model": {"name": ..., "sha256": ...}, "documents": [names],
     "steps": K, "top_k": k, "experts": E, "layers": [0, 1, ...], "head_layers": [8], "device": "cpu",
     "dtype": "float32", "versions": {"mlx": ...}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..device import compute_dtype_of, evaluate, integer
from ..errors import Fault, InputError, in_one_line
from ..models.family import text_args
from ..models.moe import blocks
from ..models.trunk import Hidden, Trunk
from ..prefill import check_tokens, make_cache
from ..routing import Routing, verify_window
from ..speculation.draft import MAX_STEPS, MTPDrafter
from ..speculation.window import Window, check_rollback

FORMAT, VERSION = "strata-mlx recording", 1
STEPS = MAX_STEPS - 1  # drafts of a window of 8 rows
_PREFILL_ROWS = 512

Ids = NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt of P tokens and the greedy text after it, N + 1 tokens. At position t, from 0 to N - 1, the last
    committed token is ``tokens[P + t]``, and draft j stands for ``tokens[P + t + 1 + j]``.

    Ids are of experts, uint16, in the order of the router's choice. L are the trunk's MoE layers, H the head's.

    name: what it is. tokens: int32 ``[P + N + 1]``. p: float32 ``[N, K]``, the head's confidence in each draft of the
    full chain. agree: bool ``[N, K]``, whether a draft is the text's token at its place; false beyond the end.
    experts: ``[N, 1 + K, L, k]`` of each row of the window that verifies the full chain; row 0 is the last committed
    token. prompt_experts: ``[P, L, k]``. head_experts: ``[N, H, k]`` of the head's row for the last committed token.
    chain_experts: ``[N, K - 1, H, k]`` of its rows for drafts 0 to K - 2, from which the next one is made.
    head_prompt_experts: ``[P - 1, H, k]`` of its rows for the prompt's tokens, from the second on.
    """

    name: str
    tokens: NDArray[np.int32]
    p: NDArray[np.float32]
    agree: NDArray[np.bool_]
    experts: Ids
    prompt_experts: Ids
    head_experts: Ids
    chain_experts: Ids
    head_prompt_experts: Ids

    @property
    def prompt(self) -> int:
        """P."""
        return len(self.prompt_experts)

    @property
    def positions(self) -> int:
        """N."""
        return len(self.p)


_ARRAYS = [field.name for field in fields(Document) if field.name != "name"]


@dataclass(frozen=True)
class Header:
    """steps: K. layers, head_layers: indices of the MoE layers of trunk and head. model: from fingerprint()."""

    model: dict[str, str]
    steps: int
    top_k: int
    experts: int
    layers: tuple[int, ...]
    head_layers: tuple[int, ...]
    device: str
    dtype: str
    versions: dict[str, str]


@dataclass(frozen=True, eq=False)
class Recording:
    """Documents of one model."""

    header: Header
    documents: tuple[Document, ...]

    @property
    def positions(self) -> int:
        """Of all documents."""
        return sum(document.positions for document in self.documents)

    def of(self, documents: Sequence[int]) -> Recording:
        """The documents with these numbers alone."""
        return Recording(self.header, tuple(self.documents[i] for i in documents))

    def check_model(self, model: nn.Module) -> None:
        """Raise InputError unless it was made with ``model``, in whatever type that computes."""
        found = fingerprint(model)
        if self.header.model != found:
            raise InputError(
                f"the recording is of another model ({self.header.model['name']}, {self.header.model['sha256'][:12]}), "
                f"not of this one ({found['name']}, {found['sha256'][:12]}): record again"
            )

    def save(self, path: Path) -> None:
        """Write the file; it appears complete or stays as it was. Raises Fault where that fails."""
        names = [document.name for document in self.documents]
        header = {"format": FORMAT, "version": VERSION, **asdict(self.header), "documents": names}
        arrays = {
            f"{i}/{name}": getattr(document, name) for i, document in enumerate(self.documents) for name in _ARRAYS
        }
        unfinished = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
        try:
            with unfinished.open("wb") as file:
                np.savez_compressed(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise Fault(f"{path}: the recording cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file. Raises InputError that names it, for one that is broken or of another version."""
        try:
            with np.load(path, allow_pickle=False) as file:
                stored = {name: file[name] for name in file.files}
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        except Exception as error:  # zipfile, zlib and NumPy raise all kinds for a broken file
            raise InputError(f"{path}: not a recording ({in_one_line(error)})") from error
        header, names = _read_header(path, stored)
        documents = []
        for i, name in enumerate(names):
            try:
                document = Document(name, **{field: stored[f"{i}/{field}"] for field in _ARRAYS})
            except KeyError as error:
                raise InputError(f"{path}: document {i} has no array {error}; record again") from None
            _check(path, i, document, header)
            documents.append(document)
        return cls(header, tuple(documents))


def fingerprint(model: nn.Module, head: bool = True) -> dict[str, str]:
    """What tells a model from others, whatever it computes in: its family, and a digest of its configuration and of
    some of its weights. head: whether those of an MTP head that was loaded count.
    """
    config = {name: repr(value) for name, value in sorted(vars(text_args(model)).items())}
    digest = hashlib.sha256(json.dumps(config).encode())
    for norm in (Trunk(model).norm, *([model.mtp.norm] if head and "mtp" in model else [])):
        digest.update(np.array(norm.weight.astype(mx.float32)).tobytes())
    return {"name": str(model.model_type), "sha256": digest.hexdigest()}


def record(
    model: nn.Module,
    tokenizer: Any,
    prompts: Iterable[Sequence[int]],
    tokens: int,
    *,
    names: Sequence[str] | None = None,
    steps: int = STEPS,
    report: Callable[[], object] = lambda: None,
) -> Recording:
    """Decode ``tokens`` tokens after each prompt greedily, and record what a full round would do at each of them.

    Every position costs a window of ``1 + steps`` rows, of which one is kept. Routing is exact while this runs.

    Args:
        model: from load(), with ``mtp=True``. It may stream its experts.
        tokenizer: its end-of-sequence tokens end a text. None: nothing but ``tokens`` does.
        prompts: token ids, at least two each. One whose text ends at its first token is left out.
        tokens: of each text, at least two.
        names: of the documents; numbers where there are none.
        steps: drafts of a chain, 1 to MAX_STEPS.
        report: called after each position, ``tokens - 1`` times for each prompt whose text is not cut short.

    Raises:
        InputError: numbers out of range, a prompt that cannot be used, a model without a head or whose caches cannot be
            rolled back.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise InputError(f"steps is {steps}, expected 1 to {MAX_STEPS}")
    if tokens < 2:
        raise InputError(f"tokens is {tokens}: a recording needs texts of at least 2")
    layers = sorted(block.layer for block in blocks(model))
    if "mtp" in model and model.mtp.heads > 1 and max(layers) >= len(Trunk(model).layers):
        raise InputError("a recording has room for one MTP head with experts, and this model has several")
    trunk_layers = len(Trunk(model).layers)
    args = text_args(model)
    header = Header(
        fingerprint(model),
        steps,
        args.num_experts_per_tok,
        args.num_experts,
        tuple(layer for layer in layers if layer < trunk_layers),
        tuple(layer for layer in layers if layer >= trunk_layers),
        mx.default_device().type.name,
        compute_dtype_of(model),
        {name: version(name) for name in ("mlx", "mlx-lm")},
    )
    stops = frozenset(tokenizer.eos_token_ids if tokenizer else ())
    notes = _Notes(header.top_k)
    before = [block.routing for block in blocks(model)]
    try:
        for block in blocks(model):
            block.routing = Routing(observer=notes)
        documents = []
        for number, prompt in enumerate(prompts):
            name = names[number] if names else str(number)
            text = _Text(model, header, notes, list(prompt), stops)
            text.write(tokens, report)
            if text.positions:
                documents.append(text.document(name))
    finally:
        for block, routing in zip(blocks(model), before, strict=True):
            block.routing = routing
    return Recording(header, tuple(documents))


class _Notes:
    """What the layers select, call after call."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._calls: dict[int, list[mx.array]] = {}

    def __call__(self, layer: int, ids: mx.array) -> None:
        self._calls.setdefault(layer, []).append(ids)

    def take(self, layers: Sequence[int], rows_without: int = 0) -> Ids:
        """Of all rows since the last call, ``[T, len(layers), k]``. rows_without: T, where there are no layers."""
        if not layers:
            return np.zeros((rows_without, 0, self._top_k), np.uint16)
        calls = [self._calls.pop(layer) for layer in layers]
        evaluate(calls, "recording experts")
        rows = [np.concatenate([np.array(ids).reshape(-1, ids.shape[-1]) for ids in each]) for each in calls]
        return np.stack(rows, axis=1).astype(np.uint16)


class _Text:
    """One document in the making."""

    def __init__(self, model: nn.Module, header: Header, notes: _Notes, prompt: list[int], stops: frozenset[int]):
        if len(prompt) < 2:
            raise InputError("a prompt to record must have at least two tokens")
        check_tokens(mx.array(prompt), model)
        self._header, self._notes, self._stops, self._prompt = header, notes, stops, len(prompt)
        self._cache = make_cache(model)
        check_rollback(self._cache)
        self._trunk, self._drafter = Trunk(model), MTPDrafter(model)
        self._tokens, self._p, self._drafts = list(prompt), list[list[float]](), list[list[int]]()
        self._head_prompt, self._rows = list[Ids](), list[Ids]()
        self._windows, self._head, self._chain = list[Ids](), list[Ids](), list[Ids]()

    @property
    def positions(self) -> int:
        return len(self._p)

    def write(self, tokens: int, report: Callable[[], object]) -> None:
        """Read the prompt, write up to ``tokens`` tokens, and note everything."""
        *prompt, last = self._tokens
        for start in range(0, len(prompt), _PREFILL_ROWS):
            chunk = prompt[start : start + _PREFILL_ROWS]
            hidden = self._trunk(mx.array([chunk]), self._cache)
            self._drafter.observe(mx.array(self._tokens[start + 1 : start + 1 + len(chunk)], mx.uint32), hidden)
            evaluate([[layer.state for layer in self._cache], self._drafter.catch_up()], "reading a prompt")
            self._rows.append(self._notes.take(self._header.layers))
            self._head_prompt.append(self._notes.take(self._header.head_layers, len(chunk)))
            mx.clear_cache()
        hidden = self._window([last])
        self._rows.append(self._notes.take(self._header.layers))
        for _ in range(tokens - 1):
            if self._tokens[-1] in self._stops:
                return
            hidden = self._position(hidden)
            report()

    def _position(self, hidden: Hidden) -> Hidden:
        """A full round at the last token: hidden state before it to that of it. The window gives the next token."""
        self._drafter.observe(mx.array(self._tokens[-1:], mx.uint32), hidden)
        chain = list(islice(self._drafter.steps(), self._header.steps))
        evaluate([(step.token, step.confidence) for step in chain], "drafting")
        head = self._notes.take(self._header.head_layers, len(chain))
        self._head.append(head[:1])
        self._chain.append(head[None, 1:])
        drafts = [integer(step.token) for step in chain]
        self._p.append([float(np.array(step.confidence)) for step in chain])
        self._drafts.append(drafts)
        hidden = self._window([self._tokens[-1], *drafts])
        self._windows.append(self._notes.take(self._header.layers)[None])
        return hidden

    def _window(self, tokens: list[int]) -> Hidden:
        """Run ``tokens``, keep the first and append the token after it."""
        window = Window(self._cache, len(tokens))
        with verify_window():
            hidden = self._trunk(mx.array([tokens], mx.uint32), window.layers)
        best = mx.argmax(self._trunk.logits(hidden.after)[0, 0])
        # As in a round that keeps one token: the states are replayed at once, not when the next window needs them.
        window.commit(1)
        hidden = hidden.first(1)
        evaluate([best, hidden, [layer.state for layer in self._cache]], "recording a window")
        self._tokens.append(integer(best))
        return hidden

    def document(self, name: str) -> Document:
        tokens = np.array(self._tokens, np.int32)
        drafts = np.array(self._drafts, np.int32)
        place = self._prompt + 1 + np.arange(len(drafts))[:, None] + np.arange(self._header.steps)
        text = np.where(place < len(tokens), tokens[np.minimum(place, len(tokens) - 1)], -1)
        return Document(
            name,
            tokens,
            np.array(self._p, np.float32),
            drafts == text,
            np.concatenate(self._windows),
            np.concatenate(self._rows),
            np.concatenate(self._head),
            np.concatenate(self._chain),
            np.concatenate(self._head_prompt),
        )


def _read_header(path: Path, stored: dict[str, NDArray[Any]]) -> tuple[Header, list[str]]:
    try:
        value: Any = json.loads(stored["header"].tobytes())
    except (KeyError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise InputError(f"{path}: not a recording")
    if value.get("version") != VERSION:
        raise InputError(f"{path}: has version {value.get('version')!r}, this program reads {VERSION}: record again")
    try:
        names = value["documents"]
        header = Header(**{field.name: value[field.name] for field in fields(Header)})
        layers = [tuple(int(layer) for layer in each) for each in (header.layers, header.head_layers)]
        sizes = (int(header.steps), int(header.top_k), int(header.experts))
        valid = min(sizes) > 0 and {"name", "sha256"} <= header.model.keys() and all(type(n) is str for n in names)
    except (KeyError, TypeError, ValueError, AttributeError):
        valid = False
    if not valid:
        raise InputError(f"{path}: its header is broken; record again")
    return Header(**{**vars(header), "layers": layers[0], "head_layers": layers[1]}), list(names)


def _check(path: Path, number: int, document: Document, header: Header) -> None:
    """Raise InputError for an array of another type or shape than the others say, or an expert that there is not."""
    n, k = document.p.shape[:1], header.steps
    prompt = max(len(document.tokens) - 1 - sum(n), 0)
    trunk, head = (len(header.layers), header.top_k), (len(header.head_layers), header.top_k)
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "tokens": ((prompt + 1 + sum(n),), np.int32),
        "p": ((*n, k), np.float32),
        "agree": ((*n, k), np.bool_),
        "experts": ((*n, 1 + k, *trunk), np.uint16),
        "prompt_experts": ((prompt, *trunk), np.uint16),
        "head_experts": ((*n, *head), np.uint16),
        "chain_experts": ((*n, k - 1, *head), np.uint16),
        "head_prompt_experts": ((prompt - 1, *head), np.uint16),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(document, name)
        if array.shape != shape or array.dtype != dtype or not sum(n):
            raise InputError(
                f"{path}: document {number}: {name} is {array.dtype} {array.shape}, expected "
                f"{np.dtype(dtype).name} {shape}; record again"
            )
        if name.endswith("experts") and array.size and array.max() >= header.experts:
            raise InputError(f"{path}: document {number}: {name} names expert {array.max()} of {header.experts}")

"""How good a model is on text it was not trained on: perplexity, and how often its drafts agree with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from strata_mlx.errors import InputError

from .config import SPECIAL_TOKENS
from .data import load_tokenizer, read_source, source_files
from .model import Model


@dataclass(frozen=True)
class Report:
    """Means over all positions."""

    positions: int
    perplexity: float
    draft_losses: list[float]  # nats, one per chained draft
    agreement: list[float]  # share of positions where that draft is the trunk's own greedy token
    agreement_so_far: list[float]  # ... and so are all drafts before it


def read_text(paths: Sequence[Path]) -> list[str]:
    """The Python files under the given folders, and the given files."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist: name a file or a folder of held-out Python sources")
        files += source_files(path) if path.is_dir() else [path]
    texts = [text for text in map(read_source, files) if text and text.strip()]
    if not texts:
        raise InputError("there is no text to measure on")
    return texts


def windows(texts: Sequence[str], tokenizer: Path, length: int, limit: int) -> Tensor:
    """At most ``limit`` windows of consecutive tokens, evenly spread over the text: [windows, length]."""
    encoder = load_tokenizer(tokenizer)
    end = encoder.token_to_id(SPECIAL_TOKENS[0])
    ids = [token for encoding in encoder.encode_batch(texts) for token in (*encoding.ids, end)]
    count = len(ids) // length
    if count == 0:
        raise InputError(f"the text has {len(ids)} tokens, but one window takes {length}")
    cut = torch.tensor(ids[: count * length]).view(count, length)
    if count > limit:
        cut = cut[torch.linspace(0, count - 1, limit).long()]
    return cut


def measure(model: Model, ids: Tensor, chain: int = 3) -> Report:
    """Perplexity and drafts over windows of tokens. ids: [windows, T + 1 + chain]; one window at a time."""
    next_token: list[Tensor] = []
    draft_losses: list[Tensor] = []
    agreements: list[Tensor] = []
    with torch.no_grad():
        for window in tqdm(ids, desc="measuring", unit="window"):
            row = window[None]
            states, _ = model.hidden_states(row[:, :-1], chain)
            logits = torch.stack([model.lm_head(state)[0] for state in states])  # [1 + chain, T, vocabulary]
            length = logits.shape[1]
            targets = torch.stack([row[0, s + 1 : length + s + 1] for s in range(chain + 1)])
            losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # [1 + chain, T]
            next_token.append(losses[0])
            draft_losses.append(losses[1:])
            greedy = logits.argmax(-1)
            # Row t of draft s and row t + s of the trunk predict the same token.
            rows = length - chain
            agreements.append(torch.stack([greedy[s, :rows] == greedy[0, s : rows + s] for s in range(1, chain + 1)]))
    agreed = torch.cat(agreements, 1)  # [chain, positions]
    return Report(
        positions=ids.shape[0] * (ids.shape[1] - 1 - chain),
        perplexity=torch.cat(next_token).mean().exp().item(),
        draft_losses=torch.cat(draft_losses, 1).mean(1).tolist(),
        agreement=agreed.float().mean(1).tolist(),
        agreement_so_far=agreed.cumprod(0).float().mean(1).tolist(),
    )

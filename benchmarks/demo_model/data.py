"""From installed packages to training data: gather sources, train the tokenizer, write the tokens."""

import hashlib
import os
import site
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from strata_mlx.errors import InputError

from .config import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEPARATOR = "\x00"  # between documents; no Python source can contain it
PACKAGE_FOLDERS = ("site-packages", "dist-packages")

# The packages whose sources measure the model: they must never be trained on.
HELD_OUT = frozenset(
    {
        "mlx",
        "mlx_lm",
        "huggingface_hub",
        "flask",
        "httpx",
        "networkx",
        "rich",
        "starlette",
        "click",
        "invoke",
        "tornado",
    }
)

# The pre-tokenizer's split, the usual one of byte-level BPE with one digit per token.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_DOCUMENTS = 4000  # enough to learn the merges from; more only takes longer
ENCODE_BATCH = 2000


@dataclass
class Gathered:
    """What `gather` found: the kept documents per package, and why the other files were left out."""

    packages: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    characters: int = 0

    @property
    def documents(self) -> int:
        return self.packages.total()


def default_roots() -> list[Path]:
    """The standard library of this Python and its folders of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names] + site.getsitepackages()
    return sorted({Path(folder).resolve() for folder in folders if os.path.isdir(folder)})


def is_held_out(path: Path, names: frozenset[str] = HELD_OUT) -> bool:
    """Whether a file (relative to its root) is of a held-out package, or of a vendored copy of one."""
    top_level_module = len(path.parts) == 1 and path.stem in names
    return top_level_module or not names.isdisjoint(path.parts[:-1])


def source_files(root: Path) -> Iterator[Path]:
    """The ``*.py`` files under a root in a fixed order, without descending into nested package folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in (*PACKAGE_FOLDERS, "__pycache__"))
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def read_source(path: Path) -> str | None:
    """The text with ``\\n`` line ends; None where it is not UTF-8 or not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if SEPARATOR in text else text


def gather(roots: Sequence[Path], output: Path, held_out: frozenset[str] = HELD_OUT) -> Gathered:
    """Write every distinct Python source under the roots to one file, documents separated by NUL.

    Files of held-out packages are left out, and so are copies of them elsewhere. Raises InputError if a root
    is no folder or nothing remains.
    """
    for root in roots:
        if not root.is_dir():
            raise InputError(f"{root} is not a folder of Python packages")
        if root.name in held_out:
            raise InputError(f"{root} is a held-out package: name the folder of packages that it lies in")
    files = [(root, path) for root in roots for path in source_files(root)]
    # Held-out files go first, so that a copy of one under another name counts as already seen.
    files.sort(key=lambda item: not is_held_out(item[1].relative_to(item[0]), held_out))
    gathered, seen = Gathered(), set[bytes]()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as out:
        for root, path in tqdm(files, desc="gathering", unit="file"):
            relative = path.relative_to(root)
            text = read_source(path)
            reason = _reason_to_leave_out(relative, text, seen, held_out)
            if text is None or reason:
                gathered.left_out[reason] += 1
                continue
            out.write(text if gathered.documents == 0 else SEPARATOR + text)
            gathered.packages[_package_of(root, relative)] += 1
            gathered.characters += len(text)
    if gathered.documents == 0:
        partial.unlink()
        raise InputError(f"no Python sources to train on under {', '.join(str(root) for root in roots)}")
    partial.replace(output)
    return gathered


def _reason_to_leave_out(relative: Path, text: str | None, seen: set[bytes], held_out: frozenset[str]) -> str:
    """Why a file is left out, or an empty string. Remembers its contents in ``seen``."""
    if text is None:
        return "not UTF-8 text"
    if not text.strip():
        return "empty"
    digest = hashlib.sha256(text.encode()).digest()
    known = digest in seen
    seen.add(digest)
    if is_held_out(relative, held_out):
        return "held out"
    return "duplicate" if known else ""


def _package_of(root: Path, relative: Path) -> str:
    if root.name not in PACKAGE_FOLDERS:
        return "standard library" if root == Path(sysconfig.get_path("stdlib")).resolve() else root.name
    return relative.parts[0].removesuffix(".py")


def read_documents(path: Path) -> list[str]:
    """The documents of a file that `gather` wrote (or any text file with NUL between documents)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: run `corpus` first, or name another file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    documents = [document for document in text.split(SEPARATOR) if document.strip()]
    if not documents:
        raise InputError(f"{path} holds no text")
    return documents


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> "Tokenizer":
    """A byte-level BPE tokenizer of exactly ``vocab_size`` tokens, the special ones last.

    Raises InputError if the documents do not have enough distinct pairs for that many tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = documents[:: max(1, len(documents) // TOKENIZER_DOCUMENTS)]
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"the corpus gives only {tokenizer.get_vocab_size()} of {vocab_size} tokens: "
            "gather more text, or ask for a smaller --vocab"
        )
    return tokenizer


def load_tokenizer(path: Path) -> "Tokenizer":
    """Read a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise InputError(f"{path} does not exist: run `prepare` first, or name another folder")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path} is not a tokenizer: {error}") from error


def require_same_tokenizer(one: Path, other: Path) -> None:
    """Raise InputError unless both folders' tokenizers give the same ids."""
    if load_tokenizer(one / "tokenizer.json").get_vocab() != load_tokenizer(other / "tokenizer.json").get_vocab():
        raise InputError(
            f"{one} and {other} have different tokenizers: "
            f"run `prepare --tokenizer {other / 'tokenizer.json'}` to write the text in the model's tokens"
        )


def write_tokens(documents: Sequence[str], tokenizer: "Tokenizer", output: Path) -> int:
    """Encode the documents, each followed by ``<|endoftext|>``, as uint16; returns the number of tokens."""
    end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    partial = output.with_name(output.name + ".partial")
    total = 0
    with partial.open("wb") as out, tqdm(total=len(documents), desc="encoding", unit="document") as bar:
        for start in range(0, len(documents), ENCODE_BATCH):
            batch = documents[start : start + ENCODE_BATCH]
            for encoding in tokenizer.encode_batch(batch):
                out.write(np.array([*encoding.ids, end], np.uint16).tobytes())
                total += len(encoding.ids) + 1
            bar.update(len(batch))
    partial.replace(output)
    return total


def prepare(text: Path, folder: Path, vocab_size: int, existing: Path | None = None) -> int:
    """Write ``tokenizer.json`` and ``tokens.bin`` into a folder; returns the number of tokens.

    An ``existing`` tokenizer is used as it is; without one, a new one is learnt from the text.
    """
    documents = read_documents(text)
    tokenizer = load_tokenizer(existing) if existing else train_tokenizer(documents, vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(f"{existing} has {tokenizer.get_vocab_size()} tokens, but the model has {vocab_size}")
    folder.mkdir(parents=True, exist_ok=True)
    total = write_tokens(documents, tokenizer, folder / "tokens.bin")
    tokenizer.save(str(folder / "tokenizer.json"))
    return total


def read_tokens(folder: Path, window: int, vocab_size: int) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """The tokens that `prepare` wrote; raises InputError if one is out of range or they fill no window."""
    path = folder / "tokens.bin"
    if not path.is_file():
        raise InputError(f"{path} does not exist: run `prepare` first, or name another folder")
    tokens = np.fromfile(path, np.uint16)
    if tokens.size < window:
        raise InputError(f"{path} holds {tokens.size} tokens, but one training window takes {window}")
    if (largest := int(tokens.max())) >= vocab_size:
        raise InputError(f"{path} holds token {largest}, but the model has a vocabulary of {vocab_size}")
    return tokens

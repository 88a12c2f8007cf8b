"""Experts on disk under a memory budget."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .disk import DiskSettings
    from .ranges import Field
    from .reads import Reads
    from .store import ExpertStore
    from .streaming import Streaming, streaming_of
    from .traffic import Traffic

__all__ = ["DiskSettings", "ExpertStore", "Field", "Reads", "Streaming", "Traffic", "streaming_of"]

# Lazily, since the models import what streams in them, and the store imports the models.
__getattr__ = lazy(
    __name__,
    {
        "DiskSettings": "disk",
        "ExpertStore": "store",
        "Field": "ranges",
        "Reads": "reads",
        "Streaming": "streaming",
        "Traffic": "traffic",
        "streaming_of": "streaming",
    },
)

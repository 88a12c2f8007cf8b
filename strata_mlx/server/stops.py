"""Stop strings over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first of ``stops``, of which it never gives a part, however the text is cut in pieces.

    The first is the one that is complete first; of two that end at the same place, the longer. met: it, None before.
    """

    def __init__(self, stops: Sequence[str]):
        self.met: str | None = None
        self._stops = stops
        self._held = ""  # the beginning of a stop string, perhaps

    def feed(self, text: str) -> str:
        """The text that may be given now. Nothing follows once a stop string is met."""
        if self.met is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            _, place, self.met = min(found)
            self._held = ""
            return text[:place]
        held = max(_overlap(text, stop) for stop in self._stops)
        given, self._held = text[: len(text) - held], text[len(text) - held :]
        return given

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)

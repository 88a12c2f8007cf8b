"""Speculative decoding: drafting, retention, verification, acceptance, rollback, and what a round is worth."""

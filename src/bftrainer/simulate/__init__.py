"""Replay of a machine's history on a virtual clock, and what it shows."""

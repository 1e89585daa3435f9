"""Simulator: replays a machine's history on a virtual clock, and reports on it."""

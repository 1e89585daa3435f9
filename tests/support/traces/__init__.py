"""Helpers for tests of the log readers."""

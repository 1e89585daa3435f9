"""Helpers for tests of the page."""

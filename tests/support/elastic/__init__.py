"""Helpers for tests of elastic jobs."""

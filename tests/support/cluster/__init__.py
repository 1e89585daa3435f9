"""Helpers for tests of the live system."""

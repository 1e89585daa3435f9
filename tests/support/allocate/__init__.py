"""Helpers for tests of the allocators."""

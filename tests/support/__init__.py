"""Helpers that several tests share; tests import nothing from each other."""

"""Helpers for tests with a Slurm."""

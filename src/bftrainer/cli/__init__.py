"""Command line: one module per command group, and shared helpers."""

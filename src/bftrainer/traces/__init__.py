"""Traces: read from logs, recorded, synthesised, measured and drawn."""

"""Traces: reading from logs, recording, synthesis, statistics and plots."""

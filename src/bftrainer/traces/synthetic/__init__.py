"""Synthetic traces, drawn from profiles of real machines."""

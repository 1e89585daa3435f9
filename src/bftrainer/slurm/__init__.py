"""Slurm site checks tell whether a site suits harvesting idle nodes, and with which settings."""

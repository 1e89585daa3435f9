"""Readers of schedulers' logs: jobs and idle nodes from Slurm, PBS, LSF, SWF and Summit's format."""

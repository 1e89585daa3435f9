"""Recorder: records the idle nodes of a running Slurm as a trace."""

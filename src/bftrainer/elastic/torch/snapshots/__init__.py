"""Snapshot package: writes the state of a training to files, without making the training wait."""

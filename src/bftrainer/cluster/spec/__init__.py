"""Specs describe the trainers that users submit: their keys, files and sweeps, and the states of a trainer."""

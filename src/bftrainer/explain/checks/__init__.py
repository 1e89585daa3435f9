"""Checks of training scripts: each finds lines that BFTrainer refuses, or that do something else than before."""

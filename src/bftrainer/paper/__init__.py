"""The paper's evaluation, run again: one module an experiment, with its run, its table and its figure."""

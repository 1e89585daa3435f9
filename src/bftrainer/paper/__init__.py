"""The paper's evaluation, reproduced: one module per experiment, with its run, its table and its figure."""

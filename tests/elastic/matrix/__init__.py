"""The matrix: training constructs that users write, each run on one, two and three ranks of which one is killed."""

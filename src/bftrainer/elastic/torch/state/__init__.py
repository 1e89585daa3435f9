"""Training-state package: what the state of a training consists of, and how newcomers receive it."""

"""Prepared training: a script keeps its own loop, and BFTrainer works inside its loader, backward pass and step."""

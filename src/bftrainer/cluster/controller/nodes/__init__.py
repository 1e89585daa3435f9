"""Nodes as the controller sees them: their state, and where agents have owners, who may join and serves whom."""

"""The command line: one module a command group, and what they share."""

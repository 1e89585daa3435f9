"""The configuration sets up the live system: its keys, the sources of their values, and the resulting policy."""

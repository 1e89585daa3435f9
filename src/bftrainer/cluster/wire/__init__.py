"""The wire package defines messages between controller, agents and workers, and their TLS encryption."""

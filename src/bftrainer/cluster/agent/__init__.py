"""The agent runs once per node, starts workers there and connects them to the controller."""

"""The store keeps the controller's state and events in one SQLite database."""

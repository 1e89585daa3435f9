"""The history package reads the event log, for the dashboard and the command line."""

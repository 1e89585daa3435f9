"""The doctor checks a state folder and a running system for errors."""

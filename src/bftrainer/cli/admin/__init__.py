"""Commands of the live system for its administrators."""

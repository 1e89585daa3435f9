"""Owners as users of the system: their accounts, and the secrets that keep them apart."""

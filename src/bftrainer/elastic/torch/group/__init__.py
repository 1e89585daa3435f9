"""Process-group package: forms the group of a generation, frees it from lost peers, and leaves it."""

"""Process package: starts, warms up and ends worker processes, and runs commands with limits.

It imports only the standard library and `bftrainer.errors`.
"""

"""Process package: starts, warms up and ends worker processes.

It imports only the standard library and `bftrainer.errors`.
"""

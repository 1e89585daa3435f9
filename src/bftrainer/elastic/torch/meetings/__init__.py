"""Meetings package: brings all ranks together outside of steps for shared values, evaluations and loop ends."""

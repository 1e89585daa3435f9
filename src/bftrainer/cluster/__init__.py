"""The live system: a controller, its agents and the pools that nodes come from, on the wall clock.

The decision is the simulator's (`bftrainer.scheduler`); this package finds out what is, carries out what was decided,
and remembers both.
"""

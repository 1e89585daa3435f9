"""The live system runs trainers on a cluster: a controller, its agents and the pools that supply nodes.

It runs on the wall clock and uses the simulator's scheduler (`bftrainer.scheduler`) for its decisions. This package
observes nodes and trainers, carries out the decisions, and stores both.
"""

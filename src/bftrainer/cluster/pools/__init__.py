"""Pools supply the nodes: one sub-package per kind, all behind `base.Pool`."""

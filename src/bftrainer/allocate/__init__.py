"""Allocators: decide how many nodes each trainer gets, and placements decide which ones."""

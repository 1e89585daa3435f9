"""Imports ahead: warm parents that have imported what a certain script imports."""

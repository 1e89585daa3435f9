"""Utility package: helpers that any part of BFTrainer may use.

It imports nothing of BFTrainer but `errors`.
"""

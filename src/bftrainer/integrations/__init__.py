"""Integrations of training frameworks: each module makes scripts of one framework elastic.

A script imports one of them, and its framework must be installed. Nothing else in BFTrainer imports this package.
"""

"""Forecasts of when trainers will be done: futures drawn from a pool's past, and replays of the trainers in them."""

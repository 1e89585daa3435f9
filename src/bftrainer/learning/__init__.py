"""Learning: what is believed of a script's speed and costs from what its trainers measured.

It has no clock and no input or output, so that learning is developed on replays. `trials` is the entrance;
`simulate.knowledge` uses it.
"""

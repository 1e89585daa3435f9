"""Learning: what is believed of a script's speed and costs from what its trainers measured. Pure: no input or output.

The live system and the simulator use the same code, so learning is developed on replays. `trials` is the entrance.
"""

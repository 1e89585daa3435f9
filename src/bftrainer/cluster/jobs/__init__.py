"""Jobs manage the workers of one trainer: which should run, their generation, and what is learned from them."""

"""Ways to make a script elastic: one module per kind of script, with its evidence, changes and notices."""

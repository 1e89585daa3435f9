"""Training in a script: its loops, its objects, its losses, and the values that it carries along."""

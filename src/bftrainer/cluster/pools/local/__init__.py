"""The local pool runs fake nodes on this machine, one agent process each."""

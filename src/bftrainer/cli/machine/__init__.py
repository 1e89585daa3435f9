"""Commands that study a machine: traces, simulations, the paper."""

"""Finishing times of trainers in the live system: what is asked, the process that computes it, and its CPU budget."""

"""Retention removes files of finished trainers by age, by size and on request, and measures what owners use."""

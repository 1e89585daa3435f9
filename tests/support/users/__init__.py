"""Unix users that tests make as root and remove again, and what is needed to run programs as them."""

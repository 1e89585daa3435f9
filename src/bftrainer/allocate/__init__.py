"""One question, how many nodes each trainer gets and which, answered in several ways."""
